"""The chart on the real API server: admission of its pods, rights of its account, and remains of a release."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from charts import CHART, ROOT, helm, one, rendered, settings
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until

DEFINITION = "dsv4deployments.dsv4.dev"
NANO = yaml.safe_load((ROOT / "examples" / "nano.yaml").read_text())
# Kinds that a release could leave behind.
KINDS = (
    "serviceaccounts,services,deployments,replicasets,pods,roles,rolebindings,clusterroles,clusterrolebindings,"
    "networkpolicies,poddisruptionbudgets,configmaps,secrets,leases"
)
PATIENCE = 60.0

pytestmark = pytest.mark.usefixtures("definition")


@dataclass(frozen=True)
class Release:
    """A release of the chart in a separate namespace."""

    cluster: Cluster
    name: str

    def helm(self, *arguments: str) -> str:
        return helm(*arguments, "--namespace", self.name, env=self.cluster.environment)

    def put(self, *values: str) -> None:
        """Install, or upgrade to these values. The tests' cluster has the definition already."""
        said = self.helm("upgrade", "--install", self.name, str(CHART), "--take-ownership", *settings(*values))
        assert "STATUS: deployed" in said

    def objects(self) -> set[str]:
        """Return the objects of `KINDS` in the namespace, and cluster-wide ones with the release's name."""
        found = self.cluster.get(KINDS, "--namespace", self.name)["items"]
        named = [(item["kind"], item["metadata"]["name"], "namespace" in item["metadata"]) for item in found]
        return {f"{kind}/{name}" for kind, name, inside in named if inside or self.name in name}

    def operator(self) -> str:
        return f"{self.name}-dsv4-operator"

    @property
    def account(self) -> str:
        return f"system:serviceaccount:{self.name}:{self.operator()}"


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    """Yield a release that is not installed yet; its namespace admits only restricted pods."""
    name = f"r{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    made = Release(cluster, name)
    # Objects that every namespace gets and keeps.
    until("its account", lambda: {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"} <= made.objects(), seconds=60)
    yield made
    made.helm("uninstall", name, "--ignore-not-found")
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def may(cluster: Cluster, user: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """Return whether the API server authorizes `user` for this; `resource` is `NAME.GROUP/SUBRESOURCE`."""
    kind, _, part = resource.partition("/")
    plural, _, group = kind.partition(".")
    asked = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": part,
        "namespace": namespace,
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": asked},
    }
    answer = cluster.http.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review)
    answer.raise_for_status()
    return bool(answer.json()["status"]["allowed"])


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("replicas=2",),
        ("watchNamespaces={default,kube-public}",),
        ("crds.keep=false", "networkPolicy.from[0].namespaceSelector.matchLabels.a=b"),
        (
            "rbac.create=false",
            "serviceAccount.create=false",
            "serviceAccount.name=dsv4-operator",
            "networkPolicy.enabled=false",
        ),
    ],
)
def test_the_server_takes_every_mode_and_warns_of_nothing(
    cluster: Cluster, namespace: str, values: tuple[str, ...]
) -> None:
    command = ("apply", "--server-side", "--dry-run=server", "--force-conflicts", "--validate=strict")
    said = cluster.kubectl(*command, "--warnings-as-errors", "-f", "-", input=rendered(*values, namespace=namespace))
    assert said.count("serverside-applied (server dry run)") == len(rendered(*values))


def test_the_plain_manifests_are_taken(cluster: Cluster) -> None:
    files = [word for name in ("crd.yaml", "install.yaml") for word in ("-f", str(ROOT / "manifests" / name))]
    cluster.kubectl("apply", "--server-side", "--force-conflicts", *files)
    try:
        found = cluster.get("deployment/dsv4-operator", "--namespace", "dsv4-system")
        assert found["spec"]["template"]["spec"]["serviceAccountName"] == "dsv4-operator"
    finally:
        cluster.kubectl("delete", "-f", str(ROOT / "manifests" / "install.yaml"), "--wait=false")
    assert cluster.get(f"crd/{DEFINITION}")["status"]["conditions"]


