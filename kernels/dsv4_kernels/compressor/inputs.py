"""Random inputs for the compressor: chunks of several requests, whose unused blocks are NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.compressor.configs import cache_stride, state_block
from dsv4_kernels.mla_merge.api import rope_inputs
from dsv4_kernels.numerics import seeded


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
