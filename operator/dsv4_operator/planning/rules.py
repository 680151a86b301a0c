"""Rules from field experience: each with its condition, remedy and source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4_operator.api import (
    CudagraphMode,
    DSV4Deployment,
    Executor,
    Finding,
    Hardware,
    KvCacheDtype,
    Severity,
    SpeculativeMethod,
    TablesPlace,
)
from dsv4_operator.api.values import format_duration
from dsv4_operator.planning.catalog import GIB, machine_named
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.images import profiles, variable_problem
from dsv4_operator.planning.images.surface import argument_problems
from dsv4_operator.planning.setup import B12X_FLAGS, Setup, setup
from dsv4_runtime.contract.kernels import B12X, Op


class Broken(NamedTuple):
    """One violation of a rule."""

    field: str
    """Empty: it concerns the machines."""
    value: object
    """Value of the field; None without a field."""
    message: str
    remedy: str = ""
    """Empty: that of the rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    """`reason` of its findings."""
    severity: Severity
    condition: str
    """Condition under which it applies, for display."""
    check: Callable[[Setup], Iterator[Broken]]
    """Yields violations."""
    remedy: str
    """Remedy; empty if all violations contain their own."""
    source: str
    """Evidence for the rule."""

    def findings(self, chosen: Setup) -> Iterator[Finding]:
        """Yield every violation of the rule."""
        for field, value, message, remedy in self.check(chosen):
            yield Finding(field, self.id, message, remedy or self.remedy, value, self.severity)


_RAY_WORKER_PORTS = range(10002, 20000)
_RAY_PORTS = {10001: "Ray's client server", 52365: "Ray's dashboard agent"}
"""Ports that Ray uses by itself, the first on the head and the second on every member."""
_MOST_BATCHED_UNIFIED = 8192
_MOST_STAGED_REQUESTS = 16
_UNEQUAL_BYTES = 2 * GIB
_TIERS = "TieringOffloadingSpec"
"""Setting `spec_name` of vLLM's offloaded KV cache with tiers below the host's memory, such as files."""


def _wrong_hardware(chosen: Setup) -> Iterator[Broken]:
    hardware = chosen.hardware
    for node in chosen.nodes:
        if node.machine and machine_named(node.machine).hardware != hardware:
            actual = (
                "has no supported accelerator" if node.machine == "cpu" else f"is {machine_named(node.machine).title}"
            )
            yield Broken("spec.topology.hardware", hardware, f"does not match the machine {node.name}, which {actual}")


def _mixed_machines(chosen: Setup) -> Iterator[Broken]:
    kinds = {node.machine: node for node in reversed(chosen.nodes) if node.machine}
    if len({machine_named(kind).hardware for kind in kinds}) > 1:
        listed = ", ".join(f"{node.name} ({kind})" for kind, node in reversed(kinds.items()))
        yield Broken("spec.topology.hardware", None, f"the machines of a group are of different kinds: {listed}")


def _sizes(chosen: Setup) -> Iterator[Broken]:
    kinds = {node.machine: machine_named(node.machine) for node in reversed(chosen.nodes) if node.machine}
    if len({kind.hardware for kind in kinds.values()}) == 1 and len({kind.memory_bytes for kind in kinds.values()}) > 1:
        listed = ", ".join(f"{node.name} ({node.machine})" for node in chosen.nodes)
        problem = (
            f"the machines of a group have different memory sizes: {listed}; the plan is for {chosen.machine.title}"
        )
        yield Broken("", None, problem)


def _unequal_memory(chosen: Setup) -> Iterator[Broken]:
    if not chosen.machine.unified_memory or chosen.on_cpu or len(chosen.nodes) < 2:
        return
    least = min(chosen.nodes, key=lambda node: node.memory_bytes)
    most = max(chosen.nodes, key=lambda node: node.memory_bytes)
    if most.memory_bytes - least.memory_bytes > _UNEQUAL_BYTES:
        problem = (
            f"the machine {least.name} has {least.memory_bytes / GIB:.1f} GiB of free memory and {most.name} has "
            f"{most.memory_bytes / GIB:.1f} GiB, and the smallest value applies to all machines"
        )
        yield Broken("", None, problem, f"end other programs on {least.name}")


def _head_placement(chosen: Setup) -> Iterator[Broken]:
    if not chosen.machine.unified_memory or chosen.on_cpu or len(chosen.nodes) < 2:
        return
    head, most = chosen.nodes[0], max(chosen.nodes, key=lambda node: node.memory_bytes)
    if most.memory_bytes - head.memory_bytes > _UNEQUAL_BYTES:
        problem = (
            f"the head runs on {head.name} with {head.memory_bytes / GIB:.1f} GiB of free memory, which the API server "
            "and the engine core also need"
        )
        yield Broken("", None, problem)


