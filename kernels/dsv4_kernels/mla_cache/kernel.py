"""Write and read of the packed cache (Triton).

448 values do not fill a power of two, so a row is handled as 512 columns of which the last 64 take the other path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import quantize_e4m3


@triton.jit(do_not_specialize=["tokens"])
def mla_cache_write_kernel(
    kv_ptr,  # bf16 [T', 512]
    slot_ptr,  # i64 [T]
    cache_ptr,  # u8 [pages, STRIDE]
    tokens,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Quantise and scatter `BLOCK_T` tokens; see the package docstring."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1)
    keep = slot >= 0
    page = (slot // PAGE) * STRIDE
    offset = slot % PAGE
    column = tl.arange(0, 512)
    x = tl.load(kv_ptr + token[:, None] * 512 + column[None, :], mask=keep[:, None], other=0.0)
    code, scale = quantize_e4m3(x.to(tl.float32), 1e-4, 8, 64)
    data = page + offset * 576
    nope = keep[:, None] & (column < 448)[None, :]
    tl.store(cache_ptr + data[:, None] + column[None, :], code.to(tl.uint8, bitcast=True), mask=nope)
    # The rotated values are bf16: the same bytes seen through a 2-byte pointer (every offset is even).
    wide_ptr = cache_ptr.to(tl.pointer_type(tl.bfloat16))
    rope = keep[:, None] & (column >= 448)[None, :]
    tl.store(wide_ptr + (data // 2)[:, None] + (column - 224)[None, :], x, mask=rope)
    group = tl.arange(0, 8)
    scale = tl.where((group < 7)[None, :], scale, 0)
    at_scale = page + PAGE * 576 + offset * 8
    tl.store(cache_ptr + at_scale[:, None] + group[None, :], scale.to(tl.uint8), mask=keep[:, None])


@triton.jit(do_not_specialize=["rows"])
def mla_cache_read_kernel(
    cache_ptr,  # u8 [pages, STRIDE]
    slot_ptr,  # i64 [N]
    out_ptr,  # bf16 [N, 512]
    rows,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gather and dequantise `BLOCK_N` tokens; see the package docstring."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slot_ptr + row, mask=row < rows, other=-1)
    keep = slot >= 0
    slot = tl.where(keep, slot, 0)
    page = (slot // PAGE) * STRIDE
    offset = slot % PAGE
    data = page + offset * 576
    column = tl.arange(0, 512)
    group = tl.arange(0, 8)
    nope = (column < 448)[None, :]
    code = tl.load(cache_ptr + data[:, None] + column[None, :], mask=keep[:, None] & nope, other=0)
    at_scale = page + PAGE * 576 + offset * 8
    scale = tl.load(
        cache_ptr + at_scale[:, None] + group[None, :], mask=keep[:, None] & (group < 7)[None, :], other=127
    )
    # Code 0 is 2^-127, a bf16 subnormal; every other code is the exponent field.
    bits = tl.where(scale == 0, 64, scale.to(tl.int16) << 7).to(tl.int16)
    values = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16), (BLOCK_N, 8, 64))
    values = tl.reshape(values * bits.to(tl.bfloat16, bitcast=True)[:, :, None], (BLOCK_N, 512))
    wide_ptr = cache_ptr.to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(
        wide_ptr + (data // 2)[:, None] + (column - 224)[None, :],
        mask=keep[:, None] & (column >= 448)[None, :],
        other=0.0,
    )
    tl.store(out_ptr + row[:, None] * 512 + column[None, :], tl.where(nope, values, rope), mask=(row < rows)[:, None])
