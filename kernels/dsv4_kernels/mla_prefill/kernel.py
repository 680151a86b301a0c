"""Sparse MLA prefill over a bf16 workspace (Triton), and the lists of rows that it reads."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 512^-0.5 in units of log2.
SCORE = tl.constexpr(0.06375871627092361)


@triton.jit
def mla_prefill_kernel(
    q_ptr,  # bf16 [S, H, 512]
    kv_ptr,  # bf16 [N, 512]
    index_ptr,  # i32 [S, K]
    length_ptr,  # i32 [S]
    sink_ptr,  # f32 [H]
    o_ptr,  # bf16 [S, H, 512]
    lse_ptr,  # f32 [S, H]
    H: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    """Attention of one token and `BH` heads over its rows of the workspace; see the package docstring."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, 512)
    inside = (head < H)[:, None]
    q_at = (token * H + head)[:, None] * 512 + column[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    length = tl.minimum(tl.load(length_ptr + token), K)
    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, 512), tl.float32)
    for start in range(0, length, BN):
        at = start + tl.arange(0, BN)
        row = tl.load(index_ptr + token * K + at, mask=at < length, other=-1)
        # Rows that are none are never loaded: the values of an unused one cannot reach a product.
        valid = row >= 0
        kv = tl.load(kv_ptr + row.to(tl.int64)[:, None] * 512 + column[None, :], mask=valid[:, None], other=0.0)
        score = tl.where(valid[None, :], tl.dot(q, tl.trans(kv)) * SCORE, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        p = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.bfloat16), kv, acc * shrink[:, None])
        top = new_top
    some = total > 0.0
    lse = tl.where(some, (top + tl.log2(total)) / LOG2E, float("-inf"))
    sink = tl.load(sink_ptr + head, mask=head < H, other=0.0)
    norm = tl.where(some, 1.0 / (total * (1.0 + tl.exp2((sink - lse) * LOG2E))), 0.0)
    tl.store(lse_ptr + token * H + head, lse, mask=head < H)
    tl.store(o_ptr + q_at, (acc * norm[:, None]).to(tl.bfloat16), mask=inside)


@triton.jit(
    do_not_specialize=["chosen_stride", "out_stride", "rows", "first"],
    do_not_specialize_on_alignment=["chosen_ptr", "begin_ptr", "seq_ptr", "gather_ptr", "out_ptr", "length_ptr"],
)
def mla_prefill_lists_kernel(
    chosen_ptr,  # i32 [T, ·], rows chosen_stride apart
    begin_ptr,  # i32 [B + 1]
    seq_ptr,  # i32 [B]
    gather_ptr,  # i32 [B]
    out_ptr,  # i32 [T, ·], rows out_stride apart
    length_ptr,  # i32 [T]
    chosen_stride,
    out_stride,
    rows,
    first,
    TOPK: tl.constexpr,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the lists of one request's tokens, every num_programs(1)-th; see the package docstring."""
    request = tl.program_id(0)
    base = tl.load(begin_ptr)
    begin = tl.load(begin_ptr + request) - base
    end = tl.load(begin_ptr + request + 1) - base
    seq = tl.load(seq_ptr + request)
    held = seq - tl.load(gather_ptr + request)
    chosen_stride = chosen_stride.to(tl.int64)
    out_stride = out_stride.to(tl.int64)
    for token in range(begin + tl.program_id(1), end, tl.num_programs(1)):
        position = seq - end + token
        entries = tl.minimum((position + 1) // RATIO, first)
        chosen = tl.minimum((position + 1) // RATIO, TOPK)
        oldest = tl.maximum(position - WINDOW + 1, held)
        length = chosen + position - oldest + 1
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            picked = tl.load(chosen_ptr + token * chosen_stride + column, mask=column < chosen, other=-1)
            # Other entries are later ones, or rows that other requests left in the workspace.
            picked = tl.where(picked < entries, picked, -1)
            seen = first + oldest - held + column - chosen
            row = tl.where(column < chosen, picked, tl.where(column < length, seen, -1))
            row = tl.where(row >= 0, row + request * rows, -1)
            tl.store(out_ptr + token * out_stride + column, row, mask=column < WIDTH)
        tl.store(length_ptr + token, length)
