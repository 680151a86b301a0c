"""The indexer's queries and scores in torch; see the package docstring."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import e4m3_decode, quantize_e4m3


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
