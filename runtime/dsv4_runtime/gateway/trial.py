"""Trials of suspected requests: one request gets an engine for itself, and gives it back when something is proven."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator

from dsv4_runtime.engine import completion, token_auth
from dsv4_runtime.engine.token_auth import Kind, Refused
from dsv4_runtime.gateway.engine import Life
from dsv4_runtime.gateway.groups import RoutedGroup
from dsv4_runtime.gateway.http1 import Headers, raw
from dsv4_runtime.gateway.suspects import SETTLE_SECONDS, Exposure, Suspects, Trial
from dsv4_runtime.gateway.upstream import Upstream

PROBE_SECONDS = 2.0
"""Time without output after which a trial sends a probe."""
_LOOK_SECONDS = 0.02
_TURN_SECONDS = 0.25
"""Between attempts of a request that another one keeps out."""
_REPORT_SECONDS = 30.0
"""Time for which a trial whose connection broke waits for the agent's report of the death."""


class TurnRefusedError(Exception):
    """vLLM's API process did not admit the request because of another one (`engine.token_auth`)."""

    def __init__(self, reason: Refused) -> None:
        super().__init__(reason)
        self.reason = reason


class TrialAttempt:
    """One trial in one life of an engine."""

    def __init__(self, trials: Trials, trial: Trial, group: RoutedGroup, life: Life) -> None:
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
                await asyncio.sleep(_LOOK_SECONDS)
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
                await asyncio.sleep(_LOOK_SECONDS)
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
        return raw({token_auth.TURN_HEADER: token_auth.turn_header(self._owner, kind)})

    @contextlib.asynccontextmanager
    async def prepared(self, trial: Trial, group: RoutedGroup, life: Life) -> AsyncIterator[TrialAttempt]:
        """Return the attempt of a trial within which its engine is its own as far as possible."""
        attempt = TrialAttempt(self, trial, group, life)
        try:
            yield attempt
        finally:
            attempt.stop()

    async def pause(self) -> None:
        """Wait before a request that was not admitted is sent again."""
        await asyncio.sleep(_TURN_SECONDS)

    async def over(self, group: RoutedGroup, life: Life) -> None:
        """Wait until the agent reports what became of a life whose request lost its connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while not life.over and group.engine.present is not life:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)

    async def probe(self, group: RoutedGroup, life: Life) -> bool:
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
        headers = [(b"Content-Type", b"application/json"), *raw(group.auth), *self.headers(kind)]
        try:
            async with self._upstream.ask(group.api, "POST", path, headers, (body,)) as answer:
                await answer.read()
                return answer.status == 200
        except ConnectionError:
            return False
