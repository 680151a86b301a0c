"""Reading /sys and /proc below any root. What cannot be read is absent: nothing in here raises."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LIMIT = 1 << 20
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class Tree:
    """A machine's /sys, /proc and /dev, or a copy of them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        """Return a file's content without white space around it; None if there is none.

        Reading an empty slot of a GID table fails with EINVAL, a link's speed while it is down too.
        """
        file = self._root / path
        try:
            # Only regular files: opening a pipe would wait for its writer.
            if not file.is_file():
                return None
            with file.open("rb") as stream:
                return stream.read(_LIMIT).decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> float | None:
        """Return the first number of a file; None if there is none. `200 Gb/sec (4X HDR)` is 200."""
        return first_number(self.text(path))

    def names(self, path: str) -> list[str]:
        """Return what a folder holds, numbers in their order; nothing if it is none."""
        try:
            found = os.listdir(self._root / path)
        except (OSError, ValueError):
            return []
        return sorted(found, key=lambda name: (0, int(name), name) if _plain(name) else (1, 0, name))

    def target(self, path: str) -> str | None:
        """Return the last part of where a link leads; None if it is no link or leads nowhere."""
        try:
            return (self._root / path).resolve(strict=True).name
        except (OSError, ValueError, RuntimeError):
            return None

    def exists(self, path: str) -> bool:
        """Tell whether something is there."""
        try:
            return (self._root / path).exists()
        except (OSError, ValueError):
            return False


def first_number(text: str | None) -> float | None:
    """Return the first number of a text, within what any file of sysfs says; None if there is none."""
    match = _NUMBER.search(text) if text else None
    return float(match[0]) if match and len(match[0]) <= 18 else None


def _plain(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10
