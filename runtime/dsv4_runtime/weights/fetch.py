"""One file from one place into its part: continued where it stopped, hashed as it comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.errors import NotAsDescribedError, TransientError
from dsv4_runtime.weights.limits import Limiter, Meter
from dsv4_runtime.weights.manifest import Digest, ManifestFile
from dsv4_runtime.weights.sink import ALIGN_BYTES, BLOCK_BYTES, Sink
from dsv4_runtime.weights.store import full_disk

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0


class Stream(Protocol):
    """The bytes of a file from some offset on."""

    def readinto(self, room: memoryview, /) -> int:
        """Put the next bytes into `room`, as many as have come or as it takes; how many, 0 at the end.

        Raises:
            TransientError: the transfer was cut off.
        """
        ...


class Place(Protocol):
    """Source of bytes: an origin, or another member."""

    @property
    def name(self) -> str:
        """Return its name for people."""
        ...

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        """Open `file` from byte `start` on.

        Raises:
            TransientError: trying again may help.
            WeightsError: it will not.
        """
        ...


@dataclass(frozen=True, slots=True)
class Flow:
    """Context that all transfers of a staging share."""

    limiter: Limiter
    meter: Meter
    stopping: Callable[[], bool]
    """Whether the transfers should end."""


def fetch(
    file: ManifestFile, sha256: str | None, part: Path, place: Place, flow: Flow, tries: int, *, direct: bool = False
) -> str:
    """Make `part` the whole content of `file` and return its SHA-256.

    Bytes that are already in `part` are kept. Cut transfers are taken up again after a pause, which grows.

    Args:
        file: what to fetch.
        sha256: what it must have, if the manifest does not say.
        part: the file to append to.
        place: where from.
        flow: limits and counters.
        tries: transfers in a row that may bring no byte before it is given up.
        direct: whether what comes goes past the page cache.

    Raises:
        NotAsDescribedError: all of it came, and it is something else; the part is gone.
        TransientError: it was cut off again and again.
        WeightsError: it cannot be had there, or not be written here.
    """
    digest = Digest(file, sha256)
    with full_disk(part.parent):
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(part, os.O_RDWR | os.O_CREAT)
    try:
        sink = Sink(descriptor, _resume(descriptor, file.size, digest), digest.update, direct=direct)
        try:
            _receive(file, place, sink, flow, part.parent, tries)
        finally:
            with full_disk(part.parent):
                # When the staging stops, the directory may be another process' by now.
                sink.close(keep=not flow.stopping())
        if sink.size < file.size:
            raise TransientError("another file failed")
    finally:
        os.close(descriptor)
    if wrong := digest.mismatch():
        part.unlink(missing_ok=True)
        raise NotAsDescribedError(f"{file.name} from {place.name} has {wrong}")
    return digest.sha256


def check(file: ManifestFile, path: Path, flow: Flow, sha256: str | None = None) -> str | None:
    """Read `path` whole; its SHA-256 if it is `file`, None if it is not or is not there."""
    digest = Digest(file, sha256)
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != file.size:
            return None
        _hash(descriptor, file.size, digest, flow.stopping)
    finally:
        os.close(descriptor)
    return None if digest.mismatch() else digest.sha256


def wait_seconds(error: TransientError, failures: int) -> float:
    """Return the seconds to wait after `failures` failures in a row, of which `error` is the last.

    A server may ask for longer, up to the longest wait.
    """
    own = backoff(failures, first=_FIRST_WAIT_SECONDS, longest=_LONGEST_WAIT_SECONDS)
    return min(max(error.after, own), _LONGEST_WAIT_SECONDS)


def _resume(descriptor: int, size: int, digest: Digest) -> int:
    """Hash what is there, and return how much that is."""
    have = os.fstat(descriptor).st_size
    if have != size:
        # Direct writes begin with a page.
        have = have - have % ALIGN_BYTES if have < size else 0
        os.ftruncate(descriptor, have)
    _hash(descriptor, have, digest, lambda: False)
    return have


def _hash(descriptor: int, count: int, digest: Digest, stopping: Callable[[], bool]) -> None:
    os.posix_fadvise(descriptor, 0, count, os.POSIX_FADV_SEQUENTIAL)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    left = count
    while left and not stopping():
        got = os.readv(descriptor, [buffer[: min(left, BLOCK_BYTES)]])
        if not got:
            raise TransientError("the file became shorter while it was read")
        digest.update(buffer[:got])
        left -= got


def _receive(file: ManifestFile, place: Place, sink: Sink, flow: Flow, folder: Path, tries: int) -> None:
    """Append what is missing of `file`, in as many transfers as it takes."""
    failed = 0
    while sink.size < file.size:
        before = sink.size
        try:
            with place.open(file, before) as stream:
                _pour(stream, file.size, sink, flow, folder)
            if sink.size < file.size:
                raise TransientError(f"{place.name} ended {file.name} at byte {sink.size} of {file.size}")  # noqa: TRY301
        except TransientError as error:
            failed = 1 if sink.size > before else failed + 1
            if failed >= tries or flow.stopping():
                raise
            time.sleep(wait_seconds(error, failed))


def _pour(stream: Stream, size: int, sink: Sink, flow: Flow, folder: Path) -> None:
    """Append what `stream` gives, until the file has `size` bytes."""
    while sink.size < size:
        count = stream.readinto(sink.room[: size - sink.size])
        if not count:
            break
        # After the read, which may have taken long: the directory may be another process' by now.
        if flow.stopping():
            raise TransientError("another file failed")
        flow.meter.add(count)
        with full_disk(folder):
            sink.add(count)
        flow.limiter.take(count)
