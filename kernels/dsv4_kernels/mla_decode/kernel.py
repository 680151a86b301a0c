"""Sparse MLA decode and the merge of its partial results (Triton).

A program of decode is one token, `BH` heads and one share of the token's entries. The 512 dimensions are handled as
four pieces of 128 columns, two groups of 64 each; the second group of the last piece is the rotated one. Alike pieces
share their addresses, and a piece is small enough that nothing is spilled. A gathered and dequantised piece serves
twice, as K and as V.

A program of the merge is one row, that is one token and head, with all 512 dimensions, or some heads of a token where
there are many tokens. All parts of a row are loaded at once, `BS` at a time: at small batches the merge is one trip to
L2, not a chain of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4_kernels.device import quantize_e4m3, ue8m0_to_f32

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _part_lse(part_lse_ptr, second_lse_ptr, row, rows, start, part: tl.constexpr, parts, TWO: tl.constexpr):
    """The lse of one part in units of log2; −inf (no entries) also for +inf and beyond the last part."""
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
        # Two passes over the lse: the loads of all values are in flight while the first finds the largest.
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


LOG2E = tl.constexpr(1.4426950408889634)
# 512^-1/2 in units of log2.
SCORE = tl.constexpr(1.4426950408889634 * 0.04419417382415922)


# Four E4M3 codes → two pairs of bf16. A code's exponent and mantissa, shifted into place, read as bf16 are the value
# times 2^-120; $3 and $4 are the scale times 2^120, which is a bf16 for scale bytes up to numerics.LARGEST_SCALE. Twice
# as fast as converting through fp16 and float32, and exact, subnormals included.
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
def _dequantize(code, scale, BN: tl.constexpr, PIN: tl.constexpr):
    """u8 [BN, 2, 64] and words [BN] whose two lowest bytes are the scales → bf16 [BN, 2, 64].

    It ends in an operation with side effects (PIN): without one the compiler would dequantise once per product and
    layout and give up copying the codes asynchronously. The interpreter has no assembly and takes the plain way.
    """
    byte = (scale[:, None] >> (tl.arange(0, 2) * 8)[None, :]) & 255
    if PIN:
        factor = ((byte + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        wide = tl.broadcast_to(factor[:, :, None], (BN, 2, 64))
        return tl.inline_asm_elementwise(
            _E4M3_TO_BF16, "=r,=r,r,r,r", [code, wide], tl.bfloat16, is_pure=False, pack=4
        )  # fmt: skip
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (value * ue8m0_to_f32(byte)[:, :, None]).to(tl.bfloat16)


@triton.jit
def _load_q(at, inside):
    """The four pieces of q: bf16 [BH, 128] each."""
    q0 = tl.load(at, mask=inside, other=0.0)
    q1 = tl.load(at + 128, mask=inside, other=0.0)
    q2 = tl.load(at + 256, mask=inside, other=0.0)
    q3 = tl.load(at + 384, mask=inside, other=0.0)
    return q0, q1, q2, q3


@triton.jit
def _tile(
    tile,
    top,
    total,
    acc0,
    acc1,
    acc2,
    acc3,
    q0,
    q1,
    q2,
    q3,
    q_at,
    inside,
    swa_ptr,
    cmp_ptr,
    swa_row,
    cmp_row,
    swa_len,
    cmp_len,
    swa_tiles,
    splits,
    table_row,
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
    ONE: tl.constexpr,
    FIXED: tl.constexpr,
    PIN: tl.constexpr,
):
    """One tile of entries added to the running softmax (top, total) and sums; with ONE it is the only one."""
    entry = tl.arange(0, BN)
    c64 = tl.arange(0, 64)
    group = tl.arange(0, 2)
    # A tile lies in one of the two lists, so all differences between them are scalars.
    in_swa = tile < swa_tiles
    at = (tile if in_swa else tile - swa_tiles) * BN + entry
    index_at = (swa_row if in_swa else cmp_row) + at
    listed = at < (swa_len if in_swa else cmp_len)
    if FIXED:
        # Loads do not wait for the length: entries behind it are read and dropped.
        slot = tl.load(index_at, mask=at < (W if in_swa else K), other=-1)
        slot = tl.where(listed, slot, -1)
    else:
        slot = tl.load(index_at, mask=listed, other=-1)
    base = swa_ptr if in_swa else cmp_ptr
    if SWA_PAGE == CMP_PAGE:
        page, offset = slot // SWA_PAGE, slot % SWA_PAGE
    elif (SWA_PAGE & (SWA_PAGE - 1)) + (CMP_PAGE & (CMP_PAGE - 1)) == 0:
        size = SWA_PAGE if in_swa else CMP_PAGE
        page, offset = slot >> (SWA_SHIFT if in_swa else CMP_SHIFT), slot & (size - 1)
    else:
        size = SWA_PAGE if in_swa else CMP_PAGE
        page, offset = slot // size, slot % size
    if table_row is not None:
        # The page so far was that of the request; of a window's slot it is the cache's already.
        found = tl.load(table_row + page, mask=(slot >= 0) & (tile >= swa_tiles), other=0)
        page = tl.where(in_swa, page, found)
    # In units of 16 and 8 bytes, so that the compiler knows the alignment of every row.
    stride16 = SWA_STRIDE // 16 if in_swa else CMP_STRIDE // 16
    scales_at8 = SWA_PAGE * 72 if in_swa else CMP_PAGE * 72
    data16 = page.to(tl.int64) * stride16 + offset * 36
    scales8 = page.to(tl.int64) * (2 * stride16) + (offset + scales_at8)
    # Entries that are none are never loaded: a NaN byte in an unused slot cannot reach a product.
    valid = slot >= 0
    there = valid[:, None, None]
    code_at = (base + (data16 * 16)[:, None, None]) + (group[None, :, None] * 64 + c64[None, None, :])
    rope_at = base.to(tl.pointer_type(tl.bfloat16)) + (data16 * 8)[:, None] + (224 + c64)[None, :]
    scale_at = base.to(tl.pointer_type(tl.int32)) + scales8 * 2
    x0 = tl.load(code_at, mask=there, other=0)
    x1 = tl.load(code_at + 128, mask=there, other=0)
    x2 = tl.load(code_at + 256, mask=there, other=0)
    x3 = tl.load(code_at + 384, mask=there & (group == 0)[None, :, None], other=0)
    rope = tl.load(rope_at, mask=valid[:, None], other=0.0)
    # Seven scale bytes as two words: bytes could not be copied asynchronously.
    scale_low = tl.load(scale_at, mask=valid, other=0)
    scale_high = tl.load(scale_at + 1, mask=valid, other=0)
    if ONE:
        # Loaded after the cache: a wait for q before the loop would be two trips to memory.
        q0, q1, q2, q3 = _load_q(q_at, inside)
    k0 = tl.reshape(_dequantize(x0, scale_low, BN, PIN), (BN, 128))
    k1 = tl.reshape(_dequantize(x1, scale_low >> 16, BN, PIN), (BN, 128))
    k2 = tl.reshape(_dequantize(x2, scale_high, BN, PIN), (BN, 128))
    x3 = _dequantize(x3, scale_high >> 16, BN, PIN)
    k3 = tl.reshape(tl.where((group == 0)[None, :, None], x3, rope[:, None, :]), (BN, 128))

    # Scores are kept in units of log2, so that exp2 serves.
    if ONE and BH >= 64:
        # A product that leads to another one gets all its warps along its rows; with 64 rows, those beyond the fourth
        # would repeat the first ones. So none starts from the last, and their sum goes through a branch (always
        # taken), which the compiler does not see through. In a loop it would cost registers that are not there.
        sums = tl.dot(q0, tl.trans(k0)) * SCORE + tl.dot(q1, tl.trans(k1)) * SCORE
        sums += tl.dot(q2, tl.trans(k2)) * SCORE
        sums += tl.dot(q3, tl.trans(k3)) * SCORE
        s = tl.full((BH, BN), float("-inf"), tl.float32)
        if splits > 0:
            s = tl.where(valid[None, :], sums, float("-inf"))
    else:
        s = tl.dot(q0, tl.trans(k0))
        s = tl.dot(q1, tl.trans(k1), s)
        if BH < 64:
            # Two chains of products: one of 32 would wait for itself.
            s += tl.dot(q3, tl.trans(k3), tl.dot(q2, tl.trans(k2)))
        else:
            s = tl.dot(q2, tl.trans(k2), s)
            s = tl.dot(q3, tl.trans(k3), s)
        s = tl.where(valid[None, :], s * SCORE, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - new_top[:, None])
    here = tl.sum(p, axis=1)
    p = p.to(tl.bfloat16)
    if ONE:
        total = here
        acc0, acc1, acc2, acc3 = tl.dot(p, k0), tl.dot(p, k1), tl.dot(p, k2), tl.dot(p, k3)
    else:
        shrink = tl.exp2(top - new_top)
        total = total * shrink + here
        acc0 = tl.dot(p, k0, acc0 * shrink[:, None])
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None])
        acc2 = tl.dot(p, k2, acc2 * shrink[:, None])
        acc3 = tl.dot(p, k3, acc3 * shrink[:, None])
    return new_top, total, acc0, acc1, acc2, acc3


@triton.jit
def _rotate_back(x, position, cos_sin_ptr, ROWS: tl.constexpr):
    """x f32 [ROWS, 128]: the last 64 of interleaved pairs turned back by the angles of `position`."""
    pair = tl.arange(0, 64)
    turned = pair >= 32
    angle_at = cos_sin_ptr + position * 64 + tl.where(turned, pair - 32, 0)
    cos = tl.load(angle_at, mask=turned, other=1.0)[None, :]
    sin = tl.load(angle_at + 32, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, (ROWS, 64, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (ROWS, 128))


@triton.jit
def _store_quantized(x, o_at, scale_at, inside):
    """x f32 [ROWS, 128] as E4M3 codes with one scale per row."""
    code, scale = quantize_e4m3(x, 1e-10, 1, 128)
    tl.store(o_at, code, mask=inside)
    tl.store(scale_at + tl.arange(0, 1)[None, :], scale.to(tl.uint8), mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "request_ptr", "counts_ptr"],
)
def mla_decode_kernel(
    q_ptr,  # bf16 [T, QH, 512], of which the first H heads count
    swa_ptr,  # u8 [pages, SWA_STRIDE]
    swa_idx_ptr,  # i32 [T, W]
    swa_len_ptr,  # i32 [T]
    cmp_ptr,  # u8 [pages, CMP_STRIDE]
    cmp_idx_ptr,  # i32 [T, K]
    cmp_len_ptr,  # i32 [T] or, with a table, None
    table_ptr,  # i32 [requests, ·], rows table_stride apart, or None: cmp_idx has slots
    request_ptr,  # i32 [T] or None
    counts_ptr,  # i1 [T] or None
    table_stride,
    sink_ptr,  # f32 [H]
    position_ptr,  # i64 [T] (o8)
    cos_sin_ptr,  # f32 [positions, 64] (o8)
    o_ptr,  # bf16 [T, H, 512] or, if split, [splits, T, H, 512]; fp8 (o8)
    lse_ptr,  # f32 [T, H] or, if split, [splits, T, H]
    scale_ptr,  # u8 [T, H, 4] (o8)
    tokens,
    splits,
    H: tl.constexpr,
    QH: tl.constexpr,
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
    ONE: tl.constexpr,  # a share is one tile (FIXED only): no loop
    FIXED: tl.constexpr,  # shares are cut from the widths, so that addresses do not wait for the lengths
    O8: tl.constexpr,
    PIN: tl.constexpr,  # see _dequantize; False only in the interpreter
):
    """Attention of one token and `BH` heads over one share of its entries; see the package docstring."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    split = tl.program_id(2)
    if SPLIT and PIN:
        gdc_launch_dependents()  # the merge may be put in place; it waits for this kernel's stores by itself
    inside = (head < H)[:, None]
    row = (token * H + head)[:, None] * 512 + tl.arange(0, 128)[None, :]

    # The list of tiles is that of the window, then that of the compressed cache; rows beyond the lengths have none.
    swa_len = tl.minimum(tl.load(swa_len_ptr + token), W)
    cmp_len = swa_len * 0
    if K > 0:
        if table_ptr is None:
            cmp_len = tl.minimum(tl.load(cmp_len_ptr + token), K)
        else:
            cmp_len = tl.load(counts_ptr + token).to(tl.int32) * K
    if FIXED:
        swa_tiles = (W + BN - 1) // BN
        tiles = swa_tiles + (K + BN - 1) // BN
    else:
        swa_tiles = tl.cdiv(swa_len, BN)
        tiles = swa_tiles + tl.cdiv(cmp_len, BN)

    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc0 = tl.zeros((BH, 128), tl.float32)
    acc1 = tl.zeros((BH, 128), tl.float32)
    acc2 = tl.zeros((BH, 128), tl.float32)
    acc3 = tl.zeros((BH, 128), tl.float32)
    swa_row = swa_idx_ptr + token * W
    cmp_row = cmp_idx_ptr + token * K
    table_row = None
    if table_ptr is not None:
        table_row = table_ptr + tl.load(request_ptr + token).to(tl.int64) * table_stride
    q_at = q_ptr + ((token * QH + head)[:, None] * 512 + tl.arange(0, 128)[None, :])
    if ONE:
        top, total, acc0, acc1, acc2, acc3 = _tile(
            split, top, total, acc0, acc1, acc2, acc3, acc0, acc1, acc2, acc3, q_at, inside,
            swa_ptr, cmp_ptr, swa_row, cmp_row, swa_len, cmp_len, swa_tiles, splits, table_row,
            W, K, SWA_PAGE, SWA_STRIDE, CMP_PAGE, CMP_STRIDE, SWA_SHIFT, CMP_SHIFT, BH, BN, ONE, FIXED, PIN,
        )  # fmt: skip
    else:
        q0, q1, q2, q3 = _load_q(q_at, inside)
        share = tl.cdiv(tiles, splits)
        first = split * share
        last = tl.minimum(first + share, tiles)
        for tile in range(first, last):
            top, total, acc0, acc1, acc2, acc3 = _tile(
                tile, top, total, acc0, acc1, acc2, acc3, q0, q1, q2, q3, q_at, inside,
                swa_ptr, cmp_ptr, swa_row, cmp_row, swa_len, cmp_len, swa_tiles, splits, table_row,
                W, K, SWA_PAGE, SWA_STRIDE, CMP_PAGE, CMP_STRIDE, SWA_SHIFT, CMP_SHIFT, BH, BN, ONE, FIXED, PIN,
            )  # fmt: skip

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
    o_at = o_ptr + row
    if O8 and not SPLIT:
        scale_at = scale_ptr + (token * H + head)[:, None] * 4
        _store_quantized(acc0 * norm, o_at, scale_at, inside)
        _store_quantized(acc1 * norm, o_at + 128, scale_at + 1, inside)
        _store_quantized(acc2 * norm, o_at + 256, scale_at + 2, inside)
        last_piece = _rotate_back(acc3 * norm, tl.load(position_ptr + token), cos_sin_ptr, BH)
        _store_quantized(last_piece, o_at + 384, scale_at + 3, inside)
    else:
        tl.store(o_at, (acc0 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_at + 128, (acc1 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_at + 256, (acc2 * norm).to(tl.bfloat16), mask=inside)
        tl.store(o_at + 384, (acc3 * norm).to(tl.bfloat16), mask=inside)
