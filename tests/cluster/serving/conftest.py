"""One deployment of the nano model for all tests of this folder, which run last: it lasts until the session's end.

Each test continues with the state that the previous one left: after a failure the group may not serve, and the next
test then reports that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterkit.client import Cluster
from nano_world import OPERATOR_NODE, Nano, operated

NAMESPACE = "serving"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests last: no other test shares the machine with the engine, or removes its nodes."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


@pytest.fixture(scope="session")
def nano(cluster: Cluster, definition: dict[str, object], operator_image: str, runtime_image: str) -> Iterator[Nano]:
    """Yield a deployment of two members. A third node, if any, is the operator's and is never the lost one."""
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
