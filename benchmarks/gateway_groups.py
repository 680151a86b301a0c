"""One of two groups is killed under clients: what fails, and how long new requests wait.

    python benchmarks/gateway_groups.py [--seconds 10] [--clients 8]

A gateway stands in front of two groups, each an upstream that streams 32 tokens at 50 a second. Clients stream one
answer after the other. After half of the time one group's process is killed (SIGKILL: engine, API and agent at once,
as a lost node). Each answer must have every token once and a proper end. The time to the first byte of requests that
began before the kill is compared with that of those that began after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop
from gateway import SETTINGS, running

from dsv4_runtime.contract.gateway import ENVIRONMENT
from dsv4_testkit import standin
from dsv4_testkit.http_load import connect, post, quantile
from dsv4_testkit.waiting import free_port, wait_for_port

TOKENS, PAUSE = 32, 0.02
BODY = {"model": "nano", "prompt": "x", "stream": True, "max_tokens": TOKENS, "temperature": 0}


@dataclass
class Found:
    """Seconds to the first byte, and requests."""

    before: list[float]
    after: list[float]
    under: int
    """Requests that were open when the group was killed."""
    failed: int


@contextlib.contextmanager
def gateway(ports: list[int], front: int) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway in front of the groups at these ports."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "token").write_text("stand-in")
        routes = [
            {"group": group, **dict.fromkeys(("agent", "api"), f"http://127.0.0.1:{port}")}
            for group, port in enumerate(ports)
        ]
        (root / "settings.json").write_text(json.dumps(SETTINGS))
        (root / "route.json").write_text(
            json.dumps({**routes[0], "tokenFile": str(root / "token"), "others": routes[1:]})
        )
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", f"127.0.0.1:{front}"]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        with running([*command, "--log", str(root / "log")], ENVIRONMENT) as process:
            wait_for_port(front)
            yield process


def whole(answer: bytes) -> bool:
    """Whether a stream has every token and its end."""
    return answer.startswith(b"HTTP/1.1 200") and answer.count(b'" token"') == TOKENS and b"data: [DONE]" in answer


async def work(url: str, clients: int, seconds: float, kill: asyncio.Event) -> Found:
    """Stream until the time is over; sets `kill` after half of it."""
    found, asked = Found([], [], 0, 0), post(url, BODY)
    middle, end = time.monotonic() + seconds / 2, time.monotonic() + seconds

    async def client() -> None:
        connection = await connect(url)
        while (begun := time.monotonic()) < end:
            try:
                first, answer = await connection.ask(asked)
            except ConnectionError:
                found.failed, connection = found.failed + 1, await connect(url)
                continue
            found.failed += not whole(answer)
            found.under += begun < middle < time.monotonic()
            (found.before if begun < middle else found.after).append(first)
        connection.close()

    async def clock() -> None:
        await asyncio.sleep(seconds / 2)
        kill.set()

    await asyncio.gather(clock(), *(client() for _ in range(clients)))
    return found


@contextlib.contextmanager
def groups() -> Iterator[tuple[list[int], subprocess.Popen[bytes]]]:
    """Two groups: their ports, and the process of the first."""
    ports = [free_port(), free_port()]
    commands = [[sys.executable, standin.__file__, str(port), str(PAUSE)] for port in ports]
    with running(commands[0]) as first, running(commands[1]):
        for port in ports:
            wait_for_port(port)
        yield ports, first


async def measure(url: str, clients: int, seconds: float, doomed: subprocess.Popen[bytes]) -> Found:
    """Stream, and kill `doomed` after half of the time."""

    async def killer() -> None:
        await kill.wait()
        doomed.kill()

    kill = asyncio.Event()
    await asyncio.sleep(1.0)  # Both watches have heard their agents.
    _, found = await asyncio.gather(killer(), work(url, clients, seconds, kill))
    return found


def failover(seconds: float, clients: int = 8) -> Found:
    """Kill one group of two under clients."""
    front = free_port()
    with groups() as (ports, doomed), gateway(ports, front):
        return uvloop.run(measure(f"http://127.0.0.1:{front}/v1/completions", clients, seconds, doomed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    found = failover(options.seconds, options.clients)
    before, after = (quantile(times, 0.95) * 1e3 for times in (found.before, found.after))
    print(f"{len(found.before)} requests before the kill, {len(found.after)} after, {found.under} open meanwhile")
    print(f"failed: {found.failed}")
    print(f"first byte, p95: {before:.2f} ms before, {after:.2f} ms after: {after / before:.2f} of it")
    sys.exit(found.failed > 0)


if __name__ == "__main__":
    main()
