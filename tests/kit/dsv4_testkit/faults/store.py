"""File of results: rewritten atomically after every run, so that a suite can be stopped and resumed at any time."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from dsv4_testkit.faults.judge import Result

KINDS = ("runs", "soaks", "deaths", "costs", "blocked", "errors")


def machine() -> str:
    """Return a short description of this machine."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} CPUs ({model}), {memory:.0f} GiB, Linux {platform.release()}"


class Store:
    """Results by kind: `runs` of faults, `soaks`, `deaths`, `costs`, `blocked` (no ssh), `errors` (no result)."""

    def __init__(self, file: Path | None) -> None:
        """Read `file`; None keeps results in memory only.

        Raises:
            ValueError: the file is not JSON.
        """
        self._file = file
        self.data: dict[str, Any] = {kind: [] for kind in KINDS}
        if file is not None and file.exists():
            self.data |= json.loads(file.read_text())

    @property
    def runs(self) -> list[Result]:
        """Runs of faults."""
        return [Result(**{key: value for key, value in run.items() if key != "machine"}) for run in self.data["runs"]]

    def has(self, system: str, fault: str, run: int) -> bool:
        """Return whether the result of this run exists."""
        return any((r["system"], r["fault"], r["run"]) == (system, fault, run) for r in self.data["runs"])

    def add(self, result: Result) -> None:
        """Store a run of a fault."""
        self.note("runs", result.to_json())

    def note(self, kind: str, entry: dict[str, Any]) -> None:
        """Store an entry with the machine; the entry itself contains its date."""
        self.data[kind].append({**entry, "machine": machine()})
        if self._file is not None:
            partial = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            partial.write_text(json.dumps(self.data, indent=1) + "\n")
            partial.replace(self._file)

    def machines(self) -> list[str]:
        """Return every machine with results, and the days of the results."""
        found: dict[str, set[str]] = {}
        for kind in KINDS:
            for entry in self.data[kind]:
                day = time.strftime("%Y-%m-%d", time.gmtime(entry["struck"]))
                found.setdefault(entry["machine"], set()).add(day)
        return [f"{name}; {' to '.join(sorted({min(days), max(days)}))}" for name, days in found.items()]
