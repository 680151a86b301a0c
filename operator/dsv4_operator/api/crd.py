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

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from dsv4_operator.api.deployment import API_VERSION, KIND, LONGEST_NAME, NAME_PATTERN, TAKEN_PATTERN
from dsv4_operator.api.rules import ELSEWHERE, LONGEST_NANO, MOST_BYTES, TENSOR_PARALLEL_SIZES
from dsv4_operator.api.security import (
    LINK_LOCAL_REFUSAL,
    LINK_LOCAL_SHORT,
    OTHER_FLAGS,
    among,
    owned_flags,
    owned_variables,
)
from dsv4_operator.api.spec import DEFAULT_BACKEND, DeploymentSpec, Variant
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
from dsv4_runtime.util.secrets import VALUES, VARIABLE

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
    return _Converter(document.pop("$defs", {}), lists, enums=enums).node(document, "")


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
            _ruled(kept, rule(f"self in {json.dumps(words)}", f"is unknown; use one of {', '.join(words)}"))
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
            raise ValueError(f"{name}: a structural schema cannot say {json.dumps(node)[:200]}")
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


def text_of(text: str) -> str:
    """Return `text` as a CEL literal."""
    return json.dumps(text, ensure_ascii=False)


def _either(kept: Schema, options: list[Schema]) -> Schema:
    """Return the schema of one constant or a number within bounds."""
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


GROUP, VERSION = API_VERSION.split("/")
PLURAL = "dsv4deployments"

_SPEC_LISTS = {"env": "name", "members": "rank", "imagePullSecrets": "name", "nodes": ""}
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

