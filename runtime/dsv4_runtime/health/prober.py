"""Samples of the engine, taken by the head: vLLM's API process, its step counter, and the canary."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import aiohttp

from dsv4_runtime.contract import HealthPolicy
from dsv4_runtime.engine import completion
from dsv4_runtime.health.samples import Pace, steps_and_requests
from dsv4_runtime.util.clock import tick

_POLL_SECONDS = 1.0
_ANSWER = aiohttp.ClientTimeout(total=2.0)
# Compared with `/metrics`, `/health` only adds vLLM's own report of a dead engine.
_HEALTH_EVERY = 3
_RETRY_SECONDS = 0.5
# A step is late after this time and twice the duration of slow steps.
_LATE_SECONDS = 1.0


class Prober:
    """Polls vLLM until cancelled; the results are attributes. All times are monotonic."""

    def __init__(self, base: str, model: str, policy: HealthPolicy, headers: Mapping[str, str] | None = None) -> None:
        """Take the URL of the API, the model name and thresholds of the canary, and authentication for vLLM's port."""
        self._base = base
        self._model = model
        self._policy = policy
        self._headers = headers
        now = time.monotonic()
        self.answered = now
        self.errored = False
        self.stepped = now
        self.outstanding = 0
        self.canary_sent: float | None = None
        self.canary_wrong = 0
        self.canary_said = ""
        self.pace = Pace()
        self.quiet = False
        """Whether canaries are paused so that the engine becomes idle."""
        self._metrics_read = asyncio.Event()
        """Set after each reading of `/metrics`."""
        self._steps: int | None = None
        self._looked = now
        self._canary_ended = now
        self._canary_seconds = 0.0

    async def run(self) -> None:
        """Poll until cancelled."""
        # Two connections, so that polling and canary do not wait for each other.
        async with aiohttp.ClientSession(timeout=_ANSWER, headers=self._headers) as session:
            await asyncio.gather(self._ask(session), self._canaries(session))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        asked = 0
        while True:
            asked += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(f"{self._base}/metrics") as response:
                    self._read(await response.read())
                if asked % _HEALTH_EVERY == 0 or self.errored:
                    await self._calls_dead(session)
            await tick(_POLL_SECONDS)

    async def _calls_dead(self, session: aiohttp.ClientSession) -> bool:
        """Return whether vLLM reports that its engine is dead."""
        async with session.get(f"{self._base}/health") as response:
            self.errored = response.status == 503
        self.answered = time.monotonic()
        return self.errored

    def _read(self, metrics: bytes) -> None:
        now = time.monotonic()
        self.answered = now
        found = steps_and_requests(metrics)
        if found is None:
            return
        steps, outstanding = found
        if self._steps is not None:
            self._looked = now
            if steps != self._steps:
                if self.outstanding and steps > self._steps:
                    self.pace.add((now - self.stepped) / (steps - self._steps))
                self.stepped = now
        self._steps, self.outstanding = steps, outstanding
        self._metrics_read.set()

    async def _canaries(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._metrics_read.clear()
            pause = _POLL_SECONDS if self.quiet else self._due() - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._metrics_read.wait()
            if not self.quiet and time.monotonic() >= self._due():
                await self._canary(session)

    def _due(self) -> float:
        """Return the time of the next canary: late while steps prove that the engine works, soon if due steps are
        missing."""
        policy, ended = self._policy, self._canary_ended
        if self.canary_wrong:
            return ended + _RETRY_SECONDS
        if not self.outstanding:
            return ended + min(max(policy.canary_min, self._canary_seconds / policy.canary_load), policy.canary_max)
        due = ended + policy.canary_max
        if self._looked > self.stepped:
            # The counter was read again since its last change, and stands still.
            timeout = max(_LATE_SECONDS, 2.0 * (self.pace.slow or 0.0))
            due = min(due, max(self.stepped + timeout, ended + _LATE_SECONDS))
        return due

    async def _canary(self, session: aiohttp.ClientSession) -> None:
        """Send one canary. The rules judge a missing answer; a wrong answer counts at any time."""
        self.canary_sent = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=2 * self._policy.busy_max)
        body = completion.request(self._model)
        try:
            async with session.post(f"{self._base}/v1/completions", json=body, timeout=timeout) as response:
                answer = await response.read()
            self._canary_seconds = time.monotonic() - self.canary_sent
            # 429 and 503: too busy. An engine that reports itself dead does not count as one with wrong results.
            if response.status not in (429, 503) and not (response.status >= 500 and await self._calls_dead(session)):
                completion.check_answer(response.status, answer)
                self.canary_wrong = 0
        except completion.BadCompletion as error:
            self.canary_wrong += 1
            self.canary_said = str(error)
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        finally:
            self._canary_ended = time.monotonic()
            self.canary_sent = None
