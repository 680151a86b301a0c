"""A directory of a shared file system (NFS, a claim's volume), copied to the member's own disk."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dsv4_runtime.contract import WeightsPlan
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import SUMS, CheckpointManifest, ManifestFile, is_wanted
from dsv4_runtime.weights.origins import common


class _File:
    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def readinto(self, room: memoryview, /) -> int:
        try:
            return os.readv(self._descriptor, [room])
        except OSError as error:
            raise TransientError(f"{self._path}: {error.strerror}") from error


def _check_version(descriptor: int, file: ManifestFile, path: Path) -> None:
    """Compare time and size, which are all that is known of a file without a digest."""
    status = os.fstat(descriptor)
    if file.sha256 is None and (_tag(status), status.st_size) != (file.tag, file.size):
        raise WeightsError(f"{path} was changed while it was copied; start again once it is complete")


def _tag(status: os.stat_result) -> str:
    return str(status.st_mtime_ns)


class SharedPath:
    """`plan.origin` is the directory. With a `SHA256SUMS` in it the copy is checked against that."""

    def __init__(self, plan: WeightsPlan) -> None:
        self._plan = plan
        self._folder = Path(plan.origin or "")

    @property
    def name(self) -> str:
        """Return its name for people."""
        return str(self._folder)

    def manifest(self) -> CheckpointManifest:
        """Return the checkpoint's files as they are there now."""
        sums_file = self._folder / SUMS
        try:
            sums = common.sums(sums_file.read_bytes(), str(sums_file)) if sums_file.is_file() else {}
            rows = []
            for path in sorted(self._folder.rglob("*")):
                name, status = path.relative_to(self._folder).as_posix(), path.lstat()
                if not stat.S_ISDIR(status.st_mode) and (name in sums or (not sums and is_wanted(name))):
                    if not stat.S_ISREG(status.st_mode):
                        raise WeightsError(f"{path} is a link or no regular file; put the file itself there")
                    row = {"name": name, "size": status.st_size, "sha256": sums.get(name)}
                    rows.append({**row, "tag": _tag(status)})
        except OSError as error:
            raise WeightsError(f"{self._folder} cannot be read: {error.strerror}; check that it is mounted") from error
        if missing := set(sums) - {str(row["name"]) for row in rows}:
            raise WeightsError(f"{self._folder} lacks {min(missing)}, which its {SUMS} lists; copy it there")
        return common.manifest(self._plan, str(self._folder), rows)

    @contextlib.contextmanager
    def open(self, file: ManifestFile, start: int) -> Iterator[Stream]:
        """Open `file` from byte `start` on. Raises an error at the end, too, if it is not the one that was listed."""
        path = self._folder / file.name
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
        try:
            _check_version(descriptor, file, path)
            os.lseek(descriptor, start, os.SEEK_SET)
            os.posix_fadvise(descriptor, start, 0, os.POSIX_FADV_SEQUENTIAL)
            yield _File(descriptor, path)
            _check_version(descriptor, file, path)
        finally:
            os.close(descriptor)
