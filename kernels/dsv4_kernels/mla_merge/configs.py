"""Configurations of the merges."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import StaticKernel


@dataclass(frozen=True)
class MergeConfig:
    """`block_parts` parts are loaded at a time, of `rows` heads of a token."""

    block_parts: int
    num_warps: int
    rows: int = 1


# A block is loaded at once, whether its parts are there or not. 5, 10 and 20 are the tiles of 128 + 512 entries; 20
# parts of 512 are 80 values per thread of four warps.
BLOCKS = (1, 2, 4, 5, 8, 10, 16, 20)
# From here on multiprocessors are full whatever a program takes (of 14 candidates on an H100, 2026-11-24).
MANY_TOKENS = 128


def select(arch: Arch, parts: int, tokens: int, heads: int) -> MergeConfig:
    """The least block that holds all parts, else the largest; of many tokens with one part, two heads at once."""
    block = next((size for size in BLOCKS if size >= parts), BLOCKS[-1])
    if tokens >= MANY_TOKENS and block == 1 and heads % 2 == 0:
        return MergeConfig(block, 1, 2)
    return MergeConfig(block, 4 if block > 4 else 2)


SIGNATURE = {
    "part_ptr": "*bf16",
    "part_lse_ptr": "*fp32",
    "second_ptr": "*bf16",
    "second_lse_ptr": "*fp32",
    "sink_ptr": "*fp32",
    "position_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
    "o_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "scale_ptr": "*u8",
    "tokens": "i32",
    "parts": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Every block of parts, with and without the epilogue, and the two-subset form."""
    records = []
    for arch in Arch:
        for tokens, parts, two, o8 in (
            (1, 2, True, False),
            *((1, block, False, True) for block in BLOCKS),
            (MANY_TOKENS, 1, False, True),
            (1, BLOCKS[-1], False, False),
        ):
            config = select(arch, parts, tokens, 64)
            records.append(
                StaticKernel(
                    operation="mla_merge",
                    kernel="dsv4_kernels.mla_merge.kernel:mla_merge_kernel",
                    label=f"s{config.block_parts}-r{config.rows}{'-two' if two else ''}{'-o8' if o8 else ''}",
                    arch=arch,
                    signature={**SIGNATURE, "o_ptr": "*fp8e4nv" if o8 else "*bf16"},
                    constexprs={
                        "H": 64,
                        "BS": config.block_parts,
                        "ROWS": config.rows,
                        "TWO": two,
                        "O8": o8,
                        "EARLY": not two,
                    },
                    num_warps=config.num_warps,
                    num_stages=1,
                )
            )
    return tuple(records)