def _same_address(chosen: Setup) -> Iterator[Broken]:
    seen: dict[str, str] = {}
    for node in chosen.nodes:
        if node.address in seen:
            yield Broken(
                "", None, f"the machines {seen[node.address]} and {node.name} have the same address {node.address}"
            )
        seen.setdefault(node.address, node.name)


def _pipeline(chosen: Setup) -> Iterator[Broken]:
    stages, requests = chosen.spec.topology.pipeline_parallel_size, chosen.spec.engine.max_num_seqs
    if stages > 1 and requests > _MOST_STAGED_REQUESTS:
        problem = f"concurrent requests exceed the memory of the first of {stages} pipeline stages"
        yield Broken("spec.engine.maxNumSeqs", requests, problem)


def _pipeline_for_nothing(chosen: Setup) -> Iterator[Broken]:
    topology, model = chosen.spec.topology, chosen.model
    world = topology.world_size
    fits = not any(count % world for count in (model.heads, model.o_groups, model.moe_inter))
    if topology.pipeline_parallel_size > 1 and fits and not chosen.on_cpu:
        problem = f"is slower than tensorParallelSize {world}, which is possible"
        yield Broken("spec.topology.pipelineParallelSize", topology.pipeline_parallel_size, problem)


def _ports(chosen: Setup) -> Iterator[Broken]:
    for name, number in chosen.spec.network.ports.model_dump().items():
        if number in _RAY_WORKER_PORTS:
            yield Broken(f"spec.network.ports.{name}", number, "is in the range of Ray's worker ports, 10002 to 19999")
        elif number in _RAY_PORTS:
            yield Broken(f"spec.network.ports.{name}", number, f"is the port of {_RAY_PORTS[number]}")


def _utilization(chosen: Setup) -> Iterator[Broken]:
    given, most = chosen.spec.engine.gpu_memory_utilization, chosen.machine.utilization_max
    if given is not None and given > most:
        problem = f"exceeds {most:.3g}, the highest value that is known to work on {chosen.machine.title}"
        yield Broken(_UTILIZATION, given, problem, f"write at most {most:.3g}")


def _utilization_shared(chosen: Setup) -> Iterator[Broken]:
    given = chosen.spec.engine.gpu_memory_utilization
    if given is not None and chosen.machine.unified_memory and 0.85 < given <= chosen.machine.utilization_max:
        yield Broken(_UTILIZATION, given, "leaves less than 15 % of the memory to the system")


def _batched(chosen: Setup) -> Iterator[Broken]:
    tokens = chosen.spec.engine.max_num_batched_tokens
    if chosen.machine.unified_memory and not chosen.on_cpu and tokens > _MOST_BATCHED_UNIFIED:
        problem = "is high for unified memory, where long prompts have caused hosts to reset"
        yield Broken("spec.engine.maxNumBatchedTokens", tokens, problem)


def _pinned_gid(chosen: Setup) -> Iterator[Broken]:
    for index, member in enumerate(chosen.spec.network.fabric.members):
        if member.gid_index != "Auto" and (member.hcas is None or len(member.hcas) > 1):
            field = f"spec.network.fabric.members[{index}].gidIndex"
            yield Broken(field, member.gid_index, "applies to several RDMA devices, which may need different values")


def _fabric_ranks(chosen: Setup) -> Iterator[Broken]:
    size = chosen.spec.topology.nodes_per_group
    for index, member in enumerate(chosen.spec.network.fabric.members):
        if member.rank >= size:
            field = f"spec.network.fabric.members[{index}].rank"
            yield Broken(field, member.rank, f"is out of range for a group of {size}", f"the maximum is {size - 1}")


def _legacy_interfaces(chosen: Setup) -> Iterator[Broken]:
    names = list(dict.fromkeys(node.interface for node in chosen.nodes))
    if chosen.spec.engine.executor is Executor.RAY_LEGACY and len(names) > 1:
        problem = f"copies the network settings of the head, and the interfaces differ: {', '.join(names)}"
        yield Broken("spec.engine.executor", Executor.RAY_LEGACY, problem)


def _no_rdma_on_sparks(chosen: Setup) -> Iterator[Broken]:
    fabric = chosen.spec.network.fabric
    if chosen.several_machines and fabric.require_rdma is False and chosen.hardware is Hardware.GB10:
        yield Broken("spec.network.fabric.requireRDMA", False, "allows NCCL to fall back to TCP sockets")


def _host_tables(chosen: Setup) -> Iterator[Broken]:
    size = sum(part.bytes for part in chosen.model.host_components)
    if size and not chosen.machine.unified_memory and not chosen.memory.engine.tables_on_disk:
        # The tables are divided like the layers; every stage may need them.
        topology = chosen.spec.topology
        ranks = min(topology.devices_per_node, topology.tensor_parallel)
        here = size * ranks / topology.tensor_parallel / GIB
        problem = f"the tables of {chosen.model.name} use {here:.0f} GiB of pinned host memory on each machine"
        yield Broken("spec.model", None, problem)


