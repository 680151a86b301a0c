"""Configurations of the projections."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.compressor.configs import state_block
from dsv4_kernels.static import Expect, StaticKernel

MOST_TOKENS = 32
"""Beyond, the weights are no longer most of what is read, and every program reads all of x."""


@dataclass(frozen=True)
class ProjectionConfig:
    """One program: `block_t` tokens × `block_n` columns, `block_k` values of the input at a time."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def select(arch: Arch, tokens: int) -> ProjectionConfig:
    """Return narrow programs for few tokens, so that every multiprocessor reads weights."""
    return ProjectionConfig(16, 16, 256, 4, 4) if tokens <= 16 else ProjectionConfig(32, 32, 128, 4, 4)


SIGNATURE = {
    "x_ptr": "*bf16",
    "position_ptr": "*i64",
    "weight_ptr": "*bf16",
    "ape_ptr": "*fp32",
    "state_ptr": "*fp32",
    "slot_ptr": "*i64",
    "index_weight_ptr": "*bf16",
    "index_ape_ptr": "*fp32",
    "index_state_ptr": "*fp32",
    "index_slot_ptr": "*i64",
    "head_weight_ptr": "*bf16",
    "head_ptr": "*bf16",
    "tokens": "i32",
    "saved": "i32",
}


def static_kernels() -> tuple[StaticKernel, ...]:
    """Return the kernels of both models' layers of ratio 4 and 128, for few tokens and the most."""
    records = []
    for arch in Arch:
        for hidden in (4096, 7168):
            for ratio, width, index, heads in ((4, 1024, 256, 64), (128, 512, 0, 0)):
                for tokens in (1, MOST_TOKENS):
                    c, block = select(arch, tokens), state_block(ratio)
                    records.append(
                        StaticKernel(
                            operation="projections",
                            kernel="dsv4_kernels.projections.kernel:projections_kernel",
                            label=f"t{c.block_t}-h{hidden}-r{ratio}",
                            arch=arch,
                            signature=SIGNATURE,
                            constexprs={
                                "H": hidden, "W": width, "INDEX_W": index, "HEADS": heads, "RATIO": ratio,
                                "BLOCK": block, "STATE_STRIDE": block * 2 * width, "INDEX_STRIDE": block * 2 * index,
                                "BT": c.block_t, "BN": c.block_n, "BK": c.block_k,
                            },
                            num_warps=c.num_warps,
                            num_stages=c.num_stages,
                            expect=Expect(mma=("bf16",), cp_async=8),
                        )
                    )  # fmt: skip
    return tuple(records)
