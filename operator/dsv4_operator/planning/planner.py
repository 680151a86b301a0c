"""`plan_group`: a specification and the machines at hand become the one document that members run from."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_operator.api import DSV4Deployment, Reason
from dsv4_operator.planning.bounds import expectations, fabric_plan, timeouts, weights_plan
from dsv4_operator.planning.command_lines import engine_args, ray_args
from dsv4_operator.planning.environment import group_env, member_env
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Placement, placements
from dsv4_operator.planning.memory import FitVerdict, advice
from dsv4_operator.planning.refused import PlanRefused
from dsv4_operator.planning.rule import Severity
from dsv4_operator.planning.rules import broken_rules
from dsv4_operator.planning.setup import Setup, setup
from dsv4_runtime.contract import EnginePlan, GroupPlan, HealthPolicy, MemberPlan

_CPU_HEALTH = HealthPolicy(gpus=False, answer_tolerance=0.0625)
"""The CPU build computes the same in every start: repeated starts of the nano model differ by nothing."""


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
        group: which group, from 0.
        incarnation: its number, from 1.
        restarts: Unix times of the restarts that are used of the group's budget.

    Raises:
        PlanRefused: it does not fit these machines, or breaks a rule. The text has all refusals.
    """
    if facts.forbidden:
        raise PlanRefused(Reason.NOT_ALLOWED, facts.forbidden)
    facts = facts.in_incarnation(group, incarnation)
    members = placements(deployment, facts, group)
    chosen = setup(deployment, facts, group)
    _refuse(chosen)
    weights = weights_plan(deployment, facts)
    return GroupPlan(
        namespace=deployment.metadata.namespace,
        deployment=deployment.metadata.name,
        group=group,
        incarnation=incarnation,
        members=tuple(_member(chosen, placement, members[0], incarnation) for placement in members),
        env=group_env(chosen),
        ray_token_file=facts.ray_token_file,
        engine=EnginePlan(
            args=engine_args(chosen, members[0], weights.path),
            served_name=deployment.served_names[0],
            image=deployment.spec.engine.image,
        ),
        weights=weights,
        timeouts=timeouts(chosen),
        expectations=expectations(chosen, members),
        recovery=deployment.spec.recovery.policy(),
        health=HealthPolicy() if not chosen.on_cpu else _CPU_HEALTH,
        fabric=fabric_plan(chosen),
        restarts=tuple(sorted(restarts)),
    )


def _refuse(chosen: Setup) -> None:
    """Raise unless the rules and the memory allow `chosen`.

    Raises:
        PlanRefused: a rule refuses it, or the memory is too small.
    """
    refusals = [finding for finding in broken_rules(chosen) if finding.severity is Severity.REFUSE]
    if refusals:
        raise PlanRefused(refusals[0].reason, "; ".join(map(str, refusals)))
    memory = chosen.memory
    if not chosen.on_cpu and memory.verdict is FitVerdict.NO:
        smallest = next(advice(memory), None)
        remedy = f"the smallest change that fits: spec.{smallest.text}" if smallest else "it needs other machines"
        raise PlanRefused(Reason.MEMORY_SHORT, f"{memory.problem}; {remedy}")


def _member(chosen: Setup, placement: Placement, head: Placement, incarnation: int) -> MemberPlan:
    return MemberPlan(
        rank=placement.rank,
        role=placement.role,
        address=placement.node.address,
        node=placement.node.name,
        devices=placement.devices,
        gpus=tuple(gpu.uuid for gpu in placement.node.gpus) or None,
        ports=placement.ports,
        ray_args=ray_args(chosen, placement, head, chosen.facts, incarnation),
        env=member_env(chosen, placement, head),
    )
