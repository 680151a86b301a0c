"""Specifications that the cluster's policy does not allow are refused with field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, Finding, parse
from dsv4_operator.api.policy import PolicyError, parse_policy, violations

ROOT = Path(__file__).parents[3]
VALUES = yaml.safe_load((ROOT / "charts" / "dsv4-operator" / "values.yaml").read_text())
OWN = "registry.example/dsv4-runtime:1"


def deployment(**spec: Any) -> DSV4Deployment:
    manifest = yaml.safe_load((ROOT / "examples" / "flash-2x-spark.yaml").read_text())
    manifest["metadata"]["namespace"] = "team"
    for part, fields in spec.items():
        manifest["spec"][part] = {**manifest["spec"].get(part, {}), **fields}
    return parse(manifest)


def refused(policy: ClusterPolicy | None = None, **spec: Any) -> list[Finding]:
    allowed = policy or ClusterPolicy(host_network_namespaces=("team",))
    return list(violations(deployment(**spec), allowed, OWN))


def test_the_charts_values_are_the_operators_defaults() -> None:
    assert ClusterPolicy.model_validate(VALUES["policy"], by_alias=True, by_name=False) == ClusterPolicy()
    assert set(VALUES["policy"]) == {field.alias or name for name, field in ClusterPolicy.model_fields.items()}


def test_allowed_specifications_are_accepted() -> None:
    assert refused() == []
    assert refused(engine={"image": OWN}) == []
    assert refused(storage={"type": "EmptyDir", "path": "/anywhere"}) == []
    assert refused(ClusterPolicy(), network={"mode": "PodNetwork"}) == []
    assert refused(ClusterPolicy(), topology={"nodesPerGroup": 1, "tensorParallelSize": 1}) == []
    # On the pod network no pod requests the RDMA resource.
    other = {"mode": "PodNetwork", "rdmaResource": "example.com/kvm"}
    assert refused(ClusterPolicy(), network=other) == []


CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


@pytest.mark.parametrize(
    ("spec", "field", "value", "reason"),
    [
        ({"storage": {"path": "/"}}, "spec.storage.path", "/", "StoragePath"),
        ({"storage": {"path": "/etc"}}, "spec.storage.path", "/etc", "StoragePath"),
        # Paths below an allowed one are refused too if they belong to another deployment.
        (
            {"storage": {"path": "/var/lib/dsv4/deployments/other/flash"}},
            "spec.storage.path", "/var/lib/dsv4/deployments/other/flash", "StoragePath",
        ),
        ({"storage": {"path": "/var/lib/dsv4/"}}, "spec.storage.path", "/var/lib/dsv4/", "StoragePath"),
        *(
            ({"model": {"source": {name: path}}}, f"spec.model.source.{name}", path, "ModelPath")
            for name, path in (
                ("path", "/root/.ssh"),
                ("path", "/var/lib/dsv4/models/../deployments"),
                ("path", "/var/lib/dsv4/models-of-others"),
                ("path", "//var/lib/dsv4/models/x"),
                ("sharedPath", "/mnt"),
            )
        ),
        ({"engine": {"image": "evil.example/root:1"}}, "spec.engine.image", "evil.example/root:1", "Image"),
        ({"engine": {"image": OWN + "0"}}, "spec.engine.image", OWN + "0", "Image"),
        (
            {"network": {"rdmaResource": "example.com/kvm"}},
            "spec.network.rdmaResource", "example.com/kvm", "RDMAResource",
        ),
        (
            {"topology": {"resourceClaimTemplate": "gpus"}},
            "spec.topology.resourceClaimTemplate", "gpus", "ClaimTemplate",
        ),
        (
            {"topology": {"scheduler": {"type": "Volcano"}}},
            "spec.topology.scheduler.type", "Volcano", "Scheduler",
        ),
        (
            {"topology": {"tolerations": [{"key": CONTROL_PLANE, "operator": "Exists"}]}},
            "spec.topology.tolerations[0].key", CONTROL_PLANE, "Toleration",
        ),
        (
            {"topology": {"tolerations": [{"key": "nvidia.com/gpu"}, {"operator": "Exists"}]}},
            "spec.topology.tolerations[1].key", None, "Toleration",
        ),
    ],
)  # fmt: skip
def test_a_violation_has_field_value_and_reason(spec: dict[str, Any], field: str, value: object, reason: str) -> None:
    if "model" in spec:
        spec = {"model": {"variant": "Flash", **spec["model"]}}
    (found,) = refused(**spec)
    assert (found.field, found.value, found.reason) == (field, value, reason)
    assert "administrator" in found.remedy


def test_the_nodes_network_only_where_it_is_allowed() -> None:
    (found,) = refused(ClusterPolicy(host_network_namespaces=("other",)))
    assert (found.field, found.value, found.reason) == ("spec.network.mode", "HostNetwork", "HostNetwork")
    assert "default of several machines" in found.message
    assert "policy.hostNetworkNamespaces" in found.remedy
    assert refused(ClusterPolicy(host_network_namespaces=("*",))) == []


def test_images_are_allowed_by_name_by_their_beginning_or_by_namespace() -> None:
    image = "registry.example/team/dsv4:2"
    network = ("team",)

    def told(**more: Any) -> list[Finding]:
        return refused(ClusterPolicy(host_network_namespaces=network, **more), engine={"image": image})

    assert told(images=(image,)) == told(images=("registry.example/team/",)) == []
    assert told(any_image_namespaces=("team",)) == told(any_image_namespaces=("*",)) == []
    # A prefix without a final separator is a complete name: registry.example/te is another repository.
    assert len(told(images=("registry.example/te",))) == 1
    assert len(told(any_image_namespaces=("other",))) == 1


def test_a_policy_is_read_as_the_chart_writes_it() -> None:
    text = json.dumps({**VALUES["policy"], "storageRoots": [], "deviceGroups": [44], "runtimeClass": "nvidia"})
    assert parse_policy(text) == ClusterPolicy(storage_roots=(), device_groups=(44,), runtime_class="nvidia")
    assert parse_policy("") == ClusterPolicy()
    with pytest.raises(PolicyError, match="invalid YAML"):
        parse_policy("{")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"storageRoot": ["/x"]}, "policy.storageRoot: unknown field; did you mean storageRoots"),
        ({"storageRoots": ["var"]}, 'policy.storageRoots[0]: "var" is not an absolute directory'),
        ({"modelRoots": ["/a/../b"]}, "policy.modelRoots[0]: "),
        ({"modelRoots": ["/"]}, "policy.modelRoots[0]: "),
        ({"deviceGroups": [0]}, "policy.deviceGroups[0]: 0 is out of range"),
        (
            {"runtimeClass": "Nvidia"},
            'policy.runtimeClass: "Nvidia" is not the name of a RuntimeClass; write a name such as ',
        ),
    ],
)
def test_invalid_policies_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError) as told:
        parse_policy(yaml.safe_dump(data))
    assert words in str(told.value)
