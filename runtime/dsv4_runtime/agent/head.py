"""What rank 0 does beyond being a member: it runs the engine, and restarts it in place (level 1)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dsv4_runtime.agent import evidence
from dsv4_runtime.agent.clear import Remains, gpu_memory, remains
from dsv4_runtime.agent.drain import Drain, open_requests
from dsv4_runtime.agent.ladder import Leave, root_failure, step
from dsv4_runtime.agent.member import SAMPLE_SECONDS, TICK_SECONDS, Member, MemberFailed
from dsv4_runtime.agent.processes import Child, descendants, describe_exit, is_tracker, kill, reap_orphans
from dsv4_runtime.agent.watcher import Watcher
from dsv4_runtime.contract import Cause, DrainReport, Failure, GroupPlan, Phase, Signals
from dsv4_runtime.engine import completion, door
from dsv4_runtime.engine.commands import vllm_command
from dsv4_runtime.engine.logs import LogTail, core_failed, kv_cache, loaded_bytes, progress, shutting_down
from dsv4_runtime.health.causes import of_gpu_memory
from dsv4_runtime.health.rules import Judgement
from dsv4_runtime.health.ticks import tick

_log = logging.getLogger(__name__)

# How long the head listens to the others after a death before it decides: each is asked once a second.
_SETTLE_SECONDS = 3.0
# Signals that are sampled this long after a death have what the accelerators' drivers, asked as often, say of it.
_DRIVER_SECONDS = 2 * SAMPLE_SECONDS
# No heartbeat for this long: the link, not a busy agent.
_SILENT_SECONDS = 1.5
# An EngineCore that ends so soon after a worker did not end because of it: Python alone takes longer to end.
_TOGETHER_SECONDS = 0.05
_WORKER = "the Ray worker of rank 0 ended"
_TOLD = f"{_WORKER}, as it was told to when EngineCore failed"
# Ray ends the actors of a driver that is gone within about a second.
_CLEAR_SECONDS = 15.0
# Python's resource trackers remove their owner's shared memory once it has ended; killed, they leave it behind.
_TRACKER_SECONDS = 2.0
# What watched an engine ends with it, at once.
_CHORES_SECONDS = 5.0


class Head(Member):
    """Rank 0."""

    def __init__(self, plan: GroupPlan, rank: int, directory: Path, token: str) -> None:
        super().__init__(plan, rank, directory, token)
        self.tails["vllm"] = LogTail(directory / "vllm.log")
        self._death: asyncio.Future[Failure] | None = None
        self.watcher = Watcher(plan, self.state, self.peers, self.sampled, token)
        self._gpu_idle: dict[int, int] = {}
        self._shutting_down = False
        self._core_failed = False
        self._finish: Drain | None = None

    def drain(self, seconds: float) -> DrainReport:
        """Have a serving engine finish its open requests, within `seconds` of the first time that this is asked."""
        if self._finish is None and self.state.phase is Phase.SERVING and self.state.failure is None:
            ask = functools.partial(open_requests, self._api, door.headers(self.token))
            self._finish = Drain(self.state, ask, seconds)
        return super().drain(seconds) if self._finish is None else self._finish.report

    def evidence(self) -> dict[str, object]:
        """What every member has, and the samples that the latest verdicts were made of."""
        return {**super().evidence(), "window": self.watcher.seen()}

    async def work(self) -> None:
        """Joined, all members there: one engine life after the other, until only the operator can help."""
        attempts = 0
        used = {rank: gpu_memory(signals) for rank, signals in self._signals().items()}
        self._gpu_idle = {rank: memory for rank, memory in used.items() if memory is not None}
        while True:
            failure = await self._live_once()
            self.state.condemn(failure)
            attempts = 0 if self.state.ready_time is not None else attempts
            failure = await self._settle(failure)
            failure = await self._keep_evidence(failure)
            self.state.died(failure)
            following = step(self.plan, self.peers.all, self.state.failures, self.state.restarts, attempts, time.time())
            if self._finish is not None or isinstance(following, Leave):
                # An engine that was to end anyway is not brought back.
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

    def process_ended(self, role: str, pid: int) -> None:
        """EngineCore or a worker of this member ended."""
        self._read_log()
        if self._shutting_down:
            # The engine's processes are the first to go when vLLM ends itself.
            message = "vLLM shut itself down although nobody had asked dsv4 for it"
            self._die(self.failure(Cause.ENGINE_EXITED, message, "log", engine=True))
            return
        # A failed EngineCore takes its workers along, and they may be gone first. Ray knows; without Ray, the log.
        told = self.killers.ordered(pid) if role == "worker" else None
        core = role == "engine-core" or (self._core_failed if told is None else told)
        cause = Cause.ENGINE_CORE_DIED if core else Cause.RAY_WORKER_DIED
        ended = self.ended(cause, _TOLD if told else "the EngineCore process ended" if core else _WORKER)
        if core:
            self._die(ended)
        else:
            # Ray ends the workers of an EngineCore that was killed, and may be done before the kernel is with that.
            asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self._die, ended)

    def _gave_up(self, failed: Failure) -> None:
        """EngineCore said so a moment ago, and may take seconds to end."""
        explained = self.ended(failed.cause, failed.message)
        self._die(failed.model_copy(update={"cause": explained.cause, "message": explained.message}))

    async def _live_once(self) -> Failure:
        """One engine generation, from its start to its death."""
        self.state.begin_generation()
        self.killers.forget()
        self.vitals.forget()
        self.state.enter(Phase.LOADING, "starting vLLM")
        # What the last engine wrote when it was ended says nothing about the next.
        self.tails["vllm"].forget()
        self._shutting_down = self._core_failed = False
        self._death = asyncio.get_running_loop().create_future()
        bound = self._load_bound()
        api = await self.start_child("api", vllm_command(self.plan.engine))
        tasks = [
            asyncio.create_task(self._await_exit(api)),
            asyncio.create_task(self._follow_log()),
            asyncio.create_task(self._follow_peers()),
            asyncio.create_task(self._bring_up(bound)),
        ]
        waited = asyncio.create_task(_first_error(tasks))
        try:
            either: set[asyncio.Future[Any]] = {self._death, waited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._death.done():
                # A mistake of the agent's: an engine that nobody watches is not left to itself.
                waited.result()
            return await self._death
        finally:
            for task in (waited, *tasks):
                task.cancel()
            # If one does not end, the repair goes on without it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHORES_SECONDS):
                    await asyncio.gather(waited, *tasks, return_exceptions=True)

    def _die(self, failure: Failure) -> None:
        """The first death of a generation is the one that it died."""
        late = failure.generation not in (None, self.state.generation)
        if self._death is not None and not self._death.done() and not late:
            self._death.set_result(failure)

    async def _await_exit(self, api: Child) -> None:
        code = await api.wait()
        self._read_log()
        if self._core_failed:
            # It ended because EngineCore gave up, which is about to be called dead of that.
            return
        said, told = self.tails["vllm"].first_fatal or (None, None)
        message = f"vLLM's API process ended ({describe_exit(code)})" + (f": {said}" if said else "")
        # Argument parsers exit with 2; a log line that names a cause is better still.
        cause = Cause.ENGINE_EXITED if code == 0 else Cause.CONFIG_ERROR if code == 2 else Cause.API_SERVER_DIED
        killer = self.killers.who() if code not in (0, 2) else None
        if killer is not None:
            cause, message = killer[0], f"{message}: {killer[1]}"
        elif code > 0 and told is not None:
            cause = told
        self._die(self.failure(cause, message, "exit", engine=True))

    async def _follow_log(self) -> None:
        while True:
            self._read_log()
            await tick(TICK_SECONDS if self.state.phase is Phase.LOADING else 1.0)

    def _read_log(self) -> None:
        for line in self.tails["vllm"].read():
            if self.state.phase is Phase.LOADING and (found := progress(line)):
                self.state.advance(found)
            if taken := loaded_bytes(line):
                self.state.loaded(taken)
            if size := kv_cache(line):
                self.state.cached(*size)
            if core_failed(line) and not self._core_failed:
                self._core_failed = True
                failed = self.failure(Cause.ENGINE_CORE_DIED, "EngineCore gave up", "log", engine=True)
                # Not at once: a worker that it failed of has ended by now, and is about to be heard of.
                asyncio.get_running_loop().call_later(2 * _TOGETHER_SECONDS, self._gave_up, failed)
            self._shutting_down = self._shutting_down or (shutting_down(line) and not self._core_failed)
            if self.fabric is not None and (said := self.fabric.engine_said(line)):
                self._die(self.failure(Cause.NCCL_SOCKET_FALLBACK, said, "log", engine=True))

    async def _follow_peers(self) -> None:
        """A peer that says that its part of this generation is dead ends the generation."""
        while True:
            await self.peers.changed(2.0)
            for peer in self.peers.all.values():
                death = peer.death if peer.reachable else None
                if death is not None and death.generation in (None, self.state.generation):
                    self._die(death)

    def _load_bound(self) -> float:
        """Seconds until the engine answers: the plan's, and more where a disk is slower than the plan counts on."""
        heard = [peer.status for peer in self.peers.all.values() if peer.status is not None]
        rates = [self.state.disk_rate, *(status.disk_bytes_per_second for status in heard)]
        slowest = min((rate for rate in rates if rate is not None), default=None)
        bound = self.plan.timeouts.load_at(slowest)
        if slowest is not None and bound > self.plan.timeouts.load:
            _log.info("the slowest disk reads %.0f MB/s, so the load may take %.0f s", slowest / 1e6, bound)
            # vLLM has a bound of its own.
            self.env = {**self.env, "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(bound))}
        return bound

    async def _bring_up(self, load_bound: float) -> None:
        """Loading, Warming, Serving."""
        base = self._api
        async with aiohttp.ClientSession(headers=door.headers(self.token)) as session:
            try:
                async with asyncio.timeout(load_bound):
                    while not await _healthy(session, base):
                        self.watch.refresh()
                        await asyncio.sleep(TICK_SECONDS)
            except TimeoutError:
                stage = self.state.progress.stage if self.state.progress else "nothing in its log"
                message = f"vLLM did not answer within {load_bound:.0f} s; it last said: {stage}"
                self._die(self.failure(Cause.STARTUP_TIMEOUT, message, "timeout", engine=True))
                return
            self.state.enter(Phase.WARMING, "waiting for a first token")
            self.watch.refresh()
            try:
                await self._complete(session, base, self.plan.timeouts.first_token)
            except (aiohttp.ClientError, TimeoutError, completion.BadCompletion) as error:
                message = f"the first completion failed: {error or type(error).__name__}"
                self._die(self.failure(Cause.CANARY_FAILED, message, "completion", engine=True))
                return
        self.state.served()
        self.state.enter(Phase.SERVING)
        self.watch.refresh()
        self._die(self._convict(await self.watcher.until_dead(base, self._suspect)))

    @property
    def _api(self) -> str:
        """URL of vLLM's API."""
        return f"http://{self.plan.head.address}:{self.plan.head.ports.api}"

    async def _complete(self, session: aiohttp.ClientSession, base: str, bound: float) -> None:
        body = completion.request(self.plan.engine.served_name)
        timeout = aiohttp.ClientTimeout(total=bound)
        async with session.post(f"{base}/v1/completions", json=body, timeout=timeout) as response:
            completion.check_answer(response.status, await response.read())

    def _suspect(self, judgement: Judgement | None) -> None:
        self.state.suspect(None if judgement is None else self._convict(judgement))

    def _convict(self, judgement: Judgement) -> Failure:
        assert judgement.cause is not None  # noqa: S101  (neither Suspect nor Dead comes without one)
        found = self.failure(judgement.cause, judgement.message, judgement.rule, engine=True)
        return found.model_copy(update={"culprit_rank": judgement.culprit_rank})

    async def _settle(self, failure: Failure) -> Failure:
        """Hear every member once more, then name the death that came first.

        A member that has just fallen silent may be what the engine died of, or may come back: that takes as long as it
        takes to call it lost.
        """
        if self.plan.health.gpus:
            await asyncio.sleep(_DRIVER_SECONDS)
        died = time.monotonic()
        while (now := time.monotonic()) - died < self.plan.health.link_lost:
            waiting = [
                rank
                for rank, peer in self.peers.all.items()
                if not peer.refused and not (peer.reachable and peer.heard is not None and peer.heard > died)
            ]
            silent = [rank for rank in waiting if (self.peers.silence(rank, now) or 0.0) > _SILENT_SECONDS]
            lost = [rank for rank in silent if (self.peers.silence(rank, now) or 0.0) >= self.plan.health.link_lost]
            if set(waiting) == set(lost) or (now - died > _SETTLE_SECONDS and not silent):
                break
            await self.peers.changed(TICK_SECONDS)
        self._read_log()
        first = root_failure(
            failure,
            self.peers.all,
            self._signals(),
            self.state.generation,
            self.plan.health.link_lost,
            time.monotonic(),
            time.time(),
        )
        said = self.tails["vllm"].first_fatal
        if said and said[0] not in first.message:
            first = first.model_copy(update={"message": f"{first.message}; vLLM's first error: {said[0]}"[:1024]})
        return of_gpu_memory(first, said)

    async def _keep_evidence(self, failure: Failure) -> Failure:
        """Save what every member and Ray know of `failure` while it is still there."""
        own, seen = super().evidence(), self.watcher.seen()
        place = await evidence.save(self.evidence_root, self.plan, failure, own, self.token, seen)
        return failure.model_copy(update={"evidence": str(place)}) if place else failure

    async def _clear(self) -> None:
        """End the old engine, and see that nothing is left of it on any member."""
        begun = time.monotonic()
        # Not by the API process' tree: if that died first, EngineCore is an orphan and the agent's own child by now.
        while (old := self._engine_processes()) and time.monotonic() - begun < _CLEAR_SECONDS:
            patient = time.monotonic() - begun < _TRACKER_SECONDS
            kill([process for process in old if not (patient and is_tracker(process))])
            # Its worker hangs below Ray, which asks it to end; a stopped one does not hear that.
            self.end_engine()
            reap_orphans(frozenset(child.pid for child in self.children))
            await asyncio.sleep(0.05)
        for child in [child for child in self.children if child.name == "api"]:
            async with asyncio.timeout(_CLEAR_SECONDS):
                await child.wait()
            self.children.remove(child)
        cleared = time.monotonic()
        while left := self._remains(cleared):
            if time.monotonic() - cleared > _CLEAR_SECONDS:
                message = f"rank {left.rank} is not free for the next engine after {_CLEAR_SECONDS:.0f} s: {left.what}"
                lost = self.failure(left.cause, message, "process")
                raise MemberFailed(lost.model_copy(update={"culprit_rank": left.rank}))
            self.end_engine()
            await self.peers.changed(TICK_SECONDS)
        await self.sweep()

    def _remains(self, since: float) -> Remains | None:
        own, needed = self.watch.roles.values(), self.plan.expectations.gpu_bytes
        return remains(own, self._signals(), self.peers.all, self._gpu_idle, self.me, since, needed)

    def _signals(self) -> dict[int, Signals | None]:
        """Every rank's latest."""
        others = {rank: peer.status.signals if peer.status else None for rank, peer in self.peers.all.items()}
        return {0: self.state.signals, **others}

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


async def _first_error(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what a task raises; wait for ever if all end well."""
    for ended in asyncio.as_completed(tasks):
        await ended
    await asyncio.get_running_loop().create_future()
