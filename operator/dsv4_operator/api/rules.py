"""Findings about a manifest (field, value, remedy), and the rules over several fields of a specification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsv4_operator.api.cluster import TolerationOperator
from dsv4_operator.api.security import ENDPOINT_VARIABLES, LINK_LOCAL_REFUSAL, URL, is_link_local, owned_env, owned_flag
from dsv4_operator.api.spec import DeploymentSpec, EngineSpec, Hardware, ModelSpec, Precision, TopologySpec, Variant
from dsv4_operator.api.values import format_duration, quoted
from dsv4_runtime.util.secrets import has_secret, is_secret_name

RULES_ERROR = "dsv4_rules"
"""Type of a pydantic error whose context contains findings."""
MOST_FINDINGS = 20
"""Limit of reported findings: each unknown name is compared with all known ones."""
_LONGEST_STEP = 317
"""Characters of a name in a path: the longest key of a label."""
_LONGEST_NAME = 64
"""Longest name that is compared with known ones."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a manifest."""

    path: str
    """Path of the field, `spec.engine.maxModelLen` or `spec.engine.env[0].name`; empty for the whole text."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidDeployment(ValueError):
    """An invalid `DSV4Deployment`; its text has one line per finding."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


def translate(error: ValidationError, model: type[BaseModel]) -> tuple[Finding, ...]:
    """Return the first findings of pydantic's `error` about `model`, in order, and the number of further ones."""
    findings: list[Finding] = []
    details = error.errors(include_url=False)
    for number, detail in enumerate(details):
        if len(findings) >= MOST_FINDINGS:
            findings.append(Finding("", f"{len(details) - number} more findings; correct the ones above first"))
            break
        if detail["type"] == "too_short" and any(_within(other["loc"], detail["loc"]) for other in details):
            continue  # Counts only the valid entries.
        if detail["type"] == RULES_ERROR:
            findings += detail["ctx"]["findings"]
        else:
            location = detail["loc"][:-2] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
            findings.append(Finding(dotted(location), _sentence(detail, model)))
    return tuple(findings)


def _within(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def dotted(location: Sequence[int | str]) -> str:
    """Return a location such as `("spec", "engine", "env", 0, "name")` as `spec.engine.env[0].name`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif has_secret(step):
            text += ".(a name that looks like a secret)"
        else:
            text += f".{step}" if len(step) <= _LONGEST_STEP else f".{step[:_LONGEST_STEP]}..."
    return text.removeprefix(".")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown `name`: the nearest known one, or the list of all."""
    names = list(known)
    nearest = len(name) <= _LONGEST_NAME and (
        get_close_matches(name, names, n=1, cutoff=0.6) or [other for other in names if other.lower() == name.lower()]
    )
    return f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(names)}"


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # Invalid text for the engine and invalid URLs may contain a secret.
    private = _PRIVATE & set(detail["loc"]) and isinstance(value, str) and _SECRET_WORD.search(value[:_LOOKED_AT])
    shown = "the value" if private else quoted(value)
    if kind == "extra_forbidden":
        *parent, name = detail["loc"]
        return f"unknown field; {suggest(str(name), _fields_at(model, parent))}"
    if kind == "missing":
        name = str(detail["loc"][-1])
        return f"is required; write {_REQUIRED.get(name, f'{name}: and its value')}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        return f"{shown} is not {_WANTED[kind]}"
    if kind == "enum":
        return f"{shown} is unknown; use one of {_choices(context)}"
    if kind in _BOUNDS:
        return f"{shown} is out of range; {_BOUNDS[kind].format(**context)}"
    if kind in _LENGTHS:
        return f"has {context['actual_length']} entries; {_LENGTHS[kind].format(**context)}"
    if kind == "string_too_long":
        return f"{shown} has {len(value)} characters; the most is {context['max_length']}"
    return f"{shown} cannot be used: {detail['msg']}"


