"""Atomic creation of the nano checkpoint, which never overwrites other files, and its command `dsv4-nano DIR`."""

import argparse
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsv4_runtime.nano.recipe import Drafts, Precision, Recipe, recipe_for
from dsv4_runtime.util.files import open_regular, sync_folder

MANIFEST = "nano.json"
_GENERATED = re.compile(
    r"nano\.json|(generation_|tokenizer_)?config\.json|tokenizer\.json"
    r"|model(\.safetensors\.index\.json|-\d{5}-of-\d{5}\.safetensors)"
)
"""Names of all files that the generator writes."""
_LOCK_SECONDS, _LOCK_PAUSE = 300.0, 0.05
"""Longest wait for another writer, which takes some seconds."""
_FRESH, _DAMAGED, _OLD = "fresh", "damaged", "old"
"""Content of a writer's scratch folder."""
DAMAGED = "damaged: "
"""Prefix of the line of each file that differs from the manifest."""


class NotANanoCheckpointError(Exception):
    """The directory contains files not created by this module, and is left unchanged."""


def damaged(path: Path) -> list[str]:
    """Return the files of the nano checkpoint in `path` whose SHA-256 differs from the manifest."""
    manifest = _manifest(path)
    return sorted(
        name
        for name, entry in (manifest["files"] if manifest else {}).items()
        if (path / name).is_file() and _sha256(path / name) != entry["sha256"]
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make(
    path: Path,
    *,
    seed: int = 0,
    precision: Precision = Precision.BF16,
    drafts: Drafts = Drafts.NONE,
    anew: bool = False,
) -> Path:
    """Create the nano checkpoint in `path`, or reuse a complete one.

    Equal seed, precision and drafts give equal bytes. All files appear atomically, also after a power loss: they are
    written beside `path` and renamed. An incomplete or different nano checkpoint is replaced. Writers of the same
    `path` wait for each other.

    Args:
        path: the checkpoint's directory; it and its parents may be missing.
        seed: any integer from 0.
        precision: `BF16` for CPU, `FP8` for the released FP8 and MXFP4 formats.
        drafts: the layers for speculative decoding; they do not affect the other layers.
        anew: replace a complete checkpoint, because files of it are `damaged`.

    Returns:
        `path`, made absolute.

    Raises:
        ValueError: `seed` is negative.
        NotANanoCheckpointError: `path` is a file, or a directory with other content.
        OSError: the disk is full or not writable.
    """
    if seed < 0:
        raise ValueError(f"seed {seed} is negative; use 0 or more")
    path = path.absolute()
    recipe = recipe_for(precision, drafts)
    digest = recipe.digest(seed)
    if not anew and _is_complete(path, digest):
        return path
    _refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        # Another process may have made it meanwhile.
        if anew or not _is_complete(path, digest):
            _remove_leftovers(path)
            _write(path, recipe, seed, digest, anew=anew)
    return path


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclude other writers of `path`, also of other machines; the kernel releases the lock when its holder dies.

    Raises:
        TimeoutError: another writer has had it for too long.
    """
    # A file, because NFS locks folders for one machine only.
    file = path.with_name(f".{path.name}.lock")
    descriptor, deadline = open_regular(file, os.O_RDWR | os.O_CREAT), time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file}: another process has held it for {_LOCK_SECONDS:.0f} s; end that process")
            time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove the scratch folders of killed writers of `path`. Must be called with the lock held."""
    # `mkdtemp` adds eight characters.
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError):
            if {entry.name for entry in scratch.iterdir()} <= {_FRESH, _DAMAGED, _OLD}:
                shutil.rmtree(scratch)


def _write(path: Path, recipe: Recipe, seed: int, digest: str, *, anew: bool) -> None:
    # Loads torch, which is not needed for a complete checkpoint.
    from dsv4_runtime.nano.weights import write

    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = scratch / _FRESH
        fresh.mkdir()
        manifest = write(fresh, recipe, seed)
        (fresh / MANIFEST).write_text(json.dumps({"digest": digest, **manifest}, indent=2) + "\n")
        # Before the rename: a power loss would else leave the names without the content.
        for file in fresh.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(fresh)
        if anew and path.exists():
            path.rename(scratch / _DAMAGED)
        _publish(fresh, path, scratch / _OLD, digest)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return the parsed manifest of `path`; None if there is no readable one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _is_complete(path: Path, digest: str) -> bool:
    manifest = _manifest(path)
    if manifest is None or manifest.get("digest") != digest:
        return False
    return all(
        (path / name).is_file() and (path / name).stat().st_size == entry["bytes"]
        for name, entry in manifest["files"].items()
    )


def _refuse_foreign(path: Path) -> None:
    """Raise unless `path` is missing, an empty directory, or contains only files of its manifest.

    If the manifest is there but unreadable, as after a power loss, all names that the generator uses are its files.
    Without a manifest they are not: those of a released checkpoint are the same.
    """
    if not path.exists():
        return
    remedy = "choose another directory, or empty this one if nothing in it is needed"
    if not path.is_dir():
        raise NotANanoCheckpointError(f"path {path} is a file, not a directory; {remedy}")
    manifest = _manifest(path)
    names = sorted(entry.name for entry in path.iterdir())
    if manifest is None and MANIFEST in names:
        foreign = [name for name in names if not _GENERATED.fullmatch(name)]
    else:
        known = {MANIFEST, *(manifest["files"] if manifest else ())}
        foreign = [name for name in names if name not in known]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise NotANanoCheckpointError(f"path {path} holds files that are not a nano checkpoint's ({shown}); {remedy}")


def _publish(fresh: Path, path: Path, aside: Path, digest: str) -> None:
    """Rename `fresh` to `path`. If a process that the lock does not exclude, because some network file systems lock for
    one machine only, publishes the same checkpoint meanwhile, its copy is kept.
    """
    for _ in range(3):
        try:
            fresh.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        if _is_complete(path, digest):
            return
        _refuse_foreign(path)
        path.rename(aside)
        shutil.rmtree(aside)
    raise NotANanoCheckpointError(f"path {path} is being written by another process; stop it and try again")


def main(argv: Sequence[str] | None = None) -> int:
    """Create the checkpoint described by `argv` (default: the process's arguments); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="dsv4-nano", description="Make a tiny, real DeepSeek-V4 checkpoint with random weights."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    parser.add_argument(
        "--precision",
        type=Precision,
        choices=list(Precision),
        default=Precision.BF16,
        help="bf16 for CPU, fp8 for the released FP8 and MXFP4 formats (default: bf16)",
    )
    parser.add_argument(
        "--drafts",
        type=Drafts,
        choices=list(Drafts),
        default=Drafts.NONE,
        help="layers for speculative decoding: an MTP layer, or DSpark's stages (default: none)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every file, and make the checkpoint anew if one is damaged"
    )
    arguments = parser.parse_args(argv)
    try:
        wrong = damaged(arguments.directory) if arguments.verify else []
        for name in wrong:
            print(f"{DAMAGED}{name}")
        made = make(
            arguments.directory,
            seed=arguments.seed,
            precision=arguments.precision,
            drafts=arguments.drafts,
            anew=bool(wrong),
        )
        print(made)
    except (NotANanoCheckpointError, ValueError, OSError) as error:
        print(f"dsv4-nano: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
