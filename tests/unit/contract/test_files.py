"""Atomic replacement of files; symbolic links and special files are refused."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from dsv4_runtime.util.files import open_regular, replace_file


def test_replaced_files_and_their_directory_are_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    file = tmp_path / "object.json"
    replace_file(file, "one")
    assert done == [f"fsync .object.json.{os.getpid()}", "replace object.json", f"fsync {tmp_path.name}"]
    replace_file(file, "two", mode=0o600)
    assert file.read_text() == "two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".file.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "file", "text")
    assert victim.read_text() == "mine"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(file, "x" * (1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    file, link, fifo = tmp_path / "file", tmp_path / "link", tmp_path / "fifo"
    file.write_text("text")
    link.symlink_to(file)
    os.mkfifo(fifo)
    os.close(open_regular(file))
    os.close(open_regular(link, follow=True))
    with pytest.raises(OSError, match="it is a link"):
        open_regular(link)
    for path in (fifo, Path("/dev/null"), tmp_path):
        with pytest.raises(OSError, match="it is no regular file"):
            open_regular(path)
