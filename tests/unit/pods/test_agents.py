"""Requests to agents while the head's agent is silent; lost agents do not delay the others."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from dsv4_operator.backends.pods.observe import AgentWatch, Endpoint
from dsv4_operator.lifecycle.watch import FRESH_SECONDS
from dsv4_runtime import client as client_module
from dsv4_runtime.client import AgentClient
from dsv4_runtime.contract import AgentStatus, GroupReport, Phase
from dsv4_runtime.contract.token import CHALLENGE, challenge, new_token
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import raise_file_limit
from dsv4_testkit.documents import agent_status
from dsv4_testkit.waiting import until

KEY = "the deployment's key"
TOKEN = new_token(KEY)


def status(rank: int, phase: Phase, incarnation: int = 3) -> AgentStatus:
    return agent_status(rank, phase, deployment="d", incarnation=incarnation, joined=True)


class Member:
    """An agent that responds, or accepts requests and never responds."""

    def __init__(self, rank: int, *, answers: bool, incarnation: int = 3) -> None:
        self.phase, self.asked, self.answers = Phase.SERVING, 0, answers
        self.report: GroupReport | None = None
        """Report that the agent repeats on its stream; None: it has no stream."""
        self._rank, self.incarnation = rank, incarnation

    async def __aenter__(self) -> Endpoint:
        app = web.Application()
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/watch", self._watch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return Endpoint("127.0.0.1", self._runner.addresses[0][1])

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401, headers={CHALLENGE: challenge(TOKEN)})
        self.asked += 1
        if not self.answers:
            await asyncio.sleep(600)
        said = status(self._rank, self.phase, self.incarnation)
        return web.Response(text=said.to_json(), content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.report is None:
            raise web.HTTPNotFound
        stream = web.StreamResponse()
        await stream.prepare(request)
        for _ in range(6000):
            await stream.write(self.report.to_json().encode() + b"\n")
            await asyncio.sleep(0.1)
        return stream


@pytest.fixture
async def agents() -> AsyncIterator[tuple[AgentWatch, asyncio.Event]]:
    news = asyncio.Event()

    async def key() -> str:
        return KEY

    client = AgentClient()
    found = AgentWatch(client, 3, key, news.set)
    yield found, news
    await found.close()
    await client.close()


async def failed(listening: AgentWatch, news: asyncio.Event) -> None:
    """Wait until rank 1 has reported its failure."""
    async with asyncio.timeout(60):
        while (report := listening.report(1)) is None or report.status.phase is not Phase.FAILED:
            await news.wait()
            news.clear()


async def test_an_absent_member_does_not_delay_reports_of_another(
    agents: tuple[AgentWatch, asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, news = agents
    gone, witness = Member(0, answers=False), Member(1, answers=True)
    async with gone as first, witness as second:
        # The head's stream is not followed here: the watch only sends status requests, and one without an end.
        status = functools.partial(listening._client.status, seconds=600.0)
        monkeypatch.setattr(listening._client, "status", status)
        listening.follow({1: second, 2: first})
        async with asyncio.timeout(60):
            await news.wait()
        report = listening.report(1)
        assert report is not None
        assert report.status.phase is Phase.SERVING
        await until(lambda: gone.asked)
        witness.phase = Phase.FAILED
        news.clear()
        await failed(listening, news)


async def test_members_are_polled_repeatedly_once_the_head_is_silent(
    agents: tuple[AgentWatch, asyncio.Event],
) -> None:
    listening, news = agents
    head, witness = Member(0, answers=True), Member(1, answers=True)
    async with head as first, witness as second:
        listening.follow({0: first, 1: second})
        async with asyncio.timeout(60):
            while listening.report(0) is None or listening.report(1) is None:
                await news.wait()
                news.clear()
        head.answers = False
        # The last report arrived just now, so the head counts as silent after 2.5 s.
        await asyncio.sleep(4.5)
        witness.phase = Phase.FAILED
        asked = witness.asked
        await failed(listening, news)
        await until(lambda: witness.asked >= asked + 3)


async def test_each_silence_is_reported_once_and_not_before_decisions_see_it(
    agents: tuple[AgentWatch, asyncio.Event],
) -> None:
    listening, news = agents
    member = Member(1, answers=True)
    async with member as endpoint:
        listening.follow({1: endpoint})
        for _ in range(2):
            asked = member.asked
            member.answers = True
            await until(lambda: member.asked > asked)  # noqa: B023
            await until(lambda: (one := listening.report(1)) is not None and unix_time() - one.heard < FRESH_SECONDS)
            member.answers = False
            news.clear()
            async with asyncio.timeout(60):
                await news.wait()
            report = listening.report(1)
            assert report is not None
            assert unix_time() - report.heard > FRESH_SECONDS
            news.clear()
            await asyncio.sleep(1.5)
            assert not news.is_set()


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        ({"warnings": ("GPU 0: clock 850 MHz of 2418 MHz", "1 of 2 links is down")}, True),
        ({"warnings": ("GPU 0: clock 910 MHz of 2418 MHz",)}, False),
        ({"warnings": ()}, True),
        ({"broken": "no shared memory"}, True),
        ({"time": 5.0}, False),
    ],
)
async def test_a_decision_is_requested_for_news_only(
    agents: tuple[AgentWatch, asyncio.Event], change: dict[str, Any], is_news: bool
) -> None:
    watch, _ = agents
    first = status(0, Phase.SERVING).model_copy(update={"warnings": ("GPU 0: clock 850 MHz of 2418 MHz",)})
    watch._take(0, first, 1.0)
    assert watch._take(0, first.model_copy(update=change), 2.0) is is_news


async def test_reports_of_agents_of_another_incarnation_are_ignored(agents: tuple[AgentWatch, asyncio.Event]) -> None:
    listening, _ = agents
    stranger = Member(1, answers=True, incarnation=2)
    async with stranger as endpoint:
        listening.follow({1: endpoint})
        async with asyncio.timeout(60):
            while stranger.asked < 3:
                await asyncio.sleep(0.05)
        assert listening.report(1) is None
        stranger.incarnation = 3
        async with asyncio.timeout(60):
            while listening.report(1) is None:
                await asyncio.sleep(0.05)


async def test_older_statuses_from_the_head_do_not_replace_newer_ones(
    agents: tuple[AgentWatch, asyncio.Event],
) -> None:
    listening, news = agents
    head, worker = Member(0, answers=True), Member(1, answers=True)
    worker.phase = Phase.FAILED
    head.report = GroupReport(ages={0: 0.0, 1: 600.0}, members=(status(0, Phase.SERVING), status(1, Phase.SERVING)))
    async with head as first, worker as second:
        listening.follow({1: second})
        await failed(listening, news)
        listening.follow({0: first, 1: second})
        for _ in range(1200):
            report = listening.report(1)
            assert report is not None
            assert report.status.phase is Phase.FAILED, "the head has not heard of it for ten minutes"
            if listening.report(0) is not None:
                break
            await asyncio.sleep(0.05)
        assert listening.report(0) is not None


async def test_an_agent_answers_whatever_the_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator has a stream for each of its groups."""
    raise_file_limit()
    # So many connections take long on a busy machine.
    monkeypatch.setattr(client_module, "_CONNECT_SECONDS", 90.0)
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 90.0)
    streams, all_open, member = 1100, asyncio.Event(), Member(0, answers=True)
    opened = 0

    async def hold(request: web.Request) -> web.StreamResponse:
        nonlocal opened
        response = web.StreamResponse()
        await response.prepare(request)
        opened += 1
        if opened == streams:
            all_open.set()
        await asyncio.sleep(120)
        return response

    member._watch = hold  # type: ignore[method-assign]
    client = AgentClient(TOKEN)
    async with member as endpoint:
        waiting = [asyncio.create_task(anext(client.watch_group(endpoint.url, None))) for _ in range(streams)]
        try:
            async with asyncio.timeout(90):
                await all_open.wait()
            assert (await client.status(endpoint.url, seconds=30.0)).rank == 0
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await client.close()


def test_the_operator_may_open_as_many_files_as_the_machine_allows() -> None:
    code = (
        "import resource, sys\n"
        "from dsv4_operator.controller import operator\n"
        "def found(**_):\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "    sys.exit()\n"
        "operator.find_access = found\n"
        "sys.argv = ['dsv4-operator']\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))\n"
        "operator.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "300 300\n", done.stderr
