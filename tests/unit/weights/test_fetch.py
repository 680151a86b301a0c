"""One file: what is hashed is what was written, in the thread that receives and in one beside it."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.weights.errors import NotAsDescribedError, TransientError
from dsv4_runtime.weights.fetch import CHUNK_BYTES, Flow, Stream, fetch
from dsv4_runtime.weights.limits import Limiter, Meter
from dsv4_runtime.weights.manifest import ManifestFile

CONTENT = random.Random(5).randbytes(20 * CHUNK_BYTES + 77)
FILE = ManifestFile(name="a.safetensors", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


class Source:
    """A place that gives `content`, and cuts the first transfer off after so many reads."""

    name = "the source"

    def __init__(self, content: bytes, cut_after: int | None = None) -> None:
        self._content, self._cut_after = content, cut_after
        self.threads: set[str] = set()

    @contextlib.contextmanager
    def open(self, name: str, start: int) -> Iterator[Stream]:
        assert name == FILE.name
        self._at, self._reads = start, 0
        yield self

    def read(self, amount: int, /) -> bytes:
        self.threads |= {thread.name for thread in threading.enumerate()}
        self._reads += 1
        if self._reads == self._cut_after:
            self._cut_after = None
            raise TransientError("cut off")
        data = self._content[self._at : self._at + amount]
        self._at += len(data)
        return data


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("cut_after", [None, 5])
def test_every_byte_is_written_and_hashed(tmp_path: Path, spare: bool, cut_after: int | None) -> None:
    source, part = Source(CONTENT, cut_after), tmp_path / "part"
    flow = Flow(Limiter(None), Meter(), lambda: False, spare)
    assert fetch(FILE, None, part, source, flow, tries=3) == FILE.sha256
    assert part.read_bytes() == CONTENT
    assert ("hash" in source.threads) is spare
    assert "hash" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("spare", [False, True])
def test_one_wrong_byte_at_the_end_is_found(tmp_path: Path, spare: bool) -> None:
    source, part = Source(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])), tmp_path / "part"
    with pytest.raises(NotAsDescribedError, match="SHA-256"):
        fetch(FILE, None, part, source, Flow(Limiter(None), Meter(), lambda: False, spare), tries=1)
    assert not part.exists()


def test_a_transfer_that_is_given_up_leaves_no_thread(tmp_path: Path) -> None:
    source = Source(CONTENT, cut_after=3)
    with pytest.raises(TransientError):
        fetch(FILE, None, tmp_path / "part", source, Flow(Limiter(None), Meter(), lambda: False, spare=True), tries=1)
    assert "hash" not in {thread.name for thread in threading.enumerate()}
