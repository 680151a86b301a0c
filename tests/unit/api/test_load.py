"""Manifests: accepted ones, and the finding for each mistake."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, load, parse
from dsv4_operator.api.findings import translate
from dsv4_operator.api.spec import EnvVar

NANO = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
"""
PATH = "begin it with /, without colons and control characters"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def changed(path: str, value: object) -> str:
    """Return the Nano manifest with the field at `path` set to `value`; `...` removes the field."""
    data = yaml.safe_load(NANO)
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


Found = tuple[str, object, str]
"""Field, value and reason of a finding."""


def refusal(text: str) -> list[Found]:
    with pytest.raises(InvalidDeployment) as caught:
        load(text)
    return [(one.field, one.to_dict()["value"], one.reason) for one in caught.value.findings]


def test_the_shortest_manifest_has_the_documented_defaults() -> None:
    deployment = load(NANO)
    assert deployment.metadata.namespace == "default"
    assert deployment.served_names == ("nano",)
    assert deployment.spec.topology.world_size == 2
    assert deployment.spec.topology.tensor_parallel == 2
    assert (deployment.spec.network.ports.api, deployment.spec.network.ports.dashboard) == (8000, 8265)
    policy = deployment.spec.recovery.policy()
    assert (policy.max_restarts, policy.window_seconds) == (5, 3600)
    assert (policy.backoff_base_seconds, policy.backoff_max_seconds) == (30, 600)


def test_json_is_accepted_and_written_manifests_load_again() -> None:
    deployment = load(changed("spec.engine", {"kvCacheMemory": "1Gi", "env": [{"name": "A", "value": "1"}]}))
    assert deployment.spec.engine.kv_cache_memory == 2**30
    assert deployment.spec.engine.env == (EnvVar(name="A", value="1"),)
    assert load(deployment.to_json()) == deployment
    assert DSV4Deployment.model_validate_json(deployment.to_json()) == deployment


