"""Ray node of one member: start, end and health."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from dsv4_runtime.agent.context import AgentContext, start_background
from dsv4_runtime.agent.decide.death import describe_exit
from dsv4_runtime.agent.decide.events import RayLost
from dsv4_runtime.agent.processes import Child
from dsv4_runtime.contract import Cause, GroupPlan, Role
from dsv4_runtime.contract.plan import RAY_COMMAND, RAY_LINKS
from dsv4_runtime.engine.logs import RAY_STARTED
from dsv4_runtime.util.clock import tick
from dsv4_runtime.util.files import own_shortage
from dsv4_runtime.util.procfs import Work, entry

_log = logging.getLogger(__name__)

_RAY_START = "dsv4_runtime.engine.ray_start"
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_TICK_SECONDS = 0.25
_PROBE_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_SLOW_SECONDS = 30.0
"""Time for which a GCS that works counts as one that answers."""
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_STREAM = 1


class RayNode:
    """Ray node of one member. Created inside a running event loop."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._exit: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> None:
        """Start the node and wait until Ray reports that it runs; the decisions bound the wait."""
        me, log = self._context.me, self._context.tails["ray"]
        self._probing = start_background(self._probe_gcs())
        if me.role is Role.WORKER:
            # `ray start` gives up before a slow head is ready.
            while self._context.gcs_answered is None:  # noqa: ASYNC110  (set by `_probe_gcs`)
                await asyncio.sleep(_TICK_SECONDS)
        link_ray_root(me.ray_args, self._context.directory / "ray")
        child = await self._context.start_child("ray", [sys.executable, "-m", _RAY_START, *me.ray_args])
        self._exit = asyncio.create_task(self._await_exit(child))
        # The line is written by another process: there is no event to wait for. `ray start` itself notices a GCS or a
        # raylet that died or stopped only after 30 s and more, so both are watched as soon as they exist.
        while not any(RAY_STARTED in line for line in log.read()):
            self._context.watch.refresh()
            await asyncio.sleep(_TICK_SECONDS)
        self._started = True

    def process_ended(self, role: str) -> None:
        """Report the end of the raylet or the GCS, a second before `ray start --block` exits for it."""
        cause = Cause.RAYLET_DIED if role == "raylet" else Cause.RAY_HEAD_LOST
        origin = self._context.exit_causes.raylet_origin() if role == "raylet" else None
        message = f"the {role} process of rank {self._context.rank} ended"
        if origin is not None:
            message += f", because its {origin} had ended: Ray's raylet does not run without it"
        elif not self._started:
            message += f" during `ray start`{self._first_error()}"
        self._context.feed(RayLost(cause, message, "process"))

    def close(self) -> None:
        """Stop to probe the GCS."""
        if self._probing is not None:
            self._probing.cancel()

    async def _await_exit(self, ray: Child) -> None:
        code = await ray.wait()
        cause = Cause.RAY_HEAD_LOST if self._context.me.role is Role.HEAD else Cause.RAYLET_DIED
        message = f"Ray on rank {self._context.rank} ended ({describe_exit(code)}){self._first_error()}"
        self._context.feed(RayLost(cause, message, "exit"))

    def _first_error(self) -> str:
        log = self._context.tails["ray"]
        log.read()
        return f": {log.first_fatal[0]}" if log.first_fatal else ""

    async def _probe_gcs(self) -> None:
        """Call the GCS once a second, and record the time of its latest answer.

        On its own machine, work of its process counts as an answer for a while: it may be slow.
        """
        context, head = self._context, self._context.plan.head
        assert head.ports.gcs is not None  # noqa: S101  (validated in the plan)
        truly, work = 0.0, None
        while True:
            pids = [pid for pid, role in context.watch.roles.items() if role == "gcs"]
            before = work
            try:
                work = Work.of(filter(None, map(entry, pids)), time.monotonic())
                answers = await grpc_answers(head.address, head.ports.gcs, _CHECK_ALIVE, context.token, _ANSWER_SECONDS)
            except OSError as error:
                if work is not None:
                    _log.warning("Ray's GCS cannot be called, which does not count: %s", error)
                    work = None
                # Silence counts from the end of the shortage on.
                answers = context.gcs_answered is not None
            if answers:
                context.gcs_answered = truly = time.monotonic()
            elif (
                pids
                and before is not None
                and work is not None
                and work.beyond(before)
                and time.monotonic() - truly < _SLOW_SECONDS
            ):
                context.gcs_answered = time.monotonic()
            await tick(_PROBE_SECONDS)


