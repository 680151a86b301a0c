"""The other members as their agents describe themselves, asked once a second, and as their heartbeats show them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import aiohttp
import pydantic

from dsv4_runtime.agent.heartbeat import Heartbeats
from dsv4_runtime.contract import AgentStatus, Failure, GroupPlan, Health, Phase
from dsv4_runtime.health.ticks import tick

POLL_SECONDS = 1.0
BEAT_SECONDS = 0.4
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# Asked more often while it is silent: the first answer after a loss shall not wait for TCP.
_SILENT_POLL_SECONDS = 0.2
_SILENT_TIMEOUT = aiohttp.ClientTimeout(total=0.7)
_SILENT_SECONDS = 1.5
# This agent itself stood still if it looks at the clock so late; what it did not hear then says nothing.
_STOOD_STILL_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class Peer:
    """One other member's latest answer."""

    status: AgentStatus | None = None
    heard: float | None = None
    """Monotonic time of that answer."""
    asked: float | None = None
    """Monotonic time at which the latest question was sent."""
    error: str | None = None
    """Why the latest question got no answer; None if it got one."""
    refused: bool = False
    """Its node said that nobody listens there: the agent has ended."""
    beat: float | None = None
    """Monotonic time of its latest heartbeat."""
    round_trip: float | None = None
    """Seconds of that heartbeat, there and back."""
    behind: float = 0.0
    """Seconds that its clock is behind this member's; 0 if its latest answer fits between the question and its end."""

    @property
    def death(self) -> Failure | None:
        """What it says that its engine died of, by this member's clock; None while it says no such thing."""
        verdict = self.status.verdict if self.status is not None else None
        if verdict is None or verdict.health is not Health.DEAD or verdict.failure is None:
            return None
        return verdict.failure.model_copy(update={"time": verdict.failure.time + self.behind})

    @property
    def alive(self) -> float | None:
        """Monotonic time of its latest sign of life, answer or heartbeat; None if there was none."""
        return max((time for time in (self.heard, self.beat) if time is not None), default=None)

    @property
    def reachable(self) -> bool:
        """Whether the latest question was answered."""
        return self.asked is not None and self.error is None

    @property
    def usable(self) -> bool:
        """Whether it is there and its Ray node is part of the cluster."""
        return (
            self.reachable and self.status is not None and self.status.joined and self.status.phase is not Phase.FAILED
        )


class Peers:
    """Asks the given ranks for their status until closed.

    An answer from another incarnation counts as none: that member is not of this group.
    """

    def __init__(self, plan: GroupPlan, own: int, token: str) -> None:
        self._plan = plan
        self._me = plan.members[own]
        self._headers = {"Authorization": f"Bearer {token}"}
        self._peers: dict[int, Peer] = {member.rank: Peer() for member in plan.members if member.rank != own}
        self._changed = asyncio.Event()
        self._awake = self._looked = time.monotonic()
        places = {rank: (plan.members[rank].address, plan.members[rank].ports.agent) for rank in self._peers}
        self._heartbeats = Heartbeats(own, plan.incarnation, token, places, self._beat)

    @property
    def all(self) -> Mapping[int, Peer]:
        """Rank to latest answer."""
        return self._peers

    def silence(self, rank: int, now: float) -> float | None:
        """Seconds since `rank` was heard, without the time in which this agent stood still; None if it never was."""
        self._look(now)
        alive = self._peers[rank].alive
        return None if alive is None else max(0.0, now - max(alive, self._awake))

    async def changed(self, seconds: float) -> None:
        """Wait for any answer or failure to answer, `seconds` at most."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def run(self) -> None:
        """Ask for ever; cancel to stop."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers) as session:
            await asyncio.gather(
                self._beats(),
                *(self._follow(session, rank) for rank in self._peers),
            )

    def _beat(self, rank: int, round_trip: float) -> None:
        self._peers[rank] = replace(self._peers[rank], beat=time.monotonic(), round_trip=round_trip)

    async def _beats(self) -> None:
        await self._heartbeats.open(self._me.address, self._me.ports.agent)
        try:
            while True:
                self._look(time.monotonic())
                self._heartbeats.ask()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._heartbeats.close()

    def _look(self, now: float) -> None:
        """Whatever looks at the clock first after this agent stood still finds that out."""
        if now - self._looked > _STOOD_STILL_SECONDS:
            self._awake = now
        self._looked = max(self._looked, now)

    async def _follow(self, session: aiohttp.ClientSession, rank: int) -> None:
        member = self._plan.members[rank]
        url = f"http://{member.address}:{member.ports.agent}/v1/status"
        while True:
            asked, began = time.monotonic(), time.time()
            silence = self.silence(rank, asked)
            silent = silence is not None and silence > _SILENT_SECONDS
            try:
                async with session.get(url, timeout=_SILENT_TIMEOUT if silent else _TIMEOUT) as response:
                    response.raise_for_status()
                    status = AgentStatus.model_validate_json(await response.read())
                if status.incarnation != self._plan.incarnation:
                    raise ValueError(f"it belongs to incarnation {status.incarnation}")  # noqa: TRY301
                known = self._peers[rank]
                heard, behind = time.monotonic(), _behind(status.time, began, time.time())
                self._peers[rank] = replace(
                    known, asked=asked, status=status, heard=heard, error=None, refused=False, behind=behind
                )
            except (aiohttp.ClientError, TimeoutError, pydantic.ValidationError, ValueError, OSError) as error:
                refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                    error.os_error, ConnectionRefusedError
                )
                reason = str(error) or type(error).__name__
                self._peers[rank] = replace(self._peers[rank], asked=asked, error=reason, refused=refused)
            self._changed.set()
            await tick(_SILENT_POLL_SECONDS if silent else POLL_SECONDS)


def _behind(written: float, asked: float, heard: float) -> float:
    """Seconds that a clock is behind which said `written` between `asked` and `heard`: 0 unless it must be wrong."""
    return 0.0 if asked <= written <= heard else (asked + heard) / 2 - written
