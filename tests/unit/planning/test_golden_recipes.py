"""Known-good recipes from one-screen manifests; docs/rendering.md explains exactly their differences."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import load
from dsv4_operator.planning import catalog_facts, plan_group
from dsv4_operator.planning.catalog import machine
from dsv4_runtime.contract import GroupPlan

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())
PAGE = Path(__file__).parents[3] / "docs" / "rendering.md"
_ONE_SCREEN = 40


def planned(name: str) -> GroupPlan:
    deployment = load((GOLDEN / name / "manifest.yaml").read_text())
    kind = machine(deployment.spec.topology.hardware)
    facts = catalog_facts(deployment, kind, state_root="/state", weights_root="/weights")
    nodes = tuple(replace(node, interface=recipe(name)["interface"]) for node in facts.nodes)
    return plan_group(deployment, replace(facts, nodes=nodes), group=0, incarnation=1)


def recipe(name: str) -> dict[str, Any]:
    return tomllib.loads((GOLDEN / name / "recipe.toml").read_text())


def settings(plan: GroupPlan) -> dict[str, object]:
    """Return flags with their values (True without one) and the environment of rank 0."""
    found: dict[str, object] = dict(plan.environment(0))
    last = ""
    for word in plan.engine.args:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            found[last] = value if equals else True
        else:
            found[last] = word
    return found


def value(text: object) -> object:
    return json.loads(text) if isinstance(text, str) and text.startswith("{") else text


def differences(name: str) -> set[str]:
    ours, theirs = settings(planned(name)), recipe(name)
    asked = theirs["args"] | theirs["env"]
    return {key for key in asked.keys() | ours.keys() if value(asked.get(key)) != value(ours.get(key))}


def explained() -> set[tuple[str, str]]:
    """Return recipe and setting of every row of the page's table; `all` stands for every recipe."""
    section = PAGE.read_text().split("## Differences from the recipes")[1].split("\n## ")[0]
    found = set()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or cells[0] == "setting" or set(cells[0]) <= {"-"}:
            continue
        assert cells[2], f"{cells[0]}: the row explains nothing"
        recipes = NAMES if cells[1] == "all" else [part.strip() for part in cells[1].split(",")]
        found |= {(one, setting) for one in recipes for setting in re.findall(r"`([^`]+)`", cells[0])}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_difference_from_the_recipe_is_explained(name: str) -> None:
    rows = {setting for recipe_name, setting in explained() if recipe_name == name}
    assert differences(name) - rows == set()


def test_every_explained_setting_differs_in_some_recipe() -> None:
    actual = {(name, setting) for name in NAMES for setting in differences(name)}
    used = {setting for _, setting in actual}
    assert {setting for _, setting in explained()} - used == set()
    assert {name for name, _ in explained()} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_fits_on_one_screen(name: str) -> None:
    assert len((GOLDEN / name / "manifest.yaml").read_text().splitlines()) <= _ONE_SCREEN


def test_essential_settings_equal_the_recipe_of_nvidia() -> None:
    ours, theirs = settings(planned("nvidia-2x-spark")), recipe("nvidia-2x-spark")
    same = {key for key, asked in (theirs["args"] | theirs["env"]).items() if value(ours.get(key)) == value(asked)}
    assert same >= {"--speculative-config", "--compilation-config", "--max-cudagraph-capture-size", "--moe-backend"}
    assert same >= {name for name in theirs["env"] if name.startswith(("VLLM_", "B12X_", "CUTE_"))}


def test_the_compiled_graph_executor_has_its_own_bounds_and_no_other_has_them() -> None:
    legacy = planned("pro-8x-spark").environment(3)
    assert legacy["RAY_CGRAPH_get_timeout"] == legacy["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "900"
    for name in set(NAMES) - {"pro-8x-spark"}:
        assert not [key for key in planned(name).environment(0) if key.startswith("RAY_CGRAPH")]
