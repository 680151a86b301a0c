"""Ray's node without its dashboard."""

from __future__ import annotations

from typing import Any

from dsv4_runtime.engine.ray_start import Auxiliaries

RAYLET = ("raylet", object())
DASHBOARD = ("dashboard", object())


class Node:
    """Counts starts of a dashboard; the next ones end too if `lasting` is 0."""

    def __init__(self) -> None:
        self.all_processes: dict[str, Any] = {"dashboard": [], "raylet": []}
        self.started = 0

    def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        assert include_dashboard
        assert not raise_on_failure
        assert "dashboard" not in self.all_processes, "Ray asserts this"
        self.all_processes["dashboard"] = []
        self.started += 1


def test_a_dead_dashboard_is_started_again_a_bounded_number_of_times() -> None:
    node, auxiliaries = Node(), Auxiliaries("dashboard")
    assert auxiliaries.essential(node, [], 0.0) == []
    assert auxiliaries.essential(node, [DASHBOARD], 1.0) == []
    assert node.started == 1
    assert auxiliaries.essential(node, [DASHBOARD], 2.0) == []
    assert node.started == 1, "not at once again"
    assert auxiliaries.essential(node, [], 12.0) == []
    assert node.started == 2
    for second in range(20, 2000):
        assert auxiliaries.essential(node, [DASHBOARD], second) == []
    assert node.started == 5


def test_the_end_of_another_process_ends_the_node() -> None:
    node, auxiliaries = Node(), Auxiliaries("dashboard")
    assert auxiliaries.essential(node, [RAYLET, DASHBOARD], 1.0) == [RAYLET]
