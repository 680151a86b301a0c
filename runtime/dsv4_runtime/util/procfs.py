"""Process table from /proc, read once for all uses: a scan takes a millisecond and runs several times a second."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Entry:
    """A process as `/proc/<pid>/stat` shows it (proc(5))."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    threads: int

    @property
    def ended(self) -> bool:
        """Return whether no thread of it runs.

        Linux also calls a process a zombie whose first thread has ended while others still hold its ports and memory;
        its parent cannot collect it yet (wait(2)).
        """
        return self.state in "ZX" and self.threads <= 1


def entry(pid: int) -> Entry | None:
    """Return the process; None if there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split(None, 18)
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Entry(pid, int(fields[1]), fields[0].decode(), cpu, int(fields[17]))


def below(root: int) -> dict[int, Entry]:
    """Return every process below `root`, by process id; zombies too."""
    children: dict[int, list[Entry]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := entry(int(name))) is not None:
            children[found.parent].append(found)
    result: dict[int, Entry] = {}
    ahead = [root]
    while ahead:
        for child in children[ahead.pop()]:
            result[child.pid] = child
            ahead.append(child.pid)
    return result


def trees(table: Mapping[int, Entry], roots: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Map each root to itself and the processes below it, up to (and without) other roots."""
    own = {root: root for root in roots}

    def root_of(pid: int) -> int | None:
        if pid not in own:
            found = table.get(pid)
            above = root_of(found.parent) if found is not None else None
            if above is None:
                return None
            own[pid] = above
        return own[pid]

    result: dict[int, list[int]] = {root: [] for root in own}
    for pid in table:
        if (root := root_of(pid)) is not None:
            result[root].append(pid)
    return {root: tuple(pids) for root, pids in result.items()}
