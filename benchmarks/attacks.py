"""Measure the effects of hostile clients on a gateway and on concurrent honest clients.

    python benchmarks/attacks.py [--seconds 5] [--only NAME …] [--runtime DIRECTORY] [--json FILE]
    python benchmarks/attacks.py --together [--seconds 600] [--runtime DIRECTORY] [--json FILE]

A gateway with default limits runs in front of an upstream that responds without delay. Each attack runs in a separate
process for the given seconds. Meanwhile one honest client requests `/healthz` and another requests completions, each 50
times a second on a persistent connection. The output for each attack is the gateway's memory at its peak and after the
attack, the slowest `/healthz`, and the honest p99 and losses. `quiet` is the same without an attack. `--runtime` uses
the gateway in another checkout's `runtime/`, for comparison with earlier versions. All traffic is on loopback, with up
to 5500 connections; the command ends by itself.

`--together` is one long attack: partial bodies on more connections than the gateway keeps, a thousand other hostile
connections, mutated requests and unauthenticated scrapes of `/metrics`, for the given seconds in total, concurrently
with four honest clients. The gateway has API keys; the attackers send no key in one half of the rounds and a valid key
in the other half. Rounds with and without an attack alternate on the same gateway, so that other disturbances of the
machine affect both. The attackers run with the lowest priority, because real attackers use their own processors. The
command fails (exit code 1) if the honest p99 under either attack is more than twice the quiet one, if the process's
memory exceeds the account by more than 100 MiB, or if an honest request is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import uvloop
from gateway import running
from hostile import ATTACKS, MIB, repeat, show

from dsv4_runtime.contract.gateway import ENVIRONMENT
from dsv4_testkit import standin
from dsv4_testkit.http_load import Connection, connect, post, quantile
from dsv4_testkit.waiting import free_port, wait_for_port

SETTINGS = {
    **{"servedNames": ["nano"], "holdTimeoutSeconds": 60, "maxHeldRequests": 1024, "maxHeldBytes": 256 * MIB},
    **{"requestTimeoutSeconds": 600, "maxBodyBytes": 64 * MIB, "drainSeconds": 1},
}
ACCOUNT = 448 * MIB
"""`maxClientBytes` by default; earlier versions had no such limit."""
_BESIDE_ACCOUNT_MIB = 100
"""Maximum memory of the process in addition to the data kept for clients."""
PROBES_A_SECOND = 50
ROUND_SECONDS = 60.0
RAMP_SECONDS = 5.0
"""Time in which `together` opens its connections."""
_ANSWER_SECONDS = 30.0
KEYS = {"honest": "a-key-of-honest-clients", "hostile": "a-key-of-hostile-clients"}


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
    """Send requests continuously; return the times of all in milliseconds and the number of lost requests."""
    found, lost, end = list[float](), 0, time.monotonic() + seconds
    connection: Connection | None = None
    while (begun := time.monotonic()) < end:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = connection or await connect(url)
                await connection.ask(request)
        except (OSError, TimeoutError, RuntimeError) as error:
            print(f"an honest request was lost: {type(error).__name__}: {error}", file=sys.stderr)
            lost, connection = lost + 1, None
        took = time.monotonic() - begun
        found.append(took * 1e3)
        await asyncio.sleep(max(0.0, 1 / PROBES_A_SECOND - took))
    return found, lost


async def measure(name: str, port: int, process: psutil.Process, seconds: float) -> Found:
    """Run one attack with concurrent honest clients."""
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


@contextlib.contextmanager
def guarded(runtime: Path | None, *, keys: bool = False) -> Iterator[tuple[int, psutil.Process]]:
    """Yield port and process of a new gateway in front of a new stand-in, with or without API keys."""
    port, front = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    environment = {**ENVIRONMENT, **({"PYTHONPATH": str(runtime.resolve())} if runtime else {})}
    settings = SETTINGS if runtime else {**SETTINGS, "maxClientBytes": ACCOUNT}
    with (
        tempfile.TemporaryDirectory() as directory,
        running([sys.executable, standin.__file__, str(port)]),
    ):
        root = Path(directory)
        if keys:
            (root / "keys").write_text("\n".join(KEYS.values()))
            settings = {**settings, "apiKeysFile": str(root / "keys")}
        (root / "token-key").write_text("stand-in")
        (root / "settings.json").write_text(json.dumps(settings))
        (root / "route.json").write_text(
            json.dumps({"agent": base, "api": base, "tokenKeyFile": str(root / "token-key")})
        )
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", f"127.0.0.1:{front}"]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        command += ["--log", str(root / "log")]
        wait_for_port(port)
        with running(command, environment) as process:
            wait_for_port(front)
            time.sleep(0.5)
            yield front, psutil.Process(process.pid)


def attacked(name: str, seconds: float, runtime: Path | None) -> Found:
    """Measure the effect of attack `name` on a new gateway."""
    with guarded(runtime) as (port, process):
        return uvloop.run(measure(name, port, process, seconds))


@dataclass
class Beside:
    """Honest requests of all rounds of one kind; times in milliseconds."""

    times: list[float] = field(default_factory=list)
    lost: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Responses to mutated requests, by status."""

    def at(self, share: float) -> float:
        return quantile(self.times, share)


