"""The members of a group: who runs where, under which address and ports."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment, Reason
from dsv4_operator.planning.catalog import AGENT_PORT, API_PORT, DASHBOARD_PORT, GCS_PORT
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_operator.planning.refused import PlanRefused
from dsv4_runtime.contract import MemberPorts, Role


@dataclass(frozen=True, slots=True)
class Seat:
    """One member before its command lines are written."""

    rank: int
    node: NodeFacts
    devices: int
    ports: MemberPorts

    @property
    def role(self) -> Role:
        """Rank 0 is the head."""
        return Role.WORKER if self.rank else Role.HEAD


def seats(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[Seat, ...]:
    """The members of `group` in rank order.

    Raises:
        PlanRefused: there are too few machines.
    """
    return _isolated(deployment, facts, group) if facts.isolated else (_shared(deployment, facts, group),)


def _isolated(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[Seat, ...]:
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    nodes = facts.nodes[group * size : (group + 1) * size]
    if len(nodes) < size:
        groups = deployment.spec.replicas
        fitting = len(facts.nodes) // size
        remedy = f"lower spec.replicas to {fitting}" if fitting else "lower spec.topology.nodesPerGroup"
        raise PlanRefused(
            Reason.NODES_MISSING,
            f"spec.replicas: {groups} × nodesPerGroup {size} needs {groups * size} machines, "
            f"and {len(facts.nodes)} are there; {remedy}, or add machines",
        )
    return tuple(
        Seat(rank, node, topology.devices_per_node, _ports(rank, API_PORT, DASHBOARD_PORT))
        for rank, node in enumerate(nodes)
    )


def _shared(deployment: DSV4Deployment, facts: Facts, group: int) -> Seat:
    """One member in the place of all: members of one machine cannot share its address and ports."""
    if not facts.nodes:
        raise PlanRefused(Reason.NODES_MISSING, "no machine is there to run on; add one")
    if group:
        raise PlanRefused(
            Reason.NODES_MISSING,
            f"spec.replicas: {deployment.spec.replicas} groups would share this machine's ports; write 1",
        )
    ports = deployment.spec.network.ports
    return Seat(0, facts.nodes[0], deployment.spec.topology.world_size, _ports(0, ports.api, ports.dashboard))


def _ports(rank: int, api: int, dashboard: int) -> MemberPorts:
    if rank:
        return MemberPorts(agent=AGENT_PORT)
    return MemberPorts(agent=AGENT_PORT, gcs=GCS_PORT, dashboard=dashboard, api=api)
