"""The admission webhook refuses the same specifications as the reconciler, before they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy
from dsv4_operator.api.deployment import parse
from dsv4_operator.api.findings import InvalidDeployment
from dsv4_operator.controller.admission import AdmissionResult, judge, review
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.facts import catalog_facts
from dsv4_testkit import specifications

EXAMPLES = Path(__file__).parents[3] / "examples"
SPARKS = ClusterPolicy(backends=("KubeRay",), host_network_namespaces=("default",))
"""Policy of a cluster with Sparks for the namespace `default`."""


def manifest(name: str, **engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    found["spec"].setdefault("engine", {}).update(engine)
    return found


def asked(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    request: dict[str, Any] = {"uid": "1-2-3", "object": new} | ({"oldObject": old} if old is not None else {})
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


# On a cluster `hardware` is required, because there is no local machine to derive it from.
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.yaml")} - {"nano-gpu"}))
def test_every_example_is_taken(name: str) -> None:
    assert judge(manifest(name), policy=SPARKS).refusal is None


def test_a_manifest_that_breaks_a_rule_of_its_form_is_refused_in_the_words_of_the_parser() -> None:
    bad = manifest("flash-2x-spark", maxModelLne=4096)
    with pytest.raises(InvalidDeployment) as said:
        parse(bad)
    assert judge(bad) == AdmissionResult(str(said.value))
    assert "did you mean maxModelLen?" in str(said.value)


def test_one_that_no_machine_can_run_is_refused_in_the_words_of_the_planner() -> None:
    bad = manifest("flash-2x-spark", extraArgs=["--max-model-length", "4096"])
    deployment = parse(bad)
    facts = catalog_facts(deployment, machine(deployment.spec.topology.hardware), state_root="/a", weights_root="/b")
    with pytest.raises(PlanRefused) as said:
        plan_group(deployment, facts, group=0, incarnation=1)
    assert judge(bad, policy=SPARKS) == AdmissionResult(said.value.message)


def test_findings_that_depend_on_nodes_are_warnings() -> None:
    found = judge(manifest("pro-8x-rtx-pro-6000"), policy=SPARKS)
    assert found.refusal is None
    assert len(found.warnings) == 1
    assert "the weights need" in found.warnings[0]


def test_the_planners_warnings_are_returned() -> None:
    found = judge(manifest("pro-8x-spark"), policy=SPARKS)
    assert found.refusal is None
    assert any("gpuMemoryUtilization" in warning for warning in found.warnings)


def test_unrelated_changes_and_stops_of_an_invalid_deployment_are_accepted() -> None:
    bad = manifest("flash-2x-spark", extraArgs=["--max-model-length", "4096"])
    labelled = {**bad, "metadata": {**bad["metadata"], "labels": {"team": "a"}}}
    assert judge(labelled, bad) == AdmissionResult()
    assert judge(labelled, manifest("flash-2x-spark")).refusal is not None
    for stopped in ({"suspend": True}, {"replicas": 0}):
        assert judge({**bad, "spec": {**bad["spec"], **stopped}}, bad) == AdmissionResult()


def test_a_deployment_that_is_older_than_a_rule_can_be_stopped_and_not_started() -> None:
    old = manifest("nano", extraArgs=["--model=x"])
    stopped = {**old, "spec": {**old["spec"], "suspend": True}}
    assert judge(stopped, old) == AdmissionResult()
    assert judge(old, stopped).refusal is not None


@pytest.mark.parametrize("stopped", [{"suspend": True}, {"replicas": 0}])
def test_disallowed_specifications_are_refused_for_stopped_deployments_too(stopped: dict[str, Any]) -> None:
    """`kubectl scale` starts it without passing the specification to webhook or policy."""
    for part in (
        {"storage": {"path": "/"}},
        {"engine": {"image": "evil.example/x:1"}},
        {"network": {"mode": "HostNetwork"}},
    ):
        bad = manifest("nano")
        bad["spec"] |= {**part, **stopped}
        assert "administrator" in str(judge(bad).refusal)
        good = manifest("nano")
        good["spec"] |= stopped
        assert judge(good).refusal is None
        assert "administrator" in str(judge(bad, good).refusal)


@pytest.mark.parametrize("path", [path for path, schema in specifications.fields() if schema.get("type") == "string"])
def test_no_refusal_repeats_a_secret(path: str) -> None:
    token = specifications.TOKEN
    for text in (token, f"https://user:{token}@store.example/x", f"/{token}", f"--seed={token}"):
        found = judge(specifications.placed(path, text))
        assert token[8:] not in f"{found.refusal} {found.warnings}"


def test_a_name_that_the_server_is_yet_to_make() -> None:
    unnamed = {**manifest("nano"), "metadata": {"generateName": "try-", "namespace": "a"}}
    assert judge(unnamed).refusal is None


def test_a_review_has_the_form_that_the_server_reads() -> None:
    good = review(asked(manifest("nano")))
    assert good == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "1-2-3", "allowed": True},
    }
    bad = review(asked(manifest("nano", maxModelLen=-1)))["response"]
    assert (bad["allowed"], bad["status"]["code"]) == (False, 422)
    assert "spec.engine.maxModelLen" in bad["status"]["message"]
