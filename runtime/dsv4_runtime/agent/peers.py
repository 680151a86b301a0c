"""The other members as their agents describe themselves, asked once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import pydantic

from dsv4_runtime.contract import AgentStatus, GroupPlan, Phase

POLL_SECONDS = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


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

    def __init__(self, plan: GroupPlan, ranks: list[int], token: str) -> None:
        self._plan = plan
        self._headers = {"Authorization": f"Bearer {token}"}
        self._peers: dict[int, Peer] = {rank: Peer() for rank in ranks}
        self._changed = asyncio.Event()

    @property
    def all(self) -> Mapping[int, Peer]:
        """Rank to latest answer."""
        return self._peers

    async def changed(self, seconds: float) -> None:
        """Wait for any answer or failure to answer, `seconds` at most."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    async def run(self) -> None:
        """Ask for ever; cancel to stop."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers) as session:
            await asyncio.gather(*(self._follow(session, rank) for rank in self._peers))

    async def _follow(self, session: aiohttp.ClientSession, rank: int) -> None:
        member = self._plan.members[rank]
        url = f"http://{member.address}:{member.ports.agent}/v1/status"
        while True:
            before = self._peers[rank]
            asked = time.monotonic()
            try:
                async with session.get(url) as response:
                    response.raise_for_status()
                    status = AgentStatus.model_validate_json(await response.read())
                if status.incarnation != self._plan.incarnation:
                    raise ValueError(f"it belongs to incarnation {status.incarnation}")  # noqa: TRY301
                self._peers[rank] = Peer(status, time.monotonic(), asked)
            except (aiohttp.ClientError, TimeoutError, pydantic.ValidationError, ValueError, OSError) as error:
                reason = str(error) or type(error).__name__
                self._peers[rank] = Peer(before.status, before.heard, asked, reason)
            self._changed.set()
            await asyncio.sleep(POLL_SECONDS)
