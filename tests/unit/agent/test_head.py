"""How long rank 0 waits for its engine, and what it says that this one died of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent.head import Head
from dsv4_runtime.agent.peers import Peer
from dsv4_runtime.agent.state import State
from dsv4_runtime.contract import Cause, GroupPlan, Reading, Timeouts

MakePlan = Callable[..., GroupPlan]
BOUNDS = Timeouts(preflight=1, staging=1, formation=1, load=1300, first_token=1, drain=3)


@pytest.mark.parametrize(
    ("mine", "theirs", "seconds"),
    [(None, None, 1300), (3e9, None, 1300), (3e9, 0.5e9, 1400), (0.25e9, 0.5e9, 1600)],
)
async def test_an_engine_has_the_time_that_the_slowest_disk_takes(
    make_plan: MakePlan, tmp_path: Path, mine: float | None, theirs: float | None, seconds: float
) -> None:
    reading = Reading(size=50_000_000_000, bytes_per_second=1e9, slack=2)
    plan = make_plan(timeouts=BOUNDS.model_copy(update={"reading": reading}))
    head, worker = Head(plan, 0, tmp_path, "token"), State(plan, 1)
    head.state.disk_rate, worker.disk_rate = mine, theirs
    head.peers._peers[1] = Peer(status=worker.status())
    assert head._load_bound() == seconds
    # vLLM gives up by itself otherwise.
    assert head.env.get("VLLM_ENGINE_READY_TIMEOUT_S") == (str(int(seconds)) if seconds > 1300 else None)


async def test_a_bound_that_was_given_stays(make_plan: MakePlan, tmp_path: Path) -> None:
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.disk_rate = 1e6
    assert head._load_bound() == 1300


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
    make_plan: MakePlan, tmp_path: Path, ends: list[str | None], cause: Cause
) -> None:
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    for role in ends:
        if role is None:
            await asyncio.sleep(0.2)
        else:
            head.process_ended(role)
    assert (await asyncio.wait_for(head._death, 1)).cause is cause


async def test_the_end_of_an_earlier_engine_is_not_that_of_the_next(make_plan: MakePlan, tmp_path: Path) -> None:
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    head.process_ended("worker")
    head.state.begin_generation()
    await asyncio.sleep(0.2)
    assert not head._death.done()
