"""Reading manifests: what is taken, and the sentence for each thing that is not."""

from __future__ import annotations

import json

import pytest
import yaml
from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment, InvalidDeployment, load, parse
from dsv4_operator.api.deployment import LONGEST_NAME
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
    """The Nano manifest with the field at `path` set to `value`; `...` removes it."""
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


def refusal(text: str) -> str:
    with pytest.raises(InvalidDeployment) as caught:
        load(text)
    return str(caught.value)


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


def test_json_is_read_too_and_what_is_written_is_read_back() -> None:
    deployment = load(changed("spec.engine", {"kvCacheMemory": "1Gi", "env": [{"name": "A", "value": "1"}]}))
    assert deployment.spec.engine.kv_cache_memory == 2**30
    assert deployment.spec.engine.env == (EnvVar(name="A", value="1"),)
    assert load(deployment.to_json()) == deployment
    assert DSV4Deployment.model_validate_json(deployment.to_json()) == deployment


def test_what_kubectl_prints_is_read() -> None:
    data = yaml.safe_load(NANO)
    data["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "7", "managedFields": [{}]}
    data["metadata"]["generateName"] = "flash-"
    data["status"] = {"phase": "FromTheFuture", "observedGeneration": 3}
    deployment = parse(data)
    assert deployment.status.observed_generation == 3
    assert deployment.status.phase == "Pending"


def test_all_findings_come_at_once() -> None:
    text = changed("spec.engine", {"maxNumSeqs": "4", "maxModelLenght": 5, "timeouts": {"load": "soon"}})
    assert refusal(text).splitlines() == [
        'spec.engine.maxNumSeqs: "4" is not a whole number; write it without quotes and without a fraction',
        'spec.engine.timeouts.load: "soon" is not a duration; '
        "write it as Kubernetes does, for example 90s, 10m or 1h30m",
        "spec.engine.maxModelLenght: unknown field; did you mean maxModelLen?",
    ]


BAD_FIELDS: list[tuple[str, object, str]] = [
    # Names and identity.
    ("metadata.name", ..., "metadata.name: is required; write name: and lower-case letters, digits and dashes"),
    (
        "metadata.name",
        "My_Model",
        'metadata.name: "My_Model" is not a name; use lower-case letters, digits and dashes, beginning with a letter',
    ),
    ("metadata.name", "a" * 46, f'metadata.name: "{"a" * 46}" has 46 characters; shorten it to {LONGEST_NAME}'),
    ("metadata.lables", {}, "metadata.lables: unknown field; did you mean labels?"),
    ("metadata.name", 5, 'metadata.name: 5 is not text; put it in quotes, for example "1"'),
    ("kind", "Deployment", 'kind: "Deployment" is not known here; write DSV4Deployment'),
    ("kind", ..., "kind: is required; write kind: DSV4Deployment"),
    ("apiVersion", "dsv4.dev/v1", 'apiVersion: "dsv4.dev/v1" is not known here; write dsv4.dev/v1alpha1'),
    ("status2", {}, "status2: unknown field; did you mean status?"),
    # Shapes.
    ("spec", ..., "spec: is required; write spec: with model: and topology: below it"),
    ("spec", "nano", 'spec: "nano" is not a mapping; write its fields indented below it'),
    ("spec.model", ..., "spec.model: is required; write model: with variant: and source: below it"),
    (
        "spec.engine.env",
        {"A": "1"},
        "spec.engine.env: a mapping is not a list; write one entry a line, each after a dash",
    ),
    ("spec.suspend", "yes", 'spec.suspend: "yes" is not true or false; write one of them without quotes'),
    (
        "spec.replicas",
        True,
        "spec.replicas: true is not a whole number; write it without quotes and without a fraction",
    ),
    ("spec.replicas", 1.5, "spec.replicas: 1.5 is not a whole number; write it without quotes and without a fraction"),
    ("spec.replicas", 33, "spec.replicas: 33 is out of range; the most is 32"),
    ("spec.replicas", -1, "spec.replicas: -1 is out of range; the least is 0"),
    ("spec.replica", 1, "spec.replica: unknown field; did you mean replicas?"),
    (
        "spec.banana",
        1,
        "spec.banana: unknown field; known here: "
        "suspend, backend, replicas, model, topology, engine, network, recovery, rollout, gateway, storage",
    ),
    # The model.
    ("spec.model.variant", "Micro", 'spec.model.variant: "Micro" is unknown; use one of Nano, Flash, Pro'),
    (
        "spec.model.source",
        {},
        "spec.model.source: is empty; give exactly one of nano, path, huggingFace, s3, http, sharedPath",
    ),
    (
        "spec.model.source",
        {"nano": {}, "path": "/w"},
        "spec.model.source: has nano and path; give exactly one of nano, path, huggingFace, s3, http, sharedPath",
    ),
    ("spec.model.source.path", "weights", 'spec.model.source.path: "weights" is not an absolute path; ' + PATH),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "flash", "revision": COMMIT}},
        'spec.model.source.huggingFace.repo: "flash" is not a repository; '
        "write OWNER/NAME, for example deepseek-ai/DeepSeek-V4-Flash",
    ),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "a/b", "revision": "main"}},
        'spec.model.source.huggingFace.revision: "main" is not a commit; '
        "write all 40 hex digits, so that the weights cannot change",
    ),
    (
        "spec.model.source",
        {"huggingFace": {"repo": "a/b", "revision": COMMIT}},
        "spec.model.source.huggingFace: the variant Nano is not published; "
        "give nano instead, for example nano: {seed: 0}",
    ),
    (
        "spec.model.source.nano.precision",
        "fp8",
        "spec.model.source.nano.precision: fp8 does not run on CPU; write bf16",
    ),
    (
        "spec.model.servedNames",
        ["x" * 254],
        f'spec.model.servedNames[0]: "{"x" * 57}..." has 254 characters; shorten it to 253',
    ),
    ("spec.model.servedNames", [], "spec.model.servedNames: has 0 entries; at least 1 needed"),
    ("spec.model.servedNames", ["a", "a"], 'spec.model.servedNames[1]: "a" is there twice; remove one'),
    (
        "spec.model.servedNames",
        ["-x"],
        'spec.model.servedNames[0]: "-x" is not a model name; write for example deepseek-v4-flash',
    ),
    # The topology.
    (
        "spec.topology.hardware",
        "GB10",
        "spec.model.source.nano.precision: bf16 runs on CPU only, not on GB10; write fp8",
    ),
    (
        "spec.topology.tensorParallelSize",
        1,
        "spec.topology.tensorParallelSize: 1 × pipelineParallelSize 1 is not the 2 devices of a group "
        "(nodesPerGroup 2 × devicesPerNode 1); write 2, or leave it out",
    ),
    (
        "spec.topology.pipelineParallelSize",
        3,
        "spec.topology.pipelineParallelSize: 3 does not divide the 2 devices of a group "
        "(nodesPerGroup 2 × devicesPerNode 1); choose a divisor",
    ),
    (
        "spec.topology.nodesPerGroup",
        3,
        "spec.topology.tensorParallelSize: 3 cannot divide the layers of Nano, but 1, 2 can; "
        "for 3 devices write pipelineParallelSize 3 and tensorParallelSize 1",
    ),
    ("spec.topology.gpusPerNode", 1, "spec.topology.gpusPerNode: unknown field; did you mean devicesPerNode?"),
    # The engine.
    ("spec.engine.maxModelLen", 9000, "spec.engine.maxModelLen: 9000 is more than Nano has; the most is 8192"),
    ("spec.engine.max_model_len", 512, "spec.engine.max_model_len: unknown field; did you mean maxModelLen?"),
    (
        "spec.engine.kvCacheMemory",
        "8GB",
        'spec.engine.kvCacheMemory: "8GB" is not a quantity; write it as Kubernetes does, for example 512Mi or 8Gi',
    ),
    (
        "spec.engine.gpuMemoryUtilization",
        0.5,
        "spec.engine.gpuMemoryUtilization: 0.5 has no meaning on CPU; use kvCacheMemory, for example 512Mi",
    ),
    (
        "spec.engine.gpuMemoryUtilization",
        "0.5",
        'spec.engine.gpuMemoryUtilization: "0.5" is not a number; write it without quotes, for example 0.8',
    ),
    (
        "spec.engine",
        {"maxNumSeqs": 128, "maxNumBatchedTokens": 64},
        "spec.engine.maxNumBatchedTokens: 64 is less than maxNumSeqs 128; "
        "every request needs a token in a step, so raise it",
    ),
    (
        "spec.engine.extraArgs",
        ["--seed", "1", "--tensor_parallel_size=4"],
        'spec.engine.extraArgs[2]: "--tensor_parallel_size" is set by dsv4; use spec.topology.tensorParallelSize',
    ),
    (
        "spec.engine.extraArgs",
        ["-tp", "4"],
        'spec.engine.extraArgs[0]: "-tp" is set by dsv4; use spec.topology.tensorParallelSize',
    ),
    (
        "spec.engine.extraArgs",
        ["--max-model", "4"],
        'spec.engine.extraArgs[0]: "--max-model" is set by dsv4; '
        "write flags in full if you meant another one than --max-model-len",
    ),
    (
        "spec.engine.extraArgs",
        ["seed"],
        'spec.engine.extraArgs[0]: "seed" is no flag; begin with one, for example --seed',
    ),
    (
        "spec.engine.env",
        [{"name": "VLLM_HOST_IP", "value": "10.0.0.1"}],
        'spec.engine.env[0].name: "VLLM_HOST_IP" is set by dsv4; remove it',
    ),
    (
        "spec.engine.env",
        [{"name": "A B", "value": "1"}],
        'spec.engine.env[0].name: "A B" is not the name of an environment variable; use letters, digits and _',
    ),
    (
        "spec.engine.env",
        [{"name": "A", "value": 1}],
        'spec.engine.env[0].value: 1 is not text; put it in quotes, for example "1"',
    ),
    (
        "spec.engine.timeouts.drain",
        30,
        "spec.engine.timeouts.drain: 30 has no unit; write it as Kubernetes does, for example 30s",
    ),
    (
        "spec.engine.timeouts.firstToken",
        "0s",
        "spec.engine.timeouts.firstToken: 0s is out of range; write 1ms to 8760h, for example 2m",
    ),
    # Where on a cluster.
    (
        "spec.topology.nodes",
        ["Spark 1"],
        'spec.topology.nodes[0]: "Spark 1" is not the name of a node; write it as kubectl get nodes does',
    ),
    (
        "spec.topology.tolerations",
        [{"value": "true"}],
        "spec.topology.tolerations[0].operator: Equal needs a key; write one, or operator Exists for every taint",
    ),
    (
        "spec.topology.tolerations",
        [{"key": "gpu", "operator": "Exists", "value": "true"}],
        'spec.topology.tolerations[0].value: "true" has no meaning with Exists; remove it',
    ),
    (
        "spec.network.rdmaResource",
        "hca",
        'spec.network.rdmaResource: "hca" is not the name of a device resource; '
        "write for example rdma/hca_shared_devices_a",
    ),
    ("spec.storage.path", "dsv4", 'spec.storage.path: "dsv4" is not an absolute path; ' + PATH),
    # The network and the recovery.
    ("spec.network.ports.api", 80, "spec.network.ports.api: 80 is out of range; the least is 1024"),
    ("spec.network.ports.api", 8265, "spec.network.ports.dashboard: 8265 is also ports.api; choose another one"),
    (
        "spec.recovery.window",
        "10 minutes",
        'spec.recovery.window: "10 minutes" is not a duration; '
        "write it as Kubernetes does, for example 90s, 10m or 1h30m",
    ),
    (
        "spec.recovery.window",
        "0s",
        "spec.recovery.window: 0s is out of range; write 1ms to 8760h, for example 1h",
    ),
    (
        "spec.rollout.progressDeadline",
        "0s",
        "spec.rollout.progressDeadline: 0s is out of range; write 1ms to 8760h, for example 1h",
    ),
    ("spec.rollout.maxUnavailable", 0, "spec.rollout.maxUnavailable: 0 is out of range; the least is 1"),
    (
        "spec.rollout.strategy",
        "Rolling",
        'spec.rollout.strategy: "Rolling" is unknown; use one of Recreate, RollingUpdate',
    ),
    (
        "spec.recovery.backoff",
        {"base": "20m"},
        "spec.recovery.backoff.base: 20m is more than backoff.max 10m; lower base or raise max",
    ),
]


