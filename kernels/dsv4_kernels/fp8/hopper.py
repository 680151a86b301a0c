"""Block-scaled FP8 products of many tokens on sm_90 (Gluon): out = a · Wᵀ with specialised warps.

One warp copies tiles into a ring in shared memory (TMA); 2 or 3 warpgroups each multiply 64 tokens by 128 rows of
weights and add the sums, scaled, once per 128 values of k. Programs stay and take one tile after the other.

Gluon has no interpreter: without a GPU only the compiled code is checked (the static gate), the numbers need one.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.9 renames them.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _pow2(code):
    return (code.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _place(tile, tokens, n, WARPGROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Group of weights, tile of tokens, tile of weight rows; GROUP tiles of tokens share a sweep over the weights."""
    n_tiles = gl.cdiv(n, 128)
    m_tiles = gl.cdiv(tokens, 64 * WARPGROUPS)
    g = tile // (m_tiles * n_tiles)
    tile = tile % (m_tiles * n_tiles)
    sweep = tile // (GROUP * n_tiles)
    height = gl.minimum(m_tiles - sweep * GROUP, GROUP)
    m_tile = sweep * GROUP + (tile % (GROUP * n_tiles)) % height
    n_tile = (tile % (GROUP * n_tiles)) // height
    return g, m_tile, n_tile


@gluon.jit
def _copy(
    a_desc, w_desc, a_buf, w_buf, full, empty, tokens, n, blocks, tiles,
    WARPGROUPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring, block of k after block of k; each warpgroup has 64 tokens of its own, all share the weights."""
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        g, m_tile, n_tile = _place(tile, tokens, n, WARPGROUPS, GROUP)
        for block in range(blocks):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (64 * WARPGROUPS + 128) * 128)
            tma_load(w_desc, [g * n + n_tile * 128, block * 128], bar, w_buf.index(slot))
            for who in gl.static_range(WARPGROUPS):
                m0 = (m_tile * WARPGROUPS + who) * 64
                tma_load(a_desc, [m0, (g * blocks + block) * 128], bar, a_buf.index(slot * WARPGROUPS + who))
            step += 1


@gluon.jit
def _product(a_buf, w_buf, full, zero, step, WHO: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr):
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    w = w_buf.index(slot).permute((1, 0))
    return warpgroup_mma(a_buf.index(slot * WARPGROUPS + WHO), w, zero, use_acc=False, is_async=True)


@gluon.jit
def _multiply(
    out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks, groups, tiles,
    WHO: gl.constexpr, WARPGROUPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup WHO: its 64 tokens of every tile. Two blocks of k a step: the first's sums are scaled while the
    second's products run.
    """
    n_blocks = gl.cdiv(n, 128)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    out_smem = out_buf.index(WHO)
    zero = gl.zeros([64, 128], gl.float32, mma)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        g, m_tile, n_tile = _place(tile, tokens, n, WARPGROUPS, GROUP)
        m0 = (m_tile * WARPGROUPS + WHO) * 64
        # The descriptors cut rows past the end off; the scales have none, so those rows repeat the last one's.
        m = gl.minimum(m0 + gl.arange(0, 64, gl.SliceLayout(1, mma)), tokens - 1)
        sa_at = a_scale_ptr + (m.to(gl.int64) * groups + g) * blocks
        sw_at = w_scale_ptr + (g * n_blocks + n_tile) * blocks
        acc = gl.zeros([64, 128], gl.float32, mma)
        for block in range(0, blocks, 2):
            p = _product(a_buf, w_buf, full, zero, step, WHO, WARPGROUPS, STAGES)
            s = _pow2(gl.load(sa_at + block)) * _pow2(gl.load(sw_at + block))
            t = _pow2(gl.load(sa_at + block + 1)) * _pow2(gl.load(sw_at + block + 1))
            p = warpgroup_mma_wait(0, [p])
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
            q = _product(a_buf, w_buf, full, zero, step, WHO, WARPGROUPS, STAGES)
            acc += p * gl.expand_dims(s, 1)
            q = warpgroup_mma_wait(0, [q])
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
            acc += q * gl.expand_dims(t, 1)
        tma.store_wait(0)
        out_smem.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma_store(out_desc, [m0, g * n + n_tile * 128], out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "n", "blocks", "groups"])
def fp8_gemm_hopper_kernel(
    a_desc,  # fp8 [T, G·K]
    a_scale_ptr,  # u8 [T, G, K/128]
    w_desc,  # fp8 [G·N, K]
    w_scale_ptr,  # u8 [G, ⌈N/128⌉, K/128]
    out_desc,  # bf16 [T, G·N]
    tokens,
    n,
    blocks,  # K/128, even
    groups,
    WARPGROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles of 64·WARPGROUPS tokens × 128 rows of weights, dealt to the programs in turn; see `hopper_from`."""
    a_buf = gl.allocate_shared_memory(a_desc.dtype, [STAGES * WARPGROUPS, 64, 128], a_desc.layout)
    w_buf = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, 128], w_desc.layout)
    out_buf = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS, 64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    tiles = gl.cdiv(tokens, 64 * WARPGROUPS) * gl.cdiv(n, 128) * groups
    # Gluon has no unpacking of tuples, and joined ones lose their constants. The last list: registers of a thread.
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks,
                             groups, tiles, 0, WARPGROUPS, GROUP, STAGES)),
                (_multiply, (out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks,
                             groups, tiles, 1, WARPGROUPS, GROUP, STAGES)),
                (_multiply, (out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks,
                             groups, tiles, 2, WARPGROUPS, GROUP, STAGES)),
                (_copy, (a_desc, w_desc, a_buf, w_buf, full, empty, tokens, n, blocks, tiles,
                         WARPGROUPS, GROUP, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks,
                             groups, tiles, 0, WARPGROUPS, GROUP, STAGES)),
                (_multiply, (out_desc, a_scale_ptr, w_scale_ptr, a_buf, w_buf, out_buf, full, empty, tokens, n, blocks,
                             groups, tiles, 1, WARPGROUPS, GROUP, STAGES)),
                (_copy, (a_desc, w_desc, a_buf, w_buf, full, empty, tokens, n, blocks, tiles,
                         WARPGROUPS, GROUP, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def descriptor(tensor: Any, rows: int) -> TensorDescriptor:
    """Describe tiles of `rows` × 128 of a contiguous, 16-byte aligned matrix of fp8 or bf16 numbers.

    It is a value: a CUDA graph keeps that of its capture. It is not to be kept otherwise, since it holds the tensor.
    """
    return TensorDescriptor.from_tensor(tensor, [rows, 128], _layout(8 * tensor.element_size()))


@functools.cache
def _layout(bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
