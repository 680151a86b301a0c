"""Engine as the gateway knows it: whether requests may go to it, and when one life of it is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType

from dsv4_runtime.contract import AgentStatus, Health, Phase
from dsv4_runtime.gateway.errors import EngineLostError
from dsv4_runtime.gateway.suspects import Exposures

_log = logging.getLogger("dsv4.gateway")
_IDS_A_LINE = 50


class Availability(StrEnum):
    """The engine as requests see it."""

    HEALTHY = "healthy"
    DOUBTED = "doubted"
    """The verdict is Healthy, but a request was refused or cut off; vLLM's `/health` decides."""
    AWAY = "away"


class Attempt:
    """One request's wait for one life of the engine.

    Nothing but a cancellation wakes a task that waits for an engine that no longer says anything; a timeout that is due
    only when the life ends is a cancellation that asyncio tells from all others.
    """

    def __init__(self, life: Life, request: str) -> None:
        self.request = request
        self._life = life
        self._scope = asyncio.timeout(None)

    def end(self) -> None:
        """End the wait: the life is over."""
        self._scope.reschedule(0.0)

    async def __aenter__(self) -> None:
        self._life.enter(self)
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.leave(self, lost=isinstance(error, EngineLostError))
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise EngineLostError("the engine died") from None


class Life:
    """One life of the engine: every request that it answers ends with it."""

    def __init__(self, name: str, identity: tuple[int, int], model: str) -> None:
        self.name = name
        """Name in the log."""
        self.identity = identity
        """Incarnation and generation."""
        self.model = model
        """Model that its answers depend on: lives of which this is the same may continue each other's streams."""
        self.over = False
        self.planned = False
        """Whether it ends, or ended, because somebody asked for it."""
        self.unreachable = False
        """Whether it ended for this gateway because nothing of it could be reached: no fault of a request."""
        self.exposures = Exposures()
        """Requests that it has, or may have though nobody waits for them."""
        self._attempts: dict[Attempt, None] = {}
        self._cut_off: dict[str, None] = {}
        """Requests whose connection broke since vLLM last proved that it lives, in their order."""

    def attempt(self, request: str) -> Attempt:
        """Open a block (`async with`) in which a request may wait for the engine: if this life ends, the wait ends.

        Args:
            request: its id.

        Entering and leaving raise:
            EngineLostError: this life is over.
        """
        return Attempt(self, request)

    def enter(self, attempt: Attempt) -> None:
        """Note that it waits for the engine.

        Raises:
            EngineLostError: this life is over.
        """
        if self.over:
            raise EngineLostError("the engine died")
        self._attempts[attempt] = None

    def leave(self, attempt: Attempt, *, lost: bool) -> None:
        """Note that it waits no more; `lost`: because its connection broke."""
        if lost:
            self._cut_off[attempt.request] = None
        self._attempts.pop(attempt, None)

    @property
    def open(self) -> int:
        """Return the number of requests that it answers."""
        return len(self._attempts)

    def lives(self) -> None:
        """Note that vLLM answered: the connections that broke until now did not break with the engine."""
        self._cut_off.clear()

    def end(self) -> tuple[str, ...]:
        """End every attempt; the ids of the requests that were open, those first whose connections broke already."""
        self.over = True
        for attempt in self._attempts:
            attempt.end()
        open_now = (attempt.request for attempt in self._attempts)
        found = (*self._cut_off, *(request for request in open_now if request not in self._cut_off))
        self._attempts.clear()
        return found


