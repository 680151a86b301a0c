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
            (r"^([a-z0-9.-]+\.)?kubernetes\.io/", "is reserved for Kubernetes; write the resource of a device plugin"),
            (r"^nvidia\.com/gpu", "is allocated by devicesPerNode; write the resource of the RDMA devices"),
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


QueueName = Annotated[str, Matches(_DOMAIN, "is not the name of a queue; use a-z, 0-9, - and .", 63)]


class SchedulerType(StrEnum):
    """Scheduler or queue controller that places all members of a group at once, or none."""

    KUEUE = "Kueue"
    """Kueue admits the group as a plain pod group; the default scheduler then places its pods."""
    VOLCANO = "Volcano"
    """The scheduler `volcano`, with a `PodGroup`."""
    COSCHEDULING = "Coscheduling"
    """The scheduler `scheduler-plugins-scheduler` with the plugin Coscheduling, with a `PodGroup`."""


class SchedulerSpec(SpecPart):
    """Delegation of the choice of nodes to a scheduler of pod groups."""

    type: SchedulerType
    """`Kueue`, `Volcano` or `Coscheduling`."""
    queue: QueueName | None = None
    """`Kueue`: the LocalQueue, required. `Volcano`: the Queue. Default of Volcano: `default`."""


class TolerationOperator(StrEnum):
    """Comparison of a toleration with a taint."""

    EQUAL = "Equal"
    """Key and value must equal the taint's."""
    EXISTS = "Exists"
    """The key must equal the taint's; without a key every taint is tolerated."""


class TaintEffect(StrEnum):
    """Effect of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(SpecPart):
    """Toleration of a node taint."""

    key: TaintKey = ""
    """Key of the taint; empty: every key, with the operator `Exists`."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    """`Equal` or `Exists`."""
    value: LabelValue = ""
    """Value of the taint, for `Equal`."""
    effect: TaintEffect | None = None
    """`NoSchedule`, `PreferNoSchedule` or `NoExecute`. Default: every effect."""


class SecretName(SpecPart):
    """A Secret of the deployment's namespace."""

    name: ObjectName
    """Name of the Secret."""


class SecretKeyRef(SpecPart):
    """One entry of a Secret in the deployment's namespace. With `dsv4 up`: the file `secrets/NAME/KEY` of the state
    directory, readable by its owner only."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Matches(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", "is not a key; use letters, digits, -, _ and .", 253)]
    """Key of the entry."""


class ImagePullPolicy(StrEnum):
    """Image pull policy of the nodes."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class StorageType(StrEnum):
    """Storage for weights and caches of members."""

    HOST_PATH = "HostPath"
    """A directory of the node, which outlives every pod."""
    EMPTY_DIR = "EmptyDir"
    """Storage of the pod, removed with it: each start stages the weights again."""


class StorageSpec(SpecPart):
    """Storage of members on a cluster for weights, compiled kernels and evidence."""

    type: StorageType = StorageType.HOST_PATH
    """`HostPath`: a directory of the node. `EmptyDir`: storage of the pod, which each start fills again; for the Nano
    model and for clusters that allow no host paths."""
    path: AbsolutePath = "/var/lib/dsv4"
    """Directory of the node, one of those allowed by the cluster's administrator. Members can access only its
    subdirectories `deployments/NAMESPACE/NAME`, which belongs to them, and `weights`, read-only."""


class NodeLossPolicy(StrEnum):
    """Policy for members on a lost node."""

    REPLACE = "Replace"
    """Their pods are removed by force, and the group forms again on available nodes."""
    WAIT = "Wait"
    """The group waits until the node returns or is removed from the cluster."""


class NodeLossSpec(SpecPart):
    """Handling of lost nodes, which cannot confirm the end of their processes."""

    policy: NodeLossPolicy = NodeLossPolicy.REPLACE
    """`Replace` or `Wait`."""
    after: Duration = 10.0
    """Time for which Kubernetes must report the node as not ready before `Replace` acts."""


_Rank = Annotated[Count, Field(ge=0, le=15)]


DeviceName = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "is not the name of a network device; write for example enp1s0f0np0", 64),
]


class PortsSpec(SpecPart):
    """Ports of a group. Members that share the network of their machine listen on these ports directly."""

    api: PortNumber = 8000
    """The OpenAI-compatible API."""
    dashboard: PortNumber = 8265
    """The Ray dashboard."""
    gcs: PortNumber = 6379
    """Global control store of Ray's head."""
    agent: PortNumber = 8090
    """Agent of every member."""


class FabricMember(SpecPart):
    """Manual fabric settings of one member; its agent detects the others."""

    rank: _Rank
    """Rank of the member; 0 is the head."""
    interface: DeviceName | None = None
    """Network interface for the sockets of NCCL and Gloo."""
    hcas: Annotated[tuple[DeviceName, ...], Field(max_length=16)] | None = None
    """RDMA devices, by their names in `/sys/class/infiniband`."""
    gid_index: Literal["Auto"] | Annotated[Count, Field(ge=0, le=255)] = "Auto"
    """Index into the GID table of the RDMA devices; `Auto` is correct wherever NCCL can choose."""


class FabricSpec(SpecPart):
    """Network between the machines of a group."""

    require_rdma: StrictBool | None = Field(default=None, alias="requireRDMA")
    """Refuse a machine without a suitable RDMA port. Default: `true` for several GB10 machines, else `false`."""
    min_bus_bandwidth_gbps: Annotated[float, Field(ge=0, le=10_000, strict=True)] = 0.0
    """Minimum bandwidth of an all-reduce over all members in Gbit/s, measured before the load; 0: not measured."""
    members: Annotated[tuple[FabricMember, ...], Field(max_length=16)] = ()
    """Settings of single members."""


class NetworkMode(StrEnum):
    """Network of members on a cluster."""

    POD_NETWORK = "PodNetwork"
    """Network of the pod."""
    HOST_NETWORK = "HostNetwork"
    """Network of the node, with all its interfaces and RDMA ports."""


class NetworkSpec(SpecPart):
    """Network of a group: ports, and the fabric between its members."""

    mode: NetworkMode | None = None
    """On a cluster: `PodNetwork`, or `HostNetwork`, which RDMA needs. Default: `HostNetwork` for groups of several
    machines with accelerators, else `PodNetwork`."""
    rdma_resource: ResourceName = "rdma/hca_shared_devices_a"
    """On a cluster with `HostNetwork` and accelerators: the resource name of the RDMA devices in the nodes' RDMA device
    plugin."""
    ports: PortsSpec = PortsSpec()
    """Ports of a group."""
    fabric: FabricSpec = FabricSpec()
    """Network between the machines of a group."""