def test_output_of_kubectl_is_accepted() -> None:
    data = yaml.safe_load(NANO)
    data["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "7", "managedFields": [{}]}
    data["metadata"]["generateName"] = "flash-"
    data["status"] = {"phase": "FromTheFuture", "observedGeneration": 3}
    deployment = parse(data)
    assert deployment.status.observed_generation == 3
    assert deployment.status.phase == "Pending"


def test_all_findings_come_at_once() -> None:
    text = changed("spec.engine", {"maxNumSeqs": "4", "maxModelLenght": 5, "timeouts": {"load": "soon"}})
    assert refusal(text) == [
        ("spec.engine.maxNumSeqs", "4", "WrongType"),
        ("spec.engine.timeouts.load", "soon", "InvalidValue"),
        ("spec.engine.maxModelLenght", None, "UnknownField"),
    ]


BAD_FIELDS: list[tuple[str, object, Found]] = [
    # Names and identity
    ("metadata.name", ..., ("metadata.name", None, "Required")),
    (
        "metadata.name",
        "My_Model",
        ("metadata.name", "My_Model", "InvalidValue"),
    ),
    ("metadata.name", "a" * 46, ("metadata.name", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "TooLong")),
    ("metadata.lables", {}, ("metadata.lables", None, "UnknownField")),
    ("metadata.name", 5, ("metadata.name", 5, "WrongType")),
    ("kind", "Deployment", ("kind", "Deployment", "NotSupported")),
    ("kind", ..., ("kind", None, "Required")),
    ("apiVersion", "dsv4.dev/v1", ("apiVersion", "dsv4.dev/v1", "NotSupported")),
    ("status2", {}, ("status2", None, "UnknownField")),
    # Shapes
    ("spec", ..., ("spec", None, "Required")),
    ("spec", "nano", ("spec", "nano", "WrongType")),
    ("spec.model", ..., ("spec.model", None, "Required")),
    (
        "spec.engine.env",
        {"A": "1"},
        ("spec.engine.env", "a mapping", "WrongType"),
    ),
    ("spec.suspend", "yes", ("spec.suspend", "yes", "WrongType")),
    (
        "spec.replicas",
        True,
        ("spec.replicas", True, "WrongType"),
    ),
    ("spec.replicas", 1.5, ("spec.replicas", 1.5, "WrongType")),
    ("spec.replicas", 33, ("spec.replicas", 33, "OutOfRange")),
    ("spec.replicas", -1, ("spec.replicas", -1, "OutOfRange")),
    ("spec.replica", 1, ("spec.replica", None, "UnknownField")),
    (
        "spec.banana",
        1,
        ("spec.banana", None, "UnknownField"),
    ),
    # Model
    ("spec.model.variant", "Micro", ("spec.model.variant", "Micro", "NotSupported")),
    (
        "spec.model.source",
        {},
        ("spec.model.source", None, "SourceCount"),
    ),
    (
        "spec.model.source",
        {"nano": {}, "path": "/w"},
        ("spec.model.source", None, "SourceCount"),
    ),
    ("spec.model.source.path", "weights", ("spec.model.source.path", "weights", "InvalidValue")),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "flash", "revision": COMMIT}},
        ("spec.model.source.huggingFace.repo", "flash", "InvalidValue"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "a/b", "revision": "main"}},
        ("spec.model.source.huggingFace.revision", "main", "InvalidValue"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "a/b", "revision": COMMIT}},
        ("spec.model.source.huggingFace", None, "NanoSource"),
    ),
    (
        "spec.model.source.nano.precision",
        "fp8",
        ("spec.model.source.nano.precision", "fp8", "NanoPrecision"),
    ),
    (
        "spec.model.servedNames",
        ["x" * 254],
        ("spec.model.servedNames[0]", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", "TooLong"),
    ),
    ("spec.model.servedNames", [], ("spec.model.servedNames", None, "WrongCount")),
    ("spec.model.servedNames", ["a", "a"], ("spec.model.servedNames[1]", "a", "Duplicate")),
    (
        "spec.model.servedNames",
        ["-x"],
        ("spec.model.servedNames[0]", "-x", "InvalidValue"),
    ),
    # Topology
    (
        "spec.topology.hardware",
        "GB10",
        ("spec.model.source.nano.precision", "bf16", "NanoPrecision"),
    ),
    (
        "spec.topology.tensorParallelSize",
        1,
        ("spec.topology.tensorParallelSize", 1, "TensorParallelSize"),
    ),
    (
        "spec.topology.pipelineParallelSize",
        3,
        ("spec.topology.pipelineParallelSize", 3, "PipelineParallelSize"),
    ),
    (
        "spec.topology.nodesPerGroup",
        3,
        ("spec.topology.tensorParallelSize", 3, "TensorParallelDivision"),
    ),
    ("spec.topology.gpusPerNode", 1, ("spec.topology.gpusPerNode", None, "UnknownField")),
    # Engine
    ("spec.engine.maxModelLen", 9000, ("spec.engine.maxModelLen", 9000, "NanoLength")),
    ("spec.engine.max_model_len", 512, ("spec.engine.max_model_len", None, "UnknownField")),
    (
        "spec.engine.kvCacheMemory",
        "8GB",
        ("spec.engine.kvCacheMemory", "8GB", "InvalidValue"),
    ),
    (
        "spec.engine.gpuMemoryUtilization",
        0.5,
        ("spec.engine.gpuMemoryUtilization", 0.5, "NotOnCPU"),
    ),
    (
        "spec.engine.gpuMemoryUtilization",
        "0.5",
        ("spec.engine.gpuMemoryUtilization", "0.5", "WrongType"),
    ),
    (
        "spec.engine",
        {"maxNumSeqs": 128, "maxNumBatchedTokens": 64},
        ("spec.engine.maxNumBatchedTokens", 64, "BatchedTokens"),
    ),
    (
        "spec.engine.extraArgs",
        ["--seed", "1", "--tensor_parallel_size=4"],
        ("spec.engine.extraArgs[2]", "--tensor_parallel_size", "OwnedFlag"),
    ),
    (
        "spec.engine.extraArgs",
        ["-tp", "4"],
        ("spec.engine.extraArgs[0]", "-tp", "OwnedFlag"),
    ),
    (
        "spec.engine.extraArgs",
        ["--max-model", "4"],
        ("spec.engine.extraArgs[0]", "--max-model", "OwnedFlag"),
    ),
    (
        "spec.engine.extraArgs",
        ["seed"],
        ("spec.engine.extraArgs[0]", "seed", "NoFlag"),
    ),
    (
        "spec.engine.env",
        [{"name": "VLLM_HOST_IP", "value": "10.0.0.1"}],
        ("spec.engine.env[0].name", "VLLM_HOST_IP", "OwnedVariable"),
    ),
    (
        "spec.engine.env",
        [{"name": "A B", "value": "1"}],
        ("spec.engine.env[0].name", "A B", "InvalidValue"),
    ),
    (
        "spec.engine.env",
        [{"name": "A", "value": 1}],
        ("spec.engine.env[0].value", 1, "WrongType"),
    ),
    (
        "spec.engine.timeouts.drain",
        30,
        ("spec.engine.timeouts.drain", 30, "InvalidValue"),
    ),
    (
        "spec.engine.timeouts.firstToken",
        "0s",
        ("spec.engine.timeouts.firstToken", "0s", "OutOfRange"),
    ),
    # Placement and storage
    (
        "spec.topology.nodes",
        ["Spark 1"],
        ("spec.topology.nodes[0]", "Spark 1", "InvalidValue"),
    ),
    (
        "spec.topology.tolerations",
        [{"value": "true"}],
        ("spec.topology.tolerations[0].operator", "Equal", "TolerationKey"),
    ),
    (
        "spec.topology.tolerations",
        [{"key": "gpu", "operator": "Exists", "value": "true"}],
        ("spec.topology.tolerations[0].value", "true", "TolerationValue"),
    ),
    (
        "spec.network.rdmaResource",
        "hca",
        ("spec.network.rdmaResource", "hca", "InvalidValue"),
    ),
    ("spec.storage.path", "dsv4", ("spec.storage.path", "dsv4", "InvalidValue")),
    # Network and recovery
    ("spec.network.ports.api", 80, ("spec.network.ports.api", 80, "OutOfRange")),
    ("spec.network.ports.api", 8265, ("spec.network.ports.dashboard", 8265, "Duplicate")),
    (
        "spec.recovery.window",
        "10 minutes",
        ("spec.recovery.window", "10 minutes", "InvalidValue"),
    ),
    (
        "spec.recovery.window",
        "0s",
        ("spec.recovery.window", "0s", "OutOfRange"),
    ),
    (
        "spec.rollout.progressDeadline",
        "0s",
        ("spec.rollout.progressDeadline", "0s", "OutOfRange"),
    ),
    ("spec.rollout.maxUnavailable", 0, ("spec.rollout.maxUnavailable", 0, "OutOfRange")),
    (
        "spec.rollout.strategy",
        "Rolling",
        ("spec.rollout.strategy", "Rolling", "NotSupported"),
    ),
    (
        "spec.recovery.backoff",
        {"base": "20m"},
        ("spec.recovery.backoff.base", "20m", "BackoffBase"),
    ),
]


