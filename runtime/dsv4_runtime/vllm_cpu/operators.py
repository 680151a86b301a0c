"""The operators of DeepSeek-V4 in vLLM's CPU build, in torch: for processors without vLLM's compiled ones.

vLLM compiles them for AVX-512 with BF16 only (`csrc/cpu/sgl-kernels`). These have the same signatures, tensors and
cache layouts; they serve the nano model and are not optimized. T is the number of tokens.

Source of the arithmetic and of the layout `fp8_ds_mla`: vLLM 0.32.0, `csrc/cpu/sgl-kernels/{mhc,store_cache,compressor,
indexer,paged_mqa_logits,topk,flash_mla}.cpp` and its Triton kernels in `models/deepseek_v4/common/ops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, refuse

NOPE, ROPE, TILE = 448, 64, 64
HEAD = NOPE + ROPE
_TILES = NOPE // TILE
_TOKEN_BYTES = NOPE + 2 * ROPE
"""Per token of an `fp8_ds_mla` block: FP8 without position, then bfloat16 with it."""
_SCALE_BYTES = _TILES + 1
"""Per token, after the tokens of the block: a power of two per tile, and padding."""
INDEX_HEAD = 128
_FP8_MAX = 448.0
_LEAST = 1e-4

_CACHE = "Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, int kv_cache_block_size, int compress_ratio) -> ()"
_STATE = "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, Tensor rms_norm_weight,"
_HC = "Tensor hc_fn, Tensor hc_scale, Tensor hc_base"
SIGNATURES = {
    "convert_weight_packed": "(Tensor(a) weight) -> Tensor(a)",
    "bmm_cpu": "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "hc_pre_fused_cpu": (
        f"(Tensor x, {_HC}, int hc_mult, int sinkhorn_iters, float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
    ),
    "hc_post_fused_cpu": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "hc_head_fused_cpu": f"(Tensor x, {_HC}, float hc_eps, float norm_eps) -> Tensor",
    "fused_qnorm_rope_kv_insert_cpu": (
        "(Tensor q, Tensor kv, Tensor positions, Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, Tensor cos_sin_cache,"
        " int q_head_padded, float eps, int cache_block_size) -> Tensor"
    ),
    "inverse_gptj_rope_o_proj_cpu": "(Tensor o, Tensor positions, Tensor cos_sin_cache, int rope_dim) -> Tensor",
    "flash_mla_with_kvcache_cpu": (
        "(Tensor(a!) out, Tensor q, Tensor window_cache_2d, Tensor window_slots, int window_block_size,"
        " Tensor compressed_cache_2d, Tensor compressed_slots, int compressed_block_size, Tensor attn_sink,"
        " float scale) -> ()"
    ),
    "save_partial_states_cpu": (
        "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, Tensor slot_mapping) -> ()"
    ),
    "compress_norm_rope_store_cpu": f"{_STATE} float rms_norm_eps, {_CACHE}",
    "compress_norm_rope_store_indexer_cpu": f"{_STATE} float rms_norm_eps, {_CACHE}",
    "fused_indexer_q_rope_quant_cpu": (
        "(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, Tensor(a!) index_q_fp8, Tensor index_weights,"
        " float index_weights_softmax_scale, float index_weights_head_scale, Tensor(b!) index_weights_out) -> ()"
    ),
    "fp8_paged_mqa_logits_cpu": (
        "(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, Tensor page_table, int block_size,"
        " int max_seq_len) -> Tensor"
    ),
    "topk_transform_512_cpu": (
        "(Tensor scores, Tensor seq_lens, Tensor page_tables, Tensor(a!) out_page_indices, int page_size,"
        " Tensor(b!)? out_raw_indices) -> ()"
    ),
    "biased_topk_cpu": (
        "(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, bool renormalize,"
        " str scoring_func, int num_fused_shared_experts, float? routed_scaling_factor,"
        " bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)"
    ),
    "hash_topk_cpu": (
        "(Tensor gating_output, Tensor tid2eid, int topk, str scoring_func, int num_fused_shared_experts,"
        " int num_experts, float routed_scaling_factor) -> (Tensor, Tensor)"
    ),
}


def rotate(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply the rotary embedding to neighbouring pairs (GPT-J's order).

    Args:
        x: float32 `[..., R]`.
        cos_sin: float32, broadcast to `[..., R]`: R/2 cosines, then R/2 sines.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    sin = -sin if inverse else sin
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rms(x: Tensor, eps: float) -> Tensor:
    """Return `x` divided by the root of the mean square of its last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fp8(x: Tensor) -> Tensor:
    """Return `x` as float8_e4m3fn, saturated to the range of the type."""
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two per row `[..., 1]` that scales its values into the range of FP8."""
    return torch.exp2((x.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / _FP8_MAX).log2().ceil())


def byte_places(block_size: int, slots: Tensor, begin: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices into `[blocks, bytes]` of `width` bytes per slot; slot 0 of a block starts at byte `begin`."""
    return (slots // block_size)[:, None], begin + (slots % block_size)[:, None] * width + torch.arange(width)


def write_mla(cache: Tensor, block_size: int, slots: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write tokens to a cache of the layout `fp8_ds_mla`.

    Args:
        cache: uint8 `[blocks, bytes]`, changed.
        slots: int64 `[T]`, all of them valid.
        nope: bfloat16 `[T, 448]`, stored as FP8 with a power of two for every 64.
        rope: bfloat16 `[T, 64]`.
    """
    tiles = nope.float().view(-1, _TILES, TILE)
    exponent = (tiles.abs().amax(-1) / _FP8_MAX).clamp_min(_LEAST).log2().ceil()
    values = fp8(tiles * torch.exp2(-exponent)[..., None]).view(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad(exponent + 127, (0, 1)).to(torch.uint8)
    cache[byte_places(block_size, slots, 0, _TOKEN_BYTES)] = torch.cat((values, rope.contiguous().view(torch.uint8)), 1)
    cache[byte_places(block_size, slots, block_size * _TOKEN_BYTES, _SCALE_BYTES)] = scales


def read_mla(cache: Tensor, block_size: int, slots: Tensor) -> Tensor:
    """Return tokens written by `write_mla`: float32 `[T, 512]` with bfloat16 precision."""
    tokens = cache[byte_places(block_size, slots, 0, _TOKEN_BYTES)]
    scales = cache[byte_places(block_size, slots, block_size * _TOKEN_BYTES, _SCALE_BYTES)][:, :_TILES]
    tiles = tokens[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, _TILES, TILE)
    nope = (tiles * torch.exp2(scales.float() - 127)[..., None]).flatten(1).bfloat16()
    return torch.cat((nope, tokens[:, NOPE:].contiguous().view(torch.bfloat16)), 1).float()


def convert_weight_packed(weight: Tensor) -> Tensor:
    """Return `weight` unchanged: no packed order is faster here."""
    return weight


def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """Compute `out[b] = mat1[b] @ mat2[b].T`: `[B, M, N]`, `[B, M, K]`, `[B, N, K]`.

    Raises:
        ValueError: FP8 weights.
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
        the input `[T, D]` in the type of `x`, the output gates `[T, H]`, and the mixing matrix of the streams
        `[T, H, H]` with row and column sums of 1; both float32.
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
    """Return the streams `[T, H, D]` after a layer: the gated output `x` `[T, D]` plus the mixed old streams."""
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
    """Normalize and rotate queries `[T, heads, 512]`; write rotated keys `[T, 512]` to the window cache.

    Returns:
        queries `[T, q_head_padded, 512]`; the added heads are zero.
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
    """Compute the attention of each token over its selected slots; -1 is no slot. Keys are also the values.

    Args:
        out, q: bfloat16 `[T, heads, 512]`; `out` is changed.
        window_slots, compressed_slots: int64 `[T, any]`.
        attn_sink: float32 `[heads]`, the logit of a key with value zero.
    """
    caches = (
        (window_cache_2d, window_block_size, window_slots),
        (compressed_cache_2d, compressed_block_size, compressed_slots),
    )
    keys, seen = [], []
    for cache, block_size, slots in caches:
        valid = slots >= 0
        # Neighbouring tokens share most keys: each key is read once, and masked per token.
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
    """Store the inputs of a compressor's pooling: `kv` and `score` `[T, W]`, the score with the position bias `ape`.

    Args:
        ape: float32 `[ratio, W]`.
        state_cache: float32 `[blocks, block, 2 * W]`, changed.
    """
    written = slot_mapping >= 0
    slots, block = slot_mapping[written], state_cache.shape[1]
    position = positions[: len(slot_mapping)][written]
    biased = score[: len(slot_mapping)][written] + ape[position % len(ape)]
    state_cache[slots // block, slots % block] = torch.cat((kv[: len(slot_mapping)][written], biased), 1)


def _compress(
    write: Callable[[Tensor, int, Tensor, Tensor, Tensor], None],
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
    """Pool each complete group of `compress_ratio` tokens into one key, and write it to the cache.

    Args:
        write: writes unrotated and rotated values (float32) to slots of a cache.
        gather_slots: int64 `[T, window]`, rows of `state_cache`; -1 is none.
        kv_slot_mapping: int64 `[T]`, slots of `kv_cache_2d`; -1 is none.
    """
    ends = (positions[: len(gather_slots)] + 1) % compress_ratio == 0
    ends &= kv_slot_mapping[: len(gather_slots)] >= 0
    slots, position, gathered = kv_slot_mapping[ends[: len(kv_slot_mapping)]], positions[ends], gather_slots[ends]
    block, head = state_cache.shape[1], len(rms_norm_weight)
    rows = state_cache[gathered.clamp_min(0) // block, gathered.clamp_min(0) % block]
    value, score = rows.chunk(2, dim=-1)
    if value.shape[-1] > head:
        # Groups overlap: the first half of the window is the previous group, in separate columns.
        before = torch.arange(gathered.shape[1])[:, None] < compress_ratio
        value, score = (torch.where(before, *part.split(head, dim=-1)) for part in (value, score))
    shares = torch.softmax(score.masked_fill((gathered < 0)[..., None], -torch.inf), 1)
    pooled = rms((shares * value).sum(1), rms_norm_eps) * rms_norm_weight
    rope = rotate(pooled[:, -ROPE:], cos_sin_cache[position // compress_ratio * compress_ratio])
    write(kv_cache_2d, kv_cache_block_size, slots, pooled[:, :-ROPE], rope)


def _write_entry(cache: Tensor, block: int, slots: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write to a cache of the layout `fp8_ds_mla`."""
    write_mla(cache, block, slots, nope.bfloat16(), rope.bfloat16())


def _write_index_key(cache: Tensor, block: int, slots: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write the indexer's keys: 128 FP8 values per token; the float32 scales follow the tokens of a block."""
    key = torch.cat((nope, rope), 1).bfloat16().float()
    scale = power_of_two(key)
    cache[byte_places(block, slots, 0, INDEX_HEAD)] = fp8(key / scale).view(torch.uint8)
    cache[byte_places(block, slots, block * INDEX_HEAD, 4)] = scale.contiguous().view(torch.uint8)


compress_norm_rope_store_cpu = functools.partial(_compress, _write_entry)
compress_norm_rope_store_indexer_cpu = functools.partial(_compress, _write_index_key)


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
    """Rotate the indexer's queries `[T, heads, 128]` and quantize them to FP8; the head weights absorb the scales.

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
    """Return the score of each key per query: the weighted sum of the heads' positive products.

    Args:
        q_fp8: float8_e4m3fn `[B, heads, 128]`.
        kvcache_fp8: uint8 `[pages, bytes]`, as `compress_norm_rope_store_indexer_cpu` fills it.
        weight: float32 `[B, heads]`.
        page_table: int `[B, pages]`.

    Returns:
        float32 `[B, max_seq_len]`; undefined beyond a row's length in `seq_lens`.
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
    """Select the 512 keys with the highest scores per query; -1 where there are fewer.

    Args:
        scores: float32 `[B, keys]`.
        out_page_indices, out_raw_indices: int32 `[B, >= 512]`, changed: positions in the cache, and in the sequence.
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
    """Return weights and indices of the experts selected by the token id (`tid2eid`, int32 `[T, topk]`).

    Raises:
        ValueError: with shared experts among them, or a score of another kind.
    """
    weights = _scored(gating_output, scoring_func, num_fused_shared_experts).gather(1, tid2eid.long())
    if scoring_func != "softmax":
        weights = weights * (routed_scaling_factor / weights.sum(-1, keepdim=True))
    return weights, tid2eid.int()


@functools.cache
def _library() -> Any:
    # Operators exist as long as their library.
    return torch.library.Library("_C", "FRAGMENT")


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform

    missing = [name for name in SIGNATURES if not hasattr(torch.ops._C, name)]
    if not current_platform.is_cpu() or not missing:
        return PatchOutcome.NOT_WANTED
    if len(missing) != len(SIGNATURES):
        raise refuse("torch.ops._C", f"it lacks {missing} and has the others, expected all or none of them")
    for name, signature in SIGNATURES.items():
        _library().define(name + signature)
        _library().impl(name, globals()[name], "CPU")
    return PatchOutcome.APPLIED


PATCH = Patch(
    module="vllm.models.deepseek_v4.cpu.cpu_sparse",
    symbol="torch.ops._C",
    why=(
        "the operators of DeepSeek-V4 are compiled for AVX-512 with BF16 only; on other x86-64 processors loading"
        " ends with `'_OpNamespace' '_C' object has no attribute 'convert_weight_packed'`"
    ),
    upstream="none: `VLLM_EXT_SRC_SGL` in `cmake/cpu_extension.cmake` belongs to the AVX-512 library",
    versions="vLLM 0.32.0",
    obsolete_when="`vllm._C_AVX2` has the operators",
    apply=_apply,
)
