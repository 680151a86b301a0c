"""The compressor and its projections in torch, and random inputs for them; see the package docstring.

The inputs are chunks of several requests, whose unused blocks are NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.mla_decode.reference import rope_inputs
from dsv4_kernels.numerics import dequantize_e4m3, ds_mla, e4m3_decode, quantize_e4m3, rotate, seeded


def state_block(ratio: int) -> int:
    """Tokens of a block of vLLM's state cache."""
    return 4 if ratio == 4 else 8


def cache_stride(head: int, page: int) -> int:
    """Bytes between pages of vLLM's caches."""
    return ds_mla(page).page_bytes if head == 512 else page * 132


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
    """Write into kv_cache in place and return it; its last size (584 or 132) determines the head."""
    page = kv_cache.shape[1]
    head = 512 if kv_cache.shape[2] == 584 else 128
    tokens = slot_mapping.shape[0]
    wanted = (slot_mapping >= 0) & (kv_slot_mapping >= 0) & ((positions[:tokens] + 1) % compress_ratio == 0)
    kept = wanted.nonzero()[:, 0]
    positions, slots = positions[kept], kv_slot_mapping[kept]
    table = block_table[token_to_req_indices[kept].long()]
    x = _compressed(state_cache, positions, table, head, compress_ratio)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + rms_norm_eps) * rms_norm_weight.double()
    turned = rotate(x, positions // compress_ratio * compress_ratio, cos_sin_cache)
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


# Stands for values that were never written, so that two caches can be compared by value.
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


def width_of(params: Mapping[str, Any]) -> int:
    """W: columns of kv, and of score."""
    return int(params["head"]) * (2 if params["ratio"] == 4 else 1)


def _chunks(params: Mapping[str, Any], draw: torch.Generator) -> list[tuple[int, int]]:
    """(first position, tokens) of each request's chunk; chunks of 1 are decodes."""
    tokens, ratio = params["tokens"], params["ratio"]
    if params.get("dense"):
        # One prefill, or decodes that all end a window.
        return [(0, tokens)] if tokens > 64 else [(ratio * (30 + i) - 1, 1) for i in range(tokens)]
    chunks, left = [(0, min(tokens, ratio + 3))], tokens - min(tokens, ratio + 3)
    while left:
        size = min(left, int(torch.randint(1, 2 * ratio, (1,), generator=draw)) if len(chunks) % 3 else 1)
        start = int(torch.randint(0, 4 * ratio, (1,), generator=draw))
        chunks.append((start // ratio * ratio + ratio - 1 if size == 1 else start, size))
        left -= size
    return chunks


def _layout(params: Mapping[str, Any], seed: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Positions, requests, tables and slots on the CPU, the count of state blocks, and the count of cache slots."""
    draw = torch.Generator().manual_seed(seed)
    tokens, ratio, block = params["tokens"], params["ratio"], state_block(params["ratio"])
    chunks = _chunks(params, draw) if tokens else []
    widest = max((start + size for start, size in chunks), default=0) // block + 1
    # Block 0 stays NaN, as the null block to which unused entries of the table point.
    table = torch.randperm(max(1, len(chunks)) * widest, generator=draw).view(-1, widest).int() + 1
    positions = torch.cat([torch.arange(s, s + n) for s, n in chunks] or [torch.zeros(0, dtype=torch.int64)])
    requests = torch.cat([torch.full((n,), i) for i, (_, n) in enumerate(chunks)] or [torch.zeros(0)]).int()
    slots = table[requests.long(), positions // block].long() * block + positions % block
    count = 2 * tokens + 8
    cache_slots = torch.randperm(count, generator=draw)[:tokens]
    ends = (positions + 1) % ratio == 0
    cache_slots = torch.where(ends, cache_slots, -1)
    used = 1 + table.numel()
    for request, (start, size) in enumerate(chunks):
        window = start - 2 * ratio
        gone = torch.arange(widest) * block + block <= window
        behind = torch.arange(widest) * block >= start + size
        table[request][gone | behind] = 0
    if tokens > 4 and not params.get("dense"):
        # Padding of a captured batch, and an entry that another rank holds.
        slots[-2:] = -1
        cache_slots[int(ends.nonzero()[0]) if bool(ends.any()) else 0] = -1
    # Garbage behind the counted tokens: T' is larger than T.
    pad = torch.nn.functional.pad
    return {
        "positions": pad(positions, (0, 3), value=ratio - 1),
        "token_to_req_indices": pad(requests, (0, 3)),
        "block_table": table,
        "slot_mapping": slots,
        "kv_slot_mapping": cache_slots,
    }, used, count  # fmt: skip


def _states(params: Mapping[str, Any], device: torch.device, seed: int, blocks: int) -> torch.Tensor:
    """A state cache whose blocks are a little apart, filled but for block 0."""
    draw = seeded(device, seed)
    block, width = state_block(params["ratio"]), 2 * width_of(params)
    stride = params.get("state_stride", block * width)
    flat = torch.randn((blocks, stride), generator=draw, device=device)
    flat[0] = torch.nan
    return flat[:, : block * width].unflatten(1, (block, width))


def save_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `compressor_save`; kv and score are halves of one projection, as in the model."""
    layout, blocks, _ = _layout(params, seed)
    draw = seeded(device, seed)
    width = width_of(params)
    both = torch.randn((len(layout["positions"]), 2 * width), generator=draw, device=device)
    return {
        "kv": both[:, :width],
        "score": both[:, width:],
        "ape": torch.randn((params["ratio"], width), generator=draw, device=device),
        "positions": layout["positions"].to(device),
        "state_cache": _states(params, device, seed, blocks),
        "slot_mapping": layout["slot_mapping"].to(device),
    }


def store_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `compressor_store` and `compressor_store_indexer`."""
    layout, blocks, count = _layout(params, seed)
    draw = seeded(device, seed + 1)
    head, page = params["head"], params["page"]
    bytes_each = 584 if head == 512 else 132
    stride = params.get("cache_stride", cache_stride(head, page))
    cache = torch.full((-(-count // page), stride), 0xFF, dtype=torch.uint8, device=device)
    weight = 1 + 0.2 * torch.randn((head,), generator=draw, device=device)
    rope = rope_inputs(0, torch.Generator().manual_seed(0))["cos_sin"]
    longest = int(layout["positions"].max()) + 1 if len(layout["positions"]) else 1
    rope = rope.repeat(-(-longest // len(rope)), 1)
    return {
        "state_cache": _states(params, device, seed, blocks),
        **{name: value.to(device) for name, value in layout.items()},
        "rms_norm_weight": weight.bfloat16() if params["ratio"] == 4 else weight,
        "rms_norm_eps": 1e-6,
        "cos_sin_cache": rope.to(device),
        "kv_cache": cache[:, : page * bytes_each].unflatten(1, (page, bytes_each)),
        "compress_ratio": params["ratio"],
    }


def projections(
    x: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    ape: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_weight: torch.Tensor | None = None,
    index_ape: torch.Tensor | None = None,
    index_state_cache: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    head_weight: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Write into the state caches; return (state_cache,) or (state_cache, index_state_cache, heads)."""

    def saved(
        weight: torch.Tensor, ape: torch.Tensor, state_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        kept = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block = slot_mapping[kept], state_cache.shape[1]
        kv, score = (x[kept].double() @ weight.double().t()).chunk(2, 1)
        rows = torch.cat((kv, score + ape.double()[positions[kept] % ape.shape[0]]), 1)
        cache = state_cache.double()
        cache[slots // block, slots % block] = rows
        state_cache.copy_(cache)
        return cache if exact else state_cache

    state = saved(weight, ape, state_cache, slot_mapping)
    if (
        index_weight is None
        or index_ape is None
        or index_state_cache is None
        or index_slot_mapping is None
        or head_weight is None
    ):
        return (state,)
    heads = x.double() @ head_weight.double().t()
    index_state = saved(index_weight, index_ape, index_state_cache, index_slot_mapping)
    return state, index_state, heads if exact else heads.bfloat16()
