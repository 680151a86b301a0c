"""Specifications that the administrator does not allow: the API server refuses them without an operator, and an
operator refuses them without the API server's rules. Requirements of members on Pod Security."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

import charts
import pytest
import yaml
from clusterkit.client import Cluster, KubectlError
from clusterkit.waiting import until

from dsv4_operator.api import ClusterPolicy, InvalidDeployment, SchedulerType, parse
from dsv4_operator.api.policy import violations
from dsv4_operator.backends.pods.scheduling import Snapshot, facts
from dsv4_operator.builders import frontend, member
from dsv4_operator.planning import plan_group
from dsv4_testkit import specifications
from dsv4_testkit.pod_objects import node

pytestmark = pytest.mark.usefixtures("definition")

OWN = "registry.example/dsv4-runtime:1"
EXAMPLES = charts.ROOT / "examples"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("spec.backend", {"backend": "KubeRay"}),
    ("spec.storage.path", {"storage": {"path": "/"}}),
    ("spec.storage.path", {"storage": {"path": "/var/lib/dsv4/deployments/other/flash"}}),
    ("spec.model.source", {"model": {"source": {"path": "/root/.ssh"}}}),
    ("spec.model.source", {"model": {"source": {"path": "/var/lib/dsv4/models/../deployments"}}}),
    ("spec.model.source", {"model": {"source": {"path": "/var/lib/dsv4/models-of-others"}}}),
    ("spec.model.source", {"model": {"source": {"path": "//var/lib/dsv4/models/x"}}}),
    ("spec.model.source", {"model": {"source": {"sharedPath": "/mnt"}}}),
    ("spec.network.mode", {"topology": {"nodesPerGroup": 2, "tensorParallelSize": 2}}),
    ("spec.network.mode", {"network": {"mode": "HostNetwork"}}),
    ("spec.engine.image", {"engine": {"image": "evil.example/root:1"}}),
    ("spec.engine.image", {"engine": {"image": "registry.example/team-of-others/x:1"}}),
    ("spec.topology.tolerations", {"topology": {"tolerations": [{"operator": "Exists"}]}}),
    ("spec.topology.tolerations", {"topology": {"tolerations": [{"key": "x", "operator": "Exists"}]}}),
]
REFUSED += [
    ("spec.engine", {"engine": engine})
    for engine in (
        {"extraArgs": ["--middleware=x.y"]},
        {"extraArgs": ["--trust_remote_code"]},
        {"extraArgs": ["--trust-remote"]},
        {"extraArgs": ["--seed=1", "--no-enable-log-requests"]},
        {"extraArgs": ["--kv-transfer-config.kv_connector=x"]},
        {"extraArgs": ["--allowed-local-media-path", "/"]},
        {"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]},
        {"env": [{"name": "LD_AUDIT", "value": "/x.so"}]},
        {"env": [{"name": "https_proxy", "value": "http://x"}]},
        {"env": [{"name": "NCCL_NET_PLUGIN", "value": "x"}]},
        {"env": [{"name": "ANYTHING", "value": "x"}]},
    )
]
TAKEN: list[dict[str, Any]] = [
    {"engine": {"extraArgs": ["--seed=1", "--reasoning-parser=x", "--tokenizer-mode=auto"]}},
    {"engine": {"env": [{"name": "OMP_NUM_THREADS", "value": "4"}, {"name": "NCCL_DEBUG", "value": "INFO"}]}},
    {"engine": {"env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]}},
    {},
    {"storage": {"type": "EmptyDir", "path": "/anywhere"}},
    {"model": {"source": {"path": "/var/lib/dsv4/models"}}},
    {"engine": {"image": OWN}},
    {"engine": {"image": "registry.example/team/x:1"}},
    {"topology": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
    {"topology": {"scheduler": {"type": "Kueue", "queue": "models"}}},
    {"topology": {"resourceClaimTemplate": "gpus"}},
    {"topology": {"nodesPerGroup": 2, "tensorParallelSize": 2}, "network": {"mode": "PodNetwork"}},
]
POLICY = ClusterPolicy(images=("registry.example/team/",), claim_templates=("gpus",), schedulers=(SchedulerType.KUEUE,))


def manifest(namespace: str, **spec: Any) -> dict[str, Any]:
    """Return a deployment on one Spark that needs no permission of the administrator."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "flash-2x-spark.yaml").read_text())
    found["metadata"] = {"name": f"t{uuid.uuid4().hex[:8]}", "namespace": namespace}
    found["spec"]["topology"] |= {"nodesPerGroup": 1, "tensorParallelSize": 1}
    for part, fields in spec.items():
        found["spec"][part] = fields if isinstance(fields, str) else {**found["spec"].get(part, {}), **fields}
    return found


