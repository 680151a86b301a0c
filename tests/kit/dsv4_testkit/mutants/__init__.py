"""Mutants of `tests/mutants.py`: name, file, a text that occurs in it exactly once, its replacement, and the tests."""

from __future__ import annotations

from dsv4_testkit.mutants.backends import BACKENDS
from dsv4_testkit.mutants.common import Mutant
from dsv4_testkit.mutants.control import CONTROL
from dsv4_testkit.mutants.documents import DOCUMENTS
from dsv4_testkit.mutants.gateway import GATEWAY
from dsv4_testkit.mutants.member import MEMBER

MUTANTS: tuple[Mutant, ...] = (*CONTROL, *BACKENDS, *DOCUMENTS, *MEMBER, *GATEWAY)

__all__ = ["MUTANTS", "Mutant"]
