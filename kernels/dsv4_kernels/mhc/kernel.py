"""Hyper-connections (Triton): one kernel that mixes over columns, one that finishes tokens.

The mix kernel divides tokens × columns among programs and leaves partial products with fn and partial sums of squares;
the apply kernel adds them, and has programs of two kinds: Sinkhorn's iteration is a chain of some 40 dependent steps
and runs beside the programs that read the residual, not in front of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4_kernels.device import quantize_e4m3

# A row of partial results: 24 products (4 for the head), the sum of squares, and padding.
WIDTH = tl.constexpr(32)
SQUARES = tl.constexpr(24)


@triton.jit
def _terms(fn):
    """fn f32 as three bf16 terms, which hold all its 24 bits."""
    high = fn.to(tl.bfloat16)
    rest = fn - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _mix(acc, values, fn_at, keep, PLANES: tl.constexpr):
    """acc f32 [BT, 32] + values bf16 [BT, BC] · fnᵀ: exact products, float32 sums.

    PLANES: the terms of fn lie apart already, so many values from one another; 0: fn_at leads to f32.
    """
    if PLANES:
        high = tl.load(fn_at, mask=keep, other=0.0)
        middle = tl.load(fn_at + PLANES, mask=keep, other=0.0)
        low = tl.load(fn_at + 2 * PLANES, mask=keep, other=0.0)
    else:
        high, middle, low = _terms(tl.load(fn_at, mask=keep, other=0.0))
    acc = tl.dot(values, tl.trans(low), acc)
    acc = tl.dot(values, tl.trans(middle), acc)
    return tl.dot(values, tl.trans(high), acc)


@triton.jit
def _combine(x, r0, r1, r2, r3, post, c0, c1, c2, c3, PIN: tl.constexpr):
    """One new stream: post·x + Σ_i c_i·r_i, rounded to bf16; coefficients are f32 [BT].

    PIN: end in an operation with side effects. Without one the compiler computes the stream a second time in the
    layout of the product, and keeps the 20 coefficients in registers in both.
    """
    out = post[:, None] * x + c0[:, None] * r0
    out += c1[:, None] * r1
    out += c2[:, None] * r2
    out += c3[:, None] * r3
    out = out.to(tl.bfloat16)
    if PIN:
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [out], tl.bfloat16, is_pure=False, pack=2)
    return out


@triton.jit
def _column_of_comb(comb_ptr, token, keep, j: tl.constexpr):
    """comb[:, i, j] for the four i, each f32 [BT]."""
    at = comb_ptr + token * 16 + j
    return (
        tl.load(at, mask=keep, other=0.0),
        tl.load(at + 4, mask=keep, other=0.0),
        tl.load(at + 8, mask=keep, other=0.0),
        tl.load(at + 12, mask=keep, other=0.0),
    )


@triton.jit(do_not_specialize=["tokens"])
def mhc_mix_kernel(
    x_ptr,  # bf16 [T, H] (POST)
    residual_ptr,  # bf16 [T, STREAMS, H]
    post_ptr,  # f32 [T, 4] (POST)
    comb_ptr,  # f32 [T, 4, 4] (POST)
    fn_ptr,  # f32 [ROWS, STREAMS * H] (ROWS > 0)
    out_ptr,  # bf16 [T, 4, H] (POST); may be residual_ptr
    part_ptr,  # f32 [splits, T, 32] (ROWS > 0)
    tokens,
    H: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of fn; 0: no products
    POST: tl.constexpr,
    SPAN: tl.constexpr,  # columns of one split, a multiple of BC
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,  # fn_ptr is bf16 [3, ROWS, STREAMS * H], the terms of fn
    EARLY: tl.constexpr,  # the apply kernel may be put in place while this one runs
):
    """Post (with POST) and partial products of `BT` tokens over `SPAN` columns; see the package docstring."""
    if EARLY:
        gdc_launch_dependents()
    # The splits of a block of tokens run side by side, so that the tokens written last are those in L2 at the end.
    split, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if ROWS == 0:
        split, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block.to(tl.int64) * BT + tl.arange(0, BT)
    here = token < tokens
    planes: tl.constexpr = ROWS * STREAMS * H if APART else 0
    row = tl.arange(0, WIDTH)
    acc = tl.zeros((BT, WIDTH), tl.float32)
    squares = tl.zeros((BT, BC), tl.float32)
    if POST:
        c00, c10, c20, c30 = _column_of_comb(comb_ptr, token, here, 0)
        c01, c11, c21, c31 = _column_of_comb(comb_ptr, token, here, 1)
        c02, c12, c22, c32 = _column_of_comb(comb_ptr, token, here, 2)
        c03, c13, c23, c33 = _column_of_comb(comb_ptr, token, here, 3)
        p0 = tl.load(post_ptr + token * 4, mask=here, other=0.0)
        p1 = tl.load(post_ptr + token * 4 + 1, mask=here, other=0.0)
        p2 = tl.load(post_ptr + token * 4 + 2, mask=here, other=0.0)
        p3 = tl.load(post_ptr + token * 4 + 3, mask=here, other=0.0)
    start = split.to(tl.int32) * SPAN
    for begin in tl.range(start, tl.minimum(start + SPAN, H), BC, num_stages=STAGES):
        column = begin + tl.arange(0, BC)
        inside = here[:, None] & (column < H)[None, :]
        fn_at = fn_ptr + row[:, None] * (STREAMS * H) + column[None, :]
        fn_in = (row < ROWS)[:, None] & (column < H)[None, :]
        at = residual_ptr + token[:, None] * (STREAMS * H) + column[None, :]
        r0 = tl.load(at, mask=inside, other=0.0)
        if STREAMS == 4:
            r1 = tl.load(at + H, mask=inside, other=0.0)
            r2 = tl.load(at + 2 * H, mask=inside, other=0.0)
            r3 = tl.load(at + 3 * H, mask=inside, other=0.0)
        if POST:
            x = tl.load(x_ptr + token[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
            f0, f1, f2, f3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            r0 = _combine(x, f0, f1, f2, f3, p0, c00, c10, c20, c30, EARLY)
            r1 = _combine(x, f0, f1, f2, f3, p1, c01, c11, c21, c31, EARLY)
            r2 = _combine(x, f0, f1, f2, f3, p2, c02, c12, c22, c32, EARLY)
            r3 = _combine(x, f0, f1, f2, f3, p3, c03, c13, c23, c33, EARLY)
            out_at = out_ptr + token[:, None] * (4 * H) + column[None, :]
            tl.store(out_at, r0, mask=inside)
            tl.store(out_at + H, r1, mask=inside)
            tl.store(out_at + 2 * H, r2, mask=inside)
            tl.store(out_at + 3 * H, r3, mask=inside)
        if ROWS > 0:
            acc = _mix(acc, r0, fn_at, fn_in, planes)
            squares += r0.to(tl.float32) * r0.to(tl.float32)
            if STREAMS == 4:
                acc = _mix(acc, r1, fn_at + H, fn_in, planes)
                acc = _mix(acc, r2, fn_at + 2 * H, fn_in, planes)
                acc = _mix(acc, r3, fn_at + 3 * H, fn_in, planes)
                squares += r1.to(tl.float32) * r1.to(tl.float32)
                squares += r2.to(tl.float32) * r2.to(tl.float32)
                squares += r3.to(tl.float32) * r3.to(tl.float32)
    if ROWS > 0:
        # Rows of fn beyond ROWS are zero, so column SQUARES of the products is free.
        acc += tl.where((row == SQUARES)[None, :], tl.sum(squares, axis=1)[:, None], 0.0)
        part_at = part_ptr + ((split * tokens + token) * WIDTH)[:, None] + row[None, :]
        tl.store(part_at, acc, mask=here[:, None])


@triton.jit
def mhc_planes_kernel(
    fn_ptr,  # f32 [N]
    out_ptr,  # bf16 [3, N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take `BLOCK` of the N values of fn apart into terms."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    high, middle, low = _terms(tl.load(fn_ptr + at, mask=inside, other=0.0))
    tl.store(out_ptr + at, high, mask=inside)
    tl.store(out_ptr + N + at, middle, mask=inside)
    tl.store(out_ptr + 2 * N + at, low, mask=inside)


@triton.jit
def _sum_parts(part_ptr, token, here, splits, tokens, OFFSET: tl.constexpr, N: tl.constexpr, BS: tl.constexpr):
    """Columns OFFSET to OFFSET + N of the sums over splits: f32 [BT, N]. BS = 1: one split after the other."""
    column = OFFSET + tl.arange(0, N)
    if BS == 1:
        at = part_ptr + (token * WIDTH)[:, None] + column[None, :]
        total = tl.load(at, mask=here[:, None], other=0.0)
        for _ in range(1, splits):
            at += tokens.to(tl.int64) * WIDTH
            total += tl.load(at, mask=here[:, None], other=0.0)
    else:
        split = tl.arange(0, BS).to(tl.int64)
        at = (split[:, None] * tokens + token[None, :]) * WIDTH
        keep = (split < splits)[:, None, None] & here[None, :, None]
        total = tl.sum(tl.load(part_ptr + at[:, :, None] + column[None, None, :], mask=keep, other=0.0), axis=0)
    return total


@triton.jit
def _inverse_rms(mixes, COLUMNS: tl.constexpr, eps):
    """1 / sqrt(mean of squares + eps) from partial sums f32 [BT, 32]: f32 [BT]."""
    squares = tl.sum(tl.where((tl.arange(0, WIDTH) == SQUARES)[None, :], mixes, 0.0), axis=1)
    return 1.0 / tl.sqrt_rn(squares / COLUMNS + eps)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _coefficients(
    token, here, part_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, tokens, splits, rms_eps, post_mult, sinkhorn_eps,
    repeat, COLUMNS: tl.constexpr, BS: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """post and comb of `CT` tokens."""
    column = tl.arange(0, WIDTH)
    square = tl.arange(0, 16)
    is_post = (column >= 4) & (column < 8)
    # The mix kernel writes none of these: they are under way while it still runs.
    post_scale, comb_scale = tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    post_base = tl.load(base_ptr + column, mask=is_post, other=0.0)
    comb_base = tl.load(base_ptr + 8 + square)
    if EARLY:
        gdc_wait()
    mixes = _sum_parts(part_ptr, token, here, splits, tokens, 0, WIDTH, BS)
    comb = _sum_parts(part_ptr, token, here, splits, tokens, 8, 16, BS)
    inverse = _inverse_rms(mixes, COLUMNS, rms_eps)
    post = _sigmoid(mixes * inverse[:, None] * post_scale + post_base[None, :]) * post_mult
    post_at = post_ptr + token[:, None] * 4 + (column - 4)[None, :]
    tl.store(post_at, post, mask=here[:, None] & is_post[None, :])

    comb = comb * inverse[:, None] * comb_scale + comb_base[None, :]
    comb = tl.reshape(comb, (CT, 4, 4))
    comb = tl.exp(comb - tl.max(comb, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + sinkhorn_eps
    comb = comb / (tl.sum(comb, axis=1)[:, None, :] + sinkhorn_eps)
    for _ in range(repeat - 1):
        comb = comb / (tl.sum(comb, axis=2)[:, :, None] + sinkhorn_eps)
        comb = comb / (tl.sum(comb, axis=1)[:, None, :] + sinkhorn_eps)
    comb_at = comb_ptr + token[:, None] * 16 + square[None, :]
    tl.store(comb_at, tl.reshape(comb, (CT, 16)), mask=here[:, None])


@triton.jit
def _pick(values, i: tl.constexpr):
    """Element i of f32 [1, 32] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == i, values, 0.0))


