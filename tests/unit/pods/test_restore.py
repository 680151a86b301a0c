"""A deployment that is restored from a backup of any moment, with its status, on a cluster without its objects."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator

import pytest

from dsv4_testkit.pods_world import Manifest, World

TOPOLOGY = {"hardware": "CPU", "nodesPerGroup": 1}
DAY = 86_400.0
ENGINE = {"maxModelLen": 1024, "maxNumBatchedTokens": 512}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def backup(world: World, dice: random.Random) -> Manifest:
    """Return the object of a deployment at some moment of its life."""
    for _ in range(dice.randint(0, 6)):
        await world.step()
    for _ in range(dice.randint(0, 4)):
        pods = world.pods()
        match dice.choice(("change", "suspend", "scale", "end", "restart")):
            case "change":
                world.change(engine={**ENGINE, "maxNumSeqs": dice.choice((4, 5))})
            case "suspend":
                world.change(suspend=dice.choice((True, None)))
            case "scale":
                world.change(replicas=dice.choice((0, 1, 2, 3)))
            case "restart":
                live = world.live()
                live["metadata"]["annotations"] = {"dsv4.dev/restart-at": str(dice.random())}
                world.put(live)
            case "end" if pods:
                labels = dice.choice(pods)["metadata"]["labels"]
                world.end(int(labels["dsv4.dev/incarnation"]), 0, int(labels["dsv4.dev/group"]))
        for _ in range(dice.randint(0, 4)):
            await world.step()
    return world.live()


@pytest.mark.parametrize("seed", range(24))
async def test_a_backup_of_any_moment_serves(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    world = World(monkeypatch, topology=TOPOLOGY, replicas=2)
    kept = await backup(world, dice)
    await world.close()
    restored = World(monkeypatch, topology=TOPOLOGY)
    live = restored.live()
    live["metadata"]["annotations"] = kept["metadata"]["annotations"]
    restored.put({**live, "spec": copy.deepcopy(kept["spec"]), "status": copy.deepcopy(kept.get("status", {}))})
    # The clocks of the clusters may differ.
    restored.now = world.now + dice.choice((0.0, 100.0, DAY, -DAY))
    spec = kept["spec"]
    groups = 0 if spec.get("suspend") else spec.get("replicas", 1)

    def as_wanted() -> bool:
        status = restored.status
        if groups == 0:
            return status.get("phase") == "Suspended" and not restored.pods()
        numbers = len(restored.pods()), len(status.get("groups", ()))
        return status.get("phase") == "Serving" and numbers == (groups, groups)

    await restored.until(as_wanted, 120.0)
    before = {one["index"]: one["incarnation"] for one in kept.get("status", {}).get("groups", ())}
    for one in restored.status["groups"]:
        assert one["incarnation"] >= before.get(one["index"], 0), "no number is used twice"
    await restored.close()
