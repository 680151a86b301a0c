"""Check every GPU case of operations against the float64 reference in parallel processes, then time them and the peers.

`python -m benchmarks.kernels.check --folder NAME ... [--jobs 12] [--csv FILE]`

The processes compile the kernels of the benchmark, and then those of its peers, so that they are in the caches on disk.
The exit status is 1 if a case is outside its tolerance, or if the benchmark failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from benchmarks.kernels import goals, run, table

from dsv4_kernels import registry
from dsv4_kernels.registry import FOLDERS, operations


def check(folders: list[str], index: int, count: int) -> int:
    """Run this process's share of the cases; print one line each; return the number of wrong ones."""
    wrong = 0
    cases = [(op, c) for op in operations() if op.folder in folders for c in op.cases if c.tags & {"gpu", "bench"}]
    for op, case in cases[index::count]:
        try:
            errors = registry.run_case(op, case, torch.device("cuda"), 1)
            text = "; ".join(f"{name} {measured}" for name, measured in errors.items())
        except Exception as error:
            wrong += 1
            text = f"WRONG {type(error).__name__}: {str(error)[:300]}"
        print(f"check {op.name} {case.name}: {text}", flush=True)
    return wrong


def parallel(command: list[str], jobs: int, seconds: float | None = None) -> int:
    """Run all shares of a command in parallel; return how many failed or were ended by the time limit."""
    children = [subprocess.Popen([sys.executable, "-m", *command, f"{i}/{jobs}"]) for i in range(jobs)]
    until = None if seconds is None else time.monotonic() + seconds
    failed = 0
    for child in children:
        try:
            failed += child.wait(None if until is None else max(0.0, until - time.monotonic())) != 0
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            failed += 1
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="+", choices=FOLDERS, required=True)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--csv", type=Path, help="file of the benchmark's results; also print reached goals")
    parser.add_argument(
        "--peer-seconds", type=float, default=120, help="limit for the parallel compilation of all peers"
    )
    parser.add_argument("--part", help="i/n: only check this share (used by the command itself)")
    parser.add_argument("--prepare", help="i/n: only compile this share of the peers (used by the command itself)")
    options = parser.parse_args()
    if options.part:
        index, count = map(int, options.part.split("/"))
        return 1 if check(options.folder, index, count) else 0
    if options.prepare:
        index, count = map(int, options.prepare.split("/"))
        run.prepare(options.folder, index, count)
        return 0
    command = ["benchmarks.kernels.check", "--folder", *options.folder]
    failed = parallel([*command, "--part"], options.jobs)
    late = parallel([*command, "--prepare"], options.jobs, options.peer_seconds)
    bench = [sys.executable, "-m", "benchmarks.kernels.run", "--folder", *options.folder]
    timed = subprocess.run(bench + (["--csv", str(options.csv)] if options.csv else []), check=False)
    print(
        f"{failed} of {options.jobs} processes found wrong cases; {late} processes that compiled the peers failed or "
        f"exceeded the time; the benchmark exited with {timed.returncode}"
    )
    if options.csv and options.csv.exists():
        print(goals.report([table.read(options.csv)]))
    return 1 if failed or timed.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main())
