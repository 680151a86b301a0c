"""The operator creates nothing that its administrator does not allow, even if the specification passed admission."""

from __future__ import annotations

import base64
from typing import Any, cast

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy, DeploymentStatus, DSV4Deployment, Reason, parse
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import PodsBackend
from dsv4_operator.backends.pods import backend as pods_backend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS, Resource, Unavailable
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.pod_objects import ALLOWED, deployment, sparks

FIELD = r"spec\.network\.mode: HostNetwork .* is not allowed in the namespace team; write PodNetwork, or"


class Nothing:
    """A cache that is still empty."""

    def pods(self, *_: object) -> list[Any]:
        return []

    def all(self) -> list[Any]:
        return []


def operator(kube: Any, policy: ClusterPolicy) -> PodsBackend:
    return PodsBackend(Cluster(kube, Nothing(), runtime_image="runtime", policy=policy), changed=lambda *_: None)


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube({"apiVersion": "v1", "kind": "Node", **one} for one in sparks())


def asking(**source: Any) -> DSV4Deployment:
    """Return a deployment with a Hub token and API keys in Secrets."""
    manifest = deployment().to_dict()
    hub = {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": "0" * 40}
    hub["secretKeyRef"] = {"name": "hub", "key": "token"}
    manifest["spec"]["model"] = {"variant": "Flash", "source": {"huggingFace": {**hub, **source}}}
    manifest["spec"]["gateway"] = {"apiKeys": {"secretKeyRef": {"name": "callers", "key": "keys"}}}
    return parse(yaml.safe_load(yaml.safe_dump(manifest)))


async def test_disallowed_specifications_are_refused_at_planning_without_any_object(kube: FakeKube) -> None:
    wanted, strict = deployment(), operator(kube, ClusterPolicy())
    facts = await strict.facts(wanted)
    with pytest.raises(PlanRefused) as told:
        plan_group(wanted, facts, group=0, incarnation=1)
    assert told.value.reason is Reason.NOT_ALLOWED
    (found,) = told.value.findings
    assert (found.field, found.value, found.reason) == ("spec.network.mode", "HostNetwork", "HostNetwork")
    await strict.ensure_frontend(wanted, DeploymentStatus())
    assert kube.writes() == []


async def test_a_plan_from_before_the_policy_is_not_formed_either(kube: FakeKube) -> None:
    wanted, lax = deployment(), operator(kube, ALLOWED)
    plan = plan_group(wanted, await lax.facts(wanted), group=0, incarnation=1)
    with pytest.raises(BackendError, match=FIELD):
        await operator(kube, ClusterPolicy()).ensure(wanted, plan)
    assert kube.writes() == []


async def test_no_object_or_log_line_contains_a_users_secret(kube: FakeKube, caplog: pytest.LogCaptureFixture) -> None:
    """Searches every object for marked secrets, as text and in base64."""
    caplog.set_level("DEBUG")
    canaries = {"hub": ("token", "hf_canary7f3a"), "callers": ("keys", "canary-of-callers-7f3a")}
    for name, (key, word) in canaries.items():
        data = {key: base64.b64encode(word.encode()).decode()}
        about = {"name": name, "namespace": "team"}
        await kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": data})
    wanted, backend = asking(), operator(kube, ALLOWED)
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    await backend.ensure(wanted, plan)
    await backend.ensure_frontend(wanted, DeploymentStatus())
    await backend.collect_evidence(wanted, 0, 1)
    made = {
        key: str(one) for key, one in kube.objects.items() if key not in {("Secret", "team", name) for name in canaries}
    }
    assert {"Pod", "ConfigMap", "Deployment", "Service", "Secret"} <= {kind for kind, _, _ in made}
    told = [*made.values(), plan.to_json(), caplog.text]
    for _, word in canaries.values():
        for form in (word, base64.b64encode(word.encode()).decode()):
            assert [text for text in told if form in text] == []
    # The pods reference the Secrets by name.
    pods = [one for (kind, _, _), one in kube.objects.items() if kind == "Pod"]
    assert all("'secretName': 'hub'" in str(pod) for pod in pods)


async def test_a_missing_secret_is_an_error_before_pods_are_created(kube: FakeKube) -> None:
    wanted, backend = asking(), operator(kube, ALLOWED)
    plan = plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1)
    remedy = r"make it, for example kubectl create secret generic hub -n team --from-file=token=FILE"
    with pytest.raises(
        BackendError, match=r"spec\.model\.source\.secretKeyRef: the Secret team/hub is not there.*" + remedy
    ):
        await backend.ensure(wanted, plan)
    hub: Any = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub", "namespace": "team"},
        "data": {"x": "eA=="},
    }
    await kube.create(hub)
    with pytest.raises(BackendError, match=r"the Secret team/hub has no entry token"):
        await backend.ensure(wanted, plan)
    assert [name for kind, _, name in kube.objects if kind in {"Pod", "ConfigMap"}] == []


class Seen:
    """A cache that shows every member."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    def pods(self, _namespace: str, _deployment: str, group: int) -> list[Any]:
        return self.all() if group >= 0 else []

    def all(self) -> list[Any]:
        return [one for (kind, _, _), one in self._kube.objects.items() if kind == "Pod"]


class Unreliable(FakeKube):
    """The first writes of evidence fail, before or after their execution, and it cannot be listed."""

    def __init__(self, kube: FakeKube) -> None:
        super().__init__()
        self.objects, self._version = kube.objects, kube._version
        self.failures = [True, False, True]
        """Whether the write was executed."""

    async def create(self, manifest: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
        evidence = "evidence" in manifest["metadata"]["name"]
        executed = self.failures.pop() if evidence and self.failures else None
        if executed is False:
            raise Unavailable("503")
        made = await super().create(manifest, strict=strict)
        if executed:
            raise Unavailable("504")
        return made

    async def list(self, resource: Resource, *rest: Any, **options: Any) -> list[dict[str, Any]]:
        if resource is CONFIG_MAPS and names.EVIDENCE in (options.get("labels") or ""):
            raise Unavailable("500")
        return await super().list(resource, *rest, **options)


async def test_failed_requests_cost_no_evidence(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods_backend, "_EVIDENCE_PAUSES", (0.0, 0.0, 0.0))
    wanted = deployment()
    unreliable = Unreliable(kube)
    cluster = Cluster(cast("Any", unreliable), cast("Any", Seen(unreliable)), runtime_image="runtime", policy=ALLOWED)
    backend = PodsBackend(cluster, changed=lambda *_: None)
    await backend.ensure(wanted, plan_group(wanted, await backend.facts(wanted), group=0, incarnation=1))
    where = await backend.collect_evidence(wanted, 0, 1)
    assert where == "configmap team/flash-0-evidence-1"
    assert ("ConfigMap", "team", "flash-0-evidence-1") in unreliable.objects
