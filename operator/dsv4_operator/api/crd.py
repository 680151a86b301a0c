"""The CustomResourceDefinition, generated from the models: `python -m dsv4_operator.api.crd > manifests/crd.yaml`.

The schema enforces the rules of single fields; CEL enforces the rules over several fields (`rules`) with the same
remedy, as far as CEL can express them. The operator checks every object again.

The JSON schema of pydantic contains references, unions with null, titles and numeric exclusive bounds, which the API
server rejects or drops. Its own refusals repeat the refused text, which may be a secret, and round the bounds of
fractions; so both are CEL rules with a reason that omits the value. The descriptions state defaults, and the server
does not fill them in: the stored object stays as the user wrote it, and server-side apply has no owner for unset
fields.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel

from dsv4_operator.api import cel
from dsv4_operator.api.deployment import (
    API_VERSIONS,
    KIND,
    KUBERAY_NAME_REFUSAL,
    LONGEST_KUBERAY_NAME,
    LONGEST_NAME,
    NAME_PATTERN,
    STORED_VERSION,
    TAKEN_PATTERN,
    TAKEN_REFUSAL,
)
from dsv4_operator.api.findings import model_in
from dsv4_operator.api.rules import RULES, UNIQUE
from dsv4_operator.api.spec import DEFAULT_BACKEND, KUBERAY_BACKEND, DeploymentSpec
from dsv4_operator.api.status import DeploymentStatus
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
from dsv4_runtime.contract import Document

Schema = dict[str, Any]

_LONGEST_WORD = 64
"""Longest value of an enum in characters, which bounds the cost of its rule."""
_KEPT = ("type", "description", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "format")


def structural(model: type[BaseModel], lists: Mapping[str, str], *, enums: bool = True) -> Schema:
    """Return the structural schema of `model` in its wire format.

    Args:
        model: not recursive.
        lists: name of a list field to the merge key of its entries, empty for a set; all other lists are atomic.
        enums: whether only known enum values are accepted. Not in a status, which a newer version may have written.

    Raises:
        ValueError: the model has no structural schema.
    """
    document = model.model_json_schema(by_alias=True)
    definitions = document.pop("$defs", {})
    for name, found in _reachable(model).items():
        properties = (document if found is model else definitions[name])["properties"]
        for field, text in attribute_texts(found).items():
            properties[found.model_fields[field].alias or field]["description"] = text
    return _Converter(definitions, lists, enums=enums).node(document, "")


def _reachable(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return `model` and the models of its fields by name."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        if nested := model_in(field.annotation):
            found |= _reachable(nested)
    return found


def attribute_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields of a document, from its source.

    With `use_attribute_docstrings` pydantic would parse the source at every import, a tenth of `dsv4 plan`.
    """
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, Document):
            found |= _texts_of_module(inspect.getmodule(each)).get(each.__name__, {})
    return {name: text for name, text in found.items() if name in model.model_fields}


@functools.cache
def _texts_of_module(module: ModuleType | None) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    return {each.name: dict(_texts_of_class(each)) for each in tree.body if isinstance(each, ast.ClassDef)}


def _texts_of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in pairwise(node.body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema], lists: Mapping[str, str], *, enums: bool) -> None:
        self._definitions = definitions
        self._lists = lists
        self._enums = enums

    def node(self, node: Schema, name: str) -> Schema:
        """Return the schema of the field `name`."""
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
            _ruled(kept, rule(f"self in {json.dumps(words)}", f"is not supported; use one of {', '.join(words)}"))
        _ruled(kept, *(_text(*given) for given in node.get("texts", ())))
        if node.get("type") == "integer" and self._enums:
            # 1.0 is an integer in a schema, but not in a rule or in `parse`.
            _ruled(kept, rule("self == int(self)", "is not a whole number; write it without a fraction"))
        if node.get("type") == "number" and "minimum" in kept:
            low, high = float(kept.pop("minimum")), float(kept.pop("maximum"))
            _ruled(kept, rule(f"self >= {low} && self <= {high}", f"is out of range; write {low:g} to {high:g}"))
        if node.get("type") == "array":
            kept |= _list_schema(self.node(node["items"], name), self._lists.get(name))
        if node.get("type") == "object":
            kept |= self._object(node)
        if "type" not in kept:
            raise ValueError(f"{name}: a structural schema cannot express {json.dumps(node)[:200]}")
        return kept

    def _resolved(self, node: Schema) -> Schema:
        """Return `node` with references resolved and without the null of an optional field."""
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
        return _ruled(
            found, *(rule(f"self.all(key, {condition})", f"a key {message}") for condition, message in on_keys)
        )


