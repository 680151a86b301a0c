"""Configurations of the quantiser, and what the static gate compiles."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_kernels.arch import Arch
from dsv4_kernels.static import Expect, StaticKernel


@dataclass(frozen=True)
class QuantConfig:
    """One program quantises `block_t` tokens × `block_k` values."""

    block_t: int
    block_k: int
    num_warps: int


def select(arch: Arch, tokens: int, k: int) -> QuantConfig:
    """Small batches are spread over K so that every multiprocessor has work; large ones keep a whole row segment per
    program.
    """
    if tokens <= 64:
        return QuantConfig(1, 512, 1)
    return QuantConfig(4, 512, 4)


def static_kernels() -> tuple[StaticKernel, ...]:
    """Both configurations at the two models' hidden sizes."""
    records = []
    for arch in Arch:
        for tokens, k in ((1, 4096), (4096, 7168)):
            config = select(arch, tokens, k)
            records.append(
                StaticKernel(
                    operation="fp8_quant",
                    kernel="dsv4_kernels.fp8_quant.kernel:fp8_quant_kernel",
                    label=f"t{config.block_t}-k{k}",
                    arch=arch,
                    signature={"x_ptr": "*bf16", "code_ptr": "*fp8e4nv", "scale_ptr": "*u8", "tokens": "i32"},
                    constexprs={"K": k, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k},
                    num_warps=config.num_warps,
                    num_stages=1,
                    expect=Expect(),
                )
            )
        for tokens, k in ((1, 2048), (4096, 2048), (4096, 3072)):
            config = select(arch, tokens, k)
            records.append(
                StaticKernel(
                    operation="fp8_quant",
                    kernel="dsv4_kernels.fp8_quant.kernel:silu_mul_quant_kernel",
                    label=f"silu-t{config.block_t}-k{k}",
                    arch=arch,
                    signature={
                        "x_ptr": "*bf16",
                        "y_ptr": "*bf16",
                        "code_ptr": "*fp8e4nv",
                        "scale_ptr": "*u8",
                        "tokens": "i32",
                        "limit": "fp32",
                    },
                    constexprs={"K": k, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k},
                    num_warps=config.num_warps,
                    num_stages=1,
                    expect=Expect(),
                )
            )
    return tuple(records)
