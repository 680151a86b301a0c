"""One member as a process: `DecisionLoop` passes events to `agent.decide`, and `Member` runs the resulting actions.

The decisions are in `agent.decide.member`; the work is done by `agent.start` and, where vLLM is started, by
`agent.engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.cleanup import with_retained
from dsv4_runtime.agent.context import AgentContext, run_in_daemon_thread, start_background
from dsv4_runtime.agent.decide import actions as act
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    Crashed,
    Done,
    DrainAsked,
    EngineGone,
    GroupSeen,
    Now,
    Peer,
    ProcessEnded,
    Started,
    StopAsked,
    Task,
    TaskFailed,
    TimerFired,
)
from dsv4_runtime.agent.decide.member import due, step
from dsv4_runtime.agent.decide.state import MemberState, initial
from dsv4_runtime.agent.engine import EngineRunner
from dsv4_runtime.agent.processes import end_everything, reap_orphans
from dsv4_runtime.agent.ray import RayNode
from dsv4_runtime.agent.record import Changes
from dsv4_runtime.agent.standby import Standby
from dsv4_runtime.agent.start import StartRunner
from dsv4_runtime.contract import AgentStatus, Cause, DrainReport, GroupPlan, Phase
from dsv4_runtime.engine.logs import bound
from dsv4_runtime.health.samples import ENGINE_ROLES
from dsv4_runtime.health.vitals import SAMPLE_SECONDS
from dsv4_runtime.util.clock import tick, unix_time
from dsv4_runtime.util.procfs import become_reaper
from dsv4_runtime.weights import store
from dsv4_runtime.weights.members import WeightsServer

_log = logging.getLogger(__name__)

_PEERS_SECONDS = 2.0
_RAY_GRACE = 5.0
_TASKS_SECONDS = 2.0
_LOG_BYTES = 64 << 20
# Late processes (a restarted Ray helper) are found by polling; the end of a watched process is an event.
_REFRESH_SECONDS = 10.0


class DecisionLoop:
    """Loop around the decisions of one member: events, actions and the timer. Created inside a running event loop."""

    def __init__(
        self,
        state: MemberState,
        run: Callable[[act.AgentAction], None],
        view: Callable[[], GroupSeen],
        awake: Callable[[float], float],
    ) -> None:
        """Take functions of the member: `run` runs an action without waiting, `view` returns the latest observation of
        the group, `awake` the end of this agent's latest pause, given the monotonic time."""
        self.state = state
        self._run = run
        self._view = view
        self._awake = awake
        self._events: deque[AgentEvent] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: AgentEvent) -> None:
        """Handle an event, or queue it if a call of `feed` is in progress."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._busy = False
        self._set_timer()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, event: AgentEvent) -> None:
        try:
            self.state, actions = step(self.state, event, self._now())
            for action in actions:
                self._run(action)
        except Exception as error:
            _log.exception("the agent made a mistake")
            if not isinstance(event, Crashed):
                self._events.append(Crashed(f"{type(error).__name__}: {error}"))

    def _now(self) -> Now:
        clock = time.monotonic()
        return Now(clock, unix_time(), self._awake(clock))

    def _set_timer(self) -> None:
        self.close()
        at = due(self.state, self._now())
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._fire)

    def _fire(self) -> None:
        self.feed(self._view())
        self.feed(TimerFired())


class Member:
    """One member: its decisions, their actions, and its HTTP API. Created inside a running event loop."""

    def __init__(self, plan: GroupPlan, rank: int, directory: Path, token: str) -> None:
        def feed(event: AgentEvent) -> None:
            self.loop.feed(event)

        self.context = context = AgentContext(plan, rank, directory, token, feed, self.process_ended)
        self.loop = DecisionLoop(initial(plan, rank), self.act, context.view, context.peers.awake)
        self.share = WeightsServer(plan.weights)
        self.ray = RayNode(context)
        self.standby = Standby(context)
        self.start = StartRunner(context, self.standby, self.ray, self.share)
        self.engine = EngineRunner(context, self.standby) if plan.starts_vllm(rank) else None
        self._runner: web.AppRunner | None = None
        self._background: list[asyncio.Task[None]] = []

    # `http.Reporter`

    def status(self) -> AgentStatus:
        """Return the member's current status."""
        return self.context.status()

    def others(self) -> Mapping[int, Peer]:
        """Return the other members by rank, with their latest answers."""
        return self.context.peers.all

    @property
    def changes(self) -> Changes:
        """Return the notifications of status changes."""
        return self.context.record.changes

    def evidence(self) -> dict[str, object]:
        """Return the evidence on this member; on rank 0 with the samples of the latest verdicts."""
        found = self.context.evidence()
        return found if self.engine is None else {**found, "window": self.engine.watcher.window()}

    def drain(self, seconds: float) -> DrainReport:
        """Start to drain a serving engine within `seconds`, unless it drains already; return the progress."""
        self.loop.feed(DrainAsked(seconds))
        # On other ranks, and for an engine that does not serve, there are no open requests.
        wait = None if self.engine is None else self.engine.drain
        return DrainReport(over=True) if wait is None else wait.report

    # Life cycle

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then end all processes within the plan's grace time."""
        become_reaper()
        app = http.application(self, self.context.token)
        self.share.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._background += [
            start_background(self._maintain_processes()),
            start_background(self._keep_logs_small()),
            start_background(self._sample()),
        ]
        try:
            self.loop.feed(Started())
            await stop.wait()
        finally:
            self.loop.feed(StopAsked())
            self.loop.close()
            for work in self._background:
                work.cancel()
            # A task may wait for a process that waits for a device; its children are ended nevertheless.
            ending = asyncio.create_task(self.context.tasks.close())
            await asyncio.wait({ending, *self._background}, timeout=_TASKS_SECONDS)
            await self._end()
            await self._runner.cleanup()

    def act(self, action: act.AgentAction) -> None:
        """Run an action; one that takes time becomes a task."""
        context, record = self.context, self.context.record
        match action:
            case act.StartTask(task=task):
                context.tasks.start(task, self._work(task))
            case act.Stop(tasks=tasks):
                context.tasks.stop(tasks)
                if Task.STANDBY in tasks:
                    self.standby.release()
            case act.Enter(phase=phase, stage=doing):
                record.enter(phase, doing)
            case act.ReportJoined(joined=joined):
                record.joined = joined
            case act.RecordFailure(failure=failure):
                record.record_failure(failure)
            case act.FollowGeneration(generation=generation):
                record.follow(generation)
                context.exit_causes.forget()
                context.vitals.forget()
            case act.FindProcesses():
                context.watch.refresh()
            case act.KillEngine():
                context.kill_engine()
                ended = self.engine is None or self.engine.kill()
                if ended and not ENGINE_ROLES & set(context.watch.roles.values()):
                    self.loop.feed(EngineGone())
            case act.SweepSharedMemory():
                self._background.append(start_background(context.sweep()))
            case act.ReleaseWeights(cause=cause):
                self._release_weights(cause)
            case act.DoubtWeights(why=why):
                _log.warning("the weights are read again before the next start: %s", why)
                record.weights_doubted = why
                record.changes.notify()
                store.request_recheck(Path(context.plan.weights.path), why)
            case act.ReportVerified(right=right):
                record.weights_verified = right
                if right:
                    store.clear_recheck(Path(context.plan.weights.path))
                record.changes.notify()
            case act.StopChildren():
                self._background.append(start_background(self._stop_children()))
            case act.Exit(message=message):
                raise SystemExit(message)
            case _:
                assert self.engine is not None  # noqa: S101  (the other actions need vLLM on this member)
                self.engine.act(action)

    def _release_weights(self, cause: Cause) -> None:
        if self.context.keeper is not None:
            # Not in the event loop: the driver of a broken GPU may not answer.
            drop = run_in_daemon_thread(self.context.keeper.drop, f"after {cause}")
            self._background.append(start_background(drop))

    def _work(self, task: Task) -> Coroutine[Any, Any, AgentEvent]:
        match task:
            case Task.LISTEN:
                return self._listen()
            case Task.CLEAR:
                assert self.engine is not None  # noqa: S101  (see `act`)
                return self.engine.clear()
        return self.start.work(task)

    def process_ended(self, role: str, pid: int) -> None:
        """Feed the end of a watched process, with its explanation from logs and kernel counters."""
        _log.info("%s (process %s) ended", role, pid)
        if role in ("raylet", "gcs"):
            self.ray.process_ended(role)
            return
        if self.engine is not None:
            self.engine.read_log()
        ordered = self.context.exit_causes.ordered_to_end(pid) if role == "worker" else None
        explained = None if ordered and self.context.rank else self.context.exit_causes.explain()
        self.loop.feed(ProcessEnded(role, ordered, explained))

    async def _listen(self) -> AgentEvent:
        assert self._runner is not None  # noqa: S101  (set before the first event)
        me = self.context.me
        try:
            await web.TCPSite(self._runner, me.address, me.ports.agent).start()
        except OSError as error:
            return TaskFailed(Task.LISTEN, Cause.UNKNOWN, f"the agent cannot listen: {error}", "exit")
        self._background += [start_background(self.context.peers.run()), start_background(self._follow_peers())]
        return Done(Task.LISTEN)

    # Background work

    async def _follow_peers(self) -> None:
        """Feed an observation of the group after every answer of another member."""
        while True:
            await self.context.peers.changed(_PEERS_SECONDS)
            self.loop.feed(self.context.view())

    async def _maintain_processes(self) -> None:
        """Reap orphans, renew the keeper's socket, follow Ray's log, and watch processes that started late."""
        context, refreshed = self.context, 0.0
        while True:
            await tick(1.0)
            with _log_errors("the processes could not be maintained"):
                reap_orphans(frozenset(child.pid for child in context.children))
                if context.keeper is not None:
                    context.keeper.renew()
                if context.record.joined:
                    context.tails["ray"].read()
                if context.record.joined and time.monotonic() - refreshed > _REFRESH_SECONDS:
                    refreshed = time.monotonic()
                    context.watch.refresh()

    async def _keep_logs_small(self) -> None:
        """Bound every log. Copying half of a log may block on the disk, so it runs outside the event loop."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            for name in ("agent", *self.context.tails):
                with _log_errors(f"{name}.log could not be bounded"):
                    await run_in_daemon_thread(bound, self.context.directory / f"{name}.log", _LOG_BYTES)

    async def _sample(self) -> None:
        """Sample the member's signals, for the rules on this member and on the head."""
        context = self.context
        while True:
            now = time.monotonic()
            silences = {rank: context.peers.silence(rank, now) for rank in context.peers.all}
            silent = {rank: silence for rank, silence in silences.items() if silence is not None}
            try:
                context.record.signals = with_retained(context.vitals.sample(context.roles(), silent), context.keeper)
                context.record.warn(context.vitals.warnings)
            except OSError as error:
                _log.warning("the signals could not be sampled, which is tried again: %s", error)
                if (known := context.record.signals) is not None:
                    # An old sample shows no lack of progress.
                    context.record.signals = known.model_copy(update={"idle": None, "stagnant": None})
            context.sampled.notify()
            self.loop.feed(context.view())
            await tick(SAMPLE_SECONDS)

    # Shutdown

    async def _stop_children(self) -> None:
        """End the children, the latest first: vLLM before its Ray node."""
        for child in reversed(self.context.children):
            await child.end(_RAY_GRACE if child.name == "ray" else 2.0)

    async def _end(self) -> None:
        """End all processes within the plan's grace time, and close all files."""
        context, drain = self.context, self.context.plan.timeouts.drain
        deadline = time.monotonic() + drain
        context.watch.close()
        self.ray.close()
        if context.fabric is not None:
            context.fabric.close()
        try:
            async with asyncio.timeout(max(1.0, drain - 2.0)):
                await self._stop_children()
        except TimeoutError:
            _log.warning("children did not end in time; killing the remaining processes")
        if not await end_everything(deadline):
            _log.error("some processes could not be killed")
        await context.sweep()
        if context.keeper is not None:
            context.keeper.close()
        context.vitals.close()
        context.exit_causes.close()
        if self.engine is not None:
            self.engine.close()
        for tail in context.tails.values():
            tail.close()
        context.record.enter(Phase.STOPPED)


@contextlib.contextmanager
def _log_errors(failed: str) -> Iterator[None]:
    """Log an `OSError` of one pass, such as a full disk or no free descriptor; the next pass tries again."""
    try:
        yield
    except OSError:
        _log.exception("%s, which is tried again", failed)
