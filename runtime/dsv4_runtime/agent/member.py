"""A member's life from Preflight to Stopped; what rank 0 does beyond it is in `head`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.peers import Peers
from dsv4_runtime.agent.preflight import PreflightError, preflight
from dsv4_runtime.agent.processes import (
    Child,
    ProcessWatch,
    become_reaper,
    describe_exit,
    end_everything,
    reap_orphans,
)
from dsv4_runtime.agent.shm import sweep
from dsv4_runtime.agent.staging import StagingError, stage
from dsv4_runtime.agent.state import State
from dsv4_runtime.contract import AgentStatus, Cause, Failure, GroupPlan, Phase, Role
from dsv4_runtime.engine.commands import ray_command
from dsv4_runtime.engine.logs import RAY_STARTED, LogTail, fatal

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
_RAY_GRACE = 5.0
# Processes that come late (a restarted Ray helper) are found by looking; deaths need no looking.
_REFRESH_SECONDS = 5.0
_ENDED = frozenset({Phase.FAILED, Phase.DRAINING, Phase.STOPPED})
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
        self.token = token
        self.state = State(plan, rank)
        self._born = time.time()
        self.peers = Peers(plan, [member.rank for member in plan.members if member.rank != rank], token)
        self.tails = {"ray": LogTail(directory / "ray.log")}
        self.first_fatal: dict[str, str] = {}
        self.children: list[Child] = []
        self.watch = ProcessWatch(self._process_ended)
        self._lost: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        # The directory of the Python that runs the agent comes first: Ray starts `python` and `ninja` by name.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self.env = {**os.environ, "PATH": path, **plan.environment(rank)}

    # What the HTTP API reads.

    def status(self) -> AgentStatus:
        """The member's status now."""
        self.state.processes = {os.getpid(): "agent", **self.watch.roles}
        for child in self.children:
            if child.running:
                self.state.processes[child.pid] = child.name
        return self.state.status()

    def evidence(self) -> dict[str, object]:
        """First fatal lines and last lines of every log."""
        return {
            "firstFatal": self.first_fatal,
            "lastLines": {name: list(tail.last) for name, tail in self.tails.items()},
            "status": self.status().to_dict(),
        }

    # Life.

    async def run(self, stop: asyncio.Event) -> None:
        """Live until `stop` is set, then end everything within the plan's grace time."""
        become_reaper()
        runner = web.AppRunner(http.application(self, self.token), access_log=None)
        await runner.setup()
        chores = [asyncio.create_task(self._keep_house())]
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
            chores.append(asyncio.create_task(self.peers.run()))
            await self._guard(self._stage())
            await self._guard(self._join())
            await self._guard(self.work())
        except MemberFailed as error:
            if error.failure not in self.state.failures:
                self.state.died(error.failure)
            await self._stop_children()
            self.state.joined = False
            self.state.enter(Phase.FAILED, error.failure.message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("the agent made a mistake")
            self.state.died(self.failure(Cause.UNKNOWN, f"{type(error).__name__}: {error}", "exit"))
            await self._stop_children()
            self.state.enter(Phase.FAILED, str(error))
        if not runner.sites:
            # Failed before it was clear that the agent can listen. If it cannot, its end says what its answers would.
            try:
                await web.TCPSite(runner, self.me.address, self.me.ports.agent).start()
            except OSError as error:
                raise SystemExit(f"the agent cannot listen: {error}") from error

    async def work(self) -> None:
        """Joined, not rank 0: follow the head's phases until the group ends."""
        while True:
            await self.peers.changed(2.0)
            head = self.peers.all[0].status
            if head is None or head.engine is None:
                continue
            if head.engine.generation != self.state.generation:
                self.state.generation = head.engine.generation
                self.state.failure = None
                await self.sweep()
            if head.phase in _ENGINE_PHASES:
                self.state.enter(head.phase)
                if head.phase is Phase.SERVING:
                    self.watch.refresh()

    def process_ended(self, role: str) -> None:
        """Not rank 0: a watched process ended. A worker's end matters while the engine should be running."""
        if role == "worker" and self.state.phase in (Phase.LOADING, Phase.WARMING, Phase.SERVING):
            message = f"the Ray worker of rank {self.rank} ended"
            self.state.died(self.failure(Cause.RAY_WORKER_DIED, message, "process", engine=True))

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
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise MemberFailed(self._lost.result())
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _preflight(self) -> None:
        self.state.enter(Phase.PREFLIGHT, "checking the member")
        try:
            await preflight(self.plan, self.rank)
        except PreflightError as error:
            raise MemberFailed(self.failure(error.cause, str(error), "preflight")) from error

    async def _stage(self) -> None:
        self.state.enter(Phase.STAGING, "checking the weights")
        try:
            await asyncio.wait_for(stage(self.plan.weights), self.plan.timeouts.staging)
        except TimeoutError:
            message = f"the weights were not there after {self.plan.timeouts.staging:.0f} s"
            raise MemberFailed(self.failure(Cause.STAGING_FAILED, message, "timeout")) from None
        except StagingError as error:
            raise MemberFailed(self.failure(Cause.STAGING_FAILED, str(error), "staging")) from error

    async def _join(self) -> None:
        self.state.enter(Phase.JOINING, "starting Ray")
        bound = self.plan.timeouts.formation
        try:
            async with asyncio.timeout(bound):
                if self.me.role is Role.WORKER:
                    await self._wait_for_gcs()
                ray = await self.start_child("ray", ray_command(self.me))
                self._watch_ray(ray)
                await self._until(self._ray_started)
                self.state.joined = True
                self.state.enter(Phase.JOINING, "waiting for the other members")
                self.watch.refresh()
                await self._until(lambda: all(peer.usable for peer in self.peers.all.values()))
        except TimeoutError:
            missing = [rank for rank, peer in self.peers.all.items() if not peer.usable]
            who = f"rank {', '.join(map(str, missing))} did not join" if missing else "Ray did not start"
            raise MemberFailed(
                self.failure(Cause.FORMATION_TIMEOUT, f"{who} within {bound:.0f} s", "timeout")
            ) from None

    def _ray_started(self) -> bool:
        return any(RAY_STARTED in line for line in self._read("ray"))

    def _watch_ray(self, ray: Child) -> None:
        async def wait() -> None:
            code = await ray.wait()
            if not self._lost.done():
                self._read("ray")
                cause = Cause.RAY_HEAD_LOST if self.me.role is Role.HEAD else Cause.RAYLET_DIED
                said = self.first_fatal.get("ray")
                message = f"Ray on rank {self.rank} ended ({describe_exit(code)})" + (f": {said}" if said else "")
                self._lost.set_result(self.failure(cause, message, "exit"))

        self._ray_wait = asyncio.create_task(wait())

    async def _wait_for_gcs(self) -> None:
        """Until the head's Ray listens: `ray start` gives up sooner than a slow head comes."""
        head = self.plan.head
        while True:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(head.address, head.ports.gcs), 2.0)
            except (OSError, TimeoutError):
                await asyncio.sleep(TICK_SECONDS)
            else:
                writer.close()
                return

    async def _until(self, condition: Callable[[], bool]) -> None:
        # What is waited for happens in files and other processes: there is no event to wait on.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(TICK_SECONDS)

    def _process_ended(self, role: str, pid: int) -> None:
        _log.info("%s (process %s) ended", role, pid)
        if role in ("raylet", "gcs") and not self._lost.done():
            # `ray start --block` says so too, a second later.
            cause = Cause.RAYLET_DIED if role == "raylet" else Cause.RAY_HEAD_LOST
            if self.state.phase not in _ENDED:
                message = f"the {role} process of rank {self.rank} ended"
                self._lost.set_result(self.failure(cause, message, "process"))
        elif self.state.phase not in _ENDED:
            self.process_ended(role)

    def _read(self, name: str) -> list[str]:
        """New lines of a log; the first fatal one is kept."""
        lines = self.tails[name].read()
        for line in lines:
            if name not in self.first_fatal and (found := fatal(line)):
                self.first_fatal[name] = found[0]
        return lines

    async def _keep_house(self) -> None:
        """Reap orphans, follow Ray's log, look for watched processes that came late."""
        looked = 0.0
        while True:
            await asyncio.sleep(1.0)
            reap_orphans(frozenset(child.pid for child in self.children))
            if self.state.joined:
                self._read("ray")
            if self.state.joined and time.monotonic() - looked > _REFRESH_SECONDS:
                looked = time.monotonic()
                self.watch.refresh()

    # Ends.

    async def _stop_children(self) -> None:
        """End the children, the latest first: vLLM before the Ray node that it runs on."""
        for child in reversed(self.children):
            await child.end(_RAY_GRACE if child.name == "ray" else 2.0)

    async def _drain(self) -> None:
        """End everything that was started, within the plan's grace time."""
        self.state.enter(Phase.DRAINING)
        deadline = time.monotonic() + self.plan.timeouts.drain
        self.watch.close()
        try:
            async with asyncio.timeout(max(1.0, self.plan.timeouts.drain - 2.0)):
                await self._stop_children()
        except TimeoutError:
            _log.warning("children did not end in time, killing what is left")
        if not await end_everything(deadline):
            _log.error("some processes could not be killed")
        await self.sweep()
        for tail in self.tails.values():
            tail.close()
        self.state.enter(Phase.STOPPED)
