"""The compressor in torch; see the package docstring."""

from __future__ import annotations

import torch

from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.numerics import dequantize_e4m3, e4m3_decode, quantize_e4m3


def compressor_save(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    exact: bool = False,
) -> torch.Tensor:
    """Write into state_cache in place and return it."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots, block = slot_mapping[kept], state_cache.shape[1]
    rows = torch.cat((kv[kept], score[kept] + ape[positions[kept] % ape.shape[0]]), 1)
    state_cache[slots // block, slots % block] = rows
    return state_cache


def _compressed(
    state_cache: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head: int, ratio: int
) -> torch.Tensor:
    """Windows that end at positions [N] with block-table rows [N, ·] → float64 [N, head]."""
    block, width = state_cache.shape[1], state_cache.shape[2] // 2
    rows = ratio * (width // head)
    at = positions[:, None] - rows + 1 + torch.arange(rows, device=positions.device)
    there = at >= 0
    at = at.clamp_min(0)
    state = state_cache[table.gather(1, at // block).long(), at % block].double()
    first = (torch.arange(rows, device=positions.device) // ratio * head)[:, None] + torch.arange(
        head, device=positions.device
    )
    kv, score = (state.gather(2, (first + shift).expand(len(at), -1, -1)) for shift in (0, width))
    score = torch.where(there[:, :, None], score, -torch.inf)
    kv = torch.where(there[:, :, None], kv, 0.0)
    return (torch.softmax(score, 1) * kv).sum(1)


def _rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """The last 64 of x [N, head], as interleaved pairs, turned by the angles of positions [N]."""
    cos, sin = cos_sin_cache[positions].double().split(32, 1)
    even, odd = x[:, -64::2], x[:, -63::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(1)
    return torch.cat((x[:, :-64], turned), 1)


def compressor_store(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    compress_ratio: int,
    exact: bool = False,
) -> torch.Tensor:
    """Write into kv_cache in place and return it; its last size (584 or 132) tells the head."""
    page = kv_cache.shape[1]
    head = 512 if kv_cache.shape[2] == 584 else 128
    tokens = slot_mapping.shape[0]
    wanted = (slot_mapping >= 0) & (kv_slot_mapping >= 0) & ((positions[:tokens] + 1) % compress_ratio == 0)
    kept = wanted.nonzero()[:, 0]
    positions, slots = positions[kept], kv_slot_mapping[kept]
    table = block_table[token_to_req_indices[kept].long()]
    x = _compressed(state_cache, positions, table, head, compress_ratio)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + rms_norm_eps) * rms_norm_weight.double()
    turned = _rotate(x, positions // compress_ratio * compress_ratio, cos_sin_cache)
    flat = kv_cache.flatten(1).clone()
    where, offset = (slots // page)[:, None], (slots % page)[:, None]

    def put(values: torch.Tensor, start: int) -> None:
        width = values.shape[1]
        flat[where, start + offset * width + torch.arange(width, device=values.device)] = values

    if head == 512:
        layout = ds_mla(page)
        code, scale = quantize_e4m3(x[:, :448].float().bfloat16(), layout.group, 1e-4)
        rope = turned[:, 448:].float().bfloat16().contiguous().view(torch.uint8)
        put(torch.cat((code, rope), 1), 0)
        put(torch.nn.functional.pad(scale, (0, layout.scale_padding)), page * layout.data_row)
    else:
        code, scale = quantize_e4m3(turned.float().bfloat16(), 128, 1e-4)
        put(code, 0)
        put(torch.exp2(scale.float() - 127).view(torch.uint8), page * 128)
    return kv_cache.copy_(flat.view_as(kv_cache))


# Stands for what was never written, so that two caches can be compared by value.
NEVER = 12345.0


def mla_entries(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(kv_cache uint8 [pages, page, 584],) → float64 values of the 448 and of the 64, and the padding bytes."""
    (cache,) = outputs
    layout = ds_mla(cache.shape[1])
    flat = cache.flatten(1)
    data, scale = flat[:, : layout.tokens * layout.data_row], flat[:, layout.tokens * layout.data_row :]
    data, scale = data.unflatten(1, (layout.tokens, -1)), scale.unflatten(1, (layout.tokens, -1)).contiguous()
    nope = dequantize_e4m3(data[:, :, :448].contiguous(), scale[:, :, :7].contiguous(), layout.group)
    rope = data[:, :, 448:].contiguous().view(torch.bfloat16).double()
    return nope.nan_to_num(NEVER), rope.nan_to_num(NEVER), scale[:, :, 7]


def indexer_entries(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(kv_cache uint8 [pages, page, 132],) → (float64 [pages, page, 128],)."""
    (cache,) = outputs
    page = cache.shape[1]
    flat = cache.flatten(1)
    scale = flat[:, page * 128 :].contiguous().view(torch.float32).double()
    value = e4m3_decode(flat[:, : page * 128].contiguous()).unflatten(1, (page, 128)) * scale[:, :, None]
    return (value.nan_to_num(NEVER),)
