"""The CustomResourceDefinition: up to date, structural, and with patterns that accept no more than the models do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import crd
from dsv4_runtime.contract import Document

FILE = Path(__file__).parents[3] / "manifests" / "crd.yaml"
DEFINITION = crd.definition()
VERSION = DEFINITION["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
KEYS = {
    "type", "description", "enum", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems",
    "maxItems", "maxProperties", "format", "pattern", "default", "items", "properties", "additionalProperties",
    "required", "x-kubernetes-validations", "x-kubernetes-int-or-string",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, part in node.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(SCHEMA))


def test_the_file_is_fresh() -> None:
    assert FILE.read_text() == crd.render(), "python -m dsv4_operator.api.crd > manifests/crd.yaml"


def test_all_versions_have_one_schema_and_the_stored_one_is_that_of_earlier_definitions() -> None:
    assert DEFINITION["spec"]["conversion"] == {"strategy": "None"}
    alpha, beta = DEFINITION["spec"]["versions"]
    assert (alpha["name"], alpha["storage"], alpha["served"]) == ("v1alpha1", True, True)
    assert beta == {**alpha, "name": "v1beta1", "storage": False}


def test_it_can_be_applied_from_the_client() -> None:
    # `kubectl apply` stores it in an annotation, for which API servers accept 256 KiB.
    assert len(json.dumps(DEFINITION, separators=(",", ":"))) < 240_000


@pytest.mark.parametrize("path", NODES)
def test_every_part_is_structural(path: str) -> None:
    node = NODES[path]
    assert set(node) <= KEYS
    assert ("type" in node) != node.get("x-kubernetes-int-or-string", False)
    assert isinstance(node.get("exclusiveMinimum", False), bool)
    if node.get("type") == "array":
        assert node["x-kubernetes-list-type"] in {"atomic", "set", "map"}
        for key in node.get("x-kubernetes-list-map-keys", ()):
            assert key in node["items"]["required"]
    assert set(node.get("required", ())) <= set(node.get("properties", {}))
    for name in node.get("required", ()):
        assert "default" not in node["properties"][name]


@pytest.mark.parametrize("path", [path for path in NODES if path.startswith(".spec") and not path.endswith(("]", "}"))])
def test_every_field_of_the_specification_has_a_description(path: str) -> None:
    assert NODES[path]["description"].endswith((".", "`"))


@pytest.mark.parametrize("path", [path for path in NODES if path.startswith(".spec")])
def test_inputs_of_rules_are_bounded(path: str) -> None:
    """The API server estimates the cost of rules, and rejects definitions above its limit."""
    node = NODES[path]
    if node.get("type") == "array":
        assert "maxItems" in node
    if node.get("type") == "string" and "x-kubernetes-validations" in node and "enum" not in node:
        assert node["maxLength"] <= 8192


@pytest.mark.parametrize("path", [path for path in NODES if path.startswith(".spec")])
def test_no_refusal_of_a_text_repeats_it(path: str) -> None:
    """API servers repeat values that violate a pattern, an enum, or a rule without this reason."""
    node = NODES[path]
    assert not {"pattern", "enum", "format"} & set(node)
    if node.get("type") == "string" or node.get("x-kubernetes-int-or-string"):
        assert {one.get("reason") for one in node.get("x-kubernetes-validations", ())} <= {"FieldValueForbidden"}
        assert not any("messageExpression" in one for one in node.get("x-kubernetes-validations", ()))


@pytest.mark.parametrize(
    "path", [path for path, node in NODES.items() if path.startswith(".spec") and node.get("type") == "string"]
)
def test_every_text_has_a_rule_and_a_longest_length(path: str) -> None:
    assert NODES[path]["x-kubernetes-validations"]
    assert NODES[path]["maxLength"] <= 8192


def test_patterns_are_those_of_re2() -> None:
    found = [node["pattern"] for node in NODES.values() if "pattern" in node]
    found += [
        rule["rule"]
        for node in NODES.values()
        for rule in node.get("x-kubernetes-validations", ())
        if "matches" in rule["rule"]
    ]
    assert len(found) > 10
    assert [pattern for pattern in found if re.search(r"\(\?[=!<]|\\[1-9]", pattern)] == []


def test_conditions_come_first_and_are_keyed_by_their_type() -> None:
    status = SCHEMA["properties"]["status"]
    assert next(iter(status["properties"])) == "conditions"
    assert status["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_no_default_is_filled_in_but_the_one_that_scaling_needs() -> None:
    assert [path for path, node in NODES.items() if "default" in node] == [".spec.replicas"]


def test_defaults_are_documented_in_the_notation_of_the_specification() -> None:
    assert NODES[".spec.engine.timeouts.drain"]["description"].endswith("Default: `20s`.")
    assert NODES[".spec.gateway.maxBodyBytes"]["description"].endswith("Default: `64Mi`.")


def test_status_values_of_a_newer_version_are_accepted() -> None:
    assert [path for path, node in NODES.items() if path.startswith(".status") and "enum" in node] == []


def test_columns_and_scale_lead_to_fields() -> None:
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += [path for name, path in VERSION["subresources"]["scale"].items() if name.endswith("Path")]
    for path in paths:
        if "metadata" not in path and "[?" not in path:
            assert path in NODES


class Odd(Document):
    """A type that a structural schema cannot express."""

    either: int | str


def test_types_that_a_structural_schema_cannot_express_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot express"):
        crd.structural(Odd, {})
