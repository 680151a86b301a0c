"""API faults on a real API server: lost, late and delayed requests, 409, 410, 429, 5xx, broken watches, outages.

`benchmarks/api_chaos.py` runs any number of seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_world import namespaces, run_seeds
from clusterkit.client import Cluster as ControlPlane
from operator_world import addresses

__all__ = ["addresses"]

pytestmark = pytest.mark.usefixtures("definition")


@pytest.mark.parametrize(
    ("seeds", "seconds"),
    [
        pytest.param(range(1, 3), 6.0, id="short"),
        pytest.param(range(1, 9), 25.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
async def test_faults_of_the_api_end_no_member_and_leave_nothing(
    cluster: ControlPlane, tmp_path: Path, seeds: range, seconds: float
) -> None:
    with namespaces(cluster, min(4, len(seeds)), tmp_path) as configs:
        results = await run_seeds(cluster, seeds, configs, seconds, tmp_path)
    assert [(one.seed, one.wrong) for one in results if one.wrong] == []
