"""Helpers beside the tests, and a deployment."""

import sys
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, load

sys.path.insert(0, str(Path(__file__).parents[1] / "kube"))
sys.path.insert(0, str(Path(__file__).parent))

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def deployment() -> DSV4Deployment:
    """Two Sparks."""
    return load((EXAMPLES / "flash-2x-spark.yaml").read_text())