@pytest.mark.parametrize(("path", "value", "sentence"), BAD_FIELDS)
def test_each_refusal_names_field_value_and_remedy(path: str, value: object, sentence: str) -> None:
    assert refusal(changed(path, value)) == sentence


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("spec.topology.nodes", ["a", "b", "a"], 'spec.topology.nodes[2]: "a" is there twice; remove one'),
        (
            "spec.topology.nodeSelector",
            {"a b": "c"},
            'spec.topology.nodeSelector: "a b" is not the key of a label; write for example kubernetes.io/arch',
        ),
        (
            "spec.topology.nodeSelector",
            {"pool": "a b"},
            'spec.topology.nodeSelector.pool: "a b" is not the value of a label; use letters, digits, -, _ and .',
        ),
    ],
)
def test_what_the_api_server_leaves_to_the_operator_is_refused_too(path: str, value: object, sentence: str) -> None:
    assert refusal(changed(path, value)) == sentence


BAD_TEXTS = [
    ("", "the text is empty; begin with apiVersion: dsv4.dev/v1alpha1"),
    ("# only a comment\n---\n", "the text is empty; begin with apiVersion: dsv4.dev/v1alpha1"),
    ("hello", "a DSV4Deployment is a mapping that begins with apiVersion: dsv4.dev/v1alpha1"),
    (
        NANO + "---" + NANO,
        "the text has 2 documents; keep one DSV4Deployment a file, without further --- lines",
    ),
    ("a: b: c", "not valid YAML: line 1, column 5: mapping values are not allowed here"),
    ("a: 1\na: 2", 'not valid YAML: line 2, column 1: the field "a" is there twice; remove one'),
    ("[" * 3000, "mappings and lists are nested too deeply; remove brackets"),
    ("{a: " * 3000, "mappings and lists are nested too deeply; remove brackets"),
    ("a: \x07", "not valid YAML: unacceptable character #x0007: special characters are not allowed"),
]


