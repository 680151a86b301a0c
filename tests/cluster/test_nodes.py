"""The test cluster's nodes are real: pods on different nodes communicate, names resolve, a lost node is detected."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until


def test_the_nodes_agree_with_the_settings(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    settings = cluster.state.settings
    real = {
        node["metadata"]["name"]
        for node in nodes
        if "containerd" in node["status"]["nodeInfo"]["containerRuntimeVersion"]
    }
    assert real == set(settings.node_names)
    assert len(nodes) == settings.nodes + settings.fake


def test_versions_are_real(cluster: Cluster) -> None:
    said = json.loads(cluster.kubectl("version", "-o", "json"))
    assert said["serverVersion"]["gitVersion"] == said["clientVersion"]["gitVersion"]
    assert said["serverVersion"]["gitVersion"].startswith("v1.")
    assert said["serverVersion"]["minor"].isdigit()


def test_every_port_requires_credentials(cluster: Cluster) -> None:
    """TLS is verified, and unknown clients are refused by the API server, etcd and a kubelet."""
    with httpx.Client(verify=False, timeout=60) as bare:
        assert bare.get(f"{cluster.state.server}/api/v1/pods").status_code == 403
        for index in range(1, cluster.state.settings.nodes + 1):
            assert bare.get(f"https://{cluster.state.addresses.node(index)}:10250/pods").status_code == 401
    with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
        httpx.get(cluster.state.server, timeout=60)


def test_a_kubelet_has_only_the_rights_of_its_node(cluster: Cluster, namespace: str) -> None:
    """The Node authorizer is active: a node's certificate cannot read a secret of a pod on another node."""
    cluster.kubectl("create", "secret", "generic", "s", "--from-literal=a=b", "-n", namespace)
    own = str(cluster.directory / "spark1-kubelet.kubeconfig")
    with pytest.raises(KubectlError, match=r"Forbidden|no relationship found"):
        cluster.kubectl("--kubeconfig", own, "get", "secret", "s", "-n", namespace)
    with pytest.raises(KubectlError, match=r"not allowed|[Ff]orbidden"):
        cluster.kubectl("--kubeconfig", own, "label", "node", "spark2", "stolen=yes")


def test_an_image_that_is_nowhere_fails_at_once(cluster: Cluster, namespace: str) -> None:
    """The resolver of this machine is not used: a kubelet ends a pod only after the pull of its image has returned."""
    pod = pod_on_fake(namespace, "p")
    pod["spec"] = {"containers": [{"name": "c", "image": "dsv4.test/none:1"}]}
    cluster.apply(pod)
    waiting = "jsonpath={.status.containerStatuses[0].state.waiting.reason}"
    until(
        "the failed pull",
        lambda: "ImagePull" in cluster.kubectl("get", "pod", "p", "-n", namespace, "-o", waiting),
        seconds=5,
    )


def pod_on_fake(namespace: str, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodeSelector": {"type": "kwok"},
            "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
            "containers": [{"name": "c", "image": "none"}],
        },
    }


def test_pods_of_kwok_run_as_soon_as_they_are_scheduled(cluster: Cluster, namespace: str) -> None:
    if not cluster.state.settings.fake:
        pytest.skip("this cluster has no nodes of KWOK")
    cluster.apply(*(pod_on_fake(namespace, f"p{index}") for index in range(5)))
    began = time.monotonic()
    cluster.kubectl("wait", "--for=condition=Ready", "pod", "--all", "-n", namespace, "--timeout=60s", seconds=70)
    print(f"5 pods of KWOK Ready in {time.monotonic() - began:.1f} s")
    pods = cluster.get("pods", "-n", namespace)["items"]
    assert {pod["spec"]["nodeName"][:4] for pod in pods} == {"fake"}
    assert len({pod["status"]["podIP"] for pod in pods}) == len(pods), "an address each"


def pod(namespace: str, name: str, node: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "t"}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": "dsv4.test/pause:1", "imagePullPolicy": "Never"}],
            **spec,
        },
    }


@pytest.mark.long
def test_a_lost_node_is_detected_and_recovers(cluster: Cluster, namespace: str) -> None:
    def ready(name: str) -> str:
        said = {c["type"]: c["status"] for c in cluster.get("node", name)["status"]["conditions"]}
        return str(said["Ready"])

    cluster.apply(pod(namespace, "p", "spark2"))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/p", "-n", namespace, "--timeout=90s", seconds=100)
    cluster.node("stop", "spark2")
    began = time.monotonic()
    until("spark2 not Ready", lambda: ready("spark2") != "True", seconds=120, every=1)
    print(f"spark2 was not Ready {time.monotonic() - began:.0f} s after it was stopped")
    cluster.node("start", "spark2")
    until("spark2 Ready", lambda: ready("spark2") == "True", seconds=120, every=1)
    # The containers of the node are dead, and its kubelet reports that; the pod does not stay "running".
    until(
        "the pod runs anew",
        lambda: cluster.get("pod", "p", "-n", namespace)["status"]["containerStatuses"][0]["restartCount"] == 1,
        seconds=120,
        every=1,
    )
