"""Kill one of two groups under load; measure failures and the waiting time of new requests.

    python benchmarks/gateway_groups.py [--seconds 10] [--clients 8] [--nano [--restarts 5]]

A gateway runs in front of two groups, each an upstream that streams 32 tokens at 50 a second. Clients stream one
response after the other. After half of the time one group's process is killed (SIGKILL of engine, API and agent
together, as with a lost node). Each response must contain every token once and a proper end. The time to the first byte
is compared between requests that began before the kill and requests that began after it.

With `--nano` the groups are those of `dsv4 up` with `replicas: 2` and one member each: real Ray, real vLLM, a gateway
for each group on one port. One member's agent is killed, and with it the whole member. With `--restarts 0` its group is
not restarted; otherwise it restarts during the run, on the same processors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from gateway import SETTINGS, running

from dsv4_runtime.contract.gateway import ENVIRONMENT
from dsv4_testkit import standin
from dsv4_testkit.harness import Deployment, pid_in
from dsv4_testkit.http_load import connect, post, quantile
from dsv4_testkit.waiting import free_port, wait_for_port

TOKENS, PAUSE = 32, 0.02
WARM_SECONDS = 10.0
BODY = {"model": "nano", "prompt": "x", "stream": True, "max_tokens": TOKENS, "temperature": 0}
NANO_BODY = {**BODY, "ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass
class Found:
    """Seconds to the first byte, and requests."""

    before: list[float]
    after: list[float]
    under: int
    """Requests that were open when the group was killed."""
    failures: list[str]
    """Error or end of every incomplete response."""

    @property
    def failed(self) -> int:
        return len(self.failures)


@contextlib.contextmanager
def gateway(ports: list[int], front: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway in front of the groups at these ports."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "token").write_text("stand-in")
        routes = [
            {"group": group, **dict.fromkeys(("agent", "api"), f"http://127.0.0.1:{port}")}
            for group, port in enumerate(ports)
        ]
        (root / "settings.json").write_text(json.dumps(SETTINGS))
        (root / "route.json").write_text(
            json.dumps({**routes[0], "tokenKeyFile": str(root / "token"), "others": routes[1:]})
        )
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", f"127.0.0.1:{front}"]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        with running([*command, "--log", str(root / "log")], ENVIRONMENT) as process:
            wait_for_port(front)
            yield process


def whole(answer: bytes) -> bool:
    """Return whether a stream contains every token and its end."""
    tokens = answer.count(b'" token"') == TOKENS or b'"completion_tokens":%d' % TOKENS in answer
    return answer.startswith(b"HTTP/1.1 200") and tokens and b"data: [DONE]" in answer


async def work(url: str, body: dict[str, object], clients: int, seconds: float, kill: asyncio.Event) -> Found:
    """Stream until the time is over; set `kill` after half of it."""
    found, asked = Found([], [], 0, []), post(url, body)
    middle, end = time.monotonic() + seconds / 2, time.monotonic() + seconds

    async def client() -> None:
        connection = await connect(url)
        while (begun := time.monotonic()) < end:
            try:
                first, answer = await connection.ask(asked)
            except ConnectionError as error:
                found.failures.append(f"{type(error).__name__}: {error}")
                connection = await connect(url)
                continue
            if not whole(answer):
                found.failures.append(answer[-300:].decode(errors="replace"))
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
    """Yield the ports of two groups, and the process of the first."""
    ports = [free_port(), free_port()]
    commands = [[sys.executable, standin.__file__, str(port), str(PAUSE)] for port in ports]
    with running(commands[0]) as first, running(commands[1]):
        for port in ports:
            wait_for_port(port)
        yield ports, first


async def measure(
    url: str, clients: int, seconds: float, end: Callable[[], None], body: dict[str, object] = BODY
) -> Found:
    """Stream, and end one group after half of the time."""

    async def killer() -> None:
        await kill.wait()
        end()

    kill = asyncio.Event()
    await asyncio.sleep(1.0)  # Both watches have reports of their agents.
    _, found = await asyncio.gather(killer(), work(url, body, clients, seconds, kill))
    return found


def failover(seconds: float, clients: int = 8) -> Found:
    """Kill one of two groups under load."""
    front = free_port()
    with groups() as (ports, doomed), gateway(ports, front):
        return uvloop.run(measure(f"http://127.0.0.1:{front}/v1/completions", clients, seconds, doomed.kill))


def nano(seconds: float, clients: int, restarts: int) -> Found:
    """Kill one of two groups of `dsv4 up` under load."""
    deployment = Deployment(nodes=1, replicas=2, seqs=clients, restarts=restarts)
    try:
        print(f"two groups serve after {deployment.up():.0f} s", flush=True)
        url = f"http://127.0.0.1:{deployment.api}/v1/completions"
        # The first responses of each engine are slow.
        uvloop.run(work(url, NANO_BODY, clients, WARM_SECONDS, asyncio.Event()))
        doomed = pid_in(deployment.group(1), 0, "agent")
        found = uvloop.run(measure(url, clients, seconds, partial(os.kill, doomed, signal.SIGKILL), NANO_BODY))
        for group in deployment.object()["status"]["groups"]:
            print(f"group {group['index']}: {group['phase']}, incarnation {group['incarnation']}")
        return found
    finally:
        deployment.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--nano", action="store_true", help="use two real groups of `dsv4 up`")
    parser.add_argument("--restarts", type=int, default=5, help="with --nano: restart budget of a group")
    options = parser.parse_args()
    if options.nano:
        found = nano(options.seconds, options.clients, options.restarts)
    else:
        found = failover(options.seconds, options.clients)
    before, after = (quantile(times, 0.95) * 1e3 for times in (found.before, found.after))
    print(f"{len(found.before)} requests before the kill, {len(found.after)} after, {found.under} open meanwhile")
    print(f"failed: {found.failed}")
    print(f"first byte, p95: {before:.2f} ms before, {after:.2f} ms after: {after / before:.2f} of it")
    sys.exit(found.failed > 0)


if __name__ == "__main__":
    main()
