"""Exponential backoff: the one rule by which every part of dsv4 waits before it tries again."""

from __future__ import annotations


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` failures in a row: `first`, doubled each time, `longest` at most.

    Args:
        failures: from 1 on.
        first: seconds after the first failure.
        longest: seconds after any number of failures.
    """
    # 2.0**failures overflows long before a wait that large makes sense.
    return float(min(first * 2.0 ** min(failures - 1, 30), longest))
