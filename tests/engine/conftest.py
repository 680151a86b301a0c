"""Fixtures of several files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of checkpoints with the nano model.

    It is made once for the deployments whose tests do not depend on how it is made; `test_main_job.py` begins without.
    """
    found = tmp_path_factory.mktemp("weights")
    # In a process of its own, whose modules would stay in the memory of this one.
    command = [sys.executable, "-m", "dsv4_runtime.nano.checkpoint", str(found / "nano-s0-bf16")]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    return found
