"""MXFP4 mixture of experts, W4A16, for small batches on sm_90 (Triton): FP8 products with a column for every group.

The body "columns". E2M1 becomes E4M3 without its scale: four codes in a register by shifts and masks, less than an
instruction each. Scales are applied to sums instead: a column of the product's right side holds one group of 32 of x
and zeros elsewhere, so every column of the result is the sum of one group, to be multiplied once. With one token the
instruction's columns would be empty otherwise. x is two planes of E4M3, the second holds the rest of a bf16 beside
the first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4_kernels.device import e2m1_to_e4m3, is_last, quantize_e4m3, ue8m0_inverse_f32, ue8m0_to_f32
from dsv4_kernels.moe.kernel import GROUP, _activate, rounded_sum

# A bf16 is two E4M3 of four significant bits each.
PLANES = tl.constexpr(2)
# The second plane counts in sixteenths of the first: the other four of eight bits.
SECOND = tl.constexpr(0.0625)
# Weights become value·2^-6.
UNBIAS = tl.constexpr(64.0)
# Groups smaller than this are rounded as if it were their largest; scales and factors stay normal float32 above it.
FLOOR = tl.constexpr(1e-35)


@triton.jit
def widen_e4m3(w, PTX: tl.constexpr):
    """w u8 [R, B] (two E2M1 each) → (even k, odd k) E4M3 [R, B], times 2^-6. Exact."""
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q;
            shl.b32 p, $2, 2;
            shl.b32 q, $2, 4;
            and.b32 p, p, 0x1C1C1C1C;
            lop3.b32 $0, q, 0x80808080, p, 0xEA;
            shr.u32 p, $2, 2;
            and.b32 p, p, 0x1C1C1C1C;
            lop3.b32 $1, $2, 0x80808080, p, 0xEA;
            }
            """,
            "=&r,=r,r",
            [w],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = e2m1_to_e4m3(w & 15), e2m1_to_e4m3(w >> 4)
    return even.to(tl.float8e4nv, bitcast=True), odd.to(tl.float8e4nv, bitcast=True)


@triton.jit
def in_group(column):
    """Return where a column of x or h is kept: the sixteen even ones of each group of 32 before its odd ones."""
    return column // 32 * 32 + column % 2 * 16 + column % 32 // 2


