"""A member's life from Preflight to Stopped; what rank 0 does beyond it is in `head`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.aside import aside
from dsv4_runtime.agent.clear import ENGINE_ROLES
from dsv4_runtime.agent.evidence import memory
from dsv4_runtime.agent.peers import POLL_SECONDS, Peer, Peers
from dsv4_runtime.agent.preflight import PreflightError, preflight
from dsv4_runtime.agent.processes import (
    Child,
    ProcessWatch,
    become_reaper,
    end_everything,
    reap_orphans,
)
from dsv4_runtime.agent.ray_node import RayNode
from dsv4_runtime.agent.shm import sweep
from dsv4_runtime.agent.staging import StagingError, prepare_page_cache, stage
from dsv4_runtime.agent.state import Changes, State
from dsv4_runtime.contract import AgentStatus, Cause, DrainReport, FabricStatus, Failure, GroupPlan, Phase, Progress
from dsv4_runtime.engine.logs import LogTail, bound
from dsv4_runtime.fabric.member import FabricError, MemberFabric
from dsv4_runtime.health.causes import Killers
from dsv4_runtime.health.ticks import tick
from dsv4_runtime.health.vitals import Vitals
from dsv4_runtime.weights.job import News
from dsv4_runtime.weights.share import Share

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
SAMPLE_SECONDS = 0.5
_RAY_GRACE = 5.0
_LOG_BYTES = 64 << 20
# Processes that come late (a restarted Ray helper) are found by looking; deaths need no looking.
_REFRESH_SECONDS = 10.0
_ENDED = frozenset({Phase.FAILED, Phase.STOPPED})
_ENGINE_PHASES = frozenset({Phase.LOADING, Phase.WARMING, Phase.SERVING, Phase.RESTARTING})


class MemberFailed(Exception):
    """This member cannot go on; only a new incarnation helps."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Member:
    """One member: its children, its state, its HTTP API. Made inside a running event loop."""

    def __init__(self, plan: GroupPlan, rank: int, directory: Path, token: str) -> None:
        self.plan = plan
        self.rank = rank
        self.me = plan.members[rank]
        self.directory = directory
        self.evidence_root = directory / "evidence"
        self.token = token
        self.state = State(plan, rank)
        self.share = Share(plan.weights)
        self._born = time.time()
        self.peers = Peers(plan, rank, token)
        self.vitals = Vitals(gpus=plan.health.gpus, uuids=self.me.gpus)
        self.sampled = Changes()
        """Tells of every sample of this member's signals."""
        self.killers = Killers(directory / "ray" / "session_latest" / "logs")
        self.tails = {"ray": LogTail(directory / "ray.log")}
        self.children: list[Child] = []
        self.watch = ProcessWatch(self._process_ended)
        self.ray = RayNode(self.me, plan.head, self.tails["ray"])
        # The directory of the Python that runs the agent comes first: Ray starts `python` and `ninja` by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self.env = {**os.environ, "PATH": path, **plan.environment(rank)}
        self.fabric = MemberFabric(plan, plan.fabric, rank, token) if plan.fabric is not None else None

    # What the HTTP API reads.

    def status(self) -> AgentStatus:
        """The member's status now."""
        self.state.processes = {os.getpid(): "agent", **self.watch.roles}
        for child in self.children:
            if child.running:
                self.state.processes[child.pid] = child.name
        status = self.state.status()
        return status if self.fabric is None else status.model_copy(update={"fabric": self.fabric.status})

    def others(self) -> Mapping[int, Peer]:
        """The other members by rank, as they were last heard."""
        return self.peers.all

    @property
    def changes(self) -> Changes:
        """Tells of changes to the status that watchers want to hear of at once."""
        return self.state.changes

    def evidence(self) -> dict[str, object]:
        """First fatal lines and last lines of every log."""
        return {
            "firstFatal": {name: tail.first_fatal[0] for name, tail in self.tails.items() if tail.first_fatal},
            "lastLines": {name: list(tail.last) for name, tail in self.tails.items()},
            "memory": memory(),
            "status": self.status().to_dict(),
        }

    def drain(self, seconds: float) -> DrainReport:
        """Not rank 0: no engine answers here, so there is nothing to wait for."""
        return DrainReport(over=True)

    # Life.

    async def run(self, stop: asyncio.Event) -> None:
        """Live until `stop` is set, then end everything within the plan's grace time."""
        become_reaper()
        app = http.application(self, self.token)
        self.share.add_to(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        chores = [_chore(self._keep_house()), _chore(self._keep_logs_small()), _chore(self._sample())]
        life = asyncio.create_task(self._live(runner, chores))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await stopped
        finally:
            for task in (life, stopped, *chores):
                task.cancel()
            await asyncio.gather(life, stopped, *chores, return_exceptions=True)
            await self._drain()
            await runner.cleanup()

    async def _live(self, runner: web.AppRunner, chores: list[asyncio.Task[None]]) -> None:
        """Everything up to a failure; afterwards the agent only answers questions."""
        try:
            await self._guard(self._preflight())
            # Only now is the address known to be there.
            await web.TCPSite(runner, self.me.address, self.me.ports.agent).start()
            chores.append(_chore(self.peers.run()))
            await self._guard(self._stage_and_prove())
            chores.append(asyncio.create_task(prepare_page_cache(self.plan, self.rank, self._read_ahead)))
            await self._guard(self._join())
            await self._guard(self.work())
        except MemberFailed as error:
            if error.failure not in self.state.failures:
                self.state.died(error.failure)
            self._fail(error.failure.message)
            await self._stop_children()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("the agent made a mistake")
            self.state.died(self.failure(Cause.UNKNOWN, f"{type(error).__name__}: {error}", "exit"))
            self._fail(str(error))
            await self._stop_children()
        if not runner.sites:
            # Failed before it was clear that the agent can listen. If it cannot, its end says what its answers would.
            try:
                await web.TCPSite(runner, self.me.address, self.me.ports.agent).start()
            except OSError as error:
                raise SystemExit(f"the agent cannot listen: {error}") from error

    def _fail(self, message: str) -> None:
        """Say so before anything else is ended, which may take long: whoever decides what follows need not wait."""
        self.state.joined = False
        self.state.enter(Phase.FAILED, message)

    async def work(self) -> None:
        """Joined, not rank 0: follow the head's phases until the group ends."""
        while True:
            await self.peers.changed(TICK_SECONDS)
            self._mourn_head()
            head = self.peers.all[0].status
            if head is None or head.engine is None:
                continue
            if head.engine.generation != self.state.generation:
                self.state.follow(head.engine.generation)
                self.killers.forget()
                self.vitals.forget()
                await self.sweep()
            if head.phase in _ENGINE_PHASES:
                # Several times a second: what is no news is not told again, nor are its processes looked for.
                news = head.phase is not self.state.phase
                if news:
                    self.state.enter(head.phase)
                heard = self.peers.all[0].heard or 0.0
                if head.phase is Phase.RESTARTING and time.monotonic() - heard < 2 * POLL_SECONDS:
                    # Only on fresh news: the next engine's worker must not be taken for the last one's.
                    self.watch.refresh()
                    self.end_engine()
                if news and head.phase is Phase.SERVING:
                    self.watch.refresh()

    def end_engine(self) -> None:
        """Kill the watched processes of a dead engine here. Ray asks its actors to end; stopped ones do not hear."""
        for pid, role in self.watch.roles.items():
            if role in ENGINE_ROLES:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()

    def _mourn_head(self) -> None:
        """A head that cannot be heard may be cut off from the operator too, so its members say that it is lost."""
        silence = self.peers.silence(0, time.monotonic())
        if silence is not None and silence >= self.plan.health.link_lost:
            message = f"rank 0 was last heard {silence:.1f} s ago, by heartbeat or answer"
            lost = self.failure(Cause.NODE_LOST, message, "link")
            raise MemberFailed(lost.model_copy(update={"culprit_rank": 0}))

    def process_ended(self, role: str, pid: int) -> None:
        """Not rank 0: a watched process ended. A worker's end matters while the engine should be running."""
        if role != "worker" or self.state.phase not in (Phase.LOADING, Phase.WARMING, Phase.SERVING):
            return
        if self.killers.ordered(pid):
            # No death of this member's: the head sees the one that it follows from, in its own processes.
            _log.info("the Ray worker of rank %s was told to end", self.rank)
            return
        self.state.died(self.ended(Cause.RAY_WORKER_DIED, f"the Ray worker of rank {self.rank} ended"))

    def ended(self, cause: Cause, what: str) -> Failure:
        """An engine process of this member that has just ended; `cause` unless something here explains its end."""
        killer = self.killers.who()
        if killer is not None:
            cause, what = killer[0], f"{what}: {killer[1]}"
        return self.failure(cause, what, "process", engine=True)

    async def sweep(self) -> None:
        """Remove shared memory that an engine's death left behind on this member."""
        if removed := await asyncio.to_thread(sweep, self._born):
            _log.info("removed %s files of shared memory that nobody used any more", len(removed))

    def failure(self, cause: Cause, message: str, by: str, *, engine: bool = False) -> Failure:
        """A death on this member, now."""
        return Failure(
            time=time.time(),
            cause=cause,
            culprit_rank=self.rank,
            message=message[:1024],
            detected_by=by,
            generation=self.state.generation if engine else None,
        )

    async def start_child(self, name: str, command: list[str]) -> Child:
        """Start a child that logs to `<name>.log` in the member's directory."""
        log = "vllm" if name == "api" else name
        child = await Child.start(name, command, self.env, self.directory / f"{log}.log")
        self.children.append(child)
        return child

    async def _guard(self, step: Coroutine[None, None, None]) -> None:
        """Run a step of the life, ended early by the loss of this member's Ray node."""
        task = asyncio.create_task(step)
        either: set[asyncio.Future[Any]] = {task, self.ray.lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.ray.lost.done():
                loss = self.ray.lost.result()
                raise MemberFailed(self.failure(loss.cause, loss.message, loss.detected_by))
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _preflight(self) -> None:
        self.state.enter(Phase.PREFLIGHT, "checking the member")
        try:
            await preflight(self.plan, self.rank, self.fabric)
        except PreflightError as error:
            raise MemberFailed(self.failure(error.cause, str(error), "preflight")) from error

    async def _stage_and_prove(self) -> None:
        """Both at once: a broken network shows while the weights are still on their way."""
        tasks = [asyncio.create_task(self._stage()), asyncio.create_task(self._prove())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self) -> None:
        """Prove the network, then give Ray and vLLM the environment that goes with it."""
        if self.fabric is None:
            return
        try:
            await self.fabric.prove(self._fabrics)
            for variable in self.fabric.variables:
                _log.info("%s=%s: %s", variable.name, variable.value, variable.reason)
            found = {variable.name: variable.value for variable in self.fabric.variables}
            # What the plan says wins: the user may know better.
            self.env = {**self.env, **found, **self.plan.environment(self.rank)}
            await self.fabric.measure(self._fabrics, self.start_child, self.directory / "fabric.log")
        except FabricError as error:
            raise MemberFailed(self.failure(error.cause, str(error), "preflight")) from error
        self.children = [child for child in self.children if child.running]

    def _fabrics(self) -> dict[int, FabricStatus | None]:
        return {rank: peer.status.fabric if peer.status else None for rank, peer in self.peers.all.items()}

    async def _stage(self) -> None:
        self.state.enter(Phase.STAGING, "checking the weights")
        try:
            async with asyncio.timeout(self.plan.timeouts.staging):
                await stage(self.plan, self.rank, self.token, self._staging)
        except TimeoutError:
            message = f"the weights were not there after {self.plan.timeouts.staging:.0f} s"
            raise MemberFailed(self.failure(Cause.STAGING_FAILED, message, "timeout")) from None
        except StagingError as error:
            raise MemberFailed(self.failure(error.cause, str(error), "staging")) from error

    def _staging(self, news: News) -> None:
        self.share.heard(news)
        if news.stage is not None:
            self.state.advance(Progress(stage=news.stage, percent=news.percent))

    def _read_ahead(self, news: News) -> None:
        self.state.disk_rate = news.disk_bytes_per_second or self.state.disk_rate

    async def _join(self) -> None:
        self.state.enter(Phase.JOINING, "starting Ray")
        bound = self.plan.timeouts.formation
        try:
            async with asyncio.timeout(bound):
                await self.ray.start(self.start_child)
                self.state.joined = True
                self.state.enter(Phase.JOINING, "waiting for the other members")
                self.watch.refresh()
                while not all(peer.usable for peer in self.peers.all.values()):
                    await self.peers.changed(TICK_SECONDS)
        except TimeoutError:
            missing = [rank for rank, peer in self.peers.all.items() if not peer.usable]
            who = f"rank {', '.join(map(str, missing))} did not join" if missing else "Ray did not start"
            raise MemberFailed(
                self.failure(Cause.FORMATION_TIMEOUT, f"{who} within {bound:.0f} s", "timeout")
            ) from None

    def _process_ended(self, role: str, pid: int) -> None:
        _log.info("%s (process %s) ended", role, pid)
        if self.state.phase in _ENDED:
            return
        if role in ("raylet", "gcs"):
            self.ray.process_ended(role)
        else:
            self.process_ended(role, pid)

    async def _keep_house(self) -> None:
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
                _log.exception("the house could not be kept, which is tried again")

    async def _keep_logs_small(self) -> None:
        """Copying half of a log takes a disk its time: the next look waits for it, and nobody else does."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            for name in ("agent", *self.tails):
                await aside(bound, self.directory / f"{name}.log", _LOG_BYTES)

    async def _sample(self) -> None:
        """Keep the member's signals fresh, for its own rules and for the head's."""
        while True:
            now = time.monotonic()
            heard = {rank: self.peers.silence(rank, now) for rank in self.peers.all}
            roles = {**self.watch.roles, **{child.pid: child.name for child in self.children if child.running}}
            silent = {rank: silence for rank, silence in heard.items() if silence is not None}
            try:
                self.state.signals = self.vitals.sample(roles, silent)
            except OSError:
                _log.exception("the signals could not be sampled, which is tried again")
            self.sampled.tell()
            await tick(SAMPLE_SECONDS)

    # Ends.

    async def _stop_children(self) -> None:
        """End the children, the latest first: vLLM before the Ray node that it runs on."""
        for child in reversed(self.children):
            await child.end(_RAY_GRACE if child.name == "ray" else 2.0)

    async def _drain(self) -> None:
        """End everything that was started, within the plan's grace time."""
        self.state.enter(Phase.DRAINING, "ending everything")
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
        self.killers.close()
        for tail in self.tails.values():
            tail.close()
        self.state.enter(Phase.STOPPED)


def _chore(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Work beside the life; nobody waits for it, so its mistakes are logged."""

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the agent made a mistake", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(tell)
    return task
