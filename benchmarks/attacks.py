"""Measure how hostile clients affect a gateway and the clients beside them.

    python benchmarks/attacks.py [--seconds 5] [--only NAME …] [--runtime DIRECTORY] [--json FILE]

A gateway with default limits stands in front of an upstream that answers at once. Each attack runs in a process of its
own for so many seconds; meanwhile one honest client asks `/healthz` and another one asks for completions, each 50
times a second on a connection that stays. Printed are, of each attack, the gateway's memory at its peak and after it,
the slowest `/healthz`, and the honest p99 and losses. `quiet` is the same without an attack. `--runtime` takes the
gateway from another checkout's `runtime/`, for figures of before. Everything is on loopback, with at most 1000
connections, and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from gateway import running

from dsv4_runtime.contract.gateway import ENVIRONMENT
from dsv4_testkit import standin
from dsv4_testkit.http_load import Connection, connect, post, quantile
from dsv4_testkit.waiting import free_port, wait_for_port

MIB = 2**20
SETTINGS = {
    **{"servedNames": ["nano"], "holdTimeoutSeconds": 60, "maxHeldRequests": 1024, "maxHeldBytes": 256 * MIB},
    **{"requestTimeoutSeconds": 600, "maxBodyBytes": 64 * MIB, "drainSeconds": 1},
}
ACCOUNT = 448 * MIB
"""`maxClientBytes` by default; earlier versions had no such limit."""
PROBES_A_SECOND = 50
_ANSWER_SECONDS = 30.0
CONNECTIONS = 1000
TINY = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{}\r\n\r\n"


@contextlib.asynccontextmanager
async def _open(port: int) -> asyncio.StreamWriter:  # type: ignore[misc]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(_discard(reader))
    try:
        yield writer
    finally:
        reading.cancel()
        writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(2**16):
            pass


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def pipelining(port: int) -> None:
    """Requests on one connection without end."""
    async with _open(port) as writer:
        while True:
            await _write(writer, TINY * 1000)


async def trailers(port: int) -> None:
    """100 MiB of trailers behind a body."""
    async with _open(port) as writer:
        await _write(writer, HEAD.format("Transfer-Encoding: chunked").encode() + b"2\r\n{}\r\n0\r\nX-T: ")
        for _ in range(100):
            await _write(writer, b"x" * MIB)
        await asyncio.sleep(1)


async def unfinished(port: int) -> None:
    """Sixteen bodies of 64 MiB that lack their last byte."""

    async def one() -> None:
        async with _open(port) as writer:
            await _write(writer, HEAD.format(f"Content-Length: {64 * MIB}").encode())
            for _ in range(63):
                await _write(writer, b"x" * MIB)
            await asyncio.sleep(60)

    await asyncio.gather(*(one() for _ in range(16)), return_exceptions=True)


async def cancelled(port: int) -> None:
    """Whole bodies of 32 MiB, whose clients leave before the answer."""
    body = json.dumps({"prompt": "x" * 32 * MIB, "stream": True, "think": 60}).encode()
    async with _open(port) as writer:
        await _write(writer, HEAD.format(f"Content-Length: {len(body)}").encode() + body)
        await asyncio.sleep(0.1)


async def structure(port: int) -> None:
    """60 MiB of JSON that is nothing but empty arrays."""
    body = b'{"prompt":[' + b"[]," * (20 * MIB) + b'[]],"stream":true}'
    async with _open(port) as writer:
        await _write(writer, HEAD.format(f"Content-Length: {len(body)}").encode() + body)
        await asyncio.sleep(2)


async def connections(port: int) -> None:
    """A thousand connections that send garbage, half a head, half a body, or read nothing of a stream."""
    chance = random.Random(0)
    stream = json.dumps({"prompt": "x", "stream": True, "tokens": 200}).encode()
    kinds = (
        lambda: chance.randbytes(200),
        lambda: b"GET /x HTTP/1.1\r\nHost: x\r\nX-Y: " + b"z" * chance.randrange(60_000),
        lambda: HEAD.format("Content-Length: 200000").encode() + b"{" + b"x" * chance.randrange(100_000),
        lambda: HEAD.format(f"Content-Length: {len(stream)}").encode() + stream,
    )

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
                await _write(writer, chance.choice(kinds)())
                await asyncio.sleep(chance.random() * 20)
                writer.transport.abort()
            await asyncio.sleep(0.1)

    # A thousand connections made in one moment would measure this process.
    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one())
            await asyncio.sleep(0.002)


async def quiet(port: int) -> None:
    """Nothing."""
    await asyncio.sleep(3600)


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    attack.__name__: attack for attack in (quiet, pipelining, trailers, unfinished, cancelled, structure, connections)
}


async def repeat(attack: Callable[[int], Awaitable[None]], port: int, seconds: float) -> None:
    """Attack again and again until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(ConnectionError):
                    await attack(port)
                await asyncio.sleep(0.05)


