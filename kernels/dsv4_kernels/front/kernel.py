"""Norms, RoPE and the window's cache entry (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import quantize_e4m3


@triton.jit
def _norm(
    x_ptr, weight_ptr, out_ptr, code_ptr, scale_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr
):
    """One row of `N` values, and its FP8 codes with QUANT."""
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x) / N + eps)
    normed = (x * inverse * weight).to(tl.bfloat16)
    tl.store(out_ptr + column, normed, mask=inside)
    if QUANT:
        # Of the rounded values, as a product that reads them would quantise them.
        code, scale = quantize_e4m3(normed.to(tl.float32)[None, :], 1e-4, BLOCK // 128, 128)
        group = tl.arange(0, BLOCK // 128)[None, :]
        tl.store(code_ptr + column[None, :], code, mask=inside[None, :])
        tl.store(scale_ptr + group, scale.to(tl.uint8), mask=group < N // 128)


@triton.jit(do_not_specialize=["qr_stride", "kv_stride"])
def front_norm_kernel(
    qr_ptr,  # bf16 [T, Q], rows qr_stride apart
    kv_ptr,  # bf16 [T, 512], rows kv_stride apart
    q_weight_ptr,  # bf16 [Q]
    kv_weight_ptr,  # bf16 [512]
    qr_out_ptr,  # bf16 [T, Q]
    kv_out_ptr,  # bf16 [T, 512]
    code_ptr,  # fp8 e4m3 [T, Q] (QUANT)
    scale_ptr,  # u8 [T, Q/128] (QUANT)
    qr_stride,
    kv_stride,
    eps,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
):
    """The query's part of one token, or its KV row; see the package docstring."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm(
            qr_ptr + token * qr_stride, q_weight_ptr, qr_out_ptr + token * Q, code_ptr + token * Q,
            scale_ptr + token * (Q // 128), eps, Q, BLOCK, QUANT,
        )  # fmt: skip
    else:
        _norm(
            kv_ptr + token * kv_stride, kv_weight_ptr, kv_out_ptr + token * 512, code_ptr, scale_ptr, eps, 512, 512,
            False,
        )  # fmt: skip


@triton.jit
def _angles(position, cos_sin_ptr):
    """Load cos and sin f32 [1, 256] of interleaved pairs of 512 columns at `position`; the last 32 are turned."""
    pair = tl.arange(0, 256)
    turned = pair >= 224
    angle_at = cos_sin_ptr + position * 64 + tl.where(turned, pair - 224, 0)
    cos = tl.load(angle_at, mask=turned, other=1.0)[None, :]
    return cos, tl.load(angle_at + 32, mask=turned, other=0.0)[None, :]


@triton.jit
def _rotate(x, cos, sin, ROWS: tl.constexpr):
    """Return x f32 [ROWS, 512] with its interleaved pairs turned by cos and sin of `_angles`."""
    even, odd = tl.split(tl.reshape(x, (ROWS, 256, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, 512))


@triton.jit(do_not_specialize=["count"])
def front_insert_kernel(
    q_ptr,  # bf16 [T, H, 512]
    kv_ptr,  # bf16 [T', 512]
    cache_ptr,  # u8 [pages, STRIDE]
    slot_ptr,  # i64 [count]
    position_ptr,  # i64 [T]
    cos_sin_ptr,  # f32 [positions, 64]
    out_ptr,  # bf16 [T, P, 512]
    count,
    eps,
    H: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
    BH: tl.constexpr,
):
    """First the KV row of one token, then `BH` of its heads per program; see the package docstring."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(position_ptr + token)
    column = tl.arange(0, 512)
    # Loads come first and depend on one another as little as can be: one token takes as long as memory takes to answer.
    if part == 0:
        slot = tl.load(slot_ptr + token, mask=token < count, other=-1)
        row = tl.load(kv_ptr + token * 512 + column[None, :], mask=token < count, other=0.0).to(tl.float32)
        cos, sin = _angles(position, cos_sin_ptr)
        if slot >= 0:
            turned = _rotate(row, cos, sin, 1)
            code, scale = quantize_e4m3(row, 1e-4, 8, 64)
            page = (slot // PAGE) * STRIDE
            data = page + slot % PAGE * 576
            tl.store(cache_ptr + data + column[None, :], code.to(tl.uint8, bitcast=True), mask=(column < 448)[None, :])
            wide_ptr = cache_ptr.to(tl.pointer_type(tl.bfloat16))
            rope = (column >= 448)[None, :]
            tl.store(wide_ptr + data // 2 + (column - 224)[None, :], turned.to(tl.bfloat16), mask=rope)
            group = tl.arange(0, 8)[None, :]
            at_scale = page + PAGE * 576 + slot % PAGE * 8
            tl.store(cache_ptr + at_scale + group, tl.where(group < 7, scale, 0).to(tl.uint8))
    else:
        head = (part - 1) * BH + tl.arange(0, BH)
        at = (token * H + head)[:, None] * 512 + column[None, :]
        x = tl.load(q_ptr + at, mask=(head < H)[:, None], other=0.0).to(tl.float32)
        cos, sin = _angles(position, cos_sin_ptr)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / 512 + eps)
        x = _rotate(x * inverse[:, None], cos, sin, BH)
        out_at = (token * P + head)[:, None] * 512 + column[None, :]
        tl.store(out_ptr + out_at, x.to(tl.bfloat16), mask=(head < P)[:, None])
