"""Sparse MLA decode in torch, float64 inside."""

from __future__ import annotations

import torch

from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.mla_cache.reference import gather
from dsv4_kernels.mla_merge.reference import O8_FLOOR, inverse_rope
from dsv4_kernels.numerics import quantize_e4m3

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
    return quantize_e4m3(inverse_rope(o, positions, cos_sin).float(), 128, O8_FLOOR)
