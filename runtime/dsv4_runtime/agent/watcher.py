"""The head's watch over a serving engine: the whole group is looked at again and again, and the rules judge what was
seen in the last minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping

from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.agent.state import Changes, MemberRecord
from dsv4_runtime.contract import GroupPlan, Health
from dsv4_runtime.engine import token_auth
from dsv4_runtime.health.prober import Prober
from dsv4_runtime.health.rules import WINDOW_SECONDS, Judgement, judge
from dsv4_runtime.health.samples import Sample, Viewer
from dsv4_runtime.health.vitals import SAMPLE_SECONDS


class Watcher:
    """Looks, remembers a minute of it, and has it judged."""

    def __init__(self, plan: GroupPlan, state: MemberRecord, peers: Peers, sampled: Changes, token: str) -> None:
        """Args:
        plan: of the incarnation.
        state: the head's own, with its signals.
        peers: the other members.
        sampled: tells of every new sample of those signals.
        token: the incarnation's.
        """
        self._plan = plan
        self._state = state
        self._peers = peers
        self._sampled = sampled
        self._headers = token_auth.headers(token)
        self._window: deque[Sample] = deque()

    def seen(self) -> list[dict[str, object]]:
        """Return what the latest verdicts were made of, oldest first."""
        return [dataclasses.asdict(sample) for sample in self._window]

    async def until_dead(self, api: str, tell: Callable[[Judgement], None]) -> Judgement:
        """Watch over the engine until the rules call it dead.

        Args:
            api: URL of vLLM's API.
            tell: told after each look that the engine is healthy or suspect.

        Raises:
            Exception: the prober made a mistake; nobody watches over the engine any more.
        """
        prober = Prober(api, self._plan.engine.served_name, self._plan.health, self._headers)
        viewers = {member.rank: Viewer(member.rank) for member in self._plan.members}
        probing = asyncio.create_task(prober.run())
        self._window.clear()
        try:
            while not probing.done():
                now, sampled = time.monotonic(), self._sampled.next
                prober.quiet = self._state.finishing
                self._window.append(self._look(prober, viewers, now))
                while now - self._window[0].time > WINDOW_SECONDS:
                    self._window.popleft()
                judgement = judge(self._window, self._plan.health, now)
                if judgement.health is Health.DEAD:
                    return judgement
                suspicious = judgement.health is Health.SUSPECT
                tell(judgement)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAMPLE_SECONDS / 2 if suspicious else 2 * SAMPLE_SECONDS):
                        await sampled.wait()
            probing.result()
            raise RuntimeError("the prober ended")
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    def _look(self, prober: Prober, viewers: Mapping[int, Viewer], now: float) -> Sample:
        """Sample the group as it is now."""
        ranks = [viewers[0].view(self._state.signals, now, None)]
        for rank, peer in self._peers.all.items():
            silence = self._peers.silence(rank, now)
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
