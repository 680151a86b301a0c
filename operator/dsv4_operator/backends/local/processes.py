"""Process ids as this machine counts them, for processes that count in a namespace of their own."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the direct children of `pid`."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def outside_ids(inside: int) -> dict[int, int]:
    """Map the process ids in the process namespace of `inside` (an id of this machine) to this machine's ids."""
    try:
        wanted = os.readlink(f"/proc/{inside}/ns/pid")
    except OSError:
        return {}
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry.name}/ns/pid") != wanted:
                continue
            status = Path(f"/proc/{entry.name}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("NSpid:"):
                found[int(line.split()[-1])] = int(entry.name)
                break
    return found
