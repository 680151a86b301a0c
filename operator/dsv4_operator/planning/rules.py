"""Rules from field experience: each with its condition, remedy and source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.api import (
    CudagraphMode,
    DSV4Deployment,
    Executor,
    Hardware,
    KvCacheDtype,
    Reason,
    SpeculativeMethod,
    TablesPlace,
)
from dsv4_operator.planning.catalog import GIB, machine_named
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.images import variable_problem
from dsv4_operator.planning.images.surface import argument_problems
from dsv4_operator.planning.setup import Setup, setup


class Severity(StrEnum):
    """Consequence of a broken rule."""

    REFUSE = "refuse"
    """There is no plan."""
    WARN = "warn"
    """There is a plan with a warning."""


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """One violation of a rule."""

    rule: str
    severity: Severity
    message: str
    """Field, value and remedy."""
    source: str
    """Evidence for the rule."""
    reason: Reason = Reason.PLAN_REFUSED

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    severity: Severity
    condition: str
    """Condition under which it applies, for display."""
    check: Callable[[Setup], Iterator[str]]
    """Yields violations, each with the field and the value."""
    remedy: str
    """Remedy; empty if the messages of `check` contain it."""
    source: str
    reason: Reason = Reason.PLAN_REFUSED

    def findings(self, chosen: Setup) -> Iterator[RuleFinding]:
        """Yield every violation of the rule."""
        for text in self.check(chosen):
            message = f"{text}; {self.remedy}" if self.remedy else text
            yield RuleFinding(self.id, self.severity, message, self.source, self.reason)


_RAY_WORKER_PORTS = range(10002, 20000)
_RAY_PORTS = {10001: "Ray's client server", 52365: "Ray's dashboard agent"}
"""Ports that Ray uses by itself, the first on the head and the second on every member."""
_MOST_BATCHED_UNIFIED = 8192
_MOST_STAGED_REQUESTS = 16
_UNEQUAL_BYTES = 2 * GIB


def _wrong_hardware(chosen: Setup) -> Iterator[str]:
    hardware = chosen.hardware
    for node in chosen.nodes:
        if node.machine and machine_named(node.machine).hardware != hardware:
            actual = "offers its CPU only" if node.machine == "cpu" else f"is {machine_named(node.machine).title}"
            yield f"spec.topology.hardware: {hardware} is asked for, and the machine {node.name} {actual}"


def _mixed_machines(chosen: Setup) -> Iterator[str]:
    kinds = {node.machine: node for node in reversed(chosen.nodes) if node.machine}
    if len({machine_named(kind).hardware for kind in kinds}) > 1:
        listed = ", ".join(f"{node.name} ({kind})" for kind, node in reversed(kinds.items()))
        yield f"spec.topology.hardware: the machines of a group are of different kinds: {listed}"


def _sizes(chosen: Setup) -> Iterator[str]:
    kinds = {node.machine: machine_named(node.machine) for node in reversed(chosen.nodes) if node.machine}
    if len({kind.hardware for kind in kinds.values()}) == 1 and len({kind.memory_bytes for kind in kinds.values()}) > 1:
        listed = ", ".join(f"{node.name} ({node.machine})" for node in chosen.nodes)
        yield f"the machines of a group have memory of different sizes: {listed}; {chosen.machine.title} is planned"


def _unequal_memory(chosen: Setup) -> Iterator[str]:
    if not chosen.machine.unified_memory or chosen.on_cpu or len(chosen.nodes) < 2:
        return
    least = min(chosen.nodes, key=lambda node: node.memory_bytes)
    most = max(chosen.nodes, key=lambda node: node.memory_bytes)
    if most.memory_bytes - least.memory_bytes > _UNEQUAL_BYTES:
        yield (
            f"the machine {least.name} has {least.memory_bytes / GIB:.1f} GiB of free memory and {most.name} "
            f"{most.memory_bytes / GIB:.1f} GiB; the least decides for all"
        )


def _head_placement(chosen: Setup) -> Iterator[str]:
    if not chosen.machine.unified_memory or chosen.on_cpu or len(chosen.nodes) < 2:
        return
    head, most = chosen.nodes[0], max(chosen.nodes, key=lambda node: node.memory_bytes)
    if most.memory_bytes - head.memory_bytes > _UNEQUAL_BYTES:
        yield (
            f"the head is on {head.name}, which has {head.memory_bytes / GIB:.1f} GiB of free memory; it also has the "
            "API server and the engine core"
        )


def _same_address(chosen: Setup) -> Iterator[str]:
    seen: dict[str, str] = {}
    for node in chosen.nodes:
        if node.address in seen:
            yield f"the machines {seen[node.address]} and {node.name} have the same address {node.address}"
        seen.setdefault(node.address, node.name)


def _pipeline(chosen: Setup) -> Iterator[str]:
    stages, requests = chosen.spec.topology.pipeline_parallel_size, chosen.spec.engine.max_num_seqs
    if stages > 1 and requests > _MOST_STAGED_REQUESTS:
        yield f"spec.engine.maxNumSeqs: {requests} requests in {stages} pipeline stages overcommit the first stage"


def _pipeline_for_nothing(chosen: Setup) -> Iterator[str]:
    topology, model = chosen.spec.topology, chosen.model
    world = topology.world_size
    fits = not any(count % world for count in (model.heads, model.o_groups, model.moe_inter))
    if topology.pipeline_parallel_size > 1 and fits and not chosen.on_cpu:
        stages = topology.pipeline_parallel_size
        yield f"spec.topology.pipelineParallelSize: {stages} where tensorParallelSize {world} is possible"


def _ports(chosen: Setup) -> Iterator[str]:
    for name, number in chosen.spec.network.ports.model_dump().items():
        if number in _RAY_WORKER_PORTS:
            yield f"spec.network.ports.{name}: {number} is among the ports that Ray gives to workers, 10002 to 19999"
        elif number in _RAY_PORTS:
            yield f"spec.network.ports.{name}: {number} is the port of {_RAY_PORTS[number]}"


def _utilization(chosen: Setup) -> Iterator[str]:
    given, most = chosen.spec.engine.gpu_memory_utilization, chosen.machine.utilization_max
    if given is not None and given > most:
        title = chosen.machine.title
        yield f"spec.engine.gpuMemoryUtilization: {given} is more than {most:.3g}, the most known to work on {title}"


def _utilization_shared(chosen: Setup) -> Iterator[str]:
    given = chosen.spec.engine.gpu_memory_utilization
    if given is not None and chosen.machine.unified_memory and 0.85 < given <= chosen.machine.utilization_max:
        yield f"spec.engine.gpuMemoryUtilization: {given} leaves the system less than 15 % of its own memory"


def _batched(chosen: Setup) -> Iterator[str]:
    tokens = chosen.spec.engine.max_num_batched_tokens
    if chosen.machine.unified_memory and not chosen.on_cpu and tokens > _MOST_BATCHED_UNIFIED:
        yield f"spec.engine.maxNumBatchedTokens: {tokens} on unified memory"


def _pinned_gid(chosen: Setup) -> Iterator[str]:
    for index, member in enumerate(chosen.spec.network.fabric.members):
        if member.gid_index != "Auto" and (member.hcas is None or len(member.hcas) > 1):
            yield f"spec.network.fabric.members[{index}].gidIndex: {member.gid_index} is forced on several RDMA devices"


def _fabric_ranks(chosen: Setup) -> Iterator[str]:
    size = chosen.spec.topology.nodes_per_group
    for index, member in enumerate(chosen.spec.network.fabric.members):
        if member.rank >= size:
            path = f"spec.network.fabric.members[{index}].rank"
            yield f"{path}: {member.rank} is no member of a group of {size}; the last is {size - 1}"


def _legacy_interfaces(chosen: Setup) -> Iterator[str]:
    names = list(dict.fromkeys(node.interface for node in chosen.nodes))
    if chosen.spec.engine.executor is Executor.RAY_LEGACY and len(names) > 1:
        yield (
            "spec.engine.executor: RayLegacy copies the head's network settings to all, and the machines' interfaces "
            f"differ: {', '.join(names)}"
        )


def _no_rdma_on_sparks(chosen: Setup) -> Iterator[str]:
    fabric = chosen.spec.network.fabric
    if chosen.several_machines and fabric.require_rdma is False and chosen.hardware is Hardware.GB10:
        yield "spec.network.fabric.requireRDMA: false lets NCCL fall back to TCP sockets"


def _host_tables(chosen: Setup) -> Iterator[str]:
    size = sum(part.bytes for part in chosen.model.host_components)
    if size and not chosen.machine.unified_memory and not chosen.memory.engine.tables_on_disk:
        # The tables are divided like the layers; every stage may need them.
        topology = chosen.spec.topology
        ranks = min(topology.devices_per_node, topology.tensor_parallel)
        here = size * ranks / topology.tensor_parallel / GIB
        yield f"spec.model: the tables of {chosen.model.name} take {here:.0f} GiB of each machine's own memory, pinned"


def _tables_on_disk(chosen: Setup) -> Iterator[str]:
    if chosen.spec.model.tables is TablesPlace.MEMORY:
        return
    if not chosen.model.host_components:
        yield f"spec.model.tables: disk is for checkpoints with tables, and {chosen.model.name} has none; remove it"
    elif not chosen.profile.tables_on_disk and not chosen.gives("--engram-config"):
        yield (
            f"spec.model.tables: disk is not known of the image {chosen.profile.name}; write memory, or give "
            "--engram-config in spec.engine.extraArgs as the build wants it"
        )


_SM12X = "vLLM 0.33, models/deepseek_v4/nvidia/model.py, _select_dsv4_attn_cls"
_FP4_INDEXERS = {"mxfp4", "nvfp4"}
_FOREIGN_ATTENTION = {
    "FLASHINFER_MLA_SPARSE": "vLLM refuses it for DeepSeek-V4",
    "FLASHINFER_MLA_SPARSE_SM120": "vLLM refuses it for DeepSeek-V4",
    "FLASHMLA_SPARSE": "its kernels are built for other compute capabilities",
    "FLASHMLA_SPARSE_DSV4": "its kernels are built for other compute capabilities",
}
_ATTENTION = "spec.engine.extraArgs: the attention backend"
_SHORT_STEP_SECONDS = 600
_LEGACY_REQUESTS = 4

OBSOLETE = {
    "VLLM_RPC_TIMEOUT": "is no longer read; use spec.engine.timeouts.executeModel",
    "VLLM_SKIP_INIT_MEMORY_CHECK": "was of a fork; use spec.engine.gpuMemoryUtilization",
    "VLLM_SM120_REFERENCE_DEEPSEEK_V4_ATTENTION": "was of a fork; vLLM has FlashInfer's kernels for SM12x instead",
    "VLLM_TRITON_MLA_SPARSE": "was of a fork; vLLM has FlashInfer's kernels for SM12x instead",
    "VLLM_USE_RAY_COMPILED_DAG": "is no longer read; use spec.engine.executor",
}
"""Variables of known recipes that no program reads any more."""


def _arguments(chosen: Setup) -> Iterator[str]:
    for index, text in argument_problems(chosen.spec.engine.extra_args, chosen.profile.surface):
        yield f"spec.engine.extraArgs[{index}]: {text}"


def _variables(chosen: Setup) -> Iterator[str]:
    for index, variable in enumerate(chosen.spec.engine.env):
        if variable.name in OBSOLETE and variable.name not in chosen.profile.extra_env:
            yield f'spec.engine.env[{index}].name: "{variable.name}" {OBSOLETE[variable.name]}, and remove it'
        elif problem := variable_problem(variable.name, variable.value, chosen.profile):
            yield f"spec.engine.env[{index}]: {problem}"


def _empty_variables(chosen: Setup) -> Iterator[str]:
    for index, variable in enumerate(chosen.spec.engine.env):
        if not variable.value and variable.name.startswith(("NCCL_", "FLASHINFER_", "VLLM_")):
            yield f"spec.engine.env[{index}].value: {variable.name} is empty, which is not the same as not set"


def _executor(chosen: Setup) -> Iterator[str]:
    executor, image = chosen.spec.engine.executor, chosen.profile
    if executor not in image.executors:
        known = " or ".join(image.executors)
        yield f"spec.engine.executor: {executor} is not part of the image {image.name}; use {known}"


def _mp(chosen: Setup) -> Iterator[str]:
    count = chosen.spec.topology.nodes_per_group
    if chosen.spec.engine.executor is Executor.MP and count > 1:
        yield f"spec.engine.executor: MP with {count} machines does not notice dead workers"


def _legacy_requests(chosen: Setup) -> Iterator[str]:
    engine = chosen.spec.engine
    if engine.executor is Executor.RAY_LEGACY and engine.max_num_seqs > _LEGACY_REQUESTS:
        yield f"spec.engine.maxNumSeqs: {engine.max_num_seqs} requests at the same time with RayLegacy"


def _image_hardware(chosen: Setup) -> Iterator[str]:
    profile = chosen.profile
    if chosen.hardware not in profile.hardware:
        built = ", ".join(profile.hardware)
        yield f"spec.engine.profile: {profile.name} is not built for {chosen.hardware}, but for {built}"


def _unpinned_image(chosen: Setup) -> Iterator[str]:
    image = chosen.spec.engine.image
    if image is not None and "@sha256:" not in image:
        yield f'spec.engine.image: "{image}" is a tag, which may be another build tomorrow or on another machine'


def _unpinned_code(chosen: Setup) -> Iterator[str]:
    if chosen.gives("--trust-remote-code"):
        yield "spec.engine.extraArgs: --trust-remote-code runs Python of the checkpoint, and DeepSeek-V4 needs none"


def _kv_cache_dtype(chosen: Setup) -> Iterator[str]:
    dtype, known = chosen.spec.engine.kv_cache_dtype, chosen.profile.kv_cache_dtypes
    if dtype is not KvCacheDtype.AUTO and dtype not in known:
        remedy = f"use {' or '.join(known)}, or leave it out" if known else "leave it out"
        yield f"spec.engine.kvCacheDtype: {dtype} is not for DeepSeek-V4 in the image {chosen.profile.name}; {remedy}"


def _drafts(chosen: Setup) -> Iterator[str]:
    drafts, heads = chosen.spec.engine.speculative, chosen.model.speculative
    if drafts.method is SpeculativeMethod.NONE:
        if drafts.tokens is not None:
            yield f"spec.engine.speculative.tokens: {drafts.tokens} without a method; write MTP or DSpark"
        return
    method = drafts.method.lower()
    if method not in chosen.profile.speculative:
        image = chosen.profile.name
        yield f"spec.engine.speculative.method: the image {image} has no drafts of {drafts.method}; write None"
    elif heads is None or heads.method != method:
        has = {"mtp": "MTP", "dspark": "DSpark"}[heads.method] if heads else "None"
        remedy = f"write {has}"
        if chosen.spec.model.source.nano is not None:
            remedy += f", or {drafts.method} as spec.model.source.nano.drafts"
        yield f"spec.engine.speculative.method: {chosen.model.name} has no heads for {drafts.method}; {remedy}"


def _short_drafts(chosen: Setup) -> Iterator[str]:
    image, method = chosen.profile, chosen.spec.engine.speculative.method
    tokens, least = chosen.draft_tokens, image.dspark_least_tokens
    if method is SpeculativeMethod.DSPARK and tokens < least:
        yield f"spec.engine.speculative.tokens: the image {image.name} refuses drafts of {tokens}; write {least}"


def _long_drafts(chosen: Setup) -> Iterator[str]:
    drafts, heads = chosen.spec.engine.speculative, chosen.model.speculative
    if drafts.method is not SpeculativeMethod.NONE and heads and chosen.draft_tokens > heads.tokens:
        yield (
            f"spec.engine.speculative.tokens: {chosen.draft_tokens} is more than {chosen.model.name}'s heads were "
            f"trained for, {heads.tokens}"
        )


def _drafts_memory(chosen: Setup) -> Iterator[str]:
    engine = chosen.spec.engine
    given = engine.gpu_memory_utilization
    drafting = engine.speculative.method is SpeculativeMethod.MTP
    if drafting and given is not None and given > 0.92 and not chosen.machine.unified_memory and not chosen.on_cpu:
        yield f"spec.engine.gpuMemoryUtilization: {given} with MTP ran out of memory with the first request"


def _fp4_indexer(chosen: Setup) -> Iterator[str]:
    if chosen.machine.sm // 10 != 12:
        return
    settings = chosen.json("--attention-config")
    kind = settings.get("indexer_kv_dtype")
    if kind in _FP4_INDEXERS:
        yield f"spec.engine.extraArgs: indexer_kv_dtype {kind} needs a data-centre GPU; this is {chosen.machine.title}"
    if settings.get("use_fp4_indexer_cache"):
        yield f"spec.engine.extraArgs: use_fp4_indexer_cache needs a data-centre GPU; this is {chosen.machine.title}"


def _attention(chosen: Setup) -> Iterator[str]:
    backend = chosen.value("--attention-backend") or str(chosen.json("--attention-config").get("backend", ""))
    if chosen.machine.sm // 10 != 12 or not backend:
        return
    if problem := _FOREIGN_ATTENTION.get(backend.upper()):
        yield f"{_ATTENTION} {backend} does not serve {chosen.model.name} here: {problem}"
    elif backend.upper().startswith("B12X") and chosen.profile.args.get("--attention-backend") != backend:
        yield f"{_ATTENTION} {backend} is not DeepSeek-V4's in the image {chosen.profile.name}"


def _moe_backend(chosen: Setup) -> Iterator[str]:
    backend = chosen.value("--moe-backend")
    if backend == "deep_gemm_mega_moe" and chosen.machine.sm // 10 == 12:
        yield f"--moe-backend: deep_gemm_mega_moe needs a data-centre GPU; this is {chosen.machine.title}"
    if backend in {"b12x", "flashinfer_b12x"} and chosen.spec.topology.expert_parallel:
        yield f"spec.topology.expertParallel: the experts of {backend} are divided by rows only"


def _all_reduce(chosen: Setup) -> Iterator[str]:
    topology, mode = chosen.spec.topology, chosen.spec.engine.cudagraph_mode
    given = chosen.variable("PYTORCH_CUDA_ALLOC_CONF") or chosen.variable("PYTORCH_ALLOC_CONF") or ""
    shared = topology.devices_per_node > 1 and topology.tensor_parallel > 1 and not chosen.on_cpu
    graphs = mode is not CudagraphMode.NONE and not chosen.gives("--enforce-eager")
    if "expandable_segments:True" not in given or not shared or not graphs:
        return
    if not chosen.profile.expandable_segments and not chosen.gives("--disable-custom-all-reduce"):
        yield "spec.engine.env: expandable_segments:True with graphs over several devices of one machine ends the start"


def _e8m0(chosen: Setup) -> Iterator[str]:
    if chosen.machine.sm // 10 == 12 and chosen.variable("VLLM_USE_DEEP_GEMM_E8M0") == "0":
        yield "spec.engine.env: VLLM_USE_DEEP_GEMM_E8M0=0 is an error with the scales of DeepSeek-V4 on SM12x"


def _eager(chosen: Setup) -> Iterator[str]:
    if chosen.on_cpu:
        return
    if chosen.spec.engine.cudagraph_mode is CudagraphMode.NONE or chosen.gives("--enforce-eager"):
        yield "spec.engine.cudagraphMode: without graphs a token takes about three times as long"


def _graphs_twice(chosen: Setup) -> Iterator[str]:
    mode = chosen.spec.engine.cudagraph_mode
    for flag in ("--compilation-config", "--enforce-eager"):
        if mode is not CudagraphMode.AUTO and chosen.gives(flag):
            yield f"spec.engine.extraArgs: {flag} and spec.engine.cudagraphMode {mode} say two things; remove one"


def _short_steps(chosen: Setup) -> Iterator[str]:
    seconds = chosen.spec.engine.timeouts.execute_model
    if seconds is not None and seconds < _SHORT_STEP_SECONDS and not chosen.on_cpu:
        yield f"spec.engine.timeouts.executeModel: {seconds:g}s is shorter than a step that compiles on a cold machine"


def _cpu_fields(chosen: Setup) -> Iterator[str]:
    """Yield the settings without an effect in the CPU build; they would be ignored silently."""
    if not chosen.on_cpu:
        return
    engine, topology = chosen.spec.engine, chosen.spec.topology
    if engine.cudagraph_mode not in {CudagraphMode.AUTO, CudagraphMode.NONE}:
        yield f"spec.engine.cudagraphMode: {engine.cudagraph_mode} has no meaning on CPU"
    if not engine.async_scheduling:
        yield "spec.engine.asyncScheduling: false has no meaning on CPU"
    if topology.expert_parallel:
        yield "spec.topology.expertParallel: true does not run on CPU"
    fabric = chosen.spec.network.fabric
    if fabric != type(fabric)():
        yield "spec.network.fabric: there is none between members on CPU"


RULES = (
    Rule(
        "wrong-hardware", Severity.REFUSE, "a machine is not what `hardware` says",
        _wrong_hardware, "run it where such machines are, or write what is there",
        "the machine's own report", Reason.HARDWARE_UNSUPPORTED,
    ),
    Rule(
        "mixed-machines", Severity.REFUSE, "the machines of a group are of different kinds",
        _mixed_machines, "make groups of one kind",
        "https://build.nvidia.com/spark/vllm-cluster: two Sparks of the same memory size",
    ),
    Rule(
        "unequal-machines", Severity.WARN, "machines of one kind with memory of different sizes",
        _sizes, "use machines of one size, or leave the rest of the greater ones to others",
        "https://build.nvidia.com/spark/vllm-cluster: two Sparks of the same memory size",
    ),
    Rule(
        "unequal-memory", Severity.WARN, "free memory within a group differs by more than 2 GiB (unified memory)",
        _unequal_memory, "end other programs there",
        "https://github.com/vllm-project/vllm/pull/40899: the KV cache of all is that of the poorest rank",
    ),
    Rule(
        "head-placement", Severity.WARN, "another machine has over 2 GiB more free memory than the head's (unified)",
        _head_placement, "put the machine with the most memory first",
        "https://github.com/vllm-project/vllm/pull/40899: rank 0 had 0.98 GiB for the KV cache where others had 4.64",
    ),
    Rule(
        "same-address", Severity.REFUSE, "two machines of a group have one address",
        _same_address, "give each machine its own address on the fabric",
        "vLLM, v1/executor/ray_utils.py: every node should have a unique IP address",
    ),
    Rule(
        "pipeline-requests", Severity.WARN, "more than 16 requests with pipeline stages",
        _pipeline, f"lower it to {_MOST_STAGED_REQUESTS}",
        "https://github.com/vllm-project/vllm/pull/40899: two stages ended in out-of-memory at 32 requests, not at 16",
    ),
    Rule(
        "pipeline-for-nothing", Severity.WARN, "pipeline stages where tensor parallelism alone is possible",
        _pipeline_for_nothing, "leave it out: over tensor parallel ranks the same machines were up to twice as fast",
        "https://github.com/vllm-project/vllm/pull/40899: 97.6 against 76.5 tokens/s, 781 against 381 in parallel",
    ),
    Rule(
        "ports", Severity.REFUSE, "a port that Ray takes for itself or gives to its workers",
        _ports, "choose another one", "https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations",
    ),
    Rule(
        "memory-utilization", Severity.REFUSE, "`gpuMemoryUtilization` above what is known to work on the machine",
        _utilization, "lower it",
        "https://github.com/vllm-project/vllm/issues/46307 (GB10: the host freezes), https://github.com/vllm-project/vllm/pull/40899",
    ),
    Rule(
        "memory-utilization-shared", Severity.WARN, "`gpuMemoryUtilization` above 0.85 on unified memory",
        _utilization_shared, "0.80 to 0.85 is usual; more is for machines that run nothing else",
        "https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/issues/5",
    ),
    Rule(
        "batched-tokens", Severity.WARN, "more than 8192 batched tokens on unified memory",
        _batched, "long prompts have reset hosts there; write 4096 or 8192",
        "https://github.com/NVIDIA/dgx-spark-playbooks/issues/97",
    ),
    Rule(
        "host-tables", Severity.WARN, "tables beside the layers that stay in the machine's own memory (V4.1 on RTX)",
        _host_tables, "see that the machines have it free: the plan counts the devices' memory only",
        "vLLM, config/engram.py: cpu_offload is the default",
    ),
    Rule(
        "tables-on-disk", Severity.REFUSE, "tables on disk where there are none, or that the image cannot read",
        _tables_on_disk, "",
        "vLLM 0.33, config/engram.py: the host's memory or the device's; rtx6kpro, models/deepseek-v4.1-flash.md",
    ),
    Rule(
        "pinned-gid", Severity.WARN, "a GID index for several RDMA devices",
        _pinned_gid, "leave it out, so that NCCL chooses for each device, or name one device in hcas",
        "NCCL, src/transport/net_ib: the hint about a forced NCCL_IB_GID_INDEX",
    ),
    Rule(
        "fabric-ranks", Severity.REFUSE, "a member of `fabric.members` that is not there",
        _fabric_ranks, "", "the specification itself",
    ),
    Rule(
        "legacy-interfaces", Severity.REFUSE, "`RayLegacy` on machines whose interfaces have different names",
        _legacy_interfaces, "write RayV2", "https://github.com/spark-arena/sparkrun/pull/137",
    ),
    Rule(
        "sockets-allowed", Severity.WARN, "several GB10 machines that may do without RDMA",
        _no_rdma_on_sparks, "over sockets Flash fell from 21.2 to 15.1 tokens a second; leave it out",
        "https://github.com/jasl/vllm-ds4-sm120-harness; https://github.com/vllm-project/vllm/pull/42075",
    ),
    Rule(
        "unknown-argument", Severity.REFUSE, "a flag that the image's vLLM does not know, or a value that it refuses",
        _arguments, "", "the parser of that vLLM (planning/images/surface)",
    ),
    Rule(
        "unknown-variable", Severity.REFUSE, "a variable of vLLM, Ray, NCCL or Triton that nothing in the image reads",
        _variables, "", "the tables of that vLLM and of the libraries (planning/images/surface)",
    ),
    Rule(
        "empty-variable", Severity.REFUSE, "a variable of NCCL, FlashInfer or vLLM that is set to nothing",
        _empty_variables, "leave it out",
        "https://github.com/Reederey87/dgx-spark-2x-deepseek-v4-flash: an empty NCCL_IB_GID_INDEX ended NCCL",
    ),
    Rule(
        "executor", Severity.REFUSE, "an executor that the image does not have",
        _executor, "", "vLLM, v1/executor/abstract.py: the compiled-DAG executor is gone since 0.33",
    ),
    Rule(
        "mp-machines", Severity.REFUSE, "`MP` with several machines",
        _mp, "write RayV2",
        "vLLM, entrypoints/cli/serve.py run_headless and v1/executor/multiproc_executor.py: only workers of the same "
        "machine are watched, and a follower exits with 0",
    ),
    Rule(
        "legacy-requests", Severity.WARN, "more than 4 requests at the same time with `RayLegacy`",
        _legacy_requests, "lower it to 4, or write RayV2: the compiled graph ended with RayChannelTimeoutError",
        "https://github.com/vllm-project/vllm/issues/40969",
    ),
    Rule(
        "image-hardware", Severity.REFUSE, "an image that is not built for the hardware",
        _image_hardware, "use another image", "the sources of the image profile",
    ),
    Rule(
        "unpinned-image", Severity.WARN, "an image by tag instead of by digest",
        _unpinned_image, "write NAME@sha256:DIGEST",
        "https://github.com/spark-arena/recipe-registry/issues/23: a newer build behind the same tag refused the flags",
    ),
    Rule(
        "remote-code", Severity.WARN, "`--trust-remote-code`",
        _unpinned_code, "remove it", "vLLM, transformers_utils/configs: the configuration class is vLLM's own",
    ),
    Rule(
        "kv-cache-dtype", Severity.REFUSE, "a KV cache format that DeepSeek-V4 does not have in the image",
        _kv_cache_dtype, "", "vLLM 0.33, models/deepseek_v4/attention.py; the sources of the image profile",
    ),
    Rule(
        "speculative-heads", Severity.REFUSE, "drafts for which checkpoint or image have no heads",
        _drafts, "",
        "vLLM 0.33, config/speculative.py; https://github.com/vllm-project/vllm/pull/41834: 0731 has no MTP layer",
    ),
    Rule(
        "short-drafts", Severity.REFUSE, "DSpark drafts shorter than the image's build accepts",
        _short_drafts, "", "https://github.com/vllm-project/vllm/issues/50012",
    ),
    Rule(
        "long-drafts", Severity.WARN, "drafts longer than the heads were trained for",
        _long_drafts, "leave it out: acceptance fell from 24 to 14 % (DSpark, 7); MTP runs one layer several times",
        "https://github.com/vllm-project/vllm/pull/41834",
    ),
    Rule(
        "drafts-memory", Severity.WARN, "MTP with `gpuMemoryUtilization` above 0.92 on a discrete GPU",
        _drafts_memory, "write 0.92", "https://github.com/vllm-project/vllm/issues/41700",
    ),
    Rule(
        "fp4-indexer", Severity.REFUSE, "an indexer cache in FP4 on SM12x",
        _fp4_indexer, "remove it",
        "vLLM 0.33, v1/attention/backends/mla/indexer.py: mxfp4 requires Blackwell data-centre GPUs; "
        "https://github.com/vllm-project/recipes",
    ),
    Rule(
        "attention-backend", Severity.REFUSE, "an attention backend that is not DeepSeek-V4's on SM12x in the image",
        _attention, "remove it, or write FLASHINFER_MLA_SPARSE_DSV4", _SM12X,
    ),
    Rule(
        "moe-backend", Severity.REFUSE, "experts that the machine or the topology does not run",
        _moe_backend, "choose another one, for example marlin",
        "vLLM 0.33, model_executor/layers/fused_moe: deep_gemm_mega_moe.py, experts/*b12x*",
    ),
    Rule(
        "expandable-segments", Severity.REFUSE, "expandable segments, graphs and several devices of one machine",
        _all_reduce, "remove it, or add --disable-custom-all-reduce to spec.engine.extraArgs",
        "https://github.com/vllm-project/vllm/issues/42609",
    ),
    Rule(
        "e8m0", Severity.REFUSE, "`VLLM_USE_DEEP_GEMM_E8M0=0` on SM12x",
        _e8m0, "remove it", "https://github.com/vllm-project/vllm/issues/57486",
    ),
    Rule(
        "eager", Severity.WARN, "no graphs on accelerators",
        _eager, "write Auto",
        "https://github.com/vllm-project/vllm/pull/40899: 5.5 to 6.7 tokens a second, 21 with graphs",
    ),
    Rule(
        "graphs-twice", Severity.REFUSE, "graphs set by a field and by a flag",
        _graphs_twice, "", "the specification itself",
    ),
    Rule(
        "short-steps", Severity.WARN, "a bound of less than 10 minutes for one step on accelerators",
        _short_steps, "write 15m", "https://github.com/eugr/spark-vllm-docker/issues/348",
    ),
    Rule(
        "cpu-fields", Severity.REFUSE, "fields that mean nothing on CPU",
        _cpu_fields, "remove it", "the CPU build of vLLM 0.32",
    ),
)  # fmt: skip
"""All rules in the order of their findings, those about the machines first."""


def findings(deployment: DSV4Deployment, facts: Facts, group: int = 0) -> tuple[RuleFinding, ...]:
    """Return all findings about one group of `deployment`, refusals before warnings.

    Raises:
        PlanRefused: the image is unknown, or the model cannot be divided as specified, so no rule can be applied.
    """
    return broken_rules(setup(deployment, facts, group))


def broken_rules(chosen: Setup) -> tuple[RuleFinding, ...]:
    """Return all findings about resolved settings, refusals before warnings."""
    found = [finding for rule in RULES for finding in rule.findings(chosen)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.REFUSE))
