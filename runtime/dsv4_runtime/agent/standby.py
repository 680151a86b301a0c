"""Standby processes: processes that import vLLM in advance, a quarter of the duration of a start, half of a restart.

Rank 0 has a standby API server of vLLM, and every rank standby Ray workers for its devices; without Ray, every rank
has a standby server (all: `vllm_plugin.warm_pool`). They touch no device before they are used. While the engine
serves, they are started only once it is idle, and they import slowly (`slow_imports`): on a machine with few
processors the imports of all of them together would stall the requests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sys
import time
from pathlib import Path

from dsv4_runtime.agent.context import AgentContext
from dsv4_runtime.agent.monitor import open_requests
from dsv4_runtime.agent.processes import Child, kill_stopped_workers, standby_workers
from dsv4_runtime.agent.ray import grpc_call
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.engine import token_auth
from dsv4_runtime.util import procfs
from dsv4_runtime.util.procfs import STOPPED, command_of, entry, is_frozen

_log = logging.getLogger(__name__)

NAME = "standby"
MODULE = "dsv4_runtime.vllm_plugin.warm_pool"
_AFTER_SECONDS = 5.0
"""Minimum time without requests: the engine first answers the requests that were held."""
_LATEST_SECONDS = 60.0
"""After this time the processes start even if the engine was never idle."""
_POLL_SECONDS = 1.0
_BOUND_SECONDS = 120.0
_PRESTART = "/ray.rpc.NodeManagerService/PrestartWorkers"
_RAYLET_SECONDS = 5.0
_REPLACEMENTS = 5
"""Losses in a row after which no process is replaced until the next engine."""
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.5, 60.0
_LASTING_SECONDS = 600.0
"""Losses this far apart are not in a row."""
_WORKERS_SECONDS = 3.0
"""Interval of the scans for Ray's waiting processes."""
_MISSING_SECONDS = 60.0
"""Time after which a requested worker that does not exist is lost: it ended before it was found. A start takes seconds,
on a busy machine more."""
_PROCESSORS_EACH = 8
"""Processors of the machine per standby process with which imports do not pause: they take an eighth at most."""
_LEAST_MEMORY = 4 << 30
"""Minimum of available memory: a slower restart is better than an out-of-memory kill."""


def _runs(pid: int) -> bool:
    try:
        found = entry(pid)
    except OSError:
        # Unknown.
        return True
    return found is not None and not found.ended and found.state not in STOPPED and not is_frozen(pid)


