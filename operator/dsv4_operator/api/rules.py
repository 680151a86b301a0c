"""Rules over several fields of a specification, written once: checked here, and generated as CEL into the
CustomResourceDefinition.

A rule is a predicate over a part of the specification. CEL is generated from its source (`cel`), except where a rule
has its own conditions. The API server evaluates rules without a value in the message, which may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from dsv4_operator.api.cel import listed, literal, optional
from dsv4_operator.api.cluster import PortsSpec, SchedulerSpec, SchedulerType, Toleration, TolerationOperator
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.security import (
    ENDPOINT_VARIABLES,
    LINK_LOCAL_REFUSAL,
    LINK_LOCAL_SHORT,
    OTHER_FLAGS,
    URL,
    among,
    is_link_local,
    owned_env,
    owned_flag,
    owned_flags,
    owned_variables,
)
from dsv4_operator.api.spec import (
    DEFAULT_BACKEND,
    KUBERAY_BACKEND,
    LOOPBACK,
    BackoffSpec,
    DeploymentSpec,
    EngineSpec,
    EnvVar,
    Executor,
    GatewaySpec,
    Hardware,
    ModelSource,
    ModelSpec,
    Precision,
    TopologySpec,
    Variant,
)
from dsv4_operator.api.values import SpecPart, ValueReason, format_duration, split_remedy
from dsv4_runtime.util.secrets import VALUES, VARIABLE, has_secret, is_secret_name

Predicate = TypeVar("Predicate", bound=Callable[[Any], bool])


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule over a part of the specification."""

    part: str
    """Path of the part below `spec`; `[]` selects every entry of a list."""
    field: str
    """Path of the reported field below the part; empty: the part itself."""
    reason: str
    text: str
    """`PROBLEM; REMEDY`."""
    holds: Callable[[Any], bool] | None
    """None: only the API server can check it, because it compares the part with the stored one."""
    conditions: tuple[str, ...] | None
    """Conditions in CEL, none if CEL cannot express the rule; None: generated from `holds`."""
    details: Callable[[Any], str] | None
    """Returns `PROBLEM; REMEDY` with the values of the part."""
    value: Callable[[Any], object] | None
    """Returns the displayed value; None: that of the field, if it is a number, a text or an enum."""

    @property
    def message(self) -> str:
        """Return the message of the API server."""
        return f"{self.field}: {self.text}" if self.field else self.text


RULES: list[Rule] = []
"""All rules in the order of their findings."""


def rule(
    part: str,
    field: str,
    reason: str,
    text: str,
    *,
    conditions: Iterable[str] | None = None,
    details: Callable[[Any], str] | None = None,
    value: Callable[[Any], object] | None = None,
) -> Callable[[Predicate], Predicate]:
    """Add a rule with the decorated predicate."""

    def added(holds: Predicate) -> Predicate:
        own = None if conditions is None else tuple(conditions)
        RULES.append(Rule(part, field, reason, text, holds, own, details, value))
        return holds

    return added


def transition(part: str, field: str, reason: str, text: str, condition: str) -> None:
    """Add a rule over a change, which only the API server can check."""
    RULES.append(Rule(part, field, reason, text, None, (condition,), None, None))


MOST_BYTES = 2**17
"""Limit of the bytes of all variables, and of all arguments, of an engine: with escapes, a plan of 16 members still
fits into a ConfigMap of 1 MiB."""

ELSEWHERE = (
    "remove it, because every reader of the deployment can read it; use secretKeyRef in spec.model.source or "
    "spec.gateway.apiKeys"
)

LONGEST_NANO = 8192
"""Context length of the Nano model; that of the others is bounded by the field."""

TENSOR_PARALLEL_SIZES = {
    Variant.NANO: (1, 2),
    Variant.FLASH: (1, 2, 4, 8),
    Variant.PRO: (1, 2, 4, 8, 16),
}
"""Sizes that divide both the attention heads and the groups of the output projection of each variant."""

UNIQUE = {
    "engine.env": "name",
    "engine.imagePullSecrets": "name",
    "model.servedNames": "",
    "network.fabric.members": "rank",
    "topology.nodes": "",
}
"""Lists without duplicates, by path, with the key of their entries; empty: the entry itself."""

_AT_ONCE = 20
"""Flags of one condition: API servers limit the cost of each."""
_SOURCES = [field.alias or name for name, field in ModelSource.model_fields.items()]


