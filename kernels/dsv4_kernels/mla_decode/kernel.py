"""Sparse MLA decode (Triton): one program is one token, `BH` heads and one share of the token's entries.

512 dimensions are handled as four pieces of 256, 128, 64 and 64 columns: the 448 quantised ones and the 64 rotated
ones, each a power of two. One padded tile of 512 would not fit the registers of SM12x without spilling.
A gathered and dequantised piece serves twice, as K and as V.
"""

# Triton's decorator and the arguments of kernels have no types.
# Compile-time constants are in capitals, as is usual in Triton.
# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from dsv4_kernels.device import quantize_e4m3, ue8m0_to_f32

LOG2E = tl.constexpr(1.4426950408889634)


# Four E4M3 codes → two pairs of bf16. A code's exponent and mantissa, shifted into place, read as bf16 are the value
# times 2^-120; $3 and $4 are the scale times 2^120. Twice as fast as converting through fp16 and float32, and exact,
# subnormals included.
_E4M3_TO_BF16 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, 0, $2, 0x5040;
prmt.b32 b, 0, $2, 0x7060;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.bf16x2 $0, a, $3;
mul.bf16x2 $1, b, $4;
}""")


@triton.jit
def _dequantize(code, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr, PIN: tl.constexpr):
    """u8 [ROWS, GROUPS*64] and a word of scale bytes [ROWS], lowest first → bf16 or fp16.

    Both bodies end in an operation with side effects (PIN): without one the compiler would dequantise once per product
    and layout and give up copying the codes asynchronously. The interpreter has no assembly and takes the plain way.
    """
    shift = tl.arange(0, GROUPS) * 8
    byte = (scale[:, None] >> shift[None, :]) & 255
    if BF16 and PIN:
        factor = ((byte + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        wide = tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, 64))
        return tl.inline_asm_elementwise(
            _E4M3_TO_BF16,
            "=r,=r,r,r,r",
            [code, tl.reshape(wide, (ROWS, GROUPS * 64))],
            tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    factor = ue8m0_to_f32(byte).to(tl.float16)
    value = tl.reshape(tl.reshape(value, (ROWS, GROUPS, 64)) * factor[:, :, None], (ROWS, GROUPS * 64))
    if PIN:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.float16, is_pure=False, pack=2)
    return value.to(tl.bfloat16) if BF16 else value


@triton.jit
def _rotate_back(x, cos, sin, ROWS: tl.constexpr):
    """x f32 [ROWS, 64] of interleaved pairs, cos and sin [ROWS or 1, 32]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, 32, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (ROWS, 64))