_NODES = "self.?nodesPerGroup.orValue(1)"
_WORLD = f"{_NODES} * self.?devicesPerNode.orValue(1)"
_PIPELINE = "self.?pipelineParallelSize.orValue(1)"
_AT_ONCE = 20
_PORTS = {"api": 8000, "dashboard": 8265, "gcs": 6379, "agent": 8090}


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as JSON values."""
    spec = structural(DeploymentSpec, _SPEC_LISTS)
    spec["properties"]["replicas"]["default"] = 1  # `kubectl scale` needs an initial number.
    for path, rules in _rules().items():
        _at(spec, path).setdefault("x-kubernetes-validations", []).extend(rules)
    without_values(spec)
    name = f"self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches({text_of(f'^{NAME_PATTERN}$')})"
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
                f"metadata.name: at most {LONGEST_NAME} lower-case letters, digits and dashes; begin with a letter",
            ),
            rule(
                # Objects have no status at their creation. Existing ones from before this rule stay valid.
                f"has(self.status) || !self.metadata.name.matches({text_of(TAKEN_PATTERN)})",
                "metadata.name: ends as the Services of another deployment's groups do; write another end than a "
                "number and head, or a number and i with a number",
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
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
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
            ],
        },
    }


def _rules() -> dict[str, list[Schema]]:
    """Return the path below `spec` to the rules of that object or value."""
    return {
        "": _whole(),
        **_model_rules(),
        **_topology_rules(),
        **_engine_rules(),
        "network.ports": [
            rule(
                f"[{', '.join(f'self.?{name}.orValue({port})' for name, port in _PORTS.items())}]"
                ".all(a, [" + ", ".join(f"self.?{name}.orValue({port})" for name, port in _PORTS.items()) + "]"
                ".filter(b, b == a).size() == 1)",
                "two ports have the same number; choose another one",
            )
        ],
        "recovery.backoff": [
            rule(
                "duration(self.?base.orValue('30s')) <= duration(self.?max.orValue('10m'))",
                "base: more than max; lower base or raise max",
            )
        ],
    }


def _model_rules() -> dict[str, list[Schema]]:
    return {
        "model": [
            rule(
                "!has(self.source.nano) || self.variant == 'Nano'",
                "source.nano: only the variant Nano is made on the spot; give path or huggingFace instead",
            ),
            rule(
                "!has(self.source.huggingFace) || self.variant != 'Nano'",
                "source.huggingFace: the variant Nano is not published; give nano instead, for example nano: {seed: 0}",
            ),
        ],
        "model.variant": [rule("self == oldSelf", "cannot change; delete the deployment and make another one")],
        # Not a set, because an API server repeats the duplicate in its message.
        "model.servedNames": [rule("self.all(a, self.exists_one(b, a == b))", "a name is there twice; remove one")],
        "model.source": [
            rule(
                "[has(self.nano), has(self.path), has(self.huggingFace), has(self.s3), has(self.http), "
                "has(self.sharedPath)].filter(given, given).size() == 1",
                "give exactly one of nano, path, huggingFace, s3, http, sharedPath",
            )
        ],
    }


def _topology_rules() -> dict[str, list[Schema]]:
    return {
        "topology": [
            rule(
                "self.hardware != 'GB10' || self.?devicesPerNode.orValue(1) == 1",
                "devicesPerNode: GB10 has one device a machine; write 1",
            ),
            rule(
                f"{_WORLD} % {_PIPELINE} == 0",
                "pipelineParallelSize: does not divide nodesPerGroup × devicesPerNode; choose a divisor",
            ),
            rule(
                f"!has(self.tensorParallelSize) || self.tensorParallelSize * {_PIPELINE} == {_WORLD}",
                "tensorParallelSize: times pipelineParallelSize it is not nodesPerGroup × devicesPerNode; leave it out",
            ),
        ],
        "topology.tolerations[]": [
            rule(
                "self.?key.orValue('') != '' || self.?operator.orValue('Equal') == 'Exists'",
                "operator: Equal needs a key; write one, or operator Exists for every taint",
            ),
            rule(
                "self.?value.orValue('') == '' || self.?operator.orValue('Equal') == 'Equal'",
                "value: has no meaning with Exists; remove it",
            ),
        ],
    }


def _engine_rules() -> dict[str, list[Schema]]:
    return {
        "engine": [
            rule(
                "!has(self.gpuMemoryUtilization) || !has(self.kvCacheMemory)",
                "gpuMemoryUtilization and kvCacheMemory exclude each other; remove one of them",
            ),
            rule(
                "self.?maxNumBatchedTokens.orValue(2048) >= self.?maxNumSeqs.orValue(4)",
                "maxNumBatchedTokens: less than maxNumSeqs; every request needs a token in a step, so raise it",
            ),
            *(
                rule(
                    f"!has(self.{name}) || self.{name}.map(one, size(bytes({of}))).sum() <= {MOST_BYTES}",
                    f"{name}: has more than {MOST_BYTES} bytes; a plan has to fit into a ConfigMap, so shorten it",
                )
                for name, of in (("env", "one.value"), ("extraArgs", "one"))
            ),
            rule(
                "!has(self.extraArgs) || size(self.extraArgs) == 0 || self.extraArgs[0].startsWith('-')",
                "extraArgs: begin with a flag, for example --seed",
            ),
        ],
        "engine.extraArgs[]": [
            # Several rules, because API servers limit the cost of each.
            *(
                rule(
                    f"!({among('self', _cel_list(owned_flags()[number : number + _AT_ONCE]), _cel_list(OTHER_FLAGS))})",
                    "is set by dsv4; spec.model, spec.topology and spec.engine have fields for what may be chosen",
                )
                for number in range(0, len(owned_flags()), _AT_ONCE)
            ),
            _no_link_local(),
            *_no_secret(),
        ],
        "engine.env[].name": [
            rule(
                f"!self.startsWith('DSV4_') && !(self in {_cel_list(owned_variables())})",
                "is set by dsv4; remove it",
            ),
            rule(f"!self.upperAscii().matches({text_of(VARIABLE)})", f"is a secret by its name; {ELSEWHERE}"),
        ],
        "engine.env[].value": [*_no_secret(), _no_link_local()],
    }


def _whole() -> list[Schema]:
    world, pipeline = (text.replace("self.", "self.topology.") for text in (_WORLD, _PIPELINE))
    tensor = f"self.topology.?tensorParallelSize.orValue({world} / {pipeline})"
    sizes = [
        rule(
            f"self.model.variant != '{variant}' || {world} % {pipeline} != 0 || {tensor} in {list(allowed)}",
            f"topology.tensorParallelSize: cannot divide the layers of {variant}; use one of "
            f"{', '.join(map(str, allowed))}, with nodesPerGroup, devicesPerNode and pipelineParallelSize to match",
        )
        for variant, allowed in TENSOR_PARALLEL_SIZES.items()
    ]
    return [
        rule(
            "!has(self.model.source.nano) || self.topology.hardware == 'CPU' "
            "|| self.model.source.nano.?precision.orValue('bf16') != 'bf16'",
            "model.source.nano.precision: bf16 runs on CPU only; write fp8, or CPU as topology.hardware",
        ),
        rule(
            f"self.model.variant == '{Variant.NANO}' || self.topology.hardware != 'CPU'",
            "topology.hardware: CPU is only for the variant Nano; write GB10 or RTXPRO6000",
        ),
        rule(
            "self.topology.hardware != 'CPU' || self.model.source.?nano.?precision.orValue('bf16') != 'fp8'",
            "model.source.nano.precision: fp8 does not run on CPU; write bf16",
        ),
        rule(
            "self.topology.hardware != 'CPU' || !has(self.engine) || !has(self.engine.gpuMemoryUtilization)",
            "engine.gpuMemoryUtilization: has no meaning on CPU; use kvCacheMemory, for example 512Mi",
        ),
        rule(
            f"self.model.variant != '{Variant.NANO}' || !has(self.engine) || !has(self.engine.maxModelLen) "
            f"|| self.engine.maxModelLen <= {LONGEST_NANO}",
            f"engine.maxModelLen: more than Nano has; the most is {LONGEST_NANO}",
        ),
        rule(
            # With `orValue` the API server assumes the maximum length of the strings.
            f"has(self.backend) ? (has(oldSelf.backend) ? self.backend == oldSelf.backend "
            f": self.backend == '{DEFAULT_BACKEND}') "
            f": !has(oldSelf.backend) || oldSelf.backend == '{DEFAULT_BACKEND}'",
            "backend: cannot change; delete the deployment and make another one",
        ),
        *sizes,
    ]


def _no_secret() -> list[Schema]:
    return [rule(f"!self.matches({text_of(value)})", f"looks like a secret; {ELSEWHERE}") for value in VALUES]


def _no_link_local() -> Schema:
    return rule(f"!self.matches({text_of(LINK_LOCAL_SHORT)})", LINK_LOCAL_REFUSAL)


def _cel_list(words: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


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
    return head + yaml.safe_dump(definition(), sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    sys.stdout.write(render())