@pytest.mark.parametrize(("text", "beginning"), BAD_TEXTS)
def test_texts_that_are_no_manifest(text: str, beginning: str) -> None:
    assert refusal(text).startswith(beginning)


def test_flash_on_a_spark_has_one_device_a_machine() -> None:
    data = yaml.safe_load(NANO)
    data["spec"]["model"] = {"variant": "Flash", "source": {"path": "/w"}}
    data["spec"]["topology"] = {"hardware": "GB10", "nodesPerGroup": 1, "devicesPerNode": 2}
    assert refusal(json.dumps(data)) == (
        "spec.topology.devicesPerNode: 2 does not fit GB10, which has one device a machine; write 1"
    )
    data["spec"]["topology"] = {"hardware": "CPU"}
    assert "CPU is only for the variant Nano, Flash needs accelerators" in refusal(json.dumps(data))
    data["spec"]["topology"] = {"hardware": "GB10", "nodesPerGroup": 16}
    assert (
        "16 cannot divide the layers of Flash, but 1, 2, 4, 8 can; for 16 devices write pipelineParallelSize 2"
        in refusal(json.dumps(data))
    )
    data["spec"]["model"]["source"] = {"nano": {}}
    assert "only the variant Nano is made on the spot, not Flash" in refusal(json.dumps(data))


def test_the_rules_hold_for_objects_made_in_code_too() -> None:
    good = load(NANO)
    with pytest.raises(ValidationError, match="has no meaning on CPU"):
        DSV4Deployment.model_validate(
            {**good.to_dict(), "spec": {**good.spec.to_dict(), "engine": {"gpuMemoryUtilization": 0.5}}}
        )


def test_dates_and_similar_words_stay_text() -> None:
    deployment = load(NANO.replace("metadata: {name: nano}", "metadata: {name: nano, labels: {since: 2026-01-01}}"))
    assert deployment.metadata.labels == {"since": "2026-01-01"}
