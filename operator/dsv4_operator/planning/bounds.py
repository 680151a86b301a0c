"""Weights, time limits, the fabric, and what must be true of the machines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsv4_operator.api import DSV4Deployment, Hardware, Reason, SpeculativeMethod
from dsv4_operator.planning.catalog import GIB, NANO
from dsv4_operator.planning.command_lines import OBJECT_STORE_BYTES
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Placement
from dsv4_operator.planning.memory import MemoryPlan, RankPlan, memory_plan
from dsv4_operator.planning.memory.measured import planned_items
from dsv4_operator.planning.refused import PlanRefused
from dsv4_operator.planning.setup import Setup, memory_of
from dsv4_operator.planning.staged import staged_weights
from dsv4_runtime.contract import Expectations, FabricPlan, FabricSetting, Reading, Timeouts, WeightsPlan, WeightsSource

_PREFLIGHT_SECONDS = 30.0
_CPU_EXECUTE_SECONDS, _CPU_FIRST_TOKEN_SECONDS = 300.0, 120.0
_EXECUTE_SECONDS = 900.0
"""A step that compiles on a cold machine took more than the 300 s of vLLM's default; 900 to 1800 s are in use."""
_DISK_BYTES_PER_SECOND = 1e9
"""Before it is measured; NVMe drives read several times as fast."""
_DOWNLOAD_BYTES_PER_SECOND = 10e6
_COMPILE_SECONDS = 1200.0
"""Kernels, graphs and warm-up on a machine without any cache: 5 to 13 minutes for Flash, 12 for Pro."""
_WARM_SECONDS = 180.0
"""The same with the caches of an earlier start."""
_SLACK = 2.0
_STAGING_SECONDS = 120.0
_QUEUE_BYTES = 2 * GIB
"""vLLM's message queues, NCCL's and the worker's shared memory in /dev/shm."""


def weights_plan(deployment: DSV4Deployment, facts: Facts) -> WeightsPlan:
    """Return the checkpoint that every member must have."""
    source = deployment.spec.model.source
    if source.nano is not None:
        asked = source.nano.drafts
        drafts = None if asked is SpeculativeMethod.NONE else asked.lower()
        name = "-".join(filter(None, (f"nano-s{source.nano.seed}-{source.nano.precision}", drafts)))
        return WeightsPlan(
            source=WeightsSource.NANO,
            path=f"{facts.weights_root}/{name}",
            seed=source.nano.seed,
            precision=source.nano.precision,
            drafts=drafts,
        )
    return staged_weights(deployment, facts.weights_root, facts.secrets_root, facts.shared_weights)


def timeouts(chosen: Setup) -> Timeouts:
    """Return the bounds of a start, in seconds: what is given, else from the checkpoint's bytes.

    Where a disk turns out to be slower than counted on here, the head's agent gives the load the time that takes.
    """
    given = chosen.deployment.spec.engine.timeouts
    return Timeouts(
        preflight=_PREFLIGHT_SECONDS,
        staging=given.staging or _staging_seconds(chosen),
        formation=given.formation,
        load=given.load or _load_seconds(chosen),
        reading=None if given.load or chosen.on_cpu else _reading(chosen),
        first_token=given.first_token or _first_token_seconds(chosen),
        drain=given.drain,
    )


def execute_model_seconds(chosen: Setup) -> float:
    """Return the bound of one step of the engine."""
    given = chosen.deployment.spec.engine.timeouts.execute_model
    return given or (_CPU_EXECUTE_SECONDS if chosen.on_cpu else _EXECUTE_SECONDS)


def fabric_plan(chosen: Setup) -> FabricPlan | None:
    """Return what the members find out and prove about their network; None where there is nothing between them."""
    if chosen.on_cpu or not chosen.several_machines:
        return None
    fabric = chosen.deployment.spec.network.fabric
    on_sparks = chosen.deployment.spec.topology.hardware is Hardware.GB10
    return FabricPlan(
        require_rdma=on_sparks if fabric.require_rdma is None else fabric.require_rdma,
        min_bandwidth=fabric.min_bus_bandwidth_gbps * 1e9 / 8 or None,
        settings={
            member.rank: FabricSetting(interface=member.interface, hcas=member.hcas, gid_index=member.gid_index)
            for member in fabric.members
        },
    )


