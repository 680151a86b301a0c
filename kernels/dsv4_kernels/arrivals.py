"""The count of programs that have arrived, of which the last one goes on (Triton). Imports only Triton, as `device`."""

# Triton's decorator has no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# A counter of arrivals between two launches. Zero or all ones would be what lost memory is likely to hold.
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
