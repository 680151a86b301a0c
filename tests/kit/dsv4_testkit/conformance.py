"""Requirements for every backend: one suite, run with real processes and with a real API server."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol

import pytest

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import CALL_SECONDS, Backend
from dsv4_operator.lifecycle.observed import Observed, ObservedMember
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.waiting import PATIENCE_SECONDS, Pauses

HEARD_SECONDS = 60.0
"""Bound for the start of an interpreter while other work runs."""
_BUSY_SECONDS = 5.0


class World(Protocol):
    """A backend and its environment."""

    @property
    def backend(self) -> Backend:
        """The backend under test."""
        ...

    @property
    def deployment(self) -> DSV4Deployment:
        """A deployment with one group."""
        ...

    async def end(self, incarnation: int, rank: int) -> None:
        """End a member unexpectedly."""
        ...


class Bounded:
    """A backend whose methods must return within `CALL_SECONDS`, except for one that may take 15 s.

    Pauses of the whole process do not count, and neither do a few seconds on a busy machine.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if not inspect.iscoroutinefunction(method) or name == "close":
            return method
        bound = _BUSY_SECONDS + (15.0 if name == "collect_evidence" else CALL_SECONDS)

        @wraps(method)
        async def bounded(*arguments: Any) -> Any:
            with Pauses() as pauses:
                answer = await method(*arguments)
            assert pauses.ran < bound, f"{name} took {pauses.ran:.1f} s"
            return answer

        return bounded


async def planned(world: World, incarnation: int) -> GroupPlan:
    facts = await world.backend.facts(world.deployment)
    return plan_group(world.deployment, facts, group=0, incarnation=incarnation)


async def over(ask: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
    """Call `ask` repeatedly until it returns true, as successive reconciles do."""
    deadline = time.monotonic() + seconds
    while not await ask():
        assert time.monotonic() < deadline, f"it was not over in {seconds:.0f} s"
        await asyncio.sleep(0.1)


async def fenced(world: World, incarnation: int) -> None:
    """End an incarnation."""
    await over(lambda: world.backend.fence(world.deployment, 0, incarnation))


async def until(
    world: World, what: str, true: Callable[[Observed], bool], seconds: float = PATIENCE_SECONDS
) -> Observed:
    """Observe repeatedly until `true` accepts the observation."""
    deadline = time.monotonic() + seconds
    while True:
        observed = await world.backend.observe(world.deployment, 0)
        if true(observed):
            return observed
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds:.0f} s: {observed}"
        await asyncio.sleep(0.05)


def of(observed: Observed, incarnation: int) -> dict[int, ObservedMember]:
    return {member.rank: member for member in observed.members if member.incarnation == incarnation}


def live(observed: Observed, incarnation: int | None = None) -> list[ObservedMember]:
    return [one for one in observed.members if one.ended is None and incarnation in (None, one.incarnation)]


async def formed(world: World, incarnation: int) -> GroupPlan:
    """Form an incarnation and wait until all its members are observed."""
    plan = await planned(world, incarnation)
    await world.backend.ensure(world.deployment, plan)
    await until(world, "all members are there", lambda seen: len(of(seen, incarnation)) == len(plan.members))
    return plan


