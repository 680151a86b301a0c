"""The fabric of one member, from discovery to verification, as used by the agent.

Order: `open` (discover, check, listen), `prove` (all paths to all other members, both directions), `measure`
(bandwidth, with GPUs). The status of other members comes from their agents. `NcclLog` determines NCCL's transport from
its log, the only proof of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Protocol

from dsv4_runtime.contract import Cause, FabricPlan, FabricStatus, GroupPlan, Rail
from dsv4_runtime.fabric.checks import (
    CheckStatus,
    FabricChoice,
    Variable,
    choose_fabric,
    failures,
    run_checks,
    variables,
)
from dsv4_runtime.fabric.node import Node, discover_node
from dsv4_runtime.fabric.probes import (
    ProbeOutcome,
    Responder,
    address_problem,
    bandwidth_command,
    group_key,
    is_ring,
    mtu_notes,
    parse_bandwidth,
    path_problem,
    paths,
    probe,
    required_size,
)
from dsv4_runtime.util.files import own_shortage
from dsv4_runtime.util.log_lines import is_nccl, log_reader

_VERSION = re.compile(r"NCCL version (\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)")
_NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) ([A-Za-z0-9_.-]{1,64})")
# `Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`; a `NET/IB : Using …` line only lists devices. The atomic
# group keeps the search linear: only the first arrow can start a match.
_CONNECTION = re.compile(r"^(?>.*?(?:\[send\]|\[receive\]|->)).* via NET/([A-Za-z0-9_.-]{1,64})/\d")
_NO_DEVICE = re.compile(r"NET/IB ?: No device found")
_DEVICES = re.compile(r"NCCL INFO NET/IB ?: Using (.*)")
_DEVICE = re.compile(r"\[\d{1,4}\] ?([^\s:{},=]{1,64}(?::\d{1,4})?)/RoCE")


@dataclass(slots=True)
class NcclLog:
    """Parser of NCCL's log lines with NCCL_DEBUG=INFO and the subsystems INIT and NET, from NCCL 2.4 to 2.30; behind
    Ray they carry a prefix with the worker's name.
    """

    version: str | None = None
    network: str | None = None
    """Network of the latest communicator: `IB`, `Socket`, or the name of a plugin."""
    devices: tuple[str, ...] = ()
    """RDMA ports found by NCCL."""
    no_device: bool = False
    """NCCL found no RDMA device."""
    connections: Counter[str] = field(default_factory=Counter)
    """Number of connections between members per network."""
    first_socket: str | None = None
    """First line that shows sockets in use."""

    @log_reader(lambda: None)
    def feed(self, line: str) -> None:
        """Process a log line; lines of other programs are ignored."""
        if not is_nccl(line):
            return
        if match := _VERSION.search(line):
            self.version = match[1]
        if _NO_DEVICE.search(line):
            self.no_device = True
        if match := _DEVICES.search(line):
            self.devices = tuple(_DEVICE.findall(match[1])) or self.devices
        if match := _NETWORK.search(line):
            self.network = match[1]
            self._note(match[1], line)
        elif match := _CONNECTION.search(line):
            self.connections[match[1]] += 1
            self._note(match[1], line)

    @property
    def transport(self) -> str | None:
        """Return the transport in use: `Socket` as soon as any connection uses sockets; None if unknown."""
        if self.first_socket is not None:
            return "Socket"
        return self.network or next(iter(self.connections), None)

    def _note(self, network: str, line: str) -> None:
        if network.lower().startswith("socket") and self.first_socket is None:
            self.first_socket = line.strip()[:400]


_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
# Time for a packet of the peer, which shows the working direction of a path.
_LISTEN_SECONDS = 2.0
_LOG_BYTES = 1 << 20

Statuses = Callable[[], Mapping[int, FabricStatus | None]]
"""Latest fabric status of each other rank; None before the first."""


class FabricError(Exception):
    """The fabric does not meet the plan; the message contains location and remedy."""

    def __init__(self, message: str, cause: Cause = Cause.FABRIC_DOWN) -> None:
        super().__init__(message)
        self.cause = cause


class RunningProcess(Protocol):
    """Process started by the agent."""

    async def wait(self) -> int:
        """Return its exit code."""

    async def end(self, grace: float) -> None:
        """Stop the process."""


Start = Callable[[str, list[str]], Awaitable[RunningProcess]]
"""Starts a command under a name; its output goes to `<name>.log` in the member's directory."""


