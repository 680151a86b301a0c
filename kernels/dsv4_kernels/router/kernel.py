"""The router (Triton): partial products, then sums, scores and selection."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def router_product_kernel(
    x_ptr,  # bf16 [T, H]
    weight_ptr,  # bf16 [E, H]
    part_ptr,  # f32 [splits, T, E]
    tokens,
    E: tl.constexpr,
    H: tl.constexpr,
    SPAN: tl.constexpr,  # columns of one split, a multiple of BK
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`BT` tokens × `BE` experts over `SPAN` columns."""
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    acc = tl.zeros((BT, BE), tl.float32)
    for begin in range(split * SPAN, tl.minimum((split + 1) * SPAN, H), BK):
        column = begin + tl.arange(0, BK)
        there = (column < H)[None, :]
        x = tl.load(x_ptr + token[:, None] * H + column[None, :], mask=(token < tokens)[:, None] & there, other=0.0)
        weight_at = weight_ptr + expert[:, None] * H + column[None, :]
        weight = tl.load(weight_at, mask=(expert < E)[:, None] & there, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc)
    part_at = part_ptr + ((split.to(tl.int64) * tokens + token) * E)[:, None] + expert[None, :]
    tl.store(part_at, acc, mask=(token < tokens)[:, None] & (expert < E)[None, :])


@triton.jit(do_not_specialize=["tokens", "splits"], do_not_specialize_on_alignment=["input_ptr", "padding_ptr"])
def router_select_kernel(
    part_ptr,  # f32 [splits, T, E]
    bias_ptr,  # f32 [E] (not HASH)
    table_ptr,  # i32 [V, K] (HASH)
    input_ptr,  # i32 or i64 [T] (HASH)
    padding_ptr,  # bool [T] (PADDED)
    out_weight_ptr,  # f32 [T, K]
    out_id_ptr,  # i32 [T, K]
    tokens,
    splits,
    scaling,
    E: tl.constexpr,
    EP: tl.constexpr,  # the next power of two
    K: tl.constexpr,
    HASH: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Scores and experts of one token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    inside = expert < E
    if HASH:
        table_at = table_ptr + tl.load(input_ptr + token).to(tl.int64) * K
    else:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    logit = tl.zeros((EP,), tl.float32)
    for split in range(0, splits):
        at = part_ptr + (tokens.to(tl.int64) * split + token) * E + expert
        logit += tl.load(at, mask=inside, other=0.0)
    # softplus without overflow, and with log(1 + e) by its series where 1 + e would lose e.
    small = tl.exp(-tl.abs(logit))
    logarithm = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    score = tl.sqrt_rn(tl.maximum(logit, 0.0) + logarithm)
    if not HASH:
        choice = score + bias
        # NaN, which no comparison finds, would leave experts that are not there.
        choice = tl.where(inside, tl.where(choice == choice, choice, -1e30), float("-inf"))
    place = tl.arange(0, 8)
    ids = tl.zeros((8,), tl.int32)
    weights = tl.zeros((8,), tl.float32)
    for k in tl.static_range(K):
        if HASH:
            best = tl.load(table_at + k)
        else:
            best = tl.argmax(choice, axis=0)
            choice = tl.where(expert == best, float("-inf"), choice)
        ids = tl.where(place == k, best, ids)
        weights = tl.where(place == k, tl.sum(tl.where(expert == best, score, 0.0)), weights)
    total = tl.sum(weights)
    # Of logits below -104 every score is 0 in float32.
    weights = weights / tl.where(total > 0.0, total, 1.0) * scaling
    if PADDED:
        padding = tl.load(padding_ptr + token) != 0
        weights = tl.where(padding, 0.0, weights)
        ids = tl.where(padding, -1, ids)
    tl.store(out_weight_ptr + token * K + place, weights, mask=place < K)
    tl.store(out_id_ptr + token * K + place, ids, mask=place < K)
