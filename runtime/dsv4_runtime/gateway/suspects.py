"""Requests that may be what engines die of. Pure: the clock is an argument.

A request is identified by a keyed digest of method, path and body, so deaths are kept when its client leaves and sends
it again. Two deaths make it a suspect: it is sent again only as a trial, one trial at a time. A third death convicts it
if no other request can have been in the engine; otherwise the next trial is stricter. Only proof ends a trial: output
of the engine for it, its end, or a completion of another request that was sent after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from dsv4_runtime.contract.gateway import FatalRequest, FatalRequests
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import RefusedError

_log = logging.getLogger("dsv4.gateway")

SUSPECTED_DEATHS = 2
"""Engines that died under a request before it is sent only as a trial."""
MAX_DEATHS = 8
"""Engines that died under a request before it is not sent any more although nothing proves that it is the cause."""
DRAIN_SECONDS = 10.0
"""Time in one life of an engine for which trials wait for it to be free of other requests. Each death under the request
after the second doubles it."""
_MAX_DRAIN_SECONDS = 120.0
TRIAL_SECONDS = 1.0
"""A trial that had its proof stays alone at least so long, and twice as long as a request lived before its engine died
although it had shown progress."""
_MAX_TRIAL_SECONDS = 300.0
SETTLE_SECONDS = 1.0
"""Time after which vLLM has noticed that a client left: output of a request that was sent later proves that the engine
dropped the one that was left."""
MIN_KEPT_SECONDS = 600.0
"""Time for which deaths are kept after the latest, or after the client left, at least."""
MAX_RECORDS = 4096
"""Requests whose deaths are kept while nobody waits for them."""
_MAX_LEFT = 4096
_KEEP_FOUND = 20

Clock = Callable[[], float]


@dataclass(eq=False, slots=True)
class Exposure:
    """One request that one life of an engine has, or may still have."""

    digest: bytes
    id: str
    size: int
    sent: float
    life: Exposures
    alone: bool = False
    """Whether no request of another gateway can be in the engine (`engine.token_auth`)."""
    trial: bool = False
    """Whether it was alone when it was sent."""
    progressed: bool = False
    broken: bool = False
    """Whether its own connection broke."""
    left: float | None = None
    """When the gateway stopped waiting for the answer; None: it waits."""

    def progress(self) -> None:
        """Note output of the engine for it."""
        if not self.progressed:
            self.progressed = True
            self.life.settle(self.sent)


class Exposures:
    """Requests of this gateway in one life of an engine."""

    def __init__(self) -> None:
        self.drained = 0.0
        """Seconds for which trials in this life waited for it to be free of other requests."""
        self._open: dict[Exposure, None] = {}
        self._left: dict[bytes, Exposure] = {}
        self.complete = True
        """Whether every request that may be in the engine is known."""

    def __iter__(self) -> Iterator[Exposure]:
        yield from self._open
        yield from self._left.values()

    @property
    def unsettled(self) -> bool:
        """Tell whether requests were left that may still be in the engine."""
        return bool(self._left) or not self.complete

    def enter(self, digest: bytes, name: str, size: int, now: float) -> Exposure:
        """Note a request that is sent now; `name` is its id."""
        exposure = Exposure(digest, name, size, now, self)
        self._open[exposure] = None
        return exposure

    def end(self, exposure: Exposure) -> None:
        """Forget a request: its answer is whole, or the engine did not get it."""
        self._open.pop(exposure, None)

    def leave(self, exposure: Exposure, now: float, *, broken: bool) -> None:
        """Note that the gateway no longer waits for the answer, which the engine may still be computing.

        `broken`: because the connection broke.
        """
        exposure.broken = broken
        if self._open.pop(exposure, self) is self:
            return
        exposure.left = now
        self._left.pop(exposure.digest, None)
        self._left[exposure.digest] = exposure
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]
            self.complete = False

    def settle(self, sent: float) -> None:
        """Note that the engine computed a request that was sent at `sent`: what was left before is no longer in it."""
        for digest, other in tuple(self._left.items()):
            if other.left is not None and other.left + SETTLE_SECONDS < sent:
                del self._left[digest]


@dataclass(slots=True)
class Death:
    """One death of an engine that had the request."""

    life: str
    silent: bool
    """Whether the request had no output in that life."""


@dataclass(slots=True)
class Record:
    """Deaths under one request."""

    digest: bytes
    touched: float
    deaths: list[Death] = field(default_factory=list)
    convicted: int = 0
    """Engines that died when it was convicted; 0: it is not."""
    lived: float = 0.0
    """Longest time from its sending to a death at which it was no longer alone, although its trial had begun so."""

    @property
    def suspected(self) -> bool:
        """Tell whether it is sent only as a trial."""
        return len(self.deaths) >= SUSPECTED_DEATHS

    @property
    def strict(self) -> bool:
        """Tell whether no other request at all is sent beside its trial: an earlier trial proved nothing."""
        return len(self.deaths) > SUSPECTED_DEATHS

    @property
    def drain_seconds(self) -> float:
        """Return how long its trial may wait for other requests to end."""
        return min(DRAIN_SECONDS * 2.0 ** (len(self.deaths) - SUSPECTED_DEATHS), _MAX_DRAIN_SECONDS)

    @property
    def trial_seconds(self) -> float:
        """Return how long its trial stays alone at least."""
        return min(max(TRIAL_SECONDS, 2.0 * self.lived), _MAX_TRIAL_SECONDS)


@dataclass(eq=False, slots=True)
class Trial:
    """Attempt of a suspect, of which there is one at a time."""

    record: Record
    group: object


class Suspects:
    """Deaths by request, and whose turn it is to be tried."""

    def __init__(self, kept_seconds: float = MIN_KEPT_SECONDS, clock: Clock = time.monotonic) -> None:
        """Args:
        kept_seconds: time for which deaths are kept without a client, at least `MIN_KEPT_SECONDS`.
        clock: monotonic seconds.
        """
        self._kept, self._clock = max(kept_seconds, MIN_KEPT_SECONDS), clock
        self._records: dict[bytes, Record] = {}
        """The one that was touched longest ago first."""
        self._clients: dict[bytes, int] = {}
        """Exchanges of each request that wait for its answer."""
        self._waiting: dict[Hashable, Record] = {}
        """Exchanges that wait to be tried, in the order of their coming."""
        self._next: Hashable | None = None
        """The one of them whose trial is next; None: not computed."""
        self._trial: Trial | None = None
        self._changed = asyncio.Event()
        self._found: list[FatalRequest] = []

    @property
    def found(self) -> FatalRequests:
        """Return the latest requests that were convicted."""
        return FatalRequests(requests=tuple(self._found))

    @property
    def size(self) -> int:
        """Return the number of requests whose deaths are kept."""
        return len(self._records)

    def arrive(self, digest: bytes) -> None:
        """Note a client of a request. Each call needs a `depart`."""
        record = self._records.get(digest)
        if record is not None and digest not in self._clients and self._clock() - record.touched > self._kept:
            del self._records[digest]
        self._clients[digest] = self._clients.get(digest, 0) + 1

    def depart(self, digest: bytes) -> None:
        """Note that a client of a request was answered, or left."""
        self._clients[digest] -= 1
        if not self._clients[digest]:
            del self._clients[digest]
        if (record := self._records.get(digest)) is not None:
            self._touch(record)

    def suspected(self, digest: bytes) -> bool:
        """Return whether the request is sent only as a trial.

        Raises:
            RefusedError: it is not sent any more.
        """
        record = self._records.get(digest)
        if record is None:
            return False
        if record.convicted:
            raise RefusedError(errors.fatal(record.convicted))
        if len(record.deaths) >= MAX_DEATHS:
            message = f"{len(record.deaths)} engines died while they had this request and others; it is not sent again"
            raise RefusedError(errors.lost(message))
        return record.suspected

    def admits(self, group: object, digest: bytes) -> bool:
        """Tell whether a request that is not suspected may go to `group` now.

        Requests with deaths wait for the end of a trial. While a strict trial waits or runs, all do.
        """
        if self._trial is not None:
            if self._trial.group is not group:
                return True
            record = self._trial.record
        elif self._waiting:
            record = self._waiting[self._best()]
        else:
            return True
        return not record.strict and digest not in self._records

    def tried(self, group: object) -> bool:
        """Tell whether a trial waits, or runs in `group`."""
        return bool(self._waiting) if self._trial is None else self._trial.group is group

    # trials

    def wait(self, exchange: Hashable, digest: bytes) -> None:
        """Have a suspect wait for its trial."""
        self._waiting[exchange] = self._records[digest]
        self._notify()

    def is_next(self, exchange: Hashable) -> bool:
        """Tell whether the trial of a waiting suspect may begin."""
        return self._trial is None and self._best() is exchange

    def begin(self, exchange: Hashable, group: object) -> Trial:
        """Begin the trial of a waiting suspect in `group`."""
        self._trial = Trial(self._waiting.pop(exchange), group)
        self._notify()
        return self._trial

    def stop_waiting(self, exchange: Hashable) -> None:
        """Note that a suspect does not wait. Harmless when repeated."""
        if self._waiting.pop(exchange, None) is not None:
            self._notify()

    def end(self, trial: Trial) -> None:
        """End a trial: other requests go on. Harmless when repeated."""
        if self._trial is trial:
            self._trial = None
            self._notify()

    def has_deaths(self, digest: bytes) -> bool:
        """Tell whether engines died under the request."""
        record = self._records.get(digest)
        return record is not None and bool(record.deaths)

    async def changed(self) -> None:
        """Wait until trials or deaths change."""
        await self._changed.wait()

    def _best(self) -> Hashable:
        """Return the waiting suspect that is most likely the cause.

        Engines died before they had any output for it; more of them died; it came last.
        """
        if self._next is None:
            order = {exchange: index for index, exchange in enumerate(self._waiting)}

            def likely(exchange: Hashable) -> tuple[int, int, int]:
                deaths = self._waiting[exchange].deaths
                return sum(death.silent for death in deaths), len(deaths), order[exchange]

            self._next = max(order, key=likely)
        return self._next

    def _notify(self) -> None:
        self._next = None
        self._changed.set()
        self._changed = asyncio.Event()

    # deaths

    def answered(self, digest: bytes) -> None:
        """Note that the engine answered a request in full: it is not the cause of the deaths before."""
        record = self._records.get(digest)
        if record is not None and not record.convicted:
            record.deaths.clear()
            record.lived = 0.0
            self._notify()

    def died(self, life: str, exposures: Exposures, *, reported: bool) -> None:
        """Count a death under every request that may have been in the engine.

        Args:
            life: name of the engine's life, of no other.
            exposures: what it had at its death.
            reported: whether the agent reported its death. If not, only another life was seen to follow it, and it may
                have ended before a request reached it: that makes suspects, and convicts only by a broken connection.
        """
        now = self._clock()
        exposed: dict[bytes, list[Exposure]] = {}
        for exposure in exposures:
            exposed.setdefault(exposure.digest, []).append(exposure)
        only = len(exposed) == 1 and exposures.complete
        for digest, found in exposed.items():
            record = self._records.setdefault(digest, Record(digest, now))
            self._touch(record)
            certain = reported or any(exposure.broken for exposure in found)
            if record.convicted or (record.suspected and not certain):
                continue
            record.deaths.append(Death(life, not any(exposure.progressed for exposure in found)))
            for exposure in found:
                if exposure.trial and not exposure.alone:
                    record.lived = max(record.lived, now - exposure.sent)
            if record.strict and only and all(exposure.alone for exposure in found):
                self._convict(record, found[-1], life)
        self._forget_old(now)
        self._notify()

    def _convict(self, record: Record, exposure: Exposure, life: str) -> None:
        record.convicted = engines = len(record.deaths)
        lives = {death.life for death in record.deaths}
        for other in self._records.values():
            # Deaths that it explains, unless the other one had no output in them: there may be two of the kind.
            if other is not record:
                other.deaths = [death for death in other.deaths if death.silent or death.life not in lives]
        self._found = [
            *self._found[1 - _KEEP_FOUND :],
            FatalRequest(id=exposure.id, size=exposure.size, engines=engines, time=time.time()),
        ]
        _log.error(
            "request %s (%d bytes) is refused: %d engines died while they had it, the last (%s) with no other request",
            exposure.id,
            exposure.size,
            engines,
            life,
        )

    def _touch(self, record: Record) -> None:
        record.touched = self._clock()
        if record.digest in self._records:
            self._records[record.digest] = self._records.pop(record.digest)

    def _forget_old(self, now: float) -> None:
        """Forget requests without clients: the old ones, and the oldest of too many; convicted ones last."""
        idle = [record for digest, record in self._records.items() if digest not in self._clients]
        excess = len(idle) - MAX_RECORDS
        for record in sorted(idle, key=lambda record: (bool(record.convicted), record.touched)):
            if excess > 0 or now - record.touched > self._kept:
                del self._records[record.digest]
                excess -= 1
