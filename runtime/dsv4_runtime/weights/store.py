"""A checkpoint's directory on this member: finished files, parts, the marker of what was verified, the lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from dsv4_runtime.contract import Cause, Report
from dsv4_runtime.contract.files import replace_file, sync_folder
from dsv4_runtime.weights.checkpoint import CheckpointManifest, ManifestFile, WeightsError
from dsv4_runtime.weights.shared import resolve_path
from dsv4_runtime.weights.writer import human


def request_recheck(folder: Path, why: str) -> None:
    """Note that the checkpoint in `folder` is in doubt; a disk that cannot be written keeps no note."""
    with contextlib.suppress(OSError):
        _recheck_file(folder).write_text(f"{why}\n")


def recheck_reason(folder: Path) -> str | None:
    """Return why the checkpoint in `folder` is in doubt; None if it is not."""
    try:
        return _recheck_file(folder).read_text().strip()
    except OSError:
        return None


def clear_recheck(folder: Path) -> None:
    """Drop the doubt: its files were read again, and what was wrong with them is known."""
    with contextlib.suppress(OSError):
        _recheck_file(folder).unlink(missing_ok=True)


def _recheck_file(folder: Path) -> Path:
    # Not in it: a nano checkpoint holds only files that its manifest lists.
    return folder.with_name(f".{folder.name}.doubted")


_STATE_FOLDER = ".dsv4"
PART = ".part"
# Room that staging leaves on a disk: logs and caches of the same node live there too.
SPARE_BYTES = 1 << 28
_LOCK_POLL_SECONDS = 0.5


class Verified(Report):
    """A file whose digests were right when it was last read whole."""

    size: int
    mtime_ns: int
    inode: int | None = None
    """None: not noted; markers of earlier versions lack it."""
    sha256: str


class Marker(Report):
    """All files that were verified."""

    files: dict[str, Verified] = Field(default_factory=dict)


class Store:
    """The directory `folder`; `identity` names the checkpoint that belongs there.

    No file in it may be a link, but for those into `shared`, the node's shared files.
    """

    def __init__(self, folder: Path, identity: str, shared: str | None = None) -> None:
        self.folder = folder
        self._shared = Path(shared) if shared is not None else None
        self.identity = identity
        self._home = folder / _STATE_FOLDER
        self._noting = threading.Lock()

    def manifest(self) -> CheckpointManifest | None:
        """Return the manifest that was noted for this checkpoint."""
        try:
            found = CheckpointManifest.model_validate_json((self._home / "manifest.json").read_bytes())
        except (OSError, ValidationError):
            return None
        return found if found.identity == self.identity else None

    def note_manifest(self, manifest: CheckpointManifest) -> None:
        """Keep `manifest` for restarts and for other members; parts that belong to no file of it are removed."""
        with disk_errors(self.folder):
            self._home.mkdir(parents=True, exist_ok=True)
            self._write("manifest.json", manifest.to_json(indent=1))
        parts = {self.part(file) for file in manifest.files}
        for path in self.folder.rglob(f"*{PART}"):
            if path not in parts:
                path.unlink(missing_ok=True)

    def marker(self) -> Marker:
        """Return what was verified, whether or not it is still as it was."""
        try:
            return Marker.model_validate_json((self._home / "verified.json").read_bytes())
        except (OSError, ValidationError):
            return Marker()

    def finished(self, manifest: CheckpointManifest) -> dict[str, Verified]:
        """Return the files of `manifest` that were verified and have not changed since; reads no file's content."""
        marker = self.marker().files
        found = {}
        for file in manifest.files:
            noted = marker.get(file.name)
            if noted is None or noted.size != file.size or (file.sha256 or noted.sha256) != noted.sha256:
                continue
            with contextlib.suppress(OSError):
                now = self.file(file.name).lstat()
                same = stat.S_ISREG(now.st_mode) and (now.st_size, now.st_mtime_ns) == (noted.size, noted.mtime_ns)
                if same and noted.inode in (None, now.st_ino):
                    found[file.name] = noted
        return found

    def file(self, name: str) -> Path:
        """Return where the file called `name` is: here, or among the shared ones."""
        return resolve_path(self.folder / name, self._shared)

    def part(self, file: ManifestFile) -> Path:
        """Return where `file` lies while it is fetched.

        The name has the content's key: nothing else is ever continued.
        """
        path = self.folder / file.name
        return path.with_name(f"{path.name}.{file.key}{PART}")

    def held(self, manifest: CheckpointManifest) -> int:
        """Return the bytes of `manifest` that are here, finished or not."""
        done = self.finished(manifest)
        held = 0
        for file in manifest.files:
            if file.name in done:
                held += file.size
            else:
                with contextlib.suppress(OSError):
                    held += self.part(file).stat().st_size
        return held

    def finish(self, file: ManifestFile, sha256: str) -> None:
        """Make `file`'s part the file: it is whole and right."""
        part, target = self.part(file), self.folder / file.name
        with disk_errors(self.folder):
            with part.open("rb") as stream:
                # The marker must not outlive the bytes that it vouches for, should the power go.
                os.fsync(stream.fileno())
            part.rename(target)
            sync_folder(target.parent)
            self.note(file, sha256)

    def note(self, file: ManifestFile, sha256: str) -> None:
        """Note that `file` is in place and right."""
        status = (self.folder / file.name).stat()
        entry = Verified(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino, sha256=sha256)
        with self._noting, disk_errors(self.folder):
            self._home.mkdir(parents=True, exist_ok=True)
            self._write("verified.json", Marker(files={**self.marker().files, file.name: entry}).to_json(indent=1))

    def forget(self, names: set[str]) -> None:
        """Note that these files are not what they were."""
        with self._noting, disk_errors(self.folder):
            files = {name: entry for name, entry in self.marker().files.items() if name not in names}
            self._write("verified.json", Marker(files=files).to_json(indent=1))

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Let one process at a time fetch into the directory, members on other nodes that share the disk included.

        `waiting` is called every half second while another process has the lock. The kernel frees it when its holder
        dies.
        """
        with disk_errors(self.folder):
            self._home.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waiting()
                    time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _write(self, name: str, text: str) -> None:
        replace_file(self._home / name, text, mode=0o644)


def check_free_space(store: Store, missing: int) -> None:
    """Check that the disk has room for `missing` bytes more.

    Raises:
        WeightsError: it has not; names the directory, what is there and what is needed.
    """
    disk = os.statvfs(store.folder)
    free = disk.f_bavail * disk.f_frsize
    if missing + SPARE_BYTES > free:
        raise WeightsError(
            f"the disk of {store.folder} has {human(free)} free, and {human(missing)} of weights are still to come, "
            f"with {human(SPARE_BYTES)} to spare; make room there, or give the weights a larger disk",
            Cause.DISK_FULL,
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Name a write that fails for want of room, or of the right to write."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "quota" if error.errno == errno.EDQUOT else "disk"
            raise WeightsError(
                f"the {what} of {folder} became full while weights were written ({error.strerror}); make room there, "
                "or give the weights a larger disk: what has come is kept and continued",
                Cause.DISK_FULL,
            ) from error
        raise WeightsError(
            f"{folder} cannot be written: {error.strerror or error}; give the weights a directory where dsv4 may write"
        ) from error
