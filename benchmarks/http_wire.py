"""Times of HTTP/1.1 requests and responses on the wire of a TCP port, by the kernel's clock (packet(7))."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_SO_RCVBUFFORCE = 33
_SO_TIMESTAMPNS = 35
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_ETH_P_ALL = 3
_TCP = 6
_BUFFER_BYTES = 64 * 2**20
_PACKET_BYTES = 4096


@dataclass
class Exchange:
    """A request and its response; times in seconds, valid only as differences."""

    asked: float
    first: float = 0.0
    """Time of the first byte of the response's body; 0: not received."""
    _answer: bytearray = field(default_factory=bytearray, repr=False)
    _seen: set[int] = field(default_factory=set, repr=False)

    @property
    def seconds(self) -> float:
        """Return the seconds from the request to the first byte of the response's body."""
        return self.first - self.asked

    def add(self, sequence: int, payload: bytes, at: float) -> None:
        """Add a packet of the response; a packet occurs once for every interface that it passes."""
        if not self.first and sequence not in self._seen:
            self._seen.add(sequence)
            self._answer += payload
            if self._answer.partition(b"\r\n\r\n")[2]:
                self.first = at


class Tap:
    """Receives the packets of one port on every interface of this network namespace."""

    def __init__(self, port: int, packets: socket.socket) -> None:
        self._port = port
        self._packets = packets

    def drain(self) -> list[Exchange]:
        """Return the exchanges since the last call, for requests that never overlap.

        Raises:
            RuntimeError: packets were lost because the buffer was full.
        """
        found: list[Exchange] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(found)
        _, lost = struct.unpack("II", self._packets.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        if lost:
            raise RuntimeError(f"{lost} packets lost: fewer requests between two calls")
        return found

    def _take(self, found: list[Exchange]) -> None:
        packet, [(_, _, stamp)], _, _ = self._packets.recvmsg(_PACKET_BYTES, 64)
        if packet[0] >> 4 != 4 or packet[9] != _TCP:
            return
        segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4])]
        source, target, sequence = struct.unpack("!HHI", segment[:8])
        payload = segment[4 * (segment[12] >> 4) :]
        if not payload:
            return
        seconds, nanoseconds = struct.unpack("qq", stamp)
        at = seconds + nanoseconds / 1e9
        if target == self._port:
            if payload.startswith(b"POST ") and (not found or found[-1].first):
                found.append(Exchange(at))
        elif source == self._port and found:
            found[-1].add(sequence, payload, at)


@contextlib.contextmanager
def tap(port: int) -> Iterator[Tap]:
    """Listen to a port; requires CAP_NET_RAW.

    Raises:
        PermissionError: it is missing.
    """
    try:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
    except PermissionError as error:
        raise PermissionError(f"packets of port {port} cannot be seen without CAP_NET_RAW; run this as root") from error
    with packets:
        packets.setblocking(False)
        packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        packets.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        yield Tap(port, packets)
