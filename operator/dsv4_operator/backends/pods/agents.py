"""What the agents of one group say: one stream from the head's, and questions to those whom it does not hear."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
import pydantic

from dsv4_runtime.contract import AgentStatus, DrainReport, GroupReport

_log = logging.getLogger("dsv4")

# The head's agent writes once a second.
_SILENCE_SECONDS = 2.5
_CONNECT_SECONDS = 1.0
_ASK_SECONDS = 0.2
_LOOK_SECONDS = 1.0
_WITNESS_SECONDS = 0.4
_ANSWER_SECONDS = 1.5
# Longer: what is not answered cuts off the engine's open requests.
_DRAIN_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0
# 16 members, each with at most 20 failures of 1 KiB, twice over.
_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent listens."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Word:
    """The latest that is known of an agent."""

    status: AgentStatus
    heard: float
    """Unix time, by this machine's clock."""


class Agents:
    """The agents of one incarnation, listened to until closed. A broken stream is no death: words only get older."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        incarnation: int,
        token: Callable[[], Awaitable[str | None]],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        session: connections.
        incarnation: what other incarnations say is not heard.
        token: the deployment's token; None while there is none.
        changed: called when something new was said.
        """
        self._session = session
        self.incarnation = incarnation
        self._token = token
        self._changed = changed
        self._places: Mapping[int, Place] = {}
        self._words: dict[int, Word] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, places: Mapping[int, Place]) -> None:
        """The members' agents listen at `places` now."""
        moved = places.get(0) != self._places.get(0)
        self._places = dict(places)
        if self._tasks and not moved:
            return
        self._cancel()
        self._tasks = [asyncio.create_task(self._ask_the_silent())]
        if 0 in places:
            self._tasks.append(asyncio.create_task(self._listen(places[0])))

    def word(self, rank: int) -> Word | None:
        """What the agent of `rank` said last; None if it was not heard yet."""
        return self._words.get(rank)

    def stop(self) -> None:
        """Listen no more; connections end by themselves."""
        self._cancel()

    async def close(self) -> None:
        """End all connections."""
        tasks = self._tasks
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _listen(self, head: Place) -> None:
        """Follow the head's stream, again and again."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        pause = _FIRST_PAUSE
        while True:
            try:
                headers = await self._headers()
                url = f"{head.url}/v1/watch?group=1"
                async with self._session.get(url, headers=headers, timeout=limits, read_bufsize=_LINE_BYTES) as stream:
                    stream.raise_for_status()
                    members: dict[int, AgentStatus] = {}
                    while line := await stream.content.readline():
                        members = self._read(line, members)
                        pause = _FIRST_PAUSE
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                _log.debug("the stream of %s is broken: %s", head.url, str(error) or type(error).__name__)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, line: bytes, members: dict[int, AgentStatus]) -> dict[int, AgentStatus]:
        """Take over one line; returns the statuses that later lines refer to."""
        report = GroupReport.model_validate_json(line)
        now = time.time()
        if report.members is not None:
            members = {status.rank: status for status in report.members}
        news = False
        for rank, age in report.ages.items():
            if rank in members:
                news |= self._take(rank, members[rank], now - age)
        if news:
            self._changed()
        return members

    async def _ask_the_silent(self) -> None:
        """Ask each agent itself that was not heard of lately: the head's own way to it may be what is broken.

        Nobody is waited for: one that is gone must not keep another from saying so.
        """
        asking: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                silent = self._silent(time.time())
                asking = {rank: task for rank, task in asking.items() if not task.done()}
                for rank in silent:
                    if rank not in asking:
                        asking[rank] = asyncio.create_task(self._ask(rank))
                await asyncio.sleep(_ASK_SECONDS if silent else _LOOK_SECONDS)
        finally:
            for task in asking.values():
                task.cancel()

    def _silent(self, now: float) -> list[int]:
        """Ranks that have to be asked. Once the head has fallen silent, what the others say of it is the verdict."""
        head = self._words.get(0)
        headless = head is not None and head.heard < now - _SILENCE_SECONDS
        oldest = now - (_WITNESS_SECONDS if headless else _SILENCE_SECONDS)
        return [rank for rank in self._places if rank not in self._words or self._words[rank].heard < oldest]

    async def _ask(self, rank: int) -> None:
        """Take over what the agent of `rank` answers, if it does."""
        place = self._places.get(rank)
        if place is None:
            return
        limits = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            headers = await self._headers()
            async with self._session.get(f"{place.url}/v1/status", headers=headers, timeout=limits) as answer:
                answer.raise_for_status()
                status = AgentStatus.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, pydantic.ValidationError):
            return
        if status.rank == rank and self._take(rank, status, time.time()):
            self._changed()

    def _take(self, rank: int, status: AgentStatus, heard: float) -> bool:
        """Keep a word unless a later one is known; whether it says anything new."""
        known = self._words.get(rank)
        if status.incarnation != self.incarnation or (known is not None and known.heard > heard):
            return False
        self._words[rank] = Word(status, heard)
        return known is None or _news(known.status) != _news(status)

    async def _headers(self) -> dict[str, str]:
        token = await self._token()
        return {"Authorization": f"Bearer {token}"} if token is not None else {}


def _news(status: AgentStatus) -> tuple[object, ...]:
    return status.phase, status.verdict, status.joined, status.engine, status.progress


async def fetch(session: aiohttp.ClientSession, url: str, token: str | None, seconds: float) -> bytes | None:
    """What an agent answers at `url`; None if it does not within `seconds`."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
            answer.raise_for_status()
            return await answer.read()
    return None


async def drain(session: aiohttp.ClientSession, head: Place, token: str | None, seconds: float) -> bool:
    """Have the engine at `head` finish its open requests within `seconds`; whether it still does, False if unheard."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    limits = aiohttp.ClientTimeout(total=_DRAIN_SECONDS, sock_connect=_CONNECT_SECONDS)
    asked = {"seconds": str(seconds)}
    try:
        async with session.post(f"{head.url}/v1/drain", params=asked, headers=headers, timeout=limits) as answer:
            answer.raise_for_status()
            return not DrainReport.model_validate_json(await answer.read()).over
    except (aiohttp.ClientError, TimeoutError, OSError, pydantic.ValidationError) as error:
        _log.warning("the engine at %s ends without a drain: %s", head.url, str(error) or type(error).__name__)
        return False
