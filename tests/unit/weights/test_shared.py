"""Files that deployments of a node share: read in place, and only trusted after they were read."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights import shared, staging
from dsv4_runtime.weights.members import StagingJob
from dsv4_runtime.weights.store import Store
from dsv4_testkit.weights_servers import FileServer, Server, same_files

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def files(checkpoint: Path) -> FileServer:
    return FileServer(checkpoint)


@pytest.fixture
def plan(files: FileServer, serve: Serve, tmp_path: Path) -> WeightsPlan:
    """Return the plan of a deployment on a node whose shared files are in `store`."""
    return WeightsPlan(
        source=WeightsSource.HTTP,
        path=str(tmp_path / "own"),
        origin=serve(files.app).url,
        shared=str(tmp_path / "store"),
    )


def stage(plan: WeightsPlan) -> int:
    return staging.stage(StagingJob(weights=plan), lambda _: None).fetched


def of(plan: WeightsPlan, name: str) -> Path:
    digest = hashlib.sha256((Path(plan.path) / name).read_bytes()).hexdigest()
    return shared.shared_file(Path(str(plan.shared)), digest)


def test_shared_files_are_neither_fetched_nor_stored_twice(plan: WeightsPlan, files: FileServer) -> None:
    store = Path(str(plan.shared))
    published = shared.publish(files.folder, store)
    assert SHARD in published
    assert stage(plan) == 0
    assert [path for path in files.requests if "safetensors" in path and "HEAD" not in path] == []
    assert same_files(files.folder, Path(plan.path))
    assert (Path(plan.path) / SHARD).readlink() == store / published[SHARD]
    # The next start reads nothing, and fetches a file that is missing from the store.
    assert stage(plan) == 0
    of(plan, SHARD).unlink()
    assert stage(plan) == (files.folder / SHARD).stat().st_size
    assert not (Path(plan.path) / SHARD).is_symlink()


def test_a_shared_file_with_the_wrong_digest_is_fetched_instead(plan: WeightsPlan, files: FileServer) -> None:
    store = Path(str(plan.shared))
    place = store / shared.publish(files.folder, store)[SHARD]
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.chmod(0o644)
    place.write_bytes(data)
    assert stage(plan) == len(data)
    assert same_files(files.folder, Path(plan.path))
    assert not (Path(plan.path) / SHARD).is_symlink()
    # The damaged file is unchanged: members do not write to the store.
    assert place.read_bytes() == data


def test_a_changed_shared_file_is_detected_at_the_next_start(plan: WeightsPlan, files: FileServer) -> None:
    shared.publish(files.folder, Path(str(plan.shared)))
    stage(plan)
    place = of(plan, SHARD)
    size = place.stat().st_size
    place.chmod(0o644)
    place.write_bytes(b"\0" * size)
    assert stage(plan) == size
    assert same_files(files.folder, Path(plan.path))


def test_only_regular_files_are_published_under_the_digest_of_the_copy(files: FileServer, tmp_path: Path) -> None:
    checkpoint, store = tmp_path / "tenant", tmp_path / "store"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "passwords").write_text("root")
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "passwords")
    (checkpoint / "linked").symlink_to(files.folder)
    os.mkfifo(checkpoint / "extra.json")
    assert list(shared.publish(checkpoint, store)) == ["config.json"]
    (kept,) = store.iterdir()
    assert kept.name == hashlib.sha256(b"{}").hexdigest()
    assert kept.stat().st_mode & 0o777 == 0o444


def test_drafts_of_killed_writers_are_removed_after_a_day(files: FileServer, tmp_path: Path) -> None:
    """Younger ones may be of a writer on another machine."""
    store = tmp_path / "store"
    store.mkdir()
    for name, hours in ((".draft-1", 25), (".draft-2", 1)):
        (store / name).touch()
        os.utime(store / name, (time.time() - hours * 3600,) * 2)
    published = shared.publish(files.folder, store)
    assert {path.name for path in store.iterdir()} == {".draft-2", *published.values()}


def test_the_command_lists_published_files(files: FileServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsv4_runtime.weights.shared", str(files.folder), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rows = dict(reversed(line.split("  ", 1)) for line in done.stdout.splitlines())  # type: ignore[arg-type]
    assert rows[SHARD] == hashlib.sha256((files.folder / SHARD).read_bytes()).hexdigest()
    assert "files" in done.stderr
    assert Store(tmp_path / "store", "any").marker().files == {}
