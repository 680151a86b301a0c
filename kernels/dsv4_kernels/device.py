"""Functions shared by the kernels (Triton). Imports only Triton: the static gate compiles without torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ue8m0_to_f32(code):
    """2^(code − 127) as float32, by building the exponent; code 0 (2^-127) gives 0."""
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_ceil(x):
    """Code (int32) of the least power of two ≥ x > 0: exponent, plus one if any mantissa bit is set. Saturates at
    254.
    """
    bits = x.to(tl.int32, bitcast=True)
    code = ((bits >> 23) & 0xFF) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return tl.minimum(code, 254)


@triton.jit
def ue8m0_inverse_f32(code):
    """2^(127 − code) as float32, exact for codes 1..253; 254 underflows to 0 (a scale of 2^127 never occurs on finite
    input).
    """
    return ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_e4m3(x, floor, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """x float32 [R, GROUPS*GROUP] → (codes fp8 [R, GROUPS*GROUP], scale codes int32 [R, GROUPS]); see
    numerics.quantize_e4m3.
    """
    rows: tl.constexpr = x.shape[0]
    parts = tl.reshape(x, (rows, GROUPS, GROUP))
    amax = tl.maximum(tl.max(tl.abs(parts), axis=2), floor)
    # Multiplying by 1/448 rounds twice and may miss the boundary 448·2^k; a true division agrees with the reference
    # bitwise.
    scale = ue8m0_ceil(tl.div_rn(amax, tl.full((rows, GROUPS), 448.0, tl.float32)))
    scaled = parts * ue8m0_inverse_f32(scale)[:, :, None]
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return tl.reshape(scaled, (rows, GROUPS * GROUP)).to(tl.float8e4nv), scale


@triton.jit
def e2m1_to_e4m3(nibble):
    """E2M1 codes (uint8, 0..15) → E4M3 codes (uint8) of value·2^-6, exact for all 16 codes."""
    return ((nibble & 7) << 2) | ((nibble & 8) << 4)


@triton.jit
def mx_probe_kernel(a, b, c):
    """The smallest block-scaled product, compiled only to see which instruction it becomes (arch.native_mx)."""
    m = tl.arange(0, 16)
    n = tl.arange(0, 16)
    k = tl.arange(0, 64)
    s = tl.arange(0, 2)
    lhs = tl.load(a + m[:, None] * 64 + k[None, :])
    rhs = tl.load(b + n[None, :] * 64 + k[:, None])
    lhs_scale = tl.load(a + m[:, None] * 2 + s[None, :])
    rhs_scale = tl.load(b + n[:, None] * 2 + s[None, :])
    out = tl.dot_scaled(lhs, lhs_scale, "e4m3", rhs, rhs_scale, "e4m3")
    tl.store(c + m[:, None] * 16 + n[None, :], out)


# A counter of arrivals between two launches: not zero or all ones, the likely contents of lost memory.
AT_REST = tl.constexpr(0x5A7C0000)


@triton.jit
def is_last(count_ptr, parts):
    """Count an arrival at the counter `count_ptr` (int32), and return whether it is the last of `parts` < 2^16.

    The stores of a program before it are seen by the one that is last. The counter is at rest again when all have
    arrived. Any other value that it has before the first arrival counts as at rest: its memory may have been lost
    between two launches, as in an engine that slept. Programs that find such a value arrive once more, one by one.
    """
    # All threads' stores come before the count, and the count before anybody's loads.
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel") - AT_REST
    while (arrived < 0) | (arrived >= parts):
        # Read by an atomic operation, whose result all threads share.
        now = tl.atomic_add(count_ptr, 0, sem="acq_rel")
        before = now - AT_REST
        before = tl.where((before < 0) | (before >= parts), 0, before)
        seen = tl.atomic_cas(count_ptr, now, before + (AT_REST + 1), sem="acq_rel")
        arrived = tl.where(seen == now, before, -1)
    last = arrived == parts - 1
    if last:
        tl.store(count_ptr, AT_REST)
    return last
