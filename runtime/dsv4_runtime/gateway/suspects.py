"""Requests suspected of killing engines, and the trials that prove or clear them.

A request is identified by a keyed digest of method, path and body, so deaths are kept when its client disconnects and
retries. After two deaths a request is a suspect and is only sent as a trial, one at a time; after one if its
kind is not proven (`kinds`). A third death convicts it
if no other request can have been in the engine; otherwise the next trial is stricter. Only proof ends a trial: output
of the engine for the request, its end, or a completion of another request that was sent later. `Suspects` is pure
except for its event and log; the clock is an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import FatalRequest, FatalRequests
from dsv4_runtime.engine import completion, token_auth
from dsv4_runtime.engine.token_auth import Kind, Refused
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.continuation import is_error_event
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.http_client import Headers, Upstream, UpstreamRequest, encode_headers
from dsv4_runtime.gateway.kinds import PLAIN, FatalKinds, Kinds
from dsv4_runtime.gateway.routing import SETTLE_SECONDS, EngineGeneration, Exposure, Exposures, RoutedGroup
from dsv4_runtime.util import sse

_log = logging.getLogger("dsv4.gateway")

SUSPECTED_DEATHS = 2
"""Engine deaths after which a request is only sent as a trial."""
MAX_DEATHS = 8
"""Engine deaths after which a request is refused even without proof."""
DRAIN_SECONDS = 10.0
"""Time per engine generation that trials wait for other requests to end; doubled by each death after the second."""
_MAX_DRAIN_SECONDS = 120.0
TRIAL_SECONDS = 1.0
"""Minimum exclusive time of a trial that produced proof, and twice the time after which an engine died despite earlier
progress."""
_MAX_TRIAL_SECONDS = 300.0
MIN_KEPT_SECONDS = 600.0
"""Minimum retention of deaths after the latest death or disconnect."""
MAX_RECORDS = 4096
"""Requests without clients whose deaths are kept."""
_KEEP_FOUND = 20

Clock = Callable[[], float]
Fits = Callable[[Any], bool]
"""Returns whether a request may go to a group."""


@dataclass(slots=True)
class Death:
    """Death of an engine that had the request."""

    generation: str
    silent: bool
    """Whether the request had no output in that generation."""


@dataclass(slots=True)
class Record:
    """Deaths attributed to one request."""

    digest: bytes
    touched: float
    kinds: Kinds = PLAIN
    deaths: list[Death] = field(default_factory=list)
    convicted: int = 0
    """Engine deaths at conviction; 0 if not convicted."""
    lived: float = 0.0
    """Longest time from sending to a death at which a trial was no longer alone."""

    @property
    def strict(self) -> bool:
        """Return whether no other request may run beside its trial: an earlier trial proved nothing."""
        return len(self.deaths) > SUSPECTED_DEATHS

    @property
    def drain_seconds(self) -> float:
        """Return the maximum wait of its trial for other requests."""
        return min(DRAIN_SECONDS * 2.0 ** max(len(self.deaths) - SUSPECTED_DEATHS, 0), _MAX_DRAIN_SECONDS)

    @property
    def trial_seconds(self) -> float:
        """Return the minimum exclusive time of its trial."""
        return min(max(TRIAL_SECONDS, 2.0 * self.lived), _MAX_TRIAL_SECONDS)


@dataclass(eq=False, slots=True)
class Trial:
    """Attempt of a suspect; only one at a time."""

    record: Record
    group: Hashable


class Suspects:
    """Engine deaths by request, and the order of trials."""

    def __init__(self, kept_seconds: float = MIN_KEPT_SECONDS, clock: Clock = time.monotonic) -> None:
        """Args:
        kept_seconds: retention of deaths without a client, at least `MIN_KEPT_SECONDS`.
        clock: monotonic seconds.
        """
        self._kept, self._clock = max(kept_seconds, MIN_KEPT_SECONDS), clock
        self._records: dict[bytes, Record] = {}
        """Least recently used first."""
        self._clients: dict[bytes, int] = {}
        """Open exchanges per request."""
        self._waiting: dict[Hashable, tuple[Record, Fits]] = {}
        """Exchanges waiting for their trial, in order of arrival."""
        self._next: dict[Hashable, Hashable | None] = {}
        """Exchange with the next trial in each group, as far as computed; None: there is none."""
        self._trial: Trial | None = None
        self._changed = asyncio.Event()
        self._found: list[FatalRequest] = []
        self.kinds = FatalKinds(clock, self.notify)

    @property
    def found(self) -> FatalRequests:
        """Return the latest convicted requests and the refused kinds."""
        return FatalRequests(requests=tuple(self._found), kinds=self.kinds.found)

    @property
    def size(self) -> int:
        """Return the number of requests with recorded deaths."""
        return len(self._records)

    def arrive(self, digest: bytes) -> None:
        """Count a client of a request. Each call needs a `depart`."""
        record = self._records.get(digest)
        if record is not None and digest not in self._clients and self._clock() - record.touched > self._kept:
            del self._records[digest]
        self._clients[digest] = self._clients.get(digest, 0) + 1

    def depart(self, digest: bytes) -> None:
        """Remove a client of a request."""
        self._clients[digest] -= 1
        if not self._clients[digest]:
            del self._clients[digest]
        if (record := self._records.get(digest)) is not None:
            self._touch(record)

    def suspected(self, digest: bytes, kinds: Kinds = PLAIN) -> bool:
        """Return whether the request is only sent as a trial; raise RefusedError if it is not sent any more."""
        self.kinds.check(kinds)
        record = self._records.get(digest)
        if record is None:
            return False
        if record.convicted:
            raise RefusedError(errors.engine_fatal(record.convicted))
        if len(record.deaths) >= MAX_DEATHS:
            message = f"{len(record.deaths)} engines died while they had this request and others; it is not sent again"
            raise RefusedError(errors.engine_lost(message))
        return len(record.deaths) >= (SUSPECTED_DEATHS if self.kinds.is_proven(record.kinds) else 1)

    def admits(self, group: Hashable, digest: bytes) -> bool:
        """Return whether an unsuspected request may go to `group` now.

        Requests with deaths wait for the end of a trial. While a strict trial waits or runs, all requests wait.
        """
        if self._trial is not None:
            if self._trial.group is not group:
                return True
            record = self._trial.record
        elif (likeliest := self._likeliest(group)) is not None:
            record, _ = self._waiting[likeliest]
        else:
            return True
        return not record.strict and not self.has_deaths(digest)

    def has_trial(self, group: Hashable) -> bool:
        """Return whether a trial waits for `group`, or runs in it."""
        return self._likeliest(group) is not None if self._trial is None else self._trial.group is group

    def wait(self, exchange: Hashable, digest: bytes, fits: Fits) -> None:
        """Queue a suspect for its trial, which can be in the groups for which `fits` is true."""
        self._waiting[exchange] = self._records[digest], fits
        self.notify()

    def is_next(self, exchange: Hashable, group: Hashable) -> bool:
        """Return whether the trial of a queued suspect may begin in `group`."""
        return self._trial is None and self._likeliest(group) is exchange

    def begin(self, exchange: Hashable, group: Hashable) -> Trial:
        """Begin the trial of a queued suspect in `group`."""
        record, _ = self._waiting.pop(exchange)
        self._trial = Trial(record, group)
        self.notify()
        return self._trial

    def stop_waiting(self, exchange: Hashable) -> None:
        """Remove a suspect from the queue. Idempotent."""
        if self._waiting.pop(exchange, None) is not None:
            self.notify()

    def end(self, trial: Trial) -> None:
        """End a trial and release the other requests. Idempotent."""
        if self._trial is trial:
            self._trial = None
            self.notify()

    def has_deaths(self, digest: bytes) -> bool:
        """Return whether the request has recorded deaths."""
        record = self._records.get(digest)
        return record is not None and bool(record.deaths)

    async def changed(self) -> None:
        """Wait until trials or deaths change."""
        await self._changed.wait()

    def _likeliest(self, group: Hashable) -> Hashable | None:
        """Return the most likely cause among the queued suspects that fit `group`; None if there is none.

        Order: most deaths without output, most deaths, latest arrival.
        """
        if group not in self._next:
            order = {
                exchange: index for index, (exchange, (_, fits)) in enumerate(self._waiting.items()) if fits(group)
            }

            def likely(exchange: Hashable) -> tuple[int, int, int]:
                deaths = self._waiting[exchange][0].deaths
                return sum(death.silent for death in deaths), len(deaths), order[exchange]

            self._next[group] = max(order, key=likely, default=None)
        return self._next[group]

    def notify(self) -> None:
        """Wake requests that wait for a change of trials, deaths or groups."""
        self._next.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def answered(self, digest: bytes) -> None:
        """Clear the deaths of a request that was answered completely."""
        record = self._records.get(digest)
        if record is not None and not record.convicted:
            record.deaths.clear()
            record.lived = 0.0
            self.notify()

    def died(self, generation: str, exposures: Exposures, *, reported: bool, cause: Cause | None = None) -> None:
        """Attribute a death to every request that may have been in the engine.

        Args:
            generation: unique name of the engine generation.
            exposures: its requests at its death.
            reported: whether the agent reported the death. If not, the generation was only replaced and may have ended
                before a request reached it: this makes suspects, and convicts only with a broken connection.
            cause: the reported cause.
        """
        now = self._clock()
        exposed: dict[bytes, list[Exposure]] = {}
        for exposure in exposures:
            exposed.setdefault(exposure.digest, []).append(exposure)
        only = len(exposed) == 1 and exposures.complete
        for digest, found in exposed.items():
            record = self._records.setdefault(digest, Record(digest, now, found[0].kinds))
            self._touch(record)
            certain = reported or any(exposure.broken for exposure in found)
            if record.convicted or (len(record.deaths) >= SUSPECTED_DEATHS and not certain):
                continue
            record.deaths.append(Death(generation, not any(exposure.progressed for exposure in found)))
            for exposure in found:
                if exposure.trial and not exposure.alone:
                    record.lived = max(record.lived, now - exposure.sent)
            if record.strict and only and all(exposure.alone for exposure in found):
                self._convict(record, found[-1], generation)
        if reported:
            self.kinds.died(generation, {digest: found[0].kinds for digest, found in exposed.items()}, cause)
        self._forget_old(now)
        self.notify()

    def _convict(self, record: Record, exposure: Exposure, generation: str) -> None:
        record.convicted = engines = len(record.deaths)
        generations = {death.generation for death in record.deaths}
        for other in self._records.values():
            # Keep deaths in which the other request had no output: there may be two causes.
            if other is not record:
                other.deaths = [death for death in other.deaths if death.silent or death.generation not in generations]
        self._found = [
            *self._found[1 - _KEEP_FOUND :],
            FatalRequest(id=exposure.id, size=exposure.size, engines=engines, time=time.time()),
        ]
        _log.error(
            "request %s (%d bytes) is refused: %d engines died while they had it, the last (%s) with no other request",
            exposure.id,
            exposure.size,
            engines,
            generation,
        )

    def _touch(self, record: Record) -> None:
        record.touched = self._clock()
        if record.digest in self._records:
            self._records[record.digest] = self._records.pop(record.digest)

    def _forget_old(self, now: float) -> None:
        """Remove requests without clients that are expired or exceed the limit, convicted ones last."""
        idle = [record for digest, record in self._records.items() if digest not in self._clients]
        excess = len(idle) - MAX_RECORDS
        for record in sorted(idle, key=lambda record: (bool(record.convicted), record.touched)):
            if excess > 0 or now - record.touched > self._kept:
                del self._records[record.digest]
                excess -= 1


PROBE_SECONDS = 2.0
"""Time without output after which a trial sends a probe."""
_POLL_SECONDS = 0.02
TURN_SECONDS = 0.25
"""Interval of attempts while another request has exclusive use."""
_RELEASE_SECONDS = 5.0
_REPORT_SECONDS = 30.0
"""Time that a trial with a broken connection waits for the agent's report of the death."""


