"""Guarantees of the marker of verified files."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.weights import store as stores
from dsv4_runtime.weights.checkpoint import CheckpointManifest, ManifestFile
from dsv4_runtime.weights.store import Store

DATA = b"tensors" * 100
FILE = ManifestFile(name="model.safetensors", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
MANIFEST = CheckpointManifest(identity="it", files=(FILE,))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path, "it")
    found.note_manifest(MANIFEST)
    found.part(FILE).write_bytes(DATA)
    return found


def finish(store: Store) -> None:
    assert FILE.sha256 is not None
    store.finish(FILE, FILE.sha256)


def test_a_file_is_synced_before_the_marker_lists_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure in between, the marker must not exist without the bytes."""
    done: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(descriptor: int) -> None:
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(self: Path, target: Any) -> Path:
        done.append(("rename", Path(target).name))
        return rename(self, target)

    def replaced(self: Path, target: Any) -> Path:
        done.append(("rename", Path(target).name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    finish(store)
    assert done == [
        ("fsync", store.part(FILE).name),
        ("rename", "model.safetensors"),
        ("fsync", store.folder.name),
        ("fsync", f".verified.json.{os.getpid()}"),
        ("rename", "verified.json"),
        ("fsync", ".dsv4"),
    ]
    assert set(store.finished(MANIFEST)) == {FILE.name}


def test_a_file_that_is_put_in_its_place_counts_all_the_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise progress goes back by a file, and a disk with enough space for the rest seems too small."""
    held: list[int] = []
    readers: list[threading.Thread] = []
    sync = stores.sync_folder

    def synced(folder: Path) -> None:
        reader = threading.Thread(target=lambda: held.append(store.held(MANIFEST)))
        reader.start()
        reader.join(0.2)
        readers.append(reader)
        sync(folder)

    monkeypatch.setattr(stores, "sync_folder", synced)
    finish(store)
    for reader in readers:
        reader.join(60)
    assert held == [len(DATA)] * len(readers) != []


@pytest.mark.parametrize("change", ["mtime", "size", "content"])
def test_a_file_that_changed_since_is_not_finished(store: Store, change: str) -> None:
    finish(store)
    path = store.folder / FILE.name
    before = path.stat()
    if change == "mtime":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "size":
        path.write_bytes(DATA + b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        # The length is unchanged: only the time differs.
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    assert store.finished(MANIFEST) == {}


def test_a_file_that_was_put_back_in_its_place_is_not_finished(store: Store) -> None:
    """Size and time are those of the verified file, but it is another file."""
    finish(store)
    path = store.folder / FILE.name
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(DATA[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)
    assert store.finished(MANIFEST) == {}
