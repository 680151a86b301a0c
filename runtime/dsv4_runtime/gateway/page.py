"""Status page of one deployment: the document, made from what this gateway observes, and its paths.

While nobody looks at the page, the gateway only keeps the deaths in the statuses of agents. While there are viewers, it
follows the heads' reports on their groups, reads vLLM's metrics, and makes one document per second for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import AgentStatus, Health, MemoryUse
from dsv4_runtime.contract.gateway import (
    PAGE_FAILURES,
    VIEWERS,
    Figures,
    PageBudget,
    PageCache,
    PageDeployment,
    PageFailure,
    PageGroup,
    PageLoad,
    PageMember,
    PageRequests,
    PageVerdict,
    StatusPage,
    page_event,
)
from dsv4_runtime.gateway.routing import Availability, Groups, RoutedGroup, TokenKeyError
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.sse import Feed

PAGE, DOCUMENT, STREAM = "/dsv4/status", "/dsv4/status.json", "/dsv4/status/events"
PATHS = frozenset({PAGE, DOCUMENT, STREAM})

_SILENT_SECONDS = 5.0
"""Age from which a status counts as old."""
_WAIT_SECONDS = 0.4
"""Time for which a document waits for the figures of engines and of other processes."""
_RETRY_SECONDS = 1.0
_MEMORY_STEP = 64 * 2**20
"""Rounding of available memory, so that an idle machine does not change the page each second."""
_RATE_SECONDS = 0.5
"""Shortest time between two samples of a counter for a rate."""


def failures_of(status: AgentStatus) -> list[PageFailure]:
    """Return the deaths in a status of a head, oldest first."""
    engine, verdict = status.engine, status.verdict
    found = list(engine.failures) if engine is not None else []
    if verdict.health is Health.DEAD and verdict.failure is not None:
        found.append(verdict.failure)
    return [
        PageFailure(
            time=one.time,
            cause=one.cause,
            incarnation=status.incarnation,
            generation=one.generation,
            level=one.level,
            rank=one.culprit_rank,
            message=one.message,
            detected_by=one.detected_by,
            recover_seconds=one.recover_seconds,
            evidence=one.evidence or "",
        )
        for one in found
    ]


class History:
    """Latest deaths of a group since the start of this process, and those of the present incarnation."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], PageFailure] = {}

    def note(self, status: AgentStatus) -> None:
        """Add the deaths in a status; a later report of one replaces the earlier one."""
        for one in failures_of(status):
            self._known[one.key] = one
        ready = status.engine.ready_time if status.engine is not None else None
        if ready is not None and self._known:
            last = max(self._known.values(), key=lambda one: one.time)
            if last.recover_seconds is None and last.incarnation < status.incarnation and ready > last.time:
                # The agent of a new incarnation does not know the deaths before it.
                self._known[last.key] = last.model_copy(update={"recover_seconds": ready - last.time})
        if len(self._known) > PAGE_FAILURES:
            kept = sorted(self._known.values(), key=lambda one: one.time)[-PAGE_FAILURES:]
            self._known = {one.key: one for one in kept}

    def merged(self, others: Iterable[PageFailure], nodes: Mapping[int, str]) -> tuple[PageFailure, ...]:
        """Return all deaths with those of the control side, which has a machine for each; oldest first.

        Args:
            others: deaths in the route.
            nodes: rank to machine of the present incarnation.
        """
        found = dict(self._known)
        for one in others:
            seen = found.get(one.key)
            if seen is not None and one.recover_seconds is None:
                one = one.model_copy(update={"recover_seconds": seen.recover_seconds})
            found[one.key] = one
        placed = [
            one if one.node or one.rank is None else one.model_copy(update={"node": nodes.get(one.rank, "")})
            for one in found.values()
        ]
        return tuple(sorted(placed, key=lambda one: one.time)[-PAGE_FAILURES:])


_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_GENERATED, _PROMPT = b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total"
_CACHE = b"vllm:kv_cache_usage_perc"


