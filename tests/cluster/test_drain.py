"""A healthy engine completes its open requests before a planned end, also for cordoned nodes; API server and operator
are real."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from operator_world import (
    NAME,
    World,
    addresses,
    agents,
    condition,
    group,
    kube,
    manifest,
    phase,
    world,
)

from dsv4_operator.builders import names
from dsv4_operator.kube import NODES, PODS, Client
from dsv4_runtime.contract import Phase
from dsv4_testkit.scripted_agent import ScriptedAgents

__all__ = ["addresses", "agents", "kube", "world"]

pytestmark = pytest.mark.usefixtures("definition")

ENGINE = {"timeouts": {"drain": "120s"}}


async def test_an_update_waits_for_open_requests_also_under_another_operator(
    world: World, agents: ScriptedAgents
) -> None:
    await world.kube.create(manifest(world.namespace, engine=ENGINE))
    await world.serving(1)
    pods = await world.pods()
    script = agents.script(world.namespace, NAME, 0)
    script.drain_seconds = 600.0
    await world.change(engine={**ENGINE, "maxNumSeqs": 8})
    found = await world.until(
        "it says what it waits for",
        lambda found: "waiting for 1 open request" in condition(found, "Progressing").get("message", ""),
    )
    assert (phase(found), group(found)["phase"]) == ("Updating", "Updating")
    world.operator.kill()
    world.operator.start()
    await world.operator.until_leading()
    assert agents.agent(world.namespace, NAME, 0).state.phase is Phase.DRAINING
    # For several polls of the new operator.
    await asyncio.sleep(3)
    assert await world.pods() == pods, "another operator goes on waiting"
    assert group(await world.live())["incarnation"] == 1
    script.drain_seconds = 0.0
    found = await world.serving(2)
    assert group(found).get("totalRestarts", 0) == 0
    assert not group(found).get("history"), "nobody died"


async def test_a_suspension_waits_for_open_requests_up_to_the_drain_timeout(
    world: World, agents: ScriptedAgents
) -> None:
    await world.kube.create(manifest(world.namespace, engine={"timeouts": {"drain": "3s"}}))
    await world.serving(1)
    agents.script(world.namespace, NAME, 0).drain_seconds = 600.0
    begun = time.monotonic()
    await world.change(suspend=True)
    await world.until("it is suspended", lambda found: phase(found) == "Suspended")
    assert 3.0 <= time.monotonic() - begun < 30.0
    assert not await world.pods()


async def nodes_of(world: World, index: int = 0) -> list[str]:
    """Return the nodes of the members of a group, by rank."""
    chosen = names.selector(names.labels(NAME, component=names.MEMBER, group=index))
    pods = [pod for pod in await world.kube.list(PODS, world.namespace, labels=chosen) if "nodeName" in pod["spec"]]
    return [pod["spec"]["nodeName"] for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))]


@contextlib.asynccontextmanager
async def cordoned(kube: Client, *nodes: str) -> AsyncIterator[None]:
    """Cordon nodes, as `kubectl cordon` does, and uncordon them at the end of the block."""

    async def write(unschedulable: bool) -> None:
        for name in nodes:
            await kube.patch(NODES, None, name, {"spec": {"unschedulable": unschedulable or None}})

    await write(True)
    try:
        yield
    finally:
        await write(False)


async def test_a_group_moves_away_from_a_cordoned_node_after_its_open_requests(
    world: World, agents: ScriptedAgents
) -> None:
    await world.kube.create(manifest(world.namespace, engine=ENGINE))
    await world.serving(1)
    kept, left = await nodes_of(world)
    agents.script(world.namespace, NAME, 0).drain_seconds = 4.0
    begun = time.monotonic()
    async with cordoned(world.kube, left):
        found = await world.until("it waits", lambda found: phase(found) == "Updating")
        assert condition(found, "Progressing")["reason"] == "GroupMoving"
        found = await world.serving(2)
        assert time.monotonic() - begun >= 4.0
        nodes = await nodes_of(world)
    assert nodes[0] == kept, "the other member keeps its node, which has its weights"
    assert left not in nodes
    assert group(found).get("totalRestarts", 0) == 0
    assert not group(found).get("history"), "nobody died"
    assert left in (await world.event("GroupMoving"))["note"]


async def test_a_group_stays_while_no_other_node_fits(world: World) -> None:
    spec = manifest(world.namespace)["spec"]
    every = [node["metadata"]["name"] for node in await world.kube.list(NODES, labels="type=kwok")]
    topology = {**spec["topology"], "nodes": sorted(every)[:2]}
    await world.kube.create(manifest(world.namespace, topology=topology))
    await world.serving(1)
    pods = await world.pods()
    left = (await nodes_of(world))[1]
    async with cordoned(world.kube, left):
        found = await world.until(
            "its reason is reported", lambda found: condition(found, "Progressing").get("reason") == "MoveBlocked"
        )
        assert f"{left} is cordoned" in condition(found, "Progressing")["message"]
        assert (phase(found), condition(found, "Accepted")["status"]) == ("Serving", "True")
        await world.event("MoveBlocked")
        assert await world.pods() == pods
    await world.until("nothing is reported", lambda found: condition(found, "Progressing")["reason"] == "Steady")
    assert await world.pods() == pods


async def test_groups_move_one_after_the_other(world: World) -> None:
    await world.kube.create(manifest(world.namespace, replicas=2))
    await world.until("both serve", lambda found: phase(found) == "Serving" and "phase" in group(found, 1))
    left = {(await nodes_of(world, index))[0] for index in (0, 1)}
    least = 2

    def done(found: dict[str, object]) -> bool:
        nonlocal least
        phases = [group(found, index)["phase"] for index in (0, 1)]
        least = min(least, phases.count("Serving"))
        return phases == ["Serving"] * 2 and all(group(found, index)["incarnation"] == 2 for index in (0, 1))

    async with cordoned(world.kube, *left):
        await world.until("both have moved", done, seconds=90)
        assert not left & {*await nodes_of(world, 0), *await nodes_of(world, 1)}
    assert least == 1
