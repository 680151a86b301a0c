"""Probes between two members' addresses (reachability, packet size, TCP stream), their evaluation, and the
bandwidth probe of all members: `python -m dsv4_runtime.fabric.probes`.

Each side responds (`Responder`) and sends (`probe`), so each direction is tested by its sender. A probe carries the
sender's rank and a keyed hash: packets of other incarnations get no reply, and no reply is larger than its request.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Interface
from typing import Any, cast

from dsv4_runtime.contract import FabricPlan, Rail
from dsv4_runtime.fabric.checks import Check, CheckReason, CheckStatus
from dsv4_runtime.util.files import own_shortage

# linux/in.h; missing in Python's socket module.
_IP_MTU_DISCOVER = 10
_IP_PMTUDISC_PROBE = 3
"""Set don't-fragment and ignore the kernel's path MTU, so that the path itself is tested."""
_IP_UDP_HEADERS = 28

_HEADER = struct.Struct("!4sBHQ")
_MAGIC = b"dsv4"
_REQUEST, _REPLY, _STREAM = 1, 2, 3
_TAG = 16
SMALLEST = _HEADER.size + _TAG + _IP_UDP_HEADERS
"""Smallest probe, as an IP packet in bytes."""

_STREAM_BYTES = 256 * 1024
_STREAM_SECONDS = 5.0
# Timeouts of successive attempts: long where the start depends on the result, because either end may be busy; short for
# the search of a path's limit, which is informational.
_LONG_WAITS = (0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0)
_SHORT_WAITS = (0.25, 0.25)
_PORT_TRIES = 20


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Result of one side for the path between two addresses."""

    mine: Rail
    theirs: Rail
    arrives: bool
    """A small packet was answered."""
    streams: bool
    """A TCP stream of 256 KiB was echoed unchanged."""
    carries: int
    """Largest IP packet in bytes that arrived; 0 if none did. Exact only below the requested size."""
    received: bool
    """A packet of the peer arrived."""
    seconds: float
    """Shortest round trip of a small packet."""