def _given(source: ModelSource) -> list[str]:
    return list(source.model_dump(by_alias=True, exclude_none=True))


@rule(
    "model.source", "", "SourceCount", f"must have exactly one source; write one of {', '.join(_SOURCES)}",
    conditions=[f"[{', '.join(f'has(self.{name})' for name in _SOURCES)}].filter(given, given).size() == 1"],
    details=lambda source: (
        f"has {' and '.join(_given(source)) or 'no source'}; write exactly one of {', '.join(_SOURCES)}"
    ),
)  # fmt: skip
def _one_source(source: ModelSource) -> bool:
    return len(_given(source)) == 1


@rule("model", "source.nano", "NanoSource", "is only for the variant Nano; write path or huggingFace instead")
def _nano_source(model: ModelSpec) -> bool:
    return model.source.nano is None or model.variant == Variant.NANO


@rule(
    "model", "source.huggingFace", "NanoSource",
    "is not possible for the variant Nano, which is not published; write nano instead, for example nano: {seed: 0}",
)  # fmt: skip
def _nano_is_not_published(model: ModelSpec) -> bool:
    return model.source.hugging_face is None or model.variant != Variant.NANO


transition(
    "model.variant", "", "Immutable", "is immutable; delete the deployment and create another one", "self == oldSelf"
)


@rule("", "topology.hardware", "HardwareVariant", "is only for the variant Nano; write GB10 or RTXPRO6000")
def _cpu_variant(spec: DeploymentSpec) -> bool:
    return spec.model.variant == Variant.NANO or spec.topology.hardware != Hardware.CPU


@rule("", "model.source.nano.precision", "NanoPrecision", "is only supported with topology.hardware CPU; write fp8")
def _bf16_on_cpu(spec: DeploymentSpec) -> bool:
    return (
        spec.model.source.nano is None
        or spec.topology.hardware == Hardware.CPU
        or spec.model.source.nano.precision != Precision.BF16
    )


@rule("", "model.source.nano.precision", "NanoPrecision", "is not supported on CPU; write bf16")
def _fp8_on_accelerators(spec: DeploymentSpec) -> bool:
    return (
        spec.model.source.nano is None
        or spec.topology.hardware != Hardware.CPU
        or spec.model.source.nano.precision != Precision.FP8
    )


@rule("topology", "devicesPerNode", "DevicesPerNode", "is not possible on GB10, which has one device per node; write 1")
def _one_device_per_spark(topology: TopologySpec) -> bool:
    return topology.hardware != Hardware.GB10 or topology.devices_per_node == 1


def _layout(topology: TopologySpec) -> str:
    nodes, devices = topology.nodes_per_group, topology.devices_per_node
    return f"the {topology.world_size} devices of a group (nodesPerGroup {nodes} × devicesPerNode {devices})"


@rule(
    "topology", "pipelineParallelSize", "PipelineParallelSize",
    "does not divide nodesPerGroup × devicesPerNode; write a divisor",
    details=lambda topology: f"does not divide {_layout(topology)}; write a divisor",
)  # fmt: skip
def _stages_divide_devices(topology: TopologySpec) -> bool:
    return topology.world_size % topology.pipeline_parallel_size == 0


@rule(
    "topology", "tensorParallelSize", "TensorParallelSize",
    "times pipelineParallelSize does not equal nodesPerGroup × devicesPerNode; remove it",
    details=lambda topology: (
        f"times pipelineParallelSize {topology.pipeline_parallel_size} does not equal {_layout(topology)}; "
        f"write {topology.world_size // topology.pipeline_parallel_size}, or remove it"
    ),
)  # fmt: skip
def _ranks_equal_devices(topology: TopologySpec) -> bool:
    return (
        topology.tensor_parallel_size is None
        or topology.tensor_parallel_size * topology.pipeline_parallel_size == topology.world_size
    )


def _division(spec: DeploymentSpec) -> str:
    """Return the message about a number of devices that does not divide the layers, with one that does."""
    world, sizes = spec.topology.world_size, TENSOR_PARALLEL_SIZES[spec.model.variant]
    fitting = max(size for size in sizes if world % size == 0)
    return (
        f"does not divide the layers of {spec.model.variant}, supported: {', '.join(map(str, sizes))}; for {world} "
        f"devices write pipelineParallelSize {world // fitting} and tensorParallelSize {fitting}"
    )


