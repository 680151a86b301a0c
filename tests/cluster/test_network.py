"""The pods' network: across nodes, through Services, by name, and from this machine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from clusterkit.archive import PROBE
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until


def pod(namespace: str, name: str, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "probe"}},
        "spec": {
            "nodeName": node,
            "hostname": name,
            "subdomain": "members",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "probe",
                    "image": PROBE,
                    "imagePullPolicy": "Never",
                    "args": ["serve", ":8080"],
                    "readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1},
                }
            ],
        },
    }


def service(namespace: str, name: str, **spec: object) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": "probe"}, "ports": ports, **spec},
    }


@pytest.fixture
def pair(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Create two ready pods on two nodes, a Service and a headless one; return the pods' addresses by name."""
    if cluster.state.settings.nodes < 2:
        pytest.skip("this cluster has fewer than two real nodes")
    cluster.apply(
        service(namespace, "web"),
        service(namespace, "members", clusterIP="None", publishNotReadyAddresses=True),
        pod(namespace, "one", "spark1"),
        pod(namespace, "two", "spark2"),
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod", "--all", "-n", namespace, "--timeout=120s", seconds=130)
    return {item["metadata"]["name"]: item["status"]["podIP"] for item in cluster.get("pods", "-n", namespace)["items"]}


def inside(cluster: Cluster, namespace: str, name: str, *command: str) -> str:
    return cluster.kubectl("exec", "-n", namespace, name, "--", "/probe", *command).strip()


def tried(cluster: Cluster, namespace: str, name: str, *command: str) -> str:
    """Return the same, or an empty text after a failure: nodes receive Services and routes after the API server."""
    try:
        return inside(cluster, namespace, name, *command)
    except KubectlError:
        return ""


def test_pods_reach_one_another_with_their_own_addresses(
    cluster: Cluster, namespace: str, pair: dict[str, str]
) -> None:
    for asks, answers in (("one", "two"), ("two", "one")):
        said = inside(cluster, namespace, asks, "get", f"http://{pair[answers]}:8080")
        status, name, seen = said.split()
        assert (status, name) == ("200", answers)
        assert seen.startswith(f"{pair[asks]}:"), "nobody between them puts another address on"


def test_a_service_reaches_all_of_its_pods(cluster: Cluster, namespace: str, pair: dict[str, str]) -> None:
    url = f"http://web.{namespace}.svc"

    def answered() -> set[str]:
        said = (tried(cluster, namespace, "one", "get", url) for _ in range(8))
        return {words.split()[1] for words in said if words}

    # This includes the requesting pod: packets to itself through a Service need a separate rule.
    until("answers of both pods", lambda: answered() == set(pair), seconds=60, every=0.5)


def test_names_resolve_in_every_form_that_members_use(cluster: Cluster, namespace: str, pair: dict[str, str]) -> None:
    for name in (f"two.members.{namespace}.svc", f"two.members.{namespace}.svc.cluster.local", "two.members"):
        assert inside(cluster, namespace, "one", "lookup", name) == pair["two"]
    # The pod on the other node resolves its own name to the same address.
    assert inside(cluster, namespace, "two", "lookup", "two.members") == pair["two"]
    with pytest.raises(KubectlError, match="no such host"):
        inside(cluster, namespace, "one", "lookup", f"three.members.{namespace}.svc")


def test_this_machine_reaches_services_and_logs(cluster: Cluster, namespace: str, pair: dict[str, str]) -> None:
    address = cluster.get("service", "web", "-n", namespace)["spec"]["clusterIP"]

    def answers() -> bool:
        try:
            return httpx.get(f"http://{address}", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    until("an answer of the Service to this machine", answers, seconds=60, every=0.5)
    assert cluster.kubectl("logs", "one", "-n", namespace) == ""
    assert set(pair) == {"one", "two"}


@pytest.mark.long
def test_a_cut_cable_cuts_the_pods_off_and_heals(cluster: Cluster, namespace: str, pair: dict[str, str]) -> None:
    url = f"http://{pair['two']}:8080"
    cluster.node("cut", "spark2")
    try:
        with pytest.raises(KubectlError, match=r"deadline exceeded|no route|Timeout"):
            inside(cluster, namespace, "one", "get", url)
    finally:
        cluster.node("plug", "spark2")
    until("an answer again", lambda: tried(cluster, namespace, "one", "get", url), seconds=60, every=0.5)
