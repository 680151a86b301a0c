"""The CustomResourceDefinition: fresh, structural, and no laxer than the models where a pattern says what they take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dsv4_operator.api import crd, schema
from dsv4_operator.api.model_source import Url
from dsv4_operator.api.values import LONGEST_DURATION, Duration, Quantity
from dsv4_runtime.contract import Document

FILE = Path(__file__).parents[3] / "manifests" / "crd.yaml"
DEFINITION = crd.definition()
VERSION = DEFINITION["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
KEYS = {
    "type", "description", "enum", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems",
    "maxItems", "format", "pattern", "default", "items", "properties", "additionalProperties", "required",
    "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
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


def test_it_can_be_applied_from_the_client() -> None:
    assert FILE.stat().st_size < 100_000


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
def test_every_field_of_the_specification_says_what_it_is(path: str) -> None:
    assert NODES[path]["description"].endswith((".", "`"))


@pytest.mark.parametrize("path", [path for path in NODES if path.startswith(".spec")])
def test_what_a_rule_walks_is_bounded(path: str) -> None:
    """The API server estimates what a rule costs, and refuses the definition if that is too much."""
    node = NODES[path]
    if node.get("type") == "array":
        assert "maxItems" in node
    if node.get("type") == "string" and "x-kubernetes-validations" in node and "enum" not in node:
        assert node["maxLength"] <= 8192


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


def test_conditions_come_first_and_are_told_apart_by_their_type() -> None:
    status = SCHEMA["properties"]["status"]
    assert next(iter(status["properties"])) == "conditions"
    assert status["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_no_default_is_filled_in_but_the_one_that_scaling_needs() -> None:
    assert [path for path, node in NODES.items() if "default" in node] == [".spec.replicas"]


def test_defaults_are_told_as_they_are_written() -> None:
    assert NODES[".spec.engine.timeouts.drain"]["description"].endswith("Default: `20s`.")
    assert NODES[".spec.gateway.maxBodyBytes"]["description"].endswith("Default: `64Mi`.")


def test_what_a_newer_version_writes_into_the_status_is_taken() -> None:
    assert [path for path, node in NODES.items() if path.startswith(".status") and "enum" in node] == []


def test_columns_and_scale_lead_to_fields() -> None:
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += [path for name, path in VERSION["subresources"]["scale"].items() if name.endswith("Path")]
    for path in paths:
        if "metadata" not in path and "[?" not in path:
            assert path in NODES


def pattern_of(path: str) -> str:
    node = NODES[path]
    if "pattern" in node:
        return str(node["pattern"])
    (matches,) = (re.fullmatch(r'self\.matches\("(.*)"\)', rule["rule"]) for rule in node["x-kubernetes-validations"])
    assert matches
    return matches[1].replace("\\\\", "\\").replace('\\"', '"')


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (".spec.recovery.window", Duration),
        (".spec.engine.kvCacheMemory", Quantity),
        (".spec.model.source.http.url", Url),
    ],
)
@given(data=st.data())
def test_what_the_pattern_takes_the_model_takes(path: str, kind: Any, data: st.DataObject) -> None:
    pattern = pattern_of(path).replace("$", r"\Z") if path.endswith("window") else pattern_of(path)[:-1] + r"\Z"
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII)))
    assume(kind is not Duration or len(text) <= LONGEST_DURATION)
    TypeAdapter(kind).validate_python(text)


class Odd(Document):
    """Nothing that a structural schema can say."""

    either: int | str


def test_what_a_structural_schema_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot say"):
        schema.structural(Odd, {})
