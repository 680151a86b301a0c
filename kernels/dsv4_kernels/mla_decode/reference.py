"""Sparse MLA decode and its merges in torch, float64 inside, and random inputs for them.

The inputs contain poisoned slots, gaps, duplicates and empty rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.mla_cache.api import gather, mla_cache_write
from dsv4_kernels.numerics import ds_mla, quantize_e4m3, rotate, seeded

O8_FLOOR = 1e-10


def mla_merge(
    o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """o bf16 [S, T, H, 512], lse float32 [S, T, H], sink float32 [H] → (o [T, H, 512], lse [T, H])."""
    lse = torch.where(torch.isinf(lse), -torch.inf, lse.double())
    empty = lse == -torch.inf
    whole = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - whole.masked_fill(whole == -torch.inf, 0.0))
    parts = torch.where(empty[..., None], 0.0, o.double())
    merged = (weight[..., None] * parts).sum(0)
    share = torch.where(whole == -torch.inf, 0.0, 1.0 / (1.0 + torch.exp(sink.double() - whole)))
    merged = merged * share[..., None]
    return (merged, whole) if exact else (merged.to(torch.bfloat16), whole.float())


def mla_merge_two(
    o0: torch.Tensor, lse0: torch.Tensor, o1: torch.Tensor, lse1: torch.Tensor, sink: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two subsets held apart, [T, H, 512] and [T, H] each."""
    return mla_merge(torch.stack((o0, o1)), torch.stack((lse0, lse1)), sink, exact)


def mla_merge_o8(
    o: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge, rotate back, quantise: → (code uint8 [T, H, 512], scale uint8 [T, H, 4]); `exact` changes nothing."""
    merged, _ = mla_merge(o, lse, sink, exact=True)
    return quantize_e4m3(rotate(merged, positions, cos_sin, back=True).float(), 128, O8_FLOOR)


SCALE = 512**-0.5


def _entries(
    cache: torch.Tensor, page: int, idx: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows float64 [T, N, 512] (zeros where there is no entry) and validity [T, N]."""
    column = torch.arange(idx.shape[1], device=idx.device)
    valid = (idx >= 0) & (column[None, :] < length[:, None])
    rows = gather(cache, torch.where(valid, idx, -1).flatten(), ds_mla(page)).unflatten(0, idx.shape)
    return rows, valid


def looked_up(
    idx: torch.Tensor, page: int, table: torch.Tensor, request: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots int32 [T, K] and lengths int32 [T] of entries that are counted in their requests."""
    place = idx.clamp_min(0).long()
    slots = table[request.long()].gather(1, place // page) * page + place % page
    return torch.where(idx >= 0, slots, -1).int(), counts.int() * idx.shape[1]


def mla_decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_idx: torch.Tensor,
    swa_len: torch.Tensor,
    cmp_cache: torch.Tensor,
    cmp_idx: torch.Tensor,
    cmp_len: torch.Tensor | None,
    sink: torch.Tensor,
    pages: tuple[int, int] = (64, 64),
    exact: bool = False,
    table: torch.Tensor | None = None,
    request: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring; `pages` are the page sizes of both caches in tokens. Returns (o, lse)."""
    if cmp_len is None:
        cmp_idx, cmp_len = looked_up(cmp_idx, pages[1], *(x for x in (table, request, counts) if x is not None))
    outputs, lses = [], []
    # A few tokens at a time: the gathered rows are float64.
    for part in torch.arange(q.shape[0], device=q.device).split(64):
        rows, valid = _entries(swa_cache, pages[0], swa_idx[part], swa_len[part])
        if cmp_idx.shape[1]:
            more, more_valid = _entries(cmp_cache, pages[1], cmp_idx[part], cmp_len[part])
            rows, valid = torch.cat((rows, more), 1), torch.cat((valid, more_valid), 1)
        s = torch.einsum("thd,tnd->thn", q[part].double(), rows) * SCALE
        s = s.masked_fill(~valid[:, None, :], -torch.inf)
        lse = torch.logsumexp(s, -1)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        share = 1.0 / (1.0 + torch.exp(sink.double()[None, :] - lse))
        # An empty row gives 0 also where the sink is −inf, for which the share is undefined.
        share = torch.where(lse == -torch.inf, 0.0, share)
        outputs.append(torch.einsum("thn,tnd->thd", p, rows) * share[..., None])
        lses.append(lse)
    o = torch.cat(outputs) if outputs else q.double()
    lse = torch.cat(lses) if lses else q[..., 0].double()
    return (o, lse) if exact else (o.to(torch.bfloat16), lse.float())


def mla_decode_o8(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_idx: torch.Tensor,
    swa_len: torch.Tensor,
    cmp_cache: torch.Tensor,
    cmp_idx: torch.Tensor,
    cmp_len: torch.Tensor | None,
    sink: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: tuple[int, int] = (64, 64),
    exact: bool = False,
    table: torch.Tensor | None = None,
    request: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring. Returns (code, scale)."""
    caches = (swa_cache, swa_idx, swa_len, cmp_cache, cmp_idx, cmp_len)
    o, _ = mla_decode(q, *caches, sink, pages, True, table, request, counts)
    return quantize_e4m3(rotate(o, positions, cos_sin, back=True).float(), 128, O8_FLOOR)


def rope_inputs(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random positions and a table of angles: {"positions": int64 [T], "cos_sin": float32 [4096, 64]}."""
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    positions = torch.randint(0, 4096, (tokens,), generator=generator)
    return {"positions": positions, "cos_sin": torch.cat((angle.cos(), angle.sin()), 1).float()}


def merge_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Draw parts, some of them empty (−inf) or infinite, and sinks that include both infinities."""
    generator = torch.Generator().manual_seed(seed)
    parts, tokens, heads = params["parts"], params["tokens"], params["heads"]
    o = torch.randn((parts, tokens, heads, 512), generator=generator).bfloat16()
    lse = torch.randn((parts, tokens, heads), generator=generator) * 4
    kind = torch.rand(lse.shape, generator=generator)
    lse = torch.where(kind < 0.1, -torch.inf, torch.where(kind < 0.15, torch.inf, lse))
    o = torch.where(torch.isinf(lse)[..., None], torch.nan, o)
    if tokens:
        lse[:, 0, 0], o[:, 0, 0] = -torch.inf, torch.nan
    sink = torch.randn((heads,), generator=generator) * 3
    sink[0], sink[-1] = -torch.inf, torch.inf
    return {"o": o.to(device), "lse": lse.to(device), "sink": sink.to(device)}


def merge_two_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Draw the two subsets of `mla_merge_two`."""
    whole = merge_inputs(params, device, seed)
    parts = {f"{name}{i}": whole[name][i].clone() for i in (0, 1) for name in ("o", "lse")}
    return {**parts, "sink": whole["sink"]}


def merge_o8_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Draw parts with positions and angles."""
    rope = rope_inputs(params["tokens"], torch.Generator().manual_seed(seed + 1))
    return {**merge_inputs(params, device, seed), **{name: tensor.to(device) for name, tensor in rope.items()}}


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
    """Return the same entries for a plan with a table of pages: two tokens per request, the last without entries."""
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
    # Scores of standard deviation around 1, outputs around 0.1, as the absolute limit assumes.
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