def tried(cluster: Cluster, wanted: dict[str, Any], *words: str) -> str:
    """Return the API server's refusal; empty if there is none."""
    try:
        cluster.kubectl("create", "--dry-run=server", *words, "-f", "-", input=[wanted])
    except KubectlError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def installed(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Install the chart for the namespace, without an operator: the API server only has the chart's rules."""
    release = f"p{uuid.uuid4().hex[:8]}"
    values = charts.settings(
        "replicas=0", "crds.enabled=false", f"watchNamespaces={{{namespace}}}", f"runtimeImage={OWN}",
        "rbac.aggregate=false", "policy.images={registry.example/team/}", "policy.claimTemplates={gpus}",
        "policy.schedulers={Kueue}",
    )  # fmt: skip
    place = ("--namespace", namespace, "--wait", "--timeout=100s")
    charts.helm("install", release, str(charts.CHART), *values, *place, env=cluster.environment)
    outlaw = manifest(namespace, storage={"path": "/"})
    until("the API server knows the policy", lambda: tried(cluster, outlaw), seconds=60, every=0.5)
    yield
    charts.helm("uninstall", release, *place, env=cluster.environment)
    until("it does not know it any more", lambda: not tried(cluster, outlaw), seconds=60, every=0.5)


@pytest.fixture
def guarded(cluster: Cluster, namespace: str) -> Iterator[str]:
    with installed(cluster, namespace):
        yield namespace


def test_the_api_server_refuses_exactly_the_specifications_that_the_operator_refuses(
    cluster: Cluster, guarded: str
) -> None:
    for field, spec in REFUSED:
        wanted = manifest(guarded, **spec)
        said = tried(cluster, wanted)
        assert field in said, (spec, said)
        assert "administrator" in said
        assert violations(parse(wanted), POLICY, OWN), spec
    for spec in TAKEN:
        wanted = manifest(guarded, **spec)
        assert tried(cluster, wanted) == "", spec
        assert not violations(parse(wanted), POLICY, OWN), spec
    # Other namespaces are subject to other releases.
    assert tried(cluster, manifest("default", storage={"path": "/"})) == ""


def test_link_local_addresses_are_refused_in_every_notation(cluster: Cluster, guarded: str) -> None:
    """The definition covers the usual notations and the policy the others: together they match the models."""
    for url in (
        "http://2852039166/x", "http://0xa9fea9fe/", "http://0251.0376.0251.0376/", "http://169.16689662/",
        "http://metadata/",
        "http://[64:ff9b::a9fe:a9fe]/", "http://100.100.100.200/x",
    ):  # fmt: skip
        for engine in (
            {"env": [{"name": "HF_ENDPOINT", "value": url}]},
            {"env": [{"name": "VLLM_LOGGING_PREFIX", "value": url}]},
            {"extraArgs": ["--seed", url]},
        ):
            wanted = manifest(guarded, engine=engine)
            assert "link-local" in tried(cluster, wanted), engine
            with pytest.raises(InvalidDeployment, match="link-local"):
                parse(wanted)


def test_policy_and_operator_agree_on_random_specifications(cluster: Cluster, guarded: str) -> None:
    url = f"/apis/dsv4.dev/v1alpha1/namespaces/{guarded}/dsv4deployments"
    for told, wanted in specifications.drawn(300, 5):
        if told == "identified":
            continue
        wanted["metadata"]["namespace"] = guarded
        answer = cluster.http.post(url, params={"dryRun": "All", "fieldValidation": "Strict"}, json=wanted)
        try:
            refused = "; ".join(map(str, violations(parse(wanted), POLICY, OWN)))
        except InvalidDeployment as error:
            refused = str(error)
        assert (answer.status_code == 201) == (not refused), (told, answer.text[:500], refused)


def test_deployments_older_than_the_policy_can_be_labelled_and_stopped(cluster: Cluster, namespace: str) -> None:
    stops = {"suspend": (True, False), "replicas": (0, 1)}
    old = {field: manifest(namespace, storage={"path": "/"}) for field in stops}
    cluster.kubectl("create", "-f", "-", input=list(old.values()))
    with installed(cluster, namespace):
        for field, (stop, go) in stops.items():
            name = old[field]["metadata"]["name"]
            patch = ("patch", "dsv4", name, "-n", namespace, "--type=merge", "-p")
            cluster.kubectl("label", "dsv4", name, "-n", namespace, "team=a")
            cluster.kubectl(*patch, json.dumps({"spec": {field: stop}}))
            with pytest.raises(KubectlError, match=r"spec\.storage\.path"):
                cluster.kubectl(*patch, json.dumps({"spec": {field: go}}))


@pytest.mark.parametrize("stopped", [{"suspend": True}, {"replicas": 0}])
def test_a_new_stopped_deployment_is_checked_too(cluster: Cluster, guarded: str, stopped: dict[str, Any]) -> None:
    """`kubectl scale` starts it, and neither a policy nor a webhook checks its specification then."""
    for _, spec in REFUSED[:1] + REFUSED[-3:]:
        wanted = manifest(guarded, **spec)
        wanted["spec"] |= stopped
        assert "administrator" in tried(cluster, wanted)
    taken = manifest(guarded)
    taken["spec"] |= stopped
    cluster.kubectl("create", "-f", "-", input=[taken])
    change = '{"spec": {"storage": {"path": "/"}}}'
    with pytest.raises(KubectlError, match=r"spec\.storage\.path"):
        cluster.kubectl("patch", "dsv4", taken["metadata"]["name"], "-n", guarded, "--type=merge", "-p", change)


def test_secrets_in_a_specification_are_refused(cluster: Cluster, namespace: str) -> None:
    token = "hf_" + "aB3" * 12
    for engine in (
        {"env": [{"name": "HF_TOKEN", "value": "x"}]},
        {"env": [{"name": "hf_token", "value": "x"}]},
        {"env": [{"name": "MINE", "value": token}]},
        {"extraArgs": ["--api-key", "x"]},
        {"extraArgs": ["--seed", token]},
    ):
        wanted = manifest(namespace, engine=engine)
        said = tried(cluster, wanted)
        assert "secret" in said or "is set by dsv4" in said, (engine, said)
    old = manifest(namespace, model={"source": {"http": {"url": "https://a.example/x", "credentialsFile": "/x"}}})
    assert "credentialsFile" in tried(cluster, old, "--validate=strict")


def pods(namespace: str, **spec: Any) -> list[dict[str, Any]]:
    """Return the pods of the nano example."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "nano.yaml").read_text())
    found["metadata"] = {"name": "nano", "namespace": namespace, "uid": "5b0c6f52-0000-0000-0000-000000000000"}
    found["spec"] |= spec
    wanted = parse(found)
    nodes = Snapshot.of_pods((node("node-a"), node("node-b")), ())
    plan = plan_group(wanted, facts(wanted, nodes), group=0, incarnation=1)
    host = member.Host(ClusterPolicy(), OWN)
    gateway = frontend.gateway_deployment(wanted, 0, image=OWN)["spec"]["template"]  # type: ignore[index]
    about = {"name": "gateway", "namespace": namespace, "labels": gateway["metadata"]["labels"]}
    return [
        member.member_pod(wanted, plan, 0, host=host),
        {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": gateway["spec"]},
    ]


def test_members_without_a_directory_of_the_node_are_admitted_where_only_restricted_pods_are(
    cluster: Cluster, namespace: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for pod in pods(namespace, storage={"type": "EmptyDir"}):
        pod["metadata"].pop("ownerReferences", None)
        assert tried(cluster, pod) == ""
    on_node, gateway = pods(namespace)
    assert "hostPath" in tried(cluster, on_node)
    assert tried(cluster, gateway) == ""


def test_rights_of_the_roles_agree_with_the_documentation(cluster: Cluster, guarded: str) -> None:
    """The table of docs/trust.md, by `kubectl auth can-i`."""
    release = f"roles-{guarded}"
    roles = [
        one
        for one in charts.rendered("rbac.create=false", "crds.enabled=false", release=release, namespace=guarded)
        if one["kind"] == "ClusterRole"
    ]
    names = {one["metadata"]["name"].rpartition("-")[2]: one["metadata"]["name"] for one in roles}
    cluster.apply(*roles)
    try:
        for role, name in names.items():
            cluster.kubectl("create", "rolebinding", role, f"--clusterrole={name}", f"--user={role}", "-n", guarded)
        cluster.kubectl("create", "rolebinding", "plain", "--clusterrole=edit", "--user=plain", "-n", guarded)
        table = {
            # verb and resource: viewer, editor, and a user with `edit` alone
            "get dsv4deployments.dsv4.dev": (True, False, True),
            "create dsv4deployments.dsv4.dev": (False, True, False),
            "patch dsv4deployments.dsv4.dev --subresource=scale": (False, True, False),
            "patch dsv4deployments.dsv4.dev --subresource=status": (False, False, False),
            "get secrets": (False, False, True),
            "create pods": (False, False, True),
            "update configmaps": (False, False, True),
        }
        for asked, expected in table.items():
            found = tuple(may(cluster, user, asked, guarded) for user in ("viewer", "editor", "plain"))
            assert found == expected, asked
        for user in ("viewer", "editor", "plain"):
            for asked in (
                "update validatingadmissionpolicies.admissionregistration.k8s.io",
                "delete validatingadmissionpolicybindings.admissionregistration.k8s.io",
                "patch nodes",
            ):
                assert not may(cluster, user, asked, guarded), (user, asked)
        assert not may(cluster, "editor", "create dsv4deployments.dsv4.dev", "default")
    finally:
        for name in names.values():
            cluster.kubectl("delete", "clusterrole", name, "--ignore-not-found")


def may(cluster: Cluster, user: str, asked: str, namespace: str) -> bool:
    try:
        said = cluster.kubectl("auth", "can-i", *asked.split(), f"--as={user}", "-n", namespace)
    except KubectlError as error:
        said = str(error)
    return said.strip().splitlines()[-1] == "yes"