_PRIVATE = frozenset({"value", "extraArgs", "url", "endpoint"})
"""Fields whose values are omitted from messages if they contain a word for a secret."""
_SECRET_WORD = re.compile(r"(?i)key|token|secret|passw|credential|[@?#]")
_LOOKED_AT = 4096
_REQUIRED = {
    "metadata": "metadata: with name: below it",
    "name": "name: and lower-case letters, digits and dashes",
    "spec": "spec: with model: and topology: below it",
    "model": "model: with variant: and source: below it",
    "variant": "variant: Flash, Pro or Nano",
    "source": "source: with path:, huggingFace: or another place below it",
    "topology": "topology: with hardware: below it",
    "repo": "repo: OWNER/NAME",
    "revision": "revision: and the 40 hex digits of the commit, so that the weights cannot change",
}
"""Remedies for fields without a default."""
_WANTED = {
    "int_type": "a whole number; write it without quotes and without a fraction",
    "int_from_float": "a whole number; write it without a fraction",
    "float_type": "a number; write it without quotes, for example 0.8",
    "bool_type": "true or false; write one of them without quotes",
    "string_type": 'text; put it in quotes, for example "1"',
    "model_type": "a mapping; write its fields indented below it",
    "model_attributes_type": "a mapping; write its fields indented below it",
    "dict_type": "a mapping; write one NAME: VALUE a line below it",
    "tuple_type": "a list; write one entry a line, each after a dash",
}
_BOUNDS = {
    "greater_than_equal": "the least is {ge}",
    "less_than_equal": "the most is {le}",
}
_LENGTHS = {
    "too_short": "at least {min_length} needed",
    "too_long": "at most {max_length} allowed",
}


