from __future__ import annotations

from typing import Any

import pytest

from dsv4_runtime.agent.decide.death import root_failure
from dsv4_runtime.agent.decide.events import Now, Peer
from dsv4_runtime.agent.decide.head import Leave, next_step
from dsv4_runtime.agent.decide.state import Restart
from dsv4_runtime.contract import Cause, Failure, GpuSignals, Health, HealthPolicy, Phase, Signals, Verdict
from dsv4_testkit.documents import agent_status

NOW = 1_000_000.0


def failure(cause: Cause, time: float = NOW, **fields: Any) -> Failure:
    return Failure(time=time, cause=cause, message="it ended", detected_by="process", **fields)


def peer(*, phase: Phase = Phase.SERVING, joined: bool = True, dead: Failure | None = None, **fields: Any) -> Peer:
    verdict = Verdict(health=Health.DEAD, failure=dead) if dead else Verdict(health=Health.HEALTHY)
    status = agent_status(1, phase, now=NOW, verdict=verdict, joined=joined)
    return Peer(**{"status": status, "heard": 50.0, "asked": 50.0, **fields})


def root(
    own: Failure,
    other: Peer,
    *,
    generation: int = 1,
    clock: float = 50.0,
    signals: dict[int, Signals | None] | None = None,
) -> Failure:
    return root_failure(own, {1: other}, signals or {}, generation, HealthPolicy(link_lost=9.5), Now(clock, NOW))


@pytest.mark.parametrize(
    "gone",
    [Peer(), peer(joined=False), peer(phase=Phase.FAILED), peer(error="Connection refused")],
    ids=["never heard", "not in Ray", "failed", "does not answer"],
)
def test_without_every_member_there_is_no_restart_in_place(make_plan: Any, gone: Peer) -> None:
    answer = next_step(make_plan(), {1: gone}, [failure(Cause.ENGINE_CORE_DIED)], [], 0, NOW)
    assert answer == Leave("rank 1 is not there to start with")


def test_first_restart_is_immediate_and_the_next_ones_wait_longer(make_plan: Any) -> None:
    died = [failure(Cause.ENGINE_CORE_DIED)]
    assert next_step(make_plan(), {1: peer()}, died, [], 0, NOW) == Restart(NOW, 0)
    assert next_step(make_plan(), {1: peer()}, died, [NOW], 0, NOW) == Restart(NOW + 10, 1)
    assert next_step(make_plan(), {1: peer()}, died, [NOW - 5, NOW], 0, NOW) == Restart(NOW + 20, 2)


def test_the_budget_includes_restarts_of_earlier_incarnations(make_plan: Any) -> None:
    plan = make_plan(restarts=(NOW - 100, NOW - 50))
    died = [failure(Cause.ENGINE_CORE_DIED)]
    assert next_step(plan, {1: peer()}, died, [NOW - 10], 0, NOW) == Leave("the budget of 3 restarts is spent")
    an_hour_later = next_step(plan, {1: peer()}, died, [NOW - 10], 0, NOW + 3600)
    assert isinstance(an_hour_later, Restart)


def test_two_consecutive_failed_starts_are_left_to_the_operator(make_plan: Any) -> None:
    answer = next_step(make_plan(), {1: peer()}, [failure(Cause.CANARY_FAILED)], [], 2, NOW)
    assert answer == Leave("the engine did not come up 2 times in a row")


def test_a_deterministic_cause_is_tried_twice(make_plan: Any) -> None:
    once = [failure(Cause.ENGINE_CORE_DIED), failure(Cause.CONFIG_ERROR)]
    assert isinstance(next_step(make_plan(), {1: peer()}, once, [], 0, NOW), Restart)
    twice = [failure(Cause.CONFIG_ERROR), failure(Cause.CONFIG_ERROR)]
    assert isinstance(next_step(make_plan(), {1: peer()}, twice, [], 0, NOW), Leave)


def test_the_earliest_death_is_the_root() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, culprit_rank=0, generation=1)
    worker = failure(Cause.RAY_WORKER_DIED, NOW - 0.5, culprit_rank=1, generation=1)
    assert root(own, peer(dead=worker)) == worker
    later = worker.model_copy(update={"time": NOW + 0.5})
    assert root(own, peer(dead=later)) == own


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_clocks_that_differ_do_not_change_the_root(ahead: float) -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, culprit_rank=0, generation=1)
    worker = failure(Cause.RAY_WORKER_DIED, NOW - 0.5, culprit_rank=1, generation=1)
    other = worker.model_copy(update={"time": worker.time + ahead})
    assert root(own, peer(dead=other, behind=-ahead)) == worker
    later = other.model_copy(update={"time": NOW + 0.5 + ahead})
    assert root(own, peer(dead=later, behind=-ahead)) == own


def gpu(*xids: int | None) -> Signals:
    return Signals(time=1.0, gpus=tuple(GpuSignals(index=index, xid=xid) for index, xid in enumerate(xids)))


def test_a_fatal_error_of_an_accelerator_is_the_cause_of_its_programs_deaths() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, culprit_rank=0, generation=1)
    found = root(own, peer(), signals={0: gpu(None, 31), 1: gpu(31, 79)})
    assert (found.cause, found.culprit_rank, found.detected_by) == (Cause.XID_ERROR, 1, "gpu")
    assert "XID 79" in found.message
    assert (found.time, found.generation) == (own.time, 1)
    assert root(own, peer(), signals={0: gpu(31), 1: None}) == own, "a program's own mistake"


def test_a_death_of_an_earlier_generation_is_no_root() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, generation=2)
    old = failure(Cause.RAY_WORKER_DIED, NOW - 60, generation=1)
    assert root(own, peer(dead=old), generation=2) == own


def test_a_member_that_refused_or_fell_silent_before_the_death_is_the_root() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, generation=1)
    found = root(own, peer(error="Connection refused", refused=True), clock=51.0)
    assert (found.cause, found.culprit_rank, found.time) == (Cause.MEMBER_LOST, 1, NOW - 1)
    assert "Connection refused" in found.message
    found = root(own, peer(error="TimeoutError"), clock=60.0)
    assert (found.cause, found.culprit_rank) == (Cause.NODE_LOST, 1)


def test_a_silent_agent_whose_machine_takes_connections_hangs() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, generation=1)
    silent = peer(error="TimeoutError", accepting=51.2)
    found = root(own, silent, clock=54.0)
    assert (found.cause, found.culprit_rank, found.time, found.detected_by) == (Cause.AGENT_HUNG, 1, NOW - 4.0, "link")
    assert "its machine takes connections" in found.message
    assert root(own, silent, clock=53.4) == own, "too early to tell"


def test_a_member_with_a_recent_heartbeat_is_not_lost() -> None:
    own = failure(Cause.ENGINE_CORE_DIED, NOW, generation=1)
    assert root(own, peer(error="TimeoutError", beat=59.0), clock=60.0) == own
    assert root(own, peer(error="TimeoutError"), clock=53.0) == own, "too early to tell"


def test_an_nccl_timeout_is_the_cause_only_without_another_cause() -> None:
    own = failure(Cause.NCCL_TIMEOUT, NOW - 10, generation=1)
    worker = failure(Cause.RAY_WORKER_DIED, NOW, culprit_rank=1, generation=1)
    assert root(own, peer(dead=worker)) == worker
    assert root(own, peer()) == own
