"""Random inputs for sparse MLA decode, with what breaks kernels in them: poisoned slots, gaps, duplicates, empty
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.mla_cache.reference import mla_cache_write
from dsv4_kernels.mla_merge.api import rope_inputs
from dsv4_kernels.numerics import seeded


def packed_cache(
    slots: int, page: int, stride: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in which every other slot is written and the rest is NaN bytes: (uint8 [pages, stride], written slots
    int64).
    """
    pages = -(-2 * slots // page) + 1
    cache = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=device)
    written = (torch.arange(slots) * 2).to(device)
    # Drawn on the device: a hundred thousand rows of 512 take seconds on a CPU.
    seed = int(torch.randint(0, 2**31, (1,), generator=generator))
    there = seeded(device, seed)
    kv = torch.randn((slots, 512), generator=there, device=device)
    kv *= torch.exp2(torch.randint(-6, -1, (slots, 1), generator=there, device=device).float())
    mla_cache_write(kv.bfloat16(), written, cache, page)
    return cache, written


def _index(
    tokens: int, width: int, written: torch.Tensor, generator: torch.Generator, dense: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of written slots with −1 anywhere, duplicates and lengths from 0 to the width; garbage behind the length."""
    if dense:
        pick = torch.randperm(written.shape[0], generator=generator)[: tokens * width].view(tokens, width)
        return written.cpu()[pick].int(), torch.full((tokens,), width, dtype=torch.int32)
    pick = torch.randint(0, written.shape[0], (tokens, width), generator=generator)
    idx = written.cpu()[pick]
    gaps = torch.rand(idx.shape, generator=generator) < 0.05
    idx = torch.where(gaps, -1, idx)
    length = torch.full((tokens,), width)
    if tokens > 1:
        # Half of the rows are full, as in serving; the others end anywhere.
        short = torch.randint(0, width + 1, (tokens,), generator=generator)
        length = torch.where(torch.arange(tokens) % 2 == 1, short, length)
    behind = torch.arange(width)[None, :] >= length[:, None]
    return torch.where(behind, 2**31 - 1, idx).int(), length.int()


def _counted_in_requests(
    idx: torch.Tensor, length: torch.Tensor, page: int, pages: int
) -> dict[str, torch.Tensor | None]:
    """Return the same entries for a plan that looks pages up. Two tokens are one request's; the last has no entries."""
    tokens, width = idx.shape
    request = torch.arange(tokens) // 2
    order = torch.rand((tokens, pages), generator=torch.Generator().manual_seed(tokens)).argsort(1)
    listed = (torch.arange(width)[None, :] < length[:, None]) & (idx >= 0)
    slot = torch.where(listed, idx, 0).long()
    place = order.argsort(1)[request].gather(1, slot // page) * page + slot % page
    counts = torch.arange(tokens) < max(1, tokens - 1)
    # Rows further apart than they are long, as the tables of an engine are.
    table = torch.nn.functional.pad(order, (0, 3), value=2**30).int()
    return {"cmp_idx": torch.where(listed, place, -1).int(), "table": table, "request": request.int(), "counts": counts}


def decode_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mla_decode` for tokens, heads, window, topk and optionally pages and strides; dense=True (benchmarks)
    leaves out gaps, short rows and infinite sinks."""
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, window, topk = (params[name] for name in ("tokens", "heads", "window", "topk"))
    dense = bool(params.get("dense"))
    pages = params.get("pages", (64, 64))
    strides = params.get("strides") or (ds_mla(pages[0]).page_bytes, ds_mla(pages[1]).page_bytes)
    # Scores of standard deviation around 1, outputs around 0.1: what the absolute limit is made for.
    q = (4 * torch.randn((tokens, heads, 512), generator=generator)).bfloat16()
    sink = torch.randn((heads,), generator=generator)
    inputs: dict[str, Any] = {"q": q}
    for name, width, page, stride in (("swa", window, pages[0], strides[0]), ("cmp", topk, pages[1], strides[1])):
        cache, written = packed_cache(max(1, width) * max(1, tokens), page, stride, generator, device)
        idx, length = _index(tokens, width, written, generator, dense)
        inputs |= {f"{name}_cache": cache, f"{name}_idx": idx, f"{name}_len": length}
    if tokens > 2 and not dense:
        inputs["swa_len"][-1] = inputs["cmp_len"][-1] = 0
    if heads > 2 and not dense:
        sink[0], sink[1] = -torch.inf, torch.inf
    inputs["sink"] = sink
    if params.get("lookup"):
        inputs |= _counted_in_requests(inputs.pop("cmp_idx"), inputs["cmp_len"], pages[1], inputs["cmp_cache"].shape[0])
        inputs["cmp_len"] = None
    inputs = {name: None if value is None else value.to(device) for name, value in inputs.items()}
    return {**inputs, "pages": pages}


def o8_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `mla_decode_o8`."""
    rope = rope_inputs(params["tokens"], torch.Generator().manual_seed(seed + 1))
    return {**decode_inputs(params, device, seed), **{name: tensor.to(device) for name, tensor in rope.items()}}