@dataclass
class Found:
    """Figures of one attack: memory in MiB, times in milliseconds."""

    peak: float
    after: float
    health: float
    p50: float
    p99: float
    asked: int
    lost: int


async def _probe(url: str, request: bytes, seconds: float) -> tuple[list[float], int]:
    """Ask again and again, a late answer late: what the times were, and how many answers were none."""
    found, lost, end = list[float](), 0, time.monotonic() + seconds
    connection: Connection | None = None
    while (begun := time.monotonic()) < end:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = connection or await connect(url)
                _, answer = await connection.ask(request)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ConnectionError
        except (OSError, TimeoutError):
            lost, connection = lost + 1, None
        took = time.monotonic() - begun
        found.append(took * 1e3)
        await asyncio.sleep(max(0.0, 1 / PROBES_A_SECOND - took))
    return found, lost


async def measure(name: str, port: int, process: psutil.Process, seconds: float) -> Found:
    """One attack, and those beside it."""
    url, peak = f"http://127.0.0.1:{port}/v1/completions", 0
    health = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with running([sys.executable, __file__, "--attack", name, str(port), "--seconds", str(seconds)]):

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        (alive, _), (honest, lost) = await asyncio.gather(
            _probe(url, health, seconds), _probe(url, post(url, {"prompt": "x"}), seconds)
        )
        watching.cancel()
    await asyncio.sleep(1.0)
    after = process.memory_info().rss
    quantiles = [quantile(honest, share) for share in (0.5, 0.99)]
    return Found(peak / MIB, after / MIB, max(alive), *quantiles, len(honest), lost)


def attacked(name: str, seconds: float, runtime: Path | None) -> Found:
    """What `name` costs a fresh gateway."""
    port, front = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    environment = {**ENVIRONMENT, **({"PYTHONPATH": str(runtime.resolve())} if runtime else {})}
    settings = SETTINGS if runtime else {**SETTINGS, "maxClientBytes": ACCOUNT}
    with (
        tempfile.TemporaryDirectory() as directory,
        running([sys.executable, standin.__file__, str(port)]),
    ):
        root = Path(directory)
        (root / "token").write_text("stand-in")
        (root / "settings.json").write_text(json.dumps(settings))
        (root / "route.json").write_text(json.dumps({"agent": base, "api": base, "tokenFile": str(root / "token")}))
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", f"127.0.0.1:{front}"]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        command += ["--log", str(root / "log")]
        wait_for_port(port)
        with running(command, environment) as process:
            wait_for_port(front)
            time.sleep(0.5)
            return uvloop.run(measure(name, front, psutil.Process(process.pid), seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--runtime", type=Path, help="another version's runtime/")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        name, port = options.attack
        uvloop.run(repeat(ATTACKS[name], int(port), options.seconds))
        return
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; the account is {ACCOUNT // MIB} MiB", flush=True
    )
    print(f"{'':12} peak MiB  after MiB  /healthz max ms  honest p50 ms  p99 ms   asked    lost")
    figures = {}
    for name in options.only:
        found = attacked(name, options.seconds, options.runtime)
        figures[name] = asdict(found)
        print(
            f"{name:12} {found.peak:8.0f} {found.after:10.0f} {found.health:16.1f} {found.p50:14.1f} {found.p99:7.1f} "
            f"{found.asked:7} {found.lost:7}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
