"""Files in use are read again, and a damaged one is found whether or not its times show the change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging, store
from dsv4_runtime.weights.members import StagingJob
from dsv4_runtime.weights.store import Scrubber
from dsv4_testkit.weights_servers import FileServer, Server

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"
FAST = 1 << 40


@pytest.fixture
def plan(checkpoint: Path, serve: Serve, tmp_path: Path) -> WeightsPlan:
    url = serve(FileServer(checkpoint).app).url
    found = WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "weights"), origin=url)
    staging.stage(StagingJob(weights=found), lambda _: None)
    return found


def zero(path: Path, *, keep_time: bool) -> None:
    """Write 64 KiB of zeros into the middle of a file without a change of its size."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(bytes(64 << 10))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_checkpoint_that_is_right_stays_so(plan: WeightsPlan) -> None:
    scrubber = Scrubber(plan, FAST)
    assert [scrubber.turn(), scrubber.changed(), scrubber.turn()] == [None, None, None]


def test_zeros_that_no_time_shows_are_found_by_the_next_turn(plan: WeightsPlan) -> None:
    scrubber = Scrubber(plan, FAST)
    assert scrubber.turn() is None
    zero(Path(plan.path) / SHARD, keep_time=True)
    assert scrubber.changed() is None
    assert scrubber.turn() == SHARD


@pytest.mark.parametrize("how", ["zeros", "another file", "gone"])
def test_a_file_that_changed_is_read_at_once(plan: WeightsPlan, how: str) -> None:
    scrubber = Scrubber(plan, FAST)
    assert scrubber.turn() is None
    path = Path(plan.path) / SHARD
    if how == "zeros":
        zero(path, keep_time=False)
    elif how == "another file":
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        zero(other, keep_time=True)
        os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        other.rename(path)
    else:
        path.unlink()
    assert scrubber.changed() == SHARD


def test_a_file_that_was_only_touched_is_right(plan: WeightsPlan) -> None:
    scrubber = Scrubber(plan, FAST)
    assert scrubber.turn() is None
    (Path(plan.path) / SHARD).touch()
    assert scrubber.changed() is None


def test_it_reads_no_faster_than_it_may(plan: WeightsPlan) -> None:
    size = sum((Path(plan.path) / name).stat().st_size for name in store.digests(plan))
    begun = time.monotonic()
    assert Scrubber(plan, 2 * size).turn() is None
    assert time.monotonic() - begun > 0.35


def test_without_reference_digests_no_file_is_read(checkpoint: Path) -> None:
    plan = WeightsPlan(source=WeightsSource.PATH, path=str(checkpoint))
    assert store.scrub(plan, 1.0, lambda: pytest.fail("nothing was read")) is None
    assert store.verify(plan) == (False, None)


def test_a_checkpoint_is_read_at_once_where_an_answer_was_wrong(plan: WeightsPlan) -> None:
    assert store.verify(plan) == (True, None)
    zero(Path(plan.path) / SHARD, keep_time=True)
    assert store.verify(plan) == (True, SHARD)


def test_changed_files_are_detected_between_two_turns(plan: WeightsPlan) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            zero(Path(plan.path) / SHARD, keep_time=False)

    turns: list[int] = []
    assert store.scrub(plan, 3600.0, lambda: turns.append(len(waits)), sleep) == SHARD
    assert turns == [0], "it is told once that all files are right"
    assert waits == [10.0, 10.0, 10.0]
