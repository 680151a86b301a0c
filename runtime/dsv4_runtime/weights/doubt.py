"""A note beside a checkpoint that its files are to be read again before they are used: an engine could not work with
them. It outlives the incarnation, so that the next start finds it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def note(folder: Path, why: str) -> None:
    """Note that the checkpoint in `folder` is in doubt; a disk that cannot be written keeps no note."""
    with contextlib.suppress(OSError):
        _note(folder).write_text(f"{why}\n")


def reason(folder: Path) -> str | None:
    """Return why the checkpoint in `folder` is in doubt; None if it is not."""
    try:
        return _note(folder).read_text().strip()
    except OSError:
        return None


def clear(folder: Path) -> None:
    """Drop the doubt: its files were read again, and what was wrong with them is known."""
    with contextlib.suppress(OSError):
        _note(folder).unlink(missing_ok=True)


def _note(folder: Path) -> Path:
    # Not in it: a nano checkpoint holds only files that its manifest lists.
    return folder.with_name(f".{folder.name}.doubted")
