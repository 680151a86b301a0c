"""Rank 0's engine: vLLM's processes, the questions to it, its evidence, and its end, as `decide.head` orders them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil

from dsv4_runtime.agent import evidence, standby
from dsv4_runtime.agent.clear import Remains, gpu_memory, remains
from dsv4_runtime.agent.decide import actions as act
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiAnswered,
    ApiEnded,
    CoreFailed,
    CoreLost,
    Done,
    EvidenceSaved,
    FabricFellBack,
    FirstCompletion,
    FirstError,
    Judged,
    Loading,
    PluginFailed,
    ShuttingDown,
    Task,
    TaskFailed,
)
from dsv4_runtime.agent.drain import DrainWait, open_requests
from dsv4_runtime.agent.processes import descendants, is_tracker, kill, reap_orphans
from dsv4_runtime.agent.watcher import Watcher
from dsv4_runtime.contract import Cause, Failure, Phase, Signals, memory_figures
from dsv4_runtime.engine import answers, completion, token_auth
from dsv4_runtime.engine.commands import vllm_command
from dsv4_runtime.engine.logs import (
    LogTail,
    WorkerLogs,
    core_failed,
    core_lost,
    kernels,
    kernels_not_attached,
    kv_cache,
    loaded_bytes,
    plugin_failed,
    progress,
    shutting_down,
)
from dsv4_runtime.health.ticks import tick

if TYPE_CHECKING:
    from dsv4_runtime.agent.member import Member

_log = logging.getLogger(__name__)

_PID = re.compile(r"\(EngineCore\w{0,40} pid=(\d{1,9})\)")
_STARTING = frozenset({Phase.LOADING, Phase.WARMING})
_TICK_SECONDS = 0.25
# Ray ends the actors of a driver that is gone within about a second.
_CLEAR_SECONDS = 15.0
# Python's resource trackers remove their owner's shared memory once it has ended; killed, they leave it behind.
_TRACKER_SECONDS = 2.0


class EngineRunner:
    """Runner of rank 0's work for its engine. Made inside a running event loop."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._plan = member.plan
        self._state = member.state
        self._feed = member.loop.feed
        self._tail = member.tails["vllm"] = LogTail(member.directory / "vllm.log")
        self._workers = WorkerLogs(member.directory / "ray" / "session_latest" / "logs")
        self._first_error: tuple[str, Cause | None] | None = None
        self._gpu_idle: dict[int, int] | None = None
        self.watcher = Watcher(self._plan, member.state, member.peers, member.sampled, member.token)
        self.drain: DrainWait | None = None
        """The wait for open requests, once it was asked for."""

    def act(self, action: act.AgentAction) -> None:
        """Do what was decided about the engine; what takes time becomes a task."""
        start = self._member.tasks.start
        match action:
            case act.StartEngine(load_seconds=seconds):
                self._begin(seconds)
                start(Task.ENGINE, self._live())
                start(Task.PROBE, self._until_answered())
            case act.AskFirstCompletion():
                start(Task.PROBE, self._first_completion())
            case act.WatchEngine():
                start(Task.PROBE, self._watch())
            case act.ReportServing():
                # The last lines of the start, before clients write into the log.
                self.read_log()
                self._state.served()
                self._tail.survived()
                self._first_error = None
            case act.ReportSuspicion(failure=suspicion):
                self._state.suspect(suspicion)
            case act.ReportDead(failure=failure):
                self._state.mark_dead(failure)
            case act.SaveEvidence(failure=failure):
                start(Task.EVIDENCE, self._save_evidence(failure))
            case act.RecordRepair(failure=failure):
                self._state.failures[-1] = failure
            case act.RecordRestart(time=when):
                self._state.restarts.append(when)
            case act.KeepAnswer(answer=answer):
                self._keep(answer)
            case act.BeginDrain(seconds=seconds):
                ask = functools.partial(open_requests, self._api, token_auth.headers(self._member.token))
                self.drain = DrainWait(self._state, ask, seconds)

    def read_log(self) -> None:
        """Report the lines that vLLM has written since the last look.

        The cause of a death is read from vLLM's own log alone. Progress and choices are facts of a start: they are read
        while the engine starts, when no client can write into a log, and from the workers' logs too.
        """
        starting = self._state.phase in _STARTING
        self._tail.guard(serving=not starting)
        lines = self._tail.read()
        if (said := self._tail.first_fatal) is not None and said != self._first_error:
            self._first_error = said
            self._feed(FirstError(*said))
        for line in lines:
            if starting:
                self._follow(line)
            if core_failed(line) and self._is_ours(line):
                self._feed(CoreFailed(self._member.exit_causes.explain()))
            elif core_lost(line):
                self._feed(CoreLost())
            elif shutting_down(line):
                self._feed(ShuttingDown())
            elif self._state.phase is Phase.LOADING and plugin_failed(line):
                self._feed(PluginFailed())
            if self._member.fabric is not None and (fell_back := self._member.fabric.engine_said(line)):
                self._feed(FabricFellBack(fell_back))
        if starting:
            for line in self._workers.read():
                self._follow(line)

    def _is_ours(self, line: str) -> bool:
        """Return whether a line of EngineCore has the process id of the engine's, as far as that is known.

        A message that quotes a log, and is not escaped, has lines that look like EngineCore's.
        """
        known = {pid for pid, role in self._member.watch.roles.items() if role == "engine-core"}
        found = _PID.match(line)
        return not known or found is None or int(found[1]) in known

    def close(self) -> None:
        """Let go of the workers' logs."""
        self._workers.close()

    def _follow(self, line: str) -> None:
        """Note what a line says of the start, of memory and of kernels."""
        if found := progress(line, self._state.progress):
            if self._state.phase is Phase.LOADING:
                self._state.advance(found)
            self._feed(Loading(found.stage))
        if taken := loaded_bytes(line):
            self._state.loaded(taken)
        if figures := memory_figures(line):
            self._state.remembered(figures)
        if size := kv_cache(line):
            self._state.cached(*size)
        if told := kernels(line):
            self._state.kernels.chosen(*told)
        elif refused := kernels_not_attached(line):
            self._state.kernels.not_attached(*refused)

    def _begin(self, load_seconds: float) -> None:
        """Begin a generation: what was seen of the last engine says nothing about the next."""
        if self._gpu_idle is None:
            used = {rank: gpu_memory(signals) for rank, signals in self._signals().items()}
            self._gpu_idle = {rank: memory for rank, memory in used.items() if memory is not None}
        self._state.begin_generation()
        self._member.exit_causes.forget()
        self._member.vitals.forget()
        self._tail.forget()
        self._workers.forget()
        self._first_error = None
        if load_seconds > self._plan.timeouts.load:
            _log.info("the slowest disk needs its time, so the load may take %.0f s", load_seconds)
            # vLLM has a bound of its own.
            self._member.env = {**self._member.env, "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(load_seconds))}

    async def _live(self) -> AgentEvent:
        """Follow vLLM's processes from their start, with their log."""
        member = self._member
        api = member.standby.take(self._plan.engine.args, str(member.directory / "vllm.log"))
        if api is None:
            api = await member.start_child("api", vllm_command(self._plan.engine), log="vllm")
        # If the reading makes a mistake the group ends with it: an engine that nobody watches is not left to itself.
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._follow_log())
            code = await api.wait()
            reading.cancel()
        self.read_log()
        return ApiEnded(code, self._member.exit_causes.explain() if code not in (0, 2) else None)

    async def _follow_log(self) -> None:
        while True:
            self.read_log()
            behind = self._tail.behind or self._state.phase is Phase.LOADING
            await tick(_TICK_SECONDS if behind else 1.0)

    @property
    def _api(self) -> str:
        """Return the URL of vLLM's API."""
        return f"http://{self._plan.head.address}:{self._plan.head.ports.api}"

    async def _until_answered(self) -> AgentEvent:
        """Ask until vLLM's API answers; for how long at most is decided elsewhere."""
        async with aiohttp.ClientSession(headers=token_auth.headers(self._member.token)) as session:
            while not await _healthy(session, self._api):
                self._member.watch.refresh()
                await asyncio.sleep(_TICK_SECONDS)
        return ApiAnswered()

    async def _first_completion(self) -> AgentEvent:
        """Ask the known question; an answer that is not the one that is kept is wrong."""
        folder, key = Path(self._plan.weights.path), answers.identity(self._plan)
        body = completion.known_request(self._plan.engine.served_name)
        timeout = aiohttp.ClientTimeout(total=self._plan.timeouts.first_token)
        headers = token_auth.headers(self._member.token)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.post(f"{self._api}/v1/completions", json=body) as response,
            ):
                answer = completion.known_answer(response.status, await response.read())
        except completion.BadCompletion as error:
            return FirstCompletion(str(error), wrong=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            return FirstCompletion(str(error) or type(error).__name__)
        if (known := answers.known(folder, key)) is None:
            return FirstCompletion(unknown=answer)
        differs = completion.difference(known, answer, self._plan.health.answer_tolerance)
        if differs is None:
            return FirstCompletion()
        where = f"{answers.path(folder)}, {key}"
        return FirstCompletion(f"its answer is not the one that verified weights gave ({where}): {differs}", wrong=True)

    def _keep(self, answer: completion.KnownAnswer) -> None:
        folder, key = Path(self._plan.weights.path), answers.identity(self._plan)
        if answers.keep(folder, key, answer):
            _log.info("the answer to the known question is kept: every member's files of the weights are right")
        else:
            _log.warning("the answer to the known question could not be kept in %s", answers.path(folder))

    async def _watch(self) -> AgentEvent:
        return Judged(await self.watcher.until_dead(self._api, lambda judgement: self._feed(Judged(judgement))))

    async def _save_evidence(self, failure: Failure) -> AgentEvent:
        """Save what every member and Ray know of `failure` while it is still there."""
        own = self._member.evidence()
        seen = self.watcher.seen()
        own.pop("window")
        root, token = self._member.evidence_root, self._member.token
        return EvidenceSaved(await evidence.save(root, self._plan, failure, own, token, seen))

    async def clear(self) -> AgentEvent:
        """End the old engine, and see that nothing is left of it on any member."""
        begun = time.monotonic()
        # Not by the API process' tree: if that died first, EngineCore is an orphan and the agent's own child by now.
        while (old := self._engine_processes()) and time.monotonic() - begun < _CLEAR_SECONDS:
            patient = time.monotonic() - begun < _TRACKER_SECONDS
            kill([process for process in old if not (patient and is_tracker(process))])
            # Its worker hangs below Ray, which asks it to end; a stopped one does not hear that.
            self._member.kill_engine()
            reap_orphans(frozenset(child.pid for child in self._member.children))
            await asyncio.sleep(0.05)
        for child in [child for child in self._member.children if child.name == "api"]:
            try:
                async with asyncio.timeout(_CLEAR_SECONDS):
                    await child.wait()
            except TimeoutError:
                message = f"vLLM's API process {child.pid} outlives SIGKILL by {_CLEAR_SECONDS:.0f} s"
                return TaskFailed(Task.CLEAR, Cause.PROCESS_STUCK, message, "process")
            self._member.children.remove(child)
        cleared = time.monotonic()
        while left := self._remains(cleared):
            if time.monotonic() - cleared > _CLEAR_SECONDS:
                message = f"rank {left.rank} is not free for the next engine after {_CLEAR_SECONDS:.0f} s: {left.what}"
                return TaskFailed(Task.CLEAR, left.cause, message, "process", left.rank)
            self._member.kill_engine()
            await self._member.peers.changed(_TICK_SECONDS)
        await self._member.sweep()
        return Done(Task.CLEAR)

    def _remains(self, since: float) -> Remains | None:
        own, peers = self._member.watch.roles.values(), self._member.peers.all
        needed = self._plan.expectations.gpu_bytes
        return remains(own, self._signals(), peers, self._gpu_idle or {}, self._plan.head, since, needed)

    def _signals(self) -> dict[int, Signals | None]:
        """Return every rank's latest."""
        others = self._member.peers.all.items()
        return {0: self._state.signals, **{rank: peer.status.signals if peer.status else None for rank, peer in others}}

    def _engine_processes(self) -> list[psutil.Process]:
        """Return what runs below the agent, but for its Ray node and what waits for the next engine."""
        others = [child for child in self._member.children if child.name in ("ray", standby.NAME)]
        kept = {process.pid for child in others for process in child.tree()}
        return [process for process in descendants() if process.pid not in kept]


async def _healthy(session: aiohttp.ClientSession, base: str) -> bool:
    try:
        async with session.get(f"{base}/health", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
