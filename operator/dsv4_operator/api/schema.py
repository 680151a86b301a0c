"""Structural schemas of Kubernetes (`apiextensions.k8s.io/v1`) from pydantic models. Pure.

Pydantic's JSON schemas have references, unions with null, titles and numeric exclusive bounds; the API server refuses
or mangles all of them. Defaults are told in the descriptions instead of being filled in by the server: what is stored
stays what the user wrote, and server-side apply sees no owner for what nobody wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dsv4_operator.api.values import (
    DURATION_FORMAT,
    LONGEST_DURATION,
    QUANTITY_FORMAT,
    format_duration,
    format_quantity,
)

Schema = dict[str, Any]

_DURATION = r"^(?:[0-9]+(?:\.[0-9]{1,3})?(?:h|m|s)|[0-9]+ms)+$"
# Fractions that come to whole numbers of bytes.
_QUANTITY = (
    r"^(?:[0-9]+(?:[KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?|[0-9]+\.[0-9]{1,3}[kMGTPE]"
    r"|[0-9]+\.(?:5|25|75|125|375|625|875)[KMGTPE]i)$"
)
_KEPT = ("type", "description", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "format")


def structural(model: type[BaseModel], lists: Mapping[str, str], *, enums: bool = True) -> Schema:
    """Return the schema of `model`, as it is written on the wire.

    Args:
        model: not recursive.
        lists: name of a list field to the key that its entries are told apart by, empty for a set of words; all other
            lists are written as a whole.
        enums: whether only the known words of an enum are taken. Not in a status: what a newer version writes is kept.

    Raises:
        ValueError: something that a structural schema cannot say.
    """
    document = model.model_json_schema(by_alias=True)
    return _Converter(document.pop("$defs", {}), lists, enums=enums).node(document, "")


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema], lists: Mapping[str, str], *, enums: bool) -> None:
        self._definitions = definitions
        self._lists = lists
        self._enums = enums

    def node(self, node: Schema, name: str) -> Schema:
        """Return the part of the schema below the field `name`."""
        node = self._resolved(node)
        kept = {key: node[key] for key in _KEPT if key in node}
        if text := _description(node):
            kept["description"] = text
        if self._enums and ("enum" in node or "const" in node):
            kept["enum"] = node.get("enum") or [node["const"]]
        if "anyOf" in node:
            return _either(kept, node["anyOf"])
        if node.get("format") == DURATION_FORMAT:
            return {**_without(kept, "format"), "pattern": _DURATION, "maxLength": LONGEST_DURATION}
        if node.get("format") == QUANTITY_FORMAT:
            return {**_without(kept, "format", "type"), "pattern": _QUANTITY, "x-kubernetes-int-or-string": True}
        if "refusal" in node:
            # In place of `pattern`, whose refusal would only repeat it.
            kept["x-kubernetes-validations"] = [rule(f"self.matches({text_of(node['pattern'])})", node["refusal"])]
        if "exclusiveMinimum" in node:
            kept |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
        if node.get("type") == "array":
            kept |= _list(self.node(node["items"], name), self._lists.get(name))
        if node.get("type") == "object":
            kept |= self._object(node)
        if "type" not in kept:
            raise ValueError(f"{name}: a structural schema cannot say {json.dumps(node)[:200]}")
        return kept

    def _resolved(self, node: Schema) -> Schema:
        """Return `node` without references and without the null of an optional field."""
        while True:
            options = [option for option in node.get("anyOf", ()) if option != {"type": "null"}]
            if len(options) == 1:
                node = {**_without(node, "anyOf"), **options[0], **_own(node)}
            elif "$ref" in node:
                node = {**self._definitions[node["$ref"].rsplit("/", 1)[1]], **_without(node, "$ref")}
            else:
                return node

    def _object(self, node: Schema) -> Schema:
        if "properties" not in node:
            return {"additionalProperties": self.node(node["additionalProperties"], "")}
        found: Schema = {"properties": {name: self.node(part, name) for name, part in node["properties"].items()}}
        if required := node.get("required"):
            found["required"] = required
        return found


def _list(items: Schema, key: str | None) -> Schema:
    """Convert one list; `key` is as in `structural`, and None means that the list is written as a whole."""
    if key is None:
        return {"items": items, "x-kubernetes-list-type": "atomic"}
    if not key:
        return {"items": items, "x-kubernetes-list-type": "set"}
    items["required"] = sorted({*items.get("required", ()), key})
    return {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def rule(expression: str, message: str) -> Schema:
    """Return one entry of `x-kubernetes-validations`: in CEL what must hold, and what is said if it does not."""
    return {"rule": expression, "message": message}


def text_of(text: str) -> str:
    """Return `text` as a literal of CEL."""
    return json.dumps(text, ensure_ascii=False)


def _either(kept: Schema, options: list[Schema]) -> Schema:
    """Return one word, or a number within bounds."""
    word = next((option.get("const") for option in options if option.get("type") == "string"), None)
    number = next((option for option in options if option.get("type") == "integer"), None)
    if word is None or number is None or len(options) != 2:
        raise ValueError(f"a structural schema cannot say {json.dumps(options)[:200]}")
    low, high = number["minimum"], number["maximum"]
    expression = f"type(self) == int ? self >= {low} && self <= {high} : self == {text_of(word)}"
    return {
        **_without(kept, "type"),
        "x-kubernetes-int-or-string": True,
        "x-kubernetes-validations": [rule(expression, f"is neither {word} nor a number from {low} to {high}")],
    }


def _own(node: Schema) -> Schema:
    """Return what a field says of itself, which wins over what its type says."""
    return {key: node[key] for key in ("description", "default") if key in node}


def _description(node: Schema) -> str:
    text = " ".join(node.get("description", "").split())
    default = node.get("default")
    if default is None or default in ("", []) or isinstance(default, dict) or "Default:" in text:
        return text
    if node.get("format") == DURATION_FORMAT:
        default = format_duration(default)
    elif node.get("format") == QUANTITY_FORMAT:
        default = format_quantity(default)
    return f"{text} Default: `{default if isinstance(default, str) else json.dumps(default)}`."


def _without(node: Schema, *keys: str) -> Schema:
    return {key: value for key, value in node.items() if key not in keys}
