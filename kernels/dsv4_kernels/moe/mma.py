# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803
"""Parts of the products of the mixture of experts (Triton): widening of MXFP4, one step of each body, ranges of k."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import e2m1_to_e4m3, quantize_e4m3, ue8m0_to_f32

# Activations are quantised in the groups that block-scaled MMA reads.
GROUP = tl.constexpr(32)
# Below this no scale is taken: keeps the exponent arithmetic inside float32's normal range.
AMAX_FLOOR = tl.constexpr(1e-10)
# A named constant because the interpreter does not wrap a literal.
E4M3 = tl.constexpr("e4m3")
# The "dot" body works on weights times 2^-63 (see widen_bf16); the accumulator is multiplied back once.
UNBIAS = tl.constexpr(9223372036854775808.0)


@triton.jit
def widen_bf16(w, scale, PTX: tl.constexpr):
    """w u8 [R, B] (two E2M1 each), scale u8 [R, B/16] → (even k, odd k) bf16 [R, B], times 2^-63.

    E2M1's bits moved to the same place of a bf16 are value·2^-126 exactly (0.5 becomes a subnormal), so one
    multiplication by 2^(scale − 127 + 63) both scales and undoes half of that; the other 2^63 is left to the
    accumulator. Exact for scale codes 64..190, which the contract asks for. Even and odd k stay apart because a sum
    over k does not care for order and interleaving would cost more than widening.
    """
    rows: tl.constexpr = w.shape[0]
    half: tl.constexpr = w.shape[1]
    if PTX:
        # (code + 63) << 7 for two codes at once.
        factor = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p;
            prmt.b32 p, $2, 0, 0x4140;
            mad.lo.u32 $0, p, 128, 0x1F801F80;
            prmt.b32 p, $2, 0, 0x4342;
            mad.lo.u32 $1, p, 128, 0x1F801F80;
            }
            """,
            "=r,=r,r",
            [scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        factor = ((scale.to(tl.int16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    factor = tl.broadcast_to(factor[:, :, None], (rows, half // 16, 16)).reshape(rows, half)
    if PTX:
        # Two bf16 per register. A nibble s|eem times 2^6 + 2^12 holds eem at bits 8..6 and s at bit 15 of its half,
        # without carries, and one mask drops the rest: multiplications run beside the pipe of the logic operations,
        # which is the one that fills up (80 % busy on an H200 with shifts in their place). The compiler's own code
        # takes twice as many instructions.
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, t;
            prmt.b32 p, $4, 0, 0x4140;
            and.b32 q, p, 0x000F000F;
            mad.lo.u32 p, q, -1, p;
            mul.lo.u32 t, q, 4160;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $0, t, $5;
            mul.lo.u32 t, p, 260;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $2, t, $5;
            prmt.b32 p, $4, 0, 0x4342;
            and.b32 q, p, 0x000F000F;
            mad.lo.u32 p, q, -1, p;
            mul.lo.u32 t, q, 4160;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $1, t, $6;
            mul.lo.u32 t, p, 260;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $3, t, $6;
            }
            """,
            "=r,=r,=r,=r,r,r,r",
            [w, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = w.to(tl.int32)
        factor = factor.to(tl.float32)
        even = (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True) * factor
        odd = (((wide & 0x70) << 18) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * factor
        even = even.to(tl.bfloat16)
        odd = odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def round_through_e4m3(even, odd):
    """Quantise and dequantise bf16 [M, B] even and odd halves in groups of 32; exact in bf16, which has four more
    mantissa bits."""
    rows: tl.constexpr = even.shape[0]
    half: tl.constexpr = even.shape[1]
    both = tl.join(even, odd).reshape(rows, 2 * half).to(tl.float32)
    even, odd = tl.split(round_rows(both).reshape(rows, half, 2))
    return even, odd


@triton.jit
def round_rows(x):
    """x float32 [M, K] → bf16 [M, K], each group of 32 rounded to E4M3 times its power of two."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    code, scale = quantize_e4m3(x, AMAX_FLOOR, width // GROUP, GROUP)
    wide = code.to(tl.float32).reshape(rows, width // GROUP, GROUP) * ue8m0_to_f32(scale)[:, :, None]
    return wide.reshape(rows, width).to(tl.bfloat16)


@triton.jit
def rounded_sum(out, addend):
    """out float32, rounded to bf16, plus addend bf16, in float32 and rounded: what the sum of two bf16 tensors is."""
    return (addend.to(tl.float32) + out.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def step_dot(acc, w, scale, even, odd, PTX: tl.constexpr):
    """acc [R, M] += W · xᵀ · 2^-63 for one block of k; even and odd bf16 [M, B], the two halves of x."""
    w_even, w_odd = widen_bf16(w, scale, PTX)
    acc = tl.dot(w_even, even.T, acc)
    return tl.dot(w_odd, odd.T, acc)


@triton.jit
def step_mx(acc, w, scale, x, x_scale):
    """acc [R, M] += W · xᵀ for one block of k; x E4M3 [M, 2B] with UE8M0 scales [M, B/16]."""
    rows: tl.constexpr = w.shape[0]
    half: tl.constexpr = w.shape[1]
    wide = tl.join(e2m1_to_e4m3(w & 15), e2m1_to_e4m3(w >> 4)).reshape(rows, 2 * half).to(tl.float8e4nv, bitcast=True)
    # e2m1_to_e4m3 gives value·2^-6.
    w_scale = (tl.minimum(scale, 248) + 6).to(tl.uint8)
    return tl.dot_scaled(wide, w_scale, E4M3, x.T, x_scale, E4M3, acc)


@triton.jit
def sum_splits(acc, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """acc [SPLIT·ROWS, SPLIT·COLUMNS] → [ROWS, COLUMNS], the sum of its diagonal blocks.

    A batch of one token leaves most of the MMA's columns empty and gives a row of weights to one warp only. So a tile
    holds SPLIT ranges of k: those of W stacked as rows, those of x side by side as columns; where both are of one range
    the product counts. More warps share a row and the matrix unit does no more than before.
    """
    if SPLIT > 1:
        parts = acc.reshape(SPLIT, ROWS, SPLIT, COLUMNS)
        which = tl.arange(0, SPLIT)
        same = which[:, None, None, None] == which[None, None, :, None]
        acc = tl.sum(tl.sum(tl.where(same, parts, 0.0), axis=2), axis=0)
    return acc
