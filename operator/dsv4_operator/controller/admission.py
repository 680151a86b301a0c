"""The optional admission webhook: what the reconciler would refuse is refused at `kubectl apply`, in the same words.

It is a convenience and no guard: the reconciler checks everything again, so a cluster without it, or one whose operator
is away, loses nothing. It writes nothing and knows no machine, so what only the nodes can decide is a warning.
Protocol: https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, Reason
from dsv4_operator.api.findings import InvalidDeployment
from dsv4_operator.api.load import parse
from dsv4_operator.api.policy import violations
from dsv4_operator.backends import table
from dsv4_operator.kube import Manifest
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.facts import Facts, catalog_facts
from dsv4_operator.planning.rules import Severity, findings

_DEFAULT_POLICY = ClusterPolicy()
_API_VERSION = "admission.k8s.io/v1"
_MADE_LETTERS = 5
_ANY_MEMORY = 2**50
"""Of a machine without an accelerator, which the catalog cannot know."""


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """Verdict on one manifest."""

    refusal: str | None = None
    warnings: tuple[str, ...] = ()


def judge(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None = None,
    policy: ClusterPolicy = _DEFAULT_POLICY,
    runtime_image: str = "",
) -> AdmissionResult:
    """Return what the reconciler would say of `new` before it looks at the nodes.

    Args:
        new: the manifest, as the API server has it after defaulting.
        old: the one that it replaces. A change of labels and annotations, and one that only stops the deployment, is
            never refused, also where the specification is older than a rule.
        policy: what deployments may have of nodes.
        runtime_image: the operator's own, which all may run.
    """
    if old is not None and (old.get("spec") == new.get("spec") or _only_stops(new, old)):
        return AdmissionResult()
    try:
        deployment = parse(_judged(new))
        table.check(deployment)
    except InvalidDeployment as error:
        return AdmissionResult(str(error))
    forbidden = "; ".join(map(str, violations(deployment, policy, runtime_image)))
    if deployment.spec.suspend or not deployment.spec.replicas:
        # Nothing is planned. What is not allowed is refused all the same: `kubectl scale` would start it unseen.
        return AdmissionResult(forbidden or None)
    facts = replace(_usual_machines(deployment), forbidden=forbidden)
    try:
        plan_group(deployment, facts, group=0, incarnation=1)
        found = findings(deployment, facts)
    except PlanRefused as refused:
        if refused.reason is not Reason.MEMORY_SHORT:
            return AdmissionResult(refused.message)
        return AdmissionResult(warnings=(f"on {facts.nodes[0].machine}: {refused.message}",))
    return AdmissionResult(warnings=tuple(finding.message for finding in found if finding.severity is Severity.WARN))


def review(asked: Manifest, policy: ClusterPolicy = _DEFAULT_POLICY, runtime_image: str = "") -> Manifest:
    """Answer an AdmissionReview.

    Raises:
        KeyError: it is none.
    """
    request = asked["request"]
    verdict = judge(request["object"], request.get("oldObject"), policy, runtime_image)
    answer: Manifest = {"uid": request["uid"], "allowed": verdict.refusal is None}
    if verdict.refusal is not None:
        answer["status"] = {"code": 422, "reason": "Invalid", "message": verdict.refusal}
    if verdict.warnings:
        answer["warnings"] = list(verdict.warnings)
    return {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": answer}


def _only_stops(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    specs = [{"suspend": False, "replicas": 1, **(manifest.get("spec") or {})} for manifest in (new, old)]
    stopped = specs[0]["suspend"] is True or specs[0]["replicas"] == 0
    return stopped and {**specs[0], "suspend": False, "replicas": 1} == {**specs[1], "suspend": False, "replicas": 1}


def _judged(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a verdict depends on, with a name as the API server is about to make it of `generateName`."""
    metadata = manifest["metadata"]
    judged = {key: value for key, value in manifest.items() if key != "status"}
    if "name" in metadata or "generateName" not in metadata:
        return judged
    return {**judged, "metadata": {**metadata, "name": metadata["generateName"] + "0" * _MADE_LETTERS}}


def _usual_machines(deployment: DSV4Deployment) -> Facts:
    kind = machine(deployment.spec.topology.hardware)
    if not kind.sm:
        kind = replace(kind, memory_bytes=_ANY_MEMORY)
    # No path is part of a verdict.
    return catalog_facts(deployment, kind, state_root="/", weights_root="/")
