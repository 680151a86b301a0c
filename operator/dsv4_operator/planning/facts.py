"""What the planner knows about the machines: an argument, never looked up by the planner itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine (or one stand-in for it) that can hold a member."""

    name: str
    address: str
    """The address that Ray, vLLM and the agent of a member there use."""
    interface: str
    """The network interface that has `address`."""
    cpus: int
    """Processors that a member there may count on."""
    memory_bytes: int
    """Free memory that a member there may count on."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything outside the specification that a plan depends on."""

    nodes: tuple[NodeFacts, ...]
    """In rank order; the first is the head's."""
    isolated: bool
    """False: the nodes are one machine, so that the members share an address and its ports, and the planner makes one
    member with all the devices instead (CPU only)."""
    state_root: str
    """Directory on every node for members' own files; see `member_root`."""
    weights_root: str
    """Directory on every node for checkpoints."""
    ray_token_file: str

    def member_root(self, incarnation: int, rank: int) -> str:
        """The directory of one member of one incarnation, on its node."""
        return f"{self.state_root}/i{incarnation}/m{rank}"