def _choices(context: Mapping[str, Any]) -> str:
    return str(context["expected"]).replace("'", "").replace(" or ", ", ")


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the wire names of the fields of the mapping at `location`."""
    current: type[BaseModel] | None = model
    for step in location:
        if isinstance(step, str) and current is not None:
            fields = {field.alias or name: field for name, field in current.model_fields.items()}
            current = model_in(fields[step].annotation) if step in fields else None
    if current is None:
        return []
    return [field.alias or name for name, field in current.model_fields.items()]


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in `annotation`: itself, an option, or the entries of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, Annotated):
        return next(filter(None, map(model_in, get_args(annotation))), None)
    return None


_SOURCES = {
    "nano": "nano",
    "path": "path",
    "hugging_face": "huggingFace",
    "s3": "s3",
    "http": "http",
    "shared_path": "sharedPath",
}

MOST_BYTES = 2**17
"""Limit of the bytes of all variables, and of all arguments, of an engine: with escapes, a plan of 16 members still
fits into a ConfigMap of 1 MiB."""

ELSEWHERE = (
    "remove it: whoever may read the deployment would read it; for sources and API keys there is secretKeyRef in "
    "spec.model.source and spec.gateway.apiKeys"
)

LONGEST_NANO = 8192
"""Context length of the Nano model; that of the others is bounded by the field."""

TENSOR_PARALLEL_SIZES = {
    Variant.NANO: (1, 2),
    Variant.FLASH: (1, 2, 4, 8),
    Variant.PRO: (1, 2, 4, 8, 16),
}
"""Sizes that divide both the attention heads and the groups of the output projection of each variant."""


def check_spec(spec: DeploymentSpec) -> tuple[Finding, ...]:
    """Return the findings about `spec` that concern several fields."""
    return (
        *_model(spec.model),
        *_hardware(spec),
        *_topology(spec.topology, spec.model.variant),
        *_engine(spec.engine, spec.topology.hardware),
        *_length(spec),
        *_ports(spec),
        *_nodes(spec.topology),
        *_recovery(spec),
        *_fabric(spec),
    )


def _model(model: ModelSpec) -> Iterator[Finding]:
    given = [wire for name, wire in _SOURCES.items() if getattr(model.source, name) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "is empty"
        yield Finding("spec.model.source", f"{what}; give exactly one of {', '.join(_SOURCES.values())}")
    elif given == ["nano"] and model.variant is not Variant.NANO:
        yield Finding(
            "spec.model.source.nano",
            f"only the variant Nano is made on the spot, not {model.variant}; give path or huggingFace instead",
        )
    elif given == ["huggingFace"] and model.variant is Variant.NANO:
        yield Finding(
            "spec.model.source.huggingFace",
            "the variant Nano is not published; give nano instead, for example nano: {seed: 0}",
        )
    yield from _twice("spec.model.servedNames", model.served_names or ())


def _hardware(spec: DeploymentSpec) -> Iterator[Finding]:
    hardware, variant = spec.topology.hardware, spec.model.variant
    if variant is not Variant.NANO and hardware is Hardware.CPU:
        yield Finding(
            "spec.topology.hardware",
            f"CPU is only for the variant Nano, {variant} needs accelerators; write GB10 or RTXPRO6000",
        )
    nano = spec.model.source.nano
    if nano is not None and nano.precision is Precision.FP8 and hardware is Hardware.CPU:
        yield Finding("spec.model.source.nano.precision", "fp8 does not run on CPU; write bf16")
    if nano is not None and nano.precision is Precision.BF16 and hardware is not Hardware.CPU:
        yield Finding("spec.model.source.nano.precision", f"bf16 runs on CPU only, not on {hardware}; write fp8")


def _topology(topology: TopologySpec, variant: Variant) -> Iterator[Finding]:
    if topology.hardware is Hardware.GB10 and topology.devices_per_node != 1:
        yield Finding(
            "spec.topology.devicesPerNode",
            f"{topology.devices_per_node} does not fit GB10, which has one device a machine; write 1",
        )
    world, pipeline = topology.world_size, topology.pipeline_parallel_size
    layout = f"nodesPerGroup {topology.nodes_per_group} × devicesPerNode {topology.devices_per_node}"
    if world % pipeline:
        yield Finding(
            "spec.topology.pipelineParallelSize",
            f"{pipeline} does not divide the {world} devices of a group ({layout}); choose a divisor",
        )
        return
    tensor = topology.tensor_parallel
    if tensor * pipeline != world:
        yield Finding(
            "spec.topology.tensorParallelSize",
            f"{tensor} × pipelineParallelSize {pipeline} is not the {world} devices of a group ({layout}); "
            f"write {world // pipeline}, or leave it out",
        )
    elif tensor not in TENSOR_PARALLEL_SIZES[variant]:
        sizes = TENSOR_PARALLEL_SIZES[variant]
        fitting = max((size for size in sizes if world % size == 0), default=1)
        yield Finding(
            "spec.topology.tensorParallelSize",
            f"{tensor} cannot divide the layers of {variant}, but {', '.join(map(str, sizes))} can; "
            f"for {world} devices write pipelineParallelSize {world // fitting} and tensorParallelSize {fitting}",
        )


def _nodes(topology: TopologySpec) -> Iterator[Finding]:
    yield from _twice("spec.topology.nodes", topology.nodes)
    for index, toleration in enumerate(topology.tolerations):
        path = f"spec.topology.tolerations[{index}]"
        exists = toleration.operator is TolerationOperator.EXISTS
        if not toleration.key and not exists:
            yield Finding(f"{path}.operator", "Equal needs a key; write one, or operator Exists for every taint")
        if toleration.value and exists:
            yield Finding(f"{path}.value", f"{quoted(toleration.value)} has no meaning with Exists; remove it")


def _engine(engine: EngineSpec, hardware: Hardware) -> Iterator[Finding]:
    if engine.gpu_memory_utilization is not None:
        if hardware is Hardware.CPU:
            yield Finding(
                "spec.engine.gpuMemoryUtilization",
                f"{engine.gpu_memory_utilization} has no meaning on CPU; use kvCacheMemory, for example 512Mi",
            )
        elif engine.kv_cache_memory is not None:
            yield Finding(
                "spec.engine.gpuMemoryUtilization",
                f"{engine.gpu_memory_utilization} and kvCacheMemory exclude each other; remove one of them",
            )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Finding(
            "spec.engine.maxNumBatchedTokens",
            f"{engine.max_num_batched_tokens} is less than maxNumSeqs {engine.max_num_seqs}; "
            "every request needs a token in a step, so raise it",
        )
    yield from _extra_args(engine.extra_args)
    yield from _env(engine)
    sizes = {"extraArgs": engine.extra_args, "env": tuple(variable.value for variable in engine.env)}
    for name, texts in sizes.items():
        size = sum(len(text.encode()) for text in texts)
        if size > MOST_BYTES:
            what = f"has {size} bytes, and the most is {MOST_BYTES}; a plan has to fit into a ConfigMap, so shorten it"
            yield Finding(f"spec.engine.{name}", what)
    yield from _twice("spec.engine.imagePullSecrets", [secret.name for secret in engine.image_pull_secrets], ".name")


def _twice(path: str, keys: Sequence[str], field: str = "") -> Iterator[Finding]:
    for index, key in enumerate(keys):
        if key in keys[:index]:
            yield Finding(f"{path}[{index}]{field}", f"{quoted(key)} is there twice; remove one")


def _length(spec: DeploymentSpec) -> Iterator[Finding]:
    length = spec.engine.max_model_len
    if length is not None and length > LONGEST_NANO and spec.model.variant is Variant.NANO:
        yield Finding("spec.engine.maxModelLen", f"{length} is more than Nano has; the most is {LONGEST_NANO}")


def _extra_args(args: tuple[str, ...]) -> Iterator[Finding]:
    if args and not args[0].startswith("-"):
        yield Finding("spec.engine.extraArgs[0]", f"{quoted(args[0])} is no flag; begin with one, for example --seed")
    for index, arg in enumerate(args):
        remedy = owned_flag(arg)
        if remedy:
            # Without the value, which may be a secret.
            flag = quoted(arg.split("=", 1)[0])
            yield Finding(f"spec.engine.extraArgs[{index}]", f"{flag} is set by dsv4; {remedy}")
        elif has_secret(arg):
            yield Finding(f"spec.engine.extraArgs[{index}]", f"looks like a secret; {ELSEWHERE}")
        if is_link_local(arg):
            yield Finding(f"spec.engine.extraArgs[{index}]", LINK_LOCAL_REFUSAL)


def _env(engine: EngineSpec) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, variable in enumerate(engine.env):
        path = f"spec.engine.env[{index}].name"
        remedy = owned_env(variable.name)
        if remedy:
            yield Finding(path, f"{quoted(variable.name)} is set by dsv4; {remedy}")
        elif is_secret_name(variable.name):
            yield Finding(path, f"{quoted(variable.name)} is a secret by its name; {ELSEWHERE}")
        elif variable.name in seen:
            yield Finding(path, f"{quoted(variable.name)} is there twice; remove one")
        if has_secret(variable.value):
            yield Finding(f"spec.engine.env[{index}].value", f"looks like a secret; {ELSEWHERE}")
        if is_link_local(variable.value):
            yield Finding(f"spec.engine.env[{index}].value", LINK_LOCAL_REFUSAL)
        elif variable.name in ENDPOINT_VARIABLES and not re.fullmatch(URL.pattern, variable.value, re.ASCII):
            yield Finding(f"spec.engine.env[{index}].value", URL.refusal)
        seen.add(variable.name)


def _ports(spec: DeploymentSpec) -> Iterator[Finding]:
    seen: dict[int, str] = {}
    for name, number in spec.network.ports.model_dump().items():
        if number in seen:
            yield Finding(f"spec.network.ports.{name}", f"{number} is also ports.{seen[number]}; choose another one")
        seen.setdefault(number, name)


def _recovery(spec: DeploymentSpec) -> Iterator[Finding]:
    recovery = spec.recovery
    if recovery.backoff.base > recovery.backoff.max:
        yield Finding(
            "spec.recovery.backoff.base",
            f"{format_duration(recovery.backoff.base)} is more than backoff.max "
            f"{format_duration(recovery.backoff.max)}; lower base or raise max",
        )


def _fabric(spec: DeploymentSpec) -> Iterator[Finding]:
    ranks = [str(member.rank) for member in spec.network.fabric.members]
    yield from _twice("spec.network.fabric.members", ranks, ".rank")
