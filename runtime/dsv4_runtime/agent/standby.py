"""Processes that have imported vLLM before they are needed: of a start's time that is a quarter, of a restart's half.

Rank 0 has vLLM's API server in waiting, every rank the Ray workers of its devices (both: `vllm_plugin.warm_pool`).
None of them touches a device before it is used. While the engine serves they are made once it is idle, and they import
slowly (`slow_imports`), because all of them together would stall the requests of a machine with few processors for as
long as they import.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import TYPE_CHECKING

from dsv4_runtime.agent.drain import open_requests
from dsv4_runtime.agent.processes import Child
from dsv4_runtime.contract import Role
from dsv4_runtime.engine import token_auth

if TYPE_CHECKING:
    from dsv4_runtime.agent.member import Member

_log = logging.getLogger(__name__)

NAME = "standby"
BRAKE = "DSV4_IMPORT_BRAKE"
"""Environment variable with the file that slows the imports down (`vllm_plugin.warm_pool.BRAKE`)."""
_AFTER_SECONDS = 5.0
"""The engine has to be without requests for this long: it answers what has waited for it first."""
_LATEST_SECONDS = 60.0
"""An engine that is never idle has processes in waiting too, only later."""
_ASK_SECONDS = 1.0
_BOUND_SECONDS = 120.0
_LEAST_MEMORY = 4 << 30
"""Available memory below which nothing waits: a restart that takes longer is better than one for want of memory."""


class Standby:
    """Processes that wait on one member for the next engine."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._server: Child | None = None
        self.brake = member.directory / "import-brake"
        """File that slows imports down while it exists."""

    async def start_server(self, log: str) -> None:
        """Have rank 0's API server import vLLM, unless one waits already or memory is short.

        Args:
            log: which log it writes to until it is told what to be. If the next engine is the first one, vLLM's: what
                an import fails with is what that engine died of.

        Raises:
            OSError: the process cannot be started.
        """
        member = self._member
        member.children = [child for child in member.children if child.name != NAME or child.running]
        waits = self._server is not None and self._server.running
        if member.me.role is Role.HEAD and not waits and self._has_memory():
            command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.warm_pool", "server", member.plan.weights.path]
            self._server = await member.start_child(NAME, command, fed=True, log=log)

    async def prepare(self) -> None:
        """Have all wait, once the engine that began to serve is idle, or after a bounded time.

        Raises:
            OSError, TimeoutError: a process cannot be started, or Ray does not answer.
        """
        member, head = self._member, self._member.plan.head
        await self._until_idle(f"http://{head.address}:{head.ports.api}")
        self.brake.touch()
        await self.start_server(NAME)
        if not self._has_memory():
            return
        if any("--distributed-executor-backend=ray" in argument for argument in member.plan.engine.args):
            place = [f"{head.address}:{head.ports.gcs}", member.me.address, str(member.me.devices)]
            command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.warm_pool", "workers", *place]
            asking = await member.start_child("prestart", command)
            try:
                async with asyncio.timeout(_BOUND_SECONDS):
                    if (code := await asking.wait()) != 0:
                        _log.warning("no worker of Ray waits for the next engine (exit code %s): prestart.log", code)
            finally:
                await asking.end(0.0)
                member.children.remove(asking)

    def release(self) -> None:
        """Let the imports go on at full speed: the engine has died, and the next one needs the processes."""
        try:
            self.brake.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the processes in waiting import slowly: %s", error)

    async def _until_idle(self, api: str) -> None:
        """Wait until vLLM had no request for a while; an engine that does not say how many it has counts as busy."""
        begun = time.monotonic()
        idle: float | None = None
        headers = token_auth.headers(self._member.token)
        while (now := time.monotonic()) - begun < _LATEST_SECONDS:
            busy = await open_requests(api, headers) != 0
            idle = None if busy else now if idle is None else idle
            if idle is not None and now - idle >= _AFTER_SECONDS:
                return
            await asyncio.sleep(_ASK_SECONDS)

    def _has_memory(self) -> bool:
        signals = self._member.state.signals
        available = signals.memory_available if signals is not None else None
        if available is not None and available < _LEAST_MEMORY:
            _log.info("no process waits for the next engine: %s MiB are available", available >> 20)
            return False
        return True

    def take(self, args: tuple[str, ...], log: str) -> Child | None:
        """Have the process in waiting become vLLM's API server; None if there is none.

        Args:
            args: what follows the server's name.
            log: the file that it writes to from now on.
        """
        server, self._server = self._server, None
        if server is None or not server.running:
            return None
        server.name = "api"
        order = {"args": args, "env": self._member.env, "log": log}
        return server if server.tell(f"{json.dumps(order)}\n".encode()) else None
