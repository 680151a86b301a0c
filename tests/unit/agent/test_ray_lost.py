"""A member whose Ray node ended, or was stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import RecordFailure
from dsv4_runtime.agent.decide.events import Done, ProcessEnded, RayLost, Staged, Started, Task
from dsv4_runtime.contract import Cause, Phase, ProcessSignals, Signals

MakeReplay = Callable[..., Any]
CORE = ProcessEnded("engine-core")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["joining", "serving"])
def test_without_its_ray_node_a_member_fails_at_any_time(fresh: MakeReplay, rank: int, when: str) -> None:
    replay = fresh(rank)
    if when == "serving":
        replay.serve()
    else:
        for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged()):
            replay.feed(event)
    replay.feed(RayLost(Cause.RAYLET_DIED, "the raylet ended", "process"))
    assert replay.failure == (Cause.RAYLET_DIED, rank, "the raylet ended")
    assert replay.phases[-1] is Phase.FAILED


def ray_is(replay: Any, at: float, **states: str) -> None:
    """A sample of this member's processes of Ray, by name and state."""
    processes = tuple(ProcessSignals(name=name, pid=1, state=state, cpu_seconds=0.0) for name, state in states.items())
    replay.pass_to(at)
    replay.feed(dataclasses.replace(replay.state.view, signals=Signals(time=at, processes=processes)))


@pytest.mark.parametrize(
    ("rank", "name", "cause"),
    [(0, "raylet", Cause.RAYLET_HUNG), (1, "raylet", Cause.RAYLET_HUNG), (0, "gcs", Cause.RAY_HEAD_HUNG)],
)
def test_a_stopped_process_of_ray_is_a_lost_ray_node(serving: MakeReplay, rank: int, name: str, cause: Cause) -> None:
    replay = serving(rank)
    begun = replay.clock
    for tenths in range(0, 20, 5):
        ray_is(replay, begun + tenths / 10, **{name: "T"})
    assert replay.all(RecordFailure) == []
    ray_is(replay, begun + 2.0, **{name: "T"})
    assert replay.failure == (cause, rank, f"the {name} process of rank {rank} is stopped (state T) since 2.0 s")
    assert replay.phases[-1] is Phase.FAILED


def test_a_ray_node_that_is_busy_or_goes_on_is_not_lost(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    for second, state in enumerate("TTRTTSDDDDDDDDDD"):
        ray_is(replay, begun + second * 0.9, raylet=state)
    assert replay.all(RecordFailure) == []


def test_an_agent_that_was_stopped_together_with_ray_waits_for_it_to_go_on(serving: MakeReplay) -> None:
    replay = serving()
    begun = replay.clock
    ray_is(replay, begun, raylet="T")
    replay.awake = begun + 30.0
    ray_is(replay, begun + 30.1, raylet="T")
    ray_is(replay, begun + 31.9, raylet="T")
    assert replay.all(RecordFailure) == []
    ray_is(replay, begun + 32.0, raylet="T")
    assert replay.failure[0] is Cause.RAYLET_HUNG