@triton.jit(do_not_specialize=["tokens", "splits"])
def mla_decode_kernel(
    q_ptr,  # bf16 [T, H, 512]
    swa_ptr,  # u8 [pages, SWA_STRIDE]
    swa_idx_ptr,  # i32 [T, W]
    swa_len_ptr,  # i32 [T]
    cmp_ptr,  # u8 [pages, CMP_STRIDE]
    cmp_idx_ptr,  # i32 [T, K]
    cmp_len_ptr,  # i32 [T]
    sink_ptr,  # f32 [H]
    position_ptr,  # i64 [T] (o8)
    cos_sin_ptr,  # f32 [positions, 64] (o8)
    o_ptr,  # bf16 [T, H, 512] or, if split, [splits, T, H, 512]; fp8 (o8)
    lse_ptr,  # f32 [T, H] or, if split, [splits, T, H]
    scale_ptr,  # u8 [T, H, 4] (o8)
    tokens,
    splits,
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    SWA_PAGE: tl.constexpr,
    SWA_STRIDE: tl.constexpr,
    CMP_PAGE: tl.constexpr,
    CMP_STRIDE: tl.constexpr,
    SWA_SHIFT: tl.constexpr,
    CMP_SHIFT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    O8: tl.constexpr,
    BF16: tl.constexpr,  # operands of the products: bf16, else fp16
    PIN: tl.constexpr,  # see _dequantize; False only in the interpreter
):
    """Attention of one token and `BH` heads over one share of its entries; see the package docstring."""
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    split = tl.program_id(2)
    inside = (head < H)[:, None]

    row = (token * H + head)[:, None] * 512
    c256 = tl.arange(0, 256)[None, :]
    c128 = tl.arange(0, 128)[None, :]
    c64 = tl.arange(0, 64)[None, :]
    q0 = tl.load(q_ptr + row + c256, mask=inside, other=0.0).to(HALF)
    q1 = tl.load(q_ptr + row + 256 + c128, mask=inside, other=0.0).to(HALF)
    q2 = tl.load(q_ptr + row + 384 + c64, mask=inside, other=0.0).to(HALF)
    q3 = tl.load(q_ptr + row + 448 + c64, mask=inside, other=0.0).to(HALF)

    # The list of tiles is that of the window, then that of the compressed cache; rows beyond the lengths have none.
    swa_len = tl.minimum(tl.load(swa_len_ptr + token), W)
    swa_tiles = tl.cdiv(swa_len, BN)
    if K > 0:
        cmp_len = tl.minimum(tl.load(cmp_len_ptr + token), K)
        tiles = swa_tiles + tl.cdiv(cmp_len, BN)
    else:
        cmp_len = swa_len * 0
        tiles = swa_tiles
    share = tl.cdiv(tiles, splits)
    first = split * share
    last = tl.minimum(first + share, tiles)

    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc0 = tl.zeros((BH, 256), tl.float32)
    acc1 = tl.zeros((BH, 128), tl.float32)
    acc2 = tl.zeros((BH, 64), tl.float32)
    acc3 = tl.zeros((BH, 64), tl.float32)
    entry = tl.arange(0, BN)
    swa_row = swa_idx_ptr + token * W
    cmp_row = cmp_idx_ptr + token * K

    for tile in range(first, last):
        # A tile lies in one of the two lists, so everything that tells them apart is a scalar.
        in_swa = tile < swa_tiles
        at = (tile if in_swa else tile - swa_tiles) * BN + entry
        slot = tl.load((swa_row if in_swa else cmp_row) + at, mask=at < (swa_len if in_swa else cmp_len), other=-1)
        base = swa_ptr if in_swa else cmp_ptr
        if SWA_PAGE == CMP_PAGE:
            page, offset = slot // SWA_PAGE, slot % SWA_PAGE
        elif (SWA_PAGE & (SWA_PAGE - 1)) + (CMP_PAGE & (CMP_PAGE - 1)) == 0:
            size = SWA_PAGE if in_swa else CMP_PAGE
            page, offset = slot >> (SWA_SHIFT if in_swa else CMP_SHIFT), slot & (size - 1)
        else:
            size = SWA_PAGE if in_swa else CMP_PAGE
            page, offset = slot // size, slot % size
        # In units of 16 and 8 bytes, so that the compiler knows the alignment of every row.
        stride16 = SWA_STRIDE // 16 if in_swa else CMP_STRIDE // 16
        scales_at8 = SWA_PAGE * 72 if in_swa else CMP_PAGE * 72
        data16 = page.to(tl.int64) * stride16 + offset * 36
        scales8 = page.to(tl.int64) * (2 * stride16) + (offset + scales_at8)
        # Entries that are none are never loaded: a NaN byte in an unused slot cannot reach a product.
        valid = slot >= 0
        there = valid[:, None]
        code_at = base + (data16 * 16)[:, None]
        rope_at = base.to(tl.pointer_type(tl.bfloat16)) + (data16 * 8)[:, None]
        scale_at = base.to(tl.pointer_type(tl.int32)) + scales8 * 2
        x0 = tl.load(code_at + c256, mask=there, other=0)
        x1 = tl.load(code_at + 256 + c128, mask=there, other=0)
        x2 = tl.load(code_at + 384 + c64, mask=there, other=0)
        k3 = tl.load(rope_at + 224 + c64, mask=there, other=0.0).to(HALF)
        # Seven scale bytes as two words: bytes could not be copied asynchronously.
        scale_low = tl.load(scale_at, mask=valid, other=0)
        scale_high = tl.load(scale_at + 1, mask=valid, other=0)
        k0 = _dequantize(x0, scale_low, BN, 4, BF16, PIN)
        k1 = _dequantize(x1, scale_high, BN, 2, BF16, PIN)
        k2 = _dequantize(x2, scale_high >> 16, BN, 1, BF16, PIN)

        s = tl.dot(q0, tl.trans(k0))
        s = tl.dot(q1, tl.trans(k1), s)
        s = tl.dot(q2, tl.trans(k2), s)
        s = tl.dot(q3, tl.trans(k3), s)
        # Scores are kept in units of log2, so that exp2 serves.
        s = tl.where(valid[None, :], s * (LOG2E * 0.04419417382415922), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        top = new_top
        p = p.to(HALF)
        acc0 = tl.dot(p, k0, acc0 * shrink[:, None])
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None])
        acc2 = tl.dot(p, k2, acc2 * shrink[:, None])
        acc3 = tl.dot(p, k3, acc3 * shrink[:, None])

    if SPLIT and PIN:
        gdc_launch_dependents()  # the merge may be put in place; it waits for this kernel's stores by itself
    some = total > 0.0
    lse = tl.where(some, (top + tl.log2(total)) / LOG2E, float("-inf"))
    norm = tl.where(some, 1.0 / total, 0.0)
    if SPLIT:
        row += split.to(tl.int64) * tokens * (H * 512)
        tl.store(lse_ptr + (split.to(tl.int64) * tokens + token) * H + head, lse, mask=head < H)
    else:
        sink = tl.load(sink_ptr + head, mask=head < H, other=0.0)
        norm = tl.where(some, norm / (1.0 + tl.exp2((sink - lse) * LOG2E)), 0.0)
        if not O8:
            tl.store(lse_ptr + token * H + head, lse, mask=head < H)
    norm = norm[:, None]
    if O8 and not SPLIT:
        position = tl.load(position_ptr + token)
        pair = tl.arange(0, 32)[None, :]
        cos = tl.load(cos_sin_ptr + position * 64 + pair)
        sin = tl.load(cos_sin_ptr + position * 64 + 32 + pair)
        tail = tl.join(acc2 * norm, _rotate_back(acc3 * norm, cos, sin, BH))
        tail = tl.reshape(tl.permute(tail, (0, 2, 1)), (BH, 128))
        code0, scale0 = quantize_e4m3(acc0 * norm, 1e-10, 2, 128)
        code1, scale1 = quantize_e4m3(acc1 * norm, 1e-10, 1, 128)
        code2, scale2 = quantize_e4m3(tail, 1e-10, 1, 128)
        tl.store(o_ptr + row + c256, code0, mask=inside)
        tl.store(o_ptr + row + 256 + c128, code1, mask=inside)
        tl.store(o_ptr + row + 384 + c128, code2, mask=inside)
        at_scale = (token * H + head)[:, None] * 4
        g2 = tl.arange(0, 2)[None, :]
        tl.store(scale_ptr + at_scale + g2, scale0.to(tl.uint8), mask=inside)
        one = tl.arange(0, 1)[None, :]
        tl.store(scale_ptr + at_scale + 2 + one, scale1.to(tl.uint8), mask=inside)
        tl.store(scale_ptr + at_scale + 3 + one, scale2.to(tl.uint8), mask=inside)
    else:
        tl.store(o_ptr + row + c256, (acc0 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_ptr + row + 256 + c128, (acc1 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_ptr + row + 384 + c64, (acc2 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_ptr + row + 448 + c64, (acc3 * norm).to(tl.bfloat16), mask=inside)
