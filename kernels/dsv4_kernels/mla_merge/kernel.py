"""Merge of partial attention results (Triton): one program is one row, that is one token and head, with all 512
dimensions, or some heads of a token where there are many tokens.

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


@triton.jit
def _part_lse(part_lse_ptr, second_lse_ptr, row, rows, start, part: tl.constexpr, parts, TWO: tl.constexpr):
    """The lse of one part in units of log2; −inf (no entries) also for what is given as +inf and beyond the last."""
    if TWO:
        lse = tl.load((part_lse_ptr if part == 0 else second_lse_ptr) + row)
    else:
        at = part_lse_ptr + (start + part) * rows + row
        lse = tl.load(at, mask=start + part < parts, other=float("-inf"))
    return tl.where(tl.abs(lse) < float("inf"), lse * LOG2E, float("-inf"))


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
    ROWS: tl.constexpr,  # divides H
    TWO: tl.constexpr,
    O8: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel that writes the parts has ended
):
    """Merge the parts of `ROWS` rows; see the package docstring."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    rows = tokens.to(tl.int64) * H
    head = row % H
    place = row[:, None] * 512 + tl.arange(0, 512)[None, :]
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, 512), tl.float32)
    sink = tl.load(sink_ptr + head)
    if O8:
        position = tl.load(position_ptr + first // H)
        pair = tl.arange(0, 256)
        rotated = pair >= 224
        angle = cos_sin_ptr + position * 64 + tl.where(rotated, pair - 224, 0)
        cos = tl.load(angle, mask=rotated, other=1.0)
        sin = tl.load(angle + 32, mask=rotated, other=0.0)
    if EARLY:
        gdc_wait()
    for start in range(0, parts, BS):
        # A thread keeps its columns through all parts, and the weights are scalars, so no thread waits for another.
        # Two passes over the lse: the loads of all values are in flight while the first looks for the largest.
        new_top = top
        for part in tl.static_range(BS):
            new_top = tl.maximum(new_top, _part_lse(part_lse_ptr, second_lse_ptr, row, rows, start, part, parts, TWO))
        shrink = tl.exp2(top - new_top)
        total *= shrink
        acc *= shrink[:, None]
        for part in tl.static_range(BS):
            lse = _part_lse(part_lse_ptr, second_lse_ptr, row, rows, start, part, parts, TWO)
            weight = tl.exp2(lse - new_top)
            if TWO:
                at = (part_ptr if part == 0 else second_ptr) + place
            else:
                at = part_ptr + (start + part) * rows * 512 + place
            value = tl.load(at, mask=start + part < parts, other=0.0).to(tl.float32)
            # A part without entries may hold anything, NaN too.
            acc += tl.where((lse > float("-inf"))[:, None], value, 0.0) * weight[:, None]
            total += weight
        top = new_top
    any_entry = total > 0.0
    lse = tl.where(any_entry, (top + tl.log2(total)) / LOG2E, float("-inf"))
    share = 1.0 / (total * (1.0 + tl.exp2((sink - lse) * LOG2E)))
    out = acc * tl.where(any_entry, share, 0.0)[:, None]
    if O8:
        even, odd = tl.split(tl.reshape(out, (ROWS, 256, 2)))
        cos, sin = cos[None, :], sin[None, :]
        out = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (ROWS, 512))
        code, scale = quantize_e4m3(out, 1e-10, 4, 128)
        tl.store(o_ptr + place, code)
        tl.store(scale_ptr + row[:, None] * 4 + tl.arange(0, 4)[None, :], scale.to(tl.uint8))
    else:
        tl.store(o_ptr + place, out.to(tl.bfloat16))
        tl.store(lse_ptr + row, lse)
