from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.weights import writer
from dsv4_runtime.weights.writer import BLOCK_BYTES, HashingWriter
from dsv4_testkit.weights_servers import cached_share

CONTENT = random.Random(1).randbytes(2 * BLOCK_BYTES + 5000)


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a file on a disk, and one on a file system that may not support direct writes."""
    if request.param == "disk":
        yield tmp_path / "file"
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder) / "file"


def append(path: Path, data: bytes, pieces: list[int], *, direct: bool) -> None:
    """Append `data` in pieces of these sizes, repeatedly, and verify that the written bytes are the hashed ones."""
    descriptor, digest = os.open(path, os.O_RDWR | os.O_CREAT), hashlib.sha256()
    before = os.fstat(descriptor).st_size
    found, at, turn = HashingWriter(descriptor, before, digest.update, direct=direct), 0, 0
    try:
        with contextlib.closing(found):
            while at < len(data):
                room = found.room
                piece = data[at : at + min(len(room), pieces[turn % len(pieces)])]
                room[: len(piece)] = piece
                found.add(len(piece))
                at, turn = at + len(piece), turn + 1
                assert found.size == before + at
                assert 0 <= found.size - os.fstat(descriptor).st_size < BLOCK_BYTES
    finally:
        os.close(descriptor)
    assert digest.digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("direct", [False, True])
def test_every_byte_is_in_its_place(path: Path, direct: bool) -> None:
    append(path, CONTENT, [70_001], direct=direct)
    assert path.read_bytes() == CONTENT


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, len(CONTENT)), max_size=4),
    st.lists(st.integers(1, BLOCK_BYTES * 3 // 2), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_a_file_is_continued_at_any_byte(ends: list[int], pieces: list[int], direct: list[bool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, cuts = Path(folder) / "file", [0, *sorted(ends), len(CONTENT)]
        if min(pieces) < 5000:
            pieces = [piece + 5000 for piece in pieces]
        for start, end, past in zip(cuts, cuts[1:], direct, strict=False):
            append(path, CONTENT[start:end], pieces, direct=past)
        assert path.read_bytes() == CONTENT


def test_direct_writes_are_not_in_the_page_cache(tmp_path: Path) -> None:
    shares = {}
    for direct in (False, True):
        path = tmp_path / str(direct)
        append(path, CONTENT, [100_000], direct=direct)
        shares[direct] = cached_share(path)
    assert shares[True] < 0.05 < 0.9 < shares[False]


def test_a_late_refusal_of_direct_writes_is_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, write = [], os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if writer.fcntl.fcntl(descriptor, writer.fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    append(tmp_path / "file", CONTENT, [100_000], direct=True)
    assert refused == [0]
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("direct", [False, True])
def test_a_disk_that_becomes_full_has_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    room, write = BLOCK_BYTES + 1000, os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if offset == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        if offset % 4096 and writer.fcntl.fcntl(descriptor, writer.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        part = data[: room - offset]
        os.lseek(descriptor, offset, os.SEEK_SET)
        flags = writer.fcntl.fcntl(descriptor, writer.fcntl.F_GETFL)
        writer.fcntl.fcntl(descriptor, writer.fcntl.F_SETFL, flags & ~os.O_DIRECT)
        count = write(descriptor, part, offset)
        writer.fcntl.fcntl(descriptor, writer.fcntl.F_SETFL, flags)
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        append(tmp_path / "file", CONTENT, [100_000], direct=direct)
    assert (tmp_path / "file").read_bytes() == CONTENT[:room]
    with pytest.raises(OSError, match="No space"):
        append(tmp_path / "file", CONTENT[room:], [100_000], direct=direct)
    assert (tmp_path / "file").read_bytes() == CONTENT[:room]


def test_discarded_bytes_are_not_written(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    found = HashingWriter(descriptor, 0, lambda _: None)
    found.add(1000)
    found.close(keep=False)
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b""