class Responder:
    """Responds to probes on a member's rails, over UDP and TCP on one port each, until closed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._open: list[Callable[[], object]] = []
        self._received: dict[tuple[int, str], float] = {}

    async def open(self, rails: tuple[Rail, ...], port: int = 0) -> tuple[Rail, ...]:
        """Listen on every rail, at `port` or at any free port if it is 0; return the rails with their ports.

        Raises:
            OSError: an address does not exist, or has no free port.
        """
        return tuple([await self._listen(rail, port) for rail in rails])

    def received(self, rank: int, rail: Rail) -> float | None:
        """Return the seconds since the latest packet of `rank` at `rail`; None if there was none."""
        received = self._received.get((rank, _ip(rail)))
        return None if received is None else time.monotonic() - received

    def close(self) -> None:
        """Stop listening."""
        for close in self._open:
            close()
        self._open.clear()

    async def _listen(self, rail: Rail, wanted: int) -> Rail:
        loop = asyncio.get_running_loop()
        for attempt in range(_PORT_TRIES):
            stream = _socket(socket.SOCK_STREAM, rail, wanted)
            port = stream.getsockname()[1]
            try:
                datagram = _socket(socket.SOCK_DGRAM, rail, port)
            except OSError:
                # The number is in use for UDP.
                stream.close()
                if wanted or attempt == _PORT_TRIES - 1:
                    raise
                continue
            server = await asyncio.start_server(self._echo, sock=stream)
            transport, _ = await loop.create_datagram_endpoint(lambda: _DatagramResponder(self, rail), sock=datagram)
            self._open += [server.close, transport.close]
            return rail.model_copy(update={"port": port})
        raise AssertionError("unreachable")

    def answer(self, data: bytes, rail: Rail) -> bytes | None:
        """Return the reply to a datagram; None if it is not a probe of this group."""
        header = _unseal(self._key, data)
        if header is None or header[0] != _REQUEST:
            return None
        self._received[header[1], _ip(rail)] = time.monotonic()
        return _seal(self._key, _REPLY, header[1], header[2])

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_STREAM_SECONDS):
                header = _unseal(self._key, await reader.readexactly(_HEADER.size + _TAG))
                if header is None or header[0] != _STREAM:
                    return
                left = _STREAM_BYTES
                while left and (data := await reader.read(min(left, 65_536))):
                    left -= len(data)
                    writer.write(data)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return
        finally:
            writer.close()


class _DatagramResponder(asyncio.DatagramProtocol):
    def __init__(self, responder: Responder, rail: Rail) -> None:
        self._responder, self._rail = responder, rail

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Always a datagram transport; asyncio declares that only since Python 3.12.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._responder.answer(data, self._rail)
        if answer is not None:
            self._transport.sendto(answer, addr)


async def probe(key: bytes, rank: int, mine: Rail, theirs: Rail, want: int) -> ProbeOutcome:
    """Probe the path from `mine` to `theirs` (which has a port) with IP packets of up to `want` bytes.

    Takes 4 s if nothing arrives, and up to 20 s on a path that silently drops large packets.
    """
    path = _Path(key, rank, mine, theirs)
    try:
        quickest = await path.fastest()
        if quickest is None:
            return ProbeOutcome(mine, theirs, arrives=False, streams=False, carries=0, received=False, seconds=0.0)
        streams = await _stream(key, rank, mine, theirs)
        carries = await path.largest(want)
        return ProbeOutcome(
            mine,
            theirs,
            arrives=carries > 0,
            streams=streams,
            carries=carries,
            received=False,
            seconds=quickest,
        )
    finally:
        path.close()


class _Path:
    """UDP socket between two addresses, without fragmentation."""

    def __init__(self, key: bytes, rank: int, mine: Rail, theirs: Rail) -> None:
        self._key, self._rank = key, rank
        self._target = (_ip(theirs), theirs.port)
        self._socket = _socket(socket.SOCK_DGRAM, mine, 0)

    def close(self) -> None:
        self._socket.close()

    async def fastest(self) -> float | None:
        """Return the shortest of several round trips in seconds; None if all packets are lost."""
        times = []
        for seconds in _LONG_WAITS:
            begun = time.monotonic()
            if await self._once(SMALLEST, seconds):
                times.append(time.monotonic() - begun)
            elif times:
                break
        return min(times, default=None)

    async def largest(self, want: int) -> int:
        """Return the largest packet up to `want` bytes that arrives, by bisection below `want`.

        A small packet after each loss shows the other side that the search goes on, and this side that packets are lost
        because of their size. Returns 0 if small ones are lost too.
        """
        for seconds in _LONG_WAITS:
            if await self._once(want, seconds):
                return want
            await self._once(SMALLEST, _SHORT_WAITS[0])
        low, high = SMALLEST, want
        while high - low > 1:
            middle = (low + high) // 2
            if await self._arrives(middle, _SHORT_WAITS):
                low = middle
            elif not await self._arrives(SMALLEST, _LONG_WAITS):
                return 0
            elif await self._once(middle, _SHORT_WAITS[0]):
                # The other side was late before, for example paused.
                low = middle
            else:
                high = middle
        return low

    async def _arrives(self, size: int, tries: Sequence[float]) -> bool:
        for seconds in tries:
            if await self._once(size, seconds):
                return True
        return False

    async def _once(self, size: int, seconds: float) -> bool:
        nonce = secrets.randbits(63)
        probe = _seal(self._key, _REQUEST, self._rank, nonce).ljust(size - _IP_UDP_HEADERS, b"\0")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                # EMSGSIZE: larger than the interface's MTU; others: no route, refused.
                await loop.sock_sendto(self._socket, probe, self._target)
                while True:
                    data, _ = await loop.sock_recvfrom(self._socket, 65_536)
                    if _unseal(self._key, data) == (_REPLY, self._rank, nonce):
                        return True
        except OSError:
            # An error may belong to an earlier packet; the next attempt decides.
            await asyncio.sleep(0.01)
            return False


async def _stream(key: bytes, rank: int, mine: Rail, theirs: Rail) -> bool:
    """Return whether 256 KiB of random bytes are echoed unchanged over TCP."""
    data = os.urandom(_STREAM_BYTES)
    writer = None
    try:
        async with asyncio.timeout(_STREAM_SECONDS):
            reader, writer = await asyncio.open_connection(_ip(theirs), theirs.port, local_addr=(_ip(mine), 0))
            writer.write(_seal(key, _STREAM, rank, secrets.randbits(63)) + data)
            return hmac.compare_digest(await reader.readexactly(_STREAM_BYTES), data)
    except (OSError, asyncio.IncompleteReadError) as error:
        if own_shortage(error) is not None:
            # Not a defect of the path.
            raise
        return False
    finally:
        if writer is not None:
            writer.close()


def group_key(token: str, incarnation: int) -> bytes:
    """Return the probe key of an incarnation, derived from its token."""
    return hashlib.sha256(f"dsv4 fabric probe\0{incarnation}\0{token}".encode()).digest()


def _seal(key: bytes, kind: int, rank: int, nonce: int) -> bytes:
    header = _HEADER.pack(_MAGIC, kind, rank, nonce)
    return header + hmac.digest(key, header, "sha256")[:_TAG]


def _unseal(key: bytes, data: bytes) -> tuple[int, int, int] | None:
    """Return (kind, rank, nonce) of an authentic probe, else None."""
    header, tag = data[: _HEADER.size], data[_HEADER.size : _HEADER.size + _TAG]
    if len(header) < _HEADER.size or not hmac.compare_digest(hmac.digest(key, header, "sha256")[:_TAG], tag):
        return None
    magic, kind, rank, nonce = _HEADER.unpack(header)
    return (kind, rank, nonce) if magic == _MAGIC else None


def _socket(kind: socket.SocketKind, rail: Rail, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET, kind)
    try:
        opened.setblocking(False)
        if kind == socket.SOCK_STREAM:
            # Recently closed connections must not block a fixed port.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.SOCK_DGRAM:
            opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        opened.bind((_ip(rail), port))
    except OSError:
        opened.close()
        raise
    return opened


def _ip(rail: Rail) -> str:
    return str(IPv4Interface(rail.address).ip)


def paths(mine: Sequence[Rail], theirs: Sequence[Rail]) -> list[tuple[Rail, Rail]]:
    """Return the pairs of addresses to probe: those of the sockets, and RDMA rails in the same network.

    The first rail of each side is that of its sockets, which may be routed. RDMA is not routed.
    """
    found = [(mine[0], theirs[0])] if mine and theirs else []
    for here in mine:
        for there in theirs:
            both = here.hca is not None and there.hca is not None
            if both and (here, there) not in found and _network(here) == _network(there):
                found.append((here, there))
    return found


def is_ring(mine: Sequence[Rail], others: Sequence[Sequence[Rail]]) -> bool:
    """Return whether an RDMA rail of this member does not reach every other member: direct cables without a switch."""
    return any(
        rail.hca is not None and not any(there.hca and _network(rail) == _network(there) for there in theirs)
        for rail in mine
        for theirs in others
    )


def address_problem(plan: FabricPlan, own: int, rank: int, rails: Mapping[int, Sequence[Rail]]) -> Check | None:
    """Return the conflict between the addresses of rank `own` and those of `rank`, before any packet is sent.

    Args:
        plan: the required properties.
        own: this member.
        rank: the other member.
        rails: addresses of all members.
    """
    mine, theirs = rails[own], rails[rank]
    name, fail = f"addresses of rank {rank}", CheckStatus.FAIL
    if twice := {_ip(rail) for rail in mine} & {_ip(rail) for rail in theirs}:
        found = f"rank {rank} has the address {min(twice)} too"
        remedy = "give every machine addresses of its own"
        return Check(name, fail, found, remedy, CheckReason.DUPLICATE_ADDRESS, min(twice))
    if plan.requires_rdma_between(own, rank, len(rails)) and not _share_network(mine, theirs):
        ends = f"here: {_show(mine)}; there: {_show(theirs)}"
        found = f"no RDMA port here is in a network with one of rank {rank} ({ends})"
        return Check(name, fail, found, _network_remedy(plan, own, rails), CheckReason.NO_COMMON_NETWORK)
    return None


def _share_network(mine: Sequence[Rail], theirs: Sequence[Rail]) -> bool:
    return any(here.hca and there.hca for here, there in paths(mine, theirs))


def _network_remedy(plan: FabricPlan, own: int, rails: Mapping[int, Sequence[Rail]]) -> str:
    cabled = [rank for rank in rails if rank != own and _share_network(rails[own], rails[rank])]
    if plan.neighbours_only:
        there = ", ".join(map(str, cabled)) or "none"
        return (
            f"the ring needs the order of the cables, and rank {own} is cabled to {there}: list the machines in that "
            "order (spec.topology.nodes, hosts.yaml)"
        )
    remedy = "give the two ends of each cable addresses in one network"
    if len(rails) > 3 and len(cabled) == 2:
        remedy += (
            "; four or more machines in a ring need a switch, or a build with an NCCL that connects neighbours alone: "
            "list NCCL_SWITCHLESS_RING_ONLY in spec.engine.build.variables, and set it to 1 and NCCL_ALGO to Ring in "
            "spec.engine.env"
        )
    return remedy


def required_size(plan: FabricPlan, mine: Rail, theirs: Rail) -> int:
    """Return the required IP packet size in bytes of the path between two rails."""
    return plan.mtu or min(mine.mtu, theirs.mtu)


def path_problem(plan: FabricPlan, peer: str, outcome: ProbeOutcome) -> Check | None:
    """Return the failed check of a path to `peer`, else None."""
    here, there = _ip(outcome.mine), _ip(outcome.theirs)
    path = f"from {here} ({outcome.mine.interface}) to {there} of {peer}"
    name, fail = f"path to {peer}", CheckStatus.FAIL
    if not outcome.arrives and outcome.received:
        found = f"packets sent {path} do not arrive, although packets of {peer} arrive here: this direction is blocked"
        remedy = "check the firewalls of both machines and the routes between them"
        return Check(name, fail, found, remedy, CheckReason.ONE_WAY)
    if not outcome.arrives:
        found = f"nothing comes back {path}, and no packet of {peer} arrives here"
        remedy = "check the cable, the switch, the firewalls (ufw) and the address at the other end"
        return Check(name, fail, found, remedy, CheckReason.NO_REPLY)
    want = required_size(plan, outcome.mine, outcome.theirs)
    if outcome.carries < want:
        found = f"the path {path} carries packets of {outcome.carries} bytes, not of {want}"
        remedy = (
            f"set the MTU of every interface and switch between them to {want}, or that of both ends to "
            f"{outcome.carries}"
        )
        return Check(name, fail, found, remedy, CheckReason.PATH_MTU, outcome.carries)
    if not outcome.streams:
        found = f"a TCP stream {path} stalls or breaks although packets arrive"
        return Check(name, fail, found, "check the firewalls of both machines", CheckReason.TCP_BROKEN)
    return None


def mtu_notes(rank: int, outcomes: Sequence[ProbeOutcome]) -> list[str]:
    """Return remarks about differing MTUs."""
    return [
        f"{outcome.mine.interface} has an MTU of {outcome.mine.mtu}, its peer {_ip(outcome.theirs)} of rank {rank} "
        f"one of {outcome.theirs.mtu}"
        for outcome in outcomes
        if outcome.mine.mtu != outcome.theirs.mtu
    ]


def _show(rails: Sequence[Rail]) -> str:
    return ", ".join(f"{rail.hca} {rail.address}" for rail in rails if rail.hca) or "none"


def _network(rail: Rail) -> object:
    return IPv4Interface(rail.address).network


_RESULT = "dsv4 fabric bandwidth: "
_ALL_REDUCE_BYTES = 256 * 2**20
_ROUNDS, _WARM = 8, 2


@dataclass(frozen=True, slots=True)
class BandwidthResult:
    """Result of the bandwidth probe."""

    bandwidth: float | None
    """Bus bandwidth in bytes per second; None if not measured."""
    skipped: str | None
    """Reason for a skipped measurement."""


def bandwidth_command(rank: int, world: int, address: str, port: int, seconds: float) -> list[str]:
    """Return the command of one member's bandwidth probe; `address` and `port` are those of rank 0's rendezvous."""
    arguments = {"--rank": rank, "--world": world, "--address": address, "--port": port, "--seconds": seconds}
    words = [str(word) for pair in arguments.items() for word in pair]
    return [sys.executable, "-m", "dsv4_runtime.fabric.probes", *words]


def parse_bandwidth(output: str) -> BandwidthResult | None:
    """Return the result printed by a probe; None if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(_RESULT):
            try:
                document = json.loads(line.removeprefix(_RESULT))
                return BandwidthResult(document.get("bandwidth"), document.get("skipped"))
            except (ValueError, AttributeError):
                return None
    return None