def _tables_on_disk(chosen: Setup) -> Iterator[Broken]:
    field, value = "spec.model.tables", chosen.spec.model.tables
    if value is TablesPlace.MEMORY:
        return
    if not chosen.model.host_components:
        yield Broken(field, value, f"requires a checkpoint with tables, and {chosen.model.name} has none", "remove it")
    elif not chosen.profile.tables_on_disk and not chosen.gives("--engram-config"):
        problem = f"is not supported by the image {chosen.profile.name}"
        able = " or ".join(one.name for one in profiles() if chosen.hardware in one.hardware and one.tables_on_disk)
        use = f"set spec.engine.profile to {able}, or " if able and chosen.spec.engine.build is None else ""
        yield Broken(field, value, problem, f"{use}add the --engram-config of the build to spec.engine.extraArgs")


_SM12X = "vLLM 0.33, models/deepseek_v4/nvidia/model.py, _select_dsv4_attn_cls"
_UTILIZATION = "spec.engine.gpuMemoryUtilization"
_ARGS = "spec.engine.extraArgs"
_FP4_INDEXERS = {"mxfp4", "nvfp4"}
_FOREIGN_ATTENTION = {
    "FLASHINFER_MLA_SPARSE": "vLLM refuses it for DeepSeek-V4",
    "FLASHINFER_MLA_SPARSE_SM120": "vLLM refuses it for DeepSeek-V4",
    "FLASHMLA_SPARSE": "its kernels are built for other compute capabilities",
    "FLASHMLA_SPARSE_DSV4": "its kernels are built for other compute capabilities",
}
_SHORT_STEP_SECONDS = 600
_LOST_BYTES = 2 * GIB
_LEGACY_REQUESTS = 4

OBSOLETE = {
    "VLLM_RPC_TIMEOUT": ("is obsolete", "remove it and use spec.engine.timeouts.executeModel"),
    "VLLM_SKIP_INIT_MEMORY_CHECK": ("existed in a fork only", "remove it and use spec.engine.gpuMemoryUtilization"),
    **dict.fromkeys(
        ("VLLM_SM120_REFERENCE_DEEPSEEK_V4_ATTENTION", "VLLM_TRITON_MLA_SPARSE"),
        ("existed in a fork only", "remove it: vLLM uses the kernels of FlashInfer for SM12x"),
    ),
    "VLLM_USE_RAY_COMPILED_DAG": ("is obsolete", "remove it and use spec.engine.executor"),
}
"""Variables of known recipes that no program reads any more, with the problem and the remedy."""


def _arguments(chosen: Setup) -> Iterator[Broken]:
    for index, problem in argument_problems(chosen.spec.engine.extra_args, chosen.profile.surface):
        yield Broken(f"{_ARGS}[{index}]", *problem)


def _variables(chosen: Setup) -> Iterator[Broken]:
    for index, variable in enumerate(chosen.spec.engine.env):
        field = f"spec.engine.env[{index}]"
        if variable.name in OBSOLETE and variable.name not in chosen.profile.extra_env:
            yield Broken(f"{field}.name", variable.name, *OBSOLETE[variable.name])
        elif problem := variable_problem(variable.name, variable.value, chosen.profile):
            yield Broken(f"{field}.name" if problem.value == variable.name else f"{field}.value", *problem)


def _empty_variables(chosen: Setup) -> Iterator[Broken]:
    for index, variable in enumerate(chosen.spec.engine.env):
        if not variable.value and variable.name.startswith(("NCCL_", "FLASHINFER_", "VLLM_")):
            yield Broken(f"spec.engine.env[{index}].value", "", f"is not a value of {variable.name}")


def _executor(chosen: Setup) -> Iterator[Broken]:
    executor, image = chosen.spec.engine.executor, chosen.profile
    if executor not in image.executors:
        problem = f"is not supported by the image {image.name}"
        yield Broken("spec.engine.executor", executor, problem, f"use {' or '.join(image.executors)}")


def _legacy_requests(chosen: Setup) -> Iterator[Broken]:
    engine = chosen.spec.engine
    if engine.executor is Executor.RAY_LEGACY and engine.max_num_seqs > _LEGACY_REQUESTS:
        problem = "concurrent requests have ended the compiled graph of RayLegacy with RayChannelTimeoutError"
        yield Broken("spec.engine.maxNumSeqs", engine.max_num_seqs, problem)


