"""Series that a head recorded with the nano engine on two cores, judged again sample by sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dsv4_runtime.contract import Health, HealthPolicy
from dsv4_runtime.health.rules import judge
from dsv4_runtime.health.samples import Sample

SERIES = sorted((Path(__file__).parent / "series").glob("*.json"))
SAMPLES = TypeAdapter(list[Sample])


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_a_recorded_series(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text())
    expected, samples = document["expected"], SAMPLES.validate_python(document["samples"])
    verdicts = [judge(samples[: end + 1], HealthPolicy(), samples[end].time) for end in range(len(samples))]
    before, last = verdicts[:-1], verdicts[-1]
    assert [verdict for verdict in before if verdict.health is Health.DEAD] == [], "too early"
    if expected["health"] == "Dead":
        assert (last.health, last.cause, last.culprit_rank) == (
            Health.DEAD,
            expected["cause"],
            expected["culprit"],
        )
    else:
        assert last.health is not Health.DEAD


def test_there_are_series() -> None:
    assert len(SERIES) >= 4
