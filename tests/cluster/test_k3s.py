"""The chart and a group on the parts of k3s that are Go modules: kine, kube-router, helm-controller, Helm 3.

A k3s server itself is no module that can be built here. What a k3s cluster has instead of etcd, its enforced network
policies and its ways to install a chart are these programs; API server, kubelet and containerd are those of
`clusterkit`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import charts
import httpx
import pytest
import yaml
from clusterkit import archive, build, images, lifetime, processes
from clusterkit.client import Cluster, KubectlError
from clusterkit.layout import Settings
from clusterkit.waiting import until
from nano_world import MANIFEST, READY_SECONDS, Nano, forwarded

from dsv4_operator.builders.member import HEAD_PORTS

MISSING = build.unbuilt(*build.K3S)
REMEDY = "; ".join(f"`PYTHONPATH=tests/cluster .venv/bin/python -m clusterkit build {name}`" for name in MISSING)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}; build with {REMEDY}"),
]

SETTINGS = Settings(f"k3s{os.environ.get('PYTEST_XDIST_WORKER', '')}", nodes=2, k3s=True)
# Members' compiled code is kept between runs for this namespace (clusterkit/node_init.py).
NAMESPACE = "serving"
RELEASE = "dsv4"
KINDS = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,networkpolicies,poddisruptionbudgets"
WIDE = (
    "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,"
    "validatingwebhookconfigurations"
)
DEFINITION = "dsv4deployments.dsv4.dev"
MANAGED = "helm.cattle.io"
SERVER_VERSION = "--kube-version=v1.33.5+k3s1"
"""A version as a k3s server reports it."""
CONNECT = (
    "import socket,sys\n"
    "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close(); print('open')\n"
    "except OSError as error: print('closed', error)\n"
)
SECONDS = 90.0


@pytest.fixture(scope="module")
def k3s() -> Iterator[Cluster]:
    """Yield a cluster with two nodes, and the RuntimeClass that a k3s server makes for NVIDIA's container runtime.

    `DSV4_TEST_CLUSTER` names a running one that was started with `--k3s`.
    """
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    with contextlib.ExitStack() as stack:
        found = lifetime.running(os.environ.get("DSV4_TEST_CLUSTER", ""))
        if found is not None and not found.state.settings.k3s:
            pytest.skip("DSV4_TEST_CLUSTER has no parts of k3s: clusterkit up --k3s")
        started = found or stack.enter_context(lifetime.lasting(SETTINGS))
        stack.enter_context(started.http)
        started.apply({**runtime, "handler": "nvidia"})
        yield started


def helm(cluster: Cluster, *words: str, version: str = "helm") -> str:
    done = subprocess.run(
        [build.built(version) / "helm", *words, "--namespace", NAMESPACE],
        capture_output=True, text=True, timeout=200, check=False, env=cluster.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(*more: str) -> list[str]:
    repository, tag = images.OPERATOR.rsplit(":", 1)
    return charts.settings(
        f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never",
        f"runtimeImage={images.RUNTIME}", "policy.runtimeClass=nvidia", *more,
    )  # fmt: skip


def objects(cluster: Cluster) -> set[str]:
    """Return the objects of the namespace, and those of the release in the whole cluster."""
    inside = cluster.get(KINDS, "-n", NAMESPACE)["items"]
    wide = cluster.get(WIDE)["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}"
        for item in (*inside, *wide)
        if "namespace" in item["metadata"] or RELEASE in item["metadata"]["name"]
    }


@pytest.fixture
def place(k3s: Cluster) -> Iterator[set[str]]:
    """Create the namespace; yield the objects that every namespace has."""
    if not k3s.state.settings.nodes:
        pytest.skip("this cluster has no real node")
    k3s.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    usual = {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"}
    until("the usual objects", lambda: usual <= objects(k3s), seconds=SECONDS)
    yield objects(k3s)
    k3s.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s", seconds=130)


def gone(cluster: Cluster, before: set[str]) -> None:
    until("the end of all objects of the release", lambda: objects(cluster) <= before, seconds=SECONDS, every=0.5)


def refusal(cluster: Cluster, manifest: dict[str, Any]) -> str:
    """Return the message with which the API server refuses an object; empty if it does not."""
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=[manifest])
    except KubectlError as error:
        return str(error)
    return ""


def reach(cluster: Cluster, pod: str, namespace: str, address: str, port: int) -> str:
    """Return `open`, or `closed` with the reason, for a connection from a pod."""
    command = ("exec", "-n", namespace, pod, "--", "python3", "-c", CONNECT, address, str(port))
    return cluster.kubectl(*command).strip()


def stranger(cluster: Cluster) -> str:
    """Run a pod of no deployment in another namespace, and return its name."""
    container = {"name": "c", "image": images.RUNTIME, "imagePullPolicy": "Never", "command": ["sleep", "3000"]}
    about = {"name": "stranger", "namespace": "default"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {"containers": [container]}})
    cluster.kubectl("wait", "--for=condition=Ready", "pod/stranger", "--timeout=120s", seconds=130)
    return "stranger"


def test_a_group_serves_under_enforced_policies_and_leaves_nothing(k3s: Cluster, place: set[str]) -> None:
    for file in (images.operator(), images.runtime()):
        k3s.load(file)
    install = ("upgrade", "--install", RELEASE, str(charts.CHART), "--wait", "--timeout=150s")
    helm(k3s, *install, *values("webhook.enabled=true"))
    versions = {one["name"]: one["served"] for one in k3s.get("crd", DEFINITION)["spec"]["versions"]}
    assert versions == {"v1alpha1": True, "v1beta1": True}

    # By the definition, the policy, and the operator: the API server reaches its port under the policy of the chart.
    for spec, words in (
        ({**MANIFEST["spec"], "replicas": -1}, "spec.replicas"),
        ({**MANIFEST["spec"], "storage": {"path": "/etc"}}, "policy.storageRoots"),
        ({**MANIFEST["spec"], "engine": {"extraArgs": ["--max-model-length", "1"]}}, "max-model-length"),
    ):
        bad = {**MANIFEST, "metadata": {"name": "bad", "namespace": NAMESPACE}, "spec": spec}
        # The API server uses new policies and webhooks a moment later.
        until(f"refusal with {words}", lambda bad=bad, words=words: words in refusal(k3s, bad), seconds=SECONDS)

    nano = Nano(k3s, NAMESPACE)
    print(f"\nready after {nano.start():.1f} s; {nano.phases()}")
    uids = nano.uids()
    with forwarded(k3s, NAMESPACE, "svc/nano", 8000) as base:
        chat = {"model": "nano", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
        answer = httpx.post(f"{base}/v1/chat/completions", json=chat, timeout=READY_SECONDS, trust_env=False)
    assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 4

    # Ports without a token are open to members only; those with one, to the pods of other namespaces too.
    pod = stranger(k3s)
    head = nano.members()[nano.pod(0)]
    (container,) = head["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    address, public = head["status"]["podIP"], {target for _, target in HEAD_PORTS.values()}
    assert reach(k3s, pod, "default", address, ports["agent"]) == "open"
    closed = {name: port for name, port in ports.items() if not public & {name, port}}
    assert "gcs" in closed
    for name, port in closed.items():
        assert reach(k3s, pod, "default", address, port).startswith("closed"), name
    assert reach(k3s, nano.pod(1), NAMESPACE, address, ports["gcs"]) == "open"

    helm(k3s, *install, *values("webhook.enabled=false", "replicas=2"))
    assert nano.uids() == uids, "an upgrade of the operator restarts no group"
    phase = ("get", "dsv4", "nano", "-n", NAMESPACE, "-o", "jsonpath={.status.phase}")
    until("Serving", lambda: k3s.kubectl(*phase) == "Serving", seconds=SECONDS, every=0.5)

    k3s.kubectl("delete", "dsv4", "nano", "-n", NAMESPACE, "--timeout=120s", seconds=130)
    helm(k3s, "uninstall", RELEASE, "--wait")
    gone(k3s, place)
    k3s.kubectl("delete", "pod", "stranger", "--grace-period=0", "--force")


def test_helm_3_installs_upgrades_and_removes_the_chart(k3s: Cluster, place: set[str]) -> None:
    k3s.load(images.operator())
    template = ("template", RELEASE, str(charts.CHART), SERVER_VERSION, *values())
    by_kind = [
        sorted((one["kind"], one["metadata"]["name"], json.dumps(one)) for one in yaml.safe_load_all(text) if one)
        for text in (helm(k3s, *template, version=version) for version in ("helm", "helm3"))
    ]
    assert by_kind[0] == by_kind[1]
    install = ("upgrade", "--install", RELEASE, str(charts.CHART), "--wait", "--timeout=150s", *values())
    assert "STATUS: deployed" in helm(k3s, *install, version="helm3")
    # Helm 3 updates with a patch of three versions, which must leave the fields of the operator alone.
    k3s.kubectl("label", "lease", "dsv4-operator", "-n", NAMESPACE, "mine=kept")
    assert "REVISION: 2" in helm(k3s, *install, "--set", "logFormat=json", version="helm3")
    holder = ("get", "lease", "dsv4-operator", "-n", NAMESPACE, "-o", "jsonpath={.spec.holderIdentity}")
    until("a leader", lambda: k3s.kubectl(*holder), seconds=SECONDS, every=0.5)
    assert k3s.get("lease", "dsv4-operator", "-n", NAMESPACE)["metadata"]["labels"]["mine"] == "kept"
    assert DEFINITION in helm(k3s, "uninstall", RELEASE, "--wait", version="helm3")
    gone(k3s, place)
    assert k3s.get("crd", DEFINITION)["status"]["acceptedNames"]["kind"] == "DSV4Deployment"


def chart_object(folder: Path) -> dict[str, Any]:
    """Return the HelmChart of docs/install.md."""
    helm_program = build.built("helm3") / "helm"
    processes.run(helm_program, "package", charts.CHART, "--destination", folder)
    (packed,) = folder.glob("*.tgz")
    text = (charts.ROOT / "docs" / "install.md").read_text()
    (block,) = (part.partition("```")[0] for part in text.split("```yaml\n")[1:] if "kind: HelmChart" in part)
    made: dict[str, Any] = yaml.safe_load(block.replace("REGISTRY", "registry.example.com"))
    made["spec"]["chartContent"] = base64.b64encode(packed.read_bytes()).decode()
    return made


def test_a_helm_chart_object_is_a_job_with_this_chart_and_these_values(k3s: Cluster, tmp_path: Path) -> None:
    controller = processes.start(
        "helm-controller",
        [build.built("helmcontroller") / "helm-controller", f"--kubeconfig={k3s.kubeconfig}", "--pprof-port=0"],
        log=tmp_path / "helm-controller.log",
        env={"NODE_NAME": "spark1"},
    )
    wanted = chart_object(tmp_path)
    name, home = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    try:
        until("its definitions", lambda: "helmcharts" in k3s.kubectl("get", "crd", "-o", "name"), seconds=SECONDS)
        k3s.kubectl("wait", "--for=condition=Established", f"crd/helmcharts.{MANAGED}", "--timeout=60s", seconds=70)
        k3s.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", input=[wanted])

        def job() -> Any:
            controller.check()
            found = k3s.get("jobs", "-n", home)["items"]
            return next((one for one in found if one["metadata"]["name"] == f"helm-install-{name}"), None)

        made = until("the job", job, seconds=SECONDS, every=0.5)
        (container,) = made["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["install", "--namespace", "dsv4-system", "--create-namespace"]
        content = k3s.get("configmap", f"chart-content-{name}", "-n", home)["data"][f"{name}.tgz.base64"]
        with tarfile.open(fileobj=BytesIO(base64.b64decode(content))) as packed:
            assert "dsv4-operator/files/crd.yaml" in packed.getnames()
        secret = k3s.get("secret", f"chart-values-{name}", "-n", home)["data"]
        (given,) = [text for text in map(base64.b64decode, secret.values()) if b"runtimeClass" in text]
        (tmp_path / "values.yaml").write_bytes(given)
        (tmp_path / "content.tgz").write_bytes(base64.b64decode(content))
        # No registry has the image of the job here: its Helm 3 runs with the job's arguments, chart and values instead.
        k3s.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", seconds=60)
        files = (str(tmp_path / "content.tgz"), "--values", str(tmp_path / "values.yaml"))
        program = build.built("helm3") / "helm"
        said = processes.run(program, *container["args"], name, *files, env=k3s.environment, seconds=120)
        assert "STATUS: deployed" in said
        policy = k3s.get("configmap", "dsv4-operator-policy", "-n", "dsv4-system")["data"]["policy.json"]
        found = json.loads(policy)
        assert (found["runtimeClass"], found["hostNetworkNamespaces"]) == ("nvidia", ["models"])
        processes.run(program, "uninstall", name, "--namespace", "dsv4-system", env=k3s.environment, seconds=120)
        k3s.kubectl("delete", "namespace", "dsv4-system", "--wait=false")
    finally:
        controller.stop()
        print(processes.last_words(controller.log, 2000))


def test_members_with_gpus_are_admitted_in_the_runtime_class_of_k3s(k3s: Cluster) -> None:
    container = {"name": "c", "image": archive.PAUSE, "imagePullPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "g", "namespace": "default"}}
    for runtime, words in (("nvidia", None), ("other", 'RuntimeClass "other" not found')):
        wanted = {**pod, "spec": {"runtimeClassName": runtime, "containers": [container]}}
        if words is None:
            assert "created" in k3s.kubectl("create", "--dry-run=server", "-f", "-", input=[wanted])
            continue
        with pytest.raises(KubectlError, match=words):
            k3s.kubectl("create", "--dry-run=server", "-f", "-", input=[wanted])


def test_the_datastore_is_sqlite(k3s: Cluster) -> None:
    """The API server of this cluster has no etcd."""
    database = k3s.directory / "kine" / "state.db"
    assert database.read_bytes()[:15] == b"SQLite format 3"
    assert os.stat(database.parent).st_mode & 0o077 == 0
    assert not (k3s.directory / "etcd").exists()