class TurnRefusedError(Exception):
    """vLLM's API process rejected the request because of another one (`engine.token_auth`)."""

    def __init__(self, reason: Refused) -> None:
        super().__init__(reason)
        self.reason = reason


def _has_error(body: bytes) -> bool:
    """Return whether the end of a stream reports an error, as vLLM does when its engine dies."""
    return any(is_error_event(event, sse.payload(event)) for event in sse.Splitter().feed(body))


class TrialAttempt:
    """A trial in one engine generation."""

    def __init__(self, trials: Trials, trial: Trial, group: RoutedGroup, generation: EngineGeneration) -> None:
        self._trials, self._trial, self._group, self._generation = trials, trial, group, generation
        self._kind = Kind.ALONE
        self.request: UpstreamRequest | None = None
        """The latest request to vLLM."""
        self._exposure: Exposure | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def exclusive(self) -> bool:
        """Return whether exclusive use of the engine is requested."""
        return self._kind is Kind.ALONE

    def headers(self) -> Headers:
        """Return the headers that request exclusive use of the engine."""
        return self._trials.headers(self._kind)

    async def wait_until_free(self) -> None:
        """Wait, within the limit, until no request in the engine would invalidate the trial."""
        exposures, record, suspects = self._generation.exposures, self._trial.record, self._trials.suspects
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

    async def wait_after_refusal(self, reason: Refused) -> None:
        """Wait after a rejection; use a shared attempt once the limit is exceeded."""
        exposures = self._generation.exposures
        begun = time.monotonic()
        left = self._trial.record.drain_seconds - exposures.drained
        if self._kind is Kind.ALONE and left <= 0:
            self._share()
        elif reason is Refused.UNSETTLED:
            await self._settle(left)
        else:
            await asyncio.sleep(TURN_SECONDS)
        exposures.drained += time.monotonic() - begun

    async def _settle(self, seconds: float) -> None:
        """Probe the engine to prove that it dropped the abandoned requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, TURN_SECONDS)):
                await asyncio.sleep(SETTLE_SECONDS)
                if not await self._trials.probe(self._group, self._generation):
                    await asyncio.sleep(TURN_SECONDS)

    def _share(self) -> None:
        """Continue beside other requests; a death will not convict."""
        self._kind = Kind.SHARED
        self._trials.suspects.end(self._trial)

    def sent(self, exposure: Exposure) -> None:
        """Record that vLLM's API process has admitted the request."""
        if self.exclusive:
            exposure.alone = exposure.trial = True
            self._exposure = exposure
            self._stop_watch()
            self._watch = asyncio.create_task(self._end_with_proof(exposure))

    def __enter__(self) -> None:
        """Enter the exchange with the engine."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, asyncio.CancelledError):
            self._stop_watch()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def end(self) -> None:
        """End the trial. If its client left, it continues until its proof: a client that returns would otherwise leave
        each trial before its proof, and a request of another gateway could enter the engine unnoticed.
        """
        exposure = self._exposure
        if exposure is not None and exposure.left is None and exposure in self._generation.exposures:
            self._trials.spawn(self._continue(exposure))
        else:
            self._finish()

    def _finish(self) -> None:
        self._stop_watch()
        if self.request is not None:
            self.request.close()
        self._trials.suspects.end(self._trial)

    async def _continue(self, exposure: Exposure) -> None:
        """Read the response without a client."""
        generation, watch = self._generation, self._watch
        answer = self.request.answer if self.request is not None else None
        try:
            async with asyncio.timeout(_MAX_TRIAL_SECONDS):
                while answer is not None and watch is not None and not (watch.done() or generation.over):
                    if answer.status == 200 and answer.has_data:
                        exposure.progress()
                    failed = exposure.failed or answer.status >= 500
                    if answer.complete and not failed and not _has_error(await answer.part()):
                        # At once, because vLLM's API process admits others from here on.
                        generation.exposures.end(exposure)
                        break
                    if answer.complete or answer.is_broken:
                        exposure.broken = answer.is_broken
                        await self._trials.wait_for_report(self._group, generation)
                        break
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            _log.warning("engine %s: a trial had no proof within %g s", generation.name, _MAX_TRIAL_SECONDS)
        finally:
            generation.exposures.leave(exposure, time.monotonic(), broken=exposure.broken)
            # Other requests may enter the engine from here on.
            exposure.alone = False
            self._finish()

    async def _end_with_proof(self, exposure: Exposure) -> None:
        """End the exclusive use once the engine has produced output with the request in it."""
        probe: asyncio.Task[bool] | None = None
        probing = time.monotonic() + PROBE_SECONDS
        try:
            while not (exposure.progressed or (probe is not None and probe.done() and probe.result())):
                if time.monotonic() >= probing and (probe is None or probe.done()):
                    probe = asyncio.create_task(self._trials.probe(self._group, self._generation))
                    probing = time.monotonic() + PROBE_SECONDS
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            if probe is not None:
                probe.cancel()
        await asyncio.sleep(self._trial.record.trial_seconds - (time.monotonic() - exposure.sent))
        # In this order: other requests may enter the engine from the release on, and it must not reach the next trial.
        exposure.alone = False
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                if not self._generation.over:
                    await self._trials.release(self._group)
        except TimeoutError:
            _log.warning("engine %s: no response to a release within %g s", self._generation.name, _RELEASE_SECONDS)
        finally:
            self._trials.suspects.end(self._trial)


class Trials:
    """Runs trials."""

    def __init__(self, suspects: Suspects, upstream: Upstream) -> None:
        self.suspects = suspects
        self._upstream = upstream
        self._owner = secrets.token_hex(8)
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def headers(self, kind: Kind) -> Headers:
        """Return the header with the kind of the request."""
        return encode_headers({token_auth.TURN_HEADER: token_auth.turn_header(self._owner, kind)})

    async def wait_for_report(self, group: RoutedGroup, generation: EngineGeneration) -> None:
        """Wait until a generation in which a request failed is confirmed alive or the agent reports its state."""
        if generation.over or await group.engine.survives(generation):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while not generation.over and group.engine.present is not generation:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)

    async def probe(self, group: RoutedGroup, generation: EngineGeneration) -> bool:
        """Complete one token; return whether that succeeded in a confirmed generation."""
        sent = time.monotonic()
        body = json.dumps(completion.request(None)).encode()
        if await self._post(group, "/v1/completions", Kind.PROBE, body) and group.engine.present is generation:
            generation.exposures.settle(sent)
            return True
        return False

    async def release(self, group: RoutedGroup) -> None:
        """Release the engine for requests of other gateways."""
        await self._post(group, "/dsv4/turn", Kind.RELEASE, b"{}")

    async def _post(self, group: RoutedGroup, path: str, kind: Kind, body: bytes) -> bool:
        headers = [(b"Content-Type", b"application/json"), *encode_headers(group.auth), *self.headers(kind)]
        try:
            async with self._upstream.request(group.api, "POST", path, headers, (body,)) as answer:
                await answer.read()
                return answer.status == 200
        except ConnectionError:
            return False
