"""Operations that are interrupted at any request: nothing is left of what they end, and no restart is used."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from dsv4_operator.api.deployment import RESTART_AT
from dsv4_operator.backends.pods import frontend
from dsv4_operator.kube import Forbidden
from dsv4_testkit.pods_world import InterruptedKube, Interruption, Killed, World

TOPOLOGY = {"hardware": "CPU", "nodesPerGroup": 1}
REST_TURNS = 30
"""Reconciles, of up to one second each: far longer than the backoff after one failure."""


class Scaled(World):
    """A deployment of which a user changes something, as a killed operator is replaced."""

    kube: InterruptedKube
    seqs = 4

    @property
    def rests(self) -> bool:
        """Return whether two groups serve the present specification."""
        status = self.status
        current = status["observedGeneration"] == self.live()["metadata"]["generation"]
        return current and status["phase"] == "Serving" and status["updatedReplicas"] == 2

    @property
    def incarnation(self) -> int:
        return int(self.status["groups"][0]["incarnation"])

    def kept(self) -> Counter[tuple[str, str]]:
        """Return the objects of `owned` without numbers of incarnations and without evidence."""
        kept = ((kind, name) for kind, name in self.owned() if "-evidence-" not in name)
        return Counter((kind, re.sub(r"-i[0-9]+", "-i", name)) for kind, name in kept)

    def owned(self) -> set[tuple[str, str]]:
        """Return the objects of the deployment by kind and name."""
        return {(kind, name) for kind, where, name in self.kube.objects if where and kind != "DSV4Deployment"}

    async def turn(self) -> None:
        """Reconcile; an operator that was killed meanwhile is replaced."""
        with contextlib.suppress(Killed):
            await self.step()
        if self.kube.dead:
            self.kube.revive()
            await self.restart()

    async def until_rest(self, wanted: Counter[tuple[str, str]], least: Sequence[int]) -> None:
        """Reconcile until two groups serve with these incarnations or later ones, and have the wanted objects."""
        for _ in range(2 * REST_TURNS):
            await self.turn()
            numbers = [one["incarnation"] for one in self.status["groups"]]
            later = all(number >= first for number, first in zip(numbers, least, strict=True))
            if later and self.rests and self.kept() == wanted and len(self.pods()) == 2:
                return

    async def deliver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Execute the late request. Without a new operator: this one checks once a later execution is impossible."""
        await self.kube.deliver()
        with monkeypatch.context() as patched:
            patched.setattr(frontend, "_LATE_SECONDS", 0.0)
            for _ in range(4):
                await self.turn()

    async def run(self, operation: str, turns: int) -> None:
        """Do what a user does, with some reconciles between."""
        if operation in ("change", "suspend during a change"):
            self.seqs = 9 - self.seqs
            self.change(engine={"maxModelLen": 1024, "maxNumBatchedTokens": 512, "maxNumSeqs": self.seqs})
        if operation == "restart":
            live = self.live()
            live["metadata"]["annotations"] = {RESTART_AT: str(self.now)}
            self.put(live)
        if operation == "death":
            dead = self.status["groups"][1]["incarnation"]
            self.end(dead, 0, group=1)
            for _ in range(REST_TURNS):
                if self.status["groups"][1]["incarnation"] == dead:
                    await self.turn()
        if operation.startswith("suspend"):
            for _ in range(turns):
                await self.turn()
            self.change(suspend=True)
            for _ in range(turns):
                await self.turn()
            self.change(suspend=None)

    async def scale(self, turns: int, wanted: set[tuple[str, str]]) -> None:
        """Scale up, and down again after some reconciles, until the deployment has the wanted objects."""
        self.change(replicas=2)
        for _ in range(turns):
            await self.turn()
        self.change(replicas=1)
        for _ in range(REST_TURNS):
            await self.turn()
            if self.owned() == wanted and len(self.status["groups"]) == 1:
                return


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scaled]:
    logging.disable(logging.CRITICAL)
    found = Scaled(monkeypatch, server=InterruptedKube, topology=TOPOLOGY)
    await found.serve()
    yield found
    await found.close()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("how", Interruption)
async def test_nothing_of_a_removed_group_is_left(world: Scaled, how: Interruption, turns: int) -> None:
    wanted, number = world.owned(), 0
    assert len(wanted) == 11
    while True:
        world.kube.interrupt(number, how)
        await world.scale(turns, wanted)
        request = world.kube.requested
        if not request:
            break
        if how is Interruption.LATE:
            await world.kube.deliver()
            # Objects without a pod are found by the next operator, or by the next check of all objects.
            await world.restart()
            for _ in range(4):
                await world.turn()
        # Secrets are not listed. A token that is created late opens nothing, and is removed with the deployment.
        late = {one for one in world.owned() - wanted if how is Interruption.LATE and one[0] == "Secret"}
        assert world.owned() - late == wanted, f"request {number}: {request}"
        for kind, name in late:
            del world.kube.objects[kind, "team", name]
        (group,) = world.status["groups"]
        assert (group["phase"], group["incarnation"]) == ("Serving", 1)
        number += 1
    assert number > 20


