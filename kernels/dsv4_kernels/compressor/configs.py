"""Configurations of the compressor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.static import StaticKernel


@dataclass(frozen=True)
class StoreConfig:
    """A program has `columns` columns of one token's entry; fewer than the head: the last one to arrive finishes it."""

    columns: int
    num_warps: int


def select(arch: Arch, tokens: int, head: int, ratio: int) -> StoreConfig:
    """The 128 rows of a ratio-128 window are half a megabyte: one program would read them for ten microseconds."""
    if ratio >= 32:
        return StoreConfig(32, 4) if tokens <= 512 else StoreConfig(64, 8)
    return StoreConfig(head, 4 if head == 512 else 1)


def state_block(ratio: int) -> int:
    """Tokens of a block of vLLM's state cache."""
    return 4 if ratio == 4 else 8


def cache_stride(head: int, page: int) -> int:
    """Bytes between pages of vLLM's caches."""
    return ds_mla(page).page_bytes if head == 512 else page * 132


SAVE_SIGNATURE = {
    "kv_ptr": "*fp32",
    "score_ptr": "*fp32",
    "ape_ptr": "*fp32",
    "position_ptr": "*i64",
    "slot_ptr": "*i64",
    "state_ptr": "*fp32",
    "kv_stride": "i32",
    "score_stride": "i32",
}
STORE_SIGNATURE = {
    "state_ptr": "*fp32",
    "request_ptr": "*i32",
    "position_ptr": "*i64",
    "slot_ptr": "*i64",
    "table_ptr": "*i32",
    "weight_ptr": "*bf16",
    "cos_sin_ptr": "*fp32",
    "cache_ptr": "*u8",
    "cache_slot_ptr": "*i64",
    "part_ptr": "*fp32",
    "count_ptr": "*i32",
    "mapped": "i32",
    "table_stride": "i32",
    "eps": "fp32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Ratio 4 and 128 with head 512, ratio 4 with the indexer's 128, with vLLM's pages and blocks."""
    records = []
    for arch in Arch:
        for head, ratio, page in ((512, 4, 64), (512, 128, 2), (128, 4, 64)):
            width, block = (2 * head if ratio == 4 else head), state_block(ratio)
            sizes = {"W": width, "RATIO": ratio, "BLOCK": block, "STATE_STRIDE": 2 * width * block}
            cache = {"PAGE": page, "CACHE_STRIDE": cache_stride(head, page)}
            name = f"h{head}-r{ratio}"
            records.append(_record(arch, "compressor_save_kernel", name, SAVE_SIGNATURE, sizes, 4))
            for tokens in (1, 4096):
                config = select(arch, tokens, head, ratio)
                records.append(
                    _record(
                        arch,
                        "compressor_store_kernel",
                        f"{name}-n{config.columns}",
                        STORE_SIGNATURE,
                        {**sizes, **cache, "D": head, "N": config.columns},
                        config.num_warps,
                    )
                )
    return tuple({record.key: record for record in records}.values())


def _record(
    arch: Arch, kernel: str, label: str, signature: Mapping[str, str], constexprs: Mapping[str, object], num_warps: int
) -> StaticKernel:
    return StaticKernel(
        operation="compressor",
        kernel=f"dsv4_kernels.compressor.kernel:{kernel}",
        label=label,
        arch=arch,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=1,
    )
