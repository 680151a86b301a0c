"""Handover of client connections between two gateway processes; tests/unit/local/test_gateway.py kills real ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from dsv4_runtime.gateway import handover
from dsv4_runtime.gateway.handover import Guard, Heir
from dsv4_runtime.gateway.http_server import Handler, HttpServer
from dsv4_runtime.gateway.request import Account, Request
from dsv4_testkit.waiting import until

Adopted = list[tuple[bytes, int, int]]


@contextlib.contextmanager
def inheriting(*, started: bool = True) -> Iterator[tuple[Heir, str, Adopted]]:
    """An heir, its abstract address without the zero byte, and what it continues: request, bytes sent and received."""
    adopted: Adopted = []

    def adopt(connection: socket.socket, request: bytes, sent: int, received: int) -> None:
        connection.close()
        adopted.append((request, sent, received))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        heir = Heir(listener, adopt)
        if started:
            heir.start()
        try:
            yield heir, listener.getsockname()[1:].decode(), adopted
        finally:
            heir.close()


def sizes(heir: Heir) -> list[int]:
    return [len(records) for records in heir._channels.values()]


async def test_more_connections_than_the_buffer_has_room_for_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux grants no more by default (net.core.wmem_max).
    monkeypatch.setattr(handover, "_BUFFER_BYTES", 212_992)
    count = 1500
    with inheriting(started=False) as (heir, address, _), contextlib.ExitStack() as opened:
        guard = Guard(b"\0" + address.encode())
        for _ in range(count):
            # Any socket that does not hang up.
            connection = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            guard.open(connection.fileno(), 0, 0, adopted=False)
        guarding = asyncio.create_task(guard.run())
        try:
            # Longer than the guard's interval of connections, while nobody reads.
            await asyncio.sleep(0.1)
            channel = guard._channel
            await asyncio.sleep(0.4)
            assert channel is not None
            assert guard._channel is channel
            heir.start()
            await until(lambda: sizes(heir) == [count])
            late = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            guard.open(late.fileno(), 0, 0, adopted=False)
            await until(lambda: sizes(heir) == [count + 1])
        finally:
            guarding.cancel()


# Announces its connection, receives 5 bytes, and announces the connection on another channel.
_PROCESS = """
import contextlib, os, socket, sys, time
from dsv4_runtime.gateway.handover import _HEADER, _OPEN

def announced(received):
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(b"\\0" + sys.argv[1].encode())
    with contextlib.suppress(BrokenPipeError):
        socket.send_fds(channel, [_HEADER.pack(_OPEN, 0, 1, 0, received)], [connection.fileno()])
    return channel

