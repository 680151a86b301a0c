"""A checkpoint's directory on this member: finished files, parts, marker of verified files, lock, recheck requests, and
the repeated verification of files in use (`Scrubber`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from dsv4_runtime.contract import Cause, PageCache, Report, WeightsPlan, WeightsSource
from dsv4_runtime.util.files import open_regular, replace_file, sync_folder
from dsv4_runtime.weights.checkpoint import CheckpointManifest, ManifestFile, WeightsError
from dsv4_runtime.weights.shared import resolve_path
from dsv4_runtime.weights.writer import Limiter, human


def request_recheck(folder: Path, why: str) -> None:
    """Request verification of the checkpoint in `folder` before its next use; it outlives the incarnation.

    An engine could not work with the files. Ignored on an unwritable disk.
    """
    with contextlib.suppress(OSError):
        _recheck_file(folder).write_text(f"{why}\n")


def place(folder: Path) -> str:
    """Return the identity of the checkpoint in `folder`: equal for two members only if they read the same files.

    Empty: there is no checkpoint. Copies differ in the time of their last change, which no program can set.
    """
    try:
        found = (folder / "config.json").stat()
    except OSError:
        return ""
    return f"{found.st_ino}:{found.st_ctime_ns}"


def recheck_reason(folder: Path) -> str | None:
    """Return the reason of a requested recheck, else None."""
    try:
        return _recheck_file(folder).read_text().strip()
    except OSError:
        return None


def clear_recheck(folder: Path) -> None:
    """Remove the request after the verification."""
    with contextlib.suppress(OSError):
        _recheck_file(folder).unlink(missing_ok=True)


def _recheck_file(folder: Path) -> Path:
    # Beside the directory: a nano checkpoint contains only files of its manifest.
    return folder.with_name(f".{folder.name}.doubted")


_STATE_FOLDER = ".dsv4"
PART = ".part"
# Free space kept for logs and caches of the node.
SPARE_BYTES = 1 << 28
_LOCK_POLL_SECONDS = 0.5


class Verified(Report):
    """File whose digests were correct at its last verification."""

    size: int
    mtime_ns: int
    inode: int | None = None
    """None in markers of earlier versions."""
    sha256: str


class Marker(Report):
    """All verified files."""

    files: dict[str, Verified] = Field(default_factory=dict)


class Store:
    """Directory `folder` of the checkpoint `identity`.

    Its files must not be links, except into `shared`, the node's shared files.
    """

    def __init__(self, folder: Path, identity: str, shared: str | None = None) -> None:
        self.folder = folder
        self._shared = Path(shared) if shared is not None else None
        self.identity = identity
        self._home = folder / _STATE_FOLDER
        self._noting = threading.RLock()

    def manifest(self) -> CheckpointManifest | None:
        """Return the recorded manifest of this checkpoint."""
        try:
            found = CheckpointManifest.model_validate_json((self._home / "manifest.json").read_bytes())
        except (OSError, ValidationError):
            return None
        return found if found.identity == self.identity else None

    def note_manifest(self, manifest: CheckpointManifest) -> None:
        """Record `manifest` for restarts and other members; remove parts of other files."""
        with disk_errors(self.folder):
            self._home.mkdir(parents=True, exist_ok=True)
            self._write("manifest.json", manifest.to_json(indent=1))
        parts = {self.part(file) for file in manifest.files}
        for path in self.folder.rglob(f"*{PART}"):
            if path not in parts:
                path.unlink(missing_ok=True)

    def marker(self) -> Marker:
        """Return the verified files, changed or not."""
        try:
            return Marker.model_validate_json((self._home / "verified.json").read_bytes())
        except (OSError, ValidationError):
            return Marker()

    def finished(self, manifest: CheckpointManifest) -> dict[str, Verified]:
        """Return the files of `manifest` that were verified and have not changed since, without reading content."""
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
        """Return the path of a file, here or among the shared ones."""
        return resolve_path(self.folder / name, self._shared)

    def part(self, file: ManifestFile) -> Path:
        """Return the path of `file` while it is fetched.

        It contains the content's key, so that only equal contents are continued.
        """
        path = self.folder / file.name
        return path.with_name(f"{path.name}.{file.key}{PART}")

    def held(self, manifest: CheckpointManifest, *, unverified: bool = False) -> int:
        """Return the present bytes of `manifest`, including unfinished files.

        With `unverified`, whole files that can be verified but have not been count too: those of a process that was
        killed before their record, or of a copy made without dsv4.
        """
        held = 0
        # Not between the new name of a file and its record, when it is neither a part nor finished.
        with self._noting:
            done = self.finished(manifest)
            for file in manifest.files:
                if file.name in done:
                    held += file.size
                elif (part := _size(self.part(file))) is not None:
                    held += part
                elif unverified and (file.sha256 or file.git_blob) and _size(self.folder / file.name) == file.size:
                    held += file.size
        return held

    def finish(self, file: ManifestFile, sha256: str) -> None:
        """Rename the complete part of `file` and record it."""
        part, target = self.part(file), self.folder / file.name
        with disk_errors(self.folder):
            with part.open("rb") as stream:
                # The marker must not survive a power failure without the data.
                os.fsync(stream.fileno())
            with self._noting:
                part.rename(target)
                sync_folder(target.parent)
                self.note(file, sha256)

    def note(self, file: ManifestFile, sha256: str) -> None:
        """Record that `file` is in place and correct."""
        status = (self.folder / file.name).stat()
        entry = Verified(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino, sha256=sha256)
        with self._noting, disk_errors(self.folder):
            self._home.mkdir(parents=True, exist_ok=True)
            self._write("verified.json", Marker(files={**self.marker().files, file.name: entry}).to_json(indent=1))

    def forget(self, names: set[str]) -> None:
        """Remove files from the marker."""
        with self._noting, disk_errors(self.folder):
            files = {name: entry for name, entry in self.marker().files.items() if name not in names}
            self._write("verified.json", Marker(files=files).to_json(indent=1))

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Lock the directory for fetching, also against other nodes on a shared disk.

        `waiting` is called every half second while another process holds the lock. The kernel releases it when its
        holder dies.
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


def _size(path: Path) -> int | None:
    """Return the bytes of a regular file, else None."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_free_space(store: Store, missing: int) -> None:
    """Check that the disk has room for `missing` more bytes.

    Raises:
        WeightsError: it has not; names directory, free and required space.
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
    """Convert write errors (disk full, no permission) into `WeightsError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "quota" if error.errno == errno.EDQUOT else "disk"
            raise WeightsError(
                f"the {what} of {folder} became full while weights were written ({error.strerror}); make room there, "
                "or give the weights a larger disk: received data is kept and the download continues",
                Cause.DISK_FULL,
            ) from error
        raise WeightsError(
            f"{folder} cannot be written: {error.strerror or error}; give the weights a directory where dsv4 may write"
        ) from error


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