def _image_hardware(chosen: Setup) -> Iterator[Broken]:
    profile = chosen.profile
    if chosen.hardware not in profile.hardware:
        problem = f"is not built for {chosen.hardware}, only for {', '.join(profile.hardware)}"
        engine = chosen.spec.engine
        base = engine.build.base if engine.build else None
        named = (("build.base", base), ("profile", engine.profile), ("image", engine.image), ("profile", profile.name))
        field, value = next((field, value) for field, value in named if value)
        fitting = ", ".join(one.name for one in profiles() if chosen.hardware in one.hardware)
        remedy = "use another image" if field == "image" else f"use one of {fitting}"
        yield Broken(f"spec.engine.{field}", value, problem, remedy)


def _unpinned_image(chosen: Setup) -> Iterator[Broken]:
    image = chosen.spec.engine.image
    if image is not None and "@sha256:" not in image:
        yield Broken("spec.engine.image", image, "has no digest, and the image behind a tag can change")


def _unpinned_code(chosen: Setup) -> Iterator[Broken]:
    if chosen.gives("--trust-remote-code"):
        yield Broken(_ARGS, None, "--trust-remote-code runs Python of the checkpoint, which DeepSeek-V4 does not need")


def _kv_cache_dtype(chosen: Setup) -> Iterator[Broken]:
    dtype, known = chosen.spec.engine.kv_cache_dtype, chosen.profile.kv_cache_dtypes
    if dtype is not KvCacheDtype.AUTO and dtype not in known:
        remedy = f"use {' or '.join(known)}, or remove it" if known else "remove it"
        problem = f"is not supported for DeepSeek-V4 by the image {chosen.profile.name}"
        yield Broken("spec.engine.kvCacheDtype", dtype, problem, remedy)


def _drafts(chosen: Setup) -> Iterator[Broken]:
    drafts, heads = chosen.spec.engine.speculative, chosen.model.speculative
    field = "spec.engine.speculative.method"
    if drafts.method is SpeculativeMethod.NONE:
        if drafts.tokens is not None:
            problem = "requires spec.engine.speculative.method"
            yield Broken("spec.engine.speculative.tokens", drafts.tokens, problem, "write MTP or DSpark as method")
        return
    method = drafts.method.lower()
    if method not in chosen.profile.speculative:
        yield Broken(field, drafts.method, f"is not supported by the image {chosen.profile.name}", "write None")
    elif heads is None or heads.method != method:
        has = {"mtp": "MTP", "dspark": "DSpark"}[heads.method] if heads else "None"
        remedy = f"write {has}"
        if chosen.spec.model.source.nano is not None:
            remedy += f", or {drafts.method} as spec.model.source.nano.drafts"
        yield Broken(field, drafts.method, f"needs draft heads, which {chosen.model.name} does not have", remedy)


def _short_drafts(chosen: Setup) -> Iterator[Broken]:
    image, method = chosen.profile, chosen.spec.engine.speculative.method
    tokens, least = chosen.draft_tokens, image.dspark_least_tokens
    if method is SpeculativeMethod.DSPARK and tokens < least:
        problem = f"is less than the minimum of the image {image.name}"
        yield Broken("spec.engine.speculative.tokens", tokens, problem, f"write {least}")


def _long_drafts(chosen: Setup) -> Iterator[Broken]:
    drafts, heads = chosen.spec.engine.speculative, chosen.model.speculative
    if drafts.method is not SpeculativeMethod.NONE and heads and chosen.draft_tokens > heads.tokens:
        problem = f"exceeds the length for which the heads of {chosen.model.name} were trained, {heads.tokens}"
        yield Broken("spec.engine.speculative.tokens", chosen.draft_tokens, problem)


def _drafts_memory(chosen: Setup) -> Iterator[Broken]:
    engine = chosen.spec.engine
    given = engine.gpu_memory_utilization
    drafting = engine.speculative.method is SpeculativeMethod.MTP
    if drafting and given is not None and given > 0.92 and not chosen.machine.unified_memory and not chosen.on_cpu:
        yield Broken(_UTILIZATION, given, "with MTP caused out-of-memory errors at the first request")


def _fp4_indexer(chosen: Setup) -> Iterator[Broken]:
    if not chosen.machine.is_sm12x:
        return
    settings = chosen.json("--attention-config")
    kind = settings.get("indexer_kv_dtype")
    problem = f"requires a data-center GPU, and the machine is {chosen.machine.title}"
    if kind in _FP4_INDEXERS:
        yield Broken(_ARGS, None, f"indexer_kv_dtype {kind} {problem}")
    if settings.get("use_fp4_indexer_cache"):
        yield Broken(_ARGS, None, f"use_fp4_indexer_cache {problem}")


def _attention(chosen: Setup) -> Iterator[Broken]:
    backend = chosen.value("--attention-backend") or str(chosen.json("--attention-config").get("backend", ""))
    if not chosen.machine.is_sm12x or not backend:
        return
    if problem := _FOREIGN_ATTENTION.get(backend.upper()):
        yield Broken(
            _ARGS, None, f"the attention backend {backend} does not support {chosen.model.name} here: {problem}"
        )
    elif backend.upper().startswith("B12X") and chosen.profile.args.get("--attention-backend") != backend:
        problem = f"the attention backend {backend} is not supported by the image {chosen.profile.name}"
        yield Broken(_ARGS, None, problem)