class MemberFabric:
    """The fabric of one member. Use inside a running event loop."""

    def __init__(self, plan: GroupPlan, fabric: FabricPlan, rank: int, token: str) -> None:
        self._plan, self._fabric, self._rank = plan, fabric, rank
        self._key = group_key(token, plan.incarnation)
        self._responder = Responder(self._key)
        self._choice: FabricChoice | None = None
        self.variables: tuple[Variable, ...] = ()
        """Environment of Ray and vLLM with reasons; complete after `prove`."""
        self.status = FabricStatus()

    async def open(self, node: Node | None = None) -> None:
        """Discover and check this machine, then respond to probes; raise FabricError if a check fails."""
        node = await asyncio.to_thread(discover_node) if node is None else node
        self._choice = choose_fabric(node, self._plan.members[self._rank].address, self._fabric.setting(self._rank))
        checks = run_checks(node, self._choice, self._fabric, self._rank)
        if bad := failures(checks):
            raise FabricError("; ".join(f"{check.name}: {check}" for check in bad))
        if self._choice.sockets is None:
            setting = self._fabric.setting(self._rank)
            raise FabricError(
                f"the interface {setting.interface} of spec.network.fabric is not here (there are: "
                f"{', '.join(sorted(node.interfaces))})"
                if setting.interface
                else f"no interface has the member's address {self._plan.members[self._rank].address}"
            )
        try:
            rails = await self._responder.open(self._choice.rails())
        except OSError as error:
            raise FabricError(f"cannot listen for probes: {error}") from error
        remarks = tuple(f"{check.name}: {check.found}" for check in checks if check.level is CheckStatus.WARN)
        self.status = FabricStatus(rails=rails, notes=remarks)
        for remark in remarks:
            _log.warning("fabric: %s", remark)

    async def prove(self, others: Statuses) -> None:
        """Wait for the other members, probe all paths to them, and wait until they have done the same.

        Raises:
            FabricError: a path is missing, blocked in one or both directions, or too narrow; or another member did not
                appear or did not prove its own paths in time.
        """
        theirs = await self._wait_for_rails(others)
        mine = self.status.rails
        if impossible := [
            str(check)
            for rank in theirs
            if (check := address_problem(self._fabric, self._rank, rank, {self._rank: mine, **theirs}))
        ]:
            raise FabricError("; ".join(impossible))
        ring = is_ring(mine, list(theirs.values()))
        if self._choice is not None:
            self.variables = variables(self._choice, self._fabric, self._rank, ring=ring)
        begun = time.monotonic()
        probed = await asyncio.gather(*(self._probe(rank, rails) for rank, rails in theirs.items()))
        remarks = list(self.status.notes)
        problems: list[str] = []
        for rank, outcomes in zip(theirs, probed, strict=True):
            failed = (path_problem(self._fabric, f"rank {rank}", outcome) for outcome in outcomes)
            problems += [str(check) for check in failed if check]
            remarks += mtu_notes(rank, outcomes)
        if problems:
            raise FabricError("; ".join(problems))
        count = sum(map(len, probed))
        _log.info("fabric: %s paths to %s members proved in %.1f s", count, len(theirs), time.monotonic() - begun)
        self.status = self.status.model_copy(update={"proved": True, "notes": tuple(dict.fromkeys(remarks))})
        await self._wait_for(others, lambda status: status.proved, self._fabric.seconds, "prove its paths")

    async def measure(self, others: Statuses, start: Start, log: Path) -> None:
        """Measure an all-reduce over all members if the plan has a minimum; `log` is the output file of `start`.

        Raises:
            FabricError: it was below the minimum, used sockets, or failed.
        """
        floor, world = self._fabric.min_bandwidth, len(self._plan.members)
        if floor is None or world < 2:
            return
        seconds = self._fabric.seconds
        try:
            async with asyncio.timeout(seconds):
                port = await self._rendezvous_port(others)
                head = self.status.rails[0] if self._rank == 0 else _head(others)
                address = str(IPv4Interface(head.address).ip)
                probe = await start("fabric", bandwidth_command(self._rank, world, address, port, seconds))
                try:
                    code = await probe.wait()
                finally:
                    await probe.end(0.0)
        except TimeoutError:
            raise FabricError(f"the bandwidth probe did not end within {seconds:.0f} s; see fabric.log") from None
        text = await asyncio.to_thread(_tail, log)
        self._evaluate(floor, code, text)

    def engine_said(self, line: str) -> str | None:
        """Process a line of the engine's log; return the problem if NCCL uses sockets although the plan requires
        RDMA.
        """
        nccl = NcclLog()
        nccl.feed(line)
        if nccl.transport is not None and nccl.transport != self.status.transport:
            self.status = self.status.model_copy(update={"transport": nccl.transport})
        return self._socket_fallback(nccl)

    def close(self) -> None:
        """Stop responding to probes."""
        self._responder.close()

    def _evaluate(self, floor: float, code: int, text: str) -> None:
        nccl = NcclLog()
        for line in text.splitlines():
            nccl.feed(line)
        found = parse_bandwidth(text)
        self.status = self.status.model_copy(update={"transport": nccl.transport})
        if (said := self._socket_fallback(nccl)) is not None:
            raise FabricError(said, Cause.NCCL_SOCKET_FALLBACK)
        if self._fabric.require_rdma and nccl.no_device and not nccl.devices:
            raise FabricError(
                "NCCL finds no RDMA device although the kernel shows one; give the container /dev/infiniband, "
                "the capability IPC_LOCK and libibverbs"
            )
        if code != 0 or found is None:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "it wrote nothing")
            raise FabricError(f"the bandwidth probe failed (exit code {code}): {last}")
        if found.bandwidth is None:
            _log.info("fabric: bandwidth skipped: %s", found.skipped)
            remark = f"bandwidth: skipped, {found.skipped}"
            self.status = self.status.model_copy(update={"notes": (*self.status.notes, remark)})
            return
        self.status = self.status.model_copy(update={"bandwidth": found.bandwidth})
        if found.bandwidth < floor:
            raise FabricError(
                f"an all-reduce over all members moves {found.bandwidth / 1e9:.2f} GB/s, the floor is "
                f"{floor / 1e9:.2f} GB/s; if every check of `dsv4 doctor` is ok, a ConnectX-7 came up degraded: "
                "take the power of the machines away for a minute and start them cold"
            )

    def _socket_fallback(self, nccl: NcclLog) -> str | None:
        # With a single member NCCL reports a network that it does not use.
        if not self._fabric.require_rdma or nccl.first_socket is None or len(self._plan.members) < 2:
            return None
        return (
            f"NCCL uses TCP sockets although the plan requires RDMA: {nccl.first_socket}; `dsv4 doctor` on each "
            "machine names the unusable port"
        )

    async def _rendezvous_port(self, others: Statuses) -> int:
        """Return the port of the rendezvous, chosen by rank 0."""
        if self._rank == 0:
            with socket.socket() as free:
                free.bind((str(IPv4Interface(self.status.rails[0].address).ip), 0))
                port: int = free.getsockname()[1]
            self.status = self.status.model_copy(update={"rendezvous": port})
            return port
        while True:
            status = others().get(0)
            if status is not None and status.rendezvous is not None:
                return status.rendezvous
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_rails(self, others: Statuses) -> dict[int, tuple[Rail, ...]]:
        bounds = self._plan.timeouts
        await self._wait_for(others, lambda status: bool(status.rails), bounds.staging + bounds.formation, "come")
        return {rank: status.rails for rank, status in others().items() if status is not None}

    async def _wait_for(
        self, others: Statuses, done: Callable[[FabricStatus], bool], seconds: float, doing: str
    ) -> None:
        deadline = time.monotonic() + seconds
        while late := [rank for rank, status in others().items() if status is None or not done(status)]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, late))
                raise FabricError(f"rank {ranks} did not {doing} within {seconds:.0f} s", Cause.FORMATION_TIMEOUT)
            await asyncio.sleep(_POLL_SECONDS)

    async def _probe(self, rank: int, theirs: tuple[Rail, ...]) -> list[ProbeOutcome]:
        """Probe all paths to one member sequentially."""
        return [
            await self._with_reception(rank, await self._probe_path(here, there))
            for here, there in paths(self.status.rails, theirs)
        ]

    async def _probe_path(self, here: Rail, there: Rail) -> ProbeOutcome:
        """Probe one path; wait while this process lacks the resources for that."""
        deadline = time.monotonic() + self._fabric.seconds
        while True:
            try:
                return await probe(self._key, self._rank, here, there, required_size(self._fabric, here, there))
            except OSError as error:
                if own_shortage(error) is None or time.monotonic() > deadline:
                    raise FabricError(f"cannot probe from {here.address}: {error}") from error
            await asyncio.sleep(_POLL_SECONDS)

    async def _with_reception(self, rank: int, outcome: ProbeOutcome) -> ProbeOutcome:
        deadline = time.monotonic() + (0.0 if outcome.arrives else _LISTEN_SECONDS)
        while self._responder.received(rank, outcome.mine) is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        return replace(outcome, received=self._responder.received(rank, outcome.mine) is not None)


def _head(others: Statuses) -> Rail:
    status = others().get(0)
    if status is None or not status.rails:
        raise FabricError("rank 0 has gone while the bandwidth was to be measured")
    return status.rails[0]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