class Standby:
    """Standby processes of one member for its next engine."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._server: Child | None = None

    async def start_server(self, log: str) -> None:
        """Start the standby server of a member that starts vLLM, unless one is running or memory is short.

        Args:
            log: name of its log until it becomes the server. Before the first engine this is vLLM's log, because an
                error of the import is the cause of that engine's death.

        Raises:
            OSError: the process cannot be started.
        """
        context = self._context
        context.children = [child for child in context.children if child.name != NAME or child.running]
        running = self._server is not None and self._server.running
        if context.plan.starts_vllm(context.rank) and not running and self._has_memory():
            command = [sys.executable, "-m", MODULE, "server", context.plan.weights.path]
            if not self._has_workers:
                command.append("worker")  # forked from this process
            self._server = await context.start_child(NAME, command, fed=True, log=log)

    async def keep(self) -> None:
        """Start all standby processes once the serving engine is idle, or after a bounded time; replace lost ones.

        Raises:
            OSError, TimeoutError: a process cannot be started, or Ray does not answer.
        """
        lost, begun = 0, time.monotonic()
        await self._until_idle(self._context.api, _AFTER_SECONDS)
        requested = await self.prepare()
        while True:
            what, workers = await self._until_lost(requested)
            lost = 1 if time.monotonic() - begun > _LASTING_SECONDS else lost + 1
            if lost > _REPLACEMENTS:
                _log.warning("%s; it is the %sth loss in a row, so the next start will be a cold one", what, lost)
                return
            _log.warning("%s; it is replaced", what)
            await asyncio.sleep(backoff(lost, first=_BACKOFF_SECONDS, longest=_LONGEST_BACKOFF_SECONDS))
            # Without waiting for an idle engine: the imports are slow ones.
            begun = time.monotonic()
            if not workers or not await self._repeat_prestart(workers):
                requested = await self.prepare()

    async def prepare(self) -> int:
        """Start the standby processes that are missing; return the number of workers that Ray was requested to have.

        Raises:
            OSError, TimeoutError: a process cannot be started, or Ray does not answer.
        """
        context, me, head = self._context, self._context.me, self._context.plan.head
        self._slow_down()
        await self.start_server(NAME)
        if not self._has_memory():
            return 0
        requested = 0
        if self._has_workers:
            arguments = [f"{head.address}:{head.ports.gcs}", me.address, str(me.devices), str(self._prestart_file)]
            command = [sys.executable, "-m", MODULE, "workers", *arguments]
            prestart = await context.start_child("prestart", command)
            try:
                async with asyncio.timeout(_BOUND_SECONDS):
                    if (code := await prestart.wait()) != 0:
                        _log.warning("no worker of Ray waits for the next engine (exit code %s): prestart.log", code)
                    else:
                        requested = me.devices
            finally:
                await prestart.end(0.0)
                context.children.remove(prestart)
        return requested

    @property
    def _has_workers(self) -> bool:
        return any("--distributed-executor-backend=ray" in argument for argument in self._context.plan.engine.args)

    @property
    def _prestart_file(self) -> Path:
        return self._context.directory / "prestart.json"

    async def _repeat_prestart(self, workers: int) -> bool:
        """Have the raylet start waiting workers with the request that the running engine's first ones came from.

        The program that makes this request imports Ray, which takes seconds. Returns whether the raylet accepted it.
        """
        context = self._context
        try:
            found = json.loads(self._prestart_file.read_bytes())
            port, message = int(found["port"]), base64.b64decode(found["messages"][workers - 1])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return False
        self._slow_down()
        return bool(await grpc_call(context.me.address, port, _PRESTART, context.token, _RAYLET_SECONDS, message))

    async def _until_lost(self, requested: int) -> tuple[str, int]:
        """Wait until standby processes have ended, or are stopped or hung, or fewer than the `requested` workers exist;
        return a description and the number of lost workers.
        """
        workers: set[int] = set()
        scanned, complete = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(procfs.PROBE_SECONDS)
            server = self._server
            if server is not None and not await self._is_usable(server) and self._server is server:
                return f"the standby server (process {await self._discard(server)}) ended or does not answer", 0
            lost = {pid for pid in workers if not _runs(pid)}
            # Ray itself ends processes beyond the number of devices.
            missing = min(len(workers), self._context.me.devices) - len(workers - lost)
            workers -= lost
            if missing > 0:
                kill_stopped_workers()
                return f"a waiting worker of Ray (process {min(lost)}) ended or is stopped", missing
            if self._has_workers and time.monotonic() - scanned >= _WORKERS_SECONDS:
                scanned = time.monotonic()
                try:
                    stopped = kill_stopped_workers()
                    workers = standby_workers()
                except OSError as error:
                    _log.warning("the waiting workers of Ray cannot be found, which is tried again: %s", error)
                    complete = scanned
                    continue
                if stopped:
                    return f"a waiting worker of Ray (process {stopped[0]}) is stopped", len(stopped)
                if len(workers) >= requested:
                    complete = scanned
                elif scanned - complete >= _MISSING_SECONDS:
                    return f"Ray has {len(workers)} of {requested} waiting workers", requested - len(workers)

    async def _is_usable(self, server: Child) -> bool:
        """Return whether a standby server runs its program, and answers or works, as far as that can be found out."""
        try:
            program = server.running and any(MODULE in word for word in command_of(server.pid))
            return program and await server.alive()
        except OSError:
            # Unknown for lack of a file descriptor.
            return server.running

    async def _discard(self, server: Child) -> int:
        if self._server is server:
            self._server = None
        await server.end(0.0)
        if server in self._context.children:
            self._context.children.remove(server)
        return server.pid

    def _slow_down(self) -> None:
        """Have imports pause, so that they leave the processors to the engine, unless the machine has many."""
        processes = 1 + (self._context.me.devices if self._has_workers else 0)
        if len(os.sched_getaffinity(0)) < processes * _PROCESSORS_EACH:
            self._context.brake.touch()

    def release(self) -> None:
        """Let the imports continue at full speed: the engine is dead, and the next one needs the processes."""
        try:
            self._context.brake.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the processes in waiting import slowly: %s", error)

    async def _until_idle(self, api: str, seconds: float) -> None:
        """Wait until vLLM has had no request for `seconds`; an engine that does not report a number counts as busy."""
        begun = time.monotonic()
        idle: float | None = None
        headers = token_auth.headers(self._context.token)
        while (now := time.monotonic()) - begun < _LATEST_SECONDS:
            busy = await open_requests(api, headers) != 0
            idle = None if busy else now if idle is None else idle
            if idle is not None and now - idle >= seconds:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _has_memory(self) -> bool:
        signals = self._context.record.signals
        available = signals.memory_available if signals is not None else None
        if available is not None and available < _LEAST_MEMORY:
            _log.info("no process waits for the next engine: %s MiB are available", available >> 20)
            return False
        return True

    async def take(self, args: tuple[str, ...], log: str, name: str = "api") -> Child | None:
        """Turn the standby process into vLLM with these arguments, this log and this role; return None if there is none
        that runs and answers."""
        server = self._server
        if server is None:
            return None
        if not await self._is_usable(server):
            _log.warning("the standby server (process %s) does not answer: a cold start", await self._discard(server))
            return None
        if self._server is not server:
            # `_until_lost` has discarded it meanwhile.
            return None
        self._server = None
        server.name = name
        order = {"args": args, "env": self._context.env, "log": log}
        return server if server.send(f"{json.dumps(order)}\n".encode()) else None
