"""The indexer's queries, its scores, and the selection of the k largest (Triton).

Keys are the rows of the product and heads its columns, so that the sum over heads stays within a few threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    # A tile's scales are loaded one tile ahead: Triton's pipeline has only the loads of the product.
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


@triton.jit
def _ordered(score):
    """float32 → uint32 keys in the same order; 0 is below every score but the least NaN."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _threshold(key, K: tl.constexpr, BITS: tl.constexpr = 32):
    """The K-th largest of the keys, or a bound below it of which only the first BITS bits are found: from the top bit
    down, each is set if K keys are still at least as large.
    """
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(BITS):
        found = tl.where(tl.sum((key >= (found | bit)).to(tl.int32)) >= K, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _place(key, valid, K: tl.constexpr):
    """Return which of the keys are the K largest, and the place of each among them in the order of the keys."""
    least = _threshold(key, K)
    above = key > least
    equal = (key == least) & valid
    # Two running counts in one scan: a chunk has at most 2¹⁵ of either.
    counts = tl.cumsum((above.to(tl.uint32) << 16) | equal.to(tl.uint32), axis=0)
    more = (counts >> 16).to(tl.int32)
    ties = (counts & 0xFFFF).to(tl.int32)
    room = K - tl.sum(above.to(tl.int32))
    return above | (equal & (ties <= room)), more + tl.minimum(ties, room) - 1


@triton.jit(
    do_not_specialize=["score_stride", "out_stride", "width"],
    do_not_specialize_on_alignment=["length_ptr", "out_ptr"],
)
def topk_kernel(
    score_ptr,  # f32 [R, ·], rows score_stride apart; not FIRST: candidates' keys i32 [R, parts of the level before, K]
    column_ptr,  # i32, beside score_ptr: the column of each candidate, −1 where there is none (not FIRST)
    length_ptr,  # i32 [R]
    out_key_ptr,  # i32 [R, parts, K] (not LAST)
    out_ptr,  # i32 [R, ·], rows out_stride apart; not LAST: [R, parts, K]
    score_stride,
    out_stride,
    width,  # candidates of a row (not FIRST)
    K: tl.constexpr,
    KP: tl.constexpr,  # the next power of two
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Choose K of one chunk of one row; see the package docstring."""
    if EARLY and not LAST:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    length = tl.load(length_ptr + row)
    start = part * CHUNK
    at = start + tl.arange(0, CHUNK)
    if LAST:
        out_at = out_ptr + row * out_stride
    else:
        slot = (row * tl.num_programs(1) + part) * K
        out_at = out_ptr + slot
    if EARLY and not FIRST:
        gdc_wait()
    if (length <= K) | (FIRST and start >= length):
        # The last level writes short rows whole; before it a chunk without scores has no candidates.
        if LAST or not (length <= K):
            k = tl.arange(0, KP)
            tl.store(out_at + k, tl.where(LAST & (k < length), k, -1), mask=k < K)
    else:
        if FIRST:
            valid = at < length
            column = at
        else:
            column = tl.load(column_ptr + row * width + at, mask=at < width, other=-1)
            valid = column >= 0
        # A missing score has the least key and, behind all real columns, loses every tie.
        key = tl.load(score_ptr + row * score_stride + at, mask=valid, other=0)
        key = tl.where(valid, _ordered(key) if FIRST else key.to(tl.uint32, bitcast=True), 0)
        taken, place = _place(key, valid, K)
        if not FIRST:
            column = tl.load(column_ptr + row * width + at, mask=taken, other=-1, cache_modifier=".cg")
        tl.store(out_at + place, column, mask=taken)
        if not LAST:
            # Read again: kept through the scan it would not fit the registers.
            key = tl.load(score_ptr + row * score_stride + at, mask=taken, other=0, cache_modifier=".cg")
            key = _ordered(key) if FIRST else key.to(tl.uint32, bitcast=True)
            tl.store(out_key_ptr + slot + place, key.to(tl.int32, bitcast=True), mask=taken)
            # A chunk with fewer than K scores: no candidates behind them.
            count = tl.sum(taken.to(tl.int32))
            k = tl.arange(0, KP)
            tl.store(out_at + k, -1, mask=(k >= count) & (k < K))


@triton.jit(do_not_specialize=["score_stride"], do_not_specialize_on_alignment=["length_ptr"])
def topk_bound_kernel(
    score_ptr,  # f32 [R, ·], rows score_stride apart
    length_ptr,  # i32 [R]
    bound_ptr,  # i32 [R, P]
    score_stride,
    K: tl.constexpr,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A bound below the EACH-th largest key of one part of one row; parts take turns, SPAN columns at a time."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    length = tl.load(length_ptr + row)
    if length > K:
        i = tl.arange(0, CHUNK)
        at = (i // SPAN * parts + part) * SPAN + i % SPAN
        valid = at < length
        score = tl.load(score_ptr + row * score_stride + at, mask=valid, other=0)
        bound = _threshold(tl.where(valid, _ordered(score), 0), EACH, 16)
        tl.store(bound_ptr + row * parts + part, bound.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["score_stride"], do_not_specialize_on_alignment=["length_ptr"])
def topk_gather_kernel(
    score_ptr,  # f32 [R, ·], rows score_stride apart
    length_ptr,  # i32 [R]
    bound_ptr,  # i32 [R, P]
    count_ptr,  # i32 [R, P]
    found_ptr,  # i32 [R, P, CHUNK]
    score_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The columns of one contiguous chunk that may be among the K largest, in order, and how many they are."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    length = tl.load(length_ptr + row)
    at = part * CHUNK + tl.arange(0, CHUNK)
    valid = at < length
    key = _ordered(tl.load(score_ptr + row * score_stride + at, mask=valid, other=0))
    if EARLY:
        gdc_wait()
    if length > K:
        slot = row * PARTS
        # Half of the parts reach it with as many keys each as make K together.
        bounds = tl.load(bound_ptr + slot + tl.arange(0, PARTS)).to(tl.uint32, bitcast=True)
        taken = valid & (key >= _threshold(bounds, PARTS // 2, 16))
        place = tl.cumsum(taken.to(tl.int32), axis=0)
        tl.store(found_ptr + (slot + part) * CHUNK + place - 1, at, mask=taken)
        tl.store(count_ptr + slot + part, tl.sum(taken.to(tl.int32)))


@triton.jit
def _located(i, valid, end_ptr, found_ptr, HALVINGS: tl.constexpr, CHUNK: tl.constexpr):
    """The column of the i-th candidate; end_ptr i32 [P]: how many candidates there are up to the end of each part."""
    part = i * 0
    for turn in tl.static_range(HALVINGS):
        ahead = 1 << (HALVINGS - 1 - turn)
        part += tl.where(tl.load(end_ptr + part + ahead - 1) <= i, ahead, 0)
    before = tl.load(end_ptr + part - 1, mask=part > 0, other=0)
    return tl.load(found_ptr + part * CHUNK + i - before, mask=valid, other=0)


@triton.jit(
    do_not_specialize=["score_stride", "out_stride"],
    do_not_specialize_on_alignment=["length_ptr", "out_ptr"],
)
def topk_choose_kernel(
    score_ptr,  # f32 [R, ·], rows score_stride apart
    length_ptr,  # i32 [R]
    count_ptr,  # i32 [R, P]
    found_ptr,  # i32 [R, P, CHUNK]
    end_ptr,  # i32 [R, P], scratch
    flat_key_ptr,  # i32 [R, P, CHUNK], scratch
    flat_ptr,  # i32 [R, P, CHUNK], scratch
    out_ptr,  # i32 [R, ·], rows out_stride apart
    score_stride,
    out_stride,
    K: tl.constexpr,
    KP: tl.constexpr,  # the next power of two
    HALVINGS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Choose K of the candidates of one row: at once where they fit ROOM, else tile by tile for every bit."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row)
    out_at = out_ptr + row * out_stride
    if EARLY:
        gdc_wait()
    if length <= K:
        k = tl.arange(0, KP)
        tl.store(out_at + k, tl.where(k < length, k, -1), mask=k < K)
    else:
        slot = row << HALVINGS
        p = tl.arange(0, 1 << HALVINGS)
        count = tl.load(count_ptr + slot + p)
        total = tl.sum(count)
        end_ptr += slot
        found_ptr += slot * CHUNK
        score_ptr += row * score_stride
        tl.store(end_ptr + p, tl.cumsum(count, axis=0))
        tl.debug_barrier()
        i = tl.arange(0, ROOM)
        if total <= ROOM:
            valid = i < total
            column = _located(i, valid, end_ptr, found_ptr, HALVINGS, CHUNK)
            key = tl.where(valid, _ordered(tl.load(score_ptr + column, mask=valid, other=0)), 0)
            taken, place = _place(key, valid, K)
            tl.store(out_at + place, column, mask=taken)
        else:
            flat_key_ptr += slot * CHUNK
            flat_ptr += slot * CHUNK
            for start in range(0, total, ROOM):
                valid = start + i < total
                column = _located(start + i, valid, end_ptr, found_ptr, HALVINGS, CHUNK)
                key = _ordered(tl.load(score_ptr + column, mask=valid, other=0))
                tl.store(flat_ptr + start + i, column, mask=valid)
                tl.store(flat_key_ptr + start + i, key.to(tl.int32, bitcast=True), mask=valid)
            tl.debug_barrier()
            least = tl.full((), 0, tl.uint32)
            more = tl.full((), 0, tl.int32)
            bit = tl.full((), 2147483648, tl.uint32)
            for _ in range(32):
                reached = tl.full((), 0, tl.int32)
                for start in range(0, total, ROOM):
                    key = tl.load(flat_key_ptr + start + i, mask=start + i < total, other=0).to(tl.uint32, bitcast=True)
                    reached += tl.sum((key >= (least | bit)).to(tl.int32))
                more = tl.where(reached >= K, more, reached)
                least = tl.where(reached >= K, least | bit, least)
                bit = bit >> 1
            # `more` keys are above the K-th largest: the last candidate that was not reached is the next above it.
            written = tl.full((), 0, tl.int32)
            seen = tl.full((), 0, tl.int32)
            for start in range(0, total, ROOM):
                valid = start + i < total
                key = tl.load(flat_key_ptr + start + i, mask=valid, other=0).to(tl.uint32, bitcast=True)
                above = valid & (key > least)
                equal = valid & (key == least)
                tie = seen + tl.cumsum(equal.to(tl.int32), axis=0)
                taken = above | (equal & (tie <= K - more))
                place = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                column = tl.load(flat_ptr + start + i, mask=taken, other=0)
                tl.store(out_at + place, column, mask=taken)
                seen += tl.sum(equal.to(tl.int32))
                written += tl.sum(taken.to(tl.int32))
