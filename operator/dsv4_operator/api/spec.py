"""What a user asks for: the specification of a `DSV4Deployment`.

Every field is read: by the planner, the lifecycle or the command line. Rules that span fields are in `rules`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StrictBool

from dsv4_operator.api.values import Duration, Quantity, quoted
from dsv4_runtime.contract import Document, RecoveryPolicy

Count = Annotated[int, Field(strict=True)]
"""A whole number; text and floats are refused instead of converted."""

PortNumber = Annotated[Count, Field(ge=1024, le=65535)]

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Variant(StrEnum):
    """The members of the model family."""

    NANO = "Nano"
    """A tiny model of the same architecture with random weights, for development and tests on CPU."""
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


class Precision(StrEnum):
    """Number formats of a made checkpoint."""

    BF16 = "bf16"
    FP8 = "fp8"


def _env_name(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise ValueError(f"{quoted(value)} is not the name of an environment variable; use letters, digits and _")
    return value


def _repo(value: str) -> str:
    if not _REPO.fullmatch(value):
        raise ValueError(
            f"{quoted(value)} is not a repository; write OWNER/NAME, for example deepseek-ai/DeepSeek-V4-Flash"
        )
    return value


def _commit(value: str) -> str:
    if not _COMMIT.fullmatch(value):
        raise ValueError(f"{quoted(value)} is not a commit; write all 40 hex digits, so that the weights cannot change")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise ValueError(f"{quoted(value)} is not an absolute path; begin it with /")
    return value


class SpecPart(Document):
    """A part of the specification."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class NanoSource(SpecPart):
    """A checkpoint made on the spot: the same seed and precision give the same bytes on every machine."""

    seed: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the random weights."""
    precision: Precision = Precision.BF16
    """`bf16`, or `fp8` for the formats of the real checkpoints (not on CPU)."""


class HuggingFaceSource(SpecPart):
    """A repository on the Hugging Face hub."""

    repo: Annotated[str, AfterValidator(_repo)]
    """`OWNER/NAME`."""
    revision: Annotated[str, AfterValidator(_commit)]
    """The commit, 40 hex digits: a branch name would let the weights change under a running deployment."""


class ModelSource(SpecPart):
    """Where the weights come from: exactly one of the fields."""

    nano: NanoSource | None = None
    """Made on the spot; only for the variant `Nano`."""
    path: Annotated[str, AfterValidator(_absolute)] | None = None
    """A directory that has the checkpoint, on every machine."""
    hugging_face: HuggingFaceSource | None = None
    """Downloaded once to every machine."""


class ModelSpec(SpecPart):
    """The model."""

    variant: Variant
    """`Nano`, `Flash` or `Pro`."""
    source: ModelSource
    """Where the weights come from: exactly one of `nano`, `path`, `huggingFace`."""
    served_names: Annotated[tuple[str, ...], Field(min_length=1, max_length=8)] | None = None
    """Model names that the API answers to, at most 8. Default: the deployment's name."""


