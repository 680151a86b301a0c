"""Specification of a `DSV4Deployment`: what a user asks for.

Every field is read: by the planner, the lifecycle or the command line. Rules that span fields are in `rules`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from dsv4_operator.api.cluster import LabelKey, LabelValue, NodeLossSpec, NodeName, StorageSpec, Toleration
from dsv4_operator.api.engine import EngineSpec
from dsv4_operator.api.gateway import GatewaySpec
from dsv4_operator.api.model_source import ModelSource, StagingSpec
from dsv4_operator.api.network import NetworkMode, NetworkSpec
from dsv4_operator.api.parts import Count, SpecPart
from dsv4_operator.api.values import CONTROL, SPACES, TEXT, Between, BoundedDuration, Duration, Matches
from dsv4_runtime.contract import RecoveryPolicy

DEFAULT_BACKEND = "Pods"
_ServedName = Annotated[
    str,
    Matches(
        rf"[^\s{SPACES}{CONTROL}-]([^{CONTROL}\t\n\r]*[^\s{SPACES}{CONTROL}])?",
        "is not a model name; write for example deepseek-v4-flash",
        253,
    ),
]


def _without_nulls(value: Any) -> Any:
    # An entry that is null is not there, for API servers.
    return {key: text for key, text in value.items() if text is not None} if isinstance(value, dict) else value


class Variant(StrEnum):
    """The members of the model family."""

    NANO = "Nano"
    """A tiny model of the same architecture with random weights, for development and tests."""
    FLASH = "Flash"
    PRO = "Pro"


class Hardware(StrEnum):
    """The kinds of machines; a group is homogeneous."""

    CPU = "CPU"
    """No accelerator; only for the Nano model."""
    GB10 = "GB10"
    """NVIDIA DGX Spark."""
    RTXPRO6000 = "RTXPRO6000"
    """NVIDIA RTX PRO 6000 Blackwell."""
    H100 = "H100"
    """NVIDIA H100, for development."""
    H200 = "H200"
    """NVIDIA H200, for development."""


class TablesPlace(StrEnum):
    """Place where the tables beside the layers are kept (the n-grams of V4.1)."""

    MEMORY = "memory"
    DISK = "disk"


class ModelSpec(SpecPart):
    """The model."""

    variant: Variant
    """`Nano`, `Flash` or `Pro`."""
    source: ModelSource
    """Source of the weights: exactly one of `nano`, `path`, `huggingFace`, `s3`, `http`, `sharedPath`."""
    staging: StagingSpec = StagingSpec()
    """Transfer of the weights to the machines, and their place there."""
    checkpoint: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)] | None = None
    """Checkpoint in the source if its name does not say, for example `V4-Flash-0731`. Default: from the name."""
    tables: TablesPlace = TablesPlace.MEMORY
    """`memory`, or `disk` for images whose engine reads the tables of V4.1's n-grams from disk as it needs them."""
    served_names: Annotated[tuple[_ServedName, ...], Field(min_length=1, max_length=8)] | None = None
    """Model names that the API answers to, at most 8. Default: the deployment's name."""


