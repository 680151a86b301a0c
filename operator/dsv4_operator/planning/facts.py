"""Facts that the planner has about the machines: an argument, never looked up by the planner itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.planning.catalog import Machine, Model
from dsv4_operator.planning.images import ImageProfile
from dsv4_operator.planning.memory.records import Measured

SECRETS_ROOT = "/etc/dsv4/secrets"
"""`Facts.secrets_root` of members on a cluster."""
_CPUS = 20
"""Processors of a DGX Spark; an RTX workstation has at least as many."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One accelerator that a member gets."""

    uuid: str
    """As `CUDA_VISIBLE_DEVICES` takes it."""
    title: str
    """For people: number, product, UUID."""
    memory_bytes: int | None = None
    """All of its memory; None: not known, or the machine's own."""
    free_bytes: int | None = None
    """Bytes of it that are free while no member runs; None: not known."""
    taken_by: str = ""
    """Owners of the rest, for people."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine (or one stand-in for it) that can hold a member."""

    name: str
    address: str
    """The address that Ray, vLLM and the agent of a member there use; `{incarnation}` in it stands for the number of
    the incarnation, where members' names differ in each."""
    interface: str
    """The network interface that has `address`; empty: not known, and left to Ray, vLLM and their libraries."""
    cpus: int
    """Processors that a member there may count on."""
    memory_bytes: int
    """Free memory that a member there may count on."""
    machine: str | None = None
    """Its id in the catalog (`gb10-64gb`), `cpu` without an accelerator; None: not known, so what is asked for."""
    gpus: tuple[GpuFacts, ...] = ()
    """The accelerators of a member there; empty: not known, and a member takes those that it sees."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything outside the specification that a plan depends on."""

    nodes: tuple[NodeFacts, ...]
    """In rank order; the first is the head's. One group after the other, unless `placed` says which are whose."""
    isolated: bool
    """False: the nodes are one machine, so that the members share an address and its ports, and the planner makes one
    member with all the devices instead (CPU only)."""
    state_root: str
    """Directory on every node for members' own files; see `member_root`."""
    weights_root: str
    """Directory on every node for checkpoints."""
    ray_token_file: str
    cache_root: str = "/var/lib/dsv4/cache"
    """Directory on every node for compiled kernels, which outlive a group."""
    model: Model | None = None
    """The checkpoint as its own files describe it; None: the files are not at hand, so it is what the catalog says."""
    measured: tuple[Measured, ...] = ()
    """Memory that earlier starts logged, of this model, image and machine or of others."""
    placed: Mapping[int, tuple[NodeFacts, ...]] | None = None
    """By group, its machines in rank order, fewer than it needs if they are not there; None: `nodes` in turn."""
    profile: ImageProfile | None = None
    """Profile of the vLLM that is installed on the machines; None: it comes with an image."""
    cuda_home: str = ""
    """Directory of the machines' CUDA toolkit; empty: engines look for it themselves."""
    one_machine: bool = False
    """The nodes are parts of one machine, each with a network of its own: nothing between them needs a fabric."""
    unfit: str = ""
    """Reasons why machines that are there cannot be used, for people."""
    shared_weights: str | None = None
    """Directory on every node with files by their SHA-256, which members read and never write; None: there is none."""
    secrets_root: str = SECRETS_ROOT
    """Directory of every member with `NAME/KEY` for what the specification names by a `secretKeyRef`."""
    forbidden: str = ""
    """Things that the deployment may not have here, for people; empty: it may have everything that it asks for."""

    def of_group(self, group: int, size: int) -> tuple[NodeFacts, ...]:
        """Return the machines of `group` in rank order; fewer than `size` if they are not there."""
        if self.placed is not None:
            return self.placed.get(group, ())[:size]
        return self.nodes[group * size : (group + 1) * size]

    def in_incarnation(self, group: int, incarnation: int) -> Facts:
        """Return the same with the addresses and directories that members of `incarnation` of `group` have."""

        def named(nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
            number = str(incarnation)
            return tuple(replace(node, address=node.address.replace("{incarnation}", number)) for node in nodes)

        placed = None if self.placed is None else {group: named(nodes) for group, nodes in self.placed.items()}
        # Pods have directories of their own; on one machine the groups lie side by side.
        root, token = self.state_root, self.ray_token_file
        if self.one_machine and group:
            root = f"{self.state_root}/g{group}"
            token = f"{root}/token"
        return replace(self, nodes=named(self.nodes), placed=placed, state_root=root, ray_token_file=token)

    def member_root(self, incarnation: int, rank: int) -> str:
        """Return the directory of one member of one incarnation, on its node."""
        return f"{self.state_root}/i{incarnation}/m{rank}"


def catalog_facts(deployment: DSV4Deployment, machine: Machine, *, state_root: str, weights_root: str) -> Facts:
    """Return as many machines as `deployment` asks for, as the catalog knows them: for plans of machines that are
    elsewhere.

    Addresses are of 192.0.2.0/24, which is for documentation.
    """
    topology = deployment.spec.topology
    count = topology.nodes_per_group * max(deployment.spec.replicas, 1)
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
