"""Leader election: several candidates for one lease, each with its own clock, and an API server with outages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsv4_operator.controller import lease as module
from dsv4_operator.controller.lease import DEADLINE_SECONDS, LEASE_SECONDS, Lease, NotLeading
from dsv4_testkit.fake_kube import FakeKube


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(kube: FakeKube, name: str, clock: Clock | None = None) -> Lease:
    found: Any = kube
    return Lease(found, "team", "dsv4-operator", name, clock=clock or Clock())


async def tries(lease: Lease) -> bool:
    """Return whether the lease was acquired in several attempts."""
    acquiring = asyncio.create_task(lease.acquire())
    for _ in range(50):
        await asyncio.sleep(0.001)
        if acquiring.done():
            await acquiring
            return True
    acquiring.cancel()
    await asyncio.gather(acquiring, return_exceptions=True)
    return False


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)


async def test_a_live_holder_is_waited_for_until_its_lease_was_unchanged_for_as_long_as_it_lasts() -> None:
    kube, clock = FakeKube(), Clock()
    holder, other = candidate(kube, "a"), candidate(kube, "b", clock)
    assert await tries(holder)
    assert not await tries(other)
    clock.now += LEASE_SECONDS - 1
    assert not await tries(other)
    # A renewal restarts the waiting time.
    assert await holder._renew()
    clock.now += 2
    assert not await tries(other)
    clock.now += LEASE_SECONDS - 1
    assert not await tries(other)
    clock.now += 2
    assert await tries(other)


async def test_a_holder_acts_for_two_thirds_of_its_lease_and_no_longer() -> None:
    clock = Clock()
    holder = candidate(FakeKube(), "a", clock)
    with pytest.raises(NotLeading):
        holder.check()
    assert await tries(holder)
    holder.check()
    assert pytest.approx(LEASE_SECONDS * 2 / 3) == DEADLINE_SECONDS
    clock.now += DEADLINE_SECONDS - 0.1
    holder.check()
    clock.now += 0.1
    assert not holder.holds
    with pytest.raises(NotLeading, match="a does not hold the lease team/dsv4-operator"):
        holder.check()


async def test_the_time_of_a_renewal_counts_from_before_it_was_sent() -> None:
    kube, clock = FakeKube(), Clock()
    holder = candidate(kube, "a", clock)
    assert await tries(holder)
    real = kube.replace

    async def slow(manifest: Any, **options: Any) -> Any:
        clock.now += 6
        return await real(manifest, **options)

    kube.replace = slow  # type: ignore[method-assign]
    assert await holder._renew()
    clock.now += DEADLINE_SECONDS - 6
    assert not holder.holds


async def test_a_holder_that_cannot_renew_stops() -> None:
    kube, clock = FakeKube(), Clock()
    holder = candidate(kube, "a", clock)
    assert await tries(holder)
    kube.broken = True
    kept = asyncio.create_task(holder.keep())
    await asyncio.sleep(0.02)
    assert holder.holds
    clock.now += DEADLINE_SECONDS
    await asyncio.wait_for(kept, 60)
    assert not holder.holds


async def test_a_lease_that_another_took_is_not_renewed() -> None:
    kube, clock = FakeKube(), Clock()
    holder, other = candidate(kube, "a"), candidate(kube, "b", clock)
    assert await tries(holder)
    assert not await tries(other)
    clock.now += LEASE_SECONDS + 1
    assert await tries(other)
    await asyncio.wait_for(holder.keep(), 60)
    assert not holder.holds
    assert other.holds


async def test_of_two_concurrent_candidates_one_gets_the_lease() -> None:
    kube = FakeKube()
    both = [candidate(kube, name) for name in "ab"]
    assert sorted(await asyncio.gather(*map(tries, both))) == [False, True]


async def test_a_released_lease_is_taken_at_once() -> None:
    kube = FakeKube()
    holder, other = candidate(kube, "a"), candidate(kube, "b")
    assert await tries(holder)
    await holder.release()
    assert not holder.holds
    assert await tries(other)


async def test_an_answer_that_cannot_be_read_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kube, clock = FakeKube(), Clock()
    holder = candidate(kube, "a", clock)
    real, answers = kube.get, [ValueError("no JSON"), ValueError("no JSON")]

    async def get(*arguments: Any) -> Any:
        if answers:
            raise answers.pop()
        return await real(*arguments)

    monkeypatch.setattr(kube, "get", get)
    assert await tries(holder)

    async def replace(*_: Any, **__: Any) -> Any:
        clock.now += DEADLINE_SECONDS / 3
        raise ValueError("no JSON")

    monkeypatch.setattr(kube, "replace", replace)
    await asyncio.wait_for(holder.keep(), 60)
    assert clock.now >= DEADLINE_SECONDS, "the deadline decides, not the first answer"
    await holder.release()
