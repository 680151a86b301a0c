# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803
"""MXFP4 mixture of experts (Triton): gate-up with activation, and down, for small batches and for sorted ones.

Weights are the left operand of every product (rows of W are the M side of the MMA, tokens its N side), so that a batch
of one token costs one 8-column tile. Two bodies: "mx" widens E2M1 to E4M3 and uses block-scaled MMA, "dot" widens to
bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4_kernels.device import quantize_e4m3
from dsv4_kernels.moe.mma import (
    AMAX_FLOOR,
    GROUP,
    UNBIAS,
    round_rows,
    round_through_e4m3,
    rounded_sum,
    step_dot,
    step_mx,
    sum_splits,
)


@triton.jit
def _activate(gate, up, weight, LIMIT: tl.constexpr):
    """Clamped SwiGLU times the routing weight, float32."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-gate)) * up * weight


@triton.jit
def _gate_up_tile(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    w_ptr,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
    expert,
    column,
    pair,
    inside,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    A8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PLANES: tl.constexpr,
    PTX: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """h[pair, column : column + BLOCK_N] for the BLOCK_M pairs of one expert; `inside` masks padding.

    x_ptr is bf16, with PLANES all even columns of a row before all odd ones, or with MMA "mx" and not QUANTIZE E4M3
    codes with x_scale_ptr. Gate and up rows alternate in the tile, so that
    one product serves both and a thread's neighbours hold the two halves of one h. SPLIT: see sum_splits.
    """
    half: tl.constexpr = BLOCK_K // 2
    groups: tl.constexpr = BLOCK_K // 32
    rows: tl.constexpr = 2 * BLOCK_N * SPLIT
    part: tl.constexpr = HIDDEN // SPLIT
    row = tl.arange(0, rows)
    start = row // (2 * BLOCK_N) * part
    row = (row % 2) * INTER + column + row % (2 * BLOCK_N) // 2
    at_byte = tl.arange(0, half)
    at_group = tl.arange(0, groups)
    columns: tl.constexpr = SPLIT * BLOCK_M
    token = tl.broadcast_to((pair // TOPK).to(tl.int64)[None, :], (SPLIT, BLOCK_M)).reshape(columns)
    token_in = tl.broadcast_to(inside[None, :], (SPLIT, BLOCK_M)).reshape(columns)[:, None]
    x_start = token * HIDDEN + tl.arange(0, columns) // BLOCK_M * part
    # Inside one expert offsets stay below 2^31 (2·3072·7168/2 bytes), so only the base is int64.
    w_at = (
        w_ptr + expert.to(tl.int64) * (INTER * HIDDEN) + (row * (HIDDEN // 2) + start // 2)[:, None] + at_byte[None, :]
    )
    w_scale_at = w_scale_ptr + expert.to(tl.int64) * (INTER * HIDDEN // 16)
    w_scale_at += (row * (HIDDEN // 32) + start // 32)[:, None] + at_group[None, :]
    # Before the loop: at its end nothing would hide the latency.
    weight = tl.load(weight_ptr + pair, mask=inside, other=0.0)
    acc = tl.zeros((rows, columns), tl.float32)
    if MMA == "mx":
        at_k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + x_start[:, None] + at_k[None, :]
        x_scale_at = x_scale_ptr + x_start[:, None] // 32 + at_group[None, :]
        for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
            w = tl.load(w_at + k // 2)
            w_scale = tl.load(w_scale_at + k // 32)
            x = tl.load(x_at + k, mask=token_in, other=0.0)
            if QUANTIZE:
                code, exponent = quantize_e4m3(x.to(tl.float32), AMAX_FLOOR, groups, GROUP)
                acc = step_mx(acc, w, w_scale, code, exponent.to(tl.uint8))
            else:
                x_scale = tl.load(x_scale_at + k // 32, mask=token_in, other=0)
                acc = step_mx(acc, w, w_scale, x, x_scale)
    else:
        for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
            w = tl.load(w_at + k // 2)
            w_scale = tl.load(w_scale_at + k // 32)
            if PLANES:
                x_at = x_ptr + x_start[:, None] + k // 2 + at_byte[None, :]
                even = tl.load(x_at, mask=token_in, other=0.0)
                odd = tl.load(x_at + HIDDEN // 2, mask=token_in, other=0.0)
            else:
                x_at = x_ptr.to(tl.pointer_type(tl.int32)) + x_start[:, None] // 2 + k // 2 + at_byte[None, :]
                both = tl.load(x_at, mask=token_in, other=0)
                even = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
                odd = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                if QUANTIZE:
                    even, odd = round_through_e4m3(even, odd)
            acc = step_dot(acc, w, w_scale, even, odd, PTX)
        acc *= UNBIAS
    acc = sum_splits(acc, SPLIT, 2 * BLOCK_N, BLOCK_M)
    gate, up = tl.split(acc.reshape(BLOCK_N, 2, BLOCK_M).permute(2, 0, 1))
    h = _activate(gate, up, weight[:, None], LIMIT)
    at_h = column + tl.arange(0, BLOCK_N)
    if MMA != "mx":
        # All even columns, then all odd ones: the order in which the down product takes them.
        at_h = at_h % 2 * (INTER // 2) + at_h // 2
    h_at = pair.to(tl.int64)[:, None] * INTER + at_h[None, :]
    if MMA == "mx":
        code, exponent = quantize_e4m3(h, AMAX_FLOOR, BLOCK_N // 32, GROUP)
        h_scale_at = pair.to(tl.int64)[:, None] * (INTER // 32) + column // 32 + tl.arange(0, BLOCK_N // 32)[None, :]
        tl.store(h_ptr + h_at, code, mask=inside[:, None])
        tl.store(h_scale_ptr + h_scale_at, exponent.to(tl.uint8), mask=inside[:, None])
    elif A8:
        tl.store(h_ptr + h_at, round_rows(h), mask=inside[:, None])
    else:
        tl.store(h_ptr + h_at, h.to(tl.bfloat16), mask=inside[:, None])


@triton.jit(do_not_specialize=["pairs"])
def moe_decode_up_kernel(
    x_ptr,  # bf16 [T, HIDDEN]
    ids_ptr,  # i32 [T, TOPK]
    weight_ptr,  # f32 [T, TOPK]
    w_ptr,  # u8 [E, 2·INTER, HIDDEN/2]
    w_scale_ptr,  # u8 [E, 2·INTER, HIDDEN/32]
    h_ptr,  # bf16 (even columns, then odd ones) or E4M3 [T·TOPK, INTER]
    h_scale_ptr,  # u8 [T·TOPK, INTER/32], only written by "mx"
    pairs,  # T·TOPK
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    LIMIT: tl.constexpr,
    PAIRS: tl.constexpr,  # power of two ≥ pairs, 0 for one token
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    A8: tl.constexpr,
    PTX: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (INTER / BLOCK_N, pairs). Of an expert's pairs the 1st, the (BLOCK_M + 1)th, … compute BLOCK_M each, the
    others leave: no sort.

    The down kernel may start at once; it waits for this grid before it reads h.
    """
    if PTX:
        gdc_launch_dependents()
    mine = tl.program_id(1)
    expert = tl.load(ids_ptr + mine)
    if (expert < 0) | (expert >= EXPERTS):
        return
    if PAIRS == 0:
        # One token: a repeated expert is read twice, and nobody waits for the others' ids.
        pair = mine + tl.arange(0, 1)
        inside = pair == mine
    else:
        every = tl.arange(0, PAIRS)
        same = tl.load(ids_ptr + every, mask=every < pairs, other=-1) == expert
        place = tl.sum((same & (every < mine)).to(tl.int32), axis=0)
        if place % BLOCK_M != 0:
            return
        places = tl.cumsum(same.to(tl.int32), axis=0) - 1
        slot = place + tl.arange(0, BLOCK_M)
        found = same[None, :] & (places[None, :] == slot[:, None])
        pair = tl.sum(tl.where(found, every[None, :], 0), axis=1)
        inside = tl.sum(found.to(tl.int32), axis=1) > 0
    _gate_up_tile(
        x_ptr, x_ptr, weight_ptr, w_ptr, w_scale_ptr, h_ptr, h_scale_ptr,
        expert, tl.program_id(0) * BLOCK_N, pair, inside,
        TOPK, HIDDEN, INTER, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, MMA, A8, A8, False, PTX, SPLIT,
    )  # fmt: skip


@triton.jit
def moe_decode_down_kernel(
    h_ptr,  # bf16 (even columns, then odd ones) or E4M3 [T·TOPK, INTER], routing weight included
    h_scale_ptr,  # u8 [T·TOPK, INTER/32], only read by "mx"
    ids_ptr,  # i32 [T, TOPK]
    w_ptr,  # u8 [E, HIDDEN, INTER/2]
    w_scale_ptr,  # u8 [E, HIDDEN, INTER/32]
    out_ptr,  # bf16 [T, HIDDEN]
    addend_ptr,  # bf16 [T, HIDDEN] or None, see rounded_sum
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    PTX: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (T, HIDDEN / BLOCK_N). One loop over the token's experts and their k, which is cut in SPLIT ranges (see
    sum_splits): no second pass, no atomics, a fixed order. Tokens are the fast axis, so that tokens of one expert meet
    in L2."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = BLOCK_K // 2
    groups: tl.constexpr = BLOCK_K // 32
    part: tl.constexpr = INTER // SPLIT
    steps: tl.constexpr = part // BLOCK_K
    row = tl.arange(0, SPLIT * BLOCK_N)
    start = row // BLOCK_N * part
    row = tl.program_id(1) * BLOCK_N + row % BLOCK_N
    at_byte = tl.arange(0, half)
    at_group = tl.arange(0, groups)
    w_at = (row * (INTER // 2) + start // 2)[:, None] + at_byte[None, :]
    w_scale_at = (row * (INTER // 32) + start // 32)[:, None] + at_group[None, :]
    h_start = (tl.arange(0, SPLIT) * part)[:, None]
    acc = tl.zeros((SPLIT * BLOCK_N, SPLIT), tl.float32)
    if PTX:
        gdc_wait()
    if addend_ptr is not None:
        # Behind the wait: launched early, this would run before what writes it has. Not later: at the loop's end
        # nothing would hide the latency.
        addend = tl.load(addend_ptr + token * HIDDEN + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None])
    for i in tl.range(0, TOPK * steps, num_stages=STAGES):
        pair = token * TOPK + i // steps
        k = i % steps * BLOCK_K
        # Chosen among loop-invariant loads: with a load of its own for every step the pipeliner keeps half as many
        # tiles in flight.
        expert = -1
        for j in tl.static_range(TOPK):
            expert = tl.where(i // steps == j, tl.load(ids_ptr + token * TOPK + j), expert)
        valid = (expert >= 0) & (expert < EXPERTS)
        base = tl.where(valid, expert, 0).to(tl.int64) * (HIDDEN * INTER // 32)
        w = tl.load(w_ptr + base * 16 + k // 2 + w_at, mask=valid, other=0)
        w_scale = tl.load(w_scale_ptr + base + k // 32 + w_scale_at, mask=valid, other=0)
        if MMA == "mx":
            h = tl.load(h_ptr + pair * INTER + k + h_start + tl.arange(0, BLOCK_K)[None, :], mask=valid, other=0.0)
            h_scale = tl.load(
                h_scale_ptr + pair * (INTER // 32) + k // 32 + h_start // 32 + at_group[None, :], mask=valid, other=0
            )
            acc = step_mx(acc, w, w_scale, h, h_scale)
        else:
            h_at = h_ptr + pair * INTER + k // 2 + h_start // 2 + at_byte[None, :]
            even = tl.load(h_at, mask=valid, other=0.0)
            odd = tl.load(h_at + INTER // 2, mask=valid, other=0.0)
            acc = step_dot(acc, w, w_scale, even, odd, PTX)
    if MMA != "mx":
        acc *= UNBIAS
    out = sum_splits(acc, SPLIT, BLOCK_N, 1)
    out = out.to(tl.bfloat16) if addend_ptr is None else rounded_sum(out, addend)
    tl.store(out_ptr + token * HIDDEN + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], out)


@triton.jit
def moe_sorted_up_kernel(
    x_ptr,  # bf16 [T, HIDDEN] ("dot": even columns, then odd ones, already rounded if A8) or E4M3 ("mx")
    x_scale_ptr,  # u8 [T, HIDDEN/32], only read by "mx"
    weight_ptr,  # f32 [T, TOPK]
    rows_ptr,  # i32 [tiles·BLOCK_M], the pair in each row, −1 in padding
    tile_ptr,  # i32 [1 + tiles], the number of tiles, then each tile's expert
    w_ptr,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    A8: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (INTER / BLOCK_N, most tiles): the columns of one tile run together and share its tokens."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_ptr):
        return
    expert = tl.load(tile_ptr + 1 + tile)
    pair = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    inside = pair >= 0
    _gate_up_tile(
        x_ptr, x_scale_ptr, weight_ptr, w_ptr, w_scale_ptr, h_ptr, h_scale_ptr,
        expert, tl.program_id(0) * BLOCK_N, tl.where(inside, pair, 0), inside,
        TOPK, HIDDEN, INTER, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, MMA, A8, False, True, PTX, 1,
    )  # fmt: skip


@triton.jit
def moe_sorted_down_kernel(
    h_ptr,  # bf16 (even columns, then odd ones) or E4M3 [T·TOPK, INTER]
    h_scale_ptr,  # u8 [T·TOPK, INTER/32], only read by "mx"
    rows_ptr,
    tile_ptr,
    w_ptr,
    w_scale_ptr,
    y_ptr,  # bf16 [T·TOPK, HIDDEN]
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MMA: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (HIDDEN / BLOCK_N, most tiles). Each pair's product goes to a row of its own; the sum over experts follows
    in order."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_ptr):
        return
    expert = tl.load(tile_ptr + 1 + tile).to(tl.int64)
    pair = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    inside = pair >= 0
    pair = tl.where(inside, pair, 0).to(tl.int64)
    half: tl.constexpr = BLOCK_K // 2
    groups: tl.constexpr = BLOCK_K // 32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_byte = tl.arange(0, half)
    at_group = tl.arange(0, groups)
    w_at = w_ptr + expert * (HIDDEN * INTER // 2) + row[:, None] * (INTER // 2) + at_byte[None, :]
    w_scale_at = w_scale_ptr + expert * (HIDDEN * INTER // 32) + row[:, None] * (INTER // 32) + at_group[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if MMA == "mx":
        h_at = h_ptr + pair[:, None] * INTER + tl.arange(0, BLOCK_K)[None, :]
        h_scale_at = h_scale_ptr + pair[:, None] * (INTER // 32) + at_group[None, :]
        for k in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
            w = tl.load(w_at + k // 2)
            w_scale = tl.load(w_scale_at + k // 32)
            h = tl.load(h_at + k, mask=inside[:, None], other=0.0)
            h_scale = tl.load(h_scale_at + k // 32, mask=inside[:, None], other=0)
            acc = step_mx(acc, w, w_scale, h, h_scale)
    else:
        h_at = h_ptr + pair[:, None] * INTER + at_byte[None, :]
        for k in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
            w = tl.load(w_at + k // 2)
            w_scale = tl.load(w_scale_at + k // 32)
            even = tl.load(h_at + k // 2, mask=inside[:, None], other=0.0)
            odd = tl.load(h_at + (INTER // 2 + k // 2), mask=inside[:, None], other=0.0)
            acc = step_dot(acc, w, w_scale, even, odd, PTX)
        acc *= UNBIAS
    tl.store(y_ptr + pair[None, :] * HIDDEN + row[:, None], acc.to(tl.bfloat16), mask=inside[None, :])
