"""Operation after the first day on a real API server: a version that never serves, a lost namespace, a backup."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import charts
import pytest
from clusterkit.client import Cluster as ControlPlane
from clusterkit.waiting import unchanged
from operator_process import OperatorProcess, until
from operator_world import NAME, World, addresses, agents, condition, group, kube, manifest, operated, phase, world

from dsv4_operator.api import API_VERSION
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DSV4_DEPLOYMENTS,
    PODS,
    SECRETS,
    SERVICES,
    Client,
    Manifest,
    Resource,
)
from dsv4_operator.kube.resources import NAMESPACES
from dsv4_runtime.contract import Phase
from dsv4_testkit.scripted_agent import Script, ScriptedAgents

__all__ = ["addresses", "agents", "kube", "world"]

pytestmark = pytest.mark.usefixtures("definition")

STUCK = "APP_WITH_A_MISTAKE"
_ASSIGNED = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")


class Stuck(ScriptedAgents):
    """Agents whose engine loads forever when their plan has the variable `STUCK`."""

    async def _start(self, uid: str, pod: Manifest) -> None:
        await super()._start(uid, pod)
        started = self._running.get(uid)
        if started is not None and STUCK in started.agent.plan.env:
            started.agent.script = Script(last_phase=Phase.LOADING)


async def test_a_version_that_never_serves_is_taken_back(
    operator_kubeconfig: Path, kube: Client, namespace: str, tmp_path: Path
) -> None:
    async with Stuck(kube), operated(operator_kubeconfig, kube, namespace, tmp_path / "operator.log") as world:
        await kube.create(manifest(namespace, rollout={"progressDeadline": "600s"}))
        served = group(await world.serving(1))["revision"]
        await world.change(engine={"env": [{"name": STUCK, "value": "1"}]})
        await world.until("it loads", lambda found: group(found).get("incarnation") == 2 and _loads(found))
        # The deadline counts from the claim: with 3 s from the beginning, loading might never be observed.
        world.operator.kill()
        await world.change(rollout={"progressDeadline": "3s"})
        # Another operator counts from the same time.
        world.operator.start()
        found = await world.serving(3)
        rolled_back = condition(found, "RolledBack")
        assert rolled_back["status"] == "True"
        assert "did not answer within 3s (spec.rollout.progressDeadline)" in rolled_back["message"]
        assert group(found)["revision"] == served
        assert group(found).get("totalRestarts", 0) == 0, "a rollback is no restart"
        # The refused version is not tried again.
        pods = await world.pods()
        await asyncio.sleep(3)
        assert await world.pods() == pods


def _loads(found: Manifest) -> bool:
    return any(one.get("phase") == "Loading" for one in group(found).get("members") or [])


async def test_the_definition_is_upgraded_and_rolled_back_below_running_groups(
    world: World, cluster: ControlPlane, definition: dict[str, Any]
) -> None:
    """The definition of dsv4 0.1.0 has only the version that is stored."""
    old = copy.deepcopy(definition)
    old["spec"]["versions"] = [one for one in old["spec"]["versions"] if one["storage"]]
    try:
        await _define(cluster, old, newest=False)
        await world.kube.create(manifest(world.namespace))
        await world.serving(1)
        # No gateway runs, which is reported after a second attempt.
        await world.event("EndpointNotReady")
        # Progress of members alone is written up to 5 s late.
        before = await unchanged(world.versions, seconds=6)
        await _define(cluster, definition, newest=True)
        await asyncio.sleep(6)
        assert await world.versions() == before
        # Both versions are supervised, whatever the version of a change.
        cluster.apply({**manifest(world.namespace, "newer"), "apiVersion": API_VERSION})
        found = await world.serving(1, "newer")
        chosen = f"dsv4deployments.v1beta1.{names.DOMAIN}/{NAME}"
        cluster.kubectl("label", chosen, "-n", world.namespace, "a=b")
        assert "EngineReady" in cluster.kubectl("events", "-n", world.namespace, "--for=dsv4/newer")
        pods = await world.pods() | await world.pods("newer")
        assert found["status"]["observedGeneration"] == 1
        await _define(cluster, old, newest=False)
        await world.kube.delete(PODS, world.namespace, f"{NAME}-0-i1-r1", grace_seconds=0)
        await world.serving(2)
        assert (await world.pods("newer")).items() <= pods.items()
        assert "Traceback" not in world.operator.log.read_text()
    finally:
        await _define(cluster, definition, newest=True)


async def _define(cluster: ControlPlane, definition: dict[str, Any], *, newest: bool) -> None:
    """Apply a definition of the deployments, and wait until the newest version is served, or no longer."""
    # Tests of the chart install it with helm, which keeps its fields.
    flags = ("--server-side", "--force-conflicts")
    # In a thread, because the agents of the members run in this loop.
    await asyncio.to_thread(cluster.kubectl, "apply", *flags, "-f", "-", input=[definition])
    wanted = 200 if newest else 404
    await until("its versions", lambda: cluster.http.get(f"/apis/{API_VERSION}").status_code == wanted, seconds=60)


@asynccontextmanager
async def two_namespaces(
    cluster: ControlPlane, kube: Client, namespace: str, folder: Path
) -> AsyncIterator[tuple[World, str]]:
    """An operator of `namespace` and of a second one, whose name is yielded."""
    other = f"{namespace}-second"
    cluster.kubectl("create", "namespace", other)
    settings = f"watchNamespaces={{{namespace},{other}}}"
    with charts.account(cluster, namespace, folder / "two.kubeconfig", settings) as rights:
        operator = OperatorProcess(rights, namespace, folder / "operator.log", namespaces=[other])
        operator.start()
        try:
            await operator.until_leading()
            yield World(kube, namespace, operator), other
        finally:
            operator.kill()
            cluster.kubectl("delete", "namespace", other, "--ignore-not-found", "--wait=false")


async def test_a_namespace_that_is_deleted_while_a_group_forms_goes_and_others_are_supervised(
    cluster: ControlPlane, kube: Client, agents: ScriptedAgents, namespace: str, tmp_path: Path
) -> None:
    async with two_namespaces(cluster, kube, namespace, tmp_path) as (world, other):
        await kube.create(manifest(namespace))
        await world.serving(1)
        gone = World(kube, other, world.operator)
        for rank in range(2):
            agents.script(other, NAME, rank).last_phase = Phase.STAGING
        await kube.create(manifest(other))
        await gone.until("it is being formed", lambda found: phase(found) in ("Forming", "Starting", "Loading"))
        begun = time.monotonic()
        cluster.kubectl("delete", "namespace", other, "--wait=false")
        while await kube.get(NAMESPACES, None, other) is not None:
            assert time.monotonic() - begun < 60, world.operator.log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        print(f"\nthe namespace was gone after {time.monotonic() - begun:.1f} s")
        await until("it is forgotten", lambda: world.operator.metrics()["dsv4_operator_queue"] == 1, seconds=60)
        assert "Traceback" not in world.operator.log.read_text()
        # The watches of the namespace that is left go on.
        await world.kube.delete(PODS, namespace, f"{NAME}-0-i1-r1", grace_seconds=0)
        await world.serving(2)


async def test_a_quota_delays_a_group_with_its_reason_and_uses_no_restart(world: World, cluster: ControlPlane) -> None:
    about = {"name": "small", "namespace": world.namespace}
    # One of the two members; the gateways come later.
    hard = {"count/pods": "1"}
    cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": about, "spec": {"hard": hard}})
    await until(
        "the quota is in force",
        lambda: bool(cluster.get("resourcequota", "small", "-n", world.namespace).get("status", {}).get("hard")),
        seconds=30,
    )
    await world.kube.create(manifest(world.namespace))
    told = await world.event("ActionFailed")
    assert "exceeded quota: small" in told["note"]
    # The event is recorded before the status is saved.
    found = await world.until(
        "the condition has the reason",
        lambda found: condition(found, "Progressing").get("reason") == "ActionFailed",
        seconds=10,
    )
    progressing = condition(found, "Progressing")
    assert progressing["status"] == "True"
    assert "exceeded quota: small" in progressing["message"]
    cluster.kubectl("delete", "resourcequota", "small", "-n", world.namespace)
    found = await world.serving(1)
    assert group(found).get("totalRestarts", 0) == 0


@pytest.mark.parametrize(
    "with_status",
    [pytest.param(False, id="objects", marks=pytest.mark.long), pytest.param(True, id="objects and status")],
)
async def test_a_restored_backup_serves_and_nothing_of_the_old_one_is_left(world: World, with_status: bool) -> None:
    await world.kube.create(manifest(world.namespace))
    live = await world.serving(1)
    backup = [live] + [one for kind in (SERVICES, CONFIG_MAPS, SECRETS) for one in await _all(world, kind)]
    backup = json.loads(json.dumps(backup))
    await world.kube.delete(DSV4_DEPLOYMENTS, world.namespace, NAME)
    deadline = time.monotonic() + 60
    while left := await world.owned():
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.2)
    # As backup tools do it: everything at once, with owners that are no more.
    for one in reversed(backup):
        await world.kube.create(_restorable(one))
    if with_status:
        status = live["status"]
        await world.kube.patch(DSV4_DEPLOYMENTS, world.namespace, NAME, {"status": status}, subresource="status")
    found = await world.until(
        "it serves again",
        lambda found: phase(found) == "Serving" and group(found)["incarnation"] == 1 + with_status,
        seconds=90,
    )
    await world.at_rest()
    uid = found["metadata"]["uid"]
    assert uid != live["metadata"]["uid"]
    # The status says that it had members, and they are gone.
    assert group(found).get("totalRestarts", 0) == with_status
    deadline = time.monotonic() + 60
    while strangers := [one async for one in _others(world, uid)]:
        assert time.monotonic() < deadline, strangers
        await asyncio.sleep(0.2)
    assert "Traceback" not in world.operator.log.read_text()


async def _all(world: World, kind: Resource) -> list[Manifest]:
    listed = await world.kube.list(kind, world.namespace, labels="app.kubernetes.io/managed-by=dsv4-operator")
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **one} for one in listed]


def _restorable(manifest: Manifest) -> Manifest:
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in _ASSIGNED}
    kept: dict[str, Any] = {name: value for name, value in manifest.items() if name != "status"}
    if kept["kind"] == "Service":
        kept["spec"] = {name: value for name, value in kept["spec"].items() if name not in ("clusterIP", "clusterIPs")}
        if manifest["spec"].get("clusterIP") == "None":
            kept["spec"]["clusterIP"] = "None"
    return {**kept, "metadata": metadata}


async def _others(world: World, uid: str) -> AsyncIterator[str]:
    """Yield the objects whose owner is another deployment than that with `uid`."""
    for kind in (SERVICES, CONFIG_MAPS, SECRETS):
        for one in await _all(world, kind):
            owners = one["metadata"].get("ownerReferences") or []
            if not any(owner["uid"] == uid for owner in owners):
                yield f"{kind.kind} {one['metadata']['name']}"
