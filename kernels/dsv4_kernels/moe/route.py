# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803
"""Steps that larger batches need around the two products (Triton): count-sort of pairs by expert, quantisation, the sum
over experts."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import quantize_e4m3, ue8m0_to_f32
from dsv4_kernels.moe.mma import rounded_sum


@triton.jit(do_not_specialize=["pairs"])
def moe_sort_kernel(
    ids_ptr,  # i32 [pairs]
    rows_ptr,  # i32 [most tiles · BLOCK_M]: the pair in each row, −1 in padding
    tile_ptr,  # i32 [1 + most tiles]: the number of tiles, then each tile's expert
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # power of two ≥ EXPERTS
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (EXPERTS). Every program counts all ids, so that it knows where its own expert's tiles start without waiting
    for another program; then it places its pairs in their own order. Stable, no atomics, one launch. Ids outside
    0..EXPERTS−1 go nowhere."""
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    expert = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < pairs, other=-1)
        counts += tl.histogram(tl.maximum(ids, 0), BINS, mask=(ids >= 0) & (ids < EXPERTS))
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(expert < mine, tiles, 0), axis=0)
    count = tl.sum(tl.where(expert == mine, counts, 0), axis=0)
    if mine == 0:
        tl.store(tile_ptr, tl.sum(tiles, axis=0))
    own_tiles = (count + BLOCK_M - 1) // BLOCK_M
    for tile in range(0, own_tiles):
        tl.store(tile_ptr + 1 + start + tile, mine)
    rows_at = rows_ptr + start * BLOCK_M
    pad = count + tl.arange(0, BLOCK_M)
    tl.store(rows_at + pad, tl.full((BLOCK_M,), -1, tl.int32), mask=pad < own_tiles * BLOCK_M)
    placed = 0
    for first in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < pairs, other=-1)
        own = (ids == mine).to(tl.int32)
        tl.store(rows_at + placed + tl.cumsum(own, axis=0) - 1, first + lane, mask=own != 0)
        placed += tl.sum(own, axis=0)


@triton.jit
def moe_prepare_kernel(
    x_ptr,  # bf16 [T, HIDDEN]
    out_ptr,  # E4M3 [T, HIDDEN] ("mx") or bf16 [T, HIDDEN] ("dot": even columns, then odd ones)
    scale_ptr,  # u8 [T, HIDDEN/32], only written by "mx"
    FLOOR: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    MMA: tl.constexpr,
    A8: tl.constexpr,
):
    """Grid (T, HIDDEN / BLOCK). x as the products take it, once per token instead of once per expert that the token
    goes to."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    groups: tl.constexpr = BLOCK // 32
    x = tl.load(x_ptr + row + column)
    if A8:
        code, scale = quantize_e4m3(x.to(tl.float32).reshape(1, BLOCK), FLOOR, groups, 32)
        if MMA == "mx":
            tl.store(out_ptr + row + column, code.reshape(BLOCK))
            at_scale = row // 32 + tl.program_id(1) * groups + tl.arange(0, groups)
            tl.store(scale_ptr + at_scale, scale.reshape(groups).to(tl.uint8))
        else:
            wide = code.to(tl.float32).reshape(groups, 32) * ue8m0_to_f32(scale).reshape(groups, 1)
            tl.store(out_ptr + row + column % 2 * (HIDDEN // 2) + column // 2, wide.reshape(BLOCK).to(tl.bfloat16))
    else:
        tl.store(out_ptr + row + column % 2 * (HIDDEN // 2) + column // 2, x)


@triton.jit
def moe_combine_kernel(
    y_ptr,  # bf16 [T·TOPK, HIDDEN]
    ids_ptr,  # i32 [T, TOPK]
    out_ptr,  # bf16 [T, HIDDEN]
    addend_ptr,  # bf16 [T, HIDDEN] or None, see rounded_sum
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, HIDDEN / BLOCK). out[t] = Σ_j y[t·TOPK + j] in float32 and in order; rows of invalid ids were never
    written: not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + token * TOPK + j)
        valid = (expert >= 0) & (expert < EXPERTS)
        total += tl.load(y_ptr + (token * TOPK + j) * HIDDEN + column, mask=valid, other=0.0).to(tl.float32)
    if addend_ptr is not None:
        total = rounded_sum(total, tl.load(addend_ptr + token * HIDDEN + column))
    tl.store(out_ptr + token * HIDDEN + column, total.to(tl.bfloat16))
