"""Configurations of the cache's write and read."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.layouts import ds_mla
from dsv4_kernels.static import StaticKernel


@dataclass(frozen=True)
class CacheConfig:
    """One program handles `rows` tokens."""

    rows: int
    num_warps: int


def select(arch: Arch, tokens: int) -> CacheConfig:
    """One warp's worth of 16-byte accesses is a token; more tokens per program only when there are many."""
    return CacheConfig(1, 1) if tokens <= 512 else CacheConfig(4, 4)


def static_kernels() -> tuple[StaticKernel, ...]:
    """Write and read, few and many tokens; a page of 64 and one that is no power of two."""
    records = []
    for arch in Arch:
        for tokens, page in ((1, 64), (4096, 64), (4096, 53)):
            config = select(arch, tokens)
            sizes = {"PAGE": page, "STRIDE": ds_mla(page).page_bytes}
            label = f"r{config.rows}-page{page}"
            shared = {"arch": arch, "label": label, "num_warps": config.num_warps, "num_stages": 1}
            module = "dsv4_kernels.mla_cache.kernel:"
            records.append(
                StaticKernel(
                    operation="mla_cache",
                    kernel=module + "mla_cache_write_kernel",
                    signature={"kv_ptr": "*bf16", "slot_ptr": "*i64", "cache_ptr": "*u8", "tokens": "i32"},
                    constexprs={**sizes, "BLOCK_T": config.rows},
                    **shared,  # type: ignore[arg-type]
                )
            )
            records.append(
                StaticKernel(
                    operation="mla_cache",
                    kernel=module + "mla_cache_read_kernel",
                    signature={"cache_ptr": "*u8", "slot_ptr": "*i64", "out_ptr": "*bf16", "rows": "i32"},
                    constexprs={**sizes, "BLOCK_N": config.rows},
                    **shared,  # type: ignore[arg-type]
                )
            )
    return tuple(records)
