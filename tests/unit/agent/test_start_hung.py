"""Starts that hang, slow starts, and repeated identical failures of starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import RecordFailure, StartEngine
from dsv4_runtime.agent.decide.events import (
    ApiAnswered,
    ApiEnded,
    Done,
    FirstCompletion,
    Loading,
    Staged,
    Started,
    Task,
)
from dsv4_runtime.contract import Cause, Phase, ProcessSignals, Reading, Signals, Timeouts

MakeReplay = Callable[..., Any]
BOUNDS = {"preflight": 10, "staging": 20, "formation": 30, "first_token": 500, "drain": 3}
LOAD = 100.0


@pytest.fixture
def starting(fresh: MakeReplay) -> MakeReplay:
    """Return the factory of a replay of rank 0 with a starting engine and a planned bound of `LOAD`."""

    def make(given: bool = False, warming: bool = False, **changes: Any) -> Any:
        reading = None if given else Reading(size=1, bytes_per_second=1e9, slack=1)
        replay = fresh(timeouts=Timeouts(**BOUNDS, load=LOAD, reading=reading), **changes)
        replay.serve()
        replay.restart()
        if warming:
            replay.feed(ApiAnswered())
        replay.done.clear()
        return replay

    return make


def sampled(replay: Any, idle: float = 0.0, stagnant: float = 0.0, rank: int = 0, **states: str) -> None:
    """Feed a sample of a member in which the engine's processes have these states."""
    processes = tuple(
        ProcessSignals(name=name.replace("_", "-"), pid=1, state=state, cpu_seconds=0.0)
        for name, state in states.items()
    )
    signals = Signals(time=replay.clock, processes=processes, idle=idle, stagnant=stagnant)
    if rank:
        replay.tell(rank, signals=signals)
    else:
        replay.feed(dataclasses.replace(replay.state.view, signals=signals))


def samples(replay: Any, seconds: float, *, idle: tuple[float, float], **states: str) -> None:
    """Feed samples of all members every second; `idle` is the initial idle time of each, which grows unless it is 0."""
    begun = replay.clock
    while replay.clock - begun < seconds and not replay.all(RecordFailure):
        replay.pass_to(replay.clock + 1.0)
        for rank, first in enumerate(idle):
            quiet = first + replay.clock - begun if first else 0.0
            sampled(replay, quiet, quiet, rank, **(states if rank == 0 else {}))


@pytest.mark.parametrize("warming", [False, True])
def test_a_start_without_progress_on_any_member_is_hung(starting: MakeReplay, warming: bool) -> None:
    replay = starting(warming=warming)
    begun = replay.clock
    samples(replay, 60.0, idle=(0.1, 0.1))
    cause, culprit, message = replay.failure
    assert (cause, culprit) == (Cause.ENGINE_HUNG, None)
    assert message.startswith("the start made no progress for 30 s")
    assert 30.0 <= replay.clock - begun < 35.0
    assert replay.state.phase is Phase.RESTARTING


@pytest.mark.parametrize("idle", [(0.0, 0.1), (0.1, 0.0)])
def test_work_on_one_member_is_progress_of_the_start(starting: MakeReplay, idle: tuple[float, float]) -> None:
    replay = starting()
    samples(replay, 90.0, idle=idle)
    assert replay.all(RecordFailure) == []


def test_a_stage_in_the_log_is_progress(starting: MakeReplay) -> None:
    replay = starting()
    for number in range(3):
        samples(replay, 25.0, idle=(0.1, 0.1))
        replay.feed(Loading(f"loading shards {number}/3"))
    assert replay.all(RecordFailure) == []
    samples(replay, 40.0, idle=(0.1, 0.1))
    assert "loading shards 2/3" in replay.failure[2]


