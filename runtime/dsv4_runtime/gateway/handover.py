"""Handover of client connections between the gateway processes of one address.

A process (`Guard`) gives its heir, another process, a duplicate of each client connection and each request that it has
read. If it ends without closing them, for example by SIGKILL, the heir (`Heir`) continues: it answers requests of which
no byte of a response was sent, keeps idle connections, and ends streams with an error event. The kernel's counters of a
connection show how much of a response was sent, so nothing is recorded for the parts of a response.

Messages go over a Unix socket of type SOCK_SEQPACKET and never block. A guard that cannot send closes the channel; its
heir drops the duplicates if the process still runs, and gets all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import termios
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import REQUEST_ID, Refusal
from dsv4_runtime.gateway.http_client import encode_head
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger("dsv4.gateway")

_HEADER = struct.Struct("=BBIQQ")
"""Kind, flags, number of the connection, bytes sent and bytes received on it."""
_OPEN, _REQUEST, _STREAM, _IDLE = range(4)
_REPEATABLE, _CHUNKED, _ADOPTED = 1, 2, 4
_INLINE_BYTES = 2**15
"""Above this size, a request is in a memory file."""
_MESSAGE_BYTES = 2**16
_BUFFER_BYTES = 4 << 20
_CONNECT_SECONDS = 0.25
_END_SECONDS = 2.0
"""Limit for the end of a process whose channel was closed."""
_MAX_BYTES = 64 << 20
"""Limit of all bodies that a process has handed over; requests beyond it are not."""
_BATCH = 64
# linux/tcp.h: bytes acknowledged and received, without those that this side has not read.
_TCP_INFO_BYTES, _COUNTERS = 192, struct.Struct("=QQ")
_COUNTERS_OFFSET = 120
UNKNOWN = 2**64 - 1
"""Bytes received on a connection in the middle of a request."""
_POLL_SECONDS = 0.005
_BACKLOG = 4096
_NO_ACCEPT_SECONDS = 0.2
"""Pause of a listener after it could not accept a connection."""
_RESET = struct.pack("ii", 1, 0)
# Set for the repeated request.
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect", b"connection", REQUEST_ID.lower()})


class Acceptor:
    """Accepts the connections of one listening socket.

    If this process has no free file descriptor, connections wait in the socket's queue, from which other processes may
    take them; uvloop's own server would accept and close all of them. A probe must be answered even then: without an
    answer, the process would be replaced.
    """

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket, bool], None],
        *,
        probed: bool,
        first: Iterable[Acceptor] = (),
    ) -> None:
        """Args:
        listener: the socket.
        take: called with a connection, and whether it has the last file descriptor.
        probed: whether to keep a descriptor for one connection more.
        first: acceptors whose descriptor is kept before this one takes any.
        """
        self._listener, self._take, self._probed, self._first = listener, take, probed, tuple(first)
        self._spare: int | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._lacking = False
        """Whether the latest attempt failed."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._resume()

    def keep_spare(self) -> None:
        """Take a descriptor for one connection more unless there is one: call it after the end of a connection."""
        if self._probed and self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.dup(self._listener.fileno())

    def close(self) -> None:
        """Stop accepting, and close the socket. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._release()
        self._listener.close()
        self._probed = False

    def _resume(self) -> None:
        self.keep_spare()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _release(self) -> bool:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        return spare is not None

    def _accept(self, *, scarce: bool = False) -> None:
        for each in self._first:
            # Between the end of a probe and the call of `keep_spare`, the event loop may report this socket.
            each.keep_spare()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            # Another process took it, or its client is gone.
            return
        except OSError as error:
            if own_shortage(error) is not None and self._release():
                self._accept(scarce=True)
                return
            if not self._lacking:
                _log.warning("no connection can be accepted, which is tried again: %s", error)
            self._lacking = True
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._pause = loop.call_later(_NO_ACCEPT_SECONDS, self._resume)
            return
        self._lacking = scarce
        connection.setblocking(False)
        self._take(connection, scarce)


def counters(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes of a TCP connection that were given to the kernel, and that were taken from it."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    acknowledged, received = _COUNTERS.unpack_from(info, _COUNTERS_OFFSET)
    return acknowledged + _waiting(connection, termios.TIOCOUTQ), received - _waiting(connection, termios.FIONREAD)


def _waiting(connection: socket.socket, queue: int) -> int:
    found = bytearray(4)
    fcntl.ioctl(connection.fileno(), queue, found)
    return int(struct.unpack("i", found)[0])


class Guarded:
    """One client connection of a guard."""

    def __init__(self, number: int, descriptor: int, sent: int, received: int, *, adopted: bool) -> None:
        self.number, self.descriptor = number, descriptor
        self._inode = os.fstat(descriptor).st_ino
        self.sent, self.received = sent, received
        """At the latest message."""
        self.kind = _IDLE
        self.flags = _ADOPTED if adopted else 0
        self.request: Request | None = None
        self.body: bytes | bytearray = b""
        self.size = 0
        """Counted bytes of the body."""

    def message(self) -> tuple[bytes, bytes]:
        """Return header and payload of the present state."""
        payload = b""
        if self.kind == _REQUEST and self.request is not None:
            payload = serialize(self.request, self.body)
        return _HEADER.pack(self.kind, self.flags, self.number, self.sent, self.received), payload

    def hang_up(self) -> None:
        """End the connection: closing one of two descriptors has no effect."""
        with contextlib.suppress(OSError):
            if os.fstat(self.descriptor).st_ino == self._inode:
                connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self.descriptor)
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                finally:
                    connection.detach()


def serialize(request: Request, body: bytes | bytearray) -> bytes:
    """Return path and identity in a line, then the request as it is to be repeated, on its last use of a connection."""
    headers = [(name, value) for lowered, name, value in request.headers if lowered not in _FRAMING]
    own = [(REQUEST_ID, request.id.encode()), (b"Content-Length", b"%d" % len(body)), (b"Connection", b"close")]
    version = b"1.1" if request.chunks else b"1.0"
    first = b"%b %b HTTP/%b" % (request.method.encode(), request.target.encode("latin-1"), version)
    return b"%b %b\n" % (
        request.id.encode(),
        request.path.encode(errors="surrogateescape")[:200].replace(b"\n", b""),
    ) + (encode_head(first, [*headers, *own]) + body)


class Guard:
    """Sends the client connections of this process to its heir."""

    def __init__(self, address: bytes) -> None:
        """`address`: abstract address of the heir's Unix socket."""
        self._address = address
        self._channel: socket.socket | None = None
        self._all: dict[int, Guarded] = {}
        self._number = 0
        self._bytes = 0

    async def run(self) -> None:
        """Connect, and again after each end of a channel."""
        while True:
            if self._channel is None and (channel := self._connect()) is not None:
                await self._announce_all(channel)
            await asyncio.sleep(_CONNECT_SECONDS)

    def open(self, descriptor: int, sent: int, received: int, *, adopted: bool) -> Guarded:
        """Add a connection."""
        self._number += 1
        guarded = self._all[self._number] = Guarded(self._number, descriptor, sent, received, adopted=adopted)
        self._announce(guarded)
        return guarded

    def close(self, guarded: Guarded) -> None:
        """Remove a connection that ends; call it while its descriptor is open."""
        self._all.pop(guarded.number, None)
        self._forget(guarded)
        guarded.hang_up()

    def request(self, guarded: Guarded, request: Request, body: bytearray, sent: int, *, repeatable: bool) -> None:
        """Record a request that was read and that nothing was responded to."""
        if self._bytes + len(body) > _MAX_BYTES:
            return
        self._bytes += len(body)
        guarded.size = len(body)
        guarded.kind, guarded.sent = _REQUEST, sent
        guarded.flags |= _REPEATABLE if repeatable else 0
        guarded.request, guarded.body = request, body
        if not self._send(guarded):
            self._forget(guarded)
            guarded.kind = _IDLE

    def stream(self, guarded: Guarded, *, chunked: bool) -> None:
        """Record that the response is a stream of events, before its first byte."""
        if guarded.kind == _REQUEST:
            guarded.kind = _STREAM
            guarded.flags |= _CHUNKED if chunked else 0
            self._send(guarded)

    def idle(self, guarded: Guarded, sent: int, received: int) -> None:
        """Record that the response is complete."""
        guarded.kind, guarded.sent, guarded.received, guarded.flags = _IDLE, sent, received, 0
        self._forget(guarded)
        self._send(guarded)

    def _forget(self, guarded: Guarded) -> None:
        self._bytes -= guarded.size
        guarded.request, guarded.body, guarded.size = None, b"", 0

    def _connect(self) -> socket.socket | None:
        try:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            # No free descriptor.
            return None
        channel.setblocking(False)
        with contextlib.suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        try:
            channel.connect(self._address)
        except OSError:
            channel.close()
            return None
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel, self._disconnect)
        return channel

    async def _announce_all(self, channel: socket.socket) -> None:
        """Announce all connections as fast as the heir reads: a full buffer would close the channel."""
        for guarded in tuple(self._all.values()):
            while self._channel is channel and not _is_writable(channel):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
            if self._channel is not channel:
                return
            if guarded.number in self._all:
                self._announce(guarded)
            await asyncio.sleep(0)

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel)
            channel.close()

    def _announce(self, guarded: Guarded) -> None:
        header = _HEADER.pack(_OPEN, guarded.flags, guarded.number, guarded.sent, guarded.received)
        self._transmit(header, guarded.descriptor)
        if guarded.kind != _IDLE:
            # A stream whose beginning the heir has not seen can still be ended.
            kind, guarded.kind = guarded.kind, _REQUEST
            sent = self._send(guarded)
            guarded.kind = kind
            if kind == _STREAM and sent:
                self._send(guarded)

    def _send(self, guarded: Guarded) -> bool:
        """Send the present state; return False if this process lacks the resources to send it."""
        if self._channel is None:
            return True
        header, payload = guarded.message()
        if len(payload) <= _INLINE_BYTES:
            self._transmit(header + payload)
            return True
        try:
            with open(os.memfd_create("request", os.MFD_CLOEXEC), "wb") as file:
                file.write(payload)
                file.flush()
                self._transmit(header, file.fileno())
        except OSError as error:
            if own_shortage(error) is not None:
                # The heir keeps all other connections, and answers this one with an error.
                return False
            self._disconnect()
        return True

    def _transmit(self, message: bytes, *descriptors: int) -> None:
        if self._channel is not None:
            try:
                socket.send_fds(self._channel, [message], descriptors)
            except OSError:
                self._disconnect()


