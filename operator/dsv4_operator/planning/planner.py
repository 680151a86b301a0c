"""`plan_group`: a specification and the machines at hand become the one document that members run from."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_operator.api import DSV4Deployment, Hardware, Reason
from dsv4_operator.planning.bounds import expectations, timeouts, weights_plan
from dsv4_operator.planning.command_lines import engine_args, ray_args
from dsv4_operator.planning.environment import group_env, member_env
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Seat, seats
from dsv4_operator.planning.refused import PlanRefused
from dsv4_runtime.contract import EnginePlan, GroupPlan, MemberPlan


def plan_group(
    deployment: DSV4Deployment,
    facts: Facts,
    *,
    group: int,
    incarnation: int,
    restarts: Sequence[float] = (),
) -> GroupPlan:
    """The plan of one incarnation of one group. The same arguments give the same plan.

    Args:
        deployment: a valid deployment.
        facts: the machines.
        group: which group, from 0.
        incarnation: its number, from 1.
        restarts: Unix times of the restarts that the group's budget has paid for.

    Raises:
        PlanRefused: it does not fit these machines, or this version cannot plan it.
    """
    hardware = deployment.spec.topology.hardware
    if hardware is not Hardware.CPU:
        raise PlanRefused(
            Reason.HARDWARE_UNSUPPORTED,
            f"spec.topology.hardware: the planner for {hardware} is not part of this version; "
            "use the variant Nano on CPU",
        )
    members = seats(deployment, facts, group)
    weights = weights_plan(deployment, facts)
    return GroupPlan(
        namespace=deployment.metadata.namespace,
        deployment=deployment.metadata.name,
        group=group,
        incarnation=incarnation,
        members=tuple(_member(deployment, facts, seat, members[0], incarnation) for seat in members),
        env=group_env(deployment, facts),
        ray_token_file=facts.ray_token_file,
        engine=EnginePlan(
            args=engine_args(deployment, members[0], weights.path),
            served_name=deployment.served_names[0],
        ),
        weights=weights,
        timeouts=timeouts(deployment),
        expectations=expectations(deployment, members),
        recovery=deployment.spec.recovery.policy(),
        restarts=tuple(sorted(restarts)),
    )


def _member(deployment: DSV4Deployment, facts: Facts, seat: Seat, head: Seat, incarnation: int) -> MemberPlan:
    return MemberPlan(
        rank=seat.rank,
        role=seat.role,
        address=seat.node.address,
        devices=seat.devices,
        ports=seat.ports,
        ray_args=ray_args(seat, head, facts, incarnation),
        env=member_env(deployment, seat, head),
    )
