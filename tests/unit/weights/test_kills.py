"""A killed staging continues at its position: the short form of `benchmarks/weights.py --only kills`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging
from dsv4_runtime.weights.members import StagingJob, StagingReport, StagingState, WeightsServer
from dsv4_testkit.weights_servers import TOKEN, FileServer, Reporter, Server, arrived, same_files

_SPEC = importlib.util.spec_from_file_location("bench_weights", Path("benchmarks/weights.py").resolve())
assert _SPEC
assert _SPEC.loader
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


@pytest.mark.parametrize("policy", list(PageCache))
def test_kills_at_any_byte_cost_a_chunk_at_most(tmp_path: Path, policy: PageCache) -> None:
    told: Callable[[dict[str, int]], None] = lambda _: None  # noqa: E731
    rows, right = bench.kill_often(tmp_path, 4, size=8 << 20, pace=8e6, seed=3, told=told, page_cache=policy)
    assert right
    assert len(rows) == 4
    assert max(row["lost"] for row in rows) <= bench.CHUNK_BYTES
    assert rows[-1]["kept"] > rows[0]["kept"] > 0


def begin(job: StagingJob) -> subprocess.Popen[str]:
    """Start a staging process as the agent does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(bench.STAGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdin
    process.stdin.write(f"{job.to_json()}\n")
    process.stdin.flush()
    return process


def content(folder: Path) -> int:
    """Return the present bytes of the checkpoint, complete or not."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and ".dsv4" not in path.parts)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_part_from_a_member_is_continued_from_the_origin(
    checkpoint: Path, serve: Callable[[web.Application], Server], tmp_path: Path, damaged: bool
) -> None:
    files = FileServer(checkpoint)
    origin = serve(files.app).url
    whole = WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "m0"), origin=origin)
    share = WeightsServer(whole)
    staging.stage(StagingJob(weights=whole), lambda _: None)
    share.heard(StagingReport(stance=StagingState.COMPLETE))
    app = http.application(cast("http.Reporter", Reporter()), TOKEN)
    share.add_to(app)
    member = serve(app)

    files.requests.clear()
    folder = tmp_path / "m1"
    slow = whole.model_copy(update={"path": str(folder), "bandwidth_bytes": 4_000_000})
    process = begin(StagingJob(weights=slow, rank=1, members={0: member.url}, token=TOKEN))
    deadline = time.monotonic() + 60
    while arrived(folder) < 3_000_000 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()
    member.stop()
    kept = arrived(folder)
    assert kept >= 3_000_000
    assert files.requests == []

    shard = max(folder.glob("*.part"), key=lambda path: path.stat().st_size)
    if damaged:
        with shard.open("r+b") as stream:
            stream.write(b"\xff" * 100)
    missing = content(tmp_path / "m0") - content(folder)
    fetched = staging.stage(
        StagingJob(weights=whole.model_copy(update={"path": str(folder)}), rank=1), lambda _: None
    ).fetched
    assert same_files(checkpoint, folder)
    # A damaged part arrives completely, does not match the manifest, and is fetched once more.
    again = 3_300_000 if damaged else 0
    assert missing + again <= fetched <= missing + again + 1000 * damaged


def test_the_process_ends_with_its_agent(
    checkpoint: Path, serve: Callable[[web.Application], Server], tmp_path: Path
) -> None:
    files = FileServer(checkpoint)
    files.pace = 1e6
    plan = WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "weights"), origin=serve(files.app).url)
    process = begin(StagingJob(weights=plan))
    assert process.stdin
    assert process.stdout
    assert "percent" in process.stdout.readline() + process.stdout.readline() + process.stdout.readline()
    process.stdin.close()
    begun = time.monotonic()
    assert process.wait(60) == 3
    assert time.monotonic() - begun < 60
    process.stdout.close()
