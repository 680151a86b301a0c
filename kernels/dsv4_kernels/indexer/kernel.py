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
def _scores(k, q_at, weight_at, head, H: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr, MX: tl.constexpr):
    """Σ_h weight[h]·relu(k · q[h]): k fp8 [BN, 128] → f32 [BN]; q_at points at [128, HP]."""
    q = tl.load(q_at, mask=(head < H)[None, :], other=0.0)
    weight = tl.load(weight_at + head, mask=head < H, other=0.0)
    if MX:
        # Unit scales: on SM12x only the block-scaled instruction has the full rate.
        ones_k = tl.full((BN, 4), 127, tl.uint8)
        ones_q = tl.full((HP, 4), 127, tl.uint8)
        score = tl.dot_scaled(k, ones_k, "e4m3", q, ones_q, "e4m3")
    else:
        score = tl.dot(k, q)
    return tl.sum(tl.maximum(score, 0.0) * weight[None, :], axis=1)


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
        head = tl.arange(0, HP)
        there = key < keys
        k_at = k_ptr + key.to(tl.int64)[:, None] * 128 + column[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        scale = tl.load(k_scale_ptr + key, mask=there, other=0.0)
        offset = head[None, :] * 128 + column[:, None]
        for i in range(0, tl.minimum(BM, rows - first)):
            line = first.to(tl.int64) + i
            start = tl.load(start_ptr + line)
            end = tl.load(end_ptr + line)
            value = _scores(k, q_ptr + line * (H * 128) + offset, weight_ptr + line * H, head, H, HP, BN, MX) * scale
            seen = (key >= start) & (key < end) & there
            tl.store(out_ptr + line * out_stride + (key - start), value, mask=seen)


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
    PAGE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    BN: tl.constexpr,
    MX: tl.constexpr,
):
    """Every ⌈programs⌉-th tile of `BN` keys of one request against its NEXT_N rows; see the package docstring."""
    request = tl.program_id(0).to(tl.int64)
    row = request * NEXT_N
    column = tl.arange(0, 128)
    head = tl.arange(0, HP)
    offset = head[None, :] * 128 + column[:, None]
    longest = tl.load(length_ptr + row)
    for n in tl.static_range(1, NEXT_N):
        longest = tl.maximum(longest, tl.load(length_ptr + row + n))
    scale_ptr = cache_ptr.to(tl.pointer_type(tl.float32))
    for tile in range(tl.program_id(1), tl.cdiv(longest, BN), tl.num_programs(1)):
        position = tile * BN + tl.arange(0, BN)
        there = position < longest
        page = tl.load(table_ptr + request * table_stride + position // PAGE, mask=there, other=0).to(tl.int64)
        slot = position % PAGE
        k_at = cache_ptr + (page * CACHE_STRIDE + slot * 128)[:, None] + column[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        scale = tl.load(scale_ptr + page * (CACHE_STRIDE // 4) + PAGE * 32 + slot, mask=there, other=0.0)
        for n in tl.static_range(NEXT_N):
            line = row + n
            value = _scores(k, q_ptr + line * (H * 128) + offset, weight_ptr + line * H, head, H, HP, BN, MX) * scale
            seen = position < tl.load(length_ptr + line)
            tl.store(out_ptr + line * out_stride + position, value, mask=seen)