def _divides_layers(variant: Variant, sizes: tuple[int, ...]) -> None:
    @rule(
        "", "topology.tensorParallelSize", "TensorParallelDivision",
        f"does not divide the layers of {variant}; use one of {', '.join(map(str, sizes))}, with matching "
        "nodesPerGroup, devicesPerNode and pipelineParallelSize",
        details=_division, value=lambda spec: spec.topology.tensor_parallel,
    )  # fmt: skip
    def divides(spec: DeploymentSpec) -> bool:
        return (
            spec.model.variant != variant
            or spec.topology.world_size % spec.topology.pipeline_parallel_size != 0
            or spec.topology.tensor_parallel in sizes
            # Some builds pad heads and groups for other sizes; the planner knows them.
            or spec.engine.profile is not None
            or spec.engine.build is not None
            or spec.engine.image is not None
        )


for _variant, _sizes in TENSOR_PARALLEL_SIZES.items():
    _divides_layers(_variant, _sizes)


@rule(
    "gateway", "listen", "KeyRequired",
    "is not allowed without apiKeys, because everyone in its network could use the API; set apiKeys or write 127.0.0.1",
)  # fmt: skip
def _keys_beyond_loopback(gateway: GatewaySpec) -> bool:
    return gateway.listen == LOOPBACK or gateway.api_keys is not None


@rule("topology", "nodes", "MutuallyExclusive", "is not allowed with scheduler, which chooses them; use nodeSelector")
def _one_choice_of_nodes(topology: TopologySpec) -> bool:
    return topology.scheduler is None or topology.nodes == ()


@rule(
    "topology", "topologyKey", "MutuallyExclusive",
    "is not allowed with scheduler, whose first pod may choose a value without room for the others; use nodeSelector",
)  # fmt: skip
def _scheduler_knows_no_topology(topology: TopologySpec) -> bool:
    return topology.scheduler is None or topology.topology_key is None


@rule("topology.scheduler", "queue", "SchedulerQueue", "is required for Kueue; write the name of a LocalQueue")
def _kueue_has_queue(scheduler: SchedulerSpec) -> bool:
    return scheduler.queue is not None or scheduler.type != SchedulerType.KUEUE


@rule(
    "topology.scheduler", "queue", "SchedulerQueue", "is not supported by Coscheduling, which has no queues; remove it"
)
def _coscheduling_has_no_queue(scheduler: SchedulerSpec) -> bool:
    return scheduler.queue is None or scheduler.type != SchedulerType.COSCHEDULING


@rule(
    "topology.tolerations[]", "operator", "TolerationKey",
    "requires a key; write one, or operator Exists for every taint",
)  # fmt: skip
def _equal_has_key(toleration: Toleration) -> bool:
    return toleration.key != "" or toleration.operator == TolerationOperator.EXISTS


@rule("topology.tolerations[]", "value", "TolerationValue", "is not allowed with operator Exists; remove it")
def _exists_has_no_value(toleration: Toleration) -> bool:
    return toleration.value == "" or toleration.operator == TolerationOperator.EQUAL


@rule(
    "", "engine.gpuMemoryUtilization", "NotOnCPU", "is not supported on CPU; use kvCacheMemory, for example 512Mi"
)  # fmt: skip
def _share_of_accelerators(spec: DeploymentSpec) -> bool:
    return spec.topology.hardware != Hardware.CPU or spec.engine.gpu_memory_utilization is None


@rule("engine", "profile", "MutuallyExclusive", "is not allowed with build, whose base is a profile; remove it")
def _one_description_of_the_image(engine: EngineSpec) -> bool:
    return engine.profile is None or engine.build is None


@rule("engine", "gpuMemoryUtilization", "MutuallyExclusive", "is not allowed with kvCacheMemory; remove one of them")
def _one_size_of_cache(engine: EngineSpec) -> bool:
    return engine.gpu_memory_utilization is None or engine.kv_cache_memory is None


@rule(
    "engine", "maxNumBatchedTokens", "BatchedTokens",
    "is less than maxNumSeqs, and a step processes at least one token per request; increase it",
    details=lambda engine: (
        f"is less than maxNumSeqs {engine.max_num_seqs}, and a step processes at least one token per request; "
        f"write at least {engine.max_num_seqs}"
    ),
)  # fmt: skip
def _token_per_request(engine: EngineSpec) -> bool:
    return engine.max_num_batched_tokens >= engine.max_num_seqs


