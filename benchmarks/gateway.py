"""Compare the gateway with direct requests to the engine, in one run.

    python benchmarks/gateway.py --standin [--seconds 40] [--json FILE]
    python benchmarks/gateway.py --nano [--seconds 40] [--json FILE]
    python benchmarks/gateway.py --processes [--seconds 40] [--json FILE]
    python benchmarks/gateway.py --page [--seconds 40] [--json FILE]

`--standin`: an upstream with negligible cost, so that the results show the gateway alone. `--nano`: vLLM with the nano
model, inside its own network. Direct requests and requests through the gateway alternate. The time that the gateway
adds to the first byte is measured as waiting time outside the engine: for each request, the client's waiting time less
the engine's time for the same request, which results from the packets at the engine's port by the kernel's clock. The
added time is a quantile of the requests through the gateway less that of direct requests, which contains the client's
own share. Also printed, including the engine's noise: the quantiles of the whole times, and the median of the
differences between the two requests of a turn. The throughput ratio is the median over the rounds; each round has new
connections.

The engine alone can use all processors of a small machine; then the time to the first byte consists of waiting for a
processor. Therefore nano is measured twice: without restrictions, and with the engine excluded from the processor of
the client and the gateway. Reading packets requires root, as the networks of nano do. `--processes`: one gateway
process against two on one socket, as started by `dsv4 up`, in front of the stand-in; in turns, and finally with one of
them killed under 16 streams. `--page`: one gateway process in front of the stand-in, without viewers of the status page
and with the maximum number of viewers, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import uvloop
from http_wire import tap

from dsv4_runtime.contract.gateway import ENVIRONMENT, VIEWERS
from dsv4_runtime.engine import token_auth
from dsv4_testkit import standin as upstream
from dsv4_testkit.harness import Deployment
from dsv4_testkit.http_load import connect, load, order, post, quantile, take_turns
from dsv4_testkit.waiting import free_port, wait_for_port

IDLE = {"prompt": "x", "stream": True, "tokens": 3, "pause": 20.0}
GOALS = {
    "added p50 ms": ("<=", 1.0),
    "added p99 ms": ("<=", 5.0),
    "throughput ratio": (">=", 0.98),
    "1000 idle streams MiB": ("<=", 200.0),
}
SETTINGS = {
    **{"servedNames": ["nano"], "holdTimeoutSeconds": 60, "maxHeldRequests": 4096, "maxHeldBytes": 2**28},
    **{"requestTimeoutSeconds": 600, "maxBodyBytes": 2**24, "drainSeconds": 1},
}


@contextlib.contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process during the block, with `environment` in addition to this process's."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def gateway(agent: str, api: str, token_key: str, listen: str, prefix: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway in front of an engine."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "settings.json").write_text(json.dumps(SETTINGS))
        (root / "route.json").write_text(json.dumps({"agent": agent, "api": api, "tokenKeyFile": token_key}))
        command = [*prefix, sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", listen]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        with running(command, ENVIRONMENT) as process:
            yield process


@dataclass(frozen=True)
class Work:
    """Load of one round."""

    alone: dict[str, Any]
    """Requests for the time to the first byte: one client, direct and through the gateway in turns."""
    turns: int
    together: dict[str, Any]
    """Requests for the throughput: direct, through, through, direct."""
    requests: int
    clients: int


MIN_ROUNDS = 3
THOUGHT_TURNS = 60
STANDIN = Work(
    alone={"prompt": "x", "stream": True, "tokens": 1},
    turns=400,
    # As fast as the streams of a fast engine: 32 clients, 33 tokens a second each.
    together={"prompt": "x", "stream": True, "tokens": 64, "pause": 0.03},
    requests=32,
    clients=32,
)
_NANO: dict[str, Any] = {"model": "nano", "prompt": "Hello", "stream": True, "temperature": 0.0, "ignore_eos": True}
NANO = Work(alone={**_NANO, "max_tokens": 1}, turns=60, together={**_NANO, "max_tokens": 16}, requests=8, clients=4)


async def compare(
    direct: str, through: str, work: Work, seconds: float, headers: dict[str, str] | None = None
) -> dict[str, float]:
    """Run rounds for `seconds`; each prints the figures so far.

    `headers` are sent on both paths: vLLM's own port rejects requests without the incarnation's token.
    """
    first: dict[str, list[float]] = {direct: [], through: []}
    outside: dict[str, list[float]] = {direct: [], through: []}
    ratios: list[float] = []
    ask = partial(load, headers=headers)
    for url in (direct, through):
        await ask(url, work.together, requests=work.clients, clients=work.clients)
    end, figures = time.monotonic() + seconds, dict[str, float]()
    while len(ratios) < MIN_ROUNDS or time.monotonic() < end:
        with tap(urlsplit(direct).port or 80) as wire:
            alone = await take_turns((direct, through), work.alone, turns=work.turns, headers=headers)
            exchanges = wire.drain()
        for url, found in alone.items():
            first[url] += found
        waits = {url: iter(found) for url, found in alone.items()}
        for url, exchange in zip(order((direct, through), work.turns), exchanges, strict=True):
            outside[url].append(next(waits[url]) - exchange.seconds)
        took = {direct: 0.0, through: 0.0}
        for url in (direct, through, through, direct):
            took[url] += (await ask(url, work.together, requests=work.requests, clients=work.clients)).seconds
        ratios.append(took[direct] / took[through])
        fast, slow = ([quantile(first[url], share) * 1e3 for share in (0.5, 0.99)] for url in (direct, through))
        less, more = ([quantile(outside[url], share) * 1e3 for share in (0.5, 0.99)] for url in (direct, through))
        pairs = [after - before for before, after in zip(first[direct], first[through], strict=True)]
        figures = {
            "direct p50 ms": fast[0],
            "direct p99 ms": fast[1],
            "added p50 ms": more[0] - less[0],
            "added p99 ms": more[1] - less[1],
            "median of the turns' differences ms": statistics.median(pairs) * 1e3,
            "difference of p50s ms": slow[0] - fast[0],
            "difference of p99s ms": slow[1] - fast[1],
            "throughput ratio": statistics.median(ratios),
        }
        known = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(
            f"  round {len(ratios)} ({len(first[direct])} turns): {known}, its own ratio {ratios[-1]:.3f}", flush=True
        )
    return figures


async def limits(through: str, process: psutil.Process) -> dict[str, float]:
    """Measure the gateway under requests beyond its capacity, and the processor time of a token that arrives alone."""
    answers = await load(through, {"prompt": "x"}, requests=4000, clients=16)
    chunks = {"prompt": "x", "stream": True, "tokens": 64}
    streams = await load(through, chunks, requests=200, clients=16)
    before = sum(process.cpu_times()[:2])
    await load(through, {**chunks, "pause": 0.02}, requests=32, clients=16)
    spent = sum(process.cpu_times()[:2]) - before
    return {"answers/s": answers.rate, "chunks/s": streams.rate * 64, "CPU us a chunk": spent / (32 * 64) * 1e6}


async def idle_memory(url: str, pid: int, streams: int = 1000) -> float:
    """Return MiB of resident memory with `streams` streams that have begun and are idle."""
    connections = [await connect(url) for _ in range(streams)]
    data = post(url, IDLE)
    tasks = [asyncio.ensure_future(connection.ask(data)) for connection in connections]
    try:
        async with asyncio.timeout(IDLE["pause"]):
            while not all(connection.first for connection in connections):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return psutil.Process(pid).memory_info().rss / 2**20
    finally:
        for task, connection in zip(tasks, connections, strict=True):
            task.cancel()
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)


def standin(seconds: float) -> dict[str, float]:
    port, front = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w") as token, running([sys.executable, upstream.__file__, str(port)]):
        # An empty file would be read again for every request.
        token.write("stand-in")
        token.flush()
        wait_for_port(port)
        with gateway(base, base, token.name, f"127.0.0.1:{front}", []) as process:
            wait_for_port(front)
            direct, through = (f"http://127.0.0.1:{number}/v1/completions" for number in (port, front))
            found = uvloop.run(compare(direct, through, STANDIN, seconds))
            thinking = {**STANDIN.alone, "think": 0.1}
            alone = uvloop.run(take_turns((direct, through), thinking, turns=THOUGHT_TURNS))
            fast, slow = (quantile(alone[url], 0.5) * 1e3 for url in (direct, through))
            found["added p50 ms, 100 ms apart"] = slow - fast
            found |= uvloop.run(limits(through, psutil.Process(process.pid)))
            found["1000 idle streams MiB"] = uvloop.run(idle_memory(through, process.pid))
    return found


@contextlib.contextmanager
def processes(
    count: int, agent: str, token_key: str, socket_number: int, *, handover: bool = False
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run gateways on one listening socket; with `handover`, each continues the connections of the previous one."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        (root / "settings.json").write_text(json.dumps(SETTINGS))
        (root / "route.json").write_text(json.dumps({"agent": agent, "api": agent, "tokenKeyFile": token_key}))
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", f"--fd={socket_number}"]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        environment = {**os.environ, **ENVIRONMENT}
        found = []
        inheritances = []
        for _ in range(count):
            inheritances.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            inheritances[-1].bind("")
            inheritances[-1].listen()
        for mine, heir in zip(inheritances, [*inheritances[1:], inheritances[0]], strict=True):
            own = [f"--inherit-fd={mine.fileno()}", f"--heir={heir.getsockname()[1:].decode()}"] if handover else []
            process = subprocess.Popen(
                [*command, *own],
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=(socket_number, mine.fileno()),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(process)
        yield found


async def killed(url: str, process: subprocess.Popen[bytes], clients: int = 16) -> int:
    """Return how many of the streams of `clients` broke when a process was killed under them."""
    connections = [await connect(url) for _ in range(clients)]
    data = post(url, {"prompt": "x", "stream": True, "tokens": 64, "pause": 0.05})
    tasks = [asyncio.ensure_future(connection.ask(data)) for connection in connections]
    await asyncio.sleep(1.0)
    process.kill()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        connection.close()
    return sum(isinstance(one, BaseException) for one in found)


def compare_processes(seconds: float) -> dict[str, float]:
    """Return latency and rate of one gateway process, of two, and of two with handover."""
    port, figures = free_port(), dict[str, float]()
    base = f"http://127.0.0.1:{port}"
    with (
        tempfile.NamedTemporaryFile("w") as token,
        running([sys.executable, upstream.__file__, str(port)]),
        socket.create_server(("127.0.0.1", 0), backlog=4096) as one,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as two,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as three,
    ):
        token.write("stand-in")
        token.flush()
        wait_for_port(port)
        with (
            processes(1, base, token.name, one.fileno()) as single,
            processes(2, base, token.name, two.fileno()) as pair,
            processes(2, base, token.name, three.fileno(), handover=True) as heirs,
        ):
            urls = [f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions" for listener in (one, two, three)]
            names = dict(zip(urls, ("one process", "two processes", "two processes, handover"), strict=True))
            first: dict[str, list[float]] = {url: [] for url in urls}
            rates: dict[str, list[float]] = {url: [] for url in urls}
            for url in urls:
                uvloop.run(load(url, {"prompt": "x"}, requests=64, clients=16))
            end = time.monotonic() + seconds
            while time.monotonic() < end or len(rates[urls[0]]) < MIN_ROUNDS:
                for url, found in uvloop.run(take_turns(urls, STANDIN.alone, turns=200)).items():
                    first[url] += found
                for url in (*urls, *reversed(urls)):
                    rates[url].append(uvloop.run(load(url, {"prompt": "x"}, requests=1000, clients=16)).rate)
            for url, name in names.items():
                figures[f"{name}: p50 ms"] = quantile(first[url], 0.5) * 1e3
                figures[f"{name}: p99 ms"] = quantile(first[url], 0.99) * 1e3
                figures[f"{name}: answers/s"] = statistics.median(rates[url])
            figures["one process, killed: broken of 16"] = uvloop.run(killed(urls[0], single[0]))
            figures["two processes, one killed: broken of 16"] = uvloop.run(killed(urls[1], pair[0]))
            figures["two processes, handover, one killed: broken of 16"] = uvloop.run(killed(urls[2], heirs[0]))
    return figures


@contextlib.asynccontextmanager
async def viewers(base: str, count: int) -> AsyncIterator[None]:
    """Hold `count` streams of the status page that have received the first document."""
    async with aiohttp.ClientSession() as session:
        streams = [await session.get(f"{base}/dsv4/status/events") for _ in range(count)]
        reading = [asyncio.ensure_future(stream.read()) for stream in streams]
        await asyncio.sleep(1.5)
        try:
            yield
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def compare_viewers(base: str, seconds: float, process: psutil.Process) -> dict[str, float]:
    """Return time to the first byte, rate, and processor time at rest, without and with viewers, in turns."""
    url = f"{base}/v1/completions"
    first: dict[int, list[float]] = {0: [], VIEWERS: []}
    rates: dict[int, list[float]] = {0: [], VIEWERS: []}
    rest: dict[int, list[float]] = {0: [], VIEWERS: []}
    await load(url, {"prompt": "x"}, requests=64, clients=16)
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(rest[0]) < MIN_ROUNDS:
        for count in (0, VIEWERS, VIEWERS, 0):
            async with viewers(base, count):
                before, begun = sum(process.cpu_times()[:2]), time.monotonic()
                await asyncio.sleep(3.0)
                rest[count].append((sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun))
                first[count] += (await take_turns((url,), STANDIN.alone, turns=400))[url]
                rates[count].append((await load(url, {"prompt": "x"}, requests=2000, clients=16)).rate)
    figures = dict[str, float]()
    for count, name in ((0, "no viewer"), (VIEWERS, f"{VIEWERS} viewers")):
        figures[f"{name}: p50 ms"] = quantile(first[count], 0.5) * 1e3
        figures[f"{name}: p99 ms"] = quantile(first[count], 0.99) * 1e3
        figures[f"{name}: answers/s"] = statistics.median(rates[count])
        figures[f"{name}: processor at rest %"] = statistics.median(rest[count]) * 100
    return figures


def page(seconds: float) -> dict[str, float]:
    port, front = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w") as token, running([sys.executable, upstream.__file__, str(port)]):
        token.write("stand-in")
        token.flush()
        wait_for_port(port)
        with gateway(base, base, token.name, f"127.0.0.1:{front}", []) as process:
            wait_for_port(front)
            return uvloop.run(compare_viewers(f"http://127.0.0.1:{front}", seconds, psutil.Process(process.pid)))


def confine(pid: int, processors: list[int]) -> None:
    """Restrict a process, its threads and its descendants to these processors."""
    for process in (found := psutil.Process(pid), *found.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, processors)


def nano(seconds: float, *, apart: bool = False) -> dict[str, float]:
    deployment = Deployment(nodes=1)
    try:
        print(f"  up after {deployment.up():.0f} s", flush=True)
        # The loop's own network contains only the members; from there both paths are equally long.
        loop = int((deployment.directory / "lock").read_text())
        inside = ["nsenter", f"--net=/proc/{loop}/ns/net"]
        api, front = "http://10.88.0.10:8000", "10.88.0.1:9000"
        token = str(deployment.directory / "token")
        with gateway("http://10.88.0.10:8090", api, f"{token}-key", front, inside) as process:
            file = deployment.root / "figures.json"
            command = [*inside, sys.executable, __file__, "--seconds", str(seconds), "--json", str(file)]
            command += ["--measure", f"{api}/v1/completions", f"http://{front}/v1/completions", "--token", token]
            if apart:
                processors = sorted(os.sched_getaffinity(0))
                command = ["taskset", "--cpu-list", str(processors[-1]), *command]
                confine(process.pid, processors[-1:])
                for member in psutil.Process(loop).children():
                    confine(member.pid, processors[:-1])
            subprocess.run(command, timeout=4 * seconds + 60, check=True)
            return dict(json.loads(file.read_text()))
    finally:
        deployment.destroy()


def show(figures: dict[str, float]) -> bool:
    """Print the figures; return whether one misses its goal."""
    missed = False
    for figure, value in figures.items():
        sign, goal = GOALS.get(figure, ("", 0.0))
        bad = (sign == "<=" and value > goal) or (sign == ">=" and value < goal)
        missed |= bad
        aim = f"  goal {sign} {goal:g}{' MISSED' * bad}" if sign else ""
        print(f"  {figure:36} {value:10.3f}{aim}", flush=True)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--standin", action="store_true", help="measure in front of the stand-in")
    parser.add_argument("--nano", action="store_true", help="measure in front of vLLM with the nano model")
    parser.add_argument("--processes", action="store_true", help="compare one gateway process with two")
    parser.add_argument("--page", action="store_true", help="measure with viewers of the status page")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="duration of the rounds of each part (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("DIRECT", "THROUGH"), help=argparse.SUPPRESS)
    parser.add_argument("--token", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        headers = dict(token_auth.headers(options.token.read_text().strip())) if options.token else None
        found = uvloop.run(compare(*options.measure, NANO, options.seconds, headers))
        options.json.write_text(json.dumps(found))
        return
    parts = {
        "stand-in": (options.standin, standin),
        "processes": (options.processes, compare_processes),
        "status page": (options.page, page),
        "nano": (options.nano, nano),
        "nano, engine on other processors": (options.nano, partial(nano, apart=True)),
    }
    wanted = {name: measure for name, (chosen, measure) in parts.items() if chosen}
    if not wanted:
        parser.error("choose --standin, --processes, --page or --nano")
    figures: dict[str, dict[str, float]] = {}
    missed = False
    for name, measure in wanted.items():
        print(f"{name}: {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before", flush=True)
        figures[name] = measure(options.seconds)
        missed |= show(figures[name])
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