class TopologySpec(SpecPart):
    """Layout of one group over machines. All machines of a group are of one kind."""

    hardware: Hardware
    """`CPU`, `GB10` (DGX Spark) or `RTXPRO6000`; for development also `H100` or `H200`. `dsv4 up` and `dsv4 plan` fill
    in what this machine has where a file leaves it out."""
    nodes_per_group: Annotated[Count, Field(ge=1, le=16)] = 1
    """Machines of one group, at most 16."""
    devices_per_node: Annotated[Count, Field(ge=1, le=16)] = 1
    """Accelerators used on each machine; a DGX Spark has one. On CPU: engine processes."""
    tensor_parallel_size: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Ranks that share each layer. Default: all of a group's devices, divided by `pipelineParallelSize`."""
    pipeline_parallel_size: Annotated[Count, Field(ge=1, le=16)] = 1
    """Stages that the layers are divided over."""
    expert_parallel: StrictBool = False
    """Whole experts on each rank instead of a share of every expert: other traffic, the same memory."""
    nodes: Annotated[tuple[NodeName, ...], Field(max_length=512)] = ()
    """On a cluster: the nodes by name, in the order of groups and ranks. Default: dsv4 chooses among all nodes."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32), BeforeValidator(_without_nulls)] = Field(
        default_factory=dict
    )
    """On a cluster: labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """On a cluster: taints of nodes that members do not mind."""
    exclusive_nodes: StrictBool | None = None
    """On a cluster: no two members of any deployment on one node. Default: `true`, on CPU `false`."""

    @property
    def world_size(self) -> int:
        """Return the number of devices of one group."""
        return self.nodes_per_group * self.devices_per_node

    @property
    def tensor_parallel(self) -> int:
        """Return `tensor_parallel_size`, or its default."""
        return self.tensor_parallel_size or max(1, self.world_size // self.pipeline_parallel_size)

    @property
    def exclusive(self) -> bool:
        """Return `exclusive_nodes`, or its default."""
        return self.hardware is not Hardware.CPU if self.exclusive_nodes is None else self.exclusive_nodes


class BackoffSpec(SpecPart):
    """Waits between restarts: none before the first, then `base`, then twice as long each time, at most `max`."""

    base: Duration = 30.0
    """The wait before the second restart in a window."""
    max: Duration = 600.0
    """The longest wait."""


class RecoverySpec(SpecPart):
    """Settings of recovery: how often a group is brought back. Restarts of every kind spend from one budget."""

    max_restarts: Annotated[Count, Field(ge=0, le=100)] = 5
    """Restarts within `window`; 0 means never."""
    window: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """The time over which restarts are counted."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between restarts."""
    node_loss: NodeLossSpec = NodeLossSpec()
    """On a cluster: what happens to members on a node that is gone."""

    def policy(self) -> RecoveryPolicy:
        """Return these settings as the rule that the operator and the head's agent share."""
        return RecoveryPolicy(
            max_restarts=self.max_restarts,
            window_seconds=self.window,
            backoff_base_seconds=self.backoff.base,
            backoff_max_seconds=self.backoff.max,
        )


class RolloutStrategy(StrEnum):
    """Strategy by which groups come to a changed specification."""

    RECREATE = "Recreate"
    """All groups at once."""
    ROLLING_UPDATE = "RollingUpdate"
    """One after the other, so that the others go on answering."""


class RolloutSpec(SpecPart):
    """Settings of a rollout, by which groups come to a changed specification. Changes of `suspend`, `replicas`,
    `recovery`, `rollout` and `gateway` restart no group."""

    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """`RollingUpdate` (one after the other) or `Recreate` (all at once). A single group is ended and formed again
    either way."""
    max_unavailable: Annotated[Count, Field(ge=1, le=32)] = 1
    """With `RollingUpdate`: no group that answers is ended while so many are down, whatever for."""
    progress_deadline: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """Time in which a group has to answer with a changed specification, its recoveries included, before that counts as
    failed."""
    auto_rollback: StrictBool = True
    """Go back to the last specification that all groups answered with when a changed one fails: no answer within
    `progressDeadline`, a cause that trying again cannot mend, or recovery given up. It is not tried again until it
    changes."""


class DeploymentSpec(SpecPart):
    """Specification of a deployment: what to run, where, and how hard to keep it running."""

    suspend: StrictBool = False
    """Stop everything and keep the weights; `false` starts it again."""
    backend: Annotated[str, Matches(r"[A-Za-z][A-Za-z0-9]*", "is not a backend; write for example Pods", 63)] = (
        DEFAULT_BACKEND
    )
    """On a cluster: what makes and ends the members, one of the operator's backends; `Pods` are pods of its own. It
    cannot change. `dsv4 up` runs processes of this machine, whatever is written here."""
    replicas: Annotated[Count, Field(ge=0, le=32)] = 1
    """Groups, each an independent engine with its own copy of the model."""
    model: ModelSpec
    """The model and its weights."""
    topology: TopologySpec
    """The machines of one group."""
    engine: EngineSpec = EngineSpec()
    """vLLM."""
    network: NetworkSpec = NetworkSpec()
    """Ports, and the fabric between the machines."""
    recovery: RecoverySpec = RecoverySpec()
    """Restarts of a group, and their limits."""
    rollout: RolloutSpec = RolloutSpec()
    """Replacement of groups after a change of the specification."""
    gateway: GatewaySpec = GatewaySpec()
    """The HTTP front of every group: it keeps requests while the engine is away."""
    storage: StorageSpec = StorageSpec()
    """On a cluster: where members keep weights, compiled kernels and evidence."""

    @property
    def network_mode(self) -> NetworkMode:
        """Return `network.mode`, or its default."""
        if self.network.mode is not None:
            return self.network.mode
        fabric = self.topology.hardware is not Hardware.CPU and self.topology.nodes_per_group > 1
        return NetworkMode.HOST_NETWORK if fabric else NetworkMode.POD_NETWORK
