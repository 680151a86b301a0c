"""Faults of docs/faults.md as events at rank 0: order and delay of the events do not change the recorded cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_runtime.agent.decide.actions import Enter, RecordFailure, ReportDead, SaveEvidence, StartEngine, StartTask
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    CoreFailed,
    Done,
    FirstCompletion,
    FirstError,
    Judged,
    Task,
)
from dsv4_runtime.contract import Cause, Failure, GpuSignals, Health, HealthPolicy, Phase, Signals, Timeouts, Verdict
from dsv4_runtime.health.rules import Judgement
from dsv4_testkit.faults import table
from dsv4_testkit.faults.events import CORE, FAULTS, Fault, Leaving, Refused, Told, dead, worker

MakeReplay = Callable[..., Any]


@pytest.fixture
def serving(make_replay: MakeReplay) -> MakeReplay:
    """Rank 0 with a serving engine."""

    def make(**changes: Any) -> Any:
        bounds = Timeouts(preflight=1, staging=20, formation=1, load=1, first_token=1, drain=3)
        replay = make_replay(**{"health": HealthPolicy(gpus=False), "timeouts": bounds} | changes)
        replay.serve()
        assert replay.state.phase is Phase.SERVING
        return replay

    return make


def strike(replay: Any, fault: Fault, times: list[float], ahead: float = 0.0) -> None:
    """Play the events of a fault at these times; rank 1's clock is `ahead` seconds ahead of rank 0's."""
    begun = replay.clock
    signals = [Signals(time=1.0, gpus=(GpuSignals(index=0, xid=xid),)) for xid in fault.xids]
    replay.feed(replace(replay.state.view, signals=signals[0]))
    replay.tell(1, signals=signals[1])
    if fault.accepts:
        replay.change(1, accepting=begun + 1.2)
    if fault.starting:
        engine = replace(replay.state.engine, served=False)
        replay.state = replace(replay.state, phase=Phase.WARMING, engine=engine)
    if fault.silent or fault.accepts or any(isinstance(event, Refused) for _, event in fault.events):
        replay.silent.add(1)
    if any(isinstance(event, Told) for _, event in fault.events):
        # Rank 1's next response reports the death and has not arrived yet.
        replay.busy.add(1)
    for at, event in sorted(zip(times, (event for _, event in fault.events), strict=True), key=lambda one: one[0]):
        replay.pass_to(begun + at)
        if isinstance(event, Told):
            rank_one(replay, begun, event, ahead)
        elif isinstance(event, Leaving):
            replay.change(1, status=replay.state.view.peers[1].status.model_copy(update={"phase": Phase.DRAINING}))
        elif isinstance(event, Refused):
            replay.change(1, asked=replay.clock, error="Connection refused", refused=True)
        else:
            replay.feed(event)
    replay.pass_to(begun + 30.0)


def rank_one(replay: Any, begun: float, told: Told, ahead: float) -> None:
    """Feed rank 1's report of a death, with the time by rank 1's clock."""
    generation = None if told.of_member else replay.state.generation
    time = 1_000_000.0 + begun + 0.01 + told.late + ahead
    failure = Failure(
        time=time, cause=told.cause, culprit_rank=1, message="it ended", detected_by="process", generation=generation
    )
    phase = {"phase": Phase.FAILED, "joined": False} if told.of_member else {}
    replay.change(1, behind=-ahead)
    replay.tell(1, verdict=Verdict(health=Health.DEAD, failure=failure), **phase)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
@pytest.mark.parametrize("late", [False, True])
def test_a_fault_has_one_cause_culprit_and_level(serving: MakeReplay, fault: Fault, late: bool) -> None:
    replay = serving()
    strike(replay, fault, [span[late] for span, _ in fault.events])
    assert replay.outcome == fault.outcome


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_no_order_within_the_windows_changes_it(serving: MakeReplay, fault: Fault, data: st.DataObject) -> None:
    """Events have any times within their windows and any order at equal times; rank 1's clock may differ."""
    times = [data.draw(st.floats(*span)) for span, _ in fault.events]
    order = data.draw(st.permutations(range(len(times))))
    shuffled = replace(fault, events=tuple(fault.events[i] for i in order))
    replay = serving()
    strike(replay, shuffled, [times[i] for i in order], data.draw(st.sampled_from([0.0, 60.0, -60.0])))
    assert replay.outcome == fault.outcome
    assert len(replay.all(ReportDead)) <= 1


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_every_fault_is_detected_then_explained_then_repaired(serving: MakeReplay, fault: Fault) -> None:
    replay = serving()
    before = len(replay.done)
    strike(replay, fault, [span[0] for span, _ in fault.events])
    done = [action for _, action in replay.done[before:]]
    repair = next(
        i
        for i, one in enumerate(done)
        if one == StartTask(Task.CLEAR) or (isinstance(one, Enter) and one.phase is Phase.FAILED)
    )
    kinds = (ReportDead, SaveEvidence, RecordFailure)
    order = [next((i for i, one in enumerate(done) if isinstance(one, kind)), None) for kind in kinds]
    found = [at for at in order if at is not None]
    # The evidence is saved before the cause is recorded, and the repair follows.
    assert order[2] is not None
    assert [*found, repair] == sorted([*found, repair])


