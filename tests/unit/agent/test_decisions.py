"""Decisions of rank 0 and of the other ranks from the start to a serving engine, and failures on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import (
    AskFirstCompletion,
    BeginDrain,
    Enter,
    Exit,
    FindProcesses,
    FollowGeneration,
    KillEngine,
    RecordFailure,
    RecordRepair,
    RecordRestart,
    ReleaseWeights,
    ReportDead,
    ReportSuspicion,
    StartEngine,
    StartTask,
    Stop,
    StopChildren,
    SweepSharedMemory,
)
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiAnswered,
    ApiEnded,
    Crashed,
    Done,
    DrainAsked,
    FirstCompletion,
    Judged,
    Loading,
    ProcessEnded,
    RayLost,
    Staged,
    Started,
    StopAsked,
    Task,
    TaskFailed,
)
from dsv4_runtime.contract import (
    Cause,
    EngineStatus,
    Failure,
    Health,
    Phase,
    RecoveryPolicy,
    Signals,
)
from dsv4_runtime.health.rules import HEALTHY, Judgement
from dsv4_testkit.documents import group_plan

MakeReplay = Callable[..., Any]
CORE = ProcessEnded("engine-core")


def test_the_way_of_rank_0_to_serving(fresh: MakeReplay) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.LISTEN), Done(Task.PROVE), Staged()):
        replay.feed(event)
    assert [run.task for run in replay.all(StartTask)] == [
        Task.PREFLIGHT,
        Task.LISTEN,
        Task.STAGE,
        Task.PROVE,
        Task.READ_AHEAD,
        Task.JOIN,
    ]
    replay.feed(Done(Task.JOIN))
    assert replay.all(StartEngine) == [], "nobody else is there yet"
    replay.join()
    assert replay.all(StartEngine) == [StartEngine(40.0)]
    replay.feed(ApiAnswered())
    assert replay.all(AskFirstCompletion) == [AskFirstCompletion()]
    replay.feed(FirstCompletion())
    assert replay.phases == [
        Phase.PREFLIGHT,
        Phase.STAGING,
        Phase.JOINING,
        Phase.JOINING,
        Phase.LOADING,
        Phase.WARMING,
        Phase.SERVING,
    ]


@pytest.mark.parametrize("done", [Staged(), Done(Task.PROVE)])
def test_ray_starts_when_the_weights_are_there_and_the_network_is_proved(fresh: MakeReplay, done: AgentEvent) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), done):
        replay.feed(event)
    assert StartTask(Task.JOIN) not in replay.all(StartTask)


def test_a_failed_member_reports_its_failure_before_it_ends_its_processes(fresh: MakeReplay) -> None:
    replay = fresh(1)
    replay.feed(Started())
    replay.feed(TaskFailed(Task.PREFLIGHT, Cause.PORT_CONFLICT, "port 1 is taken", "preflight"))
    assert replay.failure == (Cause.PORT_CONFLICT, 1, "port 1 is taken")
    kinds = [type(action) for _, action in replay.done]
    assert kinds.index(Enter) < kinds.index(StopChildren)
    assert replay.all(Enter)[-1] == Enter(Phase.FAILED, "port 1 is taken")
    assert replay.all(StartTask)[-1] == StartTask(Task.LISTEN), "whoever asks shall hear why"
    replay.feed(Done(Task.PREFLIGHT))
    replay.feed(Crashed("and more"))
    assert replay.all(StartTask)[-1] == StartTask(Task.LISTEN), "a failed member does nothing more"
    assert len(replay.all(RecordFailure)) == 1


def test_an_agent_that_cannot_bind_its_port_ends(fresh: MakeReplay) -> None:
    replay = fresh()
    replay.feed(Started())
    replay.feed(Done(Task.PREFLIGHT))
    replay.feed(TaskFailed(Task.LISTEN, Cause.UNKNOWN, "the agent cannot listen: in use", "exit"))
    assert replay.all(Exit) == [Exit("the agent cannot listen: in use")]


def test_weights_that_do_not_come_in_time(fresh: MakeReplay) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE)):
        replay.feed(event)
    begun = replay.clock
    replay.pass_to(begun + 19.9)
    assert replay.all(RecordFailure) == []
    replay.pass_to(begun + 20.1)
    assert replay.failure == (Cause.STAGING_FAILED, 0, "the weights were not there after 20 s")
    assert Task.STAGE in replay.all(Stop)[0].tasks


def test_the_proof_of_the_network_has_bounds_of_its_own(fresh: MakeReplay) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Staged()):
        replay.feed(event)
    replay.pass_to(replay.clock + 100)
    assert replay.all(RecordFailure) == []


@pytest.mark.parametrize(("own", "who"), [(True, "rank 1 did not join"), (False, "rank 1 did not join")])
def test_members_that_do_not_join_in_time(fresh: MakeReplay, own: bool, who: str) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged()):
        replay.feed(event)
    if own:
        replay.feed(Done(Task.JOIN))
    replay.pass_to(replay.clock + 31)
    assert replay.failure == (Cause.FORMATION_TIMEOUT, 0, f"{who} within 30 s")


def test_a_stop_ends_all_decisions(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(StopAsked())
    for event in (CORE, ApiEnded(0), RayLost(Cause.RAYLET_DIED, "it ended", "process")):
        replay.feed(event)
    replay.pass_to(replay.clock + 100)
    assert [action for _, action in replay.done] == [Enter(Phase.DRAINING, "ending everything")]


# Rank 0.


def test_an_engine_that_does_not_answer_in_time(fresh: MakeReplay) -> None:
    replay = fresh()
    replay.serve()
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged(), Done(Task.JOIN)):
        replay.feed(event)
    replay.join()
    replay.feed(Loading("loading shards 2/4"))
    replay.pass_to(replay.clock + 41)
    _, found = replay.verdict
    assert found.cause is Cause.STARTUP_TIMEOUT
    assert re.findall(r"\d+ s\b|loading shards .*", found.message) == ["40 s", "loading shards 2/4"]


def test_a_suspicion_is_reported_and_taken_back(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(Judged(Judgement(Health.SUSPECT, Cause.ENGINE_HUNG, 1, "steps", "no step ended", 0.0)))
    replay.feed(Judged(HEALTHY))
    suspected, cleared = replay.all(ReportSuspicion)
    assert (suspected.failure.cause, suspected.failure.culprit_rank) == (Cause.ENGINE_HUNG, 1)
    assert cleared.failure is None
    assert replay.all(ReportDead) == []


def test_a_restart_in_place(serving: MakeReplay) -> None:
    replay = serving()
    replay.restart()
    assert [repair.failure.level for repair in replay.all(RecordRepair)] == [1]
    assert len(replay.all(RecordRestart)) == 1
    assert replay.phases[-2:] == [Phase.RESTARTING, Phase.LOADING]
    replay.feed(ApiAnswered())
    replay.feed(FirstCompletion())
    assert replay.state.attempts == 0
    assert replay.phases[-1] is Phase.SERVING


@pytest.mark.parametrize("cause", [Cause.OUT_OF_MEMORY_GPU, Cause.XID_ERROR, Cause.RAY_MEMORY_KILL])
def test_weights_that_may_be_wrong_are_released_after_the_final_cause(serving: MakeReplay, cause: Cause) -> None:
    """The first observation of a death is an ended process; logs and drivers explain it later."""
    replay = serving()
    replay.feed(ProcessEnded("engine-core"))
    assert replay.all(ReleaseWeights) == []
    replay.feed(ProcessEnded("worker", False, (cause, "the reason in the log of the worker")))
    replay.pass_to(replay.clock + 4)
    assert replay.failure[0] is cause
    expected = [] if cause is Cause.RAY_MEMORY_KILL else [ReleaseWeights(cause)]
    assert replay.all(ReleaseWeights) == expected
    order = [action for _, action in replay.done if action in [*expected, StartTask(Task.CLEAR)]]
    assert order == [*expected, StartTask(Task.CLEAR)], "their memory is free before the next engine is to start"


def test_the_second_restart_waits_and_reports_the_delay(serving: MakeReplay) -> None:
    replay = serving()
    replay.restart()
    replay.feed(ApiAnswered())
    replay.feed(FirstCompletion())
    replay.restart()
    waited = [action.stage for action in replay.all(Enter) if "in " in (action.stage or "")]
    begun = replay.clock
    assert waited[0].startswith("restart 2 of 3, in ")
    replay.pass_to(begun + 12)
    assert len(replay.all(StartEngine)) == 2
    restarts = [one.time for one in replay.all(RecordRestart)]
    assert 10.0 <= restarts[1] - restarts[0] < 10.3


def test_two_failed_starts_end_the_recovery_in_place(serving: MakeReplay) -> None:
    replay = serving(
        recovery=RecoveryPolicy(max_restarts=9, window_seconds=1, backoff_base_seconds=0, backoff_max_seconds=0)
    )
    replay.restart()
    replay.restart()
    assert replay.phases[-1] is Phase.LOADING
    replay.restart()
    assert replay.phases[-1] is Phase.FAILED


def test_an_engine_that_cannot_be_cleared_away_ends_the_member(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(CORE)
    replay.pass_to(replay.clock + 4)
    replay.feed(TaskFailed(Task.CLEAR, Cause.UNKNOWN, "rank 1 is not free", "process", 1))
    last = replay.all(RecordFailure)[-1].failure
    assert (last.cause, last.culprit_rank, last.message) == (Cause.UNKNOWN, 1, "rank 1 is not free")
    assert replay.phases[-1] is Phase.FAILED


def test_an_engine_that_was_to_end_anyway_is_not_brought_back(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(DrainAsked(20.0))
    replay.feed(DrainAsked(30.0))
    assert replay.all(BeginDrain) == [BeginDrain(20.0)]
    replay.feed(CORE)
    replay.pass_to(replay.clock + 4)
    assert StartTask(Task.CLEAR) not in replay.all(StartTask)
    assert replay.phases[-1] is Phase.FAILED


def test_the_verdict_waits_for_a_silent_member_until_it_is_lost(serving: MakeReplay) -> None:
    replay = serving()
    replay.silent.add(1)
    begun = replay.clock
    replay.pass_to(begun + 2.0)
    replay.feed(CORE)
    replay.pass_to(begun + 8.5)
    assert replay.all(RecordFailure) == []
    replay.pass_to(begun + 9.5)
    assert replay.failure[:2] == (Cause.NODE_LOST, 1)


def test_a_member_that_comes_back_in_time_is_not_lost(serving: MakeReplay) -> None:
    replay = serving()
    replay.silent.add(1)
    begun = replay.clock
    replay.pass_to(begun + 2.0)
    replay.feed(CORE)
    replay.pass_to(begun + 5.0)
    replay.silent.clear()
    replay.tell(1)
    replay.pass_to(begun + 6.0)
    assert replay.failure[:2] == (Cause.ENGINE_CORE_DIED, 0)


# The others.


def test_a_worker_follows_the_head(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.LOADING)
    replay.head_says(1, Phase.LOADING)
    replay.head_says(1, Phase.SERVING)
    assert replay.phases == [Phase.LOADING, Phase.SERVING]
    assert replay.all(FollowGeneration) == [FollowGeneration(1)]
    assert len(replay.all(SweepSharedMemory)) == 1
    assert len(replay.all(FindProcesses)) == 1


@pytest.mark.parametrize("seen", [(Phase.RESTARTING,), (), (Phase.RESTARTING, Phase.LOADING, Phase.SERVING)])
def test_a_worker_releases_its_weights_once_for_each_death_that_makes_them_doubtful(
    serving: MakeReplay, seen: tuple[Phase, ...]
) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.SERVING)
    deaths = [Failure(time=1.0, cause=Cause.ENGINE_CORE_DIED, message="", detected_by="process", generation=1)]
    for phase in seen:
        replay.tell(0, engine=EngineStatus(generation=1, failures=tuple(deaths)), phase=phase)
    assert replay.all(ReleaseWeights) == []
    for generation in (2, 3):
        death = Failure(
            time=2.0, cause=Cause.CANARY_FAILED, message="", detected_by="completion", generation=generation
        )
        deaths.append(death)
        for phase in (*seen, Phase.LOADING):
            replay.tell(0, engine=EngineStatus(generation=generation + 1, failures=tuple(deaths)), phase=phase)
    assert replay.all(ReleaseWeights) == [ReleaseWeights(Cause.CANARY_FAILED)] * 2


def test_a_restart_ends_a_members_processes_only_on_recent_statuses(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.SERVING)
    replay.head_says(1, Phase.RESTARTING)
    replay.silent.add(0)
    told = replay.clock
    replay.pass_to(told + 8.0)
    killed = [clock - told for clock, action in replay.done if isinstance(action, KillEngine)]
    assert killed[:3] == pytest.approx([0.0, 0.25, 0.5])
    assert killed[-1] < 2.0, "the next engine's worker must not be taken for the last one's"


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (ProcessEnded("worker", ordered=False), Cause.RAY_WORKER_DIED),
        (ProcessEnded("worker", ordered=None), Cause.RAY_WORKER_DIED),
        (ProcessEnded("worker", False, (Cause.RAY_MEMORY_KILL, "Ray killed it")), Cause.RAY_MEMORY_KILL),
        (ProcessEnded("worker", ordered=True), None),
        (CORE, None),
    ],
)
def test_the_end_of_a_worker_is_a_failure_of_its_member_unless_ordered(
    serving: MakeReplay, event: AgentEvent, cause: Cause | None
) -> None:
    replay = serving(1)
    replay.head_says(3, Phase.SERVING)
    replay.feed(event)
    found = [(one.failure.cause, one.failure.culprit_rank, one.failure.generation) for one in replay.all(RecordFailure)]
    assert found == ([] if cause is None else [(cause, 1, 3)])
    assert replay.phases[-1] is Phase.SERVING, "what follows is the head's business"


@pytest.mark.parametrize("phase", [Phase.RESTARTING])
def test_the_end_of_a_worker_while_no_engine_should_run_is_no_death(serving: MakeReplay, phase: Phase) -> None:
    replay = serving(1)
    replay.head_says(1, phase)
    replay.feed(ProcessEnded("worker", ordered=False))
    assert replay.all(RecordFailure) == []


def test_a_head_whose_agent_hangs_is_not_called_a_lost_node(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.SERVING)
    replay.silent.add(0)
    begun = replay.clock
    replay.pass_to(begun + 1.4)
    replay.change(0, accepting=replay.clock)
    replay.change_at(begun + 3.9, 0)
    assert replay.all(RecordFailure) == []
    replay.change_at(begun + 4.0, 0)
    assert replay.failure[:2] == (Cause.AGENT_HUNG, 0)


def test_a_hung_agent_is_the_cause_of_its_engines_death(serving: MakeReplay) -> None:
    replay = serving()
    replay.silent.add(1)
    begun = replay.clock
    replay.pass_to(begun + 1.4)
    replay.change(1, accepting=replay.clock)
    hung = Judgement(Health.DEAD, Cause.AGENT_HUNG, 1, "link", "the agent of rank 1 last sent a message 4.0 s ago", 0.0)
    replay.feed(Judged(hung), begun + 4.0)
    replay.pass_to(begun + 4.5)
    assert replay.failure[:2] == (Cause.AGENT_HUNG, 1), "nobody waits for it to become a lost node"
    assert replay.phases[-1] is Phase.FAILED


def test_a_silent_head_is_lost(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.SERVING)
    replay.silent.add(0)
    begun = replay.clock
    replay.pass_to(begun + 8.9)
    assert replay.all(RecordFailure) == []
    replay.pass_to(begun + 9.3)
    assert replay.failure == (Cause.NODE_LOST, 0, "rank 0 last sent a message 9.0 s ago, by heartbeat or answer")
    assert replay.phases[-1] is Phase.FAILED


@pytest.mark.parametrize(("heard", "cause", "culprit"), [(0.4, Cause.LINK_LOST, None), (9.0, Cause.NODE_LOST, 0)])
def test_a_head_that_another_member_reaches_has_lost_a_link(
    serving: MakeReplay, heard: float, cause: Cause, culprit: int | None
) -> None:
    three = group_plan(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    replay = serving(1, members=three.members, expectations=three.expectations)
    replay.head_says(1, Phase.SERVING)
    replay.tell(2, signals=Signals(time=0.0, silent={0: heard, 1: 0.3}))
    replay.silent.add(0)
    replay.pass_to(replay.clock + 10.0)
    assert replay.failure[:2] == (cause, culprit)
    if cause is Cause.LINK_LOST:
        assert replay.failure[2].startswith("rank 0 and rank 1 both run")
