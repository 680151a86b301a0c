"""The page of results of a run of the GPU ring, which allows a comparison of machines."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dsv4_operator.backends.local.gpus import GpuInventory

PACKAGES = ("dsv4", "vllm", "torch", "triton", "ray", "flashinfer-python", "tilelang", "nvidia-cutlass-dsl")


class Page:
    """Tables by heading, in the order of their creation; the whole page is written after each row."""

    def __init__(self, path: Path, found: GpuInventory) -> None:
        self.path = path
        self._tables: dict[str, tuple[Sequence[str], list[Sequence[str]]]] = {}
        self._head = f"# GPU ring: {found.kinds()}\n\n{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}\n"
        for card in found.cards:
            memory = "the machine's own" if card.memory_bytes is None else f"{card.memory_bytes / 2**30:.2f} GiB"
            capability = f"{card.capability[0]}.{card.capability[1]}"
            self.row("GPUs", ("number", "name", "capability", "memory"), card.index, card.name, capability, memory)
        facts = {"driver": found.driver, "kernel": platform.release(), "python": platform.python_version()}
        for name, value in {**facts, **{package: _version(package) for package in PACKAGES}}.items():
            self.row("Versions", ("what", "version"), name, value)

    def row(self, table: str, columns: Sequence[str], *cells: object) -> None:
        """Add a row to `table`, and write the page: an interrupted run leaves its results."""
        _, rows = self._tables.setdefault(table, (columns, []))
        rows.append([str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells])
        self.path.write_text(self.text())

    def text(self) -> str:
        """Return the page in Markdown."""
        parts = [self._head]
        for heading, (columns, rows) in self._tables.items():
            lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
            parts.append("\n".join((f"## {heading}\n", *lines)) + "\n")
        return "\n".join(parts)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
