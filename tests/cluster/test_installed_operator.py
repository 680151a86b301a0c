"""The operator as a user installs it: chart, its own image, restricted Pod Security, the rights of one namespace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
import pytest
import yaml
from clusterkit import images
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until

pytestmark = pytest.mark.usefixtures("definition")

NANO = yaml.safe_load((Path(__file__).parents[2] / "examples" / "nano.yaml").read_text())
RELEASE = "installed"
DEPLOYMENT = f"deploy/{RELEASE}-dsv4-operator"
# test_chart_release.py tests the settings of the chart.
KINDS = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,networkpolicies,poddisruptionbudgets"


def helm(cluster: Cluster, namespace: str, *words: str) -> str:
    return charts.helm(*words, "--namespace", namespace, "--wait", "--timeout=100s", env=cluster.environment)


@pytest.fixture
def installed(cluster: Cluster, namespace: str, operator_image: str) -> Iterator[str]:
    """Yield a namespace with a Ready operator that manages only this namespace."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    repository, tag = operator_image.rsplit(":", 1)
    values = charts.settings(
        f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never",
        f"runtimeImage={images.RUNTIME}", f"watchNamespaces={{{namespace}}}", "crds.enabled=false",
    )  # fmt: skip
    helm(cluster, namespace, "install", RELEASE, str(charts.CHART), *values)
    yield namespace
    helm(cluster, namespace, "uninstall", RELEASE, "--ignore-not-found")


def conditions(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    status = cluster.get("dsv4", "nano", "-n", namespace).get("status", {})
    return {said["type"]: said for said in status.get("conditions", ())}


def wait_for(cluster: Cluster, namespace: str, generation: int) -> dict[str, dict[str, Any]]:
    """Wait until the operator has observed this generation; return the conditions."""

    def seen() -> dict[str, dict[str, Any]] | None:
        found = conditions(cluster, namespace)
        return found if found.get("Ready", {}).get("observedGeneration") == generation else None

    found = until(f"a status of generation {generation}", seen, seconds=90, every=0.5)
    assert found
    return found


def logs(cluster: Cluster, namespace: str) -> str:
    """Return the log of the present operator; empty while its container is being created."""
    with contextlib.suppress(KubectlError):
        return cluster.kubectl("logs", DEPLOYMENT, "-n", namespace)
    return ""


def test_it_accepts_a_deployment_survives_its_own_end_and_leaves_nothing(cluster: Cluster, installed: str) -> None:
    before_operator = {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"}
    manifest = {**NANO, "metadata": {"name": "nano", "namespace": installed}}
    cluster.apply({**manifest, "spec": {**NANO["spec"], "suspend": True}})
    found = wait_for(cluster, installed, 1)
    assert (found["Accepted"]["status"], found["Ready"]["reason"]) == ("True", "Suspended")
    events = cluster.get("events", "-n", installed)["items"]
    assert "PlanAccepted" in {event["reason"] for event in events if event["involvedObject"]["name"] == "nano"}

    # A new leader continues after the old one was killed.
    cluster.kubectl("delete", "pod", "--all", "-n", installed, "--grace-period=0", "--force")
    until("another operator leads", lambda: "leads" in logs(cluster, installed), seconds=90, every=0.5)
    cluster.kubectl("patch", "dsv4", "nano", "-n", installed, "--type=merge", "-p", '{"spec": {"replicas": 0}}')
    assert wait_for(cluster, installed, 2)["Ready"]["reason"] == "Suspended"

    cluster.kubectl("delete", "dsv4", "nano", "-n", installed, "--timeout=30s", seconds=40)
    helm(cluster, installed, "uninstall", RELEASE)

    def left() -> set[str]:
        items = cluster.get(KINDS, "-n", installed)["items"]
        return {f"{item['kind']}/{item['metadata']['name']}" for item in items} - before_operator

    until("the end of all that the operator had", lambda: not left(), seconds=60, every=0.5)
