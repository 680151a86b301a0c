"""What rank 0 does beyond being a member: it runs the engine, and restarts it in place (level 1)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import psutil

from dsv4_runtime.agent.ladder import Leave, root_failure, step
from dsv4_runtime.agent.member import TICK_SECONDS, Member, MemberFailed
from dsv4_runtime.agent.processes import Child, descendants, describe_exit, is_tracker, kill, reap_orphans
from dsv4_runtime.contract import Cause, Failure, GroupPlan, Health, Phase
from dsv4_runtime.engine import completion
from dsv4_runtime.engine.commands import vllm_command
from dsv4_runtime.engine.logs import LogTail, fatal, progress, shutting_down

# How long the head listens to the others after a death before it decides: each is asked once a second.
_SETTLE_SECONDS = 3.0
# Ray ends the actors of a driver that is gone within about a second.
_CLEAR_SECONDS = 15.0
# Python's resource trackers remove their owner's shared memory once it has ended; killed, they leave it behind.
_TRACKER_SECONDS = 2.0
_ENGINE_ROLES = frozenset({"engine-core", "worker"})


class Head(Member):
    """Rank 0."""

    def __init__(self, plan: GroupPlan, rank: int, directory: Path, token: str) -> None:
        super().__init__(plan, rank, directory, token)
        self.tails["vllm"] = LogTail(directory / "vllm.log")
        self._death: asyncio.Future[Failure] | None = None
        self._log_cause: Cause | None = None
        self._shutting_down = False

    async def work(self) -> None:
        """Joined, all members there: one engine life after the other, until only the operator can help."""
        attempts = 0
        while True:
            failure = await self._live_once()
            attempts = 0 if self.state.ready_time is not None else attempts
            failure = await self._settle(failure)
            self.state.died(failure)
            following = step(self.plan, self.peers.all, self.state.failures, self.state.restarts, attempts, time.time())
            if isinstance(following, Leave):
                raise MemberFailed(failure)
            attempts += 1
            self.state.failures[-1] = failure.model_copy(update={"level": 1})
            self.state.enter(Phase.RESTARTING, f"{failure.cause}: clearing the old engine")
            await self._clear()
            while (wait := following.at - time.time()) > 0:
                budget = f"restart {following.spent + 1} of {self.plan.recovery.max_restarts}"
                self.state.enter(Phase.RESTARTING, f"{budget}, in {wait:.0f} s")
                await asyncio.sleep(min(wait, 1.0))
            self.state.restarts.append(time.time())

    def process_ended(self, role: str) -> None:
        """EngineCore or a worker of this member ended."""
        self._read_log()
        if self._shutting_down:
            # The engine's processes are the first to go when vLLM ends itself.
            message = "vLLM shut itself down although nobody had asked dsv4 for it"
            self._die(self.failure(Cause.ENGINE_EXITED, message, "log", engine=True))
            return
        cause = Cause.ENGINE_CORE_DIED if role == "engine-core" else Cause.RAY_WORKER_DIED
        name = "the EngineCore process" if role == "engine-core" else "the Ray worker of rank 0"
        self._die(self.failure(cause, f"{name} ended", "process", engine=True))

    async def _live_once(self) -> Failure:
        """One engine generation, from its start to its death."""
        self.state.begin_generation()
        self.state.enter(Phase.LOADING, "starting vLLM")
        self.first_fatal.pop("vllm", None)
        self._log_cause = None
        self._shutting_down = False
        self._death = asyncio.get_running_loop().create_future()
        api = await self.start_child("api", vllm_command(self.plan.engine))
        tasks = [
            asyncio.create_task(self._await_exit(api)),
            asyncio.create_task(self._follow_log()),
            asyncio.create_task(self._follow_peers()),
            asyncio.create_task(self._bring_up()),
        ]
        try:
            return await self._death
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _die(self, failure: Failure) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(failure)

    async def _await_exit(self, api: Child) -> None:
        code = await api.wait()
        self._read_log()
        said = self.first_fatal.get("vllm")
        message = f"vLLM's API process ended ({describe_exit(code)})" + (f": {said}" if said else "")
        # Argument parsers exit with 2; a log line that names a cause is better still.
        cause = Cause.ENGINE_EXITED if code == 0 else Cause.CONFIG_ERROR if code == 2 else Cause.API_SERVER_DIED
        if code > 0 and self._log_cause is not None:
            cause = self._log_cause
        self._die(self.failure(cause, message, "exit", engine=True))

    async def _follow_log(self) -> None:
        while True:
            self._read_log()
            await asyncio.sleep(TICK_SECONDS if self.state.phase is Phase.LOADING else 1.0)

    def _read_log(self) -> None:
        for line in self.tails["vllm"].read():
            if self.state.phase is Phase.LOADING and (found := progress(line)):
                self.state.progress = found
            self._shutting_down = self._shutting_down or shutting_down(line)
            if "vllm" not in self.first_fatal and (bad := fatal(line)):
                self.first_fatal["vllm"], self._log_cause = bad

    async def _follow_peers(self) -> None:
        """A peer that says that its part of this generation is dead ends the generation."""
        while True:
            await self.peers.changed(2.0)
            for peer in self.peers.all.values():
                verdict = peer.status.verdict if peer.reachable and peer.status is not None else None
                if verdict is None or verdict.health is not Health.DEAD or verdict.failure is None:
                    continue
                if verdict.failure.generation in (None, self.state.generation):
                    self._die(verdict.failure)

    async def _bring_up(self) -> None:
        """Loading, Warming, Serving."""
        member, bounds = self.plan.head, self.plan.timeouts
        base = f"http://{member.address}:{member.ports.api}"
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(bounds.load):
                    while not await _healthy(session, base):
                        self.watch.refresh()
                        await asyncio.sleep(TICK_SECONDS)
            except TimeoutError:
                stage = self.state.progress.stage if self.state.progress else "nothing in its log"
                message = f"vLLM did not answer within {bounds.load:.0f} s; it last said: {stage}"
                self._die(self.failure(Cause.STARTUP_TIMEOUT, message, "timeout", engine=True))
                return
            self.state.enter(Phase.WARMING, "waiting for a first token")
            self.watch.refresh()
            try:
                await self._complete(session, base, bounds.first_token)
            except (aiohttp.ClientError, TimeoutError, completion.BadCompletion, ValueError) as error:
                message = f"the first completion failed: {error or type(error).__name__}"
                self._die(self.failure(Cause.CANARY_FAILED, message, "completion", engine=True))
                return
        self.state.served()
        self.state.enter(Phase.SERVING)
        self.watch.refresh()

    async def _complete(self, session: aiohttp.ClientSession, base: str, bound: float) -> None:
        body = completion.request(self.plan.engine.served_name)
        timeout = aiohttp.ClientTimeout(total=bound)
        async with session.post(f"{base}/v1/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise completion.BadCompletion(f"status {response.status}: {text}")
            completion.check(await response.json())

    async def _settle(self, failure: Failure) -> Failure:
        """Hear every member once more, then name the death that came first."""
        died = time.monotonic()
        deadline = died + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            if all(peer.asked is not None and peer.asked > died for peer in self.peers.all.values()):
                break
            await self.peers.changed(deadline - time.monotonic())
        self._read_log()
        first = root_failure(failure, self.peers.all, self.state.generation, time.time() - time.monotonic())
        said = self.first_fatal.get("vllm")
        if said and said not in first.message:
            first = first.model_copy(update={"message": f"{first.message}; vLLM's first error: {said}"[:1024]})
        return first

    async def _clear(self) -> None:
        """End the old engine, and see that none of its processes runs on any member."""
        begun = time.monotonic()
        # Not by the API process' tree: if that died first, EngineCore is an orphan and the agent's own child by now.
        while old := self._engine_processes():
            patient = time.monotonic() - begun < _TRACKER_SECONDS
            kill([process for process in old if not (patient and is_tracker(process))])
            reap_orphans(frozenset(child.pid for child in self.children))
            await asyncio.sleep(0.05)
        for child in [child for child in self.children if child.name == "api"]:
            await child.wait()
            self.children.remove(child)
        cleared = time.monotonic()
        while time.monotonic() - cleared < _CLEAR_SECONDS:
            left = [0] if _ENGINE_ROLES & set(self.watch.roles.values()) else []
            for rank, peer in self.peers.all.items():
                heard = peer.heard is not None and peer.heard > cleared and peer.status is not None
                if not heard or any(process.name in _ENGINE_ROLES for process in peer.status.processes):  # type: ignore[union-attr]
                    left.append(rank)
            if not left:
                await self.sweep()
                return
            await self.peers.changed(TICK_SECONDS)
        message = f"processes of the old engine still run on rank {left[0]} after {_CLEAR_SECONDS:.0f} s"
        raise MemberFailed(self.failure(Cause.UNKNOWN, message, "process"))

    def _engine_processes(self) -> list[psutil.Process]:
        """What runs below the agent, but for its Ray node."""
        ray = {process.pid for child in self.children if child.name == "ray" for process in child.tree()}
        return [process for process in descendants() if process.pid not in ray]


async def _healthy(session: aiohttp.ClientSession, base: str) -> bool:
    try:
        async with session.get(f"{base}/health", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
