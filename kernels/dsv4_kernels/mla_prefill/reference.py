"""Sparse MLA prefill in torch; see the package docstring."""

from __future__ import annotations

import torch


def list_width(topk: int, window: int) -> int:
    """Columns of a list: a multiple of 128, as FlashMLA wants them."""
    return -(-(topk + window) // 128) * 128


def mla_prefill_lists(
    chosen: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    *,
    topk: int,
    ratio: int,
    window: int,
    rows: int,
    first: int,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices int32 [T, W], lengths int32 [T]); `exact` changes nothing."""
    starts = (query_start_loc - query_start_loc[0]).tolist()
    lists: list[list[int]] = []
    for request, (seq, gathered) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        held = seq - gathered
        for token in range(starts[request], starts[request + 1]):
            position = seq - starts[request + 1] + token
            entries = (position + 1) // ratio
            picked = chosen[token, : min(entries, topk)].tolist()
            picked = [row if 0 <= row < min(entries, first) else -1 for row in picked]
            seen = [first + other - held for other in range(max(position - window + 1, held), position + 1)]
            lists.append([row if row < 0 else row + request * rows for row in picked + seen])
    width = list_width(topk, window)
    indices = [row + [-1] * (width - len(row)) for row in lists]
    lengths = [len(row) for row in lists]
    device = chosen.device
    return (
        torch.tensor(indices, dtype=torch.int32, device=device).view(-1, width),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    sink: torch.Tensor,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o bf16 [S, H, 512], lse float32 [S, H]); exact: float64."""
    tokens, heads, _ = q.shape
    o = torch.zeros((tokens, heads, 512), dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    # Some tokens at a time: a gathered list is megabytes of float64.
    for start in range(0, tokens, 16):
        part = slice(start, start + 16)
        idx = indices[part]
        valid = (idx >= 0) & (torch.arange(idx.shape[1], device=q.device) < lengths[part, None])
        rows = torch.where(valid[:, :, None], kv[torch.where(valid, idx, 0).long()].double(), 0.0)
        score = torch.einsum("shd,skd->shk", q[part].double(), rows) * 512**-0.5
        score = score.masked_fill(~valid[:, None], -torch.inf)
        lse[part] = torch.logsumexp(score, -1)
        weight = torch.exp(score - lse[part, :, None]).nan_to_num(0.0)
        o[part] = torch.einsum("shk,skd->shd", weight, rows)
        share = 1.0 / (1.0 + torch.exp(sink.double() - lse[part]))
        o[part] *= torch.where(lse[part] > -torch.inf, share, 0.0)[:, :, None]
    return (o, lse) if exact else (o.bfloat16(), lse.float())