@pytest.mark.parametrize("operation", ["change", "suspend", "suspend during a change", "restart", "death"])
@pytest.mark.parametrize("how", Interruption)
async def test_an_interrupted_operation_ends_as_wanted(world: Scaled, how: Interruption, operation: str) -> None:
    # No restart delays the next one.
    world.change(replicas=2, recovery={"maxRestarts": 100, "window": "10s", "backoff": {"base": "0s", "max": "0s"}})
    for _ in range(REST_TURNS):
        await world.turn()
    assert world.rests
    wanted, number = world.kept(), 0
    while True:
        before = [(one["incarnation"], one["totalRestarts"]) for one in world.status["groups"]]
        world.kube.interrupt(number, how)
        await world.run(operation, 1 + number % 4)
        await world.turn()
        # A suspension that is taken back at once may end nothing.
        ends = operation not in ("suspend", "death")
        least = [old[0] + ends for old in before]
        await world.until_rest(wanted, least)
        request = world.kube.requested
        if not request:
            break
        about = f"request {number}: {request}"
        if how is Interruption.LATE:
            # Late objects without a pod are removed when the group is formed again.
            await world.kube.deliver()
            await world.restart()
            await world.until_rest(wanted, least)
            assert set(world.kept()) == set(wanted), about
            assert len(world.pods()) == 2, about
        else:
            assert world.kept() == wanted, about
        assert world.rests, f"{about}: {world.status}"
        after = [(one["incarnation"], one["totalRestarts"]) for one in world.status["groups"]]
        used = [new[1] - old[1] for new, old in zip(after, before, strict=True)]
        assert used == [0, operation == "death"], about
        assert all(new[0] >= first for new, first in zip(after, least, strict=True)), about
        number += 7
    assert number > 20


@pytest.mark.parametrize("turns", [1, 2, 4])
async def test_a_late_request_leaves_nothing_of_a_suspended_group(
    world: Scaled, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    async def suspend() -> None:
        world.change(suspend=True)
        for _ in range(REST_TURNS):
            await world.turn()
            if world.status["phase"] == "Suspended":
                break

    await suspend()
    wanted, number = world.owned(), 0
    while True:
        # All earlier incarnations are proven to be gone.
        world.change(suspend=None)
        await world.until(lambda: world.status["phase"] == "Serving", 20.0)
        await suspend()
        world.kube.interrupt(number, Interruption.LATE)
        world.change(suspend=None)
        for _ in range(turns):
            await world.turn()
        await suspend()
        request = world.kube.requested
        if not request:
            break
        await world.deliver(monkeypatch)
        # Secrets are not listed, see above.
        left = {one for one in world.owned() - wanted if one[0] == "Secret"}
        assert world.owned() - left == wanted, f"request {number}: {request}"
        for kind, name in left:
            del world.kube.objects[kind, "team", name]
        number += 1
    assert number > 10


@pytest.mark.parametrize("turns", [2, 3, 4])
async def test_a_late_request_leaves_nothing_of_an_earlier_incarnation(
    world: Scaled, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    world.change(recovery={"maxRestarts": 100, "window": "10s", "backoff": {"base": "0s", "max": "0s"}})
    number = 0
    while True:
        before = world.status["groups"][0]["incarnation"]
        world.kube.interrupt(number, Interruption.LATE)
        # The second one follows while the first one is being formed.
        for _ in range(2):
            await world.run("restart", 0)
            for _ in range(turns):
                await world.turn()
        await world.until(lambda before=before: world.status["phase"] == "Serving" and world.incarnation > before, 30.0)
        request = world.kube.requested
        if not request:
            break
        await world.deliver(monkeypatch)
        numbers = {one for one in world.owned() if re.search(r"-i[0-9]+", one[1]) and "-evidence-" not in one[1]}
        left = {one for one in numbers if f"-i{world.incarnation}" not in one[1]}
        # Secrets are not listed, see above.
        assert not [one for one in left if one[0] != "Secret"], f"request {number}: {request}"
        for kind, name in left:
            del world.kube.objects[kind, "team", name]
        number += 1
    assert number > 20


async def test_a_group_without_a_gateway_leaves_nothing(world: Scaled) -> None:
    """A quota allows no other Deployment, or another client deleted it."""
    wanted = world.owned()
    world.kube.failing["create", "Deployment"] = Forbidden("exceeded quota: deployments")
    await world.scale(6, wanted)
    assert world.owned() == wanted


async def test_a_member_that_is_created_after_the_removal_of_its_group_is_ended(world: Scaled) -> None:
    wanted = world.owned()
    world.change(replicas=2)
    await world.until(lambda: len(world.pods()) == 2 and world.status["phase"] == "Serving", 10.0)
    name = "Pod", "team", "nano-1-i1-r0"
    late = copy.deepcopy(world.kube.objects[name])
    world.change(replicas=1)
    await world.until(lambda: world.owned() == wanted and len(world.status["groups"]) == 1, 20.0)
    world.kube._put(name, late)
    await world.until(lambda: world.owned() == wanted, 5.0)
    # A later group of this index has a later incarnation.
    world.change(replicas=2)
    await world.until(lambda: len(world.pods()) == 2 and world.status["phase"] == "Serving", 20.0)
    assert [one["metadata"]["name"] for one in world.pods()] == ["nano-0-i1-r0", "nano-1-i2-r0"]