@rule("", "engine.maxModelLen", "NanoLength", f"exceeds the context length of Nano; the maximum is {LONGEST_NANO}")
def _nano_length(spec: DeploymentSpec) -> bool:
    return (
        spec.model.variant != Variant.NANO
        or spec.engine.max_model_len is None
        or spec.engine.max_model_len <= LONGEST_NANO
    )


@rule(
    "engine", "extraArgs[0]", "NoFlag", "is not a flag; begin with a flag, for example --seed",
    conditions=["!has(self.extraArgs) || size(self.extraArgs) == 0 || self.extraArgs[0].startsWith('-')"],
    value=lambda engine: engine.extra_args[0],
)  # fmt: skip
def _flag_first(engine: EngineSpec) -> bool:
    return not engine.extra_args or engine.extra_args[0].startswith("-")


@rule(
    "engine.extraArgs[]", "", "OwnedFlag", "is set by dsv4; use a field of spec.model, spec.topology or spec.engine",
    conditions=[
        f"!({among('self', listed(owned_flags()[number : number + _AT_ONCE]), listed(OTHER_FLAGS))})"
        for number in range(0, len(owned_flags()), _AT_ONCE)
    ],
    details=lambda arg: f"is set by dsv4; {owned_flag(arg)}",
    value=lambda arg: arg.split("=", 1)[0],  # without the value, which may be a secret
)  # fmt: skip
def _no_owned_flag(arg: str) -> bool:
    return owned_flag(arg) is None


@rule(
    "engine.env[].name", "", "OwnedVariable", "is set by dsv4; remove it",
    conditions=[f"!self.startsWith('DSV4_') && !(self in {listed(owned_variables())})"],
    details=lambda name: f"is set by dsv4; {owned_env(name)}",
)  # fmt: skip
def _no_owned_variable(name: str) -> bool:
    return owned_env(name) is None


@rule(
    "engine.env[].name", "", "Secret", f"is the name of a secret; {ELSEWHERE}",
    conditions=[f"!self.upperAscii().matches({literal(VARIABLE)})"],
)  # fmt: skip
def _no_secret_variable(name: str) -> bool:
    return not is_secret_name(name)


for _part in ("engine.extraArgs[]", "engine.env[].value"):

    @rule(
        _part, "", "LinkLocal", LINK_LOCAL_REFUSAL,
        conditions=[f"!self.matches({literal(LINK_LOCAL_SHORT)})"], value=lambda _: None,
    )  # fmt: skip
    def _no_link_local(text: str) -> bool:
        return not is_link_local(text)

    @rule(
        _part, "", "Secret", f"may contain a secret; {ELSEWHERE}",
        conditions=[f"!self.matches({literal(pattern)})" for pattern in VALUES], value=lambda _: None,
    )  # fmt: skip
    def _no_secret(text: str) -> bool:
        return not has_secret(text)


@rule("engine.env[]", "value", "InvalidURL", URL.refusal, conditions=(), value=lambda _: None)
def _endpoint_is_url(variable: EnvVar) -> bool:
    return variable.name not in ENDPOINT_VARIABLES or bool(re.fullmatch(URL.pattern, variable.value, re.ASCII))


def _bounded(name: str, text: str, size: Callable[[EngineSpec], int]) -> None:
    remedy = "a plan must fit into a ConfigMap, so shorten it"

    @rule(
        "engine", name, "TooManyBytes", f"has more than {MOST_BYTES} bytes; {remedy}",
        conditions=[f"!has(self.{name}) || self.{name}.map(one, size(bytes({text}))).sum() <= {MOST_BYTES}"],
        details=lambda engine: f"has {size(engine)} bytes, and the maximum is {MOST_BYTES}; {remedy}",
    )  # fmt: skip
    def bounded(engine: EngineSpec) -> bool:
        return size(engine) <= MOST_BYTES


_bounded("env", "one.value", lambda engine: sum(len(variable.value.encode()) for variable in engine.env))
_bounded("extraArgs", "one", lambda engine: sum(len(arg.encode()) for arg in engine.extra_args))


