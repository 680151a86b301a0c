"""A row of the tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that must make a test fail."""

    name: str
    file: str
    text: str
    """Occurs exactly once in the file."""
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest."""