@triton.jit
def _layer_input(
    token, part_ptr, scale_ptr, base_ptr, residual_ptr, weight_ptr, stream_ptr, y_ptr, code_ptr, code_scale_ptr, tokens,
    splits, rms_eps, pre_eps, norm_eps, H: tl.constexpr, STREAMS: tl.constexpr, NORM: tl.constexpr, BS: tl.constexpr,
    BH: tl.constexpr, QUANT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of one token, with QUANT its FP8 codes and, of a broadcast residual, its four streams."""
    h = tl.arange(0, BH)
    inside = h < H
    column = tl.arange(0, WIDTH)
    # As in `_coefficients`.
    scale = tl.load(scale_ptr)
    base = tl.load(base_ptr + column, mask=column < 4, other=0.0)
    if NORM:
        weight = tl.load(weight_ptr + h, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    at = residual_ptr + token * (STREAMS * H) + h
    # The long loads come first and are under way while the coefficients are computed.
    r0 = tl.load(at, mask=inside, other=0.0)
    if STREAMS == 4:
        r1 = tl.load(at + H, mask=inside, other=0.0)
        r2 = tl.load(at + 2 * H, mask=inside, other=0.0)
        r3 = tl.load(at + 3 * H, mask=inside, other=0.0)
    one = token + tl.arange(0, 1)
    mixes = _sum_parts(part_ptr, one, one < tokens, splits, tokens, 0, WIDTH, BS)
    mixes *= _inverse_rms(mixes, STREAMS * H, rms_eps)[:, None]
    pre = _sigmoid(mixes * scale + base[None, :]) + pre_eps
    if STREAMS == 4:
        y = _pick(pre, 0) * r0.to(tl.float32)
        y += _pick(pre, 1) * r1.to(tl.float32)
        y += _pick(pre, 2) * r2.to(tl.float32)
        y += _pick(pre, 3) * r3.to(tl.float32)
    else:
        y = (_pick(pre, 0) + _pick(pre, 1) + _pick(pre, 2) + _pick(pre, 3)) * r0.to(tl.float32)
        stream_at = stream_ptr + token * (4 * H) + h
        tl.store(stream_at, r0, mask=inside)
        tl.store(stream_at + H, r0, mask=inside)
        tl.store(stream_at + 2 * H, r0, mask=inside)
        tl.store(stream_at + 3 * H, r0, mask=inside)
    if NORM:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(y * y) / H + norm_eps)) * weight.to(tl.float32)
    rounded = y.to(tl.bfloat16)
    if QUANT:
        # Of the rounded values, as a product that reads y would quantise them.
        code, scale = quantize_e4m3(rounded.to(tl.float32)[None, :], 1e-4, BH // 128, 128)
        group = tl.arange(0, BH // 128)[None, :]
        tl.store(code_ptr + token * H + h[None, :], code, mask=inside[None, :])
        scale_at = code_scale_ptr + token * (H // 128) + group
        tl.store(scale_at, scale.to(tl.uint8), mask=group < H // 128)
    tl.store(y_ptr + token * H + h, rounded, mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits", "repeat"])
def mhc_apply_kernel(
    part_ptr,  # f32 [splits, T, 32]
    scale_ptr,  # f32 [3] or, for the head, [1]
    base_ptr,  # f32 [24] or, for the head, [4]
    residual_ptr,  # bf16 [T, STREAMS, H]
    weight_ptr,  # bf16 [H] (NORM)
    stream_ptr,  # bf16 [T, 4, H] (STREAMS == 1)
    post_ptr,  # f32 [T, 4] (not HEAD)
    comb_ptr,  # f32 [T, 4, 4] (not HEAD)
    y_ptr,  # bf16 [T, H]
    code_ptr,  # fp8 e4m3 [T, H] (QUANT)
    code_scale_ptr,  # u8 [T, H/128] (QUANT)
    tokens,
    splits,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    norm_eps,
    repeat,
    H: tl.constexpr,
    STREAMS: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    BS: tl.constexpr,
    CS: tl.constexpr,  # 1 or BS: splits that the programs for post and comb load at a time
    CT: tl.constexpr,
    BH: tl.constexpr,
    QUANT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """First ⌈T/CT⌉ programs for post and comb (not for the head), then one per token for y, from the last token on:
    L2 has them from the mix kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    groups = 0 if HEAD else tl.cdiv(tokens, CT)
    if program < groups:
        token = program * CT + tl.arange(0, CT)
        _coefficients(
            token, token < tokens, part_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, tokens, splits, rms_eps,
            post_mult, sinkhorn_eps, repeat, STREAMS * H, CS, CT, EARLY,
        )  # fmt: skip
    else:
        _layer_input(
            tokens - 1 - (program - groups), part_ptr, scale_ptr, base_ptr, residual_ptr, weight_ptr, stream_ptr, y_ptr,
            code_ptr, code_scale_ptr, tokens, splits, rms_eps, pre_eps, norm_eps, H, STREAMS, NORM, BS, BH, QUANT,
            EARLY,
        )  # fmt: skip
