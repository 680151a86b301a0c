"""Processes that have imported vLLM before they are needed: of a restart's time that is half, on any machine.

Rank 0 has vLLM's API server in waiting (`vllm_plugin.standby`), every rank the Ray workers of its devices
(`vllm_plugin.prestart`). None of them touches a device before it is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import TYPE_CHECKING

from dsv4_runtime.agent.processes import Child
from dsv4_runtime.contract import Role

if TYPE_CHECKING:
    from dsv4_runtime.agent.member import Member

_log = logging.getLogger(__name__)

NAME = "standby"
_AFTER_SECONDS = 5.0
"""The engine answers what has waited for it first."""
_BOUND_SECONDS = 30.0
_LEAST_MEMORY = 4 << 30
"""Where less is available, nothing waits: a restart that takes longer is better than one for want of memory."""


class Standby:
    """What waits on one member for the next engine."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._server: Child | None = None

    async def prepare(self) -> None:
        """Have it wait, a moment after the engine began to serve; what does not work is logged, and costs time only."""
        await asyncio.sleep(_AFTER_SECONDS)
        member = self._member
        signals = member.state.signals
        if signals is not None and signals.memory_available is not None and signals.memory_available < _LEAST_MEMORY:
            _log.info("no process waits for the next engine: %s MiB are available", signals.memory_available >> 20)
            return
        head = member.plan.head
        member.children = [child for child in member.children if child.name != NAME or child.running]
        if member.me.role is Role.HEAD and (self._server is None or not self._server.running):
            command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.standby"]
            self._server = await member.start_child(NAME, command, fed=True)
        if any("--distributed-executor-backend=ray" in argument for argument in member.plan.engine.args):
            place = [f"{head.address}:{head.ports.gcs}", member.me.address, str(member.me.devices)]
            command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.prestart", *place]
            asking = await member.start_child("prestart", command)
            try:
                async with asyncio.timeout(_BOUND_SECONDS):
                    if (code := await asking.wait()) != 0:
                        _log.warning("no worker of Ray waits for the next engine (exit code %s): prestart.log", code)
            finally:
                await asking.end(0.0)
                member.children.remove(asking)

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