def _text(pattern: str, wanted: bool, refusal: str) -> Schema:
    return rule(f"{'' if wanted else '!'}self.matches({cel.literal(pattern)})", refusal)


def _duration(bounds: Schema) -> tuple[Schema, ...]:
    shape = f"self.matches({cel.literal(f'^{DURATION_PATTERN}$')})"
    low, high = bounds["least"], bounds["most"]
    within = f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')"
    return rule(shape, DURATION_REFUSAL), rule(f"!{shape} || {within}", bounds["refusal"])


def _quantity(bounds: Schema) -> tuple[Schema, ...]:
    shape = f"(type(self) == int || string(self).matches({cel.literal(f'^{QUANTITY_PATTERN}$')}))"
    low, high = (f"quantity(string(self)).compareTo(quantity('{bounds[name]}'))" for name in ("least", "most"))
    return rule(shape, QUANTITY_REFUSAL), rule(f"!{shape} || {low} >= 0 && {high} <= 0", bounds["refusal"])


def _ruled(schema: Schema, *rules: Schema) -> Schema:
    """Add rules to `schema`, and return it."""
    if rules:
        schema.setdefault("x-kubernetes-validations", []).extend(rules)
    return schema


def _list_schema(items: Schema, key: str | None) -> Schema:
    """Return the schema of a list; `key` as in `structural`, None for an atomic list."""
    if key is None:
        return {"items": items, "x-kubernetes-list-type": "atomic"}
    if not key:
        return {"items": items, "x-kubernetes-list-type": "set"}
    items["required"] = sorted({*items.get("required", ()), key})
    return {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def rule(expression: str, message: str) -> Schema:
    """Return one entry of `x-kubernetes-validations`: a CEL condition, and the message if it is false."""
    return {"rule": expression, "message": message}


def without_values(schema: Schema) -> Schema:
    """Set a reason in the rules of `schema` that omits the value, which may be a secret; return `schema`.

    API servers repeat invalid text and numbers, unless the reason is that they are forbidden.
    """
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if part:
            without_values(part)
    if schema.get("type") not in ("object", "array"):
        for each in schema.get("x-kubernetes-validations", ()):
            each["reason"] = "FieldValueForbidden"
    return schema


def _either(kept: Schema, options: list[Schema]) -> Schema:
    """Return the schema of one constant or a number within bounds."""
    word = next((option.get("const") for option in options if option.get("type") == "string"), None)
    number = next((option for option in options if option.get("type") == "integer"), None)
    if word is None or number is None or len(options) != 2:
        raise ValueError(f"a structural schema cannot express {json.dumps(options)[:200]}")
    low, high = number["minimum"], number["maximum"]
    expression = f"type(self) == int ? self >= {low} && self <= {high} : self == {cel.literal(word)}"
    return {
        **_without(kept, "type"),
        "x-kubernetes-int-or-string": True,
        "x-kubernetes-validations": [
            rule(expression, f"is not supported; use {word} or a number from {low} to {high}")
        ],
    }


def _own(node: Schema) -> Schema:
    """Return the field's own description and default, which override those of its type."""
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


GROUP = STORED_VERSION.partition("/")[0]
PLURAL = "dsv4deployments"

_SPEC_LISTS = {path.rpartition(".")[2]: key for path, key in UNIQUE.items() if path != "model.servedNames"}
_STATUS_LISTS = {"conditions": "type", "groups": "index", "members": "rank"}

_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Phase", "string", ".status.phase", 0),
    ("Ready", "integer", ".status.readyReplicas", 0),
    ("Groups", "integer", ".spec.replicas", 0),
    ("Model", "string", ".spec.model.variant", 0),
    ("Hardware", "string", ".spec.topology.hardware", 0),
    ("Endpoint", "string", ".status.endpoint", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as JSON values."""
    spec = structural(DeploymentSpec, _SPEC_LISTS)
    spec["properties"]["replicas"]["default"] = 1  # `kubectl scale` needs an initial number.
    for path, each in _rules():
        _ruled(_at(spec, path), each)
    without_values(spec)
    name = (
        f"self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches({cel.literal(f'^{NAME_PATTERN}$')})"
    )
    schema = {
        "description": "One DeepSeek-V4 model on one or more groups of machines, kept running.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(DeploymentStatus, _STATUS_LISTS, enums=False),
        },
        "x-kubernetes-validations": [
            rule(
                name,
                f"metadata.name: must have at most {LONGEST_NAME} lower-case letters, digits and dashes, and begin "
                "with a letter",
            ),
            rule(
                # Objects have no status at their creation. Existing ones from before this rule stay valid.
                f"has(self.status) || !self.metadata.name.matches({cel.literal(TAKEN_PATTERN)})",
                f"metadata.name: {TAKEN_REFUSAL}",
            ),
            rule(
                f"self.spec.?backend.orValue('{DEFAULT_BACKEND}') != '{KUBERAY_BACKEND}' "
                f"|| size(self.metadata.name) <= {LONGEST_KUBERAY_NAME}",
                f"metadata.name: {KUBERAY_NAME_REFUSAL}",
            ),
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "dsv4deployment",
                "shortNames": ["dsv4"],
                "categories": ["all"],
            },
            # All versions have one schema: the API server replaces `apiVersion`, and nothing else.
            "conversion": {"strategy": "None"},
            "versions": [
                {
                    "name": version.partition("/")[2],
                    "served": True,
                    "storage": version == STORED_VERSION,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {
                        "status": {},
                        "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
                    },
                    "additionalPrinterColumns": [
                        {"name": title, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
                        for title, kind, path, priority in _COLUMNS
                    ],
                }
                for version in API_VERSIONS
            ],
        },
    }


def _rules() -> Iterator[tuple[str, Schema]]:
    """Yield the path below `spec`, and a rule of that object or value."""
    for each in RULES:
        conditions = [cel.condition(each.holds)] if each.conditions is None and each.holds else each.conditions or ()
        for condition in conditions:
            yield each.part, rule(condition, each.message)
    # Not a set, because an API server repeats the duplicate in its message.
    yield "model.servedNames", rule("self.all(a, self.exists_one(b, a == b))", "contains a duplicate; remove one")


def _at(schema: Schema, path: str) -> Schema:
    """Return the part of `schema` at `path`, `a.b[].c`; `[]` selects the entries of a list."""
    for step in filter(None, path.split(".")):
        name = step.removesuffix("[]")
        schema = schema["properties"][name]
        if step != name:
            schema = schema["items"]
    return schema


def render() -> str:
    """Return the definition as YAML."""
    head = "# Made from the models: python -m dsv4_operator.api.crd > manifests/crd.yaml\n"
    return head + yaml.dump(definition(), Dumper=_WithoutAliases, sort_keys=False, allow_unicode=True, width=120)


class _WithoutAliases(yaml.SafeDumper):
    """Writes the schema of each version in full: not every YAML reader knows aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    sys.stdout.write(render())
