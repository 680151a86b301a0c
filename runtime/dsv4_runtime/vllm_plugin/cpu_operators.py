"""The operators of DeepSeek-V4 in vLLM's CPU build, in torch: for processors on which vLLM has none.

vLLM compiles them for AVX-512 with BF16 only (`csrc/cpu/sgl-kernels`). These take and give the same tensors and lay
caches out alike; they are meant for the nano model, and nothing in them is fast. T is the number of tokens.

Source of the arithmetic: vLLM 0.32.0, `csrc/cpu/sgl-kernels/{mhc,store_cache,compressor,indexer,paged_mqa_logits,topk,
flash_mla}.cpp` and its Triton kernels in `models/deepseek_v4/common/ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_runtime.vllm_plugin.cpu_cache import (
    INDEX_HEAD,
    NOPE,
    ROPE,
    byte_places,
    fp8,
    power_of_two,
    read_mla,
    rms,
    rotate,
    write_mla,
)


def convert_weight_packed(weight: Tensor) -> Tensor:
    """Return the weight as it is: there is no other order of it that would help here."""
    return weight


def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """Compute `out[b] = mat1[b] @ mat2[b].T`: `[B, M, N]`, `[B, M, K]`, `[B, N, K]`.

    Raises:
        ValueError: for FP8 weights.
    """
    if scale is not None:
        raise ValueError("bmm_cpu with a scale: this processor has no FP8 products; use bf16 weights")
    out.copy_(torch.bmm(mat1.float(), mat2.float().transpose(1, 2)))


def hc_pre_fused_cpu(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix `hc_mult` residual streams (H) into the input of a layer.

    Args:
        x: `[T, H, D]`.
        hc_fn: float32 `[(2 + H) * H, H * D]`.
        hc_scale: float32 `[3]`.
        hc_base: float32 `[(2 + H) * H]`.

    Returns:
        the input `[T, D]` in the type of `x`, the gates of the output `[T, H]`, and how streams go over into one
        another `[T, H, H]`, whose rows and columns sum up to 1; both float32.
    """
    streams = x.float()
    mixes = rms(streams.flatten(1), rms_eps) @ hc_fn.float().T
    scales = hc_scale.float().repeat_interleave(torch.tensor([hc_mult, hc_mult, hc_mult * hc_mult]))
    pre, post, comb = (mixes * scales + hc_base.float()).split([hc_mult, hc_mult, hc_mult * hc_mult], dim=1)
    comb = torch.softmax(comb.view(-1, hc_mult, hc_mult), -1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    mixed = ((pre.sigmoid() + hc_eps)[..., None] * streams).sum(1)
    return mixed.to(x.dtype), 2 * post.sigmoid(), comb


def hc_post_fused_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams after a layer: its output `x` `[T, D]` through the gates, the old ones mixed: `[T, H, D]`."""
    carried = torch.bmm(comb.float().transpose(1, 2), residual.float())
    return (post.float()[..., None] * x.float()[:, None] + carried).to(x.dtype)


def hc_head_fused_cpu(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    """Mix the streams `[T, H, D]` for the last time: `[T, D]`. `hc_fn` is `[H, H * D]`."""
    streams = x.float()
    gates = (rms(streams.flatten(1), norm_eps) @ hc_fn.float().T * hc_scale.float() + hc_base.float()).sigmoid()
    return ((gates + hc_eps)[..., None] * streams).sum(1).to(x.dtype)


def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    swa_kv_cache_2d: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
) -> Tensor:
    """Normalise and rotate the queries `[T, heads, 512]`, and put keys `[T, 512]`, rotated, into the window's cache.

    Returns:
        queries `[T, q_head_padded, 512]`; heads beyond the given ones are zero.
    """
    angles = cos_sin_cache[positions]
    found = rms(q.float(), eps)
    found = torch.cat((found[..., :NOPE], rotate(found[..., NOPE:], angles[:, None])), -1).to(q.dtype)
    written = slot_mapping >= 0
    keys = kv[: len(slot_mapping)][written]
    rope = rotate(keys[:, NOPE:].float(), angles[: len(slot_mapping)][written]).bfloat16()
    write_mla(swa_kv_cache_2d, cache_block_size, slot_mapping[written], keys[:, :NOPE].bfloat16(), rope)
    return torch.nn.functional.pad(found, (0, 0, 0, q_head_padded - q.shape[1]))


def inverse_gptj_rope_o_proj_cpu(o: Tensor, positions: Tensor, cos_sin_cache: Tensor, rope_dim: int) -> Tensor:
    """Return the attention's output `[T, heads, 512]` without the rotation of its last `rope_dim`, float32."""
    x = o.float()
    turned = rotate(x[..., -rope_dim:], cos_sin_cache[positions][:, None], inverse=True)
    return torch.cat((x[..., :-rope_dim], turned), -1)


def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window_cache_2d: Tensor,
    window_slots: Tensor,
    window_block_size: int,
    compressed_cache_2d: Tensor,
    compressed_slots: Tensor,
    compressed_block_size: int,
    attn_sink: Tensor,
    scale: float,
) -> None:
    """Compute the attention of each token over the slots that were chosen for it; -1 is no slot. Keys are values too.

    Args:
        out, q: bfloat16 `[T, heads, 512]`; `out` is changed.
        window_slots, compressed_slots: int64 `[T, any]`.
        attn_sink: float32 `[heads]`, the logit of a key whose value is zero.
    """
    caches = (
        (window_cache_2d, window_block_size, window_slots),
        (compressed_cache_2d, compressed_block_size, compressed_slots),
    )
    keys, seen = [], []
    for cache, block_size, slots in caches:
        valid = slots >= 0
        # Neighbouring tokens see nearly the same keys, so each is read once and those of others are masked.
        unique, where = slots[valid].unique(return_inverse=True)
        mask = torch.zeros(len(slots), len(unique), dtype=torch.bool)
        mask[valid.nonzero()[:, 0], where] = True
        keys.append(read_mla(cache, block_size, unique))
        seen.append(mask)
    key, mask = torch.cat(keys), torch.cat(seen, 1)
    logits = (q.float().flatten(0, 1) @ key.T).view(*q.shape[:2], -1) * scale
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    sink = attn_sink.float()[None, :, None].expand(len(q), -1, 1)
    shares = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
    out.copy_((shares.flatten(0, 1) @ key).view_as(q))


