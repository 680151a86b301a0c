"""The network between members: requirements of the plan and findings of a member."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsv4_runtime.contract.base import Document, Report

GidIndex = Annotated[int, Field(ge=0, le=255)]


class FabricSetting(Document):
    """Manual network settings for one member; unset fields are discovered."""

    interface: str | None = None
    """The network interface of the sockets of NCCL and Gloo. None: the one that has the member's address."""
    hcas: tuple[str, ...] | None = None
    """RDMA devices by the names of /sys/class/infiniband. None: every device that is fit."""
    gid_index: Literal["Auto"] | GidIndex = "Auto"
    """Index into the GID table of the RDMA devices. `Auto`: NCCL chooses, except where its choice would be wrong."""


class FabricPlan(Document):
    """Network properties that each member has to find and prove before the model is loaded."""

    require_rdma: bool = False
    """Whether a member without a fit RDMA port is refused, and NCCL over TCP sockets is a failure."""
    mtu: Annotated[int, Field(ge=576, le=65_535)] | None = None
    """Size in bytes of an IP packet that every path must carry whole. None: the MTU of the interfaces at both ends."""
    min_bandwidth: Annotated[float, Field(gt=0)] | None = None
    """Bus bandwidth in bytes a second that an all-reduce over all members must reach. None: it is not measured."""
    seconds: Annotated[float, Field(gt=0)] = 60.0
    """Bound for the proof, from the moment at which all members have joined the network."""
    settings: dict[int, FabricSetting] = Field(default_factory=dict)
    """Rank to its manual settings; other ranks are discovered."""

    def setting(self, rank: int) -> FabricSetting:
        """Return the manual settings of `rank`."""
        return self.settings.get(rank, FabricSetting())


class Rail(Report):
    """Address of a member towards the others."""

    interface: str
    address: str
    """IPv4 address with the length of its network's prefix: `192.168.100.10/24`."""
    mtu: int
    """The interface's, in bytes."""
    hca: str | None = None
    """The RDMA device of the interface; None for one that carries sockets only."""
    port: int | None = None
    """Port at the address where this member answers probes, over TCP and UDP; None if it does not answer."""


class FabricStatus(Report):
    """Findings of a member about its network, and results of the verification."""

    rails: tuple[Rail, ...] = ()
    rendezvous: int | None = None
    """Rank 0: the port at which the bandwidth probe meets, once rank 0 has proved its paths."""
    proved: bool = False
    """Whether every path to every other member was verified."""
    bandwidth: float | None = None
    """Measured bus bandwidth of an all-reduce in bytes a second; None if it was not measured."""
    transport: str | None = None
    """Transport in NCCL's own log: `IB`, `Socket`, or a plugin's name; None before that line."""
    notes: tuple[str, ...] = ()
    """Restrictions, a sentence each: skipped checks and values below the possible ones."""