def _moe_backend(chosen: Setup) -> Iterator[Broken]:
    backend = chosen.value("--moe-backend") or (B12X if chosen.provider(Op.MOE) == B12X else None)
    if backend == "deep_gemm_mega_moe" and chosen.machine.is_sm12x:
        problem = f"requires a data-center GPU, and the machine is {chosen.machine.title}"
        yield Broken(_ARGS, None, f"--moe-backend {backend} {problem}")
    if backend in {"b12x", "flashinfer_b12x"} and chosen.spec.topology.expert_parallel:
        problem = f"is not supported by --moe-backend {backend}, which divides experts by rows only"
        yield Broken("spec.topology.expertParallel", True, problem)


def _b12x_kernels(chosen: Setup) -> Iterator[Broken]:
    named = next((op for op in B12X_FLAGS if chosen.provider(op) == B12X), None)
    if named and not chosen.machine.is_sm12x and not chosen.on_cpu:
        problem = f"requires compute capability 12.x, and the machine is {chosen.machine.title}"
        yield Broken("spec.engine.kernels", chosen.spec.engine.kernels, f"{named}={B12X} {problem}")


def _all_reduce(chosen: Setup) -> Iterator[Broken]:
    topology, mode = chosen.spec.topology, chosen.spec.engine.cudagraph_mode
    given = chosen.variable("PYTORCH_CUDA_ALLOC_CONF") or chosen.variable("PYTORCH_ALLOC_CONF") or ""
    shared = topology.devices_per_node > 1 and topology.tensor_parallel > 1 and not chosen.on_cpu
    graphs = mode is not CudagraphMode.NONE and not chosen.gives("--enforce-eager")
    if "expandable_segments:True" not in given or not shared or not graphs:
        return
    if not chosen.profile.expandable_segments and not chosen.gives("--disable-custom-all-reduce"):
        problem = "expandable_segments:True makes the start fail with CUDA graphs on several devices of one machine"
        yield Broken("spec.engine.env", None, problem)


def _unsafe_copies(chosen: Setup) -> Iterator[Broken]:
    name, reason = chosen.unsafe_copies
    if reason:
        problem = (
            f"on {name} {reason}; copies between its GPUs over PCIe may hang, and are disabled (NCCL_P2P_DISABLE=1)"
        )
        yield Broken("", None, problem)


def _lost_memory(chosen: Setup) -> Iterator[Broken]:
    for node in chosen.nodes:
        if node.lost_bytes > _LOST_BYTES:
            problem = f"on {node.name} drivers have kept {node.lost_bytes / GIB:.1f} GiB after the ends of engines"
            yield Broken("", None, problem)


def _changed_driver(chosen: Setup) -> Iterator[Broken]:
    for node in chosen.nodes:
        if node.driver_before not in ("", node.driver):
            problem = (
                f"{node.name} has the NVIDIA driver {node.driver}, and engines ran there with {node.driver_before}"
            )
            yield Broken("", None, problem)


def _different_drivers(chosen: Setup) -> Iterator[Broken]:
    drivers = {node.name: node.driver for node in chosen.nodes if node.driver}
    if len(set(drivers.values())) > 1:
        shown = ", ".join(f"{name} {version}" for name, version in drivers.items())
        yield Broken("", None, f"the machines of the group have different NVIDIA drivers: {shown}")


def _e8m0(chosen: Setup) -> Iterator[Broken]:
    if chosen.machine.is_sm12x and chosen.variable("VLLM_USE_DEEP_GEMM_E8M0") == "0":
        yield Broken("spec.engine.env", None, "VLLM_USE_DEEP_GEMM_E8M0=0 fails with the scales of DeepSeek-V4 on SM12x")


def _eager(chosen: Setup) -> Iterator[Broken]:
    if chosen.on_cpu:
        return
    if chosen.spec.engine.cudagraph_mode is CudagraphMode.NONE or chosen.gives("--enforce-eager"):
        problem = "disables CUDA graphs, without which a token takes about three times as long"
        yield Broken("spec.engine.cudagraphMode", CudagraphMode.NONE, problem)


def _graphs_twice(chosen: Setup) -> Iterator[Broken]:
    mode = chosen.spec.engine.cudagraph_mode
    for flag in ("--compilation-config", "--enforce-eager"):
        if mode is not CudagraphMode.AUTO and chosen.gives(flag):
            yield Broken("spec.engine.cudagraphMode", mode, f"conflicts with {flag} in {_ARGS}", "remove one of them")


