"""Kernels in a separate file, since Triton reads their source: one with arguments of every kind, one with a callee."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m"])
def sum_kernel(x_ptr, y_ptr, n, m, scale, BLOCK: tl.constexpr):
    """x[i] += scale · (y[i] or n + m)."""
    at = tl.arange(0, BLOCK)
    other = n + m
    if y_ptr is not None:
        other = tl.load(y_ptr + at, mask=at < n, other=0)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0) + scale * other, mask=at < n)


FACTOR = tl.constexpr(2)


@triton.jit
def twice(x):
    """FACTOR · x."""
    return x * FACTOR


@triton.jit
def calling_kernel(x_ptr):
    """x[0] doubled."""
    tl.store(x_ptr, twice(tl.load(x_ptr)))