@pytest.mark.parametrize(("path", "value", "found"), BAD_FIELDS)
def test_each_refusal_names_field_value_and_reason(path: str, value: object, found: Found) -> None:
    assert refusal(changed(path, value)) == [found]


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("spec.topology.nodes", ["a", "b", "a"], ("spec.topology.nodes[2]", "a", "Duplicate")),
        (
            "spec.topology.nodeSelector",
            {"a b": "c"},
            ("spec.topology.nodeSelector", "a b", "InvalidValue"),
        ),
        (
            "spec.topology.nodeSelector",
            {"pool": "a b"},
            ("spec.topology.nodeSelector.pool", "a b", "InvalidValue"),
        ),
    ],
)
def test_values_that_only_the_operator_checks_are_refused_too(path: str, value: object, found: Found) -> None:
    assert refusal(changed(path, value)) == [found]


BAD_TEXTS = [
    (f"spec: {'9' * 5000}", "InvalidYAML", "line 1, column 7: a number has 5000 digits"),
    (f"spec: 0x{'f' * 5000}", "InvalidYAML", "line 1, column 7: a number has 5002 digits"),
    ("", "Empty", ""),
    ("# only a comment\n---\n", "Empty", ""),
    ("hello", "NotAMapping", ""),
    (NANO + "---" + NANO, "SeveralDocuments", "2"),
    ("a: b: c", "InvalidYAML", "line 1, column 5"),
    ("a: 1\na: 2", "InvalidYAML", 'line 2, column 1: the field "a" is a duplicate'),
    ("[" * 3000, "TooDeep", ""),
    ("{a: " * 3000, "TooDeep", ""),
    ("a: \x07", "InvalidYAML", "#x0007"),
]