def _short_steps(chosen: Setup) -> Iterator[Broken]:
    seconds = chosen.spec.engine.timeouts.execute_model
    if seconds is not None and seconds < _SHORT_STEP_SECONDS and not chosen.on_cpu:
        problem = "is shorter than a first step, which may compile kernels"
        yield Broken("spec.engine.timeouts.executeModel", format_duration(seconds), problem)


def _offloaded_cache(chosen: Setup) -> Iterator[Broken]:
    settings = chosen.json("--kv-transfer-config")
    further = settings.get("kv_connector_extra_config")
    name = further.get("spec_name") if isinstance(further, dict) else None
    if chosen.several_machines and (name or settings.get("kv_connector_extra_config.spec_name")) == _TIERS:
        yield Broken(_ARGS, None, f"{_TIERS} stores the cache of rank 0's machine only")


def _cpu_fields(chosen: Setup) -> Iterator[Broken]:
    """Yield the settings without an effect in the CPU build; they would be ignored silently."""
    if not chosen.on_cpu:
        return
    engine, topology = chosen.spec.engine, chosen.spec.topology
    if engine.cudagraph_mode not in {CudagraphMode.AUTO, CudagraphMode.NONE}:
        yield Broken("spec.engine.cudagraphMode", engine.cudagraph_mode, "is not supported on CPU")
    if not engine.async_scheduling:
        yield Broken("spec.engine.asyncScheduling", False, "has no effect on CPU")
    if topology.expert_parallel:
        yield Broken("spec.topology.expertParallel", True, "is not supported on CPU")
    if engine.retain_weights:
        yield Broken("spec.engine.retainWeights", True, "has no effect on CPU")
    fabric = chosen.spec.network.fabric
    if fabric != type(fabric)():
        yield Broken("spec.network.fabric", None, "has no effect on CPU")


