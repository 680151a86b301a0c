"""Check every GPU case of operations against the float64 reference in parallel processes, then time them.

`python -m benchmarks.kernels.check --folder NAME ... [--jobs 12] [--csv FILE]`

The processes compile what the benchmark needs, so that it finds everything in Triton's cache on disk. The exit status
is 1 if a case is outside its tolerance.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from dsv4_kernels.registry import operations
from dsv4_kernels.static import FOLDERS
from dsv4_kernels.testing import harness


def check(folders: list[str], index: int, count: int) -> int:
    """Run this process's share of the cases; print one line each; return how many are wrong."""
    wrong = 0
    cases = [(op, c) for op in operations() if op.folder in folders for c in op.cases if c.tags & {"gpu", "bench"}]
    for op, case in cases[index::count]:
        try:
            errors = harness.run_case(op, case, torch.device("cuda"), 1)
            text = "; ".join(f"{name} {measured}" for name, measured in errors.items())
        except Exception as error:
            wrong += 1
            text = f"WRONG {type(error).__name__}: {str(error)[:300]}"
        print(f"check {op.name} {case.name}: {text}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="+", choices=FOLDERS, required=True)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--csv", help="write the benchmark's results here")
    parser.add_argument("--part", help="i/n: only check this share (used by the command itself)")
    options = parser.parse_args()
    if options.part:
        index, count = map(int, options.part.split("/"))
        return 1 if check(options.folder, index, count) else 0
    command = [sys.executable, "-m", "benchmarks.kernels.check", "--folder", *options.folder, "--part"]
    children = [subprocess.Popen([*command, f"{i}/{options.jobs}"]) for i in range(options.jobs)]
    failed = sum(child.wait() != 0 for child in children)
    bench = [sys.executable, "-m", "benchmarks.kernels.run", "--folder", *options.folder]
    timed = subprocess.run(bench + (["--csv", options.csv] if options.csv else []), check=False)
    print(f"{failed} of {options.jobs} processes found wrong cases; the benchmark ended with {timed.returncode}")
    return 1 if failed or timed.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main())