def save_partial_states_cpu(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, state_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Keep what a compressor pools later: `kv` and `score` `[T, W]`, the score with its place's bias `ape`.

    Args:
        ape: float32 `[ratio, W]`.
        state_cache: float32 `[blocks, block, 2 * W]`, changed.
    """
    written = slot_mapping >= 0
    slots, block = slot_mapping[written], state_cache.shape[1]
    position = positions[: len(slot_mapping)][written]
    biased = score[: len(slot_mapping)][written] + ape[position % len(ape)]
    state_cache[slots // block, slots % block] = torch.cat((kv[: len(slot_mapping)][written], biased), 1)


def _pooled(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin_cache: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots, and what goes there without and with the rotation, of the tokens that end a group of `ratio`:
    float32.
    """
    ends = ((positions[: len(gather_slots)] + 1) % ratio == 0) & (kv_slot_mapping[: len(gather_slots)] >= 0)
    slots, position, gathered = kv_slot_mapping[ends[: len(kv_slot_mapping)]], positions[ends], gather_slots[ends]
    block, head = state_cache.shape[1], len(weight)
    rows = state_cache[gathered.clamp_min(0) // block, gathered.clamp_min(0) % block]
    value, score = rows.chunk(2, dim=-1)
    if value.shape[-1] > head:
        # Groups overlap: the first half of the window is the group before, which has columns of its own.
        before = torch.arange(gathered.shape[1])[:, None] < ratio
        value, score = (torch.where(before, *part.split(head, dim=-1)) for part in (value, score))
    shares = torch.softmax(score.masked_fill((gathered < 0)[..., None], -torch.inf), 1)
    pooled = rms((shares * value).sum(1), eps) * weight
    return slots, pooled, rotate(pooled[:, -ROPE:], cos_sin_cache[position // ratio * ratio])


def compress_norm_rope_store_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Pool each complete group of tokens into one key, and put it into a cache of the layout `fp8_ds_mla`.

    Args:
        gather_slots: int64 `[T, window]`, rows of `state_cache`; -1 is none.
        kv_slot_mapping: int64 `[T]`, slots of `kv_cache_2d`; -1 is none.
    """
    slots, pooled, rope = _pooled(
        state_cache, gather_slots, positions, kv_slot_mapping, rms_norm_weight, rms_norm_eps, cos_sin_cache,
        compress_ratio,
    )  # fmt: skip
    write_mla(kv_cache_2d, kv_cache_block_size, slots, pooled[:, :NOPE].bfloat16(), rope.bfloat16())


def compress_norm_rope_store_indexer_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Do the same for the indexer's keys: 128 values of FP8 a token, behind a block's tokens a float32 scale each."""
    slots, pooled, rope = _pooled(
        state_cache, gather_slots, positions, kv_slot_mapping, rms_norm_weight, rms_norm_eps, cos_sin_cache,
        compress_ratio,
    )  # fmt: skip
    key = torch.cat((pooled[:, :-ROPE], rope), 1).bfloat16().float()
    scale = power_of_two(key)
    cache, block = kv_cache_2d, kv_cache_block_size
    cache[byte_places(block, slots, 0, INDEX_HEAD)] = fp8(key / scale).view(torch.uint8)
    cache[byte_places(block, slots, block * INDEX_HEAD, 4)] = scale.contiguous().view(torch.uint8)


def fused_indexer_q_rope_quant_cpu(
    positions: Tensor,
    index_q: Tensor,
    index_q_cos_sin_cache: Tensor,
    index_q_fp8: Tensor,
    index_weights: Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_weights_out: Tensor,
) -> None:
    """Rotate the indexer's queries `[T, heads, 128]` and make them FP8; their scales go into the heads' weights.

    Args:
        index_q_fp8: float8_e4m3fn `[T, heads, 128]`, changed.
        index_weights_out: float32 `[T, heads]`, changed.
    """
    angles = index_q_cos_sin_cache[positions][:, None]
    nope, rope = index_q.split([index_q.shape[-1] - angles.shape[-1], angles.shape[-1]], dim=-1)
    query = torch.cat((nope, rotate(rope, angles).bfloat16().float()), -1)
    scale = power_of_two(query)
    index_q_fp8.copy_(fp8(query / scale))
    weights = index_weights * scale[..., 0] * index_weights_softmax_scale * index_weights_head_scale
    index_weights_out.copy_(weights)


def fp8_paged_mqa_logits_cpu(
    q_fp8: Tensor,
    kvcache_fp8: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    block_size: int,
    max_seq_len: int,
) -> Tensor:
    """Return how much each query wants each key: the heads' positive products, weighted and added up.

    Args:
        q_fp8: float8_e4m3fn `[B, heads, 128]`.
        kvcache_fp8: uint8 `[pages, bytes]`, as `compress_norm_rope_store_indexer_cpu` fills it.
        weight: float32 `[B, heads]`.
        page_table: int `[B, pages]`.

    Returns:
        float32 `[B, max_seq_len]`; what is beyond a row's length in `seq_lens` means nothing.
    """
    pages = page_table[:, : -(-max_seq_len // block_size)].long()
    used, where = pages.unique(return_inverse=True)
    cache = kvcache_fp8[used]
    keys = cache[:, : block_size * INDEX_HEAD].contiguous().view(torch.float8_e4m3fn).float()
    scales = cache[:, block_size * INDEX_HEAD : block_size * (INDEX_HEAD + 4)].contiguous().view(torch.float32)
    products = (q_fp8.float().flatten(0, 1) @ keys.view(-1, INDEX_HEAD).T).view(*q_fp8.shape[:2], -1)
    wanted = (products.relu() * weight[..., None]).sum(1) * scales.flatten()
    token = torch.arange(max_seq_len)
    return wanted.gather(1, where[:, token // block_size] * block_size + token % block_size)


def topk_transform_512_cpu(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None,
) -> None:
    """Find the 512 keys that each query wants most; -1 where there are fewer.

    Args:
        scores: float32 `[B, keys]`.
        out_page_indices, out_raw_indices: int32 `[B, >= 512]`, changed: places in the cache, and in the sequence.
    """
    count, lengths = scores.shape[1], seq_lens.long().clamp(0, scores.shape[1])[:, None]
    token, column = torch.arange(count), torch.arange(512)
    order = scores.masked_fill(token >= lengths, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :512]
    order = torch.nn.functional.pad(order, (0, 512 - order.shape[1]))
    chosen = torch.where(lengths <= 512, column, order)
    valid = column < lengths
    chosen = torch.where(valid, chosen, 0)
    places = page_tables.long().gather(1, chosen // page_size) * page_size + chosen % page_size
    out_page_indices[:, :512] = torch.where(valid, places, -1).int()
    if out_raw_indices is not None:
        out_raw_indices[:, :512] = torch.where(valid, chosen, -1).int()


def _scored(logits: Tensor, scoring_func: str, shared: int) -> Tensor:
    if shared:
        raise ValueError(f"num_fused_shared_experts is {shared}; without AVX-512 BF16 it has to be 0")
    match scoring_func:
        case "sqrtsoftplus":
            return torch.nn.functional.softplus(logits.float()).sqrt()
        case "sigmoid":
            return logits.float().sigmoid()
        case "softmax":
            return logits.float().softmax(-1)
    raise ValueError(f"scoring_func {scoring_func!r}; known are sqrtsoftplus, sigmoid and softmax")


def biased_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weights without the bias, and the experts with the highest biased score: float32, int32 `[T, topk]`.

    Raises:
        ValueError: with shared experts among them, or a score of another kind.
    """
    scores = _scored(gating_output, scoring_func, num_fused_shared_experts)
    experts = (scores + correction_bias.float()).topk(topk, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
        if apply_routed_scaling_factor_on_output:
            weights = weights * (routed_scaling_factor or 0.0)
    return weights, experts.int()


def hash_topk_cpu(
    gating_output: Tensor,
    tid2eid: Tensor,
    topk: int,
    scoring_func: str,
    num_fused_shared_experts: int,
    num_experts: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Return the weights of experts that the token's number has chosen (`tid2eid`, int32 `[T, topk]`), and these.

    Raises:
        ValueError: with shared experts among them, or a score of another kind.
    """
    weights = _scored(gating_output, scoring_func, num_fused_shared_experts).gather(1, tid2eid.long())
    if scoring_func != "softmax":
        weights = weights * (routed_scaling_factor / weights.sum(-1, keepdim=True))
    return weights, tid2eid.int()
