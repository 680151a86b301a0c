"""Kernel tests: in Triton's interpreter on machines without a GPU, otherwise on the GPU.

Tests marked `gpu` need a device with a configuration table and are deselected without one; others use the interpreter.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_TABLE = re.compile(r"\bsm_\d+-|\[sm_\d+\]")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton chooses its interpreter when it and a kernel are imported, which happens from here until all tests are
    # collected. The variable is removed afterwards, because other tests start processes that must not inherit it.
    if "triton" in sys.modules:
        raise RuntimeError("tests/kernels need a session of their own: something has imported triton before them")
    os.environ["TRITON_INTERPRET"] = "1"

from dsv4_kernels import interpreter  # noqa: E402
from dsv4_kernels.arch import Arch, detect  # noqa: E402  (after the interpreter is chosen)
from dsv4_testkit.remembered import remember_launches  # noqa: E402

if not HAS_GPU:
    interpreter.install()
    remember_launches()


def pytest_collection_finish() -> None:
    if not HAS_GPU:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usable = HAS_GPU and detect("cuda") is not None
    left_out = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not usable) or (item.get_closest_marker("interpreter") and HAS_GPU)
    ]
    for item in items:
        if item.path.is_relative_to(_HERE):
            # They run beside the other rings, with the lowest priority.
            item.add_marker(pytest.mark.timeout(1800))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    # The same test of the other table runs directly afterwards, since many of its launches are the same.
    places: dict[str, int] = {}
    items.sort(key=lambda item: places.setdefault(_TABLE.sub("", item.nodeid), len(places)))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


# Users' machines have sm_120 and sm_121; the table of sm_90 also runs on GPUs (tests/kernels with a GPU).
TABLES = [pytest.param(Arch.SM_90, marks=pytest.mark.long), Arch.SM_120]


@pytest.fixture(params=TABLES if not HAS_GPU else [None], ids=str)
def arch(request: pytest.FixtureRequest) -> Arch | None:
    """Return the table to use: both bodies in the interpreter, the device's own on a GPU."""
    return request.param
