"""Detection of silent members."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from dsv4_runtime.agent import http, peers
from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.contract import AgentStatus, Cause, Failure, Health, HealthPolicy, Verdict
from dsv4_testkit.reporter import Reporter
from dsv4_testkit.waiting import free_port, until


@pytest.fixture
async def pair(make_plan: Any) -> AsyncIterator[tuple[Peers, web.AppRunner]]:
    """Yield rank 0's view of rank 1, and the runner of rank 1's agent, which responds until it is cleaned up."""
    plan = make_plan()
    one, other = (
        member.model_copy(
            update={"address": "127.0.0.1", "ports": member.ports.model_copy(update={"agent": free_port()})}
        )
        for member in plan.members
    )
    plan = plan.model_copy(update={"members": (one, other)})
    runner = web.AppRunner(http.application(Reporter(plan, 1), "t"), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, other.address, other.ports.agent).start()
    mine = Peers(plan, 0, "t")
    task = asyncio.create_task(mine.run())
    yield mine, runner
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await runner.cleanup()


async def test_an_ended_agent_counts_as_refused_and_silent(pair: Any) -> None:
    mine, runner = pair
    await until(lambda: mine.all[1].reachable)
    assert mine.silence(1, time.monotonic()) < 60
    assert not mine.all[1].refused
    await runner.cleanup()
    await until(lambda: mine.all[1].refused)
    assert not mine.all[1].reachable
    begun = mine.all[1].alive
    await until(lambda: mine.silence(1, time.monotonic()) > 3.0)
    asked = [mine.all[1].asked]

    def is_asked_often() -> bool:
        if mine.all[1].asked > asked[-1]:
            asked.append(mine.all[1].asked)
        return any(later - earlier < peers.POLL_SECONDS for earlier, later in pairwise(asked))

    # Some of the requests come late on a busy machine.
    await until(is_asked_often)
    assert mine.all[1].alive == begun


@pytest.mark.parametrize("ahead", [0.0, 30.0, -30.0])
async def test_a_death_is_dated_by_this_members_clock(pair: Any, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    mine, _ = pair
    died = time.time() - 5.0
    failure = Failure(time=died + ahead, cause=Cause.RAY_WORKER_DIED, message="it ended", detected_by="process")

    def status(self: Reporter) -> AgentStatus:
        dead = Verdict(health=Health.DEAD, failure=failure)
        return self.state.status().model_copy(update={"time": time.time() + ahead, "verdict": dead})

    assert mine.all[1].death is None
    monkeypatch.setattr(Reporter, "status", status)
    await until(lambda: mine.all[1].death is not None)
    found = mine.all[1].death
    # Without a difference of the clocks the time is not corrected. The error of a correction is half a round trip.
    assert found == failure if ahead == 0.0 else abs(found.time - died) < 10


async def test_silence_is_since_the_latest_of_answer_and_heartbeat(make_plan: Any) -> None:
    mine = Peers(make_plan(), 0, "t")
    assert mine.silence(1, time.monotonic()) is None, "never heard"
    mine._awake = 0.0
    mine._peers[1] = replace(Peer(), heard=100.0)
    assert mine.silence(1, 109.0) == 9.0
    mine._peers[1] = replace(mine._peers[1], beat=108.0)
    assert mine.silence(1, 109.0) == 1.0
    mine._awake = 108.5
    assert mine.silence(1, 109.0) == 0.5, "this agent itself stood still until then"


async def test_a_stopped_process_reports_no_silence_of_other_members(pair: Any) -> None:
    mine, runner = pair
    await until(lambda: mine.all[1].reachable)
    await runner.cleanup()
    time.sleep(3.0)  # blocks the whole process, like SIGSTOP
    await until(lambda: mine.silence(1, time.monotonic()) < 1.0)


@pytest.mark.parametrize("turns", range(6))
async def test_waiting_for_changes_can_be_cancelled_at_the_moment_of_a_change(make_plan: Any, turns: int) -> None:
    """Otherwise a head that has detected a death would wait indefinitely for its tasks to end."""
    mine = Peers(make_plan(), 0, "t")

    async def follow() -> None:
        while True:
            await mine.changed(60.0)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.01)
    mine._changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    following.cancel()
    done, _ = await asyncio.wait({following}, timeout=20.0)
    still = following not in done
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert not still


AGENT = """
import asyncio, sys
from aiohttp import web
from dsv4_runtime.agent import http
from dsv4_runtime.agent.peers import Heartbeats
from dsv4_runtime.agent.record import MemberRecord
from dsv4_runtime.contract import GroupPlan