@pytest.mark.parametrize(("name", "rank"), [("api", 0), ("engine_core", 0), ("worker", 1)])
def test_a_stopped_process_hangs_a_start_at_once(starting: MakeReplay, name: str, rank: int) -> None:
    replay = starting()
    begun = replay.clock
    for _ in range(6):
        replay.pass_to(replay.clock + 0.5)
        sampled(replay, rank=rank, **{name: "T"})
    assert replay.failure[:2] == (Cause.ENGINE_HUNG, rank)
    assert "is stopped or frozen" in replay.failure[2]
    assert replay.done[0][0] - begun <= 3.5


def test_a_process_that_waits_in_the_kernel_is_named(starting: MakeReplay) -> None:
    replay = starting()
    samples(replay, 60.0, idle=(0.1, 0.1), api="D")
    assert replay.failure[:2] == (Cause.ENGINE_HUNG, 0)
    assert "vLLM's API process on rank 0 waits in the kernel (state D)" in replay.failure[2]


def test_files_that_are_read_again_are_no_hang(starting: MakeReplay) -> None:
    replay = starting(warming=True)
    # Starts younger than the bound never count as hung.
    samples(replay, 40.0, idle=(0.0, 0.0))
    replay.feed(FirstCompletion("not a number", wrong=True))
    samples(replay, 19.0, idle=(25.0, 25.0))
    assert replay.all(RecordFailure) == []


def test_a_pause_of_the_agent_is_no_hang(starting: MakeReplay) -> None:
    replay = starting()
    samples(replay, 20.0, idle=(0.1, 0.1))
    replay.awake = replay.clock + 60.0
    replay.pass_to(replay.awake)
    samples(replay, 25.0, idle=(0.1, 0.1))
    assert replay.all(RecordFailure) == []


def test_an_active_compiler_lives_beyond_the_bound_and_one_that_spins_does_not(starting: MakeReplay) -> None:
    replay = starting()
    # First starts of 36 minutes were observed; the bound is 100 s here.
    samples(replay, 59 * 60, idle=(0.0, 0.0))
    assert replay.all(RecordFailure) == []
    samples(replay, 2 * 60, idle=(0.0, 0.0))
    assert replay.failure[0] is Cause.STARTUP_TIMEOUT
    spinning, begun = starting(), 0.0
    begun = spinning.clock
    while spinning.clock < begun + 2 * LOAD and not spinning.all(RecordFailure):
        spinning.pass_to(spinning.clock + 1.0)
        for rank in (0, 1):
            sampled(spinning, 0.0, spinning.clock - begun, rank)
    assert spinning.failure[0] is Cause.STARTUP_TIMEOUT
    assert LOAD <= spinning.clock - begun < LOAD + 5


def test_a_bound_that_was_given_is_one(starting: MakeReplay) -> None:
    replay = starting(given=True)
    samples(replay, LOAD + 5, idle=(0.0, 0.0))
    assert replay.failure[0] is Cause.STARTUP_TIMEOUT


@pytest.mark.parametrize(("second", "level"), [(1, 2), (2, 1)])
def test_two_first_starts_that_fail_alike_end_level_1(fresh: MakeReplay, second: int, level: int) -> None:
    replay = fresh()
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged(), Done(Task.JOIN)):
        replay.feed(event)
    replay.join()
    replay.feed(ApiEnded(1))
    replay.pass_to(replay.clock + 4)
    replay.feed(Done(Task.CLEAR))
    assert len(replay.all(StartEngine)) == 2, "level 1"
    replay.feed(ApiEnded(second))
    replay.pass_to(replay.clock + 4)
    assert (replay.state.phase is Phase.FAILED) is (level == 2)


def test_a_restart_that_exceeds_its_bound_is_not_repeated_on_the_same_ray_nodes(starting: MakeReplay) -> None:
    replay = starting(given=True)
    samples(replay, LOAD + 5, idle=(0.0, 0.0))
    replay.pass_to(replay.clock + 4)
    assert replay.state.phase is Phase.FAILED
