"""A row of the tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that a test must notice."""

    name: str
    file: str
    text: str
    """In the file exactly once."""
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest."""
