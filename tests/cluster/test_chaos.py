"""API faults on a real API server: latency, lost and late requests, 409, 410, 429, 500, broken watches, outages."""

from __future__ import annotations

import os
from pathlib import Path

import charts
import pytest
from chaos_world import Result, Run, connected
from clusterkit.client import Cluster as ControlPlane
from operator_world import addresses

__all__ = ["addresses"]

pytestmark = pytest.mark.usefixtures("definition")

SHORT_SECONDS, LONG_SECONDS = 8.0, 25.0


async def one_run(cluster: ControlPlane, namespace: str, folder: Path, seed: int, seconds: float) -> Result:
    with charts.account(cluster, namespace, folder / "operator.kubeconfig") as config:
        async with connected(cluster.kubeconfig, [namespace]) as (kube, agents, server, tls):
            return await Run(kube, agents, namespace, seed).run(config, server, tls, folder, seconds)


@pytest.mark.timeout(180)
async def test_faults_of_the_api_end_no_member_and_leave_nothing(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    result = await one_run(cluster, namespace, tmp_path, int(os.environ.get("DSV4_TEST_SEED", "1")), SHORT_SECONDS)
    print(f"\n{dict(result.counts)}; settled after {result.settled_seconds:.1f} s")
    assert result.wrong == []
