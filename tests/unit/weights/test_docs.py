"""The examples of docs/weights.md are valid specifications, and result in the plan that the page describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dsv4_operator.api.deployment import parse
from dsv4_operator.planning.setup import weights_plan
from dsv4_runtime.contract import WeightsSource

PAGE = Path(__file__).parents[3] / "docs" / "weights.md"


def test_every_example_is_taken() -> None:
    examples: list[dict[str, Any]] = [
        yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    ]
    whole = examples[0]
    sources = set()
    for example in examples:
        model = {**whole["spec"]["model"], **example["spec"].get("model", {})}
        deployment = parse({**whole, "spec": {**whole["spec"], **example["spec"], "model": model}})
        sources.add(weights_plan(deployment, "/weights", "/secrets").source)
    assert sources == set(WeightsSource) - {WeightsSource.NANO, WeightsSource.PATH}
