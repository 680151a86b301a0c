"""Measure time and memory of compiling all bundled kernels of an engine with Flash's layers, without a GPU.

    python benchmarks/precompile.py --arch sm_121 --processes 2

Each run has an empty cache. The last column is the peak memory of all compilers together (PSS: shared pages counted
once).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from dsv4_kernels.arch import Arch
from dsv4_testkit.plans import FLASH

_LOOK_SECONDS = 0.2


def main() -> None:
    """Compile, and print a row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=Arch, default=Arch.SM_121)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(f"{len(FLASH)} plans for {options.arch}, {os.cpu_count()} processors")
    print("| processes | kernels | seconds | processor seconds | memory MiB |\n|---:|---:|---:|---:|---:|")
    for processes in options.processes:
        print(f"| {processes} | {measure(options.arch, processes)} |", flush=True)


def measure(arch: Arch, processes: int) -> str:
    """Return the cells of a row: kernels, seconds, processor seconds, MiB."""
    with tempfile.TemporaryDirectory() as cache:
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "dsv4_kernels.precompile", arch, str(arch.spec.multiprocessors)]
        with subprocess.Popen(
            [*command, "--processes", str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRITON_CACHE_DIR": cache},
        ) as running:
            memory: list[int] = []
            threading.Thread(target=_watch, args=(running, memory), daemon=True).start()
            told, _ = running.communicate("\n".join([*FLASH, "", ""]))
        if running.returncode:
            raise SystemExit(f"the compilers ended with {running.returncode}")
        seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        failed = [one for one in map(json.loads, told.splitlines()) if one["error"] is not None]
        if failed:
            raise SystemExit(f"not compiled: {failed}")
        kernels = len(list(Path(cache).glob("*/*.cubin")))
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return f"{kernels} | {seconds:.1f} | {used:.1f} | {max(memory) / 2**20:.0f}"


def _watch(running: subprocess.Popen[str], memory: list[int]) -> None:
    while running.poll() is None:
        total = 0
        try:
            whole = psutil.Process(running.pid)
            for process in (whole, *whole.children(recursive=True)):
                total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            pass
        memory.append(total)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
