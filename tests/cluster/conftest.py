"""One cluster for the whole run, an empty namespace for each test.

`DSV4_TEST_CLUSTER=NAME` uses a running cluster (`make cluster-up`) and leaves it running.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# The cluster kit is in this directory; with import mode importlib, pytest does not add it to the path.
sys.path.insert(0, str(Path(__file__).parent))

import charts
from clusterkit import images, lifetime
from clusterkit.client import Cluster
from clusterkit.layout import Settings
from clusterkit.waiting import ClusterError

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
DEFINITION = REPOSITORY / "manifests" / "crd.yaml"
# Each worker of pytest-xdist has its own cluster (`make cluster-test`, `make test`).
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_BEHIND = 5
"""Niceness; child processes inherit it."""
# Pods without a named node go to the real ones; those of KWOK are tainted.
OURS = Settings(f"tests{WORKER}", nodes=3, fake=8)


_IMAGES = {"test_admission.py", "test_chart_release.py", "test_images.py", "test_installed_operator.py", "test_pods.py"}
"""Files whose tests load the project's images."""


_FIRST = {"test_chaos.py", "test_rollout.py"}
"""Files whose single test takes 40 s, longer than all tests of most others."""


class Kinds(LoadScopeScheduling):
    """Tests that run engines compute; most others wait for the control plane.

    The two kinds run in parallel, each with its tests in sequence. Without engine tests, files are distributed, those
    with images to one worker: loading images onto the nodes of a cluster takes half a minute.
    """

    def _split_scope(self, nodeid: str) -> str:
        collected = next(iter(self.registered_collections.values()))
        if any(_kind(one) == "engines" for one in collected):
            return _kind(nodeid)
        return _files(nodeid)


def _files(nodeid: str) -> str:
    """Return the name of the files that run in one worker."""
    file = nodeid.partition("::")[0]
    return "images" if Path(file).name in _IMAGES else file


def _kind(nodeid: str) -> str:
    return "engines" if "/serving/" in nodeid or nodeid.endswith("::test_the_tutorial") else "control"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Kinds:
    """Return the scheduler that assigns tests to the two workers of `make cluster-test` and `make test`."""
    # The order is that of `pytest_collection_modifyitems`.
    config.option.loadscopereorder = False
    return Kinds(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lower the priority of the worker without engines and of its cluster: the engines' worker has more to do."""
    if WORKER and _kind(item.nodeid) == "control" and os.getpriority(os.PRIO_PROCESS, 0) < _BEHIND:
        os.setpriority(os.PRIO_PROCESS, 0, _BEHIND)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for the cluster and its images, which take minutes during other work."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    if all(item.path.is_relative_to(HERE) for item in items):
        # Files with the most tests first, so that the workers end at about the same time.
        tests = Counter(_files(item.nodeid) for item in items)
        items.sort(key=lambda item: (item.path.name not in _FIRST, -tests[_files(item.nodeid)], _files(item.nodeid)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build slow parts before the first test's timeout begins."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "cluster" in wanted:
        lifetime.prepare(OURS)
    if "operator_image" in wanted:
        images.operator()
    if "runtime_image" in wanted:
        images.runtime()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield a cluster with three real nodes and eight of KWOK."""
    if name := os.environ.get("DSV4_TEST_CLUSTER"):
        found = lifetime.running(name)
        if not found:
            raise ClusterError(f"DSV4_TEST_CLUSTER: no cluster {name!r} runs; start it with `make cluster-up`")
        with found.http:
            yield found
        return
    with lifetime.lasting(OURS) as started, started.http:
        yield started


@pytest.fixture(scope="session")
def definition(cluster: Cluster) -> dict[str, object]:
    """Apply the project's CustomResourceDefinition; return it once it is served."""
    parsed: dict[str, object] = yaml.safe_load(DEFINITION.read_text())
    cluster.apply(parsed)
    cluster.until_served(parsed["metadata"]["name"])  # type: ignore[index]
    return parsed


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """Yield the name of an empty namespace, which is deleted afterwards."""
    name = cluster.kubectl("create", "-f", "-", "-o", "name", input=[
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "test-"}}
    ]).strip().removeprefix("namespace/")  # fmt: skip
    cluster.until_account(name)
    yield name
    # Without waiting: the next test has its own namespace.
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def operator_kubeconfig(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """Yield a kubeconfig with exactly the rights that the chart gives an operator of the test's namespace."""
    with charts.account(cluster, namespace, tmp_path / "operator.kubeconfig") as file:
        yield file


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster) -> str:
    """Load the operator's image onto every real node; return its name."""
    cluster.load(images.operator())
    return images.OPERATOR


@pytest.fixture(scope="session")
def runtime_image(cluster: Cluster) -> str:
    """Load the members' CPU image onto every real node; return its name."""
    cluster.load(images.runtime())
    return images.RUNTIME
