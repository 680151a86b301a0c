"""Facts about the machines. They are arguments: the planner itself performs no detection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dsv4_operator.api import DSV4Deployment, Finding
from dsv4_operator.planning.catalog import Machine, Model
from dsv4_operator.planning.images import ImageProfile
from dsv4_operator.planning.memory.records import Measured
from dsv4_runtime.contract.plan import LONGEST_RAY_ROOT

SECRETS_ROOT = "/etc/dsv4/secrets"
"""`Facts.secrets_root` on a cluster."""
_CPUS = 20
"""Processors of a DGX Spark; an RTX workstation has at least as many."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One accelerator of a member."""

    uuid: str
    """UUID for `CUDA_VISIBLE_DEVICES`."""
    title: str
    """Number, product and UUID, for display."""
    memory_bytes: int | None = None
    """Total memory; None: unknown, or unified with that of the machine."""
    free_bytes: int | None = None
    """Free memory while no member runs; None: unknown."""
    taken_by: str = ""
    """Owners of the used memory, for display."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine, or a substitute for it, that can run a member."""

    name: str
    """Empty: unknown, because a scheduler chooses it after the plan."""
    address: str
    """Address for Ray, vLLM and the agent of a member; `{incarnation}` stands for the number of the incarnation, if the
    names of members contain it."""
    interface: str
    """Network interface of `address`; empty: unknown, and chosen by Ray, vLLM and their libraries."""
    cpus: int
    """Processors available to a member."""
    memory_bytes: int
    """Free memory available to a member."""
    machine: str | None = None
    """Its id in the catalog (`gb10-64gb`), `cpu` without an accelerator; None: unknown, so the requested hardware."""
    gpus: tuple[GpuFacts, ...] = ()
    """Accelerators of a member; empty: unknown, and a member uses all visible ones."""
    unsafe_copies: str = ""
    """Why copies between its accelerators over PCIe may hang or arrive wrong (`util.peer_copies`); empty: no reason is
    known."""
    lost_bytes: int = 0
    """Memory that drivers kept over the ends of all members since the start of the machine."""
    driver: str = ""
    """Version of the driver of its accelerators; empty: unknown."""
    driver_before: str = ""
    """Version with which engines ran here before; empty: the same, or unknown."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything outside the specification that a plan depends on."""

    nodes: tuple[NodeFacts, ...]
    """Nodes in rank order, the first for the head; one group after the other, unless `placed` assigns them."""
    isolated: bool
    """False: the nodes are one machine whose address and ports the members share, so the planner makes one member with
    all devices instead (CPU only)."""
    state_root: str
    """Directory on every node for the files of members; see `member_root`."""
    weights_root: str
    """Directory on every node for checkpoints."""
    ray_token_file: str
    cache_root: str = "/var/lib/dsv4/cache"
    """Directory on every node for compiled kernels, which persist after a group."""
    model: Model | None = None
    """The checkpoint according to its files; None: according to the catalog, because the files are not available."""
    measured: tuple[Measured, ...] = ()
    """Logged memory of earlier starts, of any model, image and machine."""
    placed: Mapping[int, tuple[NodeFacts, ...]] | None = None
    """By group, its machines in rank order, fewer than required if some are absent; None: `nodes` in order."""
    profile: ImageProfile | None = None
    """Profile of the vLLM installed on the machines; None: vLLM is part of an image."""
    cuda_home: str = ""
    """Directory of the machines' CUDA toolkit; empty: engines search it themselves."""
    one_machine: bool = False
    """The nodes are parts of one machine, each with its own network; no fabric is required between them."""
    own_networks: bool = True
    """Each member has a network of its own; False: members use that of their machine, where all ports are reachable by
    others."""
    group_directories: bool = False
    """A machine may have members of several groups, so each group but the first has a directory below `state_root`.
    Pods have their own directories."""
    unfit: str = ""
    """Reasons why existing machines cannot be used, for display."""
    shared_weights: str | None = None
    """Directory on every node with read-only files by their SHA-256; None: there is none."""
    secrets_root: str = SECRETS_ROOT
    """Directory of every member with the file `NAME/KEY` for each `secretKeyRef` of the specification."""
    forbidden: tuple[Finding, ...] = ()
    """Violations of the policy of the cluster."""
    ray_links: str = ""
    """Directory for short links to directories of Ray whose paths would be too long for its sockets; "": none."""

    def of_group(self, group: int, size: int) -> tuple[NodeFacts, ...]:
        """Return the machines of `group` in rank order; fewer than `size` if some are absent."""
        if self.placed is not None:
            return self.placed.get(group, ())[:size]
        return self.nodes[group * size : (group + 1) * size]

    def in_incarnation(self, group: int, incarnation: int) -> Facts:
        """Return the same with the addresses and directories of the members of one incarnation of `group`."""

        def named(nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
            number = str(incarnation)
            return tuple(replace(node, address=node.address.replace("{incarnation}", number)) for node in nodes)

        placed = None if self.placed is None else {group: named(nodes) for group, nodes in self.placed.items()}
        root, token = self.state_root, self.ray_token_file
        if self.group_directories and group:
            root = f"{self.state_root}/g{group}"
            token = f"{root}/token"
        return replace(self, nodes=named(self.nodes), placed=placed, state_root=root, ray_token_file=token)

    def member_root(self, incarnation: int, rank: int) -> str:
        """Return the directory of one member of one incarnation, on its node."""
        return f"{self.state_root}/i{incarnation}/m{rank}"

    def ray_root(self, incarnation: int, rank: int) -> str:
        """Return the directory in which Ray of one member makes its sessions, or a link to it."""
        path = f"{self.member_root(incarnation, rank)}/ray"
        if not self.ray_links or len(path) <= LONGEST_RAY_ROOT:
            return path
        return f"{self.ray_links}/{hashlib.sha256(path.encode()).hexdigest()[:4]}"


def catalog_facts(deployment: DSV4Deployment, machine: Machine, *, state_root: str, weights_root: str) -> Facts:
    """Return the machines that `deployment` requests according to the catalog, for plans without access to machines.

    Addresses are in 192.0.2.0/24, which is reserved for documentation.
    """
    topology = deployment.spec.topology
    count = topology.nodes_per_group * max(deployment.spec.replicas, 1)
    if topology.nodes:
        count = min(count, len(topology.nodes))
    nodes = tuple(
        NodeFacts(
            name=f"{machine.id}-{number}",
            address=f"192.0.2.{number % 250 + 1}",
            interface=machine.interfaces[0] if machine.interfaces else "eth0",
            cpus=_CPUS,
            memory_bytes=machine.memory_bytes * (1 if machine.unified_memory else topology.devices_per_node),
            machine=machine.id,
        )
        for number in range(count)
    )
    return Facts(
        nodes=nodes,
        isolated=True,
        state_root=state_root,
        weights_root=weights_root,
        ray_token_file=f"{state_root}/token",
    )
