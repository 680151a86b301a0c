"""Random inputs for the indexer: what no row may see is NaN, in keys, scales, pages and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.mla_merge.api import rope_inputs
from dsv4_kernels.numerics import e4m3_encode, seeded


def query_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `indexer_query`."""
    draw = torch.Generator().manual_seed(seed)
    tokens, heads = params["tokens"], params["heads"]
    rope = rope_inputs(tokens, draw)
    q = torch.randn((tokens, heads, 128), generator=draw)
    q *= torch.exp2(torch.randint(-16, 8, (tokens, heads, 1), generator=draw).float())
    weights = torch.randn((tokens, heads), generator=draw)
    return {
        "positions": rope["positions"].to(device),
        "index_q": q.bfloat16().to(device),
        "index_q_cos_sin_cache": rope["cos_sin"].to(device),
        "index_weights": (weights if heads % 32 else weights.bfloat16()).to(device),
        "index_weights_softmax_scale": 128**-0.5,
        "index_weights_head_scale": heads**-0.5,
    }


def _codes(shape: tuple[int, ...], draw: torch.Generator, device: torch.device) -> torch.Tensor:
    return e4m3_encode(64 * torch.randn(shape, generator=draw, device=device))


def _rows(rows: int, heads: int, draw: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    weights = torch.randn((rows, heads), generator=draw, device=device)
    return {"q": _codes((rows, heads, 128), draw, device), "weights": weights}


def logits_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `indexer_logits`: two requests behind each other in the keys, causal with ratio 4, some rows empty."""
    draw = seeded(device, seed)
    rows, keys, heads = params["rows"], params["keys"], params["heads"]
    scale = torch.exp2(torch.randint(-8, 3, (keys,), generator=draw, device=device).float())
    k = _codes((keys, 128), draw, device)
    row = torch.arange(rows, device=device)
    half = keys if params.get("dense") else keys // 2
    second = row * half >= rows * half // 2 if half < keys else row < 0
    start = torch.where(second, half, 0)
    end = start + (row % max(1, rows // 2) + 1) * half // max(1, rows // 2)
    end = torch.minimum(end, torch.where(second, keys, half))
    if params.get("dense"):
        end = keys - (rows - 1 - row) // 4
    elif rows > 3:
        end[2] = start[2]
    return {
        **_rows(rows, heads, draw, device),
        "k": k,
        "k_scale": scale,
        "cu_seqlen_ks": start.int(),
        "cu_seqlen_ke": end.int(),
        # Wider than any row needs, and NaN-free: what is outside stays as it is.
        "out": torch.full((rows, (keys + 7) // 4 * 4), -torch.inf, device=device),
    }


def paged_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Inputs of `indexer_paged_logits`: pages in any order with NaN pages between, unequal lengths, one of them 0."""
    draw = seeded(device, seed)
    batch, next_n, keys, heads, page = (params[name] for name in ("batch", "next_n", "keys", "heads", "page"))
    each = -(-keys // page)
    stride = params.get("stride", page * 132)
    cache = torch.full((batch * each + 1, stride), 0xFF, dtype=torch.uint8, device=device)
    used = cache[1:]
    used[:, : page * 128] = _codes((batch * each, page * 128), draw, device)
    scales = torch.exp2(torch.randint(-8, 3, (batch * each, page), generator=draw, device=device).float())
    used[:, page * 128 : page * 132] = scales.view(torch.uint8)
    table = torch.randperm(batch * each, generator=draw, device=device).view(batch, each).int() + 1
    lengths = torch.full((batch, next_n), keys, device=device)
    if not params.get("dense"):
        lengths = torch.randint(0, keys + 1, (batch, next_n), generator=draw, device=device)
        if batch > 1:
            lengths[1] = 0
    gone = torch.arange(each, device=device) * page >= lengths.amax(1, keepdim=True)
    rows = _rows(batch * next_n, heads, draw, device)
    return {
        "q": rows["q"].view(batch, next_n, heads, 128),
        "kv_cache": cache[:, : page * 132].unflatten(1, (page, 132)),
        "weights": rows["weights"],
        "context_lens": lengths.int(),
        # Entries beyond the context point at no page at all.
        "block_tables": table.masked_fill(gone, 2**31 - 1),
        "out": torch.full((batch * next_n, keys + 5), -torch.inf, device=device),
    }