class Reporter:
    def __init__(self, plan):
        self.state = MemberRecord(plan, 1)
        self.changes = self.state.changes
    def status(self):
        return self.state.status()

async def main():
    plan = GroupPlan.model_validate_json(sys.argv[1])
    me, head = plan.members[1], plan.members[0]
    runner = web.AppRunner(http.application(Reporter(plan), "t"))
    await runner.setup()
    await web.TCPSite(runner, me.address, me.ports.agent).start()
    beats = Heartbeats(1, plan.incarnation, "t", {0: (head.address, head.ports.agent)}, lambda *_: None)
    await beats.open(me.address, me.ports.agent)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
async def stoppable(make_plan: Any) -> AsyncIterator[tuple[Peers, asyncio.subprocess.Process]]:
    """Yield rank 0's view of rank 1, and the process of rank 1's agent."""
    plan = make_plan()
    one, other = (
        member.model_copy(
            update={"address": "127.0.0.1", "ports": member.ports.model_copy(update={"agent": free_port()})}
        )
        for member in plan.members
    )
    plan = plan.model_copy(update={"members": (one, other)})
    command = [sys.executable, "-c", AGENT, plan.to_json()]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"up\n"
    mine = Peers(plan, 0, "t")
    task = asyncio.create_task(mine.run())
    yield mine, process
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    process.kill()
    await process.wait()


def lost(mine: Peers) -> Cause | None:
    now = time.monotonic()
    return mine.all[1].lost(now, mine.awake(now), HealthPolicy())


async def test_a_stopped_agent_is_hung_and_its_node_is_not_lost(stoppable: Any) -> None:
    mine, process = stoppable
    await until(lambda: mine.all[1].beat is not None and mine.all[1].heard is not None)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: lost(mine) is not None)
    assert lost(mine) is Cause.AGENT_HUNG
    assert (mine.silence(1, time.monotonic()) or 0.0) > 3.5
    process.send_signal(signal.SIGCONT)
    await until(lambda: lost(mine) is None)
    assert mine.all[1].accepting is None


async def test_an_agent_that_is_stopped_for_three_seconds_is_not_hung(stoppable: Any) -> None:
    mine, process = stoppable
    await until(lambda: mine.all[1].beat is not None and mine.all[1].heard is not None)
    # Silence before the signal counts too.
    await until(lambda: (mine.silence(1, time.monotonic()) or 1.0) < 0.2)
    process.send_signal(signal.SIGSTOP)
    resumed = time.monotonic() + 3.0
    while time.monotonic() < resumed:
        assert lost(mine) is None
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    await until(lambda: (mine.silence(1, time.monotonic()) or 0.0) < 0.5)


@pytest.mark.parametrize("incarnation", [0, 2])
async def test_the_status_of_an_agent_of_another_incarnation_is_ignored(
    pair: Any, monkeypatch: pytest.MonkeyPatch, incarnation: int
) -> None:
    mine, _ = pair
    await until(lambda: mine.all[1].reachable)

    def status(self: Reporter) -> AgentStatus:
        return self.state.status().model_copy(update={"incarnation": incarnation})

    monkeypatch.setattr(Reporter, "status", status)
    await until(lambda: not mine.all[1].reachable)
    assert mine.all[1].error == f"it belongs to incarnation {incarnation}"
    assert mine.all[1].status.incarnation == 1, "what it said is not taken over"
    assert not mine.all[1].usable
    heard, asked = mine.all[1].heard, mine.all[1].asked
    await until(lambda: mine.all[1].asked > asked)
    assert mine.all[1].heard == heard


def silent(accepting: float | None) -> Peer:
    return replace(Peer(), heard=100.0, accepting=accepting)


def test_an_agent_has_time_to_respond_after_its_link_returns() -> None:
    """After 8 s without packets the machine accepts connections immediately; its agent responds a moment later."""
    assert silent(accepting=108.0).lost(108.3, 0.0, HealthPolicy()) is None
    assert silent(accepting=None).lost(108.9, 0.0, HealthPolicy()) is None
    assert silent(accepting=None).lost(109.0, 0.0, HealthPolicy()) is Cause.NODE_LOST
    assert silent(accepting=101.4).lost(104.0, 0.0, HealthPolicy()) is Cause.AGENT_HUNG
