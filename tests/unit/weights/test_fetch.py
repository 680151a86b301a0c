"""Transfer of one file: the digest is that of the written bytes, after any start, cut or stop."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.weights.checkpoint import ManifestFile, NotAsDescribedError, TransientError
from dsv4_runtime.weights.transfer import Stream, TransferContext, fetch, wait_seconds
from dsv4_runtime.weights.writer import BLOCK_BYTES, Limiter, Meter
from dsv4_testkit.weights_servers import cached_share

CONTENT = random.Random(5).randbytes(6 * BLOCK_BYTES + 77)
FILE = ManifestFile(name="a.safetensors", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
FLOW = TransferContext(Limiter(None), Meter(), lambda: False)
# Neither a divisor of a block nor of a page.
_AT_ONCE = 300_001


class Source:
    """A source that returns `content`, and cuts the first transfer after `cut_after` reads."""

    name = "the source"

    def __init__(self, content: bytes, cut_after: int | None = None) -> None:
        self._content, self._cut_after = content, cut_after
        self.given = 0

    @contextlib.contextmanager
    def open(self, file: ManifestFile, start: int) -> Iterator[Stream]:
        assert file == FILE
        self._at, self._reads = start, 0
        yield self

    def readinto(self, room: memoryview, /) -> int:
        self._reads += 1
        if self._reads == self._cut_after:
            self._cut_after = None
            raise TransientError("cut off")
        data = self._content[self._at : self._at + min(len(room), _AT_ONCE)]
        room[: len(data)] = data
        self._at += len(data)
        self.given += len(data)
        return len(data)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("cut_after", [None, 5])
@pytest.mark.parametrize("have", [0, 3 * BLOCK_BYTES + 1, len(CONTENT) - 1, len(CONTENT)])
def test_every_byte_is_written_and_hashed(tmp_path: Path, direct: bool, cut_after: int | None, have: int) -> None:
    source, part = Source(CONTENT, cut_after), tmp_path / "part"
    part.write_bytes(CONTENT[:have])
    assert fetch(FILE, None, part, source, FLOW, tries=3, direct=direct) == FILE.sha256
    assert part.read_bytes() == CONTENT
    # A direct write begins at a page boundary; a complete file is not requested.
    missing = len(CONTENT) - have
    assert missing <= source.given <= (missing and missing + 4095)
    assert "hash" not in {thread.name for thread in threading.enumerate()}


def test_a_part_is_continued_past_the_page_cache(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:77])
    fetch(FILE, None, part, Source(CONTENT), FLOW, tries=1, direct=True)
    assert cached_share(part) < 0.3


def test_one_wrong_byte_at_the_end_is_found(tmp_path: Path) -> None:
    source, part = Source(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])), tmp_path / "part"
    with pytest.raises(NotAsDescribedError, match="SHA-256"):
        fetch(FILE, None, part, source, FLOW, tries=1)
    assert not part.exists()


def test_an_aborted_transfer_keeps_received_bytes_and_leaves_no_thread(tmp_path: Path) -> None:
    source, part = Source(CONTENT, cut_after=3), tmp_path / "part"
    with pytest.raises(TransientError):
        fetch(FILE, None, part, source, FLOW, tries=1)
    assert part.read_bytes() == CONTENT[: source.given]
    assert "hash" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("direct", [False, True])
def test_nothing_is_written_after_the_staging_was_stopped(tmp_path: Path, direct: bool) -> None:
    source, part = Source(CONTENT), tmp_path / "part"
    flow = TransferContext(Limiter(None), Meter(), lambda: source.given > 2.5 * BLOCK_BYTES)
    with pytest.raises(TransientError):
        fetch(FILE, None, part, source, flow, tries=1, direct=direct)
    assert part.read_bytes() == CONTENT[: 2 * BLOCK_BYTES]


@pytest.mark.parametrize("direct", [False, True])
def test_a_stop_between_the_last_byte_and_its_write_costs_no_more_than_a_block(tmp_path: Path, direct: bool) -> None:
    source, part, stopped = Source(CONTENT), tmp_path / "part", []

    class StopsAtTheEnd(Limiter):
        def take(self, count: int) -> None:
            if source.given == len(CONTENT):
                stopped.append(count)

    flow = TransferContext(StopsAtTheEnd(None), Meter(), lambda: bool(stopped))
    with pytest.raises(TransientError):
        fetch(FILE, None, part, source, flow, tries=1, direct=direct)
    assert part.read_bytes() == CONTENT[: 6 * BLOCK_BYTES]


@pytest.mark.parametrize(
    ("failures", "asked", "seconds"),
    [(1, 0.0, 0.5), (2, 0.0, 1.0), (4, 0.0, 4.0), (1, 7.0, 7.0), (20, 0.0, 30.0), (2000, 0.0, 30.0), (1, 600.0, 30.0)],
)
def test_the_delay_doubles_up_to_a_bound_and_a_server_may_extend_it(
    failures: int, asked: float, seconds: float
) -> None:
    assert wait_seconds(TransientError("cut off", asked), failures) == seconds
