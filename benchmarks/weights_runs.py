"""Common parts of weight benchmarks: bytes to move, a staging as run by the agent, figures stored across runs."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4_runtime.weights.members import StagingJob, StagingReport
from dsv4_testkit.weights_servers import write_shard

GIB = 1 << 30
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": ""}
STAGE = [sys.executable, "-m", "dsv4_runtime.weights.main", "stage"]


def once(name: str, options: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `measure`, or its result for this name in an earlier run with the same `--json`."""
    known: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if name not in known:
        known[name] = measure()
        if options.json:
            options.json.write_text(json.dumps(known, indent=1))
    figures: dict[str, Any] = known[name]
    return figures


def rates(values: list[float]) -> str:
    return f"{statistics.median(values) / 1e6:.0f} ({min(values) / 1e6:.0f} to {max(values) / 1e6:.0f})"


def write_big(path: Path, size: int, seed: int) -> None:
    """Write a safetensors file of random, incompressible bytes and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, 1, "t", seed)
    block = random.Random(seed).randbytes(1 << 24)
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, size, len(block)):
            stream.write(block[: min(len(block), size - start)])
        stream.flush()
        os.fsync(stream.fileno())


def stage(job: StagingJob, prefix: list[str]) -> StagingReport:
    """Run a staging as the agent does; return its last report."""
    command = [*prefix, *STAGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{job.to_json()}\n")
        process.stdin.flush()
        return StagingReport.model_validate_json(process.stdout.readlines()[-1])