class Conformance:
    """Base class of the tests of a backend; subclasses have a fixture `world`."""

    async def test_nothing_is_there_before(self, world: World) -> None:
        assert (await world.backend.observe(world.deployment, 0)).members == ()

    async def test_ensure_makes_each_member_once(self, world: World) -> None:
        plan = await formed(world, 1)
        first = of(await world.backend.observe(world.deployment, 0), 1)
        await asyncio.gather(*(world.backend.ensure(world.deployment, plan) for _ in range(3)))
        await world.backend.ensure(world.deployment, plan)
        seen = await until(world, "all members run", lambda seen: all(one.address for one in seen.members))
        assert sorted(of(seen, 1)) == [member.rank for member in plan.members]
        assert len(seen.members) == len(plan.members)
        for rank, member in of(seen, 1).items():
            assert member.ended is None
            assert member.started == first[rank].started
            assert abs(member.started - time.time()) < 120

    async def test_the_status_of_a_member_comes_from_its_own_agent(self, world: World) -> None:
        plan = await formed(world, 1)
        seen = await until(
            world, "every agent is heard", lambda seen: all(one.status for one in live(seen)), HEARD_SECONDS
        )
        for rank, member in of(seen, 1).items():
            assert member.status is not None
            assert (member.status.incarnation, member.status.rank) == (1, rank)
            assert member.status.deployment == plan.deployment
            assert member.heard is not None
            assert member.waiting is None
        again = await until(
            world,
            "every agent is heard again",
            lambda now: all((one.heard or 0) > (of(seen, 1)[one.rank].heard or 0) for one in live(now)),
        )
        assert all(time.time() - (one.heard or 0) < PATIENCE_SECONDS for one in live(again))

    async def test_a_drain_ends_without_an_engine(self, world: World) -> None:
        assert await world.backend.drain(world.deployment, 0, 1, 5.0)
        await formed(world, 1)
        await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)), HEARD_SECONDS)
        await over(lambda: world.backend.drain(world.deployment, 0, 1, 5.0))
        assert await world.backend.drain(world.deployment, 0, 2, 5.0)

    async def test_no_method_needs_another_one_before_it(self, world: World) -> None:
        backend, deployment = world.backend, world.deployment
        await backend.forget(deployment, 0, 1)
        await fenced(world, 1)
        assert await backend.collect_evidence(deployment, 0, 1) is None
        assert await backend.drain(deployment, 0, 1, 1.0)
        await backend.release(deployment.metadata.namespace, deployment.metadata.name)
        assert (await backend.observe(deployment, 0)).members == ()

    async def test_questions_about_another_deployment_change_nothing(self, world: World) -> None:
        plan = await planned(world, 1)
        metadata = world.deployment.metadata.model_copy(update={"name": "other", "uid": "of-another"})
        other = world.deployment.model_copy(update={"metadata": metadata})
        await world.backend.facts(other)
        assert (await world.backend.observe(other, 0)).key.deployment == "other"
        await world.backend.ensure(world.deployment, plan)
        await until(world, "all members are there", lambda seen: len(live(seen, 1)) == len(plan.members))
        await world.backend.facts(other)
        await fenced(world, 1)
        await until(world, "none is left", lambda seen: not live(seen))

    async def test_fence_ends_every_member_and_nothing_brings_them_back(self, world: World) -> None:
        await formed(world, 1)
        await fenced(world, 1)
        await until(world, "none is left", lambda seen: not live(seen))
        await fenced(world, 1)
        await asyncio.sleep(0.5)
        assert not live(await world.backend.observe(world.deployment, 0))

    async def test_fence_touches_no_other_incarnation(self, world: World) -> None:
        await formed(world, 1)
        await fenced(world, 1)
        await world.backend.forget(world.deployment, 0, 1)
        plan = await formed(world, 2)
        for other in (1, 3):
            await fenced(world, other)
            await world.backend.forget(world.deployment, 0, other)
        seen = await until(world, "the second is there", lambda seen: len(live(seen, 2)) == len(plan.members))
        assert not live(seen, 1)

    async def test_a_member_that_ends_by_itself_is_seen_and_not_made_again(self, world: World) -> None:
        plan = await formed(world, 1)
        last = plan.members[-1].rank
        await until(world, "it is heard", lambda seen: of(seen, 1)[last].status is not None, HEARD_SECONDS)
        await world.end(1, last)
        seen = await until(world, "its end is seen", lambda seen: of(seen, 1)[last].ended is not None)
        assert of(seen, 1)[last].ended_time == pytest.approx(time.time(), abs=PATIENCE_SECONDS)
        await world.backend.ensure(world.deployment, plan)
        again = of(await world.backend.observe(world.deployment, 0), 1)[last]
        assert (again.ended, again.ended_time) == (of(seen, 1)[last].ended, of(seen, 1)[last].ended_time)

    async def test_evidence_is_collected_from_existing_members(self, world: World) -> None:
        assert await world.backend.collect_evidence(world.deployment, 0, 1) is None
        plan = await formed(world, 1)
        await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)), HEARD_SECONDS)
        place = await world.backend.collect_evidence(world.deployment, 0, 1)
        assert place
        assert plan.deployment in place
        await fenced(world, 1)

    async def test_forgotten_members_are_not_observed_again(self, world: World) -> None:
        await formed(world, 1)
        await fenced(world, 1)
        await world.backend.forget(world.deployment, 0, 1)
        await until(world, "nothing is seen", lambda seen: seen.members == ())
        await world.backend.forget(world.deployment, 0, 1)