class TopologySpec(SpecPart):
    """How one group is laid out over machines. All machines of a group are of one kind."""

    hardware: Hardware
    """`CPU`, `GB10` (DGX Spark) or `RTXPRO6000`."""
    nodes_per_group: Annotated[Count, Field(ge=1, le=16)] = 1
    """Machines of one group, at most 16."""
    devices_per_node: Annotated[Count, Field(ge=1, le=8)] = 1
    """Accelerators used on each machine; a DGX Spark has one. On CPU: engine processes."""
    tensor_parallel_size: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Ranks that share each layer. Default: all of a group's devices, divided by `pipelineParallelSize`."""
    pipeline_parallel_size: Annotated[Count, Field(ge=1, le=16)] = 1
    """Stages that the layers are divided over."""

    @property
    def world_size(self) -> int:
        """Devices of one group."""
        return self.nodes_per_group * self.devices_per_node

    @property
    def tensor_parallel(self) -> int:
        """`tensor_parallel_size`, or its default."""
        return self.tensor_parallel_size or max(1, self.world_size // self.pipeline_parallel_size)


class EnvVar(SpecPart):
    """One environment variable."""

    name: Annotated[str, AfterValidator(_env_name)]
    """Its name. Those that dsv4 sets itself are refused."""
    value: str
    """Its value, in quotes if it looks like a number."""


class EngineTimeouts(SpecPart):
    """Bounds; passing one is a failure with a cause of its own."""

    staging: Duration | None = None
    """For the weights to be in place on every machine. Default: from the size of the model."""
    formation: Duration = 120.0
    """From the start of Ray until every member has joined."""
    load: Duration | None = None
    """From the start of vLLM until it answers. Default: from the size of the model."""
    first_token: Duration = 120.0
    """For the checked completion that makes an engine ready."""
    execute_model: Duration = 300.0
    """For one step of the engine; the engine gives up after it."""
    drain: Duration = 20.0
    """From the request to stop until everything has ended."""


class EngineSpec(SpecPart):
    """vLLM: sizes, limits, and what else to hand to it."""

    max_model_len: Annotated[Count, Field(ge=128, le=1_048_576)] | None = None
    """Longest request in tokens, prompt and answer together. Default: from the model and the machines."""
    max_num_seqs: Annotated[Count, Field(ge=1, le=512)] = 4
    """Requests that are computed at the same time; further ones wait."""
    max_num_batched_tokens: Annotated[Count, Field(ge=64, le=65_536)] = 2048
    """Tokens of one step, which bounds the memory of activations."""
    gpu_memory_utilization: Annotated[float, Field(ge=0.1, le=0.97, strict=True)] | None = None
    """Share of a device's memory that the engine may take. Not together with `kvCacheMemory`; not on CPU."""
    kv_cache_memory: Annotated[Quantity, Field(ge=2**20)] | None = None
    """Memory for the KV cache of each rank. Default: from the model and the machines."""
    extra_args: tuple[str, ...] = ()
    """Further command line arguments for vLLM. Flags that dsv4 sets itself are refused."""
    env: tuple[EnvVar, ...] = ()
    """Further environment variables of every member."""
    timeouts: EngineTimeouts = EngineTimeouts()
    """Bounds for the steps of a start and for one step of the engine."""


class PortsSpec(SpecPart):
    """The ports under which a group is reached."""

    api: PortNumber = 8000
    """The OpenAI-compatible API."""
    dashboard: PortNumber = 8265
    """The Ray dashboard."""


class NetworkSpec(SpecPart):
    """How a group is reached."""

    ports: PortsSpec = PortsSpec()
    """The ports under which a group is reached."""


class BackoffSpec(SpecPart):
    """Waits between restarts: none before the first, then `base`, then twice as long each time, at most `max`."""

    base: Duration = 30.0
    """The wait before the second restart in a window."""
    max: Duration = 600.0
    """The longest wait."""


class RecoverySpec(SpecPart):
    """How often a group is brought back. Restarts of every kind spend from one budget."""

    max_restarts: Annotated[Count, Field(ge=0, le=100)] = 5
    """Restarts within `window`; 0 means never."""
    window: Duration = 3600.0
    """The time over which restarts are counted."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between restarts."""

    def policy(self) -> RecoveryPolicy:
        """The same as the rule that the operator and the head's agent share."""
        return RecoveryPolicy(
            max_restarts=self.max_restarts,
            window_seconds=self.window,
            backoff_base_seconds=self.backoff.base,
            backoff_max_seconds=self.backoff.max,
        )


class DeploymentSpec(SpecPart):
    """What to run, where, and how hard to keep it running."""

    suspend: StrictBool = False
    """Stop everything and keep the weights; `false` starts it again."""
    replicas: Annotated[Count, Field(ge=0, le=32)] = 1
    """Groups, each an independent engine with its own copy of the model."""
    model: ModelSpec
    """The model and its weights."""
    topology: TopologySpec
    """The machines of one group."""
    engine: EngineSpec = EngineSpec()
    """vLLM."""
    network: NetworkSpec = NetworkSpec()
    """Ports."""
    recovery: RecoverySpec = RecoverySpec()
    """How often a group is brought back."""
