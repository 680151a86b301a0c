"""Configuration tables: which blocks, warps and stages a kernel runs with, per architecture and shape.

No tuning happens at run time. A table is a JSON file per architecture, `<operation>/tuning/<arch>.json`, written by the
offline tuner or by hand, with its provenance; `select` takes the first row whose ranges hold the shape.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dsv4_kernels.arch import Arch

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Row(Generic[ConfigT]):
    """One line of a table: `when` maps a shape name to its inclusive range (None: open end)."""

    when: Mapping[str, tuple[int, int | None]]
    config: ConfigT

    def holds(self, shape: Mapping[str, int]) -> bool:
        """Tell whether every range of the row holds; a name that the shape lacks never holds."""
        return all(
            name in shape and low <= shape[name] and (high is None or shape[name] <= high)
            for name, (low, high) in self.when.items()
        )

    @property
    def label(self) -> str:
        """The ranges as one short word for tables and test names."""
        parts = [f"{name}{low}-{'' if high is None else high}" for name, (low, high) in self.when.items()]
        return ",".join(parts) or "any"


@dataclass(frozen=True)
class Table(Generic[ConfigT]):
    """The rows of one kernel on one architecture, with where they come from."""

    rows: tuple[Row[ConfigT], ...]
    provenance: Mapping[str, str]

    def select(self, **shape: int) -> ConfigT:
        """Return the first row's configuration that holds `shape`; LookupError names the shape if none does."""
        for row in self.rows:
            if row.holds(shape):
                return row.config
        raise LookupError(f"no configuration for {shape}: add a row to the tuning table")


@functools.cache
def load(folder: Path, arch: Arch, kernel: str, config: type[ConfigT]) -> Table[ConfigT]:
    """Read the rows of `kernel` from `folder`/tuning/`arch`.json into `config` dataclasses.

    sm_121 shares sm_120's file where it has none of its own: the same instructions and shared memory, fewer
    multiprocessors.
    """
    path = folder / "tuning" / f"{arch}.json"
    if not path.exists() and arch is Arch.SM_121:
        path = folder / "tuning" / f"{Arch.SM_120}.json"
    entry = json.loads(path.read_text())
    rows = tuple(
        Row({name: (low, high) for name, (low, high) in row["when"].items()}, config(**row["config"]))
        for row in entry["kernels"][kernel]
    )
    return Table(rows, entry["provenance"])
