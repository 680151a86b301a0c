"""How long rank 0 waits for its engine, and what it says that this one died of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent.head import Head
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.peers import Peer
from dsv4_runtime.agent.state import State
from dsv4_runtime.contract import Cause, GroupPlan, Phase, Reading, Timeouts

MakePlan = Callable[..., GroupPlan]
PID = 4711
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
            head.process_ended(role, PID)
    assert (await asyncio.wait_for(head._death, 1)).cause is cause


def raylet_says(directory: Path, kind: int) -> None:
    """That the worker `PID` left: told to with 1, by itself with 0."""
    logs = directory / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / f"python-core-worker-00b2_{PID}.log").touch()
    (logs / "raylet.out").write_text(f"Disconnecting worker, graceful=true, disconnect_type={kind}, worker_id=00b2\n")


@pytest.mark.parametrize(("kind", "cause"), [(1, Cause.ENGINE_CORE_DIED), (0, Cause.RAY_WORKER_DIED)])
async def test_a_worker_that_was_told_to_end_died_of_its_engine_core(
    make_plan: MakePlan, tmp_path: Path, kind: int, cause: Cause
) -> None:
    raylet_says(tmp_path, kind)
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    head.process_ended("worker", PID)
    head.killers.close()
    assert (await asyncio.wait_for(head._death, 1)).cause is cause


@pytest.mark.parametrize(("kind", "dead"), [(1, False), (0, True)])
async def test_a_worker_that_was_told_to_end_is_no_death_of_its_member(
    make_plan: MakePlan, tmp_path: Path, kind: int, dead: bool
) -> None:
    raylet_says(tmp_path, kind)
    member = Member(make_plan(timeouts=BOUNDS), 1, tmp_path, "token")
    member.state.enter(Phase.SERVING)
    member.process_ended("worker", PID)
    member.killers.close()
    assert [one.cause for one in member.state.failures] == [Cause.RAY_WORKER_DIED] * dead


FATAL = "(EngineCore pid=402) ERROR 11-23 07:23:32 [core.py:1512] EngineCore encountered a fatal error.\n"


@pytest.mark.parametrize(("worker", "cause"), [(False, Cause.ENGINE_CORE_DIED), (True, Cause.RAY_WORKER_DIED)])
async def test_an_engine_core_that_gave_up_is_dead_before_it_ends(
    make_plan: MakePlan, tmp_path: Path, worker: bool, cause: Cause
) -> None:
    raylet_says(tmp_path, 0)
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    (tmp_path / "vllm.log").write_text(FATAL)
    if worker:
        # EngineCore failed of it, and wrote so before the agent heard of the worker's end.
        head.process_ended("worker", PID)
    else:
        head._read_log()
    death = await asyncio.wait_for(head._death, 1)
    assert (death.cause, death.detected_by) == (cause, "process" if worker else "log")
    head.killers.close()
    head.tails["vllm"].close()


class Ended:
    async def wait(self) -> int:
        return 1


@pytest.mark.parametrize(("log", "cause"), [(FATAL, Cause.ENGINE_CORE_DIED), ("", Cause.API_SERVER_DIED)])
async def test_an_api_process_follows_its_engine_core(
    make_plan: MakePlan, tmp_path: Path, log: str, cause: Cause
) -> None:
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    (tmp_path / "vllm.log").write_text(log)
    await head._await_exit(Ended())  # type: ignore[arg-type]
    assert (await asyncio.wait_for(head._death, 1)).cause is cause
    head.killers.close()
    head.tails["vllm"].close()


async def test_the_end_of_an_earlier_engine_is_not_that_of_the_next(make_plan: MakePlan, tmp_path: Path) -> None:
    head = Head(make_plan(timeouts=BOUNDS), 0, tmp_path, "token")
    head.state.begin_generation()
    head._death = asyncio.get_running_loop().create_future()
    head.process_ended("worker", PID)
    head.state.begin_generation()
    await asyncio.sleep(0.2)
    assert not head._death.done()