def bus_bandwidth(size: int, world: int, seconds: float) -> float:
    """Return the bytes per second of the slowest link of a ring all-reduce of `size` bytes, as defined by
    nccl-tests.
    """
    return 2 * (world - 1) / world * size / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bandwidth probe of one member: an all-reduce over all members; print one line of JSON.

    A separate process because a CUDA context holds memory until its process ends. NCCL's log shows the transport.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, kind in (("rank", int), ("world", int), ("address", str), ("port", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        _print_result({"skipped": "no GPU"})
        return 0
    _print_result({"bandwidth": _measure_bandwidth(torch, given), "gpu": torch.cuda.get_device_name(0)})
    return 0


def _measure_bandwidth(torch: Any, given: argparse.Namespace) -> float:
    """Measure; exceptions of torch propagate to the log, which the parent process reads."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://{given.address}:{given.port}",
        rank=given.rank,
        world_size=given.world,
        timeout=timedelta(seconds=given.seconds),
    )
    data = torch.ones(_ALL_REDUCE_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    best = float("inf")
    for turn in range(_WARM + _ROUNDS):
        data.fill_(1)
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begun = time.monotonic()
        torch.distributed.all_reduce(data)
        torch.cuda.synchronize()
        # The first rounds connect the ranks.
        if turn >= _WARM:
            best = min(best, time.monotonic() - begun)
    wrong = int((data != given.world).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {data.numel()} sums are wrong: the fabric or a GPU corrupts data")
    torch.distributed.destroy_process_group()
    return bus_bandwidth(_ALL_REDUCE_BYTES, given.world, best)


def _print_result(document: dict[str, object]) -> None:
    print(_RESULT + json.dumps(document), flush=True)


if __name__ == "__main__":
    sys.exit(main())
