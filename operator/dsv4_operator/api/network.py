"""`spec.network`: ports, and the fabric between the machines of a group."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from dsv4_operator.api.cluster import ResourceName
from dsv4_operator.api.parts import Count, PortNumber, SpecPart
from dsv4_operator.api.values import Matches

_Rank = Annotated[Count, Field(ge=0, le=15)]


DeviceName = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "is not the name of a network device; write for example enp1s0f0np0", 64),
]


class PortsSpec(SpecPart):
    """The ports of a group. Where members share the network of their machine they listen on these themselves."""

    api: PortNumber = 8000
    """The OpenAI-compatible API."""
    dashboard: PortNumber = 8265
    """The Ray dashboard."""
    gcs: PortNumber = 6379
    """Ray's head."""
    agent: PortNumber = 8090
    """The agent of every member."""


class FabricMember(SpecPart):
    """Fabric settings of one member, set by hand; what is left out is found by its agent."""

    rank: _Rank
    """Rank of the member; 0 is the head."""
    interface: DeviceName | None = None
    """The network interface of the sockets of NCCL and Gloo."""
    hcas: Annotated[tuple[DeviceName, ...], Field(max_length=16)] | None = None
    """RDMA devices by the names of `/sys/class/infiniband`."""
    gid_index: Literal["Auto"] | Annotated[Count, Field(ge=0, le=255)] = "Auto"
    """Index into the GID table of the RDMA devices; `Auto` is right wherever NCCL can choose."""


class FabricSpec(SpecPart):
    """The network between the machines of a group."""

    require_rdma: StrictBool | None = Field(default=None, alias="requireRDMA")
    """Refuse a machine without a fit RDMA port. Default: `true` for several GB10 machines, else `false`."""
    min_bus_bandwidth_gbps: Annotated[float, Field(ge=0, le=10_000, strict=True)] = 0.0
    """Gigabits a second that an all-reduce over all members must reach before the model is loaded; 0: not measured."""
    members: Annotated[tuple[FabricMember, ...], Field(max_length=16)] = ()
    """Settings of single members."""


class NetworkMode(StrEnum):
    """Source of the addresses of members on a cluster: their pods or their nodes."""

    POD_NETWORK = "PodNetwork"
    """Their pods' own."""
    HOST_NETWORK = "HostNetwork"
    """Their node's, with all its interfaces and RDMA ports."""


class NetworkSpec(SpecPart):
    """Network of a group: how it is reached, and how its members reach each other."""

    mode: NetworkMode | None = None
    """On a cluster: `PodNetwork`, or `HostNetwork`, which RDMA needs. Default: `HostNetwork` for groups of several
    machines with accelerators, else `PodNetwork`."""
    rdma_resource: ResourceName = "rdma/hca_shared_devices_a"
    """On a cluster with `HostNetwork` and accelerators: the resource that gives a member the RDMA devices, as the
    nodes' RDMA device plugin names it."""
    ports: PortsSpec = PortsSpec()
    """The ports of a group."""
    fabric: FabricSpec = FabricSpec()
    """The network between the machines of a group."""