RULES = (
    Rule(
        "WrongHardware", Severity.REFUSE, "a machine does not match `hardware`",
        _wrong_hardware, "use machines of that kind, or write the hardware of the machine",
        "the machine's own report",
    ),
    Rule(
        "MixedMachines", Severity.REFUSE, "the machines of a group are of different kinds",
        _mixed_machines, "use machines of one kind for a group",
        "https://build.nvidia.com/spark/vllm-cluster: two Sparks of the same memory size",
    ),
    Rule(
        "UnequalMachines", Severity.WARN, "machines of one kind with memory of different sizes",
        _sizes, "use machines with equal memory",
        "https://build.nvidia.com/spark/vllm-cluster: two Sparks of the same memory size",
    ),
    Rule(
        "UnequalMemory", Severity.WARN, "free memory within a group differs by more than 2 GiB (unified memory)",
        _unequal_memory, "",
        "https://github.com/vllm-project/vllm/pull/40899: the KV cache of all is that of the poorest rank",
    ),
    Rule(
        "HeadPlacement", Severity.WARN, "a machine has over 2 GiB more free memory than that of the head (unified)",
        _head_placement, "list the machine with the most free memory first",
        "https://github.com/vllm-project/vllm/pull/40899: rank 0 had 0.98 GiB for the KV cache where others had 4.64",
    ),
    Rule(
        "SameAddress", Severity.REFUSE, "two machines of a group have one address",
        _same_address, "give each machine its own address on the fabric",
        "vLLM, v1/executor/ray_utils.py: every node should have a unique IP address",
    ),
    Rule(
        "PipelineRequests", Severity.WARN, "more than 16 requests with pipeline stages",
        _pipeline, f"decrease it to {_MOST_STAGED_REQUESTS}",
        "https://github.com/vllm-project/vllm/pull/40899: two stages ended in out-of-memory at 32 requests, not at 16",
    ),
    Rule(
        "PipelineForNothing", Severity.WARN, "pipeline stages where tensor parallelism alone is possible",
        _pipeline_for_nothing, "remove it: tensor parallelism was up to twice as fast on the same machines",
        "https://github.com/vllm-project/vllm/pull/40899: 97.6 against 76.5 tokens/s, 781 against 381 in parallel",
    ),
    Rule(
        "Ports", Severity.REFUSE, "a port of Ray or of its workers",
        _ports, "write another port", "https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations",
    ),
    Rule(
        "MemoryUtilization", Severity.REFUSE, "`gpuMemoryUtilization` above the highest value that is known to work",
        _utilization, "",
        "https://github.com/vllm-project/vllm/issues/46307 (GB10: the host freezes), https://github.com/vllm-project/vllm/pull/40899",
    ),
    Rule(
        "MemoryUtilizationShared", Severity.WARN, "`gpuMemoryUtilization` above 0.85 on unified memory",
        _utilization_shared, "write 0.80 to 0.85, or use the machine for nothing else",
        "https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/issues/5",
    ),
    Rule(
        "BatchedTokens", Severity.WARN, "more than 8192 batched tokens on unified memory",
        _batched, "write 4096 or 8192",
        "https://github.com/NVIDIA/dgx-spark-playbooks/issues/97",
    ),
    Rule(
        "HostTables", Severity.WARN, "tables in host memory beside the layers (V4.1 on RTX)",
        _host_tables, "make sure that it is free: the plan covers the memory of the devices only",
        "vLLM, config/engram.py: cpu_offload is the default",
    ),
    Rule(
        "TablesOnDisk", Severity.REFUSE, "tables on disk without tables in the checkpoint or support in the image",
        _tables_on_disk, "",
        "vLLM 0.33, config/engram.py: the host's memory or the device's; rtx6kpro, models/deepseek-v4.1-flash.md",
    ),
    Rule(
        "PinnedGID", Severity.WARN, "a GID index for several RDMA devices",
        _pinned_gid, "remove it, so that NCCL selects a value for each device, or write one device in hcas",
        "NCCL, src/transport/net_ib: the hint about a forced NCCL_IB_GID_INDEX",
    ),
    Rule(
        "FabricRanks", Severity.REFUSE, "a rank in `fabric.members` outside the group",
        _fabric_ranks, "", "the specification itself",
    ),
    Rule(
        "LegacyInterfaces", Severity.REFUSE, "`RayLegacy` on machines whose interfaces have different names",
        _legacy_interfaces, "write RayV2", "https://github.com/spark-arena/sparkrun/pull/137",
    ),
    Rule(
        "SocketsAllowed", Severity.WARN, "several GB10 machines without required RDMA",
        _no_rdma_on_sparks, "remove it: over sockets Flash decreased from 21.2 to 15.1 tokens per second",
        "https://github.com/jasl/vllm-ds4-sm120-harness; https://github.com/vllm-project/vllm/pull/42075",
    ),
    Rule(
        "UnknownArgument", Severity.REFUSE, "a flag or a value that the vLLM of the image does not accept",
        _arguments, "", "the parser of that vLLM (planning/images/surface)",
    ),
    Rule(
        "UnknownVariable", Severity.REFUSE, "a variable of vLLM, Ray, NCCL or Triton that the image does not read",
        _variables, "", "the tables of that vLLM and of the libraries (planning/images/surface)",
    ),
    Rule(
        "EmptyVariable", Severity.REFUSE, "an empty variable of NCCL, FlashInfer or vLLM",
        _empty_variables, "remove it",
        "https://github.com/Reederey87/dgx-spark-2x-deepseek-v4-flash: an empty NCCL_IB_GID_INDEX ended NCCL",
    ),
    Rule(
        "Executor", Severity.REFUSE, "an executor that the image does not support",
        _executor, "", "vLLM, v1/executor/abstract.py: the compiled-DAG executor is gone since 0.33",
    ),
    Rule(
        "LegacyRequests", Severity.WARN, "more than 4 concurrent requests with `RayLegacy`",
        _legacy_requests, "decrease it to 4, or write RayV2 as executor",
        "https://github.com/vllm-project/vllm/issues/40969",
    ),
    Rule(
        "ImageHardware", Severity.REFUSE, "an image that is not built for the hardware",
        _image_hardware, "", "the sources of the image profile",
    ),
    Rule(
        "UnpinnedImage", Severity.WARN, "an image by tag instead of by digest",
        _unpinned_image, "write NAME@sha256:DIGEST",
        "https://github.com/spark-arena/recipe-registry/issues/23: a newer build behind the same tag refused the flags",
    ),
    Rule(
        "RemoteCode", Severity.WARN, "`--trust-remote-code`",
        _unpinned_code, "remove it", "vLLM, transformers_utils/configs: the configuration class is vLLM's own",
    ),
    Rule(
        "KVCacheDtype", Severity.REFUSE, "a KV cache format that the image does not support for DeepSeek-V4",
        _kv_cache_dtype, "", "vLLM 0.33, models/deepseek_v4/attention.py; the sources of the image profile",
    ),
    Rule(
        "OffloadedCache", Severity.REFUSE, "offloading of the KV cache to tiers from several machines",
        _offloaded_cache, "remove it, or use LMCacheMPConnector with a server of LMCache on each machine",
        "https://github.com/vllm-project/vllm/issues/54415; vLLM 0.33, v1/kv_offload/tiering/spec.py",
    ),
    Rule(
        "SpeculativeHeads", Severity.REFUSE, "drafts that the checkpoint or the image does not support",
        _drafts, "",
        "vLLM 0.33, config/speculative.py; https://github.com/vllm-project/vllm/pull/41834: 0731 has no MTP layer",
    ),
    Rule(
        "ShortDrafts", Severity.REFUSE, "DSpark drafts shorter than the image's build accepts",
        _short_drafts, "", "https://github.com/vllm-project/vllm/issues/50012",
    ),
    Rule(
        "LongDrafts", Severity.WARN, "drafts longer than the heads were trained for",
        _long_drafts, "remove it: acceptance decreased from 24 to 14 % with 7 tokens (DSpark)",
        "https://github.com/vllm-project/vllm/pull/41834",
    ),
    Rule(
        "DraftsMemory", Severity.WARN, "MTP with `gpuMemoryUtilization` above 0.92 on a discrete GPU",
        _drafts_memory, "write 0.92", "https://github.com/vllm-project/vllm/issues/41700",
    ),
    Rule(
        "FP4Indexer", Severity.REFUSE, "an indexer cache in FP4 on SM12x",
        _fp4_indexer, "remove it",
        "vLLM 0.33, v1/attention/backends/mla/indexer.py: mxfp4 requires Blackwell data-centre GPUs; "
        "https://github.com/vllm-project/recipes",
    ),
    Rule(
        "AttentionBackend", Severity.REFUSE, "an attention backend without support for DeepSeek-V4 on SM12x",
        _attention, "remove it, or write FLASHINFER_MLA_SPARSE_DSV4", _SM12X,
    ),
    Rule(
        "MoEBackend", Severity.REFUSE, "an MoE backend that the machine or the topology does not support",
        _moe_backend, "use another backend, for example marlin",
        "vLLM 0.33, model_executor/layers/fused_moe: deep_gemm_mega_moe.py, experts/*b12x*",
    ),
    Rule(
        "B12xKernels", Severity.REFUSE, "kernels of b12x on other machines than SM12x",
        _b12x_kernels, "write auto", "vLLM 0.33, utils/b12x.py",
    ),
    Rule(
        "ExpandableSegments", Severity.REFUSE, "expandable segments, graphs and several devices of one machine",
        _all_reduce, "remove it, or add --disable-custom-all-reduce to spec.engine.extraArgs",
        "https://github.com/vllm-project/vllm/issues/42609",
    ),
    Rule(
        "UnsafeCopies", Severity.WARN, "several devices of one machine whose copies IOMMU or ACS redirect, or fail",
        _unsafe_copies,
        "add iommu=pt to the kernel's command line and disable ACS in the firmware; or set NCCL_P2P_DISABLE to 0 in "
        "spec.engine.env",
        "https://github.com/vllm-project/vllm/issues/51513: the first collective hangs",
    ),
    Rule(
        "LostMemory", Severity.WARN, "a machine whose drivers kept more than 2 GiB over the ends of engines",
        _lost_memory, "restart the machine before an engine lacks the memory",
        "https://github.com/eugr/spark-vllm-docker/issues/257: about 35 restarts, until a power cycle",
    ),
    Rule(
        "DriverChanged", Severity.WARN, "a machine with another driver than its engines ran with before",
        _changed_driver, "run `dsv4 verify` once it serves, or install the earlier driver if it does not",
        "kernels are compiled, measured and validated again with another driver",
    ),
    Rule(
        "DriversDiffer", Severity.WARN, "machines of one group with different drivers",
        _different_drivers, "install the same driver on all of them",
        "`dsv4 init` has the same warning (MachinesDiffer)",
    ),
    Rule(
        "E8M0", Severity.REFUSE, "`VLLM_USE_DEEP_GEMM_E8M0=0` on SM12x",
        _e8m0, "remove it", "https://github.com/vllm-project/vllm/issues/57486",
    ),
    Rule(
        "Eager", Severity.WARN, "no graphs on accelerators",
        _eager, "write Auto",
        "https://github.com/vllm-project/vllm/pull/40899: 5.5 to 6.7 tokens per second, 21 with graphs",
    ),
    Rule(
        "GraphsTwice", Severity.REFUSE, "graphs set by a field and by a flag",
        _graphs_twice, "", "the specification itself",
    ),
    Rule(
        "ShortSteps", Severity.WARN, "a timeout of less than 10 minutes for one step on accelerators",
        _short_steps, "write 15m", "https://github.com/eugr/spark-vllm-docker/issues/348",
    ),
    Rule(
        "CPUFields", Severity.REFUSE, "fields without an effect on CPU",
        _cpu_fields, "remove it", "the CPU build of vLLM 0.32",
    ),
)  # fmt: skip
"""All rules in the order of their findings, those about the machines first."""


def findings(deployment: DSV4Deployment, facts: Facts, group: int = 0) -> tuple[Finding, ...]:
    """Return all findings about one group of `deployment`, refusals before warnings.

    Raises:
        PlanRefused: the image is unknown, or the model cannot be divided as specified, so no rule can be applied.
    """
    return broken_rules(setup(deployment, facts, group))


def broken_rules(chosen: Setup) -> tuple[Finding, ...]:
    """Return all findings about resolved settings, refusals before warnings."""
    found = [finding for rule in RULES for finding in rule.findings(chosen)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.REFUSE))
