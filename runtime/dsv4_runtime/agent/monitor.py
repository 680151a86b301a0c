"""Monitoring of a serving engine on rank 0: the watch over the whole group, and the drain before a planned end."""

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
from dsv4_runtime.contract import DrainReport, Health, Progress
from dsv4_runtime.engine import token_auth
from dsv4_runtime.health.prober import Prober
from dsv4_runtime.health.rules import WINDOW_SECONDS, Judgement, judge
from dsv4_runtime.health.samples import Sample, Viewer, steps_and_requests
from dsv4_runtime.health.vitals import SAMPLE_SECONDS

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
# The count does not include a request of the last moments before the gateway stopped until the engine's next step.
_EMPTY_SECONDS = 1.0


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