os.setuid(int(sys.argv[2]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
first = announced(0)
assert connection.recv(5, socket.MSG_WAITALL) == b"bytes"
connection.setblocking(False)
first.close()
second = announced(5)
print("announced", flush=True)
time.sleep(600)
"""


@contextlib.asynccontextmanager
async def announcing(address: str, user: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """A process of `user` that has announced a connection, and the client's side of that."""
    command = [sys.executable, "-c", _PROCESS, address, str(user)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            client = socket.create_connection(("127.0.0.1", int(await process.stdout.readline())))
            with client:
                client.sendall(b"bytes")
                assert await process.stdout.readline() == b"announced\n"
                yield process, client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_killed_process_is_continued_from_its_latest_channel() -> None:
    with inheriting() as (heir, address, adopted):
        async with announcing(address, os.geteuid()) as (process, client):
            await until(lambda: sizes(heir)[-1:] == [1])
            process.kill()
            await until(lambda: adopted)
            await until(lambda: not heir._channels)
            client.settimeout(60)
            assert client.recv(100) == b"", "nothing but the end, which the one that continues it made"
    assert adopted == [(b"", 0, 5)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_processes_of_other_users_hand_nothing_over() -> None:
    with inheriting() as (heir, address, adopted):
        async with announcing(address, 65534):
            await asyncio.sleep(0.2)
            assert sizes(heir) == []
    assert adopted == []


GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"


@contextlib.asynccontextmanager
async def guarded(address: str, handle: Handler) -> AsyncIterator[int]:
    """The port of a server whose connections are handed over to the heir at `address`."""
    guard = Guard(b"\0" + address.encode())
    guarding = asyncio.create_task(guard.run())
    server = HttpServer(handle, Account(2**26), max_connections=4, guard=guard)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(listener)
    try:
        yield listener.getsockname()[1]
    finally:
        guarding.cancel()
        await server.close(0.0)


@pytest.mark.parametrize("cut", [1, len(POST) - 8, len(POST) - 2])
async def test_a_connection_with_half_of_a_request_is_not_idle(cut: int) -> None:
    """Otherwise the rest would be taken for the next request."""

    async def handle(request: Request) -> None:
        while await request.part():
            pass
        request.record(bytearray(), repeatable=True)
        await request.send(200, [], b"")

    with inheriting() as (heir, address, _):
        async with guarded(address, handle) as port, asyncio.timeout(60):
            await until(lambda: heir._channels)
            (records,) = heir._channels.values()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET + POST[:cut])
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: [one.kind for one in records.values()] == [handover._IDLE])
            (record,) = records.values()
            sent, received = handover.counters(record.connection)
            assert record.sent == sent
            assert record.received != received
            writer.write(POST[cut:])
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: (record.sent, record.received) == handover.counters(record.connection))
            writer.close()


async def test_a_connection_whose_request_is_too_large_to_hand_over_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its client would wait for an answer in vain."""
    monkeypatch.setattr(handover, "_MAX_BYTES", 3)

    async def handle(request: Request) -> None:
        request.record(bytearray(await request.part()), repeatable=True)
        await asyncio.sleep(600)

    with inheriting() as (heir, address, _):
        async with guarded(address, handle) as port, asyncio.timeout(60):
            await until(lambda: heir._channels)
            (records,) = heir._channels.values()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST)
            await until(lambda: records)
            (record,) = records.values()
            assert record.received != handover.counters(record.connection)[1]
            writer.close()


_SHORT = """\
import asyncio, os, resource, socket, sys

import uvloop

from dsv4_runtime.gateway import http_server
from dsv4_runtime.gateway.handover import Guard
from dsv4_runtime.gateway.http_server import HttpServer
from dsv4_runtime.gateway.request import Account

http_server._RESERVED_SECONDS = float(sys.argv[2])


async def handle(request):
    body = bytearray()
    while part := await request.part():
        body += part
    request.record(body, repeatable=True)
    if request.path == "/waits":
        print("recorded", flush=True)
        await asyncio.sleep(600)
    await request.send(200, [], b"")


async def main():
    loop = asyncio.get_running_loop()
    guard = Guard(b"\\0" + sys.argv[1].encode())
    server = HttpServer(handle, Account(2**26), max_connections=100, guard=guard, own_paths=frozenset({"/healthz"}))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    await server.start(*listeners)
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    limits, taken, guarding = resource.getrlimit(resource.RLIMIT_NOFILE), [], None
    # The process has taken all that it needs for this.
    word = await loop.run_in_executor(None, sys.stdin.readline)
    while word:
        if word == "take\\n":
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                pass
        elif word == "guard\\n":
            guarding = asyncio.create_task(guard.run())
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for each in taken:
                os.close(each)
        print("done", flush=True)
        word = await loop.run_in_executor(None, sys.stdin.readline)


uvloop.run(main())
"""


class Short:
    """A process with a server on uvloop that has no free file descriptor between `take` and `free`."""

    def __init__(self, process: asyncio.subprocess.Process, shared: int, own: int) -> None:
        self.process, self.shared, self.own = process, shared, own

    async def do(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n".encode())
        assert await self.process.stdout.readline() == b"done\n"


@contextlib.asynccontextmanager
async def short(address: str, limit: float = 1.0) -> AsyncIterator[Short]:
    """Start a `Short`; a connection with the last descriptor has `limit` seconds to send its request."""
    command = [sys.executable, "-c", _SHORT, address, str(limit)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            yield Short(process, *map(int, (await process.stdout.readline()).split()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(port: int, path: str = "/healthz") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return await reader.readline()


# The event loop may run timers or read first.
@pytest.mark.parametrize("attempt", range(3))
async def test_a_probe_that_arrives_during_a_pause_of_the_process_is_answered(attempt: int) -> None:
    limit = 3.0
    with inheriting() as (_, address, _):
        async with short(address, limit) as found:
            await found.do("take")
            reader, writer = await asyncio.open_connection("127.0.0.1", found.own)
            process = psutil.Process(found.process.pid)
            await until(lambda: any(one.raddr and one.laddr.port == found.own for one in process.net_connections()))
            # Its limit has begun.
            found.process.send_signal(signal.SIGSTOP)
            try:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await asyncio.sleep(limit)
            finally:
                found.process.send_signal(signal.SIGCONT)
            with contextlib.closing(writer):
                assert b" 200 " in await reader.readline()


async def test_without_a_descriptor_connections_wait_and_probes_are_answered() -> None:
    with inheriting() as (_, address, _):
        # A busy machine may need a second between the connection and its request.
        async with short(address, 10.0) as found:
            assert b" 200 " in await _answer(found.shared, "/x")
            await found.do("take")
            waiting = [asyncio.create_task(_answer(found.shared, "/x")) for _ in range(3)]
            # During some attempts of the other listener, which are 0.2 s apart.
            for _ in range(100):
                assert b" 200 " in await _answer(found.own)
            # Others at that socket have to send another time: the descriptor is for probes.
            assert b" 503 " in await _answer(found.own, "/x")
            # A connection that is kept leaves no descriptor for the next probe until its limit only.
            kept = socket.create_connection(("127.0.0.1", found.own))
            assert b" 200 " in await _answer(found.own)
            kept.close()
            assert not any(each.done() for each in waiting), "they are in the queue of the socket"
            await found.do("free")
            assert all(b" 200 " in line for line in await asyncio.gather(*waiting))


async def test_the_descriptor_of_probes_is_kept_before_another_listener_takes_one() -> None:
    """The event loop may report that listener after the end of a probe, before its descriptor is kept again."""
    taken: list[tuple[socket.socket, int | None]] = []
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    probes = handover.Acceptor(listeners[0], lambda connection, _: connection.close(), probed=True)
    shared = handover.Acceptor(
        listeners[1], lambda connection, _: taken.append((connection, probes._spare)), probed=False, first=[probes]
    )
    try:
        assert probes._release()
        with socket.create_connection(listeners[1].getsockname()):
            await until(lambda: taken)
        assert taken[0][1] is not None
    finally:
        probes.close()
        shared.close()
        for connection, _ in taken:
            connection.close()


async def test_connections_are_handed_over_once_there_is_a_descriptor() -> None:
    with inheriting() as (heir, address, _):
        async with short(address) as found:
            reader, writer = await asyncio.open_connection("127.0.0.1", found.shared)
            writer.write(GET)
            assert b" 200 " in await reader.readline()
            await found.do("take")
            await found.do("guard")
            await asyncio.sleep(1.0)
            assert sizes(heir) == []
            await found.do("free")
            await until(lambda: sizes(heir) == [1])
            writer.close()


async def test_a_long_request_without_a_descriptor_costs_no_other_connection_and_gets_an_error() -> None:
    with inheriting() as (heir, address, adopted):
        async with short(address) as found:
            await found.do("guard")
            opened = [await asyncio.open_connection("127.0.0.1", found.shared) for _ in range(2)]
            for reader, writer in opened:
                writer.write(GET)
                await reader.readuntil(b"\r\n\r\n")
            await until(lambda: sizes(heir) == [2])
            (channel,) = heir._channels
            await found.do("take")
            reader, writer = opened[0]
            body = b"x" * 2**17
            writer.write(b"POST /waits HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert found.process.stdout is not None
            assert await found.process.stdout.readline() == b"recorded\n"
            await asyncio.sleep(1.0)
            assert list(heir._channels) == [channel]
            found.process.kill()
            assert b" 502 " in await reader.readline()
            await until(lambda: adopted)
            for _, each in opened:
                each.close()
    assert [request for request, _, _ in adopted] == [b""], "the idle connection"


async def test_an_heir_without_a_descriptor_continues_a_killed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with inheriting() as (heir, address, adopted):
        async with announcing(address, os.geteuid()) as (process, _):
            await until(lambda: sizes(heir)[-1:] == [1])
            opens = os.pidfd_open

            def refused(pid: int, flags: int = 0) -> int:
                if pid == process.pid:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return opens(pid, flags)

            monkeypatch.setattr(os, "pidfd_open", refused)
            process.kill()
            await until(lambda: adopted)
    assert adopted == [(b"", 0, 5)]
