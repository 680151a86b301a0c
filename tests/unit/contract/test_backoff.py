"""Rule of exponential backoff."""

from __future__ import annotations

from dsv4_runtime.contract.recovery import backoff


def test_wait_doubles_from_the_first_and_ends_at_the_longest() -> None:
    waits = [backoff(failures, first=1.0, longest=300.0) for failures in (1, 2, 3, 9, 10, 10**6)]
    assert waits == [1, 2, 4, 256, 300, 300]


def test_first_wait_is_never_longer_than_the_longest() -> None:
    assert backoff(1, first=4.0, longest=3.0) == 3.0
