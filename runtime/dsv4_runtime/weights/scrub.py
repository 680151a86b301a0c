"""Slow, repeated verification of a checkpoint in use.

Files with a changed size, time or inode are read first. The expected digests come from the marker of verified files or
from the manifest of a nano checkpoint; other directories cannot be verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.shared import resolve_path
from dsv4_runtime.weights.store import Store
from dsv4_runtime.weights.writer import Limiter

BYTES_PER_SECOND = 16 << 20
"""About 1 % of a core for SHA-256, and far below the slowest disk of the catalog."""
_CHUNK_BYTES = 1 << 20
_CHANGE_CHECK_SECONDS = 10.0

Stamp = tuple[int, int, int]


def digests(plan: WeightsPlan) -> dict[str, str]:
    """Return file name to expected SHA-256; empty if unknown."""
    folder = Path(plan.path)
    if plan.source is WeightsSource.NANO:
        try:
            listed = json.loads((folder / "nano.json").read_text())["files"]
            return {name: entry["sha256"] for name, entry in listed.items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
    return {name: noted.sha256 for name, noted in Store(folder, plan.identity).marker().files.items()}


class Scrubber:
    """Verification of one checkpoint."""

    def __init__(self, plan: WeightsPlan, rate: int | None = BYTES_PER_SECOND) -> None:
        self._plan = plan
        self._folder = Path(plan.path)
        self._shared = Path(plan.shared) if plan.shared is not None else None
        self._limiter = Limiter(rate)
        self._read: dict[str, Stamp] = {}
        """Stamp of each file when it was last verified."""

    def turn(self) -> str | None:
        """Read every file once, changed ones first; return the first wrong file."""
        for name in self._ahead():
            if self._wrong(name):
                return name
        return None

    def changed(self) -> str | None:
        """Read files that changed since their verification; return the first wrong file."""
        for name in digests(self._plan):
            if name in self._read and self._stamp(name) != self._read[name] and self._wrong(name):
                return name
        return None

    def _ahead(self) -> Iterator[str]:
        ahead = sorted(digests(self._plan))
        while ahead:
            changed = (name for name in ahead if name in self._read and self._stamp(name) != self._read[name])
            name = next(changed, ahead[0])
            ahead.remove(name)
            yield name

    def _wrong(self, name: str) -> bool:
        # Twice: another process may be replacing the file, and note its digest a moment later.
        for _ in range(2):
            stamp = self._stamp(name)
            wanted = digests(self._plan).get(name)
            if stamp is None or wanted is None:
                return wanted is not None
            with contextlib.suppress(OSError):
                # A missing or irregular file is wrong, too.
                if self._sha256(resolve_path(self._folder / name, self._shared)) == wanted:
                    self._read[name] = stamp
                    return False
        return True

    def _stamp(self, name: str) -> Stamp | None:
        try:
            found = (self._folder / name).stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _sha256(self, path: Path) -> str:
        digest = hashlib.sha256()
        with os.fdopen(open_regular(path), "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                self._limiter.take(len(chunk))
            if self._plan.page_cache is PageCache.UNIFIED:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()


def verify(plan: WeightsPlan) -> tuple[bool, str | None]:
    """Verify the checkpoint once at full speed; return whether digests are known, and the first wrong file."""
    return bool(digests(plan)), Scrubber(plan, rate=None).turn()


def scrub(
    plan: WeightsPlan, pause: float, report: Callable[[], None], sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Verify the checkpoint until a file is wrong; return its name, or None if no digests are known.

    Args:
        plan: the checkpoint.
        pause: seconds between passes; changed files are checked in between.
        report: called after each pass without a wrong file.
        sleep: sleep function.
    """
    if not digests(plan):
        return None
    scrubber = Scrubber(plan)
    while (wrong := scrubber.turn()) is None:
        report()
        ahead = pause
        while ahead > 0 and wrong is None:
            sleep(min(ahead, _CHANGE_CHECK_SECONDS))
            ahead -= _CHANGE_CHECK_SECONDS
            wrong = scrubber.changed()
        if wrong is not None:
            break
    return wrong
