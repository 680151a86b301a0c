"""Order and times of reconciliations in the work queue."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from dsv4_operator.controller import queue
from dsv4_operator.controller.queue import WorkQueue
from dsv4_testkit.waiting import until


class Worker:
    """Records turns, and fails if two turns of one key overlap."""

    def __init__(self, pause: float | None = 60.0, seconds: float = 0.0) -> None:
        self.turns: list[str] = []
        self.times: list[float] = []
        """Monotonic times at which they began."""
        self.busy: set[str] = set()
        self.pause, self.seconds = pause, seconds
        self.broken = 0

    async def __call__(self, key: str) -> float | None:
        assert key not in self.busy
        self.busy.add(key)
        self.turns.append(key)
        self.times.append(time.monotonic())
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.busy.discard(key)
        if self.broken:
            self.broken -= 1
            raise OSError("broken")
        return self.pause


async def settled(turns: float = 0.05) -> None:
    await asyncio.sleep(turns)


async def test_changes_during_a_reconciliation_cause_exactly_one_more() -> None:
    worker = Worker(seconds=0.05)
    work = WorkQueue(worker)
    work.add("a")
    await until(lambda: worker.busy)
    for _ in range(5):
        work.add("a")
    await until(lambda: len(worker.turns) == 2 and not worker.busy)
    await settled(0.1)
    assert worker.turns == ["a", "a"]
    await work.close()


async def test_a_key_is_repeated_at_its_requested_time() -> None:
    worker = Worker(pause=0.03)
    work = WorkQueue(worker)
    work.add("a")
    await until(lambda: len(worker.turns) == 7)
    assert all(later - earlier > 0.02 for earlier, later in pairwise(worker.times))
    await work.close()


async def test_a_completed_key_is_removed_and_its_later_changes_are_kept() -> None:
    worker = Worker(pause=None, seconds=0.02)
    work = WorkQueue(worker)
    work.add("a")
    await until(lambda: worker.turns == ["a"] and len(work) == 0)
    work.add("a")
    await until(lambda: worker.busy)
    work.add("a")
    await until(lambda: len(worker.turns) == 3 and len(work) == 0)
    await settled()
    assert worker.turns == ["a", "a", "a"]


async def test_workers_are_bounded_and_keys_do_not_wait_for_each_other_beyond_that() -> None:
    worker = Worker(seconds=0.05)
    work = WorkQueue(worker, workers=2)
    for key in "abcd":
        work.add(key)
    await until(lambda: worker.busy)
    assert len(worker.busy) == 2
    assert work.longest_call > 0
    await until(lambda: len(worker.turns) == 4 and not worker.busy)
    assert sorted(worker.turns) == ["a", "b", "c", "d"]
    await until(lambda: work.longest_call == 0)
    await work.close()


async def test_failed_reconciliations_back_off_and_changes_shorten_the_delay_to_a_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, failures = 0.05, 12
    monkeypatch.setattr(queue, "FIRST_BACKOFF_SECONDS", first)
    told: list[float] = []
    worker = Worker()
    worker.broken = failures
    work = WorkQueue(worker, longest=1e9, failed=lambda _key, _error, pause: told.append(pause))
    work.add("a")
    for turn in range(1, failures + 1):
        await until(lambda turn=turn: len(told) == turn)
        # Without this change the last turn would begin after more than three minutes.
        work.add("a")
    await until(lambda: len(worker.turns) == failures + 1)
    # A writer that fails must not be driven by its own news.
    assert all(later - earlier > 0.8 * first for earlier, later in pairwise(worker.times))
    assert [round(pause / (first * 2**turn)) for turn, pause in enumerate(told)] == [1] * failures
    await work.close()


async def test_the_longest_wait_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_BACKOFF_SECONDS", 0.02)
    told: list[float] = []
    worker = Worker()
    worker.broken = 6
    work = WorkQueue(worker, longest=0.05, failed=lambda _key, _error, pause: told.append(pause))
    work.add("a")
    await until(lambda: len(worker.turns) == 7)
    assert max(told) <= 0.055
    await work.close()


async def test_close_interrupts_turns_and_nothing_begins_afterwards() -> None:
    worker = Worker(seconds=600)
    work = WorkQueue(worker)
    work.add("a")
    await until(lambda: worker.busy)
    await asyncio.wait_for(work.close(), 60)
    work.add("b")
    await settled(0.01)
    assert worker.turns == ["a"]
    assert not worker.busy


async def test_bursts_of_changes_share_a_reconciliation() -> None:
    worker = Worker()
    work = WorkQueue(worker, min_interval=600.0)
    work.add("a")
    for _ in range(10):
        await settled(0.01)
        work.add("a")
    assert worker.turns == ["a"]
    await work.close()

    worker = Worker()
    work = WorkQueue(worker, min_interval=1.0)
    work.add("a")
    await until(lambda: worker.turns)
    for _ in range(10):
        work.add("a")
    await until(lambda: len(worker.turns) >= 2)
    assert worker.times[1] - worker.times[0] > 0.9
    await settled(1.5)
    assert worker.turns == ["a", "a"]
    await work.close()


async def test_a_key_that_requests_an_immediate_repetition_gets_it() -> None:
    worker = Worker(pause=0.0)
    work = WorkQueue(worker, min_interval=600.0)
    work.add("a")
    await until(lambda: len(worker.turns) > 3)
    await work.close()
