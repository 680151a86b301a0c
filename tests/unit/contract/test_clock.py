"""Changes of the machine's clock while a process runs."""

from __future__ import annotations

import pytest

from dsv4_runtime.contract import RecoveryPolicy, permit
from dsv4_runtime.util.clock import SteadyClock

DAY = 86_400.0
START = 1_800_000_000.0


class Machine:
    def __init__(self) -> None:
        self.uptime, self.offset = 1000.0, START - 1000.0
        self.clock = SteadyClock(lambda: self.uptime + self.offset, lambda: self.uptime)

    def after(self, seconds: float) -> float:
        self.uptime += seconds
        return self.clock()


def test_the_clock_follows_the_machines_time_without_jumps() -> None:
    machine = Machine()
    assert machine.after(0.0) == START
    assert machine.after(3600.0) == pytest.approx(START + 3600.0)


def test_small_corrections_are_followed_within_seconds() -> None:
    machine = Machine()
    machine.offset += 0.3
    assert machine.after(1.0) == pytest.approx(START + 1.1)
    assert machine.after(4.0) == pytest.approx(START + 5.3)


@pytest.mark.parametrize("jump", [DAY, 100.0, -100.0, -DAY])
def test_a_jump_is_no_silence(jump: float) -> None:
    machine = Machine()
    machine.offset += jump
    before = START
    for _ in range(100):
        now = machine.after(1.0)
        assert 0.9 <= now - before <= 1.1 + 1e-6
        before = now


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_of_the_clock_neither_resets_the_budget_nor_extends_the_wait(jump: float) -> None:
    """With the machine's own clock five restarts would be forgotten and a sixth allowed."""
    machine = Machine()
    policy = RecoveryPolicy(max_restarts=5, window_seconds=3600, backoff_base_seconds=10, backoff_max_seconds=60)
    restarts = [machine.after(10.0) for _ in range(5)]
    machine.offset += jump
    assert permit(policy, restarts, machine.after(1.0)).at is None
    allowed = permit(policy, restarts[1:], machine.after(1.0)).at
    assert allowed is not None
    assert allowed - machine.clock() <= 60.0
    assert permit(policy, restarts, machine.after(4500.0)).spent == 0
