"""Cluster settings of the specification: placement, storage, Secrets, ports and the fabric between machines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from dsv4_operator.api.values import AbsolutePath, Count, Duration, Matches, PortNumber, SpecPart

_DOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_LABEL = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"

_LONG_PREFIX = ((r"^[^/]{254}", "has a prefix of more than 253 characters; shorten it"),)

NodeName = Annotated[str, Matches(_DOMAIN, "is not the name of a node; write it as kubectl get nodes does", 253)]
ObjectName = Annotated[str, Matches(_DOMAIN, "is not the name of an object; use a-z, 0-9, - and .", 253)]
Namespace = Annotated[
    str,
    Matches(
        r"[a-z0-9]([a-z0-9-]*[a-z0-9])?",
        "is not the name of a namespace; use lower-case letters, digits and dashes",
        63,
    ),
]
ResourceName = Annotated[
    str,
    Matches(
        rf"{_DOMAIN}/{_LABEL}",
        "is not the name of a device resource; write for example rdma/hca_shared_devices_a",
        253,
        never=(
            (r"^([a-z0-9.-]+\.)?kubernetes\.io/", "belongs to Kubernetes; name the resource of a device plugin"),
            (r"^nvidia\.com/gpu", "is what members get by devicesPerNode; name the resource of the RDMA devices"),
        ),
    ),
]
LabelKey = Annotated[
    str,
    Matches(
        rf"({_DOMAIN}/)?{_LABEL}",
        "is not the key of a label; write for example kubernetes.io/arch",
        317,
        never=_LONG_PREFIX,
    ),
]
_ANY_DOMAIN = _DOMAIN.replace("a-z", "A-Za-z")
AnnotationKey = Annotated[
    str,
    Matches(
        rf"({_ANY_DOMAIN}/)?{_LABEL}",
        "is not the key of an annotation; write for example example.com/note",
        317,
        never=_LONG_PREFIX,
    ),
]
TaintKey = Annotated[
    str,
    Matches(
        rf"(({_DOMAIN}/)?{_LABEL})?",
        "is not the key of a taint; write for example nvidia.com/gpu",
        317,
        never=_LONG_PREFIX,
    ),
]
LabelValue = Annotated[
    str, Matches(rf"({_LABEL})?", "is not the value of a label; use letters, digits, -, _ and .", 63)
]


class TolerationOperator(StrEnum):
    """Comparison that a toleration makes."""

    EQUAL = "Equal"
    """Key and value must be the taint's."""
    EXISTS = "Exists"
    """The key must be the taint's; without a key every taint is tolerated."""


class TaintEffect(StrEnum):
    """Effect of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(SpecPart):
    """Taints of nodes that members do not mind."""

    key: TaintKey = ""
    """The taint's key; empty: every key, with the operator `Exists`."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    """`Equal` or `Exists`."""
    value: LabelValue = ""
    """The taint's value, for `Equal`."""
    effect: TaintEffect | None = None
    """`NoSchedule`, `PreferNoSchedule` or `NoExecute`. Default: every effect."""


class SecretName(SpecPart):
    """A Secret of the deployment's namespace."""

    name: ObjectName
    """Its name."""


class SecretKeyRef(SpecPart):
    """One entry of a Secret of the deployment's namespace. With `dsv4 up`: the file `secrets/NAME/KEY` of the state
    directory, which only its owner may read."""

    name: ObjectName
    """The Secret's name."""
    key: Annotated[str, Matches(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", "is not a key; use letters, digits, -, _ and .", 253)]
    """The entry's key in it."""


class ImagePullPolicy(StrEnum):
    """Policy of when nodes fetch the image."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class StorageType(StrEnum):
    """Kind of storage that members keep weights and caches on."""

    HOST_PATH = "HostPath"
    """A directory of the node, which outlives every pod."""
    EMPTY_DIR = "EmptyDir"
    """Space that is the pod's own and goes with it: each start stages the weights again."""


class StorageSpec(SpecPart):
    """Storage in which members on a cluster keep weights, compiled kernels and evidence."""

    type: StorageType = StorageType.HOST_PATH
    """`HostPath`: a directory of the node. `EmptyDir`: the pod's own, which each start fills again; for the Nano
    model and for clusters that allow no host paths."""
    path: AbsolutePath = "/var/lib/dsv4"
    """The directory of the node, one of those that the cluster's administrator allows. Members see of it only
    `deployments/NAMESPACE/NAME`, which is their own, and `weights`, to be read."""


class NodeLossPolicy(StrEnum):
    """Treatment of the members on a node that is gone."""

    REPLACE = "Replace"
    """Their pods are removed by force, and the group forms again on nodes that are there."""
    WAIT = "Wait"
    """The group waits until the node is back, or somebody removes it from the cluster."""


class NodeLossSpec(SpecPart):
    """A node that is gone cannot say that its processes ended."""

    policy: NodeLossPolicy = NodeLossPolicy.REPLACE
    """`Replace` or `Wait`."""
    after: Duration = 10.0
    """Time for which Kubernetes must have called the node not ready before `Replace` acts."""


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