def metric(text: bytes, name: bytes) -> list[float]:
    """Return the finite samples of a metric in Prometheus text format, without parsing the other lines."""
    values, start = list[float](), 0
    while (start := text.find(name, start)) >= 0:
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        if (start == 0 or text[start - 1 : start] == b"\n") and line[len(name) : len(name) + 1] in (b"{", b" "):
            with contextlib.suppress(ValueError):
                value = float(line.rsplit(b" ", 1)[-1])
                if math.isfinite(value):
                    values.append(value)
        start += len(name)
    return values


@dataclass(slots=True)
class EngineFigures:
    """Figures of a group's vLLM, from two successive samples of its metrics."""

    load: PageLoad | None = None
    _counters: tuple[float, float, float] | None = None
    """Monotonic time, generated tokens, tokens of prompts."""

    def update(self, text: bytes, now: float) -> None:
        """Take the metrics at `now`, monotonic time; empty text: vLLM does not answer."""
        generated = metric(text, _GENERATED)
        if not generated:
            self.load, self._counters = None, None
            return
        made, read = sum(generated), sum(metric(text, _PROMPT))
        rates: tuple[float | None, float | None] = None, None
        before = self._counters
        if before is None:
            self._counters = now, made, read
        elif now - before[0] >= _RATE_SECONDS:
            passed = now - before[0]
            self._counters = now, made, read
            # A new engine counts from zero.
            rates = max(0.0, round((made - before[1]) / passed, 1)), max(0.0, round((read - before[2]) / passed, 1))
        elif self.load is not None:
            rates = self.load.tokens_per_second, self.load.prompt_tokens_per_second
        usage = metric(text, _CACHE)
        self.load = PageLoad(
            running=round(sum(metric(text, _RUNNING))),
            waiting=round(sum(metric(text, _WAITING))),
            tokens_per_second=rates[0],
            prompt_tokens_per_second=rates[1],
            usage=round(max(usage), 3) if usage else None,
        )


def requests_of(texts: Sequence[bytes]) -> PageRequests:
    """Return the counts in the metrics of the gateways at one address."""

    def total(name: bytes) -> int:
        return round(sum(sum(metric(text, b"dsv4_gateway_" + name)) for text in texts))

    lines = [line for text in texts for line in text.splitlines() if line.startswith(b"dsv4_gateway_requests_total{")]
    ended = [(b'outcome="ok"' in line, float(line.rsplit(b" ", 1)[-1])) for line in lines]
    return PageRequests(
        active=total(b"active"),
        held=total(b"held"),
        held_bytes=total(b"held_bytes"),
        replayed=total(b"replayed_total"),
        continued=total(b"continued_total"),
        cut=total(b"cut_total"),
        ok=round(sum(count for ok, count in ended if ok)),
        total=round(sum(count for _, count in ended)),
    )


class GroupWatch:
    """Follows the report of a head on its group, while there are viewers."""

    def __init__(self, agent: str, key: Callable[[], str]) -> None:
        """`key` returns the token key; raises TokenKeyError."""
        self.agent = agent
        self.members: tuple[AgentStatus, ...] = ()
        self.memory: Mapping[int, MemoryUse] = {}
        self.heard: dict[int, float] = {}
        """Rank to the Unix time of its latest answer."""
        self.figures = EngineFigures()
        self.heard_once = asyncio.Event()
        """Set by the first report."""
        self._key = key
        self._client = AgentClient()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._client.close()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TokenKeyError, *AGENT_ERRORS):
                async with contextlib.aclosing(self._client.watch_group(self.agent, self._key())) as reports:
                    async for report in reports:
                        now = unix_time()
                        self.heard |= {rank: now - age for rank, age in report.ages.items()}
                        self.memory = report.memory
                        if report.members is not None:
                            self.members = report.members
                        self.heard_once.set()
            await asyncio.sleep(_RETRY_SECONDS)