def expectations(chosen: Setup, members: Sequence[Placement]) -> Expectations:
    """Return what must be true on every member.

    Raises:
        PlanRefused: a machine has too little memory.
    """
    needed = _cpu_bytes(chosen, members) if chosen.on_cpu else _accelerator_bytes(chosen)
    for placement in members:
        node = placement.node
        if node.memory_bytes < needed:
            smaller = "kvCacheMemory" if chosen.on_cpu else "gpuMemoryUtilization"
            raise PlanRefused(
                Reason.MEMORY_SHORT,
                f"the machine {node.name} has {node.memory_bytes / GIB:.1f} GiB of free memory, and a member "
                f"needs {needed / GIB:.1f} GiB; end other programs, lower spec.engine.{smaller}, "
                "or use a machine with more memory",
            )
    gpu_bytes = _gpu_bytes(chosen)
    _refuse_taken(chosen, gpu_bytes or 0)
    return Expectations(
        world_size=chosen.deployment.spec.topology.world_size,
        memory_bytes=needed,
        gpu_bytes=gpu_bytes,
        shm_bytes=NANO.object_store_bytes + NANO.queue_bytes if chosen.on_cpu else OBJECT_STORE_BYTES + _QUEUE_BYTES,
        ready_seconds=NANO.ready_seconds if chosen.on_cpu else _reading_seconds(chosen) + _WARM_SECONDS,
        weights_bytes=None if chosen.on_cpu else max(map(_weights_bytes, chosen.memory.ranks)),
        kv_tokens=chosen.memory.kv.tokens if chosen.memory.kv else None,
        kv_concurrency=chosen.memory.kv.concurrency if chosen.memory.kv else None,
        memory_of="" if chosen.on_cpu else memory_of(chosen.deployment, chosen.model, chosen.machine),
        memory={} if chosen.on_cpu else planned_items(_unmeasured(chosen.memory)),
    )


def _gpu_bytes(chosen: Setup) -> int | None:
    """Return the memory that vLLM wants free on each accelerator before it begins: the engine's whole share."""
    if chosen.on_cpu or chosen.machine.unified_memory:
        return None
    return int(chosen.utilization * chosen.machine.memory_bytes)


def _refuse_taken(chosen: Setup, needed: int) -> None:
    """Raise unless every accelerator has `needed` bytes of free memory, where that is known.

    Raises:
        PlanRefused: other programs have so much of an accelerator's memory that the engine does not fit beside them.
    """
    for gpu in (gpu for node in chosen.nodes for gpu in node.gpus):
        if gpu.free_bytes is not None and gpu.free_bytes < needed:
            whose = f"; {gpu.taken_by}" if gpu.taken_by else ", and its driver does not tell whose the rest is"
            raise PlanRefused(
                Reason.MEMORY_SHORT,
                f"{gpu.title} has {gpu.free_bytes / GIB:.1f} GiB of free memory, and the engine needs "
                f"{needed / GIB:.1f} GiB{whose}; end that program, or lower spec.engine.gpuMemoryUtilization",
            )


def _unmeasured(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan without what earlier starts logged, so that the next difference is one from the same figures."""
    return memory_plan(plan.model, plan.machine, plan.parallel, plan.engine) if plan.measured else plan


def _weights_bytes(rank: RankPlan) -> int:
    return rank.items[0].bytes


def _cpu_bytes(chosen: Setup, members: Sequence[Placement]) -> int:
    devices = max(placement.devices for placement in members)
    return NANO.head_bytes + devices * (NANO.rank_bytes + (chosen.memory.engine.kv_cache_memory or 0))


def _accelerator_bytes(chosen: Setup) -> int:
    """Return the free memory of the host at the start. Unified: what vLLM asks for before it begins, which is its whole
    share.
    """
    if chosen.machine.unified_memory:
        return int(chosen.utilization * chosen.machine.memory_bytes)
    return OBJECT_STORE_BYTES + _QUEUE_BYTES + 4 * GIB


def _staging_seconds(chosen: Setup) -> float:
    if chosen.on_cpu:
        return NANO.staging_seconds
    source = chosen.deployment.spec.model.source
    fetching = 0.0 if source.path is not None else chosen.model.checkpoint_bytes / _DOWNLOAD_BYTES_PER_SECOND
    return math.ceil(_STAGING_SECONDS + _SLACK * _reading_seconds(chosen) + fetching)


def _load_seconds(chosen: Setup) -> float:
    if chosen.on_cpu:
        return NANO.load_seconds
    return math.ceil(_COMPILE_SECONDS + _SLACK * _reading_seconds(chosen))


def _first_token_seconds(chosen: Setup) -> float:
    return _CPU_FIRST_TOKEN_SECONDS if chosen.on_cpu else execute_model_seconds(chosen) + 60.0


def _reading(chosen: Setup) -> Reading:
    return Reading(size=chosen.model.checkpoint_bytes, bytes_per_second=_DISK_BYTES_PER_SECOND, slack=_SLACK)


def _reading_seconds(chosen: Setup) -> float:
    """Return the seconds for one machine to read the whole checkpoint."""
    return chosen.model.checkpoint_bytes / _DISK_BYTES_PER_SECOND