@dataclass(slots=True)
class _Record:
    """Last known state of another process' connection."""

    connection: socket.socket
    kind: int
    flags: int
    sent: int
    """Bytes sent at the end of the latest complete response."""
    received: int
    begun: int = -1
    """Bytes sent before the latest request's response."""
    payload: bytes = b""
    """Of the latest request."""


class Heir:
    """Receives the client connections of other processes, and continues them when such a process has ended."""

    def __init__(self, listener: socket.socket, adopt: Callable[[socket.socket, bytes, int, int], None]) -> None:
        """Args:
        listener: Unix socket (SOCK_SEQPACKET) of this process.
        adopt: called with a connection, the bytes of its request to be repeated, and the bytes sent and received on it
            so far.
        """
        self._listener, self._adopt = listener, adopt
        self._channels: dict[socket.socket, dict[int, _Record]] = {}
        self._hung_up = select.epoll()
        self._by_descriptor: dict[int, tuple[dict[int, _Record], int]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to receive."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        loop.add_reader(self._hung_up, self._drop_hung_up)

    def close(self) -> None:
        """Stop receiving, and drop all connections of other processes."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        for task in self._settling:
            task.cancel()
        for channel in tuple(self._channels):
            self._end_channel(channel)
        loop.remove_reader(self._hung_up)
        self._hung_up.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            if _peer(channel)[1] != os.geteuid():
                # Abstract addresses have no permissions.
                channel.close()
                continue
            channel.setblocking(False)
            for other in tuple(self._channels):
                if _peer(other) == _peer(channel):
                    # The process announces all its connections again.
                    self._end_channel(other)
            self._channels[channel] = {}
            asyncio.get_running_loop().add_reader(channel, self._receive, channel)

    def _receive(self, channel: socket.socket) -> None:
        records = self._channels[channel]
        for _ in range(_BATCH):
            try:
                message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                message, descriptors = b"", []
            if not message:
                asyncio.get_running_loop().remove_reader(channel)
                task = asyncio.get_running_loop().create_task(self._settle(channel, records))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)
                return
            self._handle(records, message, descriptors)

    def _handle(self, records: dict[int, _Record], message: bytes, descriptors: list[int]) -> None:
        kind, flags, number, sent, received = _HEADER.unpack_from(message)
        if kind == _OPEN:
            if descriptors and number not in records:
                connection = socket.socket(fileno=descriptors[0])
                records[number] = _Record(connection, _IDLE, flags, sent, received)
                self._by_descriptor[connection.fileno()] = records, number
                # Without any event, it reports the end of both directions, and errors.
                self._hung_up.register(connection.fileno(), 0)
                return
        elif (record := records.get(number)) is not None:
            record.kind, record.flags = kind, flags
            if kind == _REQUEST:
                record.begun = sent
                record.payload = _read(descriptors[0]) if descriptors else message[_HEADER.size :]
            elif kind == _IDLE:
                record.sent, record.received, record.payload = sent, received, b""
        for descriptor in descriptors:
            os.close(descriptor)

    def _take(self, records: dict[int, _Record], number: int) -> _Record:
        record = records.pop(number)
        descriptor = record.connection.fileno()
        del self._by_descriptor[descriptor]
        self._hung_up.unregister(descriptor)
        return record

    def _end_channel(self, channel: socket.socket) -> None:
        """Close a channel, and drop the connections that came over it. Idempotent."""
        if (records := self._channels.pop(channel, None)) is None:
            return
        for number in tuple(records):
            self._take(records, number).connection.close()
        asyncio.get_running_loop().remove_reader(channel)
        channel.close()

    def _drop_hung_up(self) -> None:
        for descriptor, _ in self._hung_up.poll(0):
            if (found := self._by_descriptor.get(descriptor)) is not None:
                self._take(*found).connection.close()

    async def _settle(self, channel: socket.socket, records: dict[int, _Record]) -> None:
        """Continue the connections of a process that has ended; drop those of one that runs."""
        try:
            ended = await _has_ended(channel)
            # A process that ended after it had made another channel is continued from there.
            self._accept()
            self._drop_hung_up()
            if ended and records:
                results = [self._continue(self._take(records, number)) for number in tuple(records)]
                counts = ", ".join(f"{results.count(name)} {name}" for name in dict.fromkeys(results))
                _log.warning("another gateway process ended; its client connections: %s", counts)
        finally:
            self._end_channel(channel)

    def _continue(self, record: _Record) -> str:
        """Continue or end one connection; return what was done."""
        connection = record.connection
        try:
            sent, received = counters(connection)
            if record.kind == _IDLE and sent == record.sent:
                if received == record.received:
                    self._adopt(connection, b"", sent, received)
                    return "idle"
                return _end(connection, _response(errors.gateway_lost("the request was not read completely"), ""))
            line, _, request = record.payload.partition(b"\n")
            identity, _, path = line.decode(errors="surrogateescape").partition(" ")
            if request and sent == record.begun:
                if record.flags & _REPEATABLE and not record.flags & _ADOPTED:
                    self._adopt(connection, request, sent, received)
                    return "repeated"
                why = "it may have been processed" if not record.flags & _ADOPTED else "for the second time"
                return _end(connection, _response(errors.gateway_lost(why), identity))
            if record.kind == _STREAM and sent > record.begun and _is_writable(connection):
                event = errors.gateway_lost("the stream cannot be continued").event(path)
                chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
                return _end(connection, chunk if record.flags & _CHUNKED else event)
        except OSError as error:
            _log.warning("a client connection cannot be continued: %s", error)
        # A response that is incomplete must not look complete.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()
        return "broken"


async def _has_ended(channel: socket.socket) -> bool:
    """Return whether the process at the other end of a closed channel has ended, or ends soon."""
    number = _peer(channel)[0]
    try:
        process = os.pidfd_open(number)
    except ProcessLookupError:
        return True
    except OSError as error:
        return own_shortage(error) is not None and await _has_gone(number)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(_END_SECONDS):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
        os.close(process)
    return True


async def _has_gone(process: int) -> bool:
    """Return whether there is no process of that number, or soon none; needs no file descriptor."""
    end = asyncio.get_running_loop().time() + _END_SECONDS
    while asyncio.get_running_loop().time() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(_POLL_SECONDS)
    return False


def _peer(channel: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and of the user at the other end."""
    process, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _read(memory: int) -> bytes:
    with contextlib.suppress(OSError, ValueError), mmap.mmap(memory, 0, prot=mmap.PROT_READ) as found:
        return found[:]
    return b""


def _is_writable(connection: socket.socket) -> bool:
    """Return whether the client reads: the last part of the stream is complete then."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return poll.poll(0) == [(connection.fileno(), select.POLLOUT)]


def _response(refusal: Refusal, identity: str) -> bytes:
    own: Iterable[tuple[bytes, bytes]] = [(b"Content-Length", b"%d" % len(refusal.body)), (b"Connection", b"close")]
    return encode_head(b"HTTP/1.1 502 Bad Gateway", [*refusal.headers(identity or "-"), *own]) + refusal.body


def _end(connection: socket.socket, data: bytes) -> str:
    """Send the last bytes of a connection and close it."""
    with contextlib.suppress(BlockingIOError):
        # Unread bytes would reset it. Bounded, for a client that keeps sending.
        for _ in range(_BATCH):
            if not connection.recv(_MESSAGE_BYTES):
                break
    connection.send(data)
    connection.shutdown(socket.SHUT_WR)
    connection.close()
    return "ended with an error"
