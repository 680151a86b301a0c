"""The members of a group: who runs where, under which address and ports."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment, Hardware, NetworkMode, Reason
from dsv4_operator.planning.catalog import API_PORT, DASHBOARD_PORT
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_operator.planning.refused import PlanRefused
from dsv4_runtime.contract import MemberPorts, Role


@dataclass(frozen=True, slots=True)
class Placement:
    """One member before its command lines are written."""

    rank: int
    node: NodeFacts
    devices: int
    ports: MemberPorts

    @property
    def role(self) -> Role:
        """Return its role: rank 0 is the head."""
        return Role.WORKER if self.rank else Role.HEAD


def placements(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[Placement, ...]:
    """Return the members of `group` in rank order.

    Raises:
        PlanRefused: there are too few machines.
    """
    return _isolated(deployment, facts, group) if facts.isolated else (_shared(deployment, facts, group),)


def head_ports(deployment: DSV4Deployment, *, isolated: bool) -> MemberPorts:
    """Return the ports of rank 0, at its own address."""
    ports = deployment.spec.network.ports
    own_network = (
        isolated
        and deployment.spec.topology.hardware is Hardware.CPU
        and deployment.spec.network_mode is NetworkMode.POD_NETWORK
    )
    return MemberPorts(
        agent=ports.agent,
        gcs=ports.gcs,
        # A member with a network of its own has the usual ones; `ports` are where its machine publishes them.
        dashboard=DASHBOARD_PORT if own_network else ports.dashboard,
        api=API_PORT if own_network else ports.api,
    )


def _isolated(deployment: DSV4Deployment, facts: Facts, group: int) -> tuple[Placement, ...]:
    topology = deployment.spec.topology
    size = topology.nodes_per_group
    nodes = facts.of_group(group, size)
    if len(nodes) < size and facts.placed is not None:
        raise PlanRefused(
            Reason.NODES_MISSING,
            f"spec.topology.nodesPerGroup: group {group} needs {size} machine{'s' if size > 1 else ''} at once, "
            f"and {len(nodes)} can be used; {facts.unfit or 'add machines'}",
        )
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
        Placement(rank, node, topology.devices_per_node, _ports(deployment, facts, rank))
        for rank, node in enumerate(nodes)
    )


def _shared(deployment: DSV4Deployment, facts: Facts, group: int) -> Placement:
    """Return one member in the place of all: members of one machine cannot share its address and ports."""
    topology = deployment.spec.topology
    if not facts.nodes:
        raise PlanRefused(Reason.NODES_MISSING, "no machine is there to run on; add one")
    if group:
        raise PlanRefused(
            Reason.NODES_MISSING,
            f"spec.replicas: {deployment.spec.replicas} groups would share this machine's ports; write 1",
        )
    if topology.hardware is not Hardware.CPU and topology.nodes_per_group > 1:
        raise PlanRefused(
            Reason.NODES_MISSING,
            f"spec.topology.nodesPerGroup: {topology.nodes_per_group} machines are asked for, and this is one; "
            "write 1 with devicesPerNode to match, or run it where the machines are",
        )
    return Placement(0, facts.nodes[0], topology.world_size, head_ports(deployment, isolated=facts.isolated))


def _ports(deployment: DSV4Deployment, facts: Facts, rank: int) -> MemberPorts:
    if rank:
        return MemberPorts(agent=deployment.spec.network.ports.agent)
    return head_ports(deployment, isolated=facts.isolated)
