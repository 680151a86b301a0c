"""Groups without Ray: the agents of the other ranks start their part of vLLM, report its death, and end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import (
    FindProcesses,
    KillEngine,
    RecordFailure,
    ReportServing,
    StartEngine,
    Stop,
)
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    CoreFailed,
    EngineGone,
    FabricFellBack,
    FirstError,
    ProcessEnded,
    Task,
    WorkerLost,
)
from dsv4_runtime.contract import Cause, GroupPlan, Phase
from dsv4_testkit.documents import member_plan

MakeReplay = Callable[..., Any]

MEMBERS = (
    member_plan(0, "127.0.0.1", ray_args=(), engine_args=("--nnodes=2", "--node-rank=0")),
    member_plan(1, "127.0.0.2", ray_args=(), engine_args=("--nnodes=2", "--node-rank=1", "--headless")),
)
WORKER, EXECUTOR = ProcessEnded("worker"), ApiEnded(-9)
OOM = FirstError("torch.OutOfMemoryError: CUDA out of memory.", Cause.OUT_OF_MEMORY_GPU)


def failures(replay: Any) -> list[tuple[Cause, int | None, int | None]]:
    found = [action.failure for action in replay.all(RecordFailure)]
    return [(one.cause, one.culprit_rank, one.generation) for one in found]


@pytest.mark.parametrize(("ray", "starts"), [(True, [True, False]), (False, [True, True])])
def test_which_members_start_vllm(make_plan: Callable[..., GroupPlan], ray: bool, starts: list[bool]) -> None:
    made = make_plan() if ray else make_plan(members=MEMBERS)
    assert [made.starts_vllm(rank) for rank in (0, 1)] == starts


def test_all_arguments_of_a_member_follow_those_of_the_group(make_plan: Callable[..., GroupPlan]) -> None:
    made = make_plan(members=MEMBERS)
    made = made.model_copy(update={"engine": made.engine.model_copy(update={"args": ("--model=x",)})})
    assert made.engine_args(1) == ("--model=x", "--nnodes=2", "--node-rank=1", "--headless")


@pytest.mark.parametrize("first", [Phase.LOADING, Phase.WARMING])
def test_a_member_starts_its_part_of_each_generation_once(serving: MakeReplay, first: Phase) -> None:
    replay = serving(1, members=MEMBERS)
    for generation in (1, 2):
        replay.head_says(generation, first)
        for phase in (Phase.LOADING, Phase.WARMING, Phase.WARMING, Phase.SERVING):
            replay.head_says(generation, phase)
        assert len(replay.all(StartEngine)) == generation
        assert len(replay.all(ReportServing)) == generation
        replay.head_says(generation, Phase.RESTARTING)


@pytest.mark.parametrize("seen", [(Phase.RESTARTING,), ()])
def test_the_standby_server_is_kept_by_no_task_while_the_next_generation_takes_it(
    serving: MakeReplay, seen: tuple[Phase, ...]
) -> None:
    """Answers with the short phase of a restart may be lost; imports would stay slow until it serves."""
    replay = serving(1, members=MEMBERS)
    for phase in (Phase.LOADING, Phase.WARMING, Phase.SERVING):
        replay.head_says(1, phase)
    before = len(replay.done)
    for phase in seen:
        replay.head_says(1, phase)
    replay.head_says(2, Phase.LOADING)
    later = [action for _, action in replay.done[before:]]
    order = [type(action) for action in later if action == Stop((Task.STANDBY,)) or isinstance(action, StartEngine)]
    assert order[0] is Stop
    assert order[-1] is StartEngine


def test_with_ray_a_member_starts_nothing(serving: MakeReplay) -> None:
    replay = serving(1)
    for phase in (Phase.LOADING, Phase.WARMING, Phase.SERVING):
        replay.head_says(1, phase)
    assert replay.all(StartEngine) == []
    assert replay.all(ReportServing) == []


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.SERVING])
@pytest.mark.parametrize("events", [[WORKER, EXECUTOR], [EXECUTOR, WORKER], [WORKER], [EXECUTOR]])
def test_worker_and_executor_end_together_and_are_one_death(
    serving: MakeReplay, phase: Phase, events: list[AgentEvent]
) -> None:
    replay = serving(1, members=MEMBERS)
    replay.head_says(3, Phase.LOADING)
    replay.head_says(3, phase)
    for event in events:
        replay.feed(event)
    assert failures(replay) == [(Cause.RAY_WORKER_DIED, 1, 3)]


def test_an_explained_end_replaces_one_without_an_explanation(serving: MakeReplay) -> None:
    replay = serving(1, members=MEMBERS)
    replay.head_says(1, Phase.LOADING)
    replay.feed(WORKER)
    replay.feed(ApiEnded(1, (Cause.OUT_OF_MEMORY_HOST, "the kernel ended it")))
    assert failures(replay)[-1] == (Cause.OUT_OF_MEMORY_HOST, 1, 1)


@pytest.mark.parametrize("event", [WORKER, EXECUTOR])
def test_the_next_generation_may_die_of_the_same(serving: MakeReplay, event: AgentEvent) -> None:
    replay = serving(1, members=MEMBERS)
    for generation in (1, 2):
        replay.head_says(generation, Phase.LOADING)
        replay.feed(event)
        replay.head_says(generation, Phase.RESTARTING)
        replay.feed(EXECUTOR)
    assert failures(replay) == [(Cause.RAY_WORKER_DIED, 1, 1), (Cause.RAY_WORKER_DIED, 1, 2)]


def test_the_cause_comes_from_the_members_own_log(serving: MakeReplay) -> None:
    """Only this member has the log of its workers."""
    replay = serving(1, members=MEMBERS)
    replay.head_says(1, Phase.LOADING)
    replay.feed(OOM)
    replay.feed(WORKER)
    assert failures(replay) == [(Cause.OUT_OF_MEMORY_GPU, 1, 1)]
    assert "CUDA out of memory" in replay.failure[2]


def test_an_error_of_its_start_does_not_explain_a_death_after_it_served(serving: MakeReplay) -> None:
    replay = serving(1, members=MEMBERS)
    replay.head_says(1, Phase.LOADING)
    replay.feed(OOM)
    replay.head_says(1, Phase.SERVING)
    replay.feed(WORKER)
    assert failures(replay) == [(Cause.RAY_WORKER_DIED, 1, 1)]


def test_sockets_in_place_of_rdma_are_a_death_of_this_member(serving: MakeReplay) -> None:
    replay = serving(1, members=MEMBERS)
    replay.head_says(1, Phase.LOADING)
    replay.feed(FabricFellBack("NET/Socket"))
    assert failures(replay) == [(Cause.NCCL_SOCKET_FALLBACK, 1, 1)]


def test_a_restart_ends_its_part_until_nothing_is_left(serving: MakeReplay) -> None:
    replay = serving(1, members=MEMBERS)
    replay.head_says(1, Phase.LOADING)
    replay.head_says(1, Phase.RESTARTING)
    killed = len(replay.all(KillEngine))
    assert killed > 0
    assert replay.all(FindProcesses)
    replay.feed(EngineGone())
    replay.head_says(1, Phase.RESTARTING)
    assert len(replay.all(KillEngine)) == killed
    assert len(replay.all(StartEngine)) == 1, "the next generation has not begun"


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([WORKER, WorkerLost(), CoreFailed()], Cause.RAY_WORKER_DIED),
        ([WorkerLost(), CoreFailed(), WORKER], Cause.RAY_WORKER_DIED),
        ([WORKER, WorkerLost(), ProcessEnded("engine-core")], Cause.RAY_WORKER_DIED),
        ([WorkerLost(), CoreFailed()], Cause.RAY_WORKER_DIED),
        ([WORKER, CoreFailed()], Cause.ENGINE_CORE_DIED),
        ([WORKER, ProcessEnded("engine-core")], Cause.ENGINE_CORE_DIED),
    ],
)
def test_a_worker_that_its_executor_did_not_end_is_the_cause(
    serving: MakeReplay, events: list[AgentEvent], cause: Cause
) -> None:
    """For workers of Ray this information is in Ray's log; the MP executor logs a line before EngineCore fails."""
    replay = serving(0, members=MEMBERS)
    for event in events:
        replay.feed(event)
    replay.pass_to(replay.clock + 1.0)
    assert replay.verdict[1].cause is cause
    assert replay.verdict[1].culprit_rank == 0
