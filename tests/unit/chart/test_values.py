"""Values of the chart: each is documented, checked by the schema, and used. tests/cluster checks the output of helm."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "dsv4-operator"
TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
# Objects with keys of the user or of Kubernetes.
OPEN = {"resources", "nodeSelector", "affinity", "podAnnotations", "podLabels"}


def test_the_schema_is_one_and_takes_the_defaults() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA, jsonschema.Draft202012Validator)


def closed(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield path, keys of the values and keys of the schema, for every object whose keys the chart defines."""
    yield path, set(values), set(schema["properties"]) - {"global"}
    for key, value in values.items():
        if isinstance(value, dict) and key not in OPEN and "properties" in schema["properties"][key]:
            yield from closed(value, schema["properties"][key], f"{path}.{key}".lstrip("."))


@pytest.mark.parametrize(("path", "there", "known"), list(closed(VALUES, SCHEMA)))
def test_values_and_schema_have_the_same_keys(path: str, there: set[str], known: set[str]) -> None:
    assert there == known, path


def test_every_closed_object_refuses_unknown_keys_and_requires_its_own() -> None:
    for path, there, _ in closed(VALUES, SCHEMA):
        node = SCHEMA
        for part in filter(None, path.split(".")):
            node = node["properties"][part]
        assert node["additionalProperties"] is False, path
        assert set(node["required"]) == there, path


def test_every_key_has_a_comment_above_it() -> None:
    lines = TEXT.splitlines()
    bare = []
    for number, line in enumerate(lines):
        match = re.match(r"( *)([A-Za-z]+):(.*)", line)
        # Groups with keys of the chart have a comment per key, objects of Kubernetes one for the whole.
        group = match and not match[3].strip() and match[2] not in OPEN
        inside = match and any(re.match(rf"{name}:", above) for name in OPEN for above in owners(lines, number))
        if match and not group and not inside and not lines[number - 1].strip().startswith("#"):
            bare.append(match[2])
    assert bare == []


def owners(lines: list[str], number: int) -> Iterator[str]:
    """Yield the lines that enclose a line, without their indentation."""
    depth = len(lines[number]) - len(lines[number].lstrip())
    for line in reversed(lines[:number]):
        indent = len(line) - len(line.lstrip())
        if line.strip() and not line.lstrip().startswith("#") and indent < depth:
            depth = indent
            yield line.strip()


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value and key not in OPEN:
            yield from leaves(value, here)
        else:
            yield here


@pytest.mark.parametrize("path", list(leaves(VALUES)))
def test_every_value_is_used(path: str) -> None:
    parent, _, leaf = path.rpartition(".")
    within = parent and f"with .Values.{parent} " in TEMPLATES and re.search(rf"[ (]\.{leaf}\b", TEMPLATES)
    # The operator receives the parent as a whole.
    within = within or f".Values.{parent} | toJson" in TEMPLATES
    assert within or re.search(rf"\.Values\.{re.escape(path)}\b", TEMPLATES)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replica", 2),
        ("replicas", "1"),
        ("replicas", -1),
        ("image.digest", "sha256:12"),
        ("image.digest", "latest"),
        ("image.pullPolicy", "always"),
        ("image.registry", "example.com"),
        ("runtimeImage", ""),
        ("watchNamespaces", "team-a"),
        ("watchNamespaces", ["team-a", "team-a"]),
        ("watchNamespaces", ["*"]),
        ("crds.enabled", "false"),
        ("metrics.port", 80),
        ("metrics.serviceMonitor.renderMode", "maybe"),
        ("metrics.serviceMonitor.interval", "30"),
        ("metrics.podMonitors.renderMode", "always"),
        ("metrics.prometheusRule.runbooks", "docs"),
        ("metrics.prometheusRule.interval", "30s"),
        ("metrics.dashboards.enabled", "yes"),
        ("podLabels", {"a": 1}),
        ("networkPolicy.from", "everyone"),
        ("fullnameOverride", "Upper"),
        ("fullnameOverride", "1x"),
        ("serviceAccount.create", False),
        ("serviceAccount.name", "a b"),
        ("priorityClassName", "High"),
        ("webhook.certSecret", "a_b"),
        ("runtimeImage", "a b"),
        ("runtimeImage", "Upper"),
        ("policy.engineFlags", ["-tp"]),
        ("policy.engineFlags", ["--a", "--a"]),
        ("policy.engineVariables", ["A B"]),
    ],
)
def test_wrong_values_are_refused(path: str, value: object) -> None:
    values = copy.deepcopy(VALUES)
    *parents, leaf = path.split(".")
    node = values
    for part in parents:
        node = node[part]
    node[leaf] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA, jsonschema.Draft202012Validator)


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    assert VALUES["runtimeImage"].endswith(f":{version}")


def test_the_chart_has_the_definition_by_a_link() -> None:
    assert (CHART / "files" / "crd.yaml").resolve() == ROOT / "manifests" / "crd.yaml"


def test_an_account_of_ones_own_is_named() -> None:
    values = copy.deepcopy(VALUES)
    values["serviceAccount"] |= {"create": False, "name": "operators"}
    jsonschema.validate(values, SCHEMA, jsonschema.Draft202012Validator)


def test_every_text_of_the_templates_is_quoted() -> None:
    """YAML parses unquoted names like 2024, on or null as other types."""
    bare = [
        line.strip()
        for line in TEMPLATES.splitlines()
        if re.match(
            r"\s*(- )?(\w*[nN]ame\w*|namespace|image\w*|caBundle|interval|app\.kubernetes\.io/instance): \{\{", line
        )
        and not re.search(r"\| quote \}\}$", line)
    ]
    assert bare == []
