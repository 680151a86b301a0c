"""A healthy engine completes its open requests before a planned end; API server and operator are real."""

from __future__ import annotations

import asyncio
import time

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
