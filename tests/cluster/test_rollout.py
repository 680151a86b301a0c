"""A changed specification on a real API server: one group after the other, and back if a group does not serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from operator_world import NAME, World, addresses, condition, group, kube, manifest, operated

from dsv4_operator.api import parse
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, Client, KubeError, Manifest
from dsv4_operator.planning import revision
from dsv4_runtime.contract import Cause
from dsv4_testkit.scripted_agent import Script, ScriptedAgents

__all__ = ["addresses", "kube"]

pytestmark = pytest.mark.usefixtures("definition")

BAD = "APP_WITH_A_MISTAKE"
GOOD_IMAGE, BAD_IMAGE = "dsv4.test/none:1", "dsv4.test/none:2"
GROUPS = 2


class Agents(ScriptedAgents):
    """Agents that fail as with a wrong flag when their plan has the variable `BAD`."""

    async def _start(self, uid: str, pod: Manifest) -> None:
        await super()._start(uid, pod)
        started = self._running.get(uid)
        if started is not None and BAD in started.agent.plan.env:
            started.agent.script = Script(fails=Cause.CONFIG_ERROR)


@pytest.fixture
async def world(operator_kubeconfig: Path, kube: Client, namespace: str, tmp_path: Path) -> AsyncIterator[World]:
    async with (
        Agents(kube),
        operated(operator_kubeconfig, kube, namespace, tmp_path / "operator.log") as found,
    ):
        yield found


class Witness:
    """Watches the status, and records the minimum number of serving groups."""

    def __init__(self, kube: Client, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self.least = GROUPS

    async def run(self) -> None:
        while True:
            with contextlib.suppress(KubeError):
                version = (await self._kube.listing(DSV4_DEPLOYMENTS, self._namespace)).resource_version
                async for event in self._kube.watch(DSV4_DEPLOYMENTS, self._namespace, resource_version=version):
                    if event.type != "BOOKMARK":
                        status = event.object.get("status") or {}
                        self.least = min(self.least, status.get("readyReplicas", 0))


async def all_serve(world: World, what: str) -> Manifest:
    """Wait until every group serves the present specification."""

    def true(found: Manifest) -> bool:
        current = revision(parse(found))
        groups = [group(found, index) for index in range(GROUPS)]
        return all(one.get("phase") == "Serving" and one.get("revision") == current for one in groups)

    return await world.until(what, true, seconds=120)


async def killed_on_the_way(world: World, what: str) -> None:
    """Kill the operator as soon as group 1 does not serve, and start another one."""
    await world.until(what, lambda found: group(found, 1).get("phase") != "Serving")
    world.operator.kill()
    world.operator.start()
    await world.operator.until_leading()


async def images(world: World) -> set[str]:
    return {
        pod["spec"]["containers"][0]["image"]
        for pod in await world.kube.list(PODS, world.namespace)
        if pod["metadata"]["name"] in await world.pods()
    }


@pytest.mark.timeout(900)
async def test_groups_are_updated_one_by_one_and_rolled_back_if_one_does_not_serve(world: World) -> None:
    spec = manifest(world.namespace)["spec"]
    spec["topology"]["nodesPerGroup"] = 1
    await world.kube.create(manifest(world.namespace, **(spec | {"replicas": GROUPS})))
    await all_serve(world, "both groups serve")
    witness = Witness(world.kube, world.namespace)
    following = asyncio.create_task(witness.run())

    first = await world.pods()
    await world.change(gateway={"maxHeldRequests": 7}, recovery={"maxRestarts": 50})
    await world.until(
        "the change is seen", lambda found: found["status"]["observedGeneration"] == found["metadata"]["generation"]
    )
    await asyncio.sleep(3)
    assert await world.pods() == first, "a change that members are not formed from ended one"

    await world.change(engine={"maxNumSeqs": 8, "image": GOOD_IMAGE, "profile": "vllm-cpu-0.32"})
    await killed_on_the_way(world, "the last group is first")
    found = await all_serve(world, "both groups serve the change")
    assert [group(found, index)["incarnation"] for index in range(GROUPS)] == [2, 2]
    assert found["status"]["updatedReplicas"] == GROUPS
    assert (await world.event("UpdateCompleted"))["type"] == "Normal"
    assert witness.least == 1, "one group answered at every moment"
    second, served = await world.pods(), group(found)["revision"]

    await world.change(engine={"image": BAD_IMAGE, "env": [{"name": BAD, "value": "1"}]})
    await killed_on_the_way(world, "the last group tries it")
    found = await world.until(
        "it is taken back",
        lambda found: (
            condition(found, "RolledBack").get("status") == "True"
            and (group(found, 1).get("phase"), group(found, 1).get("revision")) == ("Serving", served)
        ),
        seconds=120,
    )
    assert "group 1: ConfigError on member 0" in condition(found, "RolledBack")["message"]
    assert (await world.event("RolledBack"))["type"] == "Warning"
    # No gateway runs here.
    assert condition(found, "Ready")["reason"] == "EndpointNotReady"
    assert group(found)["incarnation"] == 2, "the other group was never touched"
    third = await world.pods()
    assert set(second.items()) & set(third.items()) == {(f"{NAME}-0-i2-r0", second[f"{NAME}-0-i2-r0"])}
    assert await images(world) == {GOOD_IMAGE}

    world.operator.kill()
    world.operator.start()
    await world.operator.until_leading()
    await asyncio.sleep(5)
    assert await world.pods() == third, "what was given up is not tried again, also by another operator"

    await world.change(engine={"image": GOOD_IMAGE, "env": []})
    found = await world.until("the way back by hand", lambda found: condition(found, "RolledBack")["status"] == "False")
    assert await world.pods() == third, "what runs is what is asked for again"
    await world.change(engine={"maxNumSeqs": 6})
    await all_serve(world, "a third one serves")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert witness.least == 1
    print(f"\n{GROUPS} groups, a change served, one taken back, 3 operators killed: at least {witness.least} answered")
