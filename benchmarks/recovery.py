"""Start-up, detection and recovery on this machine: `make bench`, or `python benchmarks/recovery.py --runs 3`.

Every fault is a real signal to a real process of a serving group with two members; the output is a table and the
machine. `--level1 5` kills EngineCore in one incarnation instead and prints the time of each phase; `--bare` does the
same to vLLM under Ray without dsv4.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from pathlib import Path

from dsv4_testkit.faults.bare import Bare
from dsv4_testkit.faults.system import answers
from dsv4_testkit.faults.table import PROCESS_DEATHS
from dsv4_testkit.harness import Deployment, Recovery, inflict, memory, phases

_SERVES_SECONDS = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument(
        "--level1", type=int, metavar="N", help="print the phases of N engine restarts in one incarnation"
    )
    parser.add_argument("--bare", action="store_true", help="with --level1: use vLLM without dsv4")
    options = parser.parse_args()
    if options.level1 is not None:
        (bare if options.bare else level1)(options.level1)
        return
    deployment = Deployment(restarts=len(PROCESS_DEATHS) * options.runs + 1)
    rows: list[Recovery] = []
    try:
        cold = deployment.up()
        print(f"up to ready, with new weights: {cold:.1f} s", flush=True)
        spent = phases(deployment)
        print("  of which the head: " + ", ".join(f"{name} {value:.1f} s" for name, value in spent.items()), flush=True)
        deployment.complete(tokens=8)
        sizes = memory(deployment)
        print("  memory: " + ", ".join(f"rank {rank} {size:.0f} MiB" for rank, size in enumerate(sizes)), flush=True)
        for _ in range(options.runs):
            for fault in PROCESS_DEATHS:
                row = inflict(deployment, fault)
                rows.append(row)
                print(f"  {fault.name}: noticed {row.detected:.2f} s, answered {row.answered:.1f} s", flush=True)
    finally:
        deployment.destroy()
    table = summary(rows)
    print(
        f"\nmachine: {os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}; {options.runs} run(s)\n"
    )
    print("| fault | noticed s | answers again s | cause | rank | level |\n|---|---|---|---|---|---|")
    for line in table:
        print("| " + " | ".join(str(cell) for cell in line.values()) + " |")
    if options.json:
        figures = {"coldStart": cold, "phases": spent, "memoryMiB": sizes, "faults": table}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def level1(runs: int) -> None:
    """Kill EngineCore repeatedly; print the times of the cold start and of each restart in place."""
    deployment = Deployment(restarts=runs + 1)
    try:
        cold = deployment.up()
        deployment.complete()
        first = phases(deployment)
        engine = first["Loading"] + first["Warming"]
        print(f"up to ready {cold:.1f} s, of which the engine's cold start {engine:.1f} s: {_told(first)}", flush=True)
        print(f"memory: {_memory(deployment)} at the start of serving", flush=True)
        taken = []
        for run in range(1, runs + 1):
            # By then the standby processes for the next engine are ready, also on a machine with two processors.
            time.sleep(_SERVES_SECONDS)
            if run == 1:
                print(f"memory: {_memory(deployment)} with the standby processes of the next engine", flush=True)
            pid = deployment.pid(0, "engine-core")
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            deployment.complete(timeout=180)
            taken.append(time.monotonic() - killed)
            told = _told(phases(deployment, start=run))
            print(
                f"  from kill to answer {taken[-1]:.1f} s, {taken[-1] / engine:.2f} of a cold start: {told}", flush=True
            )
        print(f"median {statistics.median(taken):.1f} s, {statistics.median(taken) / engine:.2f} of a cold start")
    finally:
        deployment.destroy()


def bare(runs: int) -> None:
    """Kill EngineCore of vLLM under Ray in restart loops: each death ends vLLM, and all of it restarts."""
    system = Bare(None)
    try:
        begun = time.monotonic()
        system.start()
        print(f"to ready, with new weights: {time.monotonic() - begun:.1f} s", flush=True)
        for _ in range(runs):
            time.sleep(_SERVES_SECONDS)
            pid = system.pid(0, "engine-core")
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            time.sleep(1.0)
            while not answers(system.api) and time.monotonic() - killed < 180:
                time.sleep(0.25)
            print(f"  from kill to answer {time.monotonic() - killed:.1f} s", flush=True)
    finally:
        system.close()


def _told(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())


def _memory(deployment: Deployment) -> str:
    return ", ".join(f"rank {rank} {size:.0f} MiB" for rank, size in enumerate(memory(deployment)))


def summary(rows: list[Recovery]) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for fault in PROCESS_DEATHS:
        mine = [row for row in rows if row.fault is fault]
        table.append(
            {
                "fault": fault.name,
                "noticed": round(statistics.median(row.detected for row in mine), 2),
                "answered": round(statistics.median(row.answered for row in mine), 1),
                "cause": ", ".join(sorted({row.cause for row in mine})),
                "rank": ", ".join(sorted({str(row.culprit) for row in mine})),
                "level": ", ".join(sorted({str(row.level) for row in mine})),
            }
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