def _own_port(name: str, others: list[str]) -> None:
    def taken(ports: PortsSpec) -> Iterator[str]:
        return (other for other in others if getattr(ports, other) == getattr(ports, name))

    @rule(
        "network.ports", name, ValueReason.DUPLICATE, "is the number of another port; write another number",
        conditions=[f"!({optional(PortsSpec, name)} in [{', '.join(optional(PortsSpec, one) for one in others)}])"],
        details=lambda ports: f"is also ports.{next(taken(ports))}; write another number",
    )  # fmt: skip
    def own_port(ports: PortsSpec) -> bool:
        return next(taken(ports), None) is None


for _number, _name in enumerate(PortsSpec.model_fields):
    if _number:
        _own_port(_name, list(PortsSpec.model_fields)[:_number])


@rule(
    "recovery.backoff", "base", "BackoffBase", "exceeds backoff.max; decrease base or increase max",
    conditions=[f"duration({optional(BackoffSpec, 'base')}) <= duration({optional(BackoffSpec, 'max')})"],
    details=lambda backoff: (
        f"exceeds backoff.max {format_duration(backoff.max)}; decrease base or increase max"
    ),
    value=lambda backoff: format_duration(backoff.base),
)  # fmt: skip
def _base_within_max(backoff: BackoffSpec) -> bool:
    return backoff.base <= backoff.max


@rule("", "topology.scheduler", "KubeRayScheduler", "is not supported by the backend KubeRay; remove it, or write Pods")
def _kuberay_without_scheduler(spec: DeploymentSpec) -> bool:
    return spec.topology.scheduler is None or spec.backend != KUBERAY_BACKEND


@rule(
    "",
    "engine.executor",
    "KubeRayExecutor",
    "does not use Ray, which KubeRay starts; remove it, or write Pods as backend",
)
def _kuberay_with_ray(spec: DeploymentSpec) -> bool:
    return spec.engine.executor != Executor.MP or spec.backend != KUBERAY_BACKEND


transition(
    "", "backend", "Immutable", "is immutable; delete the deployment and create another one",
    # With `orValue` the API server assumes the maximum length of the strings.
    f"has(self.backend) ? (has(oldSelf.backend) ? self.backend == oldSelf.backend "
    f": self.backend == '{DEFAULT_BACKEND}') "
    f": !has(oldSelf.backend) || oldSelf.backend == '{DEFAULT_BACKEND}'",
)  # fmt: skip


def check_spec(spec: DeploymentSpec) -> tuple[Finding, ...]:
    """Return the findings about `spec` that concern several fields, one for each field and its parts."""
    found: dict[str, Finding] = {}
    for each in RULES:
        for path, part in parts(spec, each.part):
            if each.holds is not None and not each.holds(part):
                field = ".".join(filter(None, ("spec", path, each.field)))
                text = each.details(part) if each.details else each.text
                value = each.value(part) if each.value else _value(part, each.field)
                if any(f"{field}.".startswith(f"{known}.") for known in found):
                    continue
                found[field] = Finding(field, each.reason, *split_remedy(text), value)
    for path, key in UNIQUE.items():
        for finding in _duplicates(spec, path, key):
            found.setdefault(finding.field, finding)
    return tuple(found.values())


def _duplicates(spec: DeploymentSpec, path: str, key: str) -> Iterator[Finding]:
    seen = []
    for place, entry in parts(spec, f"{path}[]"):
        value = _value(entry, key)
        if value in seen:
            field = f"spec.{place}.{key}" if key else f"spec.{place}"
            yield Finding(field, ValueReason.DUPLICATE, "is a duplicate", "remove one", value)
        seen.append(value)


def parts(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every part at `path`, `a.b[].c`; absent ones are omitted."""
    if not path:
        yield "", part
        return
    step, _, rest = path.partition(".")
    name = step.removesuffix("[]")
    inner = _attribute(part, name)
    if inner is None:
        return
    entries = enumerate(inner) if step != name else [(None, inner)]
    for index, entry in entries:
        here = name if index is None else f"{name}[{index}]"
        for further, found in parts(entry, rest):
            yield f"{here}.{further}" if further else here, found


def _attribute(part: SpecPart, alias: str) -> Any:
    return next(getattr(part, name) for name, field in type(part).model_fields.items() if alias in (field.alias, name))


def _value(part: Any, path: str) -> object:
    """Return the value at `path`; None if it is not a number, a text or an enum."""
    for step in filter(None, path.split(".")):
        part = _attribute(part, step)
    return part if isinstance(part, Enum | str | int | float) else None
