"""The lists in docs/gateway.md match the code: metrics, outcomes, states, errors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from dsv4_runtime.contract import Cause, EngineStatus, Failure
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.routing import Availability
from dsv4_runtime.util.clock import unix_time

DOC = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a text."""
    table = DOC[DOC.index(heading) :].split("\n|", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()][2:]


def test_every_metric_is_listed_with_its_labels() -> None:
    metrics = GatewayMetrics()
    engine = EngineStatus(
        generation=1,
        failures=(Failure(time=unix_time(), cause=Cause.ENGINE_HUNG, message="", detected_by="steps"),),
    )
    watched = SimpleNamespace(
        engine=SimpleNamespace(state=Availability.AWAY),
        age=1.0,
        connected=True,
        report=SimpleNamespace(engine=engine, group_watts=1.0),
    )
    metrics.observe(SimpleNamespace(all={0: watched}, refusal=None), lambda: 0, lambda: 0, lambda: 0.0)
    found = set()
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.endswith("_created"):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + "_total" * (family.type == "counter")
        found.add(f"{name}{{{','.join(labels)}}}" if labels else name)
    listed = {name for row in rows("The gateway adds:") for name in re.findall(r"`([^`]+)`", row[0])}
    assert listed == found


def test_every_outcome_and_state_is_listed() -> None:
    meanings = {row[0].strip("`"): set(re.findall(r"`([^`]+)`", row[1])) for row in rows("The gateway adds:")}
    assert meanings["dsv4_gateway_requests_total{outcome}"] == set(errors.Outcome)
    assert meanings["dsv4_gateway_engine_state{group,state}"] == set(Availability)


def test_every_error_is_listed_with_its_status() -> None:
    refusals = [found for _, found in inspect.getmembers(errors) if isinstance(found, errors.Refusal)]
    for name, function in inspect.getmembers(errors, inspect.isfunction):
        if name.startswith("_") or "Refusal" not in str(function.__annotations__.get("return")):
            continue
        arguments = [1 if kind.annotation == "int" else "x" for kind in inspect.signature(function).parameters.values()]
        refusals.append(function(*arguments))
    made = {(str(refusal.status), f"`{refusal.code}`") for refusal in refusals}
    assert {(status, code) for status, code, _ in rows("## Errors of its own")} == made
