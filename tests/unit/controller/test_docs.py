"""docs/operator.md lists all flags, metrics, paths and annotations."""

from __future__ import annotations

import re
from pathlib import Path

from dsv4_operator.api.deployment import PAUSED, RESTART_AT
from dsv4_operator.controller.observability import OperatorMetrics, ProbeServer
from dsv4_operator.controller.operator import command_line

PAGE = (Path(__file__).parents[3] / "docs" / "operator.md").read_text()


def test_every_flag_has_its_line_and_no_other() -> None:
    there = {flag for action in command_line()._actions for flag in action.option_strings if flag.startswith("--")}
    assert set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)) == there - {"--help"}


def test_every_metric_is_named_and_no_other() -> None:
    metrics = OperatorMetrics()
    metrics.observe(list, lambda: True, lambda: 0)
    there = set(re.findall(r"^# TYPE (\w+) ", metrics.text().decode(), re.MULTILINE))
    there = {name for name in there if not name.endswith("_created")}
    named = set(re.findall(r"`(dsv4_\w+?)(?:\{.*?\})?`", PAGE))
    assert named == there


def test_paths_and_annotations_are_those_of_the_code() -> None:
    server = ProbeServer(1, live=lambda: None, ready=lambda: None, metrics=lambda: b"")
    paths = {route.resource.canonical for route in server._runner.app.router.routes() if route.resource}
    assert paths == set(re.findall(r"^\| `(/\w+)`", PAGE, re.MULTILINE))
    assert RESTART_AT in PAGE
    assert PAUSED in PAGE
