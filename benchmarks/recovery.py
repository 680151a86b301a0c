"""Start-up, detection and recovery on this machine: `make bench`, or `python benchmarks/recovery.py --runs 3`.

Every fault is a real signal to a real process of a two-member group that serves; prints a table and the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

from dsv4_testkit.faults.table import PROCESS_DEATHS
from dsv4_testkit.harness import Deployment, Recovery, inflict, memory, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="of each fault")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    deployment = Deployment(restarts=len(PROCESS_DEATHS) * options.runs + 1)
    rows: list[Recovery] = []
    try:
        cold = deployment.up()
        print(f"up to ready, weights made anew: {cold:.1f} s", flush=True)
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
