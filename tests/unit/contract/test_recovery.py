"""Restart budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.contract import RecoveryPolicy, permit
from dsv4_runtime.contract.recovery import Permit

POLICY = RecoveryPolicy(max_restarts=5, window_seconds=3600, backoff_base_seconds=30, backoff_max_seconds=100)
NOW = 10_000.0


@pytest.mark.parametrize(
    ("ago", "wait"),
    [
        ((), 0),
        ((10,), 20),  # the first was immediate; the second waits until 30 s after it
        ((40,), 0),
        ((100, 10), 50),
        ((500, 100, 10), 90),  # 120 s without the limit
        ((10, 100, 500), 90),  # in any order
        ((3600,), 0),  # outside the window
        ((4000, 3999, 3998, 3997, 3996), 0),
    ],
)
def test_the_wait_doubles_from_the_latest_restart(ago: tuple[float, ...], wait: float) -> None:
    assert permit(POLICY, [NOW - seconds for seconds in ago], NOW).at == NOW + wait


def test_a_spent_budget_permits_nothing() -> None:
    spent = permit(POLICY, [NOW - seconds for seconds in range(5)], NOW)
    assert (spent.at, spent.spent) == (None, 5)
    assert permit(POLICY.model_copy(update={"max_restarts": 0}), [], NOW).at is None


def test_a_huge_budget_does_not_overflow() -> None:
    policy = POLICY.model_copy(update={"max_restarts": 100_000})
    assert permit(policy, [NOW] * 5000, NOW).at == NOW + 100


@given(st.lists(st.floats(0, 7200), max_size=12), st.integers(0, 6))
def test_restarts_at_the_permitted_times_never_exceed_the_budget(gaps: list[float], budget: int) -> None:
    policy = POLICY.model_copy(update={"max_restarts": budget})
    now, restarts = NOW, list[float]()
    for gap in gaps:
        now += gap
        allowed = permit(policy, restarts, now)
        if allowed.at is not None:
            assert allowed.at >= now
            now = allowed.at
            restarts.append(now)
    for first in restarts:
        assert sum(first <= time < first + policy.window_seconds for time in restarts) <= budget


def test_restarts_in_the_future_do_not_extend_the_wait() -> None:
    day = 86_400.0
    assert permit(POLICY, [NOW + day] * 4, NOW) == Permit(NOW, 0)
    # A restart in the near future counts towards the budget, but the wait does not start from it.
    assert permit(POLICY, [NOW + 1], NOW) == Permit(NOW, 1)
    both = permit(POLICY, [NOW - 1, NOW + 1], NOW)
    assert both == permit(POLICY, [NOW - 1, NOW - 5], NOW), "the wait counts from the latest that has been"
