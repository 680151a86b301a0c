"""The projections (Triton): a few columns of a compressor's state, or of the indexer's weights, for all tokens."""

# Triton's decorator and the arguments of kernels have no types.
# Compile-time constants are in capitals, as is usual in Triton.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


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
