"""The compressor and its projections (Triton).

The compressor saves states, gathers windows and stores entries. A program of the projections computes a few columns of
a compressor's state, or of the indexer's weights, for all tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import is_last, quantize_e4m3, ue8m0_to_f32


@triton.jit(do_not_specialize=["kv_stride", "score_stride"])
def compressor_save_kernel(
    kv_ptr,  # f32 [T', W], rows kv_stride apart
    score_ptr,  # f32 [T', W], rows score_stride apart
    ape_ptr,  # f32 [RATIO, W]
    position_ptr,  # i64 [T']
    slot_ptr,  # i64 [T]
    state_ptr,  # f32 [blocks, BLOCK, 2W], blocks STATE_STRIDE apart
    kv_stride,
    score_stride,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
):
    """Save the projections of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        column = tl.arange(0, W)
        row = tl.load(position_ptr + token) % RATIO
        kv = tl.load(kv_ptr + token * kv_stride + column)
        score = tl.load(score_ptr + token * score_stride + column) + tl.load(ape_ptr + row * W + column)
        at = state_ptr + (slot // BLOCK) * STATE_STRIDE + (slot % BLOCK) * (2 * W) + column
        tl.store(at, kv)
        tl.store(at + W, score)


@triton.jit
def _gather(
    state_ptr, table_row, position, first, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, RATIO: tl.constexpr,
    BLOCK: tl.constexpr, STATE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Columns first to first + N of the compressed window that ends at `position`: f32 [N]."""
    rows: tl.constexpr = RATIO * (W // D)
    row = tl.arange(0, rows)
    at = position - (rows - 1) + row
    there = at >= 0
    at = tl.where(there, at, 0)
    block = tl.load(table_row + at // BLOCK, mask=there, other=0).to(tl.int64)
    # Of an overlapping window the second half of the rows has its columns behind those of the first.
    base = block * STATE_STRIDE + (at % BLOCK) * (2 * W) + (row // RATIO) * D + first
    value_at = state_ptr + base[:, None] + tl.arange(0, N)[None, :]
    score = tl.load(value_at + W, mask=there[:, None], other=float("-inf"))
    value = tl.load(value_at, mask=there[:, None], other=0.0)
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    return tl.sum(value * weight, axis=0) / tl.sum(weight, axis=0)


@triton.jit
def _constants(position, weight_ptr, cos_sin_ptr, D: tl.constexpr, RATIO: tl.constexpr):
    """Load the norm's weight [D], and cos and sin f32 [D/2] of every pair, for an entry at `position`.

    Loaded before the entry is there: behind the sums of the norm each would be waited for by itself.
    """
    weight = tl.load(weight_ptr + tl.arange(0, D))
    pair = tl.arange(0, D // 2)
    turned = pair >= D // 2 - 32
    angle_at = cos_sin_ptr + position // RATIO * RATIO * 64 + tl.where(turned, pair - (D // 2 - 32), 0)
    cos = tl.load(angle_at, mask=turned, other=1.0)
    sin = tl.load(angle_at + 32, mask=turned, other=0.0)
    return weight, cos, sin


@triton.jit
def _rotate(x, cos, sin, D: tl.constexpr):
    """Return x f32 [D] with its last 64 values turned, as interleaved pairs, by cos and sin of `_constants`."""
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (D,))


@triton.jit
def _store(
    x, slot, weight, cos, sin, cache_ptr, eps, D: tl.constexpr, PAGE: tl.constexpr, CACHE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate, quantise and store one entry, x f32 [D]; weight, cos and sin as `_constants` has them."""
    column = tl.arange(0, D)
    norm = x * (1.0 / tl.sqrt_rn(tl.sum(x * x) / D + eps)) * weight.to(tl.float32)
    turned = _rotate(norm, cos, sin, D)
    page, offset = (slot // PAGE) * CACHE_STRIDE, slot % PAGE
    if D == 512:
        rounded = norm.to(tl.bfloat16).to(tl.float32)
        code, scale = quantize_e4m3(tl.reshape(rounded, (1, D)), 1e-4, 8, 64)
        data = page + offset * 576
        code = tl.reshape(code, (D,)).to(tl.uint8, bitcast=True)
        tl.store(cache_ptr + data + column, code, mask=column < 448)
        wide_ptr = cache_ptr.to(tl.pointer_type(tl.bfloat16))
        tl.store(wide_ptr + data // 2 + column - 224, turned.to(tl.bfloat16), mask=column >= 448)
        group = tl.arange(0, 8)[None, :]
        scale = tl.where(group < 7, scale, 0)
        tl.store(cache_ptr + page + PAGE * 576 + offset * 8 + group, scale.to(tl.uint8))
    else:
        rounded = turned.to(tl.bfloat16).to(tl.float32)
        code, scale = quantize_e4m3(tl.reshape(rounded, (1, D)), 1e-4, 1, D)
        code = tl.reshape(code, (D,)).to(tl.uint8, bitcast=True)
        tl.store(cache_ptr + page + offset * D + column, code)
        scale_ptr = (cache_ptr + page + PAGE * D).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptr + offset + tl.arange(0, 1)[None, :], ue8m0_to_f32(scale))


@triton.jit(do_not_specialize=["mapped", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def compressor_store_kernel(
    state_ptr,  # f32 [blocks, BLOCK, 2W], blocks STATE_STRIDE apart
    request_ptr,  # i32 [mapped]
    position_ptr,  # i64 [T']
    slot_ptr,  # i64 [T]
    table_ptr,  # i32 [requests, table_stride]
    weight_ptr,  # bf16 or f32 [D]
    cos_sin_ptr,  # f32 [positions, 64]
    cache_ptr,  # u8 [pages, ·], pages CACHE_STRIDE apart
    cache_slot_ptr,  # i64 [T]
    part_ptr,  # f32 [T, D] (N < D)
    count_ptr,  # i32 [T], see is_last (N < D)
    mapped,
    table_stride,
    eps,
    D: tl.constexpr,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    N: tl.constexpr,  # columns of one program
):
    """Gather `N` columns of one token's window; the last program to arrive stores the entry."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    cache_slot = tl.load(cache_slot_ptr + token)
    # Loaded with the others: each load that waits for another one's value is a way to memory more.
    request = tl.load(request_ptr + token, mask=token < mapped, other=0).to(tl.int64)
    table_row = table_ptr + request * table_stride
    if (tl.load(slot_ptr + token) >= 0) & (cache_slot >= 0) & ((position + 1) % RATIO == 0):
        first = tl.program_id(1) * N
        weight, cos, sin = _constants(position, weight_ptr, cos_sin_ptr, D, RATIO)
        x = _gather(state_ptr, table_row, position, first, D, N, W, RATIO, BLOCK, STATE_STRIDE)
        if N == D:
            _store(x, cache_slot, weight, cos, sin, cache_ptr, eps, D, PAGE, CACHE_STRIDE)
        else:
            tl.store(part_ptr + token * D + first + tl.arange(0, N), x)
            if is_last(count_ptr + token, D // N):
                whole = tl.load(part_ptr + token * D + tl.arange(0, D), cache_modifier=".cg")
                _store(whole, cache_slot, weight, cos, sin, cache_ptr, eps, D, PAGE, CACHE_STRIDE)


@triton.jit
def _product(
    x_ptr, weight_ptr, rows, tokens, first, H: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Return x [BT, H] times rows `first` to first + BN of a weight of `rows` rows: f32 [BT, BN]."""
    token = tl.arange(0, BT).to(tl.int64)
    row = first.to(tl.int64) + tl.arange(0, BN)
    acc = tl.zeros((BT, BN), tl.float32)
    for begin in range(0, H, BK):
        column = begin + tl.arange(0, BK)
        there = (column < H)[None, :]
        x = tl.load(x_ptr + token[:, None] * H + column[None, :], mask=(token < tokens)[:, None] & there, other=0.0)
        weight_at = weight_ptr + row[:, None] * H + column[None, :]
        weight = tl.load(weight_at, mask=(row < rows)[:, None] & there, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc)
    return acc


@triton.jit
def _save(
    acc, ape_ptr, position_ptr, slot_ptr, state_ptr, saved, first, W: tl.constexpr, RATIO: tl.constexpr,
    BLOCK: tl.constexpr, STATE_STRIDE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store columns `first` to first + BN of the states of all tokens, acc f32 [BT, BN]."""
    token = tl.arange(0, BT)
    slot = tl.load(slot_ptr + token, mask=token < saved, other=-1)
    there = (slot >= 0)[:, None]
    column = first + tl.arange(0, BN)
    if first >= W:
        row = tl.load(position_ptr + token, mask=token < saved, other=0) % RATIO
        acc += tl.load(ape_ptr + row[:, None] * W + (column - W)[None, :], mask=there, other=0.0)
    at = state_ptr + ((slot // BLOCK) * STATE_STRIDE + (slot % BLOCK) * (2 * W))[:, None] + column[None, :]
    tl.store(at, acc, mask=there)


@triton.jit(
    do_not_specialize=["tokens", "saved"],
    do_not_specialize_on_alignment=["position_ptr", "slot_ptr", "index_slot_ptr"],
)
def projections_kernel(
    x_ptr,  # bf16 [T, H]
    position_ptr,  # i64 [T']
    weight_ptr,  # bf16 [2W, H]
    ape_ptr,  # f32 [RATIO, W]
    state_ptr,  # f32 [blocks, BLOCK, 2W], blocks STATE_STRIDE apart
    slot_ptr,  # i64 [saved]
    index_weight_ptr,  # bf16 [2·INDEX_W, H]
    index_ape_ptr,  # f32 [RATIO, INDEX_W]
    index_state_ptr,  # f32 [blocks, BLOCK, 2·INDEX_W], blocks INDEX_STRIDE apart
    index_slot_ptr,  # i64 [saved]
    head_weight_ptr,  # bf16 [HEADS, H]
    head_ptr,  # bf16 [T, HEADS]
    tokens,
    saved,
    H: tl.constexpr,
    W: tl.constexpr,
    INDEX_W: tl.constexpr,  # 0: there is no indexer
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    INDEX_STRIDE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,  # divides W and INDEX_W
    BK: tl.constexpr,
):
    """`BN` columns of the layer's compressor, of the indexer's, or of the indexer's weights, in this order."""
    first = tl.program_id(0) * BN
    of_layer = first < 2 * W
    of_index = first < 2 * W + 2 * INDEX_W
    # Chosen as scalars: with a loop in each branch there would be a ring of buffers for each.
    weight = weight_ptr if of_layer else (index_weight_ptr if of_index else head_weight_ptr)
    rows = 2 * W if of_layer else (2 * INDEX_W if of_index else HEADS)
    first -= 0 if of_layer else (2 * W if of_index else 2 * W + 2 * INDEX_W)
    acc = _product(x_ptr, weight, rows, tokens, first, H, BT, BN, BK)
    if of_layer:
        _save(acc, ape_ptr, position_ptr, slot_ptr, state_ptr, saved, first, W, RATIO, BLOCK, STATE_STRIDE, BT, BN)
    elif of_index:
        _save(
            acc, index_ape_ptr, position_ptr, index_slot_ptr, index_state_ptr, saved, first, INDEX_W, RATIO, BLOCK,
            INDEX_STRIDE, BT, BN,
        )  # fmt: skip
    else:
        token = tl.arange(0, BT)
        column = first + tl.arange(0, BN)
        there = (token < tokens)[:, None] & (column < HEADS)[None, :]
        tl.store(head_ptr + token[:, None] * HEADS + column[None, :], acc.to(tl.bfloat16), mask=there)
