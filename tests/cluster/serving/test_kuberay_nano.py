"""The nano model as a RayCluster: real KubeRay, Ray and vLLM in pods on real nodes, with requests and faults."""

from __future__ import annotations

import base64
import time

import httpx
import pytest
from clusterkit.client import Cluster
from clusterkit.waiting import until
from kuberay_parts import NEEDED, RIGHTS, defined, operating
from nano_world import BACK_SECONDS, Nano, forwarded, operated

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), NEEDED]

NAMESPACE = "kuberay"
CHAT = {
    "model": "nano",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0.0,
}
KILL = "import os,signal,sys;" + (
    "found=[int(p) for p in os.listdir('/proc') if p.isdigit() "
    "and b'EngineCore' in open(f'/proc/{p}/cmdline','rb').read().split(b'\\0')[0]];"
    "[os.kill(p,signal.SIGKILL) for p in found];sys.exit(not found)"
)
_LABEL = "dsv4.dev/rank"


class KubeRayNano(Nano):
    """The deployment `nano` with the backend KubeRay."""

    def pod(self, rank: int) -> str:
        incarnation = str(self.group()["incarnation"])
        wanted = {_LABEL: str(rank), "dsv4.dev/incarnation": incarnation}
        return next(name for name, pod in self.members().items() if wanted.items() <= pod["metadata"]["labels"].items())

    def answer(self) -> str:
        with forwarded(self.cluster, self.namespace, "svc/nano", 8000) as base:
            found = httpx.post(f"{base}/v1/chat/completions", json=CHAT, timeout=BACK_SECONDS, trust_env=False)
            return str(found.raise_for_status().json()["choices"][0]["message"]["content"])


def test_kuberays_ray_serves_recovers_and_leaves_nothing(
    cluster: Cluster, definition: dict[str, object], operator_image: str, runtime_image: str
) -> None:
    nano = KubeRayNano(cluster, NAMESPACE)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    with defined(cluster), operating(cluster), operated(cluster, NAMESPACE, operator_image, runtime_image, RIGHTS):
        recovery = {"backoff": {"base": "0s", "max": "0s"}}
        print(f"\nready after {nano.start(backend='KubeRay', recovery=recovery):.1f} s")
        said, before = nano.answer(), nano.uids()
        assert len({pod["spec"]["nodeName"] for pod in nano.members().values()}) == 2

        # KubeRay's view: both pods are ready, and the dashboard needs the token of `kubectl ray get token`.
        def ready() -> bool:
            status = cluster.get("raycluster", "nano-0-i1", "-n", NAMESPACE).get("status", {})
            return (status.get("state"), status.get("readyWorkerReplicas")) == ("ready", 1)

        until("KubeRay's status", ready, seconds=60, every=0.5)
        secret = cluster.get("secret", "nano-0-i1", "-n", NAMESPACE)["data"]["auth_token"]
        token = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
        with forwarded(cluster, NAMESPACE, "svc/nano-0-i1-head-svc", 8265) as dashboard:
            nodes = f"{dashboard}/api/v0/nodes"
            assert httpx.get(nodes, timeout=60, trust_env=False).status_code == 401
            listed = httpx.get(nodes, headers=token, timeout=60, trust_env=False).raise_for_status().json()
        assert [one["state"] for one in listed["data"]["result"]["result"]] == ["ALIVE", "ALIVE"]

        # Level 1: the engine dies, the pods remain.
        struck = time.time()
        nano.inside(0, KILL)
        failure = nano.recovered(struck, "EngineCoreDied")
        assert (failure["level"], nano.uids()) == (1, before)
        print(f"level 1: served {failure['recoverSeconds']:.1f} s after the death was noticed")
        assert nano.answer() == said

        # Level 2: a member's process 1 ends; KubeRay does not replace its pod.
        struck, begun = time.time(), time.monotonic()
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, nano.pod(1), "--grace-period=1", "--wait=false")
        until("a later incarnation", lambda: nano.group()["incarnation"] > 1, seconds=BACK_SECONDS, every=0.5)
        cluster.kubectl(
            "wait", "dsv4/nano", "-n", NAMESPACE, "--for=condition=Ready", f"--timeout={BACK_SECONDS:.0f}s",
            seconds=BACK_SECONDS + 10,
        )  # fmt: skip
        print(f"level 2: Ready {time.monotonic() - begun:.1f} s after the end of a member")
        assert nano.group()["incarnation"] == 2
        assert not set(nano.uids().values()) & set(before.values())
        assert [one["metadata"]["name"] for one in cluster.get("raycluster", "-n", NAMESPACE)["items"]] == ["nano-0-i2"]
        assert nano.answer() == said

        cluster.kubectl("delete", "dsv4", "nano", "-n", NAMESPACE, "--timeout=60s", seconds=70)
        kinds = "pods,services,configmaps,secrets,rayclusters"

        def left() -> list[str]:
            items = cluster.get(kinds, "-n", NAMESPACE)["items"]
            return [one["metadata"]["name"] for one in items if one["metadata"]["name"].startswith("nano")]

        until("the end of all objects", lambda: not left(), seconds=60, every=0.5)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", seconds=70)
