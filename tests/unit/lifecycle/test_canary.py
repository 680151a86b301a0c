"""Reachability of a deployment: random orders of engines, gateways and canary responses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.lifecycle.observed import AGAIN_SECONDS, PERIOD_SECONDS, UNTRIED, Canary, adopted, answered, seen

ONE, TWO = frozenset({(0, 1, 1)}), frozenset({(0, 1, 2)})
GATEWAYS, OTHERS = frozenset({"a", "b"}), frozenset({"b", "c"})


def ready() -> Canary:
    first = seen(Canary(), ONE, GATEWAYS, 0.0)
    return answered(first, first, None, 1.0, 1.0)


def failed(known: Canary, now: float) -> Canary:
    return answered(known, known, "401", now, 1.0)


def test_a_deployment_is_not_reachable_before_the_first_answer() -> None:
    first = seen(Canary(), ONE, GATEWAYS, 10.0)
    assert (first.problem, first.due) == (UNTRIED, 10.0)
    assert ready().problem is None
    assert ready().due == 1.0 + PERIOD_SECONDS


def test_the_first_failure_of_a_new_deployment_needs_no_confirmation() -> None:
    assert failed(seen(Canary(), ONE, GATEWAYS, 0.0), 1.0).problem == "401"


def test_a_single_failure_where_nothing_changed_is_confirmed_first() -> None:
    once = failed(ready(), 31.0)
    assert (once.problem, once.due) == (None, 31.0 + AGAIN_SECONDS)
    assert answered(once, once, None, 36.0, 1.0).problem is None
    assert failed(once, 36.0).problem == "401"
    # The confirmation of one failure does not confirm the next one.
    again = answered(once, once, None, 36.0, 1.0)
    assert failed(again, 66.0).problem is None


def test_a_change_of_the_gateways_causes_a_canary_at_once_whose_failure_counts() -> None:
    changed = seen(ready(), ONE, OTHERS, 5.0)
    assert (changed.problem, changed.due) == (None, 5.0)
    assert failed(changed, 5.1).problem == "401"


def test_a_new_engine_has_to_answer_itself() -> None:
    changed = seen(ready(), TWO, GATEWAYS, 5.0)
    assert (changed.problem, changed.due) == (UNTRIED, 5.0)
    # The response to an earlier request proves nothing about the new engine.
    late = answered(changed, ready(), None, 6.0, 1.0)
    assert (late.problem, late.due) == (UNTRIED, 6.0)
    assert answered(changed, changed, None, 6.0, 1.0).problem is None


def test_an_engine_that_went_takes_nothing_back() -> None:
    assert seen(ready(), frozenset(), GATEWAYS, 5.0).problem is None


def test_one_answer_ends_a_problem() -> None:
    bad = failed(seen(ready(), ONE, OTHERS, 5.0), 6.0)
    assert bad.due == 6.0 + AGAIN_SECONDS
    assert answered(bad, bad, None, 12.0, 1.0).problem is None


def test_a_new_leader_keeps_the_result_and_sends_a_canary_at_once() -> None:
    known = adopted(None, ONE, GATEWAYS, 7.0)
    assert (known.problem, known.due) == (None, 7.0)
    assert failed(known, 8.0).problem is None
    assert failed(failed(known, 8.0), 13.0).problem == "401"


def test_the_text_of_a_problem_that_goes_on_changes_once_a_minute() -> None:
    known, texts = failed(seen(Canary(), ONE, GATEWAYS, 0.0), 1.0), set()
    for second in range(2, 121):
        known = answered(known, known, f"failure {second}", float(second), 1.0)
        texts.add(known.problem)
    assert len(texts) == 2
    assert answered(known, known, None, 121.0, 1.0).problem is None


@given(st.lists(st.sampled_from(["good", "bad", "engine", "gateway", "nothing"]), max_size=30))
def test_reachable_means_that_the_latest_engine_answered_and_no_two_failures_followed(steps: list[str]) -> None:
    known, now, engine, gateway = Canary(), 0.0, 0, 0
    answered_since_engine, failures = False, 0
    for step in steps:
        now += 1.0
        engine += step == "engine"
        gateway += step == "gateway"
        known = seen(known, frozenset({(0, 1, engine)}), frozenset({str(gateway)}), now)
        if step == "engine":
            answered_since_engine, failures = False, 0
        if step in ("good", "bad"):
            known = answered(known, known, None if step == "good" else "no", now, 1.0)
            failures = 0 if step == "good" else failures + 1
            answered_since_engine |= step == "good"
        if known.problem is None:
            assert answered_since_engine
            assert failures <= 1
        elif answered_since_engine:
            assert failures >= 1
        assert known.due <= now + PERIOD_SECONDS


@pytest.mark.parametrize("spread", [0.8, 1.2])
def test_requests_of_many_deployments_do_not_come_together(spread: float) -> None:
    first = seen(Canary(), ONE, GATEWAYS, 0.0)
    assert answered(first, first, None, 0.0, spread).due == PERIOD_SECONDS * spread
