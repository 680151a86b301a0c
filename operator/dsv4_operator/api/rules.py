"""Rules that span several fields of a specification, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsv4_operator.api.cluster import TolerationOperator
from dsv4_operator.api.endpoints import ENDPOINT_VARIABLES, LINK_LOCAL_REFUSAL, URL, is_link_local
from dsv4_operator.api.engine import EngineSpec
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.model_source import Precision
from dsv4_operator.api.owned import owned_env, owned_flag
from dsv4_operator.api.spec import DeploymentSpec, Hardware, ModelSpec, TopologySpec, Variant
from dsv4_operator.api.values import format_duration, quoted
from dsv4_runtime.util.secrets import has_secret, is_secret_name

_SOURCES = {
    "nano": "nano",
    "path": "path",
    "hugging_face": "huggingFace",
    "s3": "s3",
    "http": "http",
    "shared_path": "sharedPath",
}

MOST_BYTES = 2**17
"""Bytes of all variables, and of all arguments, of an engine: with quotes and line breaks escaped, a plan of 16 members
still fits into a ConfigMap, which takes 1 MiB."""

ELSEWHERE = (
    "remove it: whoever may read the deployment would read it; for sources and API keys there is secretKeyRef in "
    "spec.model.source and spec.gateway.apiKeys"
)

LONGEST_NANO = 8192
"""Positions that the Nano model has; the others have as many as the field allows."""

TENSOR_PARALLEL_SIZES = {
    Variant.NANO: (1, 2),
    Variant.FLASH: (1, 2, 4, 8),
    Variant.PRO: (1, 2, 4, 8, 16),
}
"""Sizes that divide both the attention heads and the groups of the output projection of each variant."""


def check_spec(spec: DeploymentSpec) -> tuple[Finding, ...]:
    """Return everything that is wrong with `spec` although each field by itself is right."""
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
    names = model.served_names or ()
    for index, name in enumerate(names):
        path = f"spec.model.servedNames[{index}]"
        if name in names[:index]:
            yield Finding(path, f"{quoted(name)} is there twice; remove one")


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
    for index, name in enumerate(topology.nodes):
        if name in topology.nodes[:index]:
            yield Finding(f"spec.topology.nodes[{index}]", f"{quoted(name)} is there twice; remove one")
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
    yield from _twice("spec.engine.imagePullSecrets", [secret.name for secret in engine.image_pull_secrets], "name")


def _twice(path: str, keys: list[str], field: str) -> Iterator[Finding]:
    for index, key in enumerate(keys):
        if key in keys[:index]:
            yield Finding(f"{path}[{index}].{field}", f"{quoted(key)} is there twice; remove one")


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
            # Without its value, which may be a secret.
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
    yield from _twice("spec.network.fabric.members", ranks, "rank")
