"""Alerts and dashboards use metrics, labels and values that the code exports. tests/cluster checks their syntax."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from enum import StrEnum
from pathlib import Path

import pytest

from dsv4_operator.api import DeploymentPhase, GroupPhase
from dsv4_runtime.contract import Cause, Health, Phase
from dsv4_runtime.gateway.errors import Outcome
from dsv4_runtime.gateway.routing import Availability
from dsv4_testkit import monitoring
from dsv4_testkit.monitoring import ROOT

ALERTS = monitoring.alerts()
QUERIES = [*((rule["alert"], rule["expr"]) for rule in ALERTS), *monitoring.queries()]
SCRAPED = {"namespace", "deployment", "group", "rank", "gateway_group", "instance"}
"""Labels of the scrape configuration."""
SAMPLES = {**monitoring.samples(), "ALERTS": {"alertname", "severity", "alertstate"}}
VALUES: dict[tuple[str, str], type[StrEnum]] = {
    ("dsv4_deployments", "phase"): DeploymentPhase,
    ("dsv4_group_phase", "phase"): GroupPhase,
    ("dsv4_agent_phase", "phase"): Phase,
    ("dsv4_agent_health", "health"): Health,
    ("dsv4_group_recent_failures", "cause"): Cause,
    ("dsv4_gateway_engine_recent_failures", "cause"): Cause,
    ("dsv4_gateway_requests_total", "outcome"): Outcome,
    ("dsv4_gateway_engine_state", "state"): Availability,
}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
LABELS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right) *\(([^)]*)\)")


def metrics_of(query: str) -> set[str]:
    """Return the metrics of a query: names other than functions, keywords, labels, texts and numbers."""
    bare = LABELS.sub(" ", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query))
    return set(re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*\b(?! *\()", bare)) - {"and", "or", "unless", "bool"}


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_uses_exported_metrics_labels_and_values(where: str, query: str) -> None:
    names = metrics_of(query)
    assert names
    assert names <= set(SAMPLES), where
    known = SCRAPED.union(*(SAMPLES[name] for name in names))
    for _, listed in LABELS.findall(query):
        assert {label.strip() for label in listed.split(",") if label.strip()} <= known, query
    for name, matchers in SELECTOR.findall(query):
        for label, _, value in MATCHER.findall(matchers):
            assert label in SAMPLES[name] | SCRAPED, (name, label)
            if (name, label) in VALUES and value != ".*":
                for one in value.split("|"):
                    assert any(re.fullmatch(one, member) for member in VALUES[name, label]), (name, label, one)


def test_names_are_found() -> None:
    query = 'sum by (a) (rate(dsv4_x_total{b="dsv4_no"}[5m])) / on (a) group_left () vllm:y > 0.5 unless z == 1e3'
    assert metrics_of(query) == {"dsv4_x_total", "vllm:y", "z"}


def test_the_list_of_vllms_metrics_is_that_of_its_source() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(found.submodule_search_locations[0]) / "v1"
    text = "".join(file.read_text() for part in ("metrics", "spec_decode") for file in (folder / part).rglob("*.py"))
    assert set(monitoring.VLLM) <= set(re.findall(r'"(vllm:\w+)"', text))


def test_every_exported_metric_is_in_the_documentation() -> None:
    named = "".join((ROOT / "docs" / page).read_text() for page in ("operator.md", "gateway.md", "monitoring.md"))
    names = {name for name in SAMPLES if name.startswith("dsv4_") and not name.endswith("_created")}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert families <= set(re.findall(r"`(dsv4_\w+?)(?:\{.*?\})?`", named))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_severity_texts_and_a_section_of_the_documentation(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    name = str(rule["alert"])
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
    page = (ROOT / "docs" / "alerts.md").read_text()
    section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section
    for part in ("**Meaning.**", "**First check.**", "**Remedy.**"):
        assert part in section[1]
    assert re.search(r"```sh\n.+?```|`[^`]+`", section[1].split("**First check.**")[1], re.DOTALL)
    # No addresses and machine names, because alerts leave the cluster.
    labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert labels <= {"namespace", "deployment", "group", "part"}


def test_no_section_is_without_its_alert() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


def generator() -> types.ModuleType:
    found = importlib.util.spec_from_file_location("dashboards", ROOT / "manifests" / "dashboards.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    # Dataclasses need their module in `sys.modules`.
    sys.modules["dashboards"] = module
    found.loader.exec_module(module)
    return module


def test_the_dashboards_are_fresh() -> None:
    made = generator()
    assert set(made.DASHBOARDS) == set(monitoring.DASHBOARDS)
    for path, dashboard in made.DASHBOARDS.items():
        assert path.read_text() == made.render(dashboard), ".venv/bin/python manifests/dashboards.py"


@pytest.mark.parametrize("file", monitoring.DASHBOARDS, ids=lambda file: file.stem)
def test_panels_take_the_data_source_of_the_variable_and_do_not_overlap(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert dashboard["uid"] == f"dsv4-{file.stem}"
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", file.read_text())) - {"__rate_interval", "__all"} <= variables
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["targets"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
