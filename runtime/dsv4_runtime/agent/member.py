"""One member as a process: it tells `agent.decide` what happens, and does what that decides.

What is decided when is in `agent.decide.member`; the work is done by `agent.start` and, on rank 0, `agent.engine`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.aside import aside
from dsv4_runtime.agent.clear import ENGINE_ROLES
from dsv4_runtime.agent.decide import actions as act
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    Done,
    DrainAsked,
    EngineGone,
    GroupSeen,
    ProcessEnded,
    Started,
    StopAsked,
    Task,
    TaskFailed,
)
from dsv4_runtime.agent.decide.peer import Peer
from dsv4_runtime.agent.decide.state import initial
from dsv4_runtime.agent.engine import EngineRunner
from dsv4_runtime.agent.evidence import memory
from dsv4_runtime.agent.loop import Loop, Tasks
from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.agent.processes import Child, ProcessWatch, become_reaper, end_everything, reap_orphans
from dsv4_runtime.agent.ray_node import RayNode
from dsv4_runtime.agent.shm import sweep
from dsv4_runtime.agent.sockets import sweep_sockets
from dsv4_runtime.agent.standby import BRAKE, Standby
from dsv4_runtime.agent.start import StartRunner
from dsv4_runtime.agent.state import Changes, MemberRecord
from dsv4_runtime.contract import AgentStatus, Cause, DrainReport, GroupPlan, Phase
from dsv4_runtime.contract.secrets import is_secret_name
from dsv4_runtime.engine.logs import LogTail, bound
from dsv4_runtime.fabric.member import MemberFabric
from dsv4_runtime.health.causes import ExitCauses
from dsv4_runtime.health.ticks import tick
from dsv4_runtime.health.vitals import SAMPLE_SECONDS, Vitals
from dsv4_runtime.weights import store
from dsv4_runtime.weights.server import WeightsServer

_log = logging.getLogger(__name__)

_PEERS_SECONDS = 2.0
_RAY_GRACE = 5.0
_LOG_BYTES = 64 << 20
# Processes that come late (a restarted Ray helper) are found by looking; deaths need no looking.
_REFRESH_SECONDS = 10.0


class Member:
    """One member: its children, its state, its HTTP API. Made inside a running event loop."""

    def __init__(self, plan: GroupPlan, rank: int, directory: Path, token: str) -> None:
        self.plan = plan
        self.rank = rank
        self.me = plan.members[rank]
        self.directory = directory
        self.evidence_root = directory / "evidence"
        self.token = token
        self.state = MemberRecord(plan, rank)
        self.share = WeightsServer(plan.weights)
        self._born = time.time()
        self.peers = Peers(plan, rank, token)
        self.loop = Loop(initial(plan, rank), self.act, self._view, self.peers.awake)
        self.tasks = Tasks(self.loop.feed)
        self.vitals = Vitals(gpus=plan.health.gpus, uuids=self.me.gpus)
        self.sampled = Changes()
        """Tells of every sample of this member's signals."""
        self.exit_causes = ExitCauses(directory / "ray" / "session_latest" / "logs")
        self.tails = {"ray": LogTail(directory / "ray.log")}
        self.children: list[Child] = []
        self.watch = ProcessWatch(self.process_ended)
        self.ray = RayNode(self.me, plan.head, self.tails["ray"], self.loop.feed)
        # The directory of the Python that runs the agent comes first: Ray starts `python` and `ninja` by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self.temporary = directory / "tmp"
        """Directory where children make what they do not keep: it goes with the member's directory."""
        self.standby = Standby(self)
        own = {"PATH": path, "TMPDIR": str(self.temporary), BRAKE: str(self.standby.brake)}
        # The engine has its weights already: what fetched them is not for it to know.
        inherited = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
        self.env = {**inherited, **own, **plan.environment(rank)}
        self.fabric = MemberFabric(plan, plan.fabric, rank, token) if plan.fabric is not None else None
        self.start = StartRunner(self)
        self.engine = EngineRunner(self) if rank == 0 else None
        self._runner: web.AppRunner | None = None
        self._background: list[asyncio.Task[None]] = []

    # What the HTTP API reads and asks for.

    def status(self) -> AgentStatus:
        """Return the member's status now."""
        self.state.processes = {os.getpid(): "agent", **self.roles()}
        status = self.state.status()
        return status if self.fabric is None else status.model_copy(update={"fabric": self.fabric.status})

    def others(self) -> Mapping[int, Peer]:
        """Return the other members by rank, as they were last heard."""
        return self.peers.all

    @property
    def changes(self) -> Changes:
        """Return what tells of changes to the status that watchers want to hear of at once."""
        return self.state.changes

    def evidence(self) -> dict[str, object]:
        """Return first fatal lines and last lines of every log; on rank 0 the samples of the latest verdicts too."""
        found: dict[str, object] = {
            "firstFatal": {name: tail.first_fatal[0] for name, tail in self.tails.items() if tail.first_fatal},
            "lastLines": {name: list(tail.last) for name, tail in self.tails.items()},
            "memory": memory(),
            "status": self.status().to_dict(),
        }
        return found if self.engine is None else {**found, "window": self.engine.watcher.seen()}

    def drain(self, seconds: float) -> DrainReport:
        """Have a serving engine finish its open requests, within `seconds` of the first time that this is asked."""
        self.loop.feed(DrainAsked(seconds))
        # Other ranks, and an engine that does not serve: nothing answers here, so there is nothing to wait for.
        finishing = None if self.engine is None else self.engine.drain
        return DrainReport(over=True) if finishing is None else finishing.report

    # Life.

    async def run(self, stop: asyncio.Event) -> None:
        """Live until `stop` is set, then end everything within the plan's grace time."""
        become_reaper()
        app = http.application(self, self.token)
        self.share.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._background += [
            _in_background(self._look_after_processes()),
            _in_background(self._keep_logs_small()),
            _in_background(self._sample()),
        ]
        try:
            self.loop.feed(Started())
            await stop.wait()
        finally:
            self.loop.feed(StopAsked())
            self.loop.close()
            for work in self._background:
                work.cancel()
            await asyncio.gather(self.tasks.close(), *self._background, return_exceptions=True)
            await self._end()
            await self._runner.cleanup()

    def act(self, action: act.AgentAction) -> None:
        """Do what was decided; what takes time becomes a task."""
        match action:
            case act.StartTask(task=task):
                self.tasks.start(task, self._work(task))
            case act.Stop(tasks=tasks):
                self.tasks.stop(tasks)
                if Task.STANDBY in tasks:
                    self.standby.release()
            case act.Enter(phase=phase, stage=doing):
                self.state.enter(phase, doing)
            case act.ReportJoined(joined=joined):
                self.state.joined = joined
            case act.RecordFailure(failure=failure):
                self.state.record_failure(failure)
            case act.FollowGeneration(generation=generation):
                self.state.follow(generation)
                self.exit_causes.forget()
                self.vitals.forget()
            case act.FindProcesses():
                self.watch.refresh()
            case act.KillEngine():
                self.kill_engine()
                if not ENGINE_ROLES & set(self.watch.roles.values()):
                    self.loop.feed(EngineGone())
            case act.SweepSharedMemory():
                self._background.append(_in_background(self.sweep()))
            case act.DoubtWeights(why=why):
                _log.warning("the weights are read again before the next start: %s", why)
                self.state.weights_doubted = why
                self.state.changes.tell()
                store.request_recheck(Path(self.plan.weights.path), why)
            case act.ReportVerified(right=right):
                self.state.weights_verified = right
                if right:
                    store.clear_recheck(Path(self.plan.weights.path))
                self.state.changes.tell()
            case act.StopChildren():
                self._background.append(_in_background(self._stop_children()))
            case act.Exit(message=message):
                raise SystemExit(message)
            case _:
                assert self.engine is not None  # noqa: S101  (rank 0 alone is told such things)
                self.engine.act(action)

    def _work(self, task: Task) -> Coroutine[Any, Any, AgentEvent]:
        match task:
            case Task.LISTEN:
                return self._listen()
            case Task.CLEAR:
                assert self.engine is not None  # noqa: S101  (see `act`)
                return self.engine.clear()
        return self.start.work(task)

    def _view(self) -> GroupSeen:
        return GroupSeen(dict(self.peers.all), self.state.signals, self.state.disk_rate)

    def process_ended(self, role: str, pid: int) -> None:
        """Tell what the kernel said: a watched process has ended. What explains that is read first."""
        _log.info("%s (process %s) ended", role, pid)
        if role in ("raylet", "gcs"):
            self.ray.process_ended(role)
            return
        if self.engine is not None:
            self.engine.read_log()
        told = self.exit_causes.told_to_end(pid) if role == "worker" else None
        explained = None if told and self.rank else self.exit_causes.explain()
        self.loop.feed(ProcessEnded(role, told, explained))

    def roles(self) -> dict[int, str]:
        """Return process id to role of everything watched and every child that runs."""
        return {**self.watch.roles, **{child.pid: child.name for child in self.children if child.running}}

    def kill_engine(self) -> None:
        """Kill the watched processes of a dead engine here. Ray asks its actors to end; stopped ones do not hear."""
        self.watch.kill(ENGINE_ROLES)

    async def sweep(self) -> None:
        """Remove shared memory and sockets that an engine's death left behind on this member."""
        if removed := await asyncio.to_thread(sweep, self._born):
            _log.info("removed %s files of shared memory that nobody used any more", len(removed))
        if sockets := await asyncio.to_thread(sweep_sockets, self.temporary):
            _log.info("removed %s sockets that nobody used any more", len(sockets))

    async def start_child(self, name: str, command: list[str], *, fed: bool = False, log: str | None = None) -> Child:
        """Start a child that logs to `<log>.log` in the member's directory, by default `<name>.log`."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        child = await Child.start(name, command, self.env, self.directory / f"{log or name}.log", fed=fed)
        self.children.append(child)
        return child

    async def _listen(self) -> AgentEvent:
        assert self._runner is not None  # noqa: S101  (set before anything is decided)
        try:
            await web.TCPSite(self._runner, self.me.address, self.me.ports.agent).start()
        except OSError as error:
            return TaskFailed(Task.LISTEN, Cause.UNKNOWN, f"the agent cannot listen: {error}", "exit")
        self._background += [_in_background(self.peers.run()), _in_background(self._follow_peers())]
        return Done(Task.LISTEN)

    # In the background.

    async def _follow_peers(self) -> None:
        """Tell of every answer of another member."""
        while True:
            await self.peers.changed(_PEERS_SECONDS)
            self.loop.feed(self._view())

    async def _look_after_processes(self) -> None:
        """Reap orphans, follow Ray's log, look for watched processes that came late."""
        looked = 0.0
        while True:
            await tick(1.0)
            reap_orphans(frozenset(child.pid for child in self.children))
            try:
                if self.state.joined:
                    self.tails["ray"].read()
                if self.state.joined and time.monotonic() - looked > _REFRESH_SECONDS:
                    looked = time.monotonic()
                    self.watch.refresh()
            except OSError:
                _log.exception("the processes could not be looked after, which is tried again")

    async def _keep_logs_small(self) -> None:
        """Bound every log. Copying half of one takes a disk its time: the next look waits for it, nobody else does."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            for name in ("agent", *self.tails):
                await aside(bound, self.directory / f"{name}.log", _LOG_BYTES)

    async def _sample(self) -> None:
        """Keep the member's signals fresh, for its own rules and for the head's."""
        while True:
            now = time.monotonic()
            heard = {rank: self.peers.silence(rank, now) for rank in self.peers.all}
            silent = {rank: silence for rank, silence in heard.items() if silence is not None}
            try:
                self.state.signals = self.vitals.sample(self.roles(), silent)
            except OSError:
                _log.exception("the signals could not be sampled, which is tried again")
            self.sampled.tell()
            self.loop.feed(self._view())
            await tick(SAMPLE_SECONDS)

    # Ends.

    async def _stop_children(self) -> None:
        """End the children, the latest first: vLLM before the Ray node that it runs on."""
        for child in reversed(self.children):
            await child.end(_RAY_GRACE if child.name == "ray" else 2.0)

    async def _end(self) -> None:
        """End everything that was started, within the plan's grace time."""
        deadline = time.monotonic() + self.plan.timeouts.drain
        self.watch.close()
        if self.fabric is not None:
            self.fabric.close()
        try:
            async with asyncio.timeout(max(1.0, self.plan.timeouts.drain - 2.0)):
                await self._stop_children()
        except TimeoutError:
            _log.warning("children did not end in time, killing what is left")
        if not await end_everything(deadline):
            _log.error("some processes could not be killed")
        await self.sweep()
        self.vitals.close()
        self.exit_causes.close()
        if self.engine is not None:
            self.engine.close()
        for tail in self.tails.values():
            tail.close()
        self.state.enter(Phase.STOPPED)


def _in_background(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Work beside the decisions; nobody waits for it, so its mistakes are logged."""

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the agent made a mistake", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(tell)
    return task
