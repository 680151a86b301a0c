"""Merge of partial attention results (Triton): one program is one row, that is one token and head, with all 512
dimensions.

All parts of a row are loaded at once, `BS` at a time: at small batches the merge is one trip to L2, not a chain of
them.
"""

# Triton's decorator and the arguments of kernels have no types.
# Compile-time constants are in capitals, as is usual in Triton.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dsv4_kernels.device import quantize_e4m3

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["tokens", "parts"])
def mla_merge_kernel(
    part_ptr,  # bf16 [S, T, H, 512]
    part_lse_ptr,  # f32 [S, T, H]
    second_ptr,  # bf16 [T, H, 512] (TWO: part 1; part_ptr is part 0)
    second_lse_ptr,  # f32 [T, H] (TWO)
    sink_ptr,  # f32 [H]
    position_ptr,  # i64 [T] (O8)
    cos_sin_ptr,  # f32 [positions, 64] (O8)
    o_ptr,  # bf16 [T, H, 512] or fp8 (O8)
    lse_ptr,  # f32 [T, H] (not O8)
    scale_ptr,  # u8 [T, H, 4] (O8)
    tokens,
    parts,
    H: tl.constexpr,
    BS: tl.constexpr,
    TWO: tl.constexpr,
    O8: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel that writes the parts has ended
):
    """Merge the parts of one row; see the package docstring."""
    row = tl.program_id(0).to(tl.int64)
    rows = tokens.to(tl.int64) * H
    head = row % H
    column = tl.arange(0, 512)
    part = tl.arange(0, BS)
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((512,), tl.float32)
    if EARLY:
        gdc_wait()
    for start in range(0, parts, BS):
        index = (start + part).to(tl.int64)
        there = index < parts
        if TWO:
            lse = tl.where(
                part == 0,
                tl.load(part_lse_ptr + row + part * 0, mask=part == 0, other=float("-inf")),
                tl.load(second_lse_ptr + row + part * 0, mask=part == 1, other=float("-inf")),
            )
        else:
            lse = tl.load(part_lse_ptr + index * rows + row, mask=there, other=float("-inf"))
        # Infinite either way means that the part has no entries; its values may be anything and are not read.
        some = there & (tl.abs(lse) < float("inf"))
        lse = tl.where(some, lse * LOG2E, float("-inf"))
        if TWO:
            at = row * 512 + column
            first = tl.load(part_ptr + at[None, :] + part[:, None] * 0, mask=(some & (part == 0))[:, None], other=0.0)
            other = tl.load(second_ptr + at[None, :] + part[:, None] * 0, mask=(some & (part == 1))[:, None], other=0.0)
            values = tl.where((part == 0)[:, None], first, other)
        else:
            at = (index * rows + row) * 512
            values = tl.load(part_ptr + at[:, None] + column[None, :], mask=some[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weight = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(values.to(tl.float32) * weight[:, None], axis=0)
        top = new_top
    any_entry = total > 0.0
    lse = tl.where(any_entry, (top + tl.log2(total)) / LOG2E, float("-inf"))
    sink = tl.load(sink_ptr + head)
    share = 1.0 / (total * (1.0 + tl.exp2((sink - lse) * LOG2E)))
    out = acc * tl.where(any_entry, share, 0.0)
    if O8:
        position = tl.load(position_ptr + row // H)
        pair = tl.arange(0, 256)
        rotated = pair >= 224
        angle = cos_sin_ptr + position * 64 + tl.where(rotated, pair - 224, 0)
        cos = tl.load(angle, mask=rotated, other=1.0)
        sin = tl.load(angle + 32, mask=rotated, other=0.0)
        even, odd = tl.split(tl.reshape(out, (256, 2)))
        out = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (1, 512))
        code, scale = quantize_e4m3(out, 1e-10, 4, 128)
        tl.store(o_ptr + row * 512 + column[None, :], code)
        tl.store(scale_ptr + row * 4 + tl.arange(0, 4)[None, :], scale.to(tl.uint8))
    else:
        tl.store(o_ptr + row * 512 + column, out.to(tl.bfloat16))
        tl.store(lse_ptr + row, lse)