class Page:
    """Status page of the deployment of one gateway."""

    def __init__(
        self,
        groups: Groups,
        *,
        scrape: Callable[[RoutedGroup], Awaitable[bytes]],
        gateways: Callable[[], Awaitable[Sequence[bytes]]],
    ) -> None:
        """Args:
        groups: the groups of the deployment.
        scrape: returns the metrics of a group's vLLM; empty if it does not answer.
        gateways: returns the metrics of each gateway process at this address.
        """
        self._groups = groups
        self._scrape, self._gateways = scrape, gateways
        self._histories: dict[int, History] = {}
        self._watches: dict[int, GroupWatch] = {}
        self._scrapes: dict[int, asyncio.Task[None]] = {}
        self._reported: dict[int, EngineFigures] = {}
        """By group, of `figures`."""
        self._closing: set[asyncio.Task[None]] = set()
        self._name = groups.names[0]
        groups.reported = self._note
        self.feed = Feed(self.make, page_event, limit=VIEWERS, idle=self._rest)

    async def close(self) -> None:
        """End all viewers and requests."""
        await self.feed.close()
        self._rest()
        await asyncio.gather(*self._closing)

    def _rest(self) -> None:
        """Stop to follow all groups."""
        for task in self._scrapes.values():
            task.cancel()
        for index in list(self._watches):
            self._drop(index)

    def _drop(self, index: int) -> None:
        task = asyncio.create_task(self._watches.pop(index).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note(self, group: RoutedGroup, status: AgentStatus) -> None:
        self._name = status.deployment
        engine = status.engine
        if group.index in self._histories or status.verdict.health is Health.DEAD or (engine and engine.failures):
            self._histories.setdefault(group.index, History()).note(status)

    async def make(self) -> StatusPage:
        """Return the present document.

        The first document after an idle time waits for the first reports of the groups.
        """
        groups = self._groups.all
        new = [asyncio.ensure_future(watch.heard_once.wait()) for watch in self._follow(groups)]
        now = unix_time()
        for index, group in groups.items():
            if index not in self._scrapes:
                self._scrapes[index] = asyncio.create_task(self._sample(group))
        counting = asyncio.ensure_future(self._gateways())
        await asyncio.wait({counting, *new, *self._scrapes.values()}, timeout=_WAIT_SECONDS)
        for waiting in new:
            waiting.cancel()
        requests = requests_of(counting.result()) if counting.done() and counting.exception() is None else None
        counting.cancel()
        made = tuple(self._group(group, now) for _, group in sorted(groups.items()))
        ready = sum(group.engine.state is Availability.HEALTHY for group in groups.values())
        deployment = PageDeployment(
            key=self._name,
            phase=_phase(ready, made),
            message=self._groups.refusal or self._groups.given_up or "",
            ready=ready,
            wanted=len(made),
            models=self._groups.names,
            dashboard=self._groups.routes.route.dashboard or "",
            requests=requests,
        )
        return StatusPage(source="gateway", time=round(now, 1), deployments=(deployment,), groups=made)

    async def figures(self) -> Figures:
        """Return the figures for the operator, with rates since the call before."""
        groups = {index: group for index, group in self._groups.all.items() if group.engine.alive}
        tasks = {index: asyncio.ensure_future(self._scrape(group)) for index, group in groups.items()}
        counting = asyncio.ensure_future(self._gateways())
        _, late = await asyncio.wait({counting, *tasks.values()}, timeout=_WAIT_SECONDS)
        for task in late:
            task.cancel()
        now, before = time.monotonic(), self._reported
        self._reported = {index: before.get(index, EngineFigures()) for index in groups}
        for index, task in tasks.items():
            known = task.done() and not task.cancelled() and task.exception() is None
            self._reported[index].update(task.result() if known else b"", now)
        counted = counting.done() and not counting.cancelled() and counting.exception() is None
        return Figures(
            requests=requests_of(counting.result() if counted else ()),
            loads={index: one.load for index, one in self._reported.items() if one.load is not None},
        )

    async def _sample(self, group: RoutedGroup) -> None:
        try:
            text = await self._scrape(group) if group.engine.alive else b""
        finally:
            self._scrapes.pop(group.index, None)
        if (watch := self._watches.get(group.index)) is not None:
            watch.figures.update(text, time.monotonic())

    def _follow(self, groups: Mapping[int, RoutedGroup]) -> list[GroupWatch]:
        """Follow exactly these groups; return the watches that are new."""
        places = {index: group.place[0] for index, group in groups.items()}
        for index, watch in list(self._watches.items()):
            if places.get(index) != watch.agent:
                self._drop(index)
        added = {index: agent for index, agent in places.items() if index not in self._watches}
        for index, agent in added.items():
            self._watches[index] = GroupWatch(agent, self._groups.routes.token_key)
        for index in self._histories.keys() - self._groups.all.keys():
            del self._histories[index]
        return [self._watches[index] for index in added]

    def _group(self, group: RoutedGroup, now: float) -> PageGroup:
        watch, status, age = self._watches[group.index], group.report, group.age
        statuses = {one.rank: one for one in watch.members}
        if status is not None:
            statuses[status.rank] = status
        silent = {rank: heard for rank, heard in watch.heard.items() if now - heard > _SILENT_SECONDS}
        if status is not None and age is not None:
            silent.pop(status.rank, None)
            if age > _SILENT_SECONDS:
                silent[status.rank] = now - age
        members = tuple(
            _member(one, silent.get(rank), watch.memory.get(rank)) for rank, one in sorted(statuses.items())
        )
        nodes = {member.rank: member.node for member in members if member.node}
        history = self._histories.get(group.index) or History()
        found = PageGroup(
            deployment=self._name,
            index=group.index,
            phase="Unreachable",
            message=group.engine.given_up or group.refusal or "",
            members=members,
            load=watch.figures.load,
            failures=history.merged(group.failures, nodes),
        )
        if status is None or (status.rank in silent and not group.engine.alive):
            return found
        return found.model_copy(update=_head(status, watch.figures.load, now, given_up=group.engine.given_up))


def _head(status: AgentStatus, load: PageLoad | None, now: float, *, given_up: str | None) -> dict[str, object]:
    """Return the fields of a group that come from its head's status."""
    engine, failure = status.engine, status.verdict.failure
    update: dict[str, object] = {
        "phase": "Failed" if given_up is not None else status.phase.value,
        "since": status.phase_time,
        "incarnation": status.incarnation,
        "verdict": PageVerdict(
            health=status.verdict.health,
            cause=failure.cause if failure is not None else None,
            message=failure.message if failure is not None else "",
        ),
    }
    if engine is None:
        return update
    update |= {
        "generation": engine.generation,
        "ready_since": engine.ready_time if status.verdict.health is Health.HEALTHY else None,
        "memory": engine.memory,
        "kernels": engine.kernels,
    }
    if (budget := engine.budget) is not None:
        restarts = (*budget.restarts, *engine.restarts)
        update["budget"] = PageBudget.of(budget.max_restarts, budget.window_seconds, restarts, now)
    if engine.kv_cache_tokens is not None:
        update["cache"] = PageCache(
            tokens=engine.kv_cache_tokens,
            planned_tokens=engine.kv_planned_tokens,
            concurrency=engine.kv_concurrency or 0.0,
            usage=load.usage if load is not None else None,
        )
    return update


def _member(status: AgentStatus, silent_since: float | None, memory: MemoryUse | None) -> PageMember:
    if memory is not None and memory.available is not None:
        available = round(memory.available / _MEMORY_STEP) * _MEMORY_STEP
        memory = memory.model_copy(update={"available": available})
    return PageMember(
        rank=status.rank,
        node=status.node,
        phase=status.phase.value,
        health=status.verdict.health,
        since=status.phase_time,
        message=status.progress.stage if status.progress is not None else "",
        warnings=status.warnings,
        silent_since=None if silent_since is None else round(silent_since),
        memory=memory,
    )


def _phase(ready: int, groups: Sequence[PageGroup]) -> str:
    """Return a summary of the groups, in the words of the operator's status."""
    if groups and ready == len(groups):
        return "Serving"
    if groups and all(group.phase == "Failed" for group in groups):
        return "Failed"
    died = any(group.failures or group.phase in ("Failed", "Unreachable") for group in groups)
    if ready and died:
        return "Degraded"
    return "Recovering" if died else "Starting"
