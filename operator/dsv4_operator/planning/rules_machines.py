"""Rules about topology, memory, ports and the network."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_operator.api import Executor, Hardware, Reason, TablesPlace
from dsv4_operator.planning.catalog import GIB, machine_named
from dsv4_operator.planning.rule import Rule, Severity
from dsv4_operator.planning.setup import Setup

_RAY_WORKER_PORTS = range(10002, 20000)
_RAY_PORTS = {10001: "Ray's client server", 52365: "Ray's dashboard agent"}
"""That Ray takes by itself, the first on the head and the second on every member."""
_MOST_BATCHED_UNIFIED = 8192
_MOST_STAGED_REQUESTS = 16
_UNEQUAL_BYTES = 2 * GIB


def _wrong_hardware(chosen: Setup) -> Iterator[str]:
    hardware = chosen.deployment.spec.topology.hardware
    for node in chosen.nodes:
        if node.machine and machine_named(node.machine).hardware != hardware:
            what = "offers its CPU only" if node.machine == "cpu" else f"is {machine_named(node.machine).title}"
            yield f"spec.topology.hardware: {hardware} is asked for, and the machine {node.name} {what}"


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
    stages, requests = (
        chosen.deployment.spec.topology.pipeline_parallel_size,
        chosen.deployment.spec.engine.max_num_seqs,
    )
    if stages > 1 and requests > _MOST_STAGED_REQUESTS:
        yield f"spec.engine.maxNumSeqs: {requests} requests in {stages} pipeline stages overcommit the first stage"


def _pipeline_for_nothing(chosen: Setup) -> Iterator[str]:
    topology, model = chosen.deployment.spec.topology, chosen.model
    world = topology.world_size
    fits = not any(count % world for count in (model.heads, model.o_groups, model.moe_inter))
    if topology.pipeline_parallel_size > 1 and fits and not chosen.on_cpu:
        stages = topology.pipeline_parallel_size
        yield f"spec.topology.pipelineParallelSize: {stages} where tensorParallelSize {world} is possible"


def _ports(chosen: Setup) -> Iterator[str]:
    for name, number in chosen.deployment.spec.network.ports.model_dump().items():
        if number in _RAY_WORKER_PORTS:
            yield f"spec.network.ports.{name}: {number} is among the ports that Ray gives to workers, 10002 to 19999"
        elif number in _RAY_PORTS:
            yield f"spec.network.ports.{name}: {number} is the port of {_RAY_PORTS[number]}"


def _utilization(chosen: Setup) -> Iterator[str]:
    given, most = chosen.deployment.spec.engine.gpu_memory_utilization, chosen.machine.utilization_max
    if given is not None and given > most:
        where = chosen.machine.title
        yield f"spec.engine.gpuMemoryUtilization: {given} is more than {most:.3g}, the most known to work on {where}"


def _utilization_shared(chosen: Setup) -> Iterator[str]:
    given = chosen.deployment.spec.engine.gpu_memory_utilization
    if given is not None and chosen.machine.unified_memory and 0.85 < given <= chosen.machine.utilization_max:
        yield f"spec.engine.gpuMemoryUtilization: {given} leaves the system less than 15 % of its own memory"


def _batched(chosen: Setup) -> Iterator[str]:
    tokens = chosen.deployment.spec.engine.max_num_batched_tokens
    if chosen.machine.unified_memory and not chosen.on_cpu and tokens > _MOST_BATCHED_UNIFIED:
        yield f"spec.engine.maxNumBatchedTokens: {tokens} on unified memory"


def _pinned_gid(chosen: Setup) -> Iterator[str]:
    for index, member in enumerate(chosen.deployment.spec.network.fabric.members):
        if member.gid_index != "Auto" and (member.hcas is None or len(member.hcas) > 1):
            yield f"spec.network.fabric.members[{index}].gidIndex: {member.gid_index} is forced on several RDMA devices"


def _fabric_ranks(chosen: Setup) -> Iterator[str]:
    size = chosen.deployment.spec.topology.nodes_per_group
    for index, member in enumerate(chosen.deployment.spec.network.fabric.members):
        if member.rank >= size:
            path = f"spec.network.fabric.members[{index}].rank"
            yield f"{path}: {member.rank} is no member of a group of {size}; the last is {size - 1}"


def _legacy_interfaces(chosen: Setup) -> Iterator[str]:
    names = list(dict.fromkeys(node.interface for node in chosen.nodes))
    if chosen.deployment.spec.engine.executor is Executor.RAY_LEGACY and len(names) > 1:
        yield (
            "spec.engine.executor: RayLegacy copies the head's network settings to all, and the machines' interfaces "
            f"differ: {', '.join(names)}"
        )


def _no_rdma_on_sparks(chosen: Setup) -> Iterator[str]:
    fabric = chosen.deployment.spec.network.fabric
    if chosen.several_machines and fabric.require_rdma is False and chosen.hardware is Hardware.GB10:
        yield "spec.network.fabric.requireRDMA: false lets NCCL fall back to TCP sockets"


def _host_tables(chosen: Setup) -> Iterator[str]:
    size = sum(part.bytes for part in chosen.model.host_components)
    if size and not chosen.machine.unified_memory and not chosen.memory.engine.tables_on_disk:
        # The tables are divided like the layers; every stage may need them.
        topology = chosen.deployment.spec.topology
        ranks = min(topology.devices_per_node, topology.tensor_parallel)
        here = size * ranks / topology.tensor_parallel / GIB
        yield f"spec.model: the tables of {chosen.model.name} take {here:.0f} GiB of each machine's own memory, pinned"


def _tables_on_disk(chosen: Setup) -> Iterator[str]:
    if chosen.deployment.spec.model.tables is TablesPlace.MEMORY:
        return
    if not chosen.model.host_components:
        yield f"spec.model.tables: disk is for checkpoints with tables, and {chosen.model.name} has none; remove it"
    elif not chosen.profile.tables_on_disk and not chosen.gives("--engram-config"):
        yield (
            f"spec.model.tables: disk is not known of the image {chosen.profile.name}; write memory, or give "
            "--engram-config in spec.engine.extraArgs as the build wants it"
        )


MACHINE_RULES = (
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
        _legacy_interfaces, "write RayV2",
        "https://github.com/spark-arena/sparkrun/pull/137",
    ),
    Rule(
        "sockets-allowed", Severity.WARN, "several GB10 machines that may do without RDMA",
        _no_rdma_on_sparks, "over sockets Flash fell from 21.2 to 15.1 tokens a second; leave it out",
        "https://github.com/jasl/vllm-ds4-sm120-harness; https://github.com/vllm-project/vllm/pull/42075",
    ),
)  # fmt: skip
"""In the order in which they are told."""
