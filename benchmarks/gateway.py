"""The gateway against the engine without it, in one run.

    python benchmarks/gateway.py --standin [--rounds 5] [--json FILE]
    python benchmarks/gateway.py --nano [--rounds 5] [--json FILE]

`--standin`: an upstream that costs next to nothing, so that everything seen is the gateway's: added time to the first
byte, answers a second, and memory with 1000 streams open. `--nano`: vLLM with the nano model, inside its own network.
Rounds alternate between direct and through the gateway; each round has fresh connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from gateway_stacks import idle_memory, wait_for
from harness import Deployment, free_port
from http_load import Load, load

HERE = Path(__file__).parent
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
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
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
def gateway(agent: str, api: str, token: str, listen: str, prefix: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway in front of an engine."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "settings.json").write_text(json.dumps(SETTINGS))
        (root / "route.json").write_text(json.dumps({"agent": agent, "api": api, "tokenFile": token}))
        command = [*prefix, sys.executable, "-m", "dsv4_runtime.gateway.main", "--listen", listen]
        command += ["--settings", str(root / "settings.json"), "--route", str(root / "route.json")]
        with running(command) as process:
            yield process


async def compare(direct: str, through: str, body: dict[str, Any], plan: dict[str, int]) -> dict[str, float]:
    """One round: one client at a time for the delay, several for the throughput; each in both orders."""
    delay: dict[str, Load] = {}
    rate: dict[str, list[Load]] = {direct: [], through: []}
    for url in (direct, through):
        delay[url] = await load(url, body, requests=plan["alone"], clients=1)
    for url in (direct, through, through, direct):
        rate[url].append(await load(url, {**body, "stream": False}, requests=plan["busy"], clients=plan["clients"]))
    fast, slow = delay[direct], delay[through]
    seconds = {url: sum(one.seconds for one in loads) for url, loads in rate.items()}
    return {
        "direct p50 ms": fast.at(0.5) * 1e3,
        "direct p99 ms": fast.at(0.99) * 1e3,
        "added p50 ms": (slow.at(0.5) - fast.at(0.5)) * 1e3,
        "added p99 ms": (slow.at(0.99) - fast.at(0.99)) * 1e3,
        "direct answers/s": 2 * plan["busy"] / seconds[direct],
        "throughput ratio": seconds[direct] / seconds[through],
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def standin(rounds: int) -> dict[str, float]:
    port, front = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w") as token, running([sys.executable, str(HERE / "standin.py"), str(port)]):
        wait_for(port)
        with gateway(base, base, token.name, f"127.0.0.1:{front}", []) as process:
            wait_for(front)
            direct, through = (f"http://127.0.0.1:{number}/v1/completions" for number in (port, front))
            body = {"prompt": "x", "stream": True, "tokens": 1}
            plan = {"alone": 500, "busy": 2000, "clients": 16}
            found = medians([uvloop.run(compare(direct, through, body, plan)) for _ in range(rounds)])
            # Against an upstream that answers at once this is the gateway's own limit, and no ratio to aim at.
            found["through answers/s"] = found["direct answers/s"] * found.pop("throughput ratio")
            found["1000 idle streams MiB"] = uvloop.run(idle_memory(through, process.pid))
    return found


def nano(rounds: int) -> dict[str, float]:
    deployment = Deployment(nodes=1)
    try:
        deployment.up()
        # The loop's own network has the members and nobody else; from there both ways are equally long.
        loop = int((deployment.directory / "lock").read_text())
        inside = ["nsenter", f"--net=/proc/{loop}/ns/net"]
        api, front = "http://10.88.0.10:8000", "10.88.0.1:9000"
        with gateway("http://10.88.0.10:8090", api, str(deployment.directory / "token"), front, inside):
            time.sleep(3)
            command = [*inside, sys.executable, __file__, "--measure", f"{api}/v1/completions"]
            command += [f"http://{front}/v1/completions", "--rounds", str(rounds)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            return dict(json.loads(done.stdout))
    finally:
        deployment.destroy()


async def _nano_rounds(direct: str, through: str, rounds: int) -> dict[str, float]:
    body = {"model": "nano", "prompt": "Hello", "stream": True, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    # An answer of the nano model takes some tenths of a second.
    plan = {"alone": 40, "busy": 24, "clients": 4}
    await load(direct, body, requests=10, clients=4)
    return medians([await compare(direct, through, body, plan) for _ in range(rounds)])


def show(figures: dict[str, float]) -> bool:
    """Print them; whether one misses its goal."""
    missed = False
    for figure, value in figures.items():
        sign, goal = GOALS.get(figure, ("", 0.0))
        bad = (sign == "<=" and value > goal) or (sign == ">=" and value < goal)
        missed |= bad
        print(
            f"  {figure:22} {value:10.2f}" + (f"  goal {sign} {goal:g}" if sign else "") + " MISSED" * bad, flush=True
        )
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--standin", action="store_true")
    parser.add_argument("--nano", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("DIRECT", "THROUGH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asyncio.run(_nano_rounds(*options.measure, options.rounds))))
        return
    if not (options.standin or options.nano):
        parser.error("choose --standin, --nano or both")
    found: dict[str, dict[str, float]] = {}
    missed = False
    wanted = {"stand-in": (options.standin, standin), "nano": (options.nano, nano)}
    for name, (_, measure) in [entry for entry in wanted.items() if entry[1][0]]:
        found[name] = measure(options.rounds)
        print(f"{name}: {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, medians of {options.rounds} rounds")
        missed |= show(found[name])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(missed)


if __name__ == "__main__":
    main()
