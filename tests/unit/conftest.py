"""Fixtures of several areas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_testkit.supervised import Supervised


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    found = Supervised()
    yield found
    found.close()


_HERE = Path(__file__).parent
_LONG = (
    "backends/test_hosts.py",
    "verify/test_defects.py",
    "gateway/test_page_browser.py",
    "gateway/test_poison_schedules.py",
    "fabric/test_proof.py",
    "vllm_plugin/kernels/",
    "gateway/test_lost_node.py",
    "lifecycle/test_two_deciders.py",
    "lifecycle/test_schedules.py",
    "agent/test_standby.py",
)
"""Longest files, each of which one process of pytest-xdist runs alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, so that the processes of pytest-xdist end at about the same time."""
    own = [item for item in items if item.path.is_relative_to(_HERE)]
    if len(own) == len(items):
        items.sort(key=lambda item: not item.path.relative_to(_HERE).as_posix().startswith(_LONG))
