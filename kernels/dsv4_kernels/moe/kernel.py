"""MXFP4 mixture of experts (Triton).

Parts of the products: widening of MXFP4, one step of each body, ranges of k. Then gate-up with activation, and down,
for small batches and for sorted ones. Last the steps around the two products of larger batches: count-sort of pairs by
expert, quantisation, the sum over experts.

Weights are the left operand of every product (rows of W are the M side of the MMA, tokens its N side), so that a batch
of one token costs one 8-column tile. Two bodies: "mx" widens E2M1 to E4M3 and uses block-scaled MMA, "dot" widens to
bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    accumulator. Exact for scale codes 64..190, as in the contract. Even and odd k stay apart because a sum
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
    """out float32, rounded to bf16, plus addend bf16, in float32 and rounded, as the sum of two bf16 tensors."""
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
        # Behind the wait: launched early, this would run before it is written. Not later: at the loop's end
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