@pytest.mark.parametrize(("text", "reason", "place"), BAD_TEXTS)
def test_texts_that_are_no_manifest(text: str, reason: str, place: str) -> None:
    with pytest.raises(InvalidDeployment) as caught:
        load(text)
    (found,) = caught.value.findings
    assert (found.field, found.reason) == ("", reason)
    assert place in found.message


def test_flash_on_a_spark_has_one_device_a_machine() -> None:
    data = yaml.safe_load(NANO)
    data["spec"]["model"] = {"variant": "Flash", "source": {"path": "/w"}}
    data["spec"]["topology"] = {"hardware": "GB10", "nodesPerGroup": 1, "devicesPerNode": 2}
    assert refusal(json.dumps(data)) == [("spec.topology.devicesPerNode", 2, "DevicesPerNode")]
    data["spec"]["topology"] = {"hardware": "CPU"}
    assert refusal(json.dumps(data)) == [("spec.topology.hardware", "CPU", "HardwareVariant")]
    data["spec"]["topology"] = {"hardware": "GB10", "nodesPerGroup": 16}
    assert refusal(json.dumps(data)) == [("spec.topology.tensorParallelSize", 16, "TensorParallelDivision")]
    with pytest.raises(InvalidDeployment) as caught:
        load(json.dumps(data))
    assert dict(re.findall(r"(\w+ParallelSize) (\d+)", caught.value.findings[0].remedy)) == {
        "pipelineParallelSize": "2",
        "tensorParallelSize": "8",
    }
    data["spec"]["model"]["source"] = {"nano": {}}
    assert ("spec.model.source.nano", None, "NanoSource") in refusal(json.dumps(data))


def test_the_rules_hold_for_objects_made_in_code_too() -> None:
    good = load(NANO)
    with pytest.raises(ValidationError) as caught:
        DSV4Deployment.model_validate(
            {**good.to_dict(), "spec": {**good.spec.to_dict(), "engine": {"gpuMemoryUtilization": 0.5}}}
        )
    (found,) = translate(caught.value, DSV4Deployment)
    assert (found.field, found.value, found.reason) == ("spec.engine.gpuMemoryUtilization", 0.5, "NotOnCPU")


def test_dates_and_similar_words_stay_text() -> None:
    deployment = load(NANO.replace("metadata: {name: nano}", "metadata: {name: nano, labels: {since: 2026-01-01}}"))
    assert deployment.metadata.labels == {"since": "2026-01-01"}


def test_words_that_yaml_reads_as_booleans_need_quotes() -> None:
    """The remedy for `kernels: off` names the word and not a number."""
    with pytest.raises(InvalidDeployment) as caught:
        load(f"{NANO}  engine: {{kernels: off}}\n")
    (found,) = caught.value.findings
    assert (found.field, found.value, found.reason) == ("spec.engine.kernels", False, "WrongType")
    assert 'for example "off"' in found.remedy
