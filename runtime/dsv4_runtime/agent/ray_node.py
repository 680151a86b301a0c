"""Ray on one member: started, waited for, and missed as soon as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dsv4_runtime.agent.decide.events import RayLost
from dsv4_runtime.agent.processes import Child
from dsv4_runtime.contract import Cause, MemberPlan, Role
from dsv4_runtime.engine.commands import ray_command
from dsv4_runtime.engine.exits import describe_exit
from dsv4_runtime.engine.logs import RAY_STARTED, LogTail

_TICK_SECONDS = 0.25
_CONNECT_SECONDS = 2.0


class RayNode:
    """The Ray node of one member. Made inside a running event loop."""

    def __init__(self, me: MemberPlan, head: MemberPlan, log: LogTail, tell: Callable[[RayLost], None]) -> None:
        """Args:
        me: this member.
        head: the member that has the GCS.
        log: what `ray start` writes.
        tell: told when the node has ended, whoever noticed it.
        """
        self._me = me
        self._head = head
        self._log = log
        self._exit: asyncio.Task[None] | None = None
        self._tell = tell

    async def start(self, start_child: Callable[[str, list[str]], Awaitable[Child]]) -> None:
        """Start it, and wait until it says that it runs; for how long at most is the caller's to say."""
        if self._me.role is Role.WORKER:
            await self._wait_for_gcs()
        child = await start_child("ray", ray_command(self._me))
        self._exit = asyncio.create_task(self._await_exit(child))
        # What is waited for happens in another process' log: there is no event to wait on.
        while not any(RAY_STARTED in line for line in self._log.read()):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)

    def process_ended(self, role: str) -> None:
        """Tell that the raylet or the GCS ended. `ray start --block` says so too, a second later."""
        cause = Cause.RAYLET_DIED if role == "raylet" else Cause.RAY_HEAD_LOST
        self._tell(RayLost(cause, f"the {role} process of rank {self._me.rank} ended", "process"))

    async def _await_exit(self, ray: Child) -> None:
        code = await ray.wait()
        self._log.read()
        said = f": {self._log.first_fatal[0]}" if self._log.first_fatal else ""
        cause = Cause.RAY_HEAD_LOST if self._me.role is Role.HEAD else Cause.RAYLET_DIED
        self._tell(RayLost(cause, f"Ray on rank {self._me.rank} ended ({describe_exit(code)}){said}", "exit"))

    async def _wait_for_gcs(self) -> None:
        """Wait until the head's Ray listens: `ray start` gives up sooner than a slow head comes."""
        while True:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(self._head.address, self._head.ports.gcs)
            except (OSError, TimeoutError):
                await asyncio.sleep(_TICK_SECONDS)
            else:
                writer.close()
                return
