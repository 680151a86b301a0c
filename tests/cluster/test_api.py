"""The CustomResourceDefinition on the real API server: validation, defaults, pruning and output of kubectl."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterkit.client import Cluster, KubectlError

from dsv4_operator.api import API_VERSION, STORED_VERSION, InvalidDeployment, parse
from dsv4_operator.api.deployment import API_VERSIONS
from dsv4_testkit import specifications

ROOT = Path(__file__).parents[2]
NANO = yaml.safe_load((ROOT / "examples" / "nano.yaml").read_text())
PATH = f"/apis/{NANO['apiVersion']}/namespaces/{{}}/dsv4deployments"

# The same invalid documents as for the models (tests/unit/api/test_load.py).
_spec = importlib.util.spec_from_file_location("load_tests", ROOT / "tests" / "unit" / "api" / "test_load.py")
assert _spec
assert _spec.loader
load_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(load_tests)

pytestmark = pytest.mark.usefixtures("definition")


def create(cluster: Cluster, namespace: str, manifest: dict[str, Any], *, dry: bool) -> tuple[int, dict[str, Any]]:
    query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry else {})}
    version = manifest.get("apiVersion")
    url = f"/apis/{version if version in API_VERSIONS else API_VERSION}/namespaces/{namespace}/dsv4deployments"
    answer = cluster.http.post(url, params=query, json=manifest)
    return answer.status_code, answer.json()


def names_the_field(message: str, path: str) -> bool:
    """Return whether the message names the field, or the parent field to which a rule applies."""
    if path in {"kind", "apiVersion"}:
        # The server's own message, from before it knows the definition of the object.
        return path.removeprefix("api").lower() in message.lower()
    parts = re.sub(r"\[\d+\]", "", path).split(".")
    return parts[-1] in message or (len(parts) > 1 and ".".join(parts[:-1]) in message)


@pytest.mark.parametrize(("path", "value", "sentence"), load_tests.BAD_FIELDS)
def test_each_mistake_is_refused_with_its_field(cluster: Cluster, path: str, value: object, sentence: str) -> None:
    manifest = yaml.safe_load(load_tests.changed(path, value))
    status, said = create(cluster, "default", manifest, dry=True)
    assert status in {400, 409, 422}, f"the models refuse it ({sentence}), the API server said {said}"
    assert names_the_field(said["message"], path), said["message"]


def decided(cluster: Cluster, made: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, str]]:
    """Return the responses of the API server to dry-run creations, four at a time."""

    def one(told: tuple[str, dict[str, Any]]) -> tuple[int, str]:
        status, said = create(cluster, "default", told[1], dry=True)
        return status, said.get("message", "") if status != 201 else ""

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(one, made))


def python_refuses(manifest: dict[str, Any]) -> str:
    try:
        parse(json.loads(json.dumps(manifest)))
    except InvalidDeployment as error:
        return str(error)
    return ""


def left_to_python(told: str) -> bool:
    """Return whether a refusal is one that the definition cannot contain within the cost limit of API servers.

    These are rare notations of a link-local address in text for the engine, and the form of a variable that names an
    endpoint. The policy of the chart checks both.
    """
    return "spec.engine.env[" in told or "spec.engine.extraArgs[" in told


@pytest.mark.parametrize("seed", [1, 2])
def test_the_definition_and_the_models_take_the_same_objects(cluster: Cluster, seed: int) -> None:
    """Many objects with one unusual value, with several related values, and with unusual names and labels."""
    made = specifications.drawn(400, seed)
    for _, manifest in made:
        manifest["apiVersion"] = API_VERSIONS[seed % len(API_VERSIONS)]
    began = time.monotonic()
    answers = decided(cluster, made)
    assert time.monotonic() - began < 60
    taken = 0
    for (told, manifest), (status, said) in zip(made, answers, strict=True):
        assert status in {201, 400, 422}, said
        refused = python_refuses(manifest)
        taken += status == 201
        if status == 201 and refused:
            assert all(map(left_to_python, refused.splitlines())), f"{told}: the models say {refused}"
        elif status != 201:
            assert refused, f"{told}: the API server says {said}"
    assert 100 < taken < len(made) - 100


def test_no_refusal_repeats_a_secret(cluster: Cluster) -> None:
    """A text that looks like a secret, alone and within others, in every field of a specification."""
    token = specifications.TOKEN
    texts = [
        token,
        f"https://user:{token}@store.example/x",
        f"https://store.example/x?token={token}",
        f" {token}",
        token * 300,
    ]
    made = [
        (path, specifications.placed(path, value))
        for path, schema in specifications.fields()
        if path != "replicas"  # A number, which Kubernetes reads for `kubectl scale` before validation.
        for text in texts
        for value in ((text, [text], [text, text], {"a": text}) if schema.get("type") != "string" else (text,))
        # API servers repeat duplicates of a set, and an entry without the key that identifies entries.
        if not isinstance(value, list) or schema.get("x-kubernetes-list-type", "atomic") == "atomic"
        if path not in {"engine.env[]", "engine.imagePullSecrets[]", "network.fabric.members[]"}
    ]
    answers = decided(cluster, made)
    for (path, manifest), (status, said) in zip(made, answers, strict=True):
        assert token[8:] not in said, f"{path}: {said:.500}"
        assert token[8:] not in python_refuses(manifest), path
        assert status != 500
    assert sum(status != 201 for status, _ in answers) > len(made) / 2


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("engine.gpuMemoryUtilization", 2, "Forbidden: is out of range; write 0.1 to 0.99"),
        ("gateway.drain", "9999999999999999h", "is out of range; write 0s to 8760h"),
        ("gateway.maxHeldBytes", "9e99", "Forbidden: is out of range; write 0 to 1Ei"),
        ("engine.timeouts.load", "0s", "Forbidden: is out of range; write 1ms to 8760h, for example 2m"),
        ("topology.hardware", "GB11", "Forbidden: is not supported; use one of CPU, GB10, RTXPRO6000, H100, H200"),
        ("replicas", 33, "should be less than or equal to 32"),
    ],
)
def test_the_api_server_names_bounds_in_the_notation_of_the_specification(
    cluster: Cluster, path: str, value: object, sentence: str
) -> None:
    status, said = create(cluster, "default", specifications.placed(path, value), dry=True)
    assert status == 422
    assert f"spec.{path}: " in said["message"]
    assert sentence in said["message"]


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_taken(cluster: Cluster, file: Path) -> None:
    manifest = yaml.safe_load(file.read_text())
    status, said = create(cluster, "default", manifest, dry=True)
    if "hardware" in manifest["spec"]["topology"]:
        assert status == 201, said
        return
    # Only `dsv4 up` knows the machine.
    assert status == 422
    assert "spec.topology.hardware: Required value" in said["message"]
    manifest["spec"]["topology"]["hardware"] = "H100"
    status, said = create(cluster, "default", manifest, dry=True)
    assert status == 201, said["message"]


def test_the_backend_cannot_change(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    url, patch = f"{PATH.format(namespace)}/nano", {"Content-Type": "application/merge-patch+json"}
    answer = cluster.http.patch(url, json={"spec": {"backend": "Other"}}, headers=patch)
    assert answer.status_code == 422
    assert "backend: is immutable; delete the deployment and create another one" in answer.json()["message"]
    # The default has this value.
    answer = cluster.http.patch(url, json={"spec": {"backend": "Pods", "replicas": 2}}, headers=patch)
    assert answer.status_code == 200, answer.json()


@pytest.mark.parametrize(
    ("name", "spec", "field"),
    [
        ("a" * 36, {}, None),
        ("a" * 37, {}, "metadata.name"),
        ("nano", {"engine": {"executor": "MP"}}, "engine.executor"),
        ("nano", {"topology": {**NANO["spec"]["topology"], "scheduler": {"type": "Volcano"}}}, "topology.scheduler"),
    ],
)
def test_fields_that_kuberay_excludes_are_refused(
    cluster: Cluster, name: str, spec: dict[str, Any], field: str | None
) -> None:
    wanted = {**NANO, "metadata": {"name": name, "namespace": "default"}, "spec": {**NANO["spec"], **spec}}
    assert create(cluster, "default", wanted, dry=True)[0] == 201
    wanted["spec"]["backend"] = "KubeRay"
    status, said = create(cluster, "default", wanted, dry=True)
    assert status == (201 if field is None else 422), said
    assert field is None or field in said["message"]


def test_the_variant_cannot_change(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    answer = cluster.http.patch(
        f"{PATH.format(namespace)}/nano",
        json={"spec": {"model": {"variant": "Flash"}}},
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert answer.status_code == 422
    message = "spec.model.variant: Forbidden: is immutable; delete the deployment and create another one"
    assert message in answer.json()["message"]


def test_defaults_are_filled_in_and_unknown_fields_dropped(cluster: Cluster, namespace: str) -> None:
    manifest = copy.deepcopy(NANO)
    manifest["spec"]["banana"] = 1
    manifest["spec"]["engine"]["banana"] = {"ripe": True}
    # Without strict validation, which older clients use, unknown fields are pruned and not stored.
    answer = cluster.http.post(PATH.format(namespace), params={"fieldValidation": "Ignore"}, json=manifest)
    assert answer.status_code == 201, answer.json()
    stored = cluster.http.get(f"{PATH.format(namespace)}/nano").json()
    assert "banana" not in stored["spec"]
    assert "banana" not in stored["spec"]["engine"]
    assert stored["spec"]["replicas"] == 1, "what `kubectl scale` starts from"
    # Everything else stays as the user wrote it, so that a later version may choose other defaults.
    assert {key: stored["spec"][key] for key in NANO["spec"]} == NANO["spec"]


def test_a_change_of_status_is_no_change_of_the_specification(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    url = f"{PATH.format(namespace)}/nano"
    patch = {"Content-Type": "application/merge-patch+json"}
    both = {"spec": {"replicas": 2}, "status": {"phase": "Ready", "replicas": 1}}
    answer = cluster.http.patch(f"{url}/status", json=both, headers=patch).json()
    assert answer["status"]["phase"] == "Ready"
    assert answer["spec"]["replicas"] == 1
    assert answer["metadata"]["generation"] == 1
    answer = cluster.http.patch(
        url, json={"spec": {"replicas": 2}, "status": {"phase": "Failed"}}, headers=patch
    ).json()
    assert answer["status"]["phase"] == "Ready"
    assert answer["metadata"]["generation"] == 2


def test_scale(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    cluster.kubectl("scale", "dsv4/nano", "--replicas=3", "-n", namespace)
    assert cluster.get("dsv4", "nano", "-n", namespace)["spec"]["replicas"] == 3
    with pytest.raises(KubectlError, match=r"spec\.replicas"):
        cluster.kubectl("scale", "dsv4/nano", "--replicas=33", "-n", namespace)


def condition(kind: str, status: str) -> dict[str, str]:
    moment = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": "Tested", "message": "", "lastTransitionTime": moment}


def test_kubectl_wait_for_ready(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    command = ["wait", "--for=condition=Ready", "dsv4/nano", "-n", namespace]
    with pytest.raises(KubectlError, match="timed out"):
        cluster.kubectl(*command, "--timeout=1s")
    waiting = subprocess.Popen(
        [cluster.programs / "kubectl", *command, "--timeout=60s"],
        stdout=subprocess.PIPE, env=cluster.environment, text=True,
    )  # fmt: skip
    try:
        status = {"status": {"conditions": [condition("Ready", "True")]}}
        patch = [
            "patch",
            "dsv4/nano",
            "-n",
            namespace,
            "--subresource=status",
            "--type=merge",
            "-p",
            json.dumps(status),
        ]
        cluster.kubectl(*patch)
        said, _ = waiting.communicate(timeout=90)
    finally:
        waiting.kill()
        waiting.wait(10)
    assert "condition met" in said


def test_get_shows_the_columns(cluster: Cluster, namespace: str) -> None:
    cluster.apply({**NANO, "metadata": {"name": "nano", "namespace": namespace}})
    header, line = cluster.kubectl("get", "dsv4", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "PHASE", "READY", "GROUPS", "MODEL", "HARDWARE", "AGE"]
    assert line.split()[0] == "nano"
    assert {"Nano", "CPU"} <= set(line.split())
    assert "dsv4deployment.dsv4.dev/nano" in cluster.kubectl("get", "all", "-n", namespace, "-o", "name")


@pytest.mark.parametrize(
    ("field", "word"), [("spec.recovery.backoff.base", "string"), ("spec.engine.timeouts", "firstToken")]
)
@pytest.mark.parametrize("version", API_VERSIONS)
def test_explain(cluster: Cluster, field: str, word: str, version: str) -> None:
    # Discovery of a new definition takes a moment.
    end = time.monotonic() + 30
    while True:
        try:
            said = cluster.kubectl("explain", f"dsv4.{field}", f"--api-version={version}")
            break
        except KubectlError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    assert "DESCRIPTION" in said
    assert word in said


@pytest.mark.parametrize(("created", "other"), [API_VERSIONS, API_VERSIONS[::-1]])
def test_an_object_of_one_version_is_read_and_changed_in_the_other(
    cluster: Cluster, namespace: str, created: str, other: str
) -> None:
    paths = {version: f"/apis/{version}/namespaces/{namespace}/dsv4deployments" for version in API_VERSIONS}
    manifest = {**NANO, "apiVersion": created, "metadata": {"name": "nano", "namespace": namespace}}
    manifest["spec"] = {**NANO["spec"], "replicas": 1}
    cluster.kubectl("apply", "--server-side", "--field-manager=gitops", "-f", "-", input=[manifest])
    # A write of the object as it was read changes nothing.
    read = cluster.http.get(f"{paths[other]}/nano").json()
    assert (read["apiVersion"], read["spec"]) == (other, manifest["spec"])
    same = cluster.http.put(f"{paths[other]}/nano", json=read).json()
    assert same["metadata"]["resourceVersion"] == read["metadata"]["resourceVersion"]
    patch = {"Content-Type": "application/merge-patch+json"}
    answer = cluster.http.patch(f"{paths[other]}/nano", json={"metadata": {"labels": {"a": "b"}}}, headers=patch)
    assert answer.json()["metadata"]["generation"] == 1
    answer = cluster.http.patch(f"{paths[other]}/nano", json={"spec": {"suspend": True}}, headers=patch)
    assert answer.status_code == 200, answer.json()
    read = cluster.http.get(f"{paths[created]}/nano").json()
    assert (read["apiVersion"], read["spec"]["suspend"], read["metadata"]["generation"]) == (created, True, 2)
    # A field that its manager no longer applies goes, whatever the version.
    fewer = {key: value for key, value in manifest["spec"].items() if key != "engine"}
    newer = {**manifest, "apiVersion": other, "spec": fewer}
    cluster.kubectl("apply", "--server-side", "--field-manager=gitops", "-f", "-", input=[newer])
    assert "engine" not in cluster.http.get(f"{paths[created]}/nano").json()["spec"]
    # Commands that name no version have the newest one.
    assert cluster.get("dsv4", "nano", "-n", namespace)["apiVersion"] == API_VERSION
    stored = cluster.get("crd", "dsv4deployments.dsv4.dev")["status"]["storedVersions"]
    assert stored == [STORED_VERSION.partition("/")[2]]


def test_two_managers_own_their_fields(cluster: Cluster, namespace: str) -> None:
    """Lists with keys merge by key, so that a user's GitOps and a colleague's tool can both set variables."""

    def manifest(spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**NANO, "metadata": {"name": "nano", "namespace": namespace}, "spec": spec}]

    def apply(manager: str, spec: dict[str, Any]) -> None:
        cluster.kubectl("apply", "--server-side", f"--field-manager={manager}", "-f", "-", input=manifest(spec))

    base = {"model": NANO["spec"]["model"], "topology": NANO["spec"]["topology"]}
    apply("gitops", {**base, "engine": {"env": [{"name": "A", "value": "1"}]}, "replicas": 1})
    apply("colleague", {**base, "engine": {"env": [{"name": "B", "value": "2"}]}})
    assert cluster.get("dsv4", "nano", "-n", namespace)["spec"]["engine"]["env"] == [
        {"name": "A", "value": "1"}, {"name": "B", "value": "2"},
    ]  # fmt: skip
    with pytest.raises(KubectlError, match=r'conflict with "gitops".*\.spec\.replicas'):
        apply("colleague", {**base, "replicas": 2})
    # Only values that no manager applies any more are removed.
    apply("colleague", base)
    assert cluster.get("dsv4", "nano", "-n", namespace)["spec"]["engine"]["env"] == [{"name": "A", "value": "1"}]