def test_every_fault_of_the_table_is_here() -> None:
    elsewhere = {"kill -9 agent of rank 0", "SIGSTOP agent of rank 0"}  # detected by rank 1 and by the event loop
    ours = [fault.name for fault in FAULTS]
    for fault in table.FAULTS:
        if fault.kind is not table.Kind.NONE and fault.name not in elsewhere:
            assert any(name.startswith(fault.name) for name in ours), fault.name


@pytest.mark.parametrize("silent", [True, False])
def test_a_suspicion_that_is_withdrawn_causes_no_action(serving: MakeReplay, silent: bool) -> None:
    """After 8 s without packets or a step of 70 s the rules report a suspicion and withdraw it."""
    replay = serving()
    begun = replay.clock
    if silent:
        replay.silent.add(1)
    replay.feed(Judged(Judgement(Health.SUSPECT, Cause.NODE_LOST, 1, "link", "not heard", 0.0)), begun + 2.0)
    replay.pass_to(begun + 8.0)
    replay.silent.clear()
    replay.feed(Judged(Judgement(Health.HEALTHY)))
    replay.pass_to(begun + 80.0)
    assert replay.all(ReportDead) == []
    assert replay.all(StartTask) == []


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([CORE], 0.0),
        ([ApiEnded(-9)], 0.0),
        ([worker(False)], 0.05),
        ([CoreFailed()], 0.1),
        ([dead(Cause.ENGINE_HUNG, 0)], 0.0),
        ([worker(None), CORE], 0.0),
    ],
)
def test_the_verdict_waits_only_for_events_that_can_explain_it(
    serving: MakeReplay, events: list[AgentEvent], seconds: float
) -> None:
    replay = serving()
    begun = replay.clock
    replay.play((0.0, event) for event in events)
    replay.pass_to(begun + 1.0)
    assert replay.verdict[0] - begun == pytest.approx(seconds)


def test_a_worker_that_ends_well_before_engine_core_is_the_cause(serving: MakeReplay) -> None:
    replay = serving()
    replay.play([(0.0, worker(None)), (0.2, CORE)])
    replay.pass_to(replay.clock + 10)
    assert replay.outcome == ("RayWorkerDied", 0, 1)


def test_the_end_of_an_earlier_engine_is_not_that_of_the_next(serving: MakeReplay) -> None:
    replay = serving()
    replay.play([(0.0, CORE)])
    replay.pass_to(replay.clock + 5)
    replay.feed(Done(Task.CLEAR))
    assert (replay.state.generation, len(replay.all(StartEngine))) == (2, 1)
    replay.pass_to(replay.clock + 0.5)
    assert replay.state.engine.signs == ()
    assert replay.state.engine.dead is None


def test_a_completion_that_got_no_answer_because_its_process_ended_is_not_the_cause(serving: MakeReplay) -> None:
    replay = serving()
    replay.state = replace(replay.state, phase=Phase.WARMING)
    replay.play([(0.0, FirstCompletion("Server disconnected")), (0.06, ApiEnded(-9))])
    replay.pass_to(replay.clock + 10)
    assert replay.outcome == ("APIServerDied", 0, 1)


def test_the_cause_in_the_log_explains_the_exit_of_the_api_process(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(FirstError("ERROR something", Cause.OUT_OF_MEMORY_HOST))
    replay.play([(0.0, ApiEnded(1))])
    replay.pass_to(replay.clock + 10)
    assert replay.outcome == ("OutOfMemoryHost", 0, 1)
    assert replay.all(StartTask)[-1] == StartTask(Task.CLEAR)


@pytest.mark.parametrize("lived_through", [True, False])
def test_an_error_before_the_first_answer_is_not_reported_for_a_later_death(
    serving: MakeReplay, lived_through: bool
) -> None:
    replay = serving()
    said = "ERROR [fa_utils.py:212] Cannot use FA version 2"
    if lived_through:
        replay.state = replace(replay.state, phase=Phase.WARMING)
        replay.play([(0.0, FirstError(said, None)), (0.1, FirstCompletion(None))])
        assert replay.state.phase is Phase.SERVING
    else:
        replay.feed(FirstError(said, None))
    replay.play([(0.2, CORE)])
    replay.pass_to(replay.clock + 5)
    (saved,) = replay.all(SaveEvidence)
    assert (said in saved.failure.message) is not lived_through
