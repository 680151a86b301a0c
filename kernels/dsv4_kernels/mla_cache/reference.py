"""The packed cache in torch."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import PackedCache, dequantize_e4m3, ds_mla, quantize_e4m3

FLOOR = 1e-4


def _data(cache: torch.Tensor, slots: torch.Tensor, layout: PackedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte columns of the data row and of the scale row of each slot within its page: int64 [N, data_row], [N,
    scale_row].
    """
    offset = (slots % layout.tokens)[:, None]
    data = offset * layout.data_row + torch.arange(layout.data_row, device=slots.device)
    scale = (
        layout.tokens * layout.data_row
        + offset * layout.scale_row
        + torch.arange(layout.scale_row, device=slots.device)
    )
    return data, scale


def gather(cache: torch.Tensor, slots: torch.Tensor, layout: PackedCache) -> torch.Tensor:
    """Rows of `slots` as float64 [N, 512]; zeros for negative slots."""
    valid = slots >= 0
    slots = torch.where(valid, slots, 0).long()
    page = (slots // layout.tokens)[:, None]
    data, scale = _data(cache, slots, layout)
    raw, codes = cache[page, data], cache[page, scale][:, : layout.groups]
    nope = dequantize_e4m3(raw[:, : layout.nope].contiguous(), codes, layout.group)
    rope = raw[:, layout.nope :].contiguous().view(torch.bfloat16).double()
    return torch.where(valid[:, None], torch.cat((nope, rope), 1), 0.0)


def mla_cache_read(cache: torch.Tensor, slots: torch.Tensor, page: int = 64, exact: bool = False) -> torch.Tensor:
    """cache uint8 [pages, bytes], slots int64 [N] → bf16 [N, 512]."""
    rows = gather(cache, slots, ds_mla(page))
    return rows if exact else rows.to(torch.bfloat16)


def mla_cache_write(
    kv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, page: int = 64, exact: bool = False
) -> torch.Tensor:
    """kv bf16 [T', 512], slots int64 [T] into cache uint8 [pages, bytes], in place; returns the cache."""
    layout = ds_mla(page)
    keep = slots >= 0
    slots, rows = slots[keep], kv[: slots.shape[0]][keep]
    code, scale = quantize_e4m3(rows[:, : layout.nope], layout.group, FLOOR)
    rope = rows[:, layout.nope :].contiguous().view(torch.uint8)
    where_data, where_scale = _data(cache, slots, layout)
    where_page = (slots // page)[:, None]
    cache[where_page, where_data] = torch.cat((code, rope), 1)
    cache[where_page, where_scale] = torch.nn.functional.pad(scale, (0, layout.scale_padding))
    return cache
