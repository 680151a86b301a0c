"""The indexer's queries and scores (Triton).

Keys are the rows of the product and heads its columns, so that the sum over heads stays within a few threads.
"""

# Triton's decorator and the arguments of kernels have no types.
# Compile-time constants are in capitals, as is usual in Triton.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import quantize_e4m3, ue8m0_to_f32


@triton.jit
def indexer_query_kernel(
    q_ptr,  # bf16 [T, H, 128]
    position_ptr,  # i64 [T]
    cos_sin_ptr,  # f32 [positions, 64]
    weight_ptr,  # bf16 or f32 [T, H]
    out_ptr,  # fp8 [T, H, 128]
    out_weight_ptr,  # f32 [T, H]
    softmax_scale,
    head_scale,
    H: tl.constexpr,
    BH: tl.constexpr,
):
    """`BH` heads of one token; see the package docstring."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = head < H
    column = tl.arange(0, 128)
    pair = tl.arange(0, 64)
    at = (token * H + head)[:, None] * 128 + column[None, :]
    angle_at = cos_sin_ptr + tl.load(position_ptr + token) * 64 + tl.where(pair >= 32, pair - 32, 0)
    cos = tl.load(angle_at, mask=pair >= 32, other=1.0)[None, :]
    sin = tl.load(angle_at + 32, mask=pair >= 32, other=0.0)[None, :]
    x = tl.load(q_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BH, 64, 2)))
    x = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BH, 128))
    code, scale = quantize_e4m3(x.to(tl.bfloat16).to(tl.float32), 1e-4, 1, 128)
    tl.store(out_ptr + at, code, mask=inside[:, None])
    weight = tl.load(weight_ptr + token * H + head, mask=inside, other=0.0).to(tl.float32)
    scale = tl.reshape(ue8m0_to_f32(scale), (BH,))
    tl.store(out_weight_ptr + token * H + head, weight * scale * softmax_scale * head_scale, mask=inside)


@triton.jit
def _query(q_ptr, weight_ptr, line, lines, H: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr):
    """Load queries fp8 [128, LP * HP] and weights f32 [LP * HP] of `lines` ≤ LP rows from `line` on; zeros beyond."""
    at = tl.arange(0, LP * HP)
    head, row = at % HP, at // HP
    inside = (head < H) & (row < lines)
    flat = (line + row) * H + head
    weight = tl.load(weight_ptr + flat, mask=inside, other=0.0)
    q_at = q_ptr + flat[None, :] * 128 + tl.arange(0, 128)[:, None]
    return tl.load(q_at, mask=inside[None, :], other=0.0), weight


@triton.jit
def _scores(k, q, weight, HP: tl.constexpr, LP: tl.constexpr, BN: tl.constexpr, MX: tl.constexpr):
    """Return Σ_h weight[h]·relu(k · q[h]) f32 [BN, LP] of keys fp8 [BN, 128] and a result of `_query`."""
    if MX:
        # Unit scales: on SM12x only the block-scaled instruction has the full rate.
        ones_k = tl.full((BN, 4), 127, tl.uint8)
        ones_q = tl.full((LP * HP, 4), 127, tl.uint8)
        score = tl.dot_scaled(k, ones_k, "e4m3", q, ones_q, "e4m3")
    else:
        score = tl.dot(k, q)
    score = tl.maximum(score, 0.0) * weight[None, :]
    if LP == 1:
        return tl.sum(score, axis=1)[:, None]
    return tl.sum(tl.reshape(score, (BN, LP, HP)), axis=2)


@triton.jit(do_not_specialize=["rows", "keys", "out_stride"], do_not_specialize_on_alignment=["out_ptr"])
def indexer_logits_kernel(
    q_ptr,  # fp8 [M, H, 128]
    k_ptr,  # fp8 [N, 128]
    k_scale_ptr,  # f32 [N]
    weight_ptr,  # f32 [M, H]
    start_ptr,  # i32 [M]
    end_ptr,  # i32 [M]
    out_ptr,  # f32 [M, ·], rows out_stride apart
    rows,
    keys,
    out_stride,
    H: tl.constexpr,
    HP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MX: tl.constexpr,
):
    """`BN` keys against `BM` rows, one row after the other; see the package docstring."""
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * BM
    row = first + tl.arange(0, BM)
    starts = tl.load(start_ptr + row, mask=row < rows, other=0)
    ends = tl.load(end_ptr + row, mask=row < rows, other=0)
    some = ends > starts
    lowest = tl.min(tl.where(some, starts, 2147483647))
    highest = tl.max(tl.where(some, ends, 0))
    if (tl.program_id(0) * BN < highest) & ((tl.program_id(0) + 1) * BN > lowest):
        column = tl.arange(0, 128)
        there = key < keys
        k_at = k_ptr + key.to(tl.int64)[:, None] * 128 + column[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        scale = tl.load(k_scale_ptr + key, mask=there, other=0.0)
        for i in range(0, tl.minimum(BM, rows - first)):
            line = first.to(tl.int64) + i
            start = tl.load(start_ptr + line)
            end = tl.load(end_ptr + line)
            q, weight = _query(q_ptr, weight_ptr, line, 1, H, HP, 1)
            value = tl.reshape(_scores(k, q, weight, HP, 1, BN, MX), (BN,)) * scale
            seen = (key >= start) & (key < end) & there
            tl.store(out_ptr + line * out_stride + (key - start), value, mask=seen)


@triton.jit
def _places(tile, longest, table_row, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return the positions of a tile's keys, which of them there are, their pages and their places in these."""
    position = tile * BN + tl.arange(0, BN)
    there = position < longest
    page = tl.load(table_row + position // PAGE, mask=there, other=0).to(tl.int64)
    return position, there, page, position % PAGE


@triton.jit
def _scales(tile, longest, table_row, cache_ptr, PAGE: tl.constexpr, CACHE_STRIDE: tl.constexpr, BN: tl.constexpr):
    """Load the scales f32 [BN] of a tile's keys."""
    _, there, page, slot = _places(tile, longest, table_row, PAGE, BN)
    scale_ptr = cache_ptr.to(tl.pointer_type(tl.float32))
    return tl.load(scale_ptr + page * (CACHE_STRIDE // 4) + PAGE * 32 + slot, mask=there, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "out_stride"], do_not_specialize_on_alignment=["table_ptr", "out_ptr"])
def indexer_paged_logits_kernel(
    q_ptr,  # fp8 [B, NEXT_N, H, 128]
    cache_ptr,  # fp8 [pages, ·], pages CACHE_STRIDE bytes apart
    weight_ptr,  # f32 [B * NEXT_N, H]
    length_ptr,  # i32 [B, NEXT_N]
    table_ptr,  # i32 [B, table_stride]
    out_ptr,  # f32 [B * NEXT_N, ·], rows out_stride apart
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    BN: tl.constexpr,
    MX: tl.constexpr,
):
    """Every ⌈programs⌉-th tile of `BN` keys of one request against its rows, LP in one product; see the package
    docstring.
    """
    request = tl.program_id(0).to(tl.int64)
    row = request * NEXT_N
    column = tl.arange(0, 128)
    line = tl.arange(0, LP)
    step = tl.num_programs(1)
    longest = tl.load(length_ptr + row)
    for n in tl.static_range(1, NEXT_N):
        longest = tl.maximum(longest, tl.load(length_ptr + row + n))
    table_row = table_ptr + request * table_stride
    if NEXT_N <= LP:
        q, weight = _query(q_ptr, weight_ptr, row, NEXT_N, H, HP, LP)
        length = tl.load(length_ptr + row + line, mask=line < NEXT_N, other=0)
    # A tile's scales are asked for one tile ahead: Triton's pipeline takes only what leads to the product.
    scale = _scales(tl.program_id(1), longest, table_row, cache_ptr, PAGE, CACHE_STRIDE, BN)
    for tile in range(tl.program_id(1), tl.cdiv(longest, BN), step):
        position, there, page, slot = _places(tile, longest, table_row, PAGE, BN)
        k_at = cache_ptr + (page * CACHE_STRIDE + slot * 128)[:, None] + column[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        following = _scales(tile + step, longest, table_row, cache_ptr, PAGE, CACHE_STRIDE, BN)
        for first in tl.static_range(0, NEXT_N, LP):
            if NEXT_N > LP:
                q, weight = _query(q_ptr, weight_ptr, row + first, NEXT_N - first, H, HP, LP)
                length = tl.load(length_ptr + row + first + line, mask=first + line < NEXT_N, other=0)
            value = _scores(k, q, weight, HP, LP, BN, MX) * scale[:, None]
            out_at = out_ptr + (row + first + line)[None, :] * out_stride + position[:, None]
            tl.store(out_at, value, mask=position[:, None] < length[None, :])
        scale = following
