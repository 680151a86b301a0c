"""A staging that is killed goes on where it was: the short form of `benchmarks/weights.py --only kills`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from weights_servers import FileServer, Server

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights.fetch import CHUNK_BYTES
from dsv4_runtime.weights.job import Job

_SPEC = importlib.util.spec_from_file_location("bench_weights", Path("benchmarks/weights.py").resolve())
assert _SPEC
assert _SPEC.loader
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


def test_kills_at_any_byte_cost_a_chunk_at_most(tmp_path: Path) -> None:
    rows, right = bench.kill_often(tmp_path, 5, size=24 << 20, pace=30e6, seed=3)
    assert right
    assert len(rows) == 5
    assert max(row["lost"] for row in rows) <= CHUNK_BYTES
    assert rows[-1]["kept"] > rows[0]["kept"] > 0


def test_the_process_ends_with_its_agent(
    checkpoint: Path, serve: Callable[[web.Application], Server], tmp_path: Path
) -> None:
    files = FileServer(checkpoint)
    files.pace = 1e6
    plan = WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "weights"), origin=serve(files.app).url)
    command = [sys.executable, "-m", "dsv4_runtime.weights.main", "stage"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{Job(weights=plan).to_json()}\n")
    process.stdin.flush()
    assert "percent" in process.stdout.readline() + process.stdout.readline() + process.stdout.readline()
    process.stdin.close()
    begun = time.monotonic()
    assert process.wait(10) == 3
    assert time.monotonic() - begun < 5
    process.stdout.close()
