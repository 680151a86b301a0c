"""The GPU ring: this machine's own GPUs, the kernels on them, and `dsv4 up` on them. It writes a page of results.

Run it with `make gpu-test`, or directly: `python -m pytest tests/gpu`. `DSV4_GPU_RESULTS` is the path of the page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# The kit starts and ends deployments; repeated here for a pytest that does not read pyproject.toml.
sys.path.insert(1, str(Path(__file__).parents[1] / "kit"))

import needs
from page import Page

from dsv4_operator.backends.local import gpus

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    if mine and (reason := needs.gpu()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def found() -> gpus.GpuInventory:
    return gpus.find()


@pytest.fixture(scope="session")
def page(found: gpus.GpuInventory) -> Iterator[Page]:
    path = Path(os.environ.get("DSV4_GPU_RESULTS") or ROOT / "gpu-results.md")
    made = Page(path, found)
    yield made
    print(f"\nresults: {path}")
