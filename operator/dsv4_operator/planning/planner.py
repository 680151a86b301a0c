"""`plan_group`: the plan of one incarnation of a group, from a specification and facts about the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsv4_operator.api import DSV4Deployment, Finding, Hardware, InvalidDeployment, Reason, Severity, parse
from dsv4_operator.planning.catalog import GIB, NANO, machine
from dsv4_operator.planning.facts import Facts, catalog_facts
from dsv4_operator.planning.images import usual_profile
from dsv4_operator.planning.memory import FitVerdict, MemoryPlan, advice, memory_plan
from dsv4_operator.planning.memory.items import BadDivision
from dsv4_operator.planning.memory.plan import Change
from dsv4_operator.planning.rendering import (
    OBJECT_STORE_BYTES,
    engine_args,
    group_env,
    member_engine_args,
    member_env,
    ray_args,
)
from dsv4_operator.planning.rules import broken_rules
from dsv4_operator.planning.setup import (
    DivisionRefused,
    Placement,
    PlanRefused,
    Setup,
    execute_model_seconds,
    memory_of,
    placements,
    ready_seconds,
    refusal,
    setup,
    timeouts,
    weights_plan,
    with_settings,
)
from dsv4_runtime.contract import (
    EnginePlan,
    Expectations,
    FabricPlan,
    FabricSetting,
    GroupPlan,
    HealthPolicy,
    MemberPlan,
    Role,
)

_CPU_HEALTH = HealthPolicy(gpus=False, answer_tolerance=0.0625)
"""The CPU build computes the same in every start: repeated starts of the nano model do not differ."""
_REASONS = {"WrongHardware": Reason.HARDWARE_UNSUPPORTED}
"""Reasons of the condition, by rule; by default `PlanRefused`."""
_QUEUE_BYTES = 2 * GIB
"""Message queues of vLLM, shared memory of NCCL and of the worker in /dev/shm."""


def plan_group(
    deployment: DSV4Deployment,
    facts: Facts,
    *,
    group: int,
    incarnation: int,
    restarts: Sequence[float] = (),
) -> GroupPlan:
    """Return the plan of one incarnation of one group. The same arguments give the same plan.

    Args:
        deployment: a valid deployment.
        facts: the machines.
        group: number of the group, from 0.
        incarnation: its number, from 1.
        restarts: Unix times of the used restarts of the group's budget.

    Raises:
        PlanRefused: it does not fit these machines, or breaks a rule. The text contains all refusals.
    """
    if facts.forbidden:
        raise PlanRefused(Reason.NOT_ALLOWED, *facts.forbidden)
    facts = facts.in_incarnation(group, incarnation)
    members = placements(deployment, facts, group)
    head = members[0]
    try:
        chosen = setup(deployment, facts, group)
    except DivisionRefused as refused:
        raise with_accepted_division(deployment, facts, refused.error) from None
    _refuse(chosen)
    weights = weights_plan(deployment, facts.weights_root, facts.secrets_root, facts.shared_weights)
    limits, fabric = timeouts(chosen), _fabric_plan(chosen)
    return GroupPlan(
        namespace=deployment.metadata.namespace,
        deployment=deployment.metadata.name,
        group=group,
        incarnation=incarnation,
        members=tuple(
            MemberPlan(
                rank=member.rank,
                role=Role.WORKER if member.rank else Role.HEAD,
                address=member.node.address,
                node=member.node.name or None,
                devices=member.devices,
                gpus=tuple(gpu.uuid for gpu in member.node.gpus) or None,
                ports=member.ports,
                ray_args=ray_args(chosen, member, head, incarnation),
                engine_args=member_engine_args(chosen, member, members),
                env=member_env(chosen, member, head, fabric),
            )
            for member in members
        ),
        env=group_env(chosen, load_seconds=limits.load, step_seconds=execute_model_seconds(chosen)),
        ray_token_file=facts.ray_token_file,
        engine=EnginePlan(
            args=engine_args(chosen, head, weights.path),
            served_name=deployment.served_names[0],
            image=deployment.spec.engine.image,
            retain_weights=deployment.spec.engine.retain_weights,
        ),
        weights=weights,
        timeouts=limits,
        expectations=_expectations(chosen, members),
        recovery=deployment.spec.recovery.policy(),
        health=HealthPolicy() if not chosen.on_cpu else _CPU_HEALTH,
        fabric=fabric,
        restarts=tuple(sorted(restarts)),
    )


def _refuse(chosen: Setup) -> None:
    """Check `chosen` against the rules and the memory plan.

    Raises:
        PlanRefused: a rule refuses it, or the memory is too small.
    """
    refusals = [finding for finding in broken_rules(chosen) if finding.severity is Severity.REFUSE]
    if refusals:
        raise PlanRefused(_REASONS.get(refusals[0].reason, Reason.PLAN_REFUSED), *refusals)
    memory = chosen.memory
    on_cluster = chosen.facts.placed is not None
    uncertain = memory.verdict is FitVerdict.UNCERTAIN and on_cluster and not chosen.spec.engine.allow_tight
    if not chosen.on_cpu and (memory.verdict is FitVerdict.NO or uncertain):
        smallest = next(accepted_advice(chosen), None)
        remedy = f"smallest change that fits: spec.{smallest.text}" if smallest else "use other machines"
        if uncertain:
            remedy += "; or set spec.engine.allowTight to true to try it"
        raise refusal(
            Reason.MEMORY_UNCERTAIN if uncertain else Reason.MEMORY_SHORT, "", None, str(memory.problem), remedy
        )


def accepted_advice(chosen: Setup) -> Iterator[Change]:
    """Yield the changes of `advice` with which the deployment fits and breaks no rule, each with its plan."""
    for change in advice(chosen.memory):
        if (plan := _accepted(chosen.deployment, chosen.facts, change.settings)) is not None:
            yield replace(change, plan=plan)


def with_accepted_division(deployment: DSV4Deployment, facts: Facts, error: BadDivision) -> DivisionRefused:
    """Return the refusal of a division that the model does not allow, with one that fits and that every rule accepts.

    Divisions of the same devices come first, then the fewest further machines, then fewer, then fewer devices of each.
    """
    topology = deployment.spec.topology
    now, per_node = topology.nodes_per_group, topology.devices_per_node
    numbers = sorted(range(1, _MOST_NODES + 1), key=lambda number: (number != now, number < now, abs(number - now)))
    # Fewer devices of each machine only if no number of machines has a division, as for three devices and V4.1.
    for devices in (per_node, *(fewer for fewer in (8, 4, 2) if fewer < per_node)):
        possible = [
            (number, tensor, number * devices // tensor)
            for number in numbers
            for tensor in sorted(error.sizes, reverse=True)
            if number * devices % tensor == 0
        ]
        for number, tensor, stages in possible[:_MOST_TRIES]:
            changed = {"topology.nodesPerGroup": number} if number != now else {}
            changed |= {"topology.devicesPerNode": devices} if devices != per_node else {}
            sizes = {"topology.tensorParallelSize": tensor, "topology.pipelineParallelSize": stages}
            if _accepted(deployment, facts, changed | sizes) is not None:
                written = "".join(f"{field.removeprefix('topology.')} {size}, " for field, size in changed.items())
                return DivisionRefused(
                    error, f"use {written}tensorParallelSize {tensor} with pipelineParallelSize {stages}"
                )
    return DivisionRefused(error, "use another number of machines")


def checked_divisions(document: Callable[[], object], findings: Sequence[Finding]) -> list[Finding]:
    """Return the `findings` about `document`; those about its division get one that fits and that every rule accepts.

    The specification itself knows the variant of the checkpoint only, and not its layers.
    """
    divisions = {"TensorParallelDivision", "TensorParallelSize"}
    if {each.reason for each in findings}.isdisjoint(divisions):
        return [*findings]
    remedy = _division_remedy(document())
    return [replace(each, remedy=remedy) if remedy and each.reason in divisions else each for each in findings]


def _division_remedy(document: Any) -> str:
    """Return the remedy for a division that the specification refuses; empty if its own is right or none is known."""
    spec = {**document["spec"], "topology": {**document["spec"]["topology"], "tensorParallelSize": None}}
    hardware = spec["topology"].get("hardware", Hardware.CPU)
    engine = spec.get("engine") or {}
    if hardware == Hardware.CPU:
        return ""
    if not engine.keys() & {"profile", "build", "image"}:
        # With a profile, the specification leaves the division to the planner.
        spec["engine"] = {**engine, "profile": usual_profile(Hardware(hardware))}
    try:
        made = parse({**document, "spec": spec})
        facts = catalog_facts(made, machine(Hardware(hardware)), state_root="", weights_root="")
        setup(made, facts)
    except DivisionRefused as refused:
        return with_accepted_division(made, facts, refused.error).findings[0].remedy
    except (InvalidDeployment, PlanRefused):
        return ""
    return ""


_MOST_TRIES = 16
_MOST_NODES = 16


def _accepted(deployment: DSV4Deployment, facts: Facts, settings: Mapping[str, object]) -> MemoryPlan | None:
    """Return the memory plan with changed settings; None if that does not fit or breaks a rule."""
    try:
        after = setup(with_settings(deployment, settings), replace(facts, placed=None))
    except (InvalidDeployment, PlanRefused):
        return None
    refused = any(one.severity is Severity.REFUSE for one in broken_rules(after))
    return after.memory if after.memory.verdict is FitVerdict.FITS and not refused else None


def _fabric_plan(chosen: Setup) -> FabricPlan | None:
    """Return the settings that the members detect and verify on their network; None without one between machines."""
    if chosen.on_cpu or not chosen.several_machines:
        return None
    fabric = chosen.spec.network.fabric
    return FabricPlan(
        require_rdma=chosen.hardware is Hardware.GB10 if fabric.require_rdma is None else fabric.require_rdma,
        neighbours_only=chosen.variable("NCCL_SWITCHLESS_RING_ONLY") == "1",
        min_bandwidth=fabric.min_bus_bandwidth_gbps * 1e9 / 8 or None,
        settings={
            member.rank: FabricSetting(interface=member.interface, hcas=member.hcas, gid_index=member.gid_index)
            for member in fabric.members
        },
    )


def _expectations(chosen: Setup, members: Sequence[Placement]) -> Expectations:
    """Return the conditions that the agents verify on every member.

    Raises:
        PlanRefused: a machine or an accelerator has too little free memory.
    """
    memory, machine = chosen.memory, chosen.machine
    kv = memory.kv
    world_size = chosen.spec.topology.world_size
    kv_tokens, kv_concurrency = (kv.tokens, kv.concurrency) if kv else (None, None)
    if chosen.on_cpu:
        devices = max(member.devices for member in members)
        needed = NANO.head_bytes + devices * (NANO.rank_bytes + (memory.engine.kv_cache_memory or 0))
        _check_machines(members, needed, "kvCacheMemory")
        return Expectations(
            world_size=world_size,
            memory_bytes=needed,
            shm_bytes=NANO.object_store_bytes + NANO.queue_bytes,
            ready_seconds=ready_seconds(chosen),
            kv_tokens=kv_tokens,
            kv_concurrency=kv_concurrency,
        )
    # vLLM requires its whole share to be free at the start: of the host's memory where that is unified.
    share = int(chosen.utilization * machine.memory_bytes)
    shm_bytes = OBJECT_STORE_BYTES + _QUEUE_BYTES
    needed = share if machine.unified_memory else shm_bytes + 4 * GIB
    _check_machines(members, needed, "gpuMemoryUtilization")
    if not machine.unified_memory:
        _check_accelerators(chosen, share)
    # Without measured differences, so that the next difference refers to the same figures.
    plain = memory_plan(memory.model, machine, memory.parallel, memory.engine) if memory.measured else memory
    return Expectations(
        world_size=world_size,
        memory_bytes=needed,
        gpu_bytes=None if machine.unified_memory else share,
        shm_bytes=shm_bytes,
        ready_seconds=ready_seconds(chosen),
        weights_bytes=max(rank.items[0].bytes for rank in memory.ranks),
        kv_tokens=kv_tokens,
        kv_concurrency=kv_concurrency,
        memory_of=memory_of(chosen.deployment, chosen.model, machine, chosen.profile),
        memory=plain.budget_items(),
    )


def _check_machines(members: Sequence[Placement], needed: int, field: str) -> None:
    for node in (member.node for member in members):
        if node.memory_bytes < needed:
            free, required = node.memory_bytes / GIB, needed / GIB
            message = (
                f"the machine {node.name} has {free:.1f} GiB of free memory, and a member needs {required:.1f} GiB"
            )
            remedy = f"end other programs, decrease spec.engine.{field}, or use a machine with more memory"
            raise refusal(Reason.MEMORY_SHORT, "", None, message, remedy)


def _check_accelerators(chosen: Setup, needed: int) -> None:
    """Check the free memory of every accelerator, where it is known.

    Raises:
        PlanRefused: other programs use so much of it that the engine does not fit beside them.
    """
    for gpu in (gpu for node in chosen.nodes for gpu in node.gpus):
        if gpu.free_bytes is not None and gpu.free_bytes < needed:
            user = gpu.taken_by or "the driver does not report the programs that use the rest"
            free, required = gpu.free_bytes / GIB, needed / GIB
            message = f"{gpu.title} has {free:.1f} GiB of free memory, and the engine needs {required:.1f} GiB ({user})"
            remedy = "end those programs, or decrease spec.engine.gpuMemoryUtilization"
            raise refusal(Reason.MEMORY_SHORT, "", None, message, remedy)
