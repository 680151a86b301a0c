"""Content-addressed files shared by all deployments of a node: `python -m dsv4_runtime.weights.shared CHECKPOINT
STORE`.

Members mount the store read-only and verify a file before use, so a writer can only waste their time. On a cluster only
the administrator, who runs this program, can write.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import stat
import sys
import time
from pathlib import Path

from dsv4_runtime.weights.checkpoint import is_wanted
from dsv4_runtime.weights.writer import human

_BLOCK_BYTES = 1 << 23
_DRAFT = ".draft-"
_ABANDONED_SECONDS = 86400.0
"""Time since the last write to a draft after which its writer was killed."""


def shared_file(store: Path, sha256: str) -> Path:
    """Return the path of the file with that content."""
    return store / sha256


def link_shared(store: Path, sha256: str, target: Path) -> None:
    """Link `target` to the file with that content, atomically; raise OSError if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    link = target.with_name(f".{target.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(shared_file(store, sha256))
    link.replace(target)


def resolve_path(path: Path, store: Path | None) -> Path:
    """Return the file of `store` that `path` links to, as created by `link_shared`; any other path unchanged."""
    try:
        target = path.readlink()
    except OSError:
        return path
    return target if store is not None and target == shared_file(store, target.name) else path


def publish(checkpoint: Path, store: Path) -> dict[str, str]:
    """Copy the files of a checkpoint into `store` under the SHA-256 of the copied bytes; return name to SHA-256.

    Concurrent changes of the checkpoint result in another digest. Links and special files are skipped.

    Raises:
        OSError: a file cannot be read or written.
    """
    store.mkdir(mode=0o755, parents=True, exist_ok=True)
    _remove_abandoned(store)
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if is_wanted(name) and stat.S_ISREG(path.lstat().st_mode):
            found[name] = _copy(path, store)
    return found


def _remove_abandoned(store: Path) -> None:
    """Remove the drafts of killed writers. By their age, because their process ids may be of other machines."""
    for draft in store.glob(f"{_DRAFT}*"):
        # Its writer may have just renamed it.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_SECONDS:
                draft.unlink()


def _copy(path: Path, store: Path) -> str:
    """Copy one file unless it exists."""
    draft, digest = store / f"{_DRAFT}{os.getpid()}", hashlib.sha256()
    # A link or FIFO created meanwhile is not opened.
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with os.fdopen(source, "rb") as given, draft.open("wb") as kept:
            if not stat.S_ISREG(os.fstat(given.fileno()).st_mode):
                raise OSError(f"{path} is no file any more")
            while block := given.read(_BLOCK_BYTES):
                digest.update(block)
                kept.write(block)
            kept.flush()
            os.fchmod(kept.fileno(), 0o444)
            os.fsync(kept.fileno())
        target = shared_file(store, digest.hexdigest())
        if not target.exists():
            draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    return digest.hexdigest()


def main() -> None:
    """Publish a checkpoint's files, and say which they are, as `sha256sum` does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a directory with a checkpoint")
    parser.add_argument("store", type=Path, help="the directory that members read, for example /var/lib/dsv4/weights")
    options = parser.parse_args()
    try:
        found = publish(options.checkpoint, options.store)
    except OSError as error:
        sys.exit(f"{error}; nothing that was published before is touched")
    for name, sha256 in found.items():
        sys.stdout.write(f"{sha256}  {name}\n")
    size = sum((options.checkpoint / name).stat().st_size for name in found)
    sys.stderr.write(f"{len(found)} files, {human(size)}, are in {options.store}\n")


if __name__ == "__main__":
    main()
