"""One deployment of the nano model for all tests of this folder, which run last: it lasts until the session's end.

Each goes on from where the last one left the group: a test that fails leaves the next one a group that may not serve,
which it then says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterkit.client import Cluster
from nano_world import OPERATOR_NODE, Nano, operated

NAMESPACE = "serving"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No other test shares the machine with its engine, or takes its nodes away."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


@pytest.fixture(scope="session")
def nano(cluster: Cluster, definition: dict[str, object], operator_image: str, runtime_image: str) -> Iterator[Nano]:
    """Two members; where there is a third node, it is the operator's, which is not the one that is lost."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    alone = cluster.state.settings.nodes > 2
    place = (f"nodeSelector.kubernetes\\.io/hostname={OPERATOR_NODE}",) if alone else ()
    try:
        with operated(cluster, NAMESPACE, operator_image, runtime_image, *place):
            found = Nano(cluster, NAMESPACE)
            recovery = {
                "maxRestarts": 20,
                "window": "1h",
                "backoff": {"base": "0s", "max": "0s"},
                "nodeLoss": {"after": "1s"},
            }
            print(f"\nready after {found.start(recovery=recovery):.1f} s; {found.phases()}")
            yield found
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