def link_ray_root(words: Iterable[str], directory: Path) -> None:
    """Create the link that the `--temp-dir` of `ray start` names instead of `directory`, if it names one.

    Links of members that are gone are removed.

    Raises:
        OSError: it cannot be created.
    """
    link = Path(_arguments(words).get("--temp-dir", ""))
    if link.parent.name != RAY_LINKS:
        return
    directory.mkdir(exist_ok=True)
    link.parent.mkdir(mode=0o700, exist_ok=True)
    for other in link.parent.iterdir():
        if not other.exists():
            other.unlink(missing_ok=True)
    unfinished = link.with_suffix(f".{os.getpid()}")
    unfinished.symlink_to(directory)
    unfinished.replace(link)


def with_command(plan: GroupPlan, rank: int, command: str) -> GroupPlan:
    """Return `plan` with the `ray start` of `rank` that KubeRay generated from it, so that its additions take effect.

    Args:
        plan: plan with the arguments that the member needs.
        rank: rank of the member.
        command: `ray start --head --port=6379 --block …`, without quotes and expansions.

    Raises:
        ValueError: the command lacks an argument of the plan or has another value.
    """
    program, *words = shlex.split(command)
    wanted, given = plan.members[rank].ray_args, _arguments(words)
    wrong = [word for word in wanted if word.startswith("--") and not _arguments([word]).items() <= given.items()]
    if program != "ray" or words[:1] != ["start"] or wrong:
        what = f"lacks {' '.join(wrong)}" if wrong else "is no `ray start`"
        raise ValueError(
            f"{RAY_COMMAND}: the command of KubeRay {what}: {command!r}; remove the webhook or the setting of KubeRay "
            "that changes rayStartParams"
        )
    members = list(plan.members)
    members[rank] = members[rank].model_copy(update={"ray_args": tuple(words)})
    return plan.model_copy(update={"members": tuple(members)})


def _arguments(words: Iterable[str]) -> dict[str, str]:
    """Return flags and their values; those of Ray that are false may also be `no`."""
    pairs = (word.partition("=") for word in words if word.startswith("--"))
    return {name: "no" if value == "false" else value for name, _, value in pairs}


async def grpc_answers(address: str, port: int, method: str, token: str, seconds: float) -> bool:
    """Return whether a gRPC server answers a call with an empty request within `seconds`, with any result. Raises as
    `grpc_call`."""
    return await grpc_call(address, port, method, token, seconds) is not None


async def grpc_call(
    address: str, port: int, method: str, token: str, seconds: float, message: bytes = b""
) -> bool | None:
    """Call a gRPC server; return whether it returns a message, or None without a result within `seconds`.

    Over plain HTTP/2 (RFC 9113): gRPC's own library would cost the agent 20 MiB.

    Args:
        message: serialized request, at most 16 KiB - 5 bytes: one frame.

    Raises:
        OSError: this process lacks the resources for a connection.
    """
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(_call(f"{address}:{port}", method, token, message))
                while True:
                    header = await reader.readexactly(9)
                    await reader.readexactly(int.from_bytes(header[:3], "big"))
                    if header[3] == _HEADERS and int.from_bytes(header[5:], "big") == _STREAM:
                        # An error has no message: its only headers end the stream.
                        return not header[4] & _END_STREAM
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        if own_shortage(error) is not None:
            raise
        return None


def _call(authority: str, method: str, token: str, message: bytes) -> bytes:
    """Return the bytes of a connection with one call."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": f"Bearer {token}",
    }
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
    data = b"\0" + len(message).to_bytes(4, "big") + message  # not compressed
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        + _frame(_DATA, _END_STREAM, _STREAM, data)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(text: str) -> bytes:
    """Return a string literal of HPACK (RFC 7541), without Huffman coding."""
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    length, rest = b"\x7f", len(data) - 127
    while rest >= 128:
        length, rest = length + bytes((rest % 128 + 128,)), rest // 128
    return length + bytes((rest,)) + data
