"""Reports of the agents of one group: one stream from the head's, and polls of those whom it does not hear."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from dsv4_runtime.client import AGENT_ERRORS, SILENCE_SECONDS, AgentClient
from dsv4_runtime.contract import AgentStatus, GroupReport
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.clock import unix_time

_log = logging.getLogger("dsv4")

_POLL_SECONDS = 0.2
_CHECK_SECONDS = 1.0
_WITNESS_SECONDS = 0.4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and port at which an agent listens."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """Return the base URL."""
        return f"http://{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The latest that is known of an agent."""

    status: AgentStatus
    heard: float
    """Unix time, by this machine's clock."""


class AgentWatch:
    """Watches the agents of one incarnation until closed. A broken stream is no death: reports only get older."""

    def __init__(
        self,
        client: AgentClient,
        incarnation: int,
        token_key: Callable[[], Awaitable[str | None]],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        client: connections.
        incarnation: what agents of other incarnations report is dropped.
        token_key: the deployment's; None while there is none.
        changed: called when something new was reported.
        """
        self._client = client
        self.incarnation = incarnation
        self._token_key = token_key
        self._changed = changed
        self._endpoints: Mapping[int, Endpoint] = {}
        self._reports: dict[int, AgentReport] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Watch the members' agents at `endpoints`, by rank, from now on."""
        moved = endpoints.get(0) != self._endpoints.get(0)
        self._endpoints = dict(endpoints)
        # A watch that a defect ended begins again.
        if self._tasks and not moved and not any(task.done() for task in self._tasks):
            return
        self.stop()
        self._tasks = [asyncio.create_task(self._poll_stale_agents())]
        if 0 in endpoints:
            self._tasks.append(asyncio.create_task(self._watch_head(endpoints[0])))

    def report(self, rank: int) -> AgentReport | None:
        """Return what the agent of `rank` said last; None if it was not heard yet."""
        return self._reports.get(rank)

    def stop(self) -> None:
        """Watch no more; connections end by themselves."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def close(self) -> None:
        """End all connections."""
        tasks = self._tasks
        self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_head(self, head: Endpoint) -> None:
        """Follow the head's stream, again and again."""
        failures = 0
        while True:
            try:
                stream = self._client.watch_group(head.url, await self._token_key())
                async with contextlib.aclosing(stream):
                    members: dict[int, AgentStatus] = {}
                    async for report in stream:
                        members = self._take_group(report, members)
                        failures = 0
            except AGENT_ERRORS as error:
                _log.debug("the stream of %s is broken: %s", head.url, str(error) or type(error).__name__)
            failures += 1
            await asyncio.sleep(backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))

    def _take_group(self, report: GroupReport, members: dict[int, AgentStatus]) -> dict[int, AgentStatus]:
        """Keep one report of the head; return the statuses that later reports refer to."""
        now = unix_time()
        if report.members is not None:
            members = {status.rank: status for status in report.members}
        news = False
        for rank, age in report.ages.items():
            if rank in members:
                news |= self._take(rank, members[rank], now - age)
        if news:
            self._changed()
        return members

    async def _poll_stale_agents(self) -> None:
        """Ask each agent itself that was not heard of lately: the head's own way to it may be what is broken.

        Nobody is waited for: one that is gone must not keep another from saying so.
        """
        polls: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                stale = self._stale(unix_time())
                polls = {rank: task for rank, task in polls.items() if not task.done()}
                for rank in stale:
                    if rank not in polls:
                        polls[rank] = asyncio.create_task(self._poll(rank))
                await asyncio.sleep(_POLL_SECONDS if stale else _CHECK_SECONDS)
        finally:
            for task in polls.values():
                task.cancel()

    def _stale(self, now: float) -> list[int]:
        """Return the ranks to poll. Once the head has fallen silent, what the others say of it is the verdict."""
        head = self._reports.get(0)
        headless = head is not None and head.heard < now - SILENCE_SECONDS
        oldest = now - (_WITNESS_SECONDS if headless else SILENCE_SECONDS)
        return [rank for rank in self._endpoints if rank not in self._reports or self._reports[rank].heard < oldest]

    async def _poll(self, rank: int) -> None:
        """Keep what the agent of `rank` answers, if it does."""
        endpoint = self._endpoints.get(rank)
        if endpoint is None:
            return
        try:
            status = await self._client.status(endpoint.url, await self._token_key())
        except ValueError:
            await asyncio.sleep(_CHECK_SECONDS)
            return
        except AGENT_ERRORS:
            return
        if (status.rank, status.incarnation) != (rank, self.incarnation):
            # It stays stale whatever it answers: no next poll soon.
            await asyncio.sleep(_CHECK_SECONDS)
        elif self._take(rank, status, unix_time()):
            self._changed()

    def _take(self, rank: int, status: AgentStatus, heard: float) -> bool:
        """Keep a report unless a later one is known; return whether it says anything new."""
        known = self._reports.get(rank)
        if status.incarnation != self.incarnation or (known is not None and known.heard > heard):
            return False
        self._reports[rank] = AgentReport(status, heard)
        return known is None or _news(known.status) != _news(status)


def _news(status: AgentStatus) -> tuple[object, ...]:
    return status.phase, status.verdict, status.joined, status.engine, status.progress
