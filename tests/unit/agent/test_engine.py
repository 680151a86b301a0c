"""Evidence from processes, logs and responses of a real member, as input of `decide`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_runtime.agent import engine
from dsv4_runtime.agent.context import Tasks
from dsv4_runtime.agent.decide.actions import AgentAction
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiEnded,
    CoreFailed,
    Done,
    Peer,
    PluginFailed,
    ProcessEnded,
    Task,
    TaskFailed,
)
from dsv4_runtime.agent.decide.head import load_bound
from dsv4_runtime.agent.decide.state import EngineState
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.record import MemberRecord
from dsv4_runtime.contract import Cause, GroupPlan, Phase, Reading, Timeouts

MakePlan = Callable[..., GroupPlan]
PID = 4711
BOUNDS = Timeouts(preflight=1, staging=1, formation=1, load=1300, first_token=1, drain=3)
FATAL = "(EngineCore pid=402) ERROR 11-23 07:23:32 [core.py:1512] EngineCore encountered a fatal error.\n"


def serving(member: Member) -> Member:
    """Set the state of a member after its start, with an engine that is not watched."""
    engine = EngineState(generation=1, started=0.0, load_seconds=math.inf) if member.context.rank == 0 else None
    state = replace(member.loop.state, formed=True, joined=True, phase=Phase.SERVING, generation=1, engine=engine)
    member.loop.state = state
    member.context.record.begin_generation()
    member.context.record.enter(Phase.SERVING)
    return member


@pytest.fixture
async def make_member(make_plan: MakePlan, tmp_path: Path) -> AsyncIterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(rank: int, **changes: object) -> Member:
        made.append(Member(make_plan(timeouts=BOUNDS, **changes), rank, tmp_path, "token"))
        return made[-1]

    yield make
    for member in made:
        member.loop.close()
        await member.context.tasks.close()
        member.context.exit_causes.close()
        for tail in member.context.tails.values():
            tail.close()


async def died_of(member: Member) -> tuple[Cause, str]:
    async with asyncio.timeout(60):
        while member.context.record.failure is None:
            await asyncio.sleep(0.01)
    return member.context.record.failure.cause, member.context.record.failure.detected_by


@pytest.mark.parametrize(
    ("mine", "theirs", "seconds"),
    [(None, None, 1300), (3e9, None, 1300), (3e9, 0.5e9, 1400), (0.25e9, 0.5e9, 1600)],
)
async def test_an_engine_has_the_time_that_the_slowest_disk_takes(
    make_member: Callable[..., Member], mine: float | None, theirs: float | None, seconds: float
) -> None:
    reading = Reading(size=50_000_000_000, bytes_per_second=1e9, slack=2)
    head = make_member(0)
    plan = head.context.plan.model_copy(update={"timeouts": BOUNDS.model_copy(update={"reading": reading})})
    worker = MemberRecord(plan, 1)
    head.context.record.disk_rate, worker.disk_rate = mine, theirs
    head.context.peers._peers[1] = Peer(status=worker.status())
    bound = load_bound(replace(head.loop.state, plan=plan, view=head.context.view()))
    assert bound == seconds
    assert head.engine is not None
    head.engine._begin(bound)
    # vLLM's own timeout for the start of the engine must not be shorter.
    assert head.context.env.get("VLLM_ENGINE_READY_TIMEOUT_S") == (str(int(seconds)) if seconds > 1300 else None)


async def test_a_bound_that_was_given_stays(make_member: Callable[..., Member]) -> None:
    head = make_member(0)
    head.context.record.disk_rate = 1e6
    assert load_bound(replace(head.loop.state, view=head.context.view())) == 1300


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (["engine-core", "worker"], Cause.ENGINE_CORE_DIED),
        (["worker", "engine-core"], Cause.ENGINE_CORE_DIED),
        (["worker"], Cause.RAY_WORKER_DIED),
        (["worker", None, "engine-core"], Cause.RAY_WORKER_DIED),
    ],
)
async def test_of_two_that_end_together_the_engine_core_took_the_worker_along(
    make_member: Callable[..., Member], ends: list[str | None], cause: Cause
) -> None:
    head = serving(make_member(0))
    for role in ends:
        if role is None:
            await asyncio.sleep(0.2)
        else:
            head.process_ended(role, PID)
    assert (await died_of(head))[0] is cause


def write_raylet_log(directory: Path, kind: int) -> None:
    """Write the raylet's log of the exit of worker `PID`: intended with kind 1, unexpected with 0."""
    logs = directory / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / f"python-core-worker-00b2_{PID}.log").touch()
    (logs / "raylet.out").write_text(f"Disconnecting worker, graceful=true, disconnect_type={kind}, worker_id=00b2\n")


@pytest.mark.parametrize(("kind", "cause"), [(1, Cause.ENGINE_CORE_DIED), (0, Cause.RAY_WORKER_DIED)])
async def test_an_ordered_end_of_a_worker_is_attributed_to_engine_core(
    make_member: Callable[..., Member], tmp_path: Path, kind: int, cause: Cause
) -> None:
    write_raylet_log(tmp_path, kind)
    head = serving(make_member(0))
    head.process_ended("worker", PID)
    assert (await died_of(head))[0] is cause


@pytest.mark.parametrize(("kind", "dead"), [(1, False), (0, True)])
async def test_an_ordered_end_of_a_worker_is_no_failure_of_its_member(
    make_member: Callable[..., Member], tmp_path: Path, kind: int, dead: bool
) -> None:
    write_raylet_log(tmp_path, kind)
    member = serving(make_member(1))
    member.process_ended("worker", PID)
    assert [one.cause for one in member.context.record.failures] == [Cause.RAY_WORKER_DIED] * dead


