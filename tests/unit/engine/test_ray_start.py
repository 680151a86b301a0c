"""Restarts of the dashboard of a Ray node."""

from __future__ import annotations

import subprocess
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_runtime.engine import ray_start
from dsv4_runtime.engine.ray_start import Auxiliaries


class Node:
    """Stand-in for Ray's node with real processes; records the starts of its dashboard."""

    def __init__(self) -> None:
        self.made: list[subprocess.Popen[bytes]] = []
        self.all_processes: dict[str, Any] = {"raylet": [self.process()], "dashboard": [self.process()]}
        self.started: list[float] = []
        self.closed = False

    def process(self) -> Any:
        self.made.append(subprocess.Popen(["sleep", "600"]))
        return types.SimpleNamespace(process=self.made[-1])

    def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        if self.closed:
            # The thread that restarts the dashboard ends if there is none.
            return
        assert include_dashboard
        assert not raise_on_failure
        assert "dashboard" not in self.all_processes, "Ray asserts this"
        self.started.append(time.monotonic())
        self.all_processes["dashboard"] = [self.process()]

    def kill(self, kind: str) -> float:
        """Kill a process as soon as it exists; return the time."""
        deadline = time.monotonic() + 60
        while kind not in self.all_processes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.all_processes[kind][0].process.kill()
        return time.monotonic()

    def wait(self, starts: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.started) < starts:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    yield found
    found.closed = True
    for process in found.made:
        process.kill()
        process.wait(60)


def test_a_dead_dashboard_is_started_again_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    auxiliaries = Auxiliaries("dashboard")
    assert auxiliaries.essential(node) == []
    monkeypatch.setattr(ray_start, "_PAUSE_SECONDS", 600.0)
    node.kill("dashboard")
    node.wait(1)
    assert auxiliaries.essential(node) == []


def test_it_is_started_again_a_bounded_number_of_times(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "_PAUSE_SECONDS", 0.2)
    auxiliaries = Auxiliaries("dashboard")
    assert auxiliaries.essential(node) == []
    for number in range(1, 6):
        node.kill("dashboard")
        node.wait(number)
    assert all(later - earlier >= 0.19 for earlier, later in zip(node.started, node.started[1:], strict=False))
    node.kill("dashboard")
    time.sleep(0.5)
    assert len(node.started) == 5
    assert auxiliaries.essential(node) == []


def test_the_end_of_another_process_ends_the_node(node: Node) -> None:
    auxiliaries = Auxiliaries("dashboard")
    raylet = node.all_processes["raylet"][0].process
    node.kill("dashboard")
    node.kill("raylet")
    raylet.wait(60)
    assert auxiliaries.essential(node) == [("raylet", raylet)]
