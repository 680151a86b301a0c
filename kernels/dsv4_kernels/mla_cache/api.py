"""Torch references, configurations, plans and registry rows of the packed cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dsv4_kernels.arch import Arch
from dsv4_kernels.mla_cache.kernel import mla_cache_read_kernel, mla_cache_write_kernel
from dsv4_kernels.numerics import PackedCache, dequantize_e4m3, ds_mla, quantize_e4m3
from dsv4_kernels.plan import BF16, I64, SUPPORTED, U8, Input, Launcher, Plan, Size, Support
from dsv4_kernels.registry import Operation, Tolerance, case

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


@dataclass(frozen=True)
class CacheConfig:
    """One program handles `rows` tokens."""

    rows: int
    num_warps: int


def select(arch: Arch, tokens: int) -> CacheConfig:
    """One warp's worth of 16-byte accesses is a token; more tokens per program only when there are many."""
    return CacheConfig(1, 1) if tokens <= 512 else CacheConfig(4, 4)


_mla_cache_read = Launcher(mla_cache_read_kernel)
_mla_cache_write = Launcher(mla_cache_write_kernel)


def cache_input(page: int, stride: int) -> Input:
    """Return the requirements of a plan for a cache with pages of `page` tokens, `stride` bytes apart."""
    used = page * (ds_mla(page).data_row + ds_mla(page).scale_row)
    return Input(U8, (None, Size(least=used)), strides=(stride, 1))


class CachePlan(Plan):
    """Write or read of up to `tokens` slots of a cache with pages of `page` tokens, `stride` bytes apart."""

    def __init__(
        self, write: bool, tokens: int, page: int, stride: int, device: torch.device, arch: Arch | None = None
    ) -> None:
        operation = "mla_cache_write" if write else "mla_cache_read"
        shape = {"tokens": tokens, "page": page, "stride": stride}
        super().__init__(operation, shape, device, arch, is_supported)
        kv = {"kv": Input(BF16, (Size(least="slots"), 512))} if write else {}
        self.inputs = self.declare(
            cache=cache_input(page, stride), slots=Input(I64, (Size("slots", most=tokens),)), **kv
        )
        self.out = None if write else torch.empty((tokens, 512), dtype=torch.bfloat16, device=device)

    def run(
        self, *, slots: torch.Tensor, cache: torch.Tensor, kv: torch.Tensor | None = None, page: int | None = None
    ) -> torch.Tensor:
        """Write: kv bf16 [T', 512], slots int64 [T] → cache. Read: slots int64 [N] → bf16 [N, 512], valid until the
        next run.
        """
        size, stride = self.shape["page"], self.shape["stride"]
        self.inputs.check(cache=cache, slots=slots, **({"kv": kv} if self.out is None else {}))
        count = slots.shape[0]
        config = select(self.arch, count)
        grid = (triton.cdiv(count, config.rows),)
        if self.out is None:
            if count:
                _mla_cache_write[grid](
                    kv_ptr=kv, slot_ptr=slots, cache_ptr=cache, tokens=count, PAGE=size, STRIDE=stride,
                    BLOCK_T=config.rows,
                    num_warps=config.num_warps, num_stages=1,
                )  # fmt: skip
            return cache
        if count:
            _mla_cache_read[grid](
                cache_ptr=cache, slot_ptr=slots, out_ptr=self.out, rows=count, PAGE=size, STRIDE=stride,
                BLOCK_N=config.rows,
                num_warps=config.num_warps, num_stages=1,
            )  # fmt: skip
        return self.out[:count]

    def warmup(self) -> None:
        """Both configurations; every slot is −1, so that nothing is written."""
        cache = torch.zeros((1, self.shape["stride"]), dtype=torch.uint8, device=self.device)
        for count in {min(1, self.shape["tokens"]), self.shape["tokens"]}:
            slots = torch.full((count,), -1, dtype=torch.int64, device=self.device)
            kv = torch.zeros((count, 512), dtype=torch.bfloat16, device=self.device) if self.out is None else None
            self.run(slots=slots, cache=cache, kv=kv)


def is_supported(params: Mapping[str, Any], arch: Arch) -> Support:
    """Any page size; pages must be 16-byte aligned."""
    stride = params.get("stride", ds_mla(params["page"]).page_bytes)
    if stride % 16:
        return Support(f"mla_cache: pages are {stride} bytes apart, needs a multiple of 16")
    return SUPPORTED


def _stride(params: Mapping[str, Any]) -> int:
    return int(params.get("stride", ds_mla(params["page"]).page_bytes))


def _slots(
    params: Mapping[str, Any], device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-2 * max(params["tokens"], 4) // params["page"])
    slots = torch.randperm(pages * params["page"], generator=generator)[: params["tokens"]]
    slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.1, -1, slots)
    # 0xFF is NaN both as an E4M3 code and as a scale: reading a byte that was never written shows.
    cache = torch.full((pages, _stride(params)), 0xFF, dtype=torch.uint8)
    return cache.to(device), slots.to(device), generator


def _write_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    cache, slots, generator = _slots(params, device, seed)
    kv = torch.randn((params["tokens"] + 3, 512), generator=generator)
    kv *= torch.exp2(torch.randint(-20, 12, (params["tokens"] + 3, 1), generator=generator).float())
    return {"kv": kv.bfloat16().to(device), "slots": slots, "cache": cache, "page": params["page"]}


def _read_inputs(params: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    inputs = _write_inputs(params, device, seed)
    mla_cache_write(**inputs)
    return {"cache": inputs["cache"], "slots": inputs["slots"], "page": params["page"]}


_CASES = (
    case("empty", "cpu gpu", tokens=0, page=64),
    case("page2", "cpu gpu", tokens=7, page=2),
    case("page53", "cpu gpu", tokens=60, page=53),
    case("page61", "cpu gpu", tokens=5, page=61, stride=40960),
    case("one", "cpu gpu bench", tokens=1, page=64),
    case("many", "gpu bench", tokens=4096, page=64),
)

OPERATIONS = (
    Operation(
        name="mla_cache_write",
        summary="quantise and scatter into the packed MLA cache",
        folder="mla_cache",
        outputs=("cache",),
        cases=_CASES,
        make_inputs=_write_inputs,
        reference=mla_cache_write,
        plan=lambda p, device, arch: CachePlan(True, p["tokens"], p["page"], _stride(p), device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (1024 + 584 + 8),
        tolerance=(Tolerance(bitwise=True),),
        mutates=("cache",),
    ),
    Operation(
        name="mla_cache_read",
        summary="gather and dequantise from the packed MLA cache",
        folder="mla_cache",
        outputs=("rows",),
        cases=(*_CASES, case("million", "bench", tokens=1_000_000, page=64)),
        make_inputs=_read_inputs,
        reference=mla_cache_read,
        plan=lambda p, device, arch: CachePlan(False, p["tokens"], p["page"], _stride(p), device, arch),
        is_supported=is_supported,
        nbytes=lambda p: p["tokens"] * (1024 + 584 + 8),
        tolerance=(Tolerance(bitwise=True),),
    ),
)
