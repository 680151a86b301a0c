"""Sockets that an engine made for itself and left behind when it was killed."""

from __future__ import annotations

import contextlib
from pathlib import Path

_BOUND = Path("/proc/net/unix")


def sweep_sockets(folder: Path) -> list[Path]:
    """Remove the sockets in `folder` that no process of this network namespace has bound, and return them."""
    if not folder.is_dir():
        return []
    bound = {line.rsplit(" ", 1)[-1] for line in _BOUND.read_text(errors="replace").splitlines()}
    removed = []
    for path in folder.iterdir():
        if path.is_socket() and str(path) not in bound:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
    return removed
