"""Requests that may be what engines die of. Pure: the clock is an argument.

A request is identified by a keyed digest of method, path and body, so deaths are kept when its client leaves and sends
it again. Two deaths make it a suspect: it is sent again only as a trial, one trial at a time. A third death convicts it
if no other request can have been in the engine; otherwise the next trial is stricter. Only proof ends a trial: output
of the engine for it, its end, or a completion of another request that was sent after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field

from dsv4_runtime.contract.gateway import FatalRequest, FatalRequests
from dsv4_runtime.engine import completion, turns
from dsv4_runtime.engine.turns import Kind, Refused
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.http1 import Headers, encode_headers
from dsv4_runtime.gateway.http_client import Upstream
from dsv4_runtime.gateway.routing import SETTLE_SECONDS, EngineGeneration, Exposure, Exposures, RoutedGroup

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
MIN_KEPT_SECONDS = 600.0
"""Time for which deaths are kept after the latest, or after the client left, at least."""
MAX_RECORDS = 4096
"""Requests whose deaths are kept while nobody waits for them."""
_KEEP_FOUND = 20

Clock = Callable[[], float]


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
            raise RefusedError(errors.engine_fatal(record.convicted))
        if len(record.deaths) >= MAX_DEATHS:
            message = f"{len(record.deaths)} engines died while they had this request and others; it is not sent again"
            raise RefusedError(errors.engine_lost(message))
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


PROBE_SECONDS = 2.0
"""Time without output after which a trial sends a probe."""
_POLL_SECONDS = 0.02
_TURN_SECONDS = 0.25
"""Between attempts of a request that another one keeps out."""
_REPORT_SECONDS = 30.0
"""Time for which a trial whose connection broke waits for the agent's report of the death."""


class TurnRefusedError(Exception):
    """vLLM's API process did not admit the request because of another one (`engine.turns`)."""

    def __init__(self, reason: Refused) -> None:
        super().__init__(reason)
        self.reason = reason


class TrialAttempt:
    """One trial in one life of an engine."""

    def __init__(self, trials: Trials, trial: Trial, group: RoutedGroup, life: EngineGeneration) -> None:
        self._trials, self._trial, self._group, self._life = trials, trial, group, life
        self._kind = Kind.ALONE
        self._watch: asyncio.Task[None] | None = None

    def headers(self) -> Headers:
        """Return the headers that ask for the engine."""
        return self._trials.headers(self._kind)

    async def free(self) -> None:
        """Wait until the engine is free of requests that would spoil the trial, as long as such waits may take."""
        exposures, record, suspects = self._life.exposures, self._trial.record, self._trials.suspects
        while True:
            others = [other for other in exposures if other.digest != record.digest and other.left is None]
            spoilt = any(record.strict or suspects.has_deaths(other.digest) for other in others)
            if not spoilt and not exposures.unsettled:
                return
            begun = time.monotonic()
            left = record.drain_seconds - exposures.drained
            if left <= 0:
                self._share()
                return
            if spoilt:
                await asyncio.sleep(_POLL_SECONDS)
            else:
                await self._settle(left)
            exposures.drained += time.monotonic() - begun

    async def refused(self, reason: Refused) -> None:
        """Wait after a refusal; the next attempt is a shared one if all such waits have taken too long."""
        exposures = self._life.exposures
        begun = time.monotonic()
        left = self._trial.record.drain_seconds - exposures.drained
        if self._kind is Kind.ALONE and left <= 0:
            self._share()
        elif reason is Refused.UNSETTLED:
            await self._settle(left)
        else:
            await self._trials.pause()
        exposures.drained += time.monotonic() - begun

    async def _settle(self, seconds: float) -> None:
        """Have the engine prove that it dropped what was left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, _TURN_SECONDS)):
                await asyncio.sleep(SETTLE_SECONDS)
                if not await self._trials.probe(self._group, self._life):
                    await asyncio.sleep(_TURN_SECONDS)

    def _share(self) -> None:
        """Go on beside others: a death will not convict."""
        self._kind = Kind.SHARED
        self._trials.suspects.end(self._trial)

    def sent(self, exposure: Exposure) -> None:
        """Note that the request is sent now."""
        if self._kind is Kind.ALONE:
            exposure.alone = exposure.trial = True
            self.stop()
            self._watch = asyncio.create_task(self._end_with_proof(exposure))

    def stop(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.cancel()

    async def _end_with_proof(self, exposure: Exposure) -> None:
        """End the exclusion once the engine has computed something with the request in it."""
        probe: asyncio.Task[bool] | None = None
        probing = time.monotonic() + PROBE_SECONDS
        try:
            while not (exposure.progressed or (probe is not None and probe.done() and probe.result())):
                if time.monotonic() >= probing and (probe is None or probe.done()):
                    probe = asyncio.create_task(self._trials.probe(self._group, self._life))
                    probing = time.monotonic() + PROBE_SECONDS
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            if probe is not None:
                probe.cancel()
        await asyncio.sleep(self._trial.record.trial_seconds - (time.monotonic() - exposure.sent))
        # In this order: from here on others may be in the engine.
        exposure.alone = False
        self._trials.suspects.end(self._trial)
        await self._trials.release(self._group)


class Trials:
    """Runs trials."""

    def __init__(self, suspects: Suspects, upstream: Upstream, model: str) -> None:
        """Args:
        suspects: which requests are tried.
        upstream: connections to vLLM.
        model: name of the model for probes.
        """
        self.suspects = suspects
        self._upstream, self._model = upstream, model
        self._owner = secrets.token_hex(8)

    def headers(self, kind: Kind) -> Headers:
        """Return the header that says which kind of request it is."""
        return encode_headers({turns.HEADER: turns.header(self._owner, kind)})

    @contextlib.asynccontextmanager
    async def prepared(self, trial: Trial, group: RoutedGroup, life: EngineGeneration) -> AsyncIterator[TrialAttempt]:
        """Return the attempt of a trial within which its engine is its own as far as possible."""
        attempt = TrialAttempt(self, trial, group, life)
        try:
            yield attempt
        finally:
            attempt.stop()

    async def pause(self) -> None:
        """Wait before a request that was not admitted is sent again."""
        await asyncio.sleep(_TURN_SECONDS)

    async def over(self, group: RoutedGroup, life: EngineGeneration) -> None:
        """Wait until the agent reports what became of a life whose request lost its connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while not life.over and group.engine.present is not life:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)

    async def probe(self, group: RoutedGroup, life: EngineGeneration) -> bool:
        """Have the engine compute one token; whether it did, and is not doubted."""
        sent = time.monotonic()
        body = json.dumps(completion.request(self._model)).encode()
        if await self._ask(group, "/v1/completions", Kind.PROBE, body) and group.engine.present is life:
            life.exposures.settle(sent)
            return True
        return False

    async def release(self, group: RoutedGroup) -> None:
        """Let other gateways' requests in."""
        await self._ask(group, "/dsv4/turn", Kind.RELEASE, b"{}")

    async def _ask(self, group: RoutedGroup, path: str, kind: Kind, body: bytes) -> bool:
        headers = [(b"Content-Type", b"application/json"), *encode_headers(group.auth), *self.headers(kind)]
        try:
            async with self._upstream.ask(group.api, "POST", path, headers, (body,)) as answer:
                await answer.read()
                return answer.status == 200
        except ConnectionError:
            return False
