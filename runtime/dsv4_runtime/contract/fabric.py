"""The network between members: what the plan asks of it, and what a member found."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsv4_runtime.contract.base import Document, Report

GidIndex = Annotated[int, Field(ge=0, le=255)]


class FabricSetting(Document):
    """Network settings that the user made by hand for one member; what is not set is discovered."""

    interface: str | None = None
    """The network interface of the sockets of NCCL and Gloo. None: the one that has the member's address."""
    hcas: tuple[str, ...] | None = None
    """RDMA devices by the names of /sys/class/infiniband. None: every device that is fit."""
    gid_index: Literal["Auto"] | GidIndex = "Auto"
    """Index into the GID table of the RDMA devices. `Auto`: NCCL chooses; where it would choose wrongly, it is told."""


class FabricPlan(Document):
    """Network properties that each member has to find and prove before the model is loaded."""

    require_rdma: bool = False
    """Whether a member without a fit RDMA port is refused, and NCCL over TCP sockets is a failure."""
    mtu: Annotated[int, Field(ge=576, le=65_535)] | None = None
    """Size in bytes of an IP packet that every path must carry whole. None: what the interfaces at both ends say."""
    min_bandwidth: Annotated[float, Field(gt=0)] | None = None
    """Bus bandwidth in bytes a second that an all-reduce over all members must reach. None: it is not measured."""
    seconds: Annotated[float, Field(gt=0)] = 60.0
    """Bound for the proof, from the moment at which all members have joined the network."""
    settings: dict[int, FabricSetting] = Field(default_factory=dict)
    """Rank to what was set by hand; a rank that is not here is discovered."""

    def setting(self, rank: int) -> FabricSetting:
        """Return what was set by hand for `rank`."""
        return self.settings.get(rank, FabricSetting())


class Rail(Report):
    """One address over which a member speaks to the others."""

    interface: str
    address: str
    """IPv4 address with the length of its network's prefix: `192.168.100.10/24`."""
    mtu: int
    """The interface's, in bytes."""
    hca: str | None = None
    """The RDMA device of the interface; None for one that carries sockets only."""
    port: int | None = None
    """Port at the address where this member answers probes, over TCP and UDP; None when it does not (any more)."""


class FabricStatus(Report):
    """Findings of a member about its network, and what it has proved."""

    rails: tuple[Rail, ...] = ()
    rendezvous: int | None = None
    """Rank 0: the port at which the bandwidth probe meets, once rank 0 has proved its paths."""
    proved: bool = False
    """Whether every path to every other member carried what it has to carry."""
    bandwidth: float | None = None
    """Measured bus bandwidth of an all-reduce in bytes a second; None if it was not measured."""
    transport: str | None = None
    """Transport that NCCL's own log names: `IB`, `Socket`, or a plugin's name; None while it has not said."""
    notes: tuple[str, ...] = ()
    """Restrictions, a sentence each: what was left out or is less than it could be."""
