"""Structural schemas of Kubernetes (`apiextensions.k8s.io/v1`) from pydantic models. Pure.

Pydantic's JSON schemas have references, unions with null, titles and numeric exclusive bounds; the API server refuses
or mangles all of them. Its own refusals of a text repeat the text, which may be a secret, and round the bounds of a
fraction; so both are rules of CEL, with a reason that leaves the value out. Defaults are told in the descriptions
instead of being filled in by the server: what is stored stays what the user wrote, and server-side apply sees no owner
for what nobody wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dsv4_operator.api.values import (
    DURATION_FORMAT,
    DURATION_PATTERN,
    DURATION_REFUSAL,
    LONGEST_DURATION,
    LONGEST_QUANTITY,
    QUANTITY_FORMAT,
    QUANTITY_PATTERN,
    QUANTITY_REFUSAL,
    format_duration,
    format_quantity,
)

Schema = dict[str, Any]

_LONGEST_WORD = 64
"""Characters of a word of an enum, which bound the cost of its rule."""
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
        if "anyOf" in node:
            return _either(kept, node["anyOf"])
        if node.get("format") == DURATION_FORMAT:
            kept = {**_without(kept, "format"), "maxLength": LONGEST_DURATION}
            return _ruled(kept, *_duration(node["between"]))
        if node.get("format") == QUANTITY_FORMAT:
            kept = {**_without(kept, "format", "type"), "maxLength": LONGEST_QUANTITY}
            return _ruled({**kept, "x-kubernetes-int-or-string": True}, *_quantity(node["between"]))
        if self._enums and ("enum" in node or "const" in node):
            words = node.get("enum") or [node["const"]]
            kept["maxLength"] = _LONGEST_WORD
            _ruled(kept, rule(f"self in {json.dumps(words)}", f"is unknown; use one of {', '.join(words)}"))
        _ruled(kept, *(_text(*given) for given in node.get("texts", ())))
        if node.get("type") == "integer" and self._enums:
            # 1.0 is a whole number for a schema, and none for a rule and for `parse`.
            _ruled(kept, rule("self == int(self)", "is not a whole number; write it without a fraction"))
        if node.get("type") == "number" and "minimum" in kept:
            low, high = float(kept.pop("minimum")), float(kept.pop("maximum"))
            _ruled(kept, rule(f"self >= {low} && self <= {high}", f"is out of range; write {low:g} to {high:g}"))
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
            return self._map(node)
        found: Schema = {"properties": {name: self.node(part, name) for name, part in node["properties"].items()}}
        if required := node.get("required"):
            found["required"] = required
        return found

    def _map(self, node: Schema) -> Schema:
        found: Schema = {"additionalProperties": self.node(node["additionalProperties"], "")}
        if "maxProperties" in node:
            found["maxProperties"] = node["maxProperties"]
        keys = self._resolved(node.get("propertyNames", {}))
        rules = [_text(*given) for given in keys.get("texts", ())]
        if "maxLength" in keys:
            rules.append(rule(f"self.size() <= {keys['maxLength']}", f"has more than {keys['maxLength']} characters"))
        on_keys = [(each["rule"].replace("self.", "key.", 1), each["message"]) for each in rules]
        return _ruled(found, *(rule(f"self.all(key, {condition})", f"a key {told}") for condition, told in on_keys))


def _text(pattern: str, wanted: bool, refusal: str) -> Schema:
    return rule(f"{'' if wanted else '!'}self.matches({text_of(pattern)})", refusal)


def _duration(bounds: Schema) -> tuple[Schema, ...]:
    shape = f"self.matches({text_of(f'^{DURATION_PATTERN}$')})"
    low, high = bounds["least"], bounds["most"]
    within = f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')"
    return rule(shape, DURATION_REFUSAL), rule(f"!{shape} || {within}", bounds["refusal"])


def _quantity(bounds: Schema) -> tuple[Schema, ...]:
    shape = f"(type(self) == int || string(self).matches({text_of(f'^{QUANTITY_PATTERN}$')}))"
    low, high = (f"quantity(string(self)).compareTo(quantity('{bounds[name]}'))" for name in ("least", "most"))
    return rule(shape, QUANTITY_REFUSAL), rule(f"!{shape} || {low} >= 0 && {high} <= 0", bounds["refusal"])


def _ruled(schema: Schema, *rules: Schema) -> Schema:
    """Return `schema` with further rules."""
    if rules:
        schema.setdefault("x-kubernetes-validations", []).extend(rules)
    return schema


def _list(items: Schema, key: str | None) -> Schema:
    """Convert one list; `key` is as in `structural`, and None means that the list is written as a whole."""
    if key is None:
        return {"items": items, "x-kubernetes-list-type": "atomic"}
    if not key:
        return {"items": items, "x-kubernetes-list-type": "set"}
    items["required"] = sorted({*items.get("required", ()), key})
    return {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def rule(expression: str, message: str) -> Schema:
    """Return one entry of `x-kubernetes-validations`: in CEL what must hold, and the refusal if it does not."""
    return {"rule": expression, "message": message}


def without_values(schema: Schema) -> Schema:
    """Return `schema`, whose rules now have refusals without the value, which may be a secret.

    API servers repeat text and numbers that break a rule, unless the reason is that they are forbidden.
    """
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if part:
            without_values(part)
    if schema.get("type") not in ("object", "array"):
        for each in schema.get("x-kubernetes-validations", ()):
            each["reason"] = "FieldValueForbidden"
    return schema


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
