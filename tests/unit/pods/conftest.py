"""A deployment of pods."""

from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, load

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def deployment() -> DSV4Deployment:
    """Return the deployment of the example with two Sparks."""
    found = load((EXAMPLES / "flash-2x-spark.yaml").read_text())
    return found.model_copy(update={"metadata": found.metadata.model_copy(update={"uid": "uid-of-it"})})
