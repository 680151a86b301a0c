"""Per-token FP8 quantisation and block-scaled FP8 products (Triton).

A product is out^T = W · a^T, so that at small T the weights fill the wide side of the instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4_kernels.device import is_last, quantize_e4m3, ue8m0_to_f32


@triton.jit(do_not_specialize=["tokens"])
def fp8_quant_kernel(
    x_ptr,  # bf16 [T, K]
    code_ptr,  # fp8 e4m3 [T, K]
    scale_ptr,  # u8 [T, K/128]
    tokens,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantise `BLOCK_T` tokens × `BLOCK_K` values; see the package docstring."""
    groups: tl.constexpr = BLOCK_K // 128
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = (row < tokens)[:, None]
    at = row[:, None] * K + column[None, :]
    x = tl.load(x_ptr + at, mask=inside & (column < K)[None, :], other=0.0).to(tl.float32)
    code, scale = quantize_e4m3(x, 1e-4, groups, 128)
    tl.store(code_ptr + at, code, mask=inside & (column < K)[None, :])
    at_scale = row[:, None] * (K // 128) + group[None, :]
    tl.store(scale_ptr + at_scale, scale.to(tl.uint8), mask=inside & (group < K // 128)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def silu_mul_quant_kernel(
    x_ptr,  # bf16 [T, 2K]
    y_ptr,  # bf16 [T, K]
    code_ptr,  # fp8 e4m3 [T, K]
    scale_ptr,  # u8 [T, K/128]
    tokens,
    limit,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y of `BLOCK_T` tokens × `BLOCK_K` values, and its codes and scales as of `fp8_quant_kernel`."""
    groups: tl.constexpr = BLOCK_K // 128
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = (row < tokens)[:, None] & (column < K)[None, :]
    x_at = x_ptr + row[:, None] * (2 * K) + column[None, :]
    gate = tl.minimum(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(x_at + K, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)
    at = row[:, None] * K + column[None, :]
    tl.store(y_ptr + at, y, mask=inside)
    code, scale = quantize_e4m3(y.to(tl.float32), 1e-4, groups, 128)
    tl.store(code_ptr + at, code, mask=inside)
    at_scale = row[:, None] * (K // 128) + group[None, :]
    tl.store(scale_ptr + at_scale, scale.to(tl.uint8), mask=(row < tokens)[:, None] & (group < K // 128)[None, :])


@triton.jit
def _store(
    x, out_ptr, code_ptr, scale_ptr, at, inside, m, g, n_tile, tokens, N: tl.constexpr, G: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """x f32 [BN, BM] as bf16 and, with QUANT (BN is 128 then), as codes with one scale for the tile's rows."""
    rounded = x.to(tl.bfloat16)
    tl.store(out_ptr + at, rounded, mask=inside)
    if QUANT:
        code, scale = quantize_e4m3(tl.trans(rounded).to(tl.float32), 1e-4, 1, 128)
        tl.store(code_ptr + tl.trans(at), code, mask=tl.trans(inside))
        scale_at = (m.to(tl.int64) * G + g) * (N // 128) + n_tile
        tl.store(scale_ptr + scale_at[:, None], scale.to(tl.uint8), mask=(m < tokens)[:, None])


@triton.jit(do_not_specialize=["tokens", "splits"])
def fp8_gemm_kernel(
    a_ptr,  # fp8 [T, G, K]
    a_scale_ptr,  # u8 [T, G, K/128]
    w_ptr,  # fp8 [G, N, K]
    w_scale_ptr,  # u8 [G, ⌈N/128⌉, K/128]
    out_ptr,  # bf16 [T, G, N]
    part_ptr,  # f32 [splits, T, G, N] (SPLIT)
    count_ptr,  # i32 [tiles], see is_last (SPLIT)
    code_ptr,  # fp8 [T, G, N] (QUANT)
    scale_ptr,  # u8 [T, G, N/128] (QUANT)
    tokens,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    MX: tl.constexpr,
    QUANT: tl.constexpr,
):
    """One tile of `BN` weight rows × `BM` tokens of one group, over one share of K; see the package docstring."""
    blocks: tl.constexpr = K // 128
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    m_tiles = tl.cdiv(tokens, BM)
    # GROUP token tiles share a sweep over the weights, so that both stay in L2.
    pid = tl.program_id(0)
    sweep = pid // (GROUP * n_tiles)
    height = tl.minimum(m_tiles - sweep * GROUP, GROUP)
    m_tile = sweep * GROUP + (pid % (GROUP * n_tiles)) % height
    n_tile = (pid % (GROUP * n_tiles)) // height
    g = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    m = m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    # Rows past the ends repeat the last one: an address clamp costs nothing in the loop, a mask would.
    m_in = tl.minimum(m, tokens - 1).to(tl.int64)
    n_in = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, 128)
    share = tl.cdiv(blocks, splits)
    first = split * share
    last = tl.minimum(first + share, blocks)
    w_at = w_ptr + (g * N + n_in)[:, None] * K + k[None, :]
    a_at = a_ptr + (m_in * G + g)[None, :] * K + k[:, None]
    sa_at = a_scale_ptr + (m_in * G + g) * blocks
    acc = tl.zeros((BN, BM), tl.float32)
    if BN <= 128:
        sw_at = w_scale_ptr + (g * ((N + 127) // 128) + (n_tile * BN) // 128) * blocks
        for block in range(first, last):
            w = tl.load(w_at + block * 128)
            a = tl.load(a_at + block * 128)
            sa = tl.load(sa_at + block)
            sw = tl.load(sw_at + block)
            if MX:
                # One byte per 128 values stands for the four of the instruction's groups of 32.
                w_scale = tl.broadcast_to(sw, (BN, 4))
                a_scale = tl.broadcast_to(sa[:, None], (BM, 4))
                acc = tl.dot_scaled(w, w_scale, "e4m3", a, a_scale, "e4m3", acc)
            else:
                if QUANT:
                    # E4M3 values and their products are exact in fp16. Products of FP8 on sm_90 are aligned to their
                    # largest and cut to 14 bits: sums near zero are then more than a step of E4M3 away.
                    w, a = w.to(tl.float16), a.to(tl.float16)
                acc += tl.dot(w, a) * (ue8m0_to_f32(sa) * ue8m0_to_f32(sw))[None, :]
    else:
        tl.static_assert(False, "a tile must not span two blocks of weight scales")

    inside = (n < N)[:, None] & (m < tokens)[None, :]
    at = (m.to(tl.int64) * G + g)[None, :] * N + n[:, None]
    if SPLIT:
        plane = tokens.to(tl.int64) * (G * N)
        tl.store(part_ptr + split * plane + at, acc, mask=inside)
        tile = (g * m_tiles + m_tile) * n_tiles + n_tile
        if is_last(count_ptr + tile, splits):
            total = tl.zeros((BN, BM), tl.float32)
            for part in range(0, splits):
                total += tl.load(part_ptr + part * plane + at, mask=inside, other=0.0, cache_modifier=".cg")
            _store(total, out_ptr, code_ptr, scale_ptr, at, inside, m, g, n_tile, tokens, N, G, QUANT)
    else:
        _store(acc, out_ptr, code_ptr, scale_ptr, at, inside, m, g, n_tile, tokens, N, G, QUANT)
