"""Gateways and routes while deployments are created, scaled and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus, RolloutStatus
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.frontend import Frontend, routed_groups, was_placed
from dsv4_operator.builders import names
from dsv4_operator.builders.member import head_service
from dsv4_operator.kube import Forbidden
from dsv4_operator.planning.revision import formed_from
from dsv4_testkit.pod_objects import ALLOWED, deployment
from dsv4_testkit.pods_world import FailingKube


def groups(*phases: GroupPhase, incarnation: int = 1) -> DeploymentStatus:
    found = (GroupStatus(index=index, phase=phase, incarnation=incarnation) for index, phase in enumerate(phases))
    return DeploymentStatus(groups=tuple(found))


class World:
    """The frontend of one deployment on an API server in memory."""

    def __init__(self) -> None:
        self.server = FailingKube()
        kube: Any = self.server
        view: Any = None

        async def token_key() -> str:
            return "key"

        async def sweep(_: DSV4Deployment, last: Callable[[int], int]) -> None:
            self.swept.append((last(0), last(1), last(2)))

        self.swept: list[tuple[int, ...]] = []
        """Last incarnation of groups 0 to 2 whose objects are removed."""
        self.frontend = Frontend(Cluster(kube, view, runtime_image="r", policy=ALLOWED), token_key, sweep)
        self.generation = 0

    def wanted(self, replicas: int) -> DSV4Deployment:
        self.generation += 1
        found = deployment("nano.yaml", replicas=replicas)
        about = found.metadata.model_copy(update={"generation": self.generation})
        return found.model_copy(update={"metadata": about})

    async def ensure(self, replicas: int, status: DeploymentStatus) -> None:
        await self.frontend.ensure(self.wanted(replicas), status)

    def gateways(self) -> dict[str, dict[str, Any]]:
        found = ((name, one) for (kind, _, name), one in self.server.objects.items() if kind == "Deployment")
        return {name: one["spec"] for name, one in found}

    def routed(self, group: int = 0) -> list[int]:
        config = self.server.objects["ConfigMap", "team", names.gateway_name("nano", group)]
        route = json.loads(config["data"]["route.json"])
        return [route["group"], *(other["group"] for other in route["others"])]


async def test_a_deployment_that_fits_nowhere_has_no_gateways() -> None:
    world = World()
    await world.ensure(2, groups(GroupPhase.PENDING, GroupPhase.PENDING, incarnation=0))
    assert world.gateways() == {}
    assert ("Service", "team", "nano") in world.server.objects
    assert ("ConfigMap", "team", "nano-0-gateway") in world.server.objects
    await world.ensure(2, groups(GroupPhase.FORMING, GroupPhase.PENDING))
    assert set(world.gateways()) == {"nano-0-gateway", "nano-1-gateway"}


@pytest.mark.parametrize("phase", GroupPhase)
def test_a_group_that_was_placed_once_keeps_its_gateways(phase: GroupPhase) -> None:
    assert was_placed(groups(phase))
    assert not was_placed(groups(phase, incarnation=0))


async def test_scaling_changes_no_gateway_that_stays() -> None:
    world = World()
    serving = GroupPhase.SERVING
    await world.ensure(1, groups(serving))
    first = world.gateways()["nano-0-gateway"]
    assert first["replicas"] == 2
    await world.ensure(2, groups(serving, GroupPhase.STARTING))
    assert world.gateways()["nano-0-gateway"] == first
    assert world.routed() == [0, 1]
    await world.ensure(1, groups(serving, GroupPhase.STOPPED))
    assert world.gateways() == {"nano-0-gateway": first}
    assert world.routed() == [0]


async def test_a_group_that_finishes_its_requests_has_its_route_and_gateway_until_it_has_stopped() -> None:
    world = World()
    serving = GroupPhase.SERVING
    await world.ensure(2, groups(serving, serving))
    head = ("Service", "team", names.head_name("nano", 1))
    world.server._put(head, head_service(world.wanted(2), 1, 1))
    await world.ensure(1, groups(serving, GroupPhase.DRAINING))
    assert world.routed() == [0, 1]
    assert "nano-1-gateway" in world.gateways()
    assert head in world.server.objects
    await world.ensure(1, groups(serving, GroupPhase.STOPPED))
    assert world.routed() == [0]
    assert "nano-1-gateway" not in world.gateways()
    assert head not in world.server.objects


async def test_a_change_that_was_applied_in_part_is_taken_back() -> None:
    world = World()
    await world.ensure(1, groups(GroupPhase.SERVING))
    world.server.failing["create", "Deployment"] = Forbidden("exceeded quota")
    with pytest.raises(Forbidden):
        await world.ensure(2, groups(GroupPhase.SERVING, GroupPhase.FORMING))
    assert world.routed() == [0, 1]
    stopped = groups(GroupPhase.SERVING).model_copy(update={"removed_incarnation": 7})
    await world.ensure(1, stopped)
    assert world.routed() == [0]
    assert ("ConfigMap", "team", "nano-1-gateway") not in world.server.objects
    assert world.swept == [(0, 7, 7)]
    world.server.requests.clear()
    await world.ensure(1, stopped)
    assert world.server.asked() == []


async def test_the_service_of_a_group_that_is_formed_again_stays() -> None:
    """The removal of the group before it may be slow."""
    world = World()
    await world.ensure(2, groups(GroupPhase.SERVING, GroupPhase.SERVING))
    heads = {incarnation: ("Service", "team", names.head_name("nano", incarnation)) for incarnation in (3, 4)}
    for incarnation, name in heads.items():
        world.server._put(name, head_service(world.wanted(9), incarnation, incarnation))
    await world.ensure(1, groups(GroupPhase.SERVING).model_copy(update={"removed_incarnation": 3}))
    assert heads[3] not in world.server.objects
    assert heads[4] in world.server.objects


@pytest.mark.parametrize(
    ("replicas", "phases", "number"),
    [
        (1, (GroupPhase.SERVING,), 1),
        (0, (GroupPhase.DRAINING, GroupPhase.STOPPED), 1),
        (0, (GroupPhase.STOPPED, GroupPhase.SUSPENDED), 0),
        (1, (GroupPhase.SERVING, GroupPhase.STOPPED, GroupPhase.DRAINING), 3),
        (3, (), 3),
    ],
)
def test_groups_with_a_route(replicas: int, phases: tuple[GroupPhase, ...], number: int) -> None:
    assert routed_groups(deployment("nano.yaml", replicas=replicas), groups(*phases)) == number


async def test_a_gateway_without_its_label_is_no_error() -> None:
    world = World()
    await world.ensure(2, groups(GroupPhase.SERVING, GroupPhase.SERVING))
    del world.server.objects["Deployment", "team", "nano-1-gateway"]["metadata"]["labels"][names.GROUP]
    await world.ensure(1, groups(GroupPhase.SERVING))
    assert "nano-0-gateway" in world.gateways()


async def test_the_names_of_the_model_are_those_of_the_version_that_each_group_has() -> None:
    def named(name: str) -> DSV4Deployment:
        found = world.wanted(2)
        model = found.spec.model.model_copy(update={"served_names": (name,)})
        return found.model_copy(update={"spec": found.spec.model_copy(update={"model": model})})

    async def names(wanted: DSV4Deployment, *of: DSV4Deployment | None) -> tuple[list[str], list[list[str]]]:
        """Return the names in the settings, and in the routes of the groups, which were formed from `of`."""
        found = tuple(
            GroupStatus(
                index=index, phase=GroupPhase.SERVING, incarnation=1, served_names=one.served_names if one else ()
            )
            for index, one in enumerate(of)
        )
        await world.frontend.ensure(wanted, DeploymentStatus(groups=found))
        config = world.server.objects["ConfigMap", "team", "nano-1-gateway"]
        settings, route = (json.loads(config["data"][name]) for name in ("settings.json", "route.json"))
        routes = {one["group"]: one["servedNames"] for one in (route, *route["others"])}
        return settings["servedNames"], [routes[index] for index in sorted(routes)]

    world = World()
    old, new = named("old"), named("new")
    assert await names(old, None, None) == (["old"], [[], []]), "no group was formed"
    assert await names(old, old, old) == (["old"], [["old"], ["old"]])
    template = world.gateways()["nano-0-gateway"]["template"]
    # The change has not begun, or it was refused or given up, also of a group that was never formed.
    assert await names(new, old, old) == (["old"], [["old"], ["old"]])
    assert await names(new, old, None) == (["old"], [["old"], []])
    assert world.gateways()["nano-0-gateway"]["template"] == template
    assert await names(new, old, new) == (["old", "new"], [["old"], ["new"]])
    # Faster than the update of a route.
    assert world.gateways()["nano-0-gateway"]["template"] != template
    assert await names(new, new, new) == (["new"], [["new"], ["new"]])
    # A removed group has no route.
    last = new.model_copy(update={"spec": new.spec.model_copy(update={"replicas": 1})})
    stopped = GroupStatus(index=1, phase=GroupPhase.STOPPED, incarnation=1, served_names=("old",))
    kept = GroupStatus(index=0, phase=GroupPhase.SERVING, incarnation=1, served_names=("new",))
    await world.frontend.ensure(
        last, DeploymentStatus(groups=(kept, stopped), rollout=RolloutStatus(served=formed_from(old)))
    )
    config = world.server.objects["ConfigMap", "team", "nano-0-gateway"]
    assert json.loads(config["data"]["settings.json"])["servedNames"] == ["new"]
