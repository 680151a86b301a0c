"""Atomic creation of the nano checkpoint, which never overwrites other files, and its command `dsv4-nano DIR`."""

import argparse
import errno
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_runtime.nano.recipe import Drafts, Precision, recipe_for

MANIFEST = "nano.json"
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

    Equal seed, precision and drafts give equal bytes. All files appear atomically: they are written beside `path` and
    renamed. An incomplete or different nano checkpoint is replaced.

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
    # Loads torch, which is not needed for a complete checkpoint.
    from dsv4_runtime.nano.weights import write

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        manifest = write(fresh, recipe, seed)
        (fresh / MANIFEST).write_text(json.dumps({"digest": digest, **manifest}, indent=2) + "\n")
        if anew and path.exists():
            path.rename(scratch / "damaged")
        _publish(fresh, path, scratch / "old", digest)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


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
    """Raise unless `path` is missing, an empty directory, or contains only files of its manifest."""
    if not path.exists():
        return
    remedy = "choose another directory, or empty this one if nothing in it is needed"
    if not path.is_dir():
        raise NotANanoCheckpointError(f"path {path} is a file, not a directory; {remedy}")
    manifest = _manifest(path)
    known = {MANIFEST, *(manifest["files"] if manifest else ())}
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise NotANanoCheckpointError(f"path {path} holds files that are not a nano checkpoint's ({shown}); {remedy}")


def _publish(fresh: Path, path: Path, aside: Path, digest: str) -> None:
    """Rename `fresh` to `path`. If another process publishes the same checkpoint meanwhile, its copy is kept."""
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