class EngineView:
    """Turns what the head's agent says, and what requests meet, into lives."""

    def __init__(
        self,
        changed: Callable[[], None],
        group: int = 0,
        died: Callable[[Life, bool], None] = lambda life, reported: None,
    ) -> None:
        """Args:
        changed: called after everything that may change `state` or `given_up`.
        group: whose engine it is.
        died: called with a life that ended unplanned, and whether the agent reported its death, before its requests
            are ended.
        """
        self._changed, self._died = changed, died
        self._name = f"group {group}'s engine" if group else "engine"
        self._life: Life | None = None
        self._healthy = False
        """Whether the verdict is Healthy; also while the engine only finishes what it has begun."""
        self._open = False
        """Whether a healthy engine takes new requests."""
        self._sure = asyncio.Event()
        """Set while the present life is known to be well."""
        self.state = Availability.AWAY
        self.given_up: str | None = None
        """Reason why the engine will not come back by itself; None: it may."""
        self.doubts = asyncio.Event()
        """Set while somebody has to ask vLLM whether it is alive."""

    def report(self, status: AgentStatus) -> None:
        """Take what the head's agent says of the engine.

        One that is `Draining` with a verdict other than Starting finishes its open requests before a planned end: they
        stay with it, and new ones wait for what follows.
        """
        health = status.verdict.health
        finishing = status.phase is Phase.DRAINING and health in (Health.HEALTHY, Health.SUSPECT)
        serving = status.phase is Phase.SERVING
        identity = (status.incarnation, status.engine.generation if status.engine is not None else 0)
        dead = not (serving or finishing) or health is Health.DEAD
        if self._life is not None and (dead or identity != self._life.identity):
            if not self._life.planned:
                self._died(self._life, dead)
            self._end_life()
        if self._life is not None:
            self._life.planned = finishing
        self._healthy = not dead and health is Health.HEALTHY
        self._open = self._healthy and serving
        if self._open and self._life is None:
            # Where the agent does not say, only an incarnation is known not to change its model.
            model = status.model_digest or f"{self._name} {identity[0]}"
            self._life = Life(f"{self._name} {identity[0]}-g{identity[1]}", identity, model)
        self._update()

    def give_up(self, reason: str | None) -> None:
        """Note why the engine will not come back by itself; None: it may."""
        if reason != self.given_up:
            self.given_up = reason
            self._update()

    def leave(self) -> None:
        """End the present life: the group is no longer one of the deployment's, or is somewhere else now."""
        self._end_life()
        self._healthy = self._open = False
        self._update()

    def lose(self) -> None:
        """End the present life: nothing of it can be reached any more, whatever became of it."""
        if self._life is not None:
            self._life.unreachable = True
        self.leave()

    @property
    def alive(self) -> bool:
        """Tell whether there is a life that requests may wait for."""
        return self._life is not None

    def doubt_all(self) -> None:
        """Note that vLLM did not answer, whichever request it had."""
        if self._life is not None:
            self.doubt(self._life)

    def doubt(self, life: Life) -> None:
        """Note that a request was refused or cut off by this life of the engine."""
        if life is self._life:
            self.doubts.set()
            self._update()

    def trust(self) -> None:
        """Note that vLLM answered that it is alive."""
        if self._life is not None:
            self._life.lives()
        self.doubts.clear()
        self._update()

    @property
    def present(self) -> Life | None:
        """Return the present life; None if no request may go to it now."""
        return self._life if self.state is Availability.HEALTHY else None

    async def outlives(self, life: Life, seconds: float) -> bool:
        """Tell whether vLLM is found alive, in this life, within so many seconds after a doubt."""
        self.doubt(life)
        try:
            async with asyncio.timeout(seconds if self.given_up is None else 0.0):
                await self._sure.wait()
        except TimeoutError:
            return False
        return self._life is life

    def _update(self) -> None:
        state, well = Availability.AWAY, self._healthy and self._life is not None
        if well and self._open:
            state = Availability.DOUBTED if self.doubts.is_set() else Availability.HEALTHY
        if well and not self.doubts.is_set():
            self._sure.set()
        else:
            self._sure.clear()
        if state is not self.state:
            self.state = state
            _log.info("%s %s", self._name, state)
        self._changed()

    def _end_life(self) -> None:
        if self._life is not None:
            _log_open_requests(self._life.name, self._life.end())
        self._life = None
        self.doubts.clear()


def _log_open_requests(name: str, requests: tuple[str, ...]) -> None:
    """Log which requests an engine had open when it ended, under the name that the evidence of its death has."""
    _log.info("%s is over; open requests: %d", name, len(requests))
    for start in range(0, len(requests), _IDS_A_LINE):
        _log.info("%s had open: %s", name, " ".join(requests[start : start + _IDS_A_LINE]))