async def honest(port: int, seconds: float, found: Beside) -> None:
    """Run four honest clients, two of which read streams."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    bodies = ({"prompt": "x"}, {"prompt": "x", "stream": True, "tokens": 8})
    requests = [post(url, body, {"x-api-key": KEYS["honest"]}) for body in bodies]
    asked = await asyncio.gather(*(_probe(url, requests[client % 2], seconds) for client in range(4)))
    for times, lost in asked:
        found.times += times
        found.lost += lost


async def attacked_round(port: int, process: psutil.Process, seconds: float, key: str | None, found: Beside) -> int:
    """Run four honest clients beside `together`, after its ramp; return the number of open connections at the end."""
    command = [
        sys.executable,
        __file__,
        "--attack",
        "together",
        str(port),
        "--seconds",
        str(RAMP_SECONDS + seconds + 1),
        *(["--key", key] if key else []),
    ]
    attackers = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, preexec_fn=lambda: os.nice(19)
    )
    await asyncio.sleep(RAMP_SECONDS)
    await honest(port, seconds, found)
    listed = await asyncio.to_thread(process.net_connections)
    async with asyncio.timeout(60):
        said, _ = await attackers.communicate()
    found.answers.update(json.loads(said.splitlines()[-1]))
    return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in listed)


async def all_together(port: int, process: psutil.Process, seconds: float) -> tuple[Beside, dict[str, Beside], float]:
    """Run quiet and attacked rounds in turn; return honest clients' results by kind, and the gateway's peak in MiB."""
    rounds, peak = max(2, round(seconds / ROUND_SECONDS)), 0
    quiet_ones = Beside()
    attacked_ones = {"without a key": Beside(), "with a key": Beside()}
    keys = {"without a key": None, "with a key": KEYS["hostile"]}

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    for number in range(rounds):
        await honest(port, seconds / rounds / 3, quiet_ones)
        kind = list(attacked_ones)[number % 2]
        found = attacked_ones[kind]
        connections = await attacked_round(port, process, seconds / rounds, keys[kind], found)
        print(
            f"{number + 1:3}/{rounds}: p99 {quiet_ones.at(0.99):.1f} ms quiet, {found.at(0.99):.1f} {kind}; "
            f"{connections} connections, peak {peak / MIB:.0f} MiB, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        await asyncio.sleep(1.0)
    watching.cancel()
    return quiet_ones, attacked_ones, peak / MIB


def run_together(seconds: float, runtime: Path | None, file: Path | None) -> bool:
    """Run and print `--together`; return whether the results are within the limits."""
    with guarded(runtime, keys=True) as (port, process):
        os.nice(-10 if os.geteuid() == 0 else 0)
        calm, hostile, peak = uvloop.run(all_together(port, process, seconds))
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    everybody = (calm, *hostile.values())
    lost = sum(found.lost for found in everybody)
    figures = {
        **{f"quiet p{share:g} ms": calm.at(share / 100) for share in (50, 99, 99.9)},
        **{
            f"attacked {kind}, p{share:g} ms": found.at(share / 100)
            for kind, found in hostile.items()
            for share in (50, 99, 99.9)
        },
        **{"asked": sum(len(found.times) for found in everybody), "lost": lost, "peak MiB": peak},
        **{"answers to mutated requests": dict(sum((found.answers for found in everybody), Counter()))},
        "gateway lives": alive,
    }
    for name, value in figures.items():
        print(f"{name:34} {value:.2f}" if isinstance(value, float) else f"{name:34} {value}")
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n")
    within = peak <= ACCOUNT / MIB + _BESIDE_ACCOUNT_MIB
    return alive and within and not lost and all(one.at(0.99) <= 2 * calm.at(0.99) for one in hostile.values())


def _say_machine() -> None:
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; the account is {ACCOUNT // MIB} MiB", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of each attack [5], with --together of all rounds [600]")
    parser.add_argument("--together", action="store_true", help="run a long attack of many kinds, with limits")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="run only these attacks")
    parser.add_argument("--runtime", type=Path, help="directory runtime/ of another version")
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if options.attack:
        if options.key:
            show(options.key)
        name, port = options.attack
        uvloop.run(repeat(ATTACKS[name], int(port), options.seconds))
        return
    if options.together:
        _say_machine()
        sys.exit(not run_together(options.seconds or 600.0, options.runtime, options.json))
    _say_machine()
    print(f"{'':12} peak MiB  after MiB  /healthz max ms  honest p50 ms  p99 ms   asked    lost")
    figures = {}
    for name in options.only:
        found = attacked(name, options.seconds or 5.0, options.runtime)
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