@pytest.mark.parametrize(("worker", "cause"), [(False, Cause.ENGINE_CORE_DIED), (True, Cause.RAY_WORKER_DIED)])
async def test_a_fatal_error_of_engine_core_is_a_death_before_its_exit(
    make_member: Callable[..., Member], tmp_path: Path, worker: bool, cause: Cause
) -> None:
    write_raylet_log(tmp_path, 0)
    head = serving(make_member(0))
    assert head.engine is not None
    (tmp_path / "vllm.log").write_text(FATAL)
    if worker:
        # EngineCore failed because of the worker and logged this before the agent noticed the worker's exit.
        head.process_ended("worker", PID)
    else:
        head.engine.read_log()
    assert await died_of(head) == (cause, "process" if worker else "log")


@pytest.mark.parametrize("starting", [True, False])
async def test_an_engine_without_the_plugin_ends_unless_it_serves(
    make_member: Callable[..., Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starting: bool
) -> None:
    """A serving engine has loaded the plugin, so the line is text of a client and is ignored."""
    head = serving(make_member(0))
    assert head.engine is not None
    fed: list[object] = []
    monkeypatch.setattr(head.engine, "_feed", fed.append)
    if starting:
        head.context.record.enter(Phase.LOADING)
    (tmp_path / "vllm.log").write_text("Failed to load plugin dsv4\nTraceback (most recent call last):\n")
    head.engine.read_log()
    assert (PluginFailed() in fed) is starting


class Ended:
    pid = PID
    name = "api"
    running = False

    async def wait(self) -> int:
        return 1


@pytest.mark.parametrize(("log", "cause"), [(FATAL, Cause.ENGINE_CORE_DIED), ("", Cause.API_SERVER_DIED)])
async def test_an_api_process_follows_its_engine_core(
    make_member: Callable[..., Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, cause: Cause
) -> None:
    head = serving(make_member(0))
    assert head.engine is not None

    async def start_child(*_: object, **__: object) -> Ended:
        return Ended()

    monkeypatch.setattr(head.context, "start_child", start_child)
    (tmp_path / "vllm.log").write_text(log)
    head.context.tasks.start(Task.ENGINE, head.engine._run_engine())
    assert (await died_of(head))[0] is cause


async def test_the_log_is_read_before_the_end_of_a_process_is_reported(
    make_member: Callable[..., Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = serving(make_member(0))
    assert head.engine is not None
    told: list[AgentEvent] = []
    monkeypatch.setattr(head.loop, "feed", told.append)
    head.engine._feed = told.append
    (tmp_path / "vllm.log").write_text(FATAL)
    head.process_ended("engine-core", PID)
    kinds = [type(event) for event in told]
    assert kinds.index(CoreFailed) < kinds.index(ProcessEnded)


async def test_an_engine_with_an_unreadable_log_is_still_monitored(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = serving(make_member(0))
    assert head.engine is not None

    class Runs(Ended):
        async def wait(self) -> int:
            await asyncio.sleep(600)
            return 0

    async def start_child(*_: object, **__: object) -> Ended:
        return Runs()

    def read_log() -> None:
        raise RuntimeError("it cannot be read")

    monkeypatch.setattr(head.context, "start_child", start_child)
    monkeypatch.setattr(head.engine, "read_log", read_log)
    head.context.tasks.start(Task.ENGINE, head.engine._run_engine())
    assert (await died_of(head))[0] is Cause.UNKNOWN
    assert head.context.record.phase is Phase.FAILED


async def test_an_api_process_that_outlives_sigkill_has_a_cause(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process waits for a device in the kernel, where no signal ends it."""
    head = serving(make_member(0))
    assert head.engine is not None

    class Stuck(Ended):
        async def wait(self) -> int:
            await asyncio.get_running_loop().create_future()
            return 0

        async def end(self, grace: float) -> None:
            return

    monkeypatch.setattr(engine, "_CLEAR_SECONDS", 0.2)
    monkeypatch.setattr(head.engine, "_engine_processes", list)
    head.context.children.append(Stuck())  # type: ignore[arg-type]
    found = await head.engine.clear()
    assert isinstance(found, TaskFailed)
    assert (found.cause, found.detected_by) == (Cause.PROCESS_STUCK, "process")
    assert f"{PID} outlives SIGKILL" in found.message
    head.loop.feed(found)
    assert head.context.record.failure is not None
    assert (head.context.record.failure.cause, head.context.record.phase) == (Cause.PROCESS_STUCK, Phase.FAILED)


async def test_a_mistake_in_an_action_ends_the_member_and_not_the_loop(make_member: Callable[..., Member]) -> None:
    head = serving(make_member(0))
    act, refuse = head.loop._run, [True]

    def run(action: AgentAction) -> None:
        if refuse.pop() if refuse else False:
            raise ValueError("no such thing")
        act(action)

    head.loop._run = run
    head.loop.feed(ApiEnded(1))
    assert head.context.record.failure is not None
    assert (head.context.record.failure.cause, head.context.record.failure.message) == (
        Cause.UNKNOWN,
        "ValueError: no such thing",
    )
    assert head.context.record.phase is Phase.FAILED


async def test_results_of_stopped_tasks_are_dropped() -> None:
    told: list[AgentEvent] = []
    tasks = Tasks(told.append)

    async def stubborn() -> AgentEvent:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return Done(Task.PROBE)

    tasks.start(Task.PROBE, stubborn())
    await asyncio.sleep(0)
    tasks.stop((Task.PROBE,))
    await asyncio.sleep(0.01)
    tasks.start(Task.CLEAR, stubborn())
    await asyncio.sleep(0)
    await tasks.close()
    assert told == []
