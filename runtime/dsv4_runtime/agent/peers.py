"""The other members as their agents describe themselves, asked once a second, and as their heartbeats show them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

import aiohttp

from dsv4_runtime.agent.decide.peer import Peer
from dsv4_runtime.agent.heartbeat import Heartbeats
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.clock import unix_time
from dsv4_runtime.health.ticks import tick

POLL_SECONDS = 1.0
BEAT_SECONDS = 0.4
_TIMEOUT_SECONDS = 2.0
# Asked more often while it is silent: the first answer after a loss shall not wait for TCP.
_SILENT_POLL_SECONDS = 0.2
_SILENT_TIMEOUT_SECONDS = 0.7
_SILENT_SECONDS = 1.5
# Two heartbeats are missing. A connection is taken within a round trip; a packet of it that is lost is sent again too
# late for this.
_CONNECT_AFTER_SECONDS = 1.0
_CONNECT_SECONDS = 0.7
# This agent itself stood still if it looks at the clock so late; what it did not hear then says nothing.
_STOOD_STILL_SECONDS = 2.5


class Peers:
    """Asks the given ranks for their status until closed.

    An answer from another incarnation counts as none: that member is not of this group.
    """

    def __init__(self, plan: GroupPlan, own: int, token: str) -> None:
        self._plan = plan
        self._me = plan.members[own]
        self._client = AgentClient(token)
        self._peers: dict[int, Peer] = {member.rank: Peer() for member in plan.members if member.rank != own}
        self._changed = asyncio.Event()
        self._awake = self._looked = time.monotonic()
        places = {rank: (plan.members[rank].address, plan.members[rank].ports.agent) for rank in self._peers}
        self._places = places
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._heartbeats = Heartbeats(own, plan.incarnation, token, places, self._beat)

    @property
    def all(self) -> Mapping[int, Peer]:
        """Map each rank to its latest answer."""
        return self._peers

    def silence(self, rank: int, now: float) -> float | None:
        """Return the seconds since `rank` was heard, without the time in which this agent stood still; None: never."""
        return self._peers[rank].silence(now, self.awake(now))

    def awake(self, now: float) -> float:
        """Return the monotonic time since which this agent has not stood still.

        Whatever looks at the clock first after a pause finds that out.
        """
        if now - self._looked > _STOOD_STILL_SECONDS:
            self._awake = now
        self._looked = max(self._looked, now)
        return self._awake

    async def changed(self, seconds: float) -> None:
        """Wait for any answer or failure to answer, `seconds` at most."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def run(self) -> None:
        """Ask for ever; cancel to stop."""
        try:
            await asyncio.gather(self._beats(), *(self._follow(rank) for rank in self._peers))
        finally:
            await self._client.close()

    def _beat(self, rank: int, round_trip: float) -> None:
        self._peers[rank] = replace(self._peers[rank], beat=time.monotonic(), round_trip=round_trip, accepting=None)

    async def _beats(self) -> None:
        await self._heartbeats.open(self._me.address, self._me.ports.agent)
        try:
            while True:
                self._try_silent_peers(time.monotonic())
                self._heartbeats.ask()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._heartbeats.close()

    def _try_silent_peers(self, now: float) -> None:
        """Try to connect to silent agents: the machine's kernel takes connections, whatever the agent does."""
        for rank, place in self._places.items():
            silence = self.silence(rank, now)
            running = self._connecting.get(rank)
            if silence is not None and silence > _CONNECT_AFTER_SECONDS and (running is None or running.done()):
                self._connecting[rank] = asyncio.create_task(self._connect(rank, place))

    async def _connect(self, rank: int, place: tuple[str, int]) -> None:
        began = time.monotonic()
        accepted = False
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(*place)
                accepted = True
                writer.close()
        peer = self._peers[rank]
        if peer.alive is not None and peer.alive < began:
            since = (peer.accepting or began) if accepted else None
            self._peers[rank] = replace(peer, accepting=since)

    async def _follow(self, rank: int) -> None:
        member = self._plan.members[rank]
        url = f"http://{member.address}:{member.ports.agent}"
        while True:
            asked, began = time.monotonic(), unix_time()
            silence = self.silence(rank, asked)
            silent = silence is not None and silence > _SILENT_SECONDS
            try:
                patience = _SILENT_TIMEOUT_SECONDS if silent else _TIMEOUT_SECONDS
                status = await self._client.status(url, seconds=patience)
                if status.incarnation != self._plan.incarnation:
                    raise ValueError(f"it belongs to incarnation {status.incarnation}")
                known = self._peers[rank]
                heard, behind = time.monotonic(), _behind(status.time, began, unix_time())
                self._peers[rank] = replace(
                    known,
                    asked=asked,
                    status=status,
                    heard=heard,
                    error=None,
                    refused=False,
                    behind=behind,
                    accepting=None,
                )
            except AGENT_ERRORS as error:
                refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                    error.os_error, ConnectionRefusedError
                )
                reason = str(error) or type(error).__name__
                self._peers[rank] = replace(self._peers[rank], asked=asked, error=reason, refused=refused)
            self._changed.set()
            await tick(_SILENT_POLL_SECONDS if silent else POLL_SECONDS)


def _behind(written: float, asked: float, heard: float) -> float:
    """Return the seconds of lag of a clock that said `written` between `asked` and `heard`; 0 unless surely wrong."""
    return 0.0 if asked <= written <= heard else (asked + heard) / 2 - written
