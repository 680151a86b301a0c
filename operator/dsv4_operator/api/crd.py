"""The CustomResourceDefinition, made from the models: `python -m dsv4_operator.api.crd > manifests/crd.yaml`.

What the models refuse field by field, the schema refuses; what `rules` refuses over several fields, CEL refuses with
the same remedy as far as CEL can say it. The operator checks everything again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import yaml

from dsv4_operator.api.deployment import API_VERSION, KIND, LONGEST_NAME, NAME_PATTERN, TAKEN_PATTERN
from dsv4_operator.api.endpoints import LINK_LOCAL_REFUSAL, LINK_LOCAL_SHORT
from dsv4_operator.api.owned import OTHER_FLAGS, among, owned_flags, owned_variables
from dsv4_operator.api.rules import ELSEWHERE, LONGEST_NANO, MOST_BYTES, TENSOR_PARALLEL_SIZES
from dsv4_operator.api.schema import Schema, rule, structural, text_of, without_values
from dsv4_operator.api.spec import DEFAULT_BACKEND, DeploymentSpec, Variant
from dsv4_operator.api.status import DeploymentStatus
from dsv4_runtime.util.secrets import VALUES, VARIABLE

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
    spec["properties"]["replicas"]["default"] = 1  # `kubectl scale` needs a number to begin with.
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
                # Objects have no status when they are created. One that exists from before this rule goes on.
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
    """Return the rules of `spec.model`, by path."""
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
        # No set: of what a set has twice, an API server repeats the text.
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
    """Return the rules of `spec.topology`, by path."""
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
    """Return the rules of `spec.engine`, by path."""
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
            # Several rules, because API servers bound what each may cost.
            *(
                rule(
                    f"!({among('self', _list(owned_flags()[number : number + _AT_ONCE]), _list(OTHER_FLAGS))})",
                    "is set by dsv4; spec.model, spec.topology and spec.engine have fields for what may be chosen",
                )
                for number in range(0, len(owned_flags()), _AT_ONCE)
            ),
            _no_link_local(),
            *_no_secret(),
        ],
        "engine.env[].name": [
            rule(
                f"!self.startsWith('DSV4_') && !(self in {_list(owned_variables())})",
                "is set by dsv4; remove it",
            ),
            rule(f"!self.upperAscii().matches({text_of(VARIABLE)})", f"is a secret by its name; {ELSEWHERE}"),
        ],
        "engine.env[].value": [*_no_secret(), _no_link_local()],
    }


def _whole() -> list[Schema]:
    """Return the rules over several parts of the specification."""
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
            # With `orValue` the API server takes the strings for as long as strings can be.
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


def _list(words: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def _at(schema: Schema, path: str) -> Schema:
    """Return the part of `schema` at `path`, `a.b[].c`; `[]` are the entries of a list."""
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