@triton.jit
def _store_planes(x, at, factor_at, WIDTH: tl.constexpr):
    """x float32 [1, K] as planes of E4M3, WIDTH apart, with a factor float32 per plane and group, WIDTH/32 apart.

    x = Σ plane · factor / 64, exactly for a bf16 within 2^-13 of its group's largest, else up to 2^-21 of the largest.
    The 64 undoes the factor of widen_e4m3.
    """
    width: tl.constexpr = x.shape[1]
    first, scale = quantize_e4m3(x, FLOOR, width // GROUP, GROUP)
    factor = ue8m0_to_f32(scale) * UNBIAS
    scaled = (x.reshape(1, width // GROUP, GROUP) * ue8m0_inverse_f32(scale)[:, :, None]).reshape(1, width)
    tl.store(at, first)
    tl.store(at + WIDTH, ((scaled - first.to(tl.float32)) / SECOND).to(tl.float8e4nv))
    tl.store(factor_at, factor)
    tl.store(factor_at + WIDTH // GROUP, factor * SECOND)


@triton.jit
def moe_planes_kernel(
    x_ptr,  # bf16 [T, HIDDEN]
    planes_ptr,  # E4M3 [copies, T, PLANES, HIDDEN], see in_group
    factor_ptr,  # f32 [copies, T, PLANES, HIDDEN/32]
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (T, HIDDEN / BLOCK, copies). x as the up product takes it. The up kernel may start at once and waits for
    this. Copies, because hundreds of programs read the same few lines at the same time, and L2 serves them in turn."""
    if PTX:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[None, :]
    x = tl.load(x_ptr + token * HIDDEN + column).to(tl.float32)
    to = tl.program_id(2) * tl.num_programs(0) + token
    planes_at = planes_ptr + to * (PLANES * HIDDEN) + in_group(column)
    _store_planes(x, planes_at, factor_ptr + to * (PLANES * HIDDEN // GROUP) + group, HIDDEN)


@triton.jit
def _places(K: tl.constexpr, WIDTH: tl.constexpr):
    """Return where the right side of a step is: (offsets in planes [columns, K], which of them are not zero, offsets of
    the factors [columns]). Along k first come the even positions of all groups, then the odd ones."""
    groups: tl.constexpr = K // GROUP
    column = tl.arange(0, PLANES * groups)
    own, plane = column % groups, column // groups
    k = tl.arange(0, K)
    # Written without remainders of more than 16, behind which the compiler would not see runs of 16 bytes.
    at = k // 16 * 32 - k // (K // 2) * (K - 16) + k % 16
    group = k // 16 - k // (K // 2) * groups
    return plane[:, None] * WIDTH + at[None, :], own[:, None] == group[None, :], plane * (WIDTH // GROUP) + own


@triton.jit
def _step(total, w, w_scale, x, factor, PTX: tl.constexpr):
    """total [R, PLANES·G] += the sums of G groups, one per column and plane; w u8 [R, 16·G], w_scale u8 [R, G]; x E4M3
    [PLANES·G, 32·G], factor f32 [PLANES·G]."""
    rows: tl.constexpr = w.shape[0]
    half: tl.constexpr = w.shape[1]
    groups: tl.constexpr = w_scale.shape[1]
    even, odd = widen_e4m3(w, PTX)
    wide = tl.join(even, odd).permute(0, 2, 1).reshape(rows, 2 * half)
    sums = tl.dot(wide, x.T) * factor[None, :]
    w_factor = tl.broadcast_to(ue8m0_to_f32(w_scale)[:, None, :], (rows, PLANES, groups))
    return total + sums * w_factor.reshape(rows, PLANES * groups)


@triton.jit(do_not_specialize=["copies"])
def moe_columns_up_kernel(
    x_ptr,  # E4M3 [copies, T, PLANES, HIDDEN], see in_group
    x_factor_ptr,  # f32 [copies, T, PLANES, HIDDEN/32]
    ids_ptr,  # i32 [T, TOPK]
    weight_ptr,  # f32 [T, TOPK]
    w_ptr,  # u8 [E, 2·INTER, HIDDEN/2]
    w_scale_ptr,  # u8 [E, 2·INTER, HIDDEN/32]
    h_ptr,  # E4M3 [T·TOPK, PLANES, INTER], see in_group
    h_factor_ptr,  # f32 [T·TOPK, PLANES, INTER/32]
    copies,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (T·TOPK, INTER / BLOCK_N): h[pair, BLOCK_N columns]. Pairs are the fast axis, so that those of one expert
    meet in L2. The down kernel may start when the last loop is through; it waits for this grid before it reads h."""
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= EXPERTS):
        if PTX:
            gdc_wait()  # or this grid could end before the one that prepares x
        return
    rows: tl.constexpr = 2 * BLOCK_N
    groups: tl.constexpr = BLOCK_K // GROUP
    # A program's own copy of x: neighbours take different ones.
    token = (tl.program_id(1) % copies * (tl.num_programs(0) // TOPK) + pair // TOPK).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N
    # Eight rows of gate, then the same eight of up: a thread's two rows of the result are the halves of one h.
    row = tl.arange(0, rows)
    row = row // 8 % 2 * INTER + column + row // 16 * 8 + row % 8
    x_at, x_in, factor_at = _places(BLOCK_K, HIDDEN)
    x_at += x_ptr + token * (PLANES * HIDDEN)
    factor_at += x_factor_ptr + token * (PLANES * HIDDEN // GROUP)
    # Inside one expert offsets stay below 2^31, so only the base is int64.
    w_at = w_ptr + expert.to(tl.int64) * (INTER * HIDDEN)
    w_at += (row * (HIDDEN // 2))[:, None] + tl.arange(0, BLOCK_K // 2)[None, :]
    w_scale_at = w_scale_ptr + expert.to(tl.int64) * (INTER * HIDDEN // 16)
    w_scale_at += (row * (HIDDEN // GROUP))[:, None] + tl.arange(0, groups)[None, :]
    # Before the loop: at its end nothing would hide the latency.
    weight = tl.load(weight_ptr + pair)
    total = tl.zeros((rows, PLANES * groups), tl.float32)
    if PTX:
        gdc_wait()
    for k in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + k // 2)
        w_scale = tl.load(w_scale_at + k // GROUP)
        x = tl.load(x_at + k, mask=x_in, other=0.0)
        factor = tl.load(factor_at + k // GROUP)
        total = _step(total, w, w_scale, x, factor, PTX)
    if PTX:
        gdc_launch_dependents()
    gate, up = tl.split(tl.sum(total, axis=1).reshape(BLOCK_N // 8, 2, 8).permute(0, 2, 1))
    h = _activate(gate, up, weight, LIMIT).reshape(1, BLOCK_N).to(tl.bfloat16).to(tl.float32)
    at = column + tl.arange(0, BLOCK_N)[None, :]
    group = column // GROUP + tl.arange(0, BLOCK_N // GROUP)[None, :]
    h_at = h_ptr + pair.to(tl.int64) * (PLANES * INTER) + in_group(at)
    _store_planes(h, h_at, h_factor_ptr + pair.to(tl.int64) * (PLANES * INTER // GROUP) + group, INTER)


@triton.jit
def moe_columns_down_kernel(
    h_ptr,  # E4M3 [T·TOPK, PLANES, INTER], see in_group; routing weight included
    h_factor_ptr,  # f32 [T·TOPK, PLANES, INTER/32]
    ids_ptr,  # i32 [T, TOPK]
    w_ptr,  # u8 [E, HIDDEN, INTER/2]
    w_scale_ptr,  # u8 [E, HIDDEN, INTER/32]
    out_ptr,  # bf16 [T, HIDDEN]
    addend_ptr,  # bf16 [T, HIDDEN] or None, see rounded_sum
    part_ptr,  # f32 [T, SHARES, HIDDEN] (SHARES > 1)
    count_ptr,  # i32 [T, HIDDEN / BLOCK_N], see is_last (SHARES > 1)
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHARES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Grid (T, HIDDEN / BLOCK_N, SHARES): one share of the token's experts; the last to arrive adds the shares in
    order. Tokens are the fast axis, so that those of one expert meet in L2."""
    token = tl.program_id(0).to(tl.int64)
    share = tl.program_id(2)
    each: tl.constexpr = (TOPK + SHARES - 1) // SHARES
    steps: tl.constexpr = INTER // BLOCK_K
    groups: tl.constexpr = BLOCK_K // GROUP
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h_at, h_in, factor_at = _places(BLOCK_K, INTER)
    w_at = (row * (INTER // 2))[:, None] + tl.arange(0, BLOCK_K // 2)[None, :]
    w_scale_at = (row * (INTER // GROUP))[:, None] + tl.arange(0, groups)[None, :]
    total = tl.zeros((BLOCK_N, PLANES * groups), tl.float32)
    if PTX:
        gdc_wait()
    if addend_ptr is not None:
        # Behind the wait: launched early, this would run before it is written. Not later: at the loop's end
        # nothing would hide the latency.
        addend = tl.load(addend_ptr + token * HIDDEN + row)
    for i in tl.range(0, each * steps, num_stages=STAGES):
        j = share * each + i // steps
        pair = token * TOPK + j
        # Shares run side by side: neighbours start elsewhere, so that they do not read the same lines of h at once.
        k = (i + tl.program_id(1) if SHARES > 1 else i) % steps * BLOCK_K
        # Chosen among loop-invariant loads: with a load of its own for every step the pipeliner keeps half as many
        # tiles in flight. A share's end beyond the last expert finds none.
        expert = -1
        for n in tl.static_range(TOPK):
            expert = tl.where(j == n, tl.load(ids_ptr + token * TOPK + n), expert)
        valid = (expert >= 0) & (expert < EXPERTS)
        base = tl.where(valid, expert, 0).to(tl.int64) * (HIDDEN * INTER // GROUP)
        w = tl.load(w_ptr + base * 16 + k // 2 + w_at, mask=valid, other=0)
        w_scale = tl.load(w_scale_ptr + base + k // GROUP + w_scale_at, mask=valid, other=0)
        h = tl.load(h_ptr + pair * (PLANES * INTER) + k + h_at, mask=valid & h_in, other=0.0)
        factor_base = h_factor_ptr + pair * (PLANES * INTER // GROUP) + k // GROUP
        factor = tl.load(factor_base + factor_at, mask=valid, other=0.0)
        total = _step(total, w, w_scale, h, factor, PTX)
    acc = tl.sum(total, axis=1)
    if SHARES == 1:
        out = acc.to(tl.bfloat16) if addend_ptr is None else rounded_sum(acc, addend)
        tl.store(out_ptr + token * HIDDEN + row, out)
    else:
        at = part_ptr + token * (SHARES * HIDDEN) + row
        tl.store(at + share * HIDDEN, acc)
        count_at = count_ptr + token * (HIDDEN // BLOCK_N) + tl.program_id(1)
        if is_last(count_at, SHARES):
            acc = tl.zeros((BLOCK_N,), tl.float32)
            for part in tl.static_range(SHARES):
                acc += tl.load(at + part * HIDDEN, cache_modifier=".cg")
            out = acc.to(tl.bfloat16) if addend_ptr is None else rounded_sum(acc, addend)
            tl.store(out_ptr + token * HIDDEN + row, out)
