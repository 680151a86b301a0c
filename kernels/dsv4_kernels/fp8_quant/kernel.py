"""Per-token FP8 quantisation (Triton)."""

# Triton's decorator and the arguments of kernels have no types.
# Compile-time constants are in capitals, as is usual in Triton.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import quantize_e4m3


@triton.jit(do_not_specialize=["tokens"])
def fp8_quant_kernel(
    x_ptr,  # bf16 [T, K]
    code_ptr,  # fp8 e4m3 [T, K]
    scale_ptr,  # u8 [T, K/128]
    tokens,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantise `BLOCK_T` tokens × `BLOCK_K` values; see the package docstring."""
    groups: tl.constexpr = BLOCK_K // 128
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = (row < tokens)[:, None]
    at = row[:, None] * K + column[None, :]
    x = tl.load(x_ptr + at, mask=inside & (column < K)[None, :], other=0.0).to(tl.float32)
    code, scale = quantize_e4m3(x, 1e-4, groups, 128)
    tl.store(code_ptr + at, code, mask=inside & (column < K)[None, :])
    at_scale = row[:, None] * (K // 128) + group[None, :]
    tl.store(scale_ptr + at_scale, scale.to(tl.uint8), mask=inside & (group < K // 128)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def silu_mul_quant_kernel(
    x_ptr,  # bf16 [T, 2K]
    y_ptr,  # bf16 [T, K]
    code_ptr,  # fp8 e4m3 [T, K]
    scale_ptr,  # u8 [T, K/128]
    tokens,
    limit,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y of `BLOCK_T` tokens × `BLOCK_K` values, and what `fp8_quant_kernel` makes of it."""
    groups: tl.constexpr = BLOCK_K // 128
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = (row < tokens)[:, None] & (column < K)[None, :]
    x_at = x_ptr + row[:, None] * (2 * K) + column[None, :]
    gate = tl.minimum(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(x_at + K, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)
    at = row[:, None] * K + column[None, :]
    tl.store(y_ptr + at, y, mask=inside)
    code, scale = quantize_e4m3(y.to(tl.float32), 1e-4, groups, 128)
    tl.store(code_ptr + at, code, mask=inside)
    at_scale = row[:, None] * (K // 128) + group[None, :]
    tl.store(scale_ptr + at_scale, scale.to(tl.uint8), mask=(row < tokens)[:, None] & (group < K // 128)[None, :])
