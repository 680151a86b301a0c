"""The indexer in torch, and random inputs for it; see the package docstring.

Values of the inputs that no row may use are NaN, in keys, scales, pages and tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_kernels.mla_decode.reference import rope_inputs
from dsv4_kernels.numerics import e4m3_decode, e4m3_encode, quantize_e4m3, seeded


def indexer_query(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q uint8 [T, H, 128], weights float32 [T, H])."""
    cos, sin = index_q_cos_sin_cache[positions].float()[:, None].split(32, -1)
    x = index_q.float()
    even, odd = x[..., 64::2], x[..., 65::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    code, scale = quantize_e4m3(torch.cat((x[..., :64], turned), -1).bfloat16(), 128, 1e-4)
    weights = index_weights.double() * torch.exp2(scale[..., 0].double() - 127)
    weights = weights * index_weights_softmax_scale * index_weights_head_scale
    return code, weights if exact else weights.float()


def _scores(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [M, H, 128], k [N, 128] codes, scale [N], weights [M, H] → float64 [M, N], some rows at a time."""
    keys = e4m3_decode(k.view(torch.uint8)).t() * scale.double()
    parts = []
    for rows, weight in zip(q.view(torch.uint8).split(64), weights.double().split(64), strict=True):
        score = torch.relu(e4m3_decode(rows.contiguous()) @ keys)
        parts.append((score * weight[:, :, None]).sum(1))
    return torch.cat(parts) if parts else torch.zeros((0, k.shape[0]), dtype=torch.float64, device=q.device)


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor,
    exact: bool = False,
) -> torch.Tensor:
    """Write into out in place and return it (exact: return a float64 copy)."""
    out = out.double() if exact else out
    scores = _scores(q, k, k_scale, weights).to(out.dtype)
    for row, (start, end) in enumerate(zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)):
        if end > start:
            out[row, : end - start] = scores[row, start:end]
    return out


def indexer_paged_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    exact: bool = False,
) -> torch.Tensor:
    """Write into out in place and return it (exact: return a float64 copy)."""
    out = out.double() if exact else out
    page, next_n = kv_cache.shape[1], q.shape[1]
    flat = kv_cache.flatten(1)
    codes = flat[:, : page * 128].unflatten(1, (page, 128))
    scales = flat[:, page * 128 :].contiguous().view(torch.float32)
    for request, lengths in enumerate(context_lens.tolist()):
        at = torch.arange(max(lengths), device=q.device)
        pages = block_tables[request].long()[at // page]
        rows = slice(request * next_n, (request + 1) * next_n)
        scores = _scores(q[request], codes[pages, at % page], scales[pages, at % page], weights[rows]).to(out.dtype)
        for n, length in enumerate(lengths):
            out[request * next_n + n, :length] = scores[n, :length]
    return out


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
        # Wider than any row needs, and NaN-free: values outside stay as they are.
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


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor | None = None, exact: bool = False
) -> torch.Tensor:
    """logits float32 [R, ·], lengths int32 of R values → int32 [R, k]; `exact` changes nothing."""
    rows = logits.shape[0]
    result = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.flatten().tolist()):
        if length <= k:
            result[row, :length] = torch.arange(length, device=logits.device)
            continue
        bits = logits[row, :length].contiguous().view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        best = torch.sort(ordered, descending=True, stable=True).indices[:k]
        result[row] = best.sort().values
    return result if out is None else out[:, :k].copy_(result)
