"""Monitoring of a serving engine on rank 0: samples of vLLM, watch over the group, drain before a planned end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from dsv4_runtime.agent.context import AgentContext, start_background
from dsv4_runtime.agent.record import MemberRecord
from dsv4_runtime.contract import DrainReport, Health, HealthPolicy, Progress
from dsv4_runtime.engine import completion, token_auth
from dsv4_runtime.health.rules import WINDOW_SECONDS, Judgement, judge
from dsv4_runtime.health.samples import Pace, Sample, Viewer, steps_and_requests
from dsv4_runtime.health.vitals import SAMPLE_SECONDS
from dsv4_runtime.util.clock import tick
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
# The count does not include a request of the last moments before the gateway stopped until the engine's next step.
_EMPTY_SECONDS = 1.0
_PROBE_SECONDS = 1.0
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
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
        async with aiohttp.ClientSession(timeout=_ANSWER_TIMEOUT, headers=self._headers) as session:
            await asyncio.gather(self._ask(session), self._canaries(session))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        asked = 0
        while True:
            asked += 1
            try:
                async with session.get(f"{self._base}/metrics") as response:
                    self._read(await response.read())
                if asked % _HEALTH_EVERY == 0 or self.errored:
                    await self._calls_dead(session)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if own_shortage(error) is not None:
                    self._excuse(error)
            await tick(_PROBE_SECONDS)

    def _excuse(self, error: BaseException) -> None:
        """Count silence and missing steps from now on: until then, this process itself could not ask."""
        if self._steps is not None:
            _log.warning("vLLM cannot be polled, which does not count: %s", error)
        self.answered = self.stepped = self._looked = time.monotonic()
        self._steps = None

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
            pause = _PROBE_SECONDS if self.quiet else self._due() - time.monotonic()
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


class Watcher:
    """Samples the group, keeps the samples of the last minute, and applies the health rules to them."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._window: deque[Sample] = deque()

    def window(self) -> list[dict[str, object]]:
        """Return the samples of the latest verdicts, oldest first."""
        return [dataclasses.asdict(sample) for sample in self._window]

    async def until_dead(self, api: str, report: Callable[[Judgement], None]) -> Judgement:
        """Watch the engine until the rules judge it dead; `report` is called after each sample of a healthy or suspect
        one.

        Raises:
            Exception: the prober failed, so the engine is no longer watched.
        """
        plan, sampled = self._context.plan, self._context.sampled
        prober = Prober(api, plan.engine.served_name, plan.health, token_auth.headers(self._context.token))
        viewers = {member.rank: Viewer(member.rank) for member in plan.members}
        probing = asyncio.create_task(prober.run())
        self._window.clear()
        try:
            while not probing.done():
                now, next_sample = time.monotonic(), sampled.next
                prober.quiet = self._context.record.finishing
                self._window.append(self._sample(prober, viewers, now))
                while now - self._window[0].time > WINDOW_SECONDS:
                    self._window.popleft()
                judgement = judge(self._window, plan.health, now)
                if judgement.health is Health.DEAD:
                    return judgement
                suspicious = judgement.health is Health.SUSPECT
                report(judgement)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAMPLE_SECONDS / 2 if suspicious else 2 * SAMPLE_SECONDS):
                        await next_sample.wait()
            probing.result()
            raise RuntimeError("the prober ended")
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    def _sample(self, prober: Prober, viewers: Mapping[int, Viewer], now: float) -> Sample:
        peers = self._context.peers
        ranks = [viewers[0].view(self._context.record.signals, now, None)]
        for rank, peer in peers.all.items():
            silence = peers.silence(rank, now)
            signals = peer.status.signals if peer.status is not None else None
            ranks.append(viewers[rank].view(signals, now - (silence or 0.0), peer.round_trip, peer.accepting))
        return Sample(
            time=now,
            answered=prober.answered,
            errored=prober.errored,
            stepped=prober.stepped,
            outstanding=prober.outstanding,
            canary_sent=prober.canary_sent,
            canary_wrong=prober.canary_wrong,
            canary_said=prober.canary_said,
            pace=prober.pace.slow,
            ranks=tuple(ranks),
        )


class DrainWait:
    """Wait for the open requests of a serving engine. The member is `Draining` from its beginning."""

    def __init__(self, record: MemberRecord, count: Callable[[], Awaitable[int | None]], seconds: float) -> None:
        """Start to wait, at most `seconds`. `count` returns vLLM's running and waiting requests, None without an
        answer."""
        self._record, self._count = record, count
        self._open: int | None = None
        self._over = False
        record.finish("waiting for open requests")
        self._task = start_background(self._wait(seconds))

    @property
    def report(self) -> DrainReport:
        """Return the progress."""
        return DrainReport(over=self._over or not self._active, open=self._open)

    @property
    def _active(self) -> bool:
        """Return whether an engine can still finish requests."""
        return self._record.finishing and self._record.failure is None

    async def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        empty: float | None = None
        try:
            while self._active and (begun := time.monotonic()) < deadline:
                found = await self._count()
                if found is not None:
                    self._open = found
                    if self._active:
                        self._record.advance(Progress(stage=f"waiting for {self._left}"))
                # Without an answer the number of open requests is unknown.
                empty = None if found != 0 else begun if empty is None else empty
                if empty is not None and begun - empty >= _EMPTY_SECONDS:
                    break
                await asyncio.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        finally:
            self._over = True
        if not self._active:
            return
        if empty is None:
            self._record.advance(Progress(stage=f"no longer waiting for {self._left}: {seconds:g} s are over"))
        else:
            self._record.advance(Progress(stage="all requests are answered"))
        _log.info("drained: %s", self._left)

    @property
    def _left(self) -> str:
        return "open requests" if self._open is None else f"{self._open} open request{'s' * (self._open != 1)}"


async def open_requests(base: str, headers: Mapping[str, str]) -> int | None:
    """Return vLLM's running and waiting requests; None without an answer within 2 s. `headers` authenticate at its
    port."""
    try:
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        session = aiohttp.ClientSession(timeout=limit, headers=headers)
        async with session, session.get(f"{base}/metrics") as answer:
            answer.raise_for_status()
            found = steps_and_requests(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return None if found is None else found[1]