def test_the_pod_is_admitted_where_only_restricted_pods_are(release: Release) -> None:
    release.put("replicas=2")
    pods = ("pods", "--namespace", release.name)
    until("two pods", lambda: len(release.cluster.get(*pods)["items"]) == 2, seconds=PATIENCE)
    # The same pod with fewer restrictions is refused, so the namespace enforces the policy.
    pod = one(rendered(namespace=release.name, release=release.name), "Deployment")["spec"]["template"]
    loose = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "loose", "namespace": release.name}}
    del loose["spec"]["securityContext"]["seccompProfile"]
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        release.cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=[loose])


def test_the_operator_runs_as_configured_in_the_chart_and_a_second_takes_over(
    release: Release, operator_image: str
) -> None:
    cluster = release.cluster
    repository, tag = operator_image.rsplit(":", 1)
    image = (f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never")
    release.put(*image, "replicas=2", f"watchNamespaces={{{release.name}}}")
    wait = ("rollout", "status", f"deployment/{release.operator()}", "--namespace", release.name)
    cluster.kubectl(*wait, "--timeout=180s", seconds=200)

    def leader() -> str:
        spec = cluster.get("lease/dsv4-operator", "--namespace", release.name).get("spec") or {}
        return str(spec.get("holderIdentity") or "")

    first = until("a leader", leader, seconds=PATIENCE)
    pods = {pod["metadata"]["name"] for pod in cluster.get("pods", "--namespace", release.name)["items"]}
    assert first in pods
    metrics = f"/api/v1/namespaces/{release.name}/pods/{first}:8080/proxy/metrics"
    assert "dsv4_operator_leading 1.0" in cluster.kubectl("get", "--raw", metrics)
    service = f"/api/v1/namespaces/{release.name}/services/{release.operator()}-metrics:metrics/proxy/readyz"
    assert cluster.kubectl("get", "--raw", service).strip() == "ok"

    # The replacement pod also tries to get the lease, and could be first: cordoned nodes prevent its start.
    nodes = [one["metadata"]["name"] for one in cluster.get("nodes")["items"] if not one["spec"].get("taints")]
    cluster.kubectl("cordon", *nodes)
    try:
        cluster.kubectl("delete", f"pod/{first}", "--namespace", release.name, "--wait=false")
        second = until("another leader", lambda: leader() not in {"", first} and leader(), seconds=PATIENCE)
    finally:
        cluster.kubectl("uncordon", *nodes)
    assert second in pods, "the one that waited"
    said = cluster.kubectl("logs", f"pod/{second}", "--namespace", release.name)
    assert "forbidden" not in said.lower()
    assert "Traceback" not in said


def test_the_account_has_no_wildcard_and_not_more_than_it_needs(release: Release) -> None:
    cluster, account = release.cluster, release.account
    release.put("replicas=0")
    listed = cluster.kubectl("auth", "can-i", "--list", f"--as={account}", "--namespace", release.name)
    assert "dsv4deployments.dsv4.dev" in listed
    # Only paths that every account may read contain an asterisk, for example /api/*.
    assert [line for line in listed.splitlines() if "*" in line and "[/" not in line] == []
    for verb, resource, namespace in (
        ("list", "dsv4deployments.dsv4.dev", ""),
        ("update", "dsv4deployments.dsv4.dev/status", "default"),
        ("update", "dsv4deployments.dsv4.dev/finalizers", "default"),
        ("create", "pods", "default"),
        ("get", "secrets", "default"),
        ("list", "nodes", ""),
    ):
        assert may(cluster, account, verb, resource, namespace), (verb, resource)
    for verb, resource, namespace in (
        ("list", "secrets", "default"),
        ("update", "secrets", "default"),
        ("create", "pods/exec", "default"),
        ("update", "dsv4deployments.dsv4.dev", "default"),
        ("delete", "dsv4deployments.dsv4.dev", "default"),
        ("patch", "nodes", ""),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io", ""),
        ("create", "serviceaccounts/token", release.name),
        ("get", "leases.coordination.k8s.io", "kube-system"),
    ):
        assert not may(cluster, account, verb, resource, namespace), (verb, resource)
    leases = "leases.coordination.k8s.io"
    assert may(cluster, account, "update", leases, release.name, "dsv4-operator")
    assert not may(cluster, account, "update", leases, release.name, "another")


def test_with_namespaces_the_account_may_nothing_elsewhere(release: Release, namespace: str) -> None:
    cluster, account = release.cluster, release.account
    release.put("replicas=0", f"watchNamespaces={{{namespace}}}")
    assert may(cluster, account, "create", "pods", namespace)
    assert may(cluster, account, "watch", "dsv4deployments.dsv4.dev", namespace)
    assert may(cluster, account, "list", "nodes")
    for verb, resource in (
        ("create", "pods"),
        ("list", "pods"),
        ("get", "secrets"),
        ("list", "dsv4deployments.dsv4.dev"),
    ):
        assert not may(cluster, account, verb, resource, "default")
        assert not may(cluster, account, verb, resource)


def test_users_of_a_namespace_view_its_deployments_and_edit_them_if_enabled(release: Release, namespace: str) -> None:
    cluster = release.cluster
    release.put("replicas=0")
    for role in ("view", "edit"):
        binding = f"--clusterrole={role}", f"--user=dsv4-{role}"
        cluster.kubectl("create", "rolebinding", f"test-{role}", *binding, "--namespace", namespace)
    resource = "dsv4deployments.dsv4.dev"
    until(
        "the cluster's own roles have ours",
        lambda: may(cluster, "dsv4-view", "list", resource, namespace),
        seconds=PATIENCE,
    )
    assert may(cluster, "dsv4-edit", "list", resource, namespace)
    for verb in ("create", "update", "patch", "delete"):
        assert not may(cluster, "dsv4-edit", verb, resource, namespace), verb
    release.put("replicas=0", "rbac.aggregateToEdit=true")
    until(
        "the cluster's own role has our editor",
        lambda: may(cluster, "dsv4-edit", "create", resource, namespace),
        seconds=PATIENCE,
    )
    assert may(cluster, "dsv4-edit", "patch", f"{resource}/scale", namespace)
    assert not may(cluster, "dsv4-view", "create", resource, namespace)
    assert not may(cluster, "dsv4-edit", "update", f"{resource}/status", namespace)
    assert not may(cluster, "dsv4-view", "list", resource, "default")


def test_installed_upgraded_rolled_back_and_gone(release: Release) -> None:
    cluster = release.cluster
    before = release.objects()
    release.put("runtimeImage=first:1")
    # The operator writes this; helm must not revert it.
    held = {"spec": {"holderIdentity": "me", "leaseDurationSeconds": 15}}
    cluster.kubectl(
        "patch", "lease/dsv4-operator", "--namespace", release.name, "--type=merge", f"--patch={json.dumps(held)}"
    )
    cluster.apply({**NANO, "metadata": {"name": "kept", "namespace": release.name}})

    def image() -> str:
        found = cluster.get(f"deployment/{release.operator()}", "--namespace", release.name)
        arguments: list[str] = found["spec"]["template"]["spec"]["containers"][0]["args"]
        return next(word for word in arguments if "runtime-image" in word)

    assert image() == "--runtime-image=first:1"
    installed = release.objects()

    release.put("runtimeImage=second:2", "replicas=2", f"watchNamespaces={{{release.name}}}")
    assert image() == "--runtime-image=second:2"
    assert f"PodDisruptionBudget/{release.operator()}" in release.objects()

    assert cluster.get("lease/dsv4-operator", "--namespace", release.name)["spec"] == held["spec"]

    release.helm("rollback", release.name, "1")
    assert image() == "--runtime-image=first:1"
    # Pods, ReplicaSets and helm's own records change.
    passing = ("Pod/", "ReplicaSet/", "Secret/sh.helm.release")
    kept = {this for this in release.objects() if not this.startswith(passing)}
    assert kept == {this for this in installed if not this.startswith(passing)}

    said = release.helm("uninstall", release.name)
    assert DEFINITION in said
    assert "kept due to the resource policy" in said
    # The garbage collector deletes the ReplicaSets and pods of the Deployment.
    until("nothing", lambda: release.objects() <= before, seconds=PATIENCE)
    assert cluster.get("dsv4/kept", "--namespace", release.name)["spec"]["model"] == NANO["spec"]["model"]
