"""Specification of a `DSV4Deployment`: model, engine, gateway, topology, recovery and rollout.

The planner, the lifecycle or the command line reads every field. Rules over several fields are in `rules`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from dsv4_operator.api.cluster import (
    ImagePullPolicy,
    LabelKey,
    LabelValue,
    NetworkMode,
    NetworkSpec,
    NodeLossSpec,
    NodeName,
    SecretKeyRef,
    SecretName,
    StorageSpec,
    Toleration,
)
from dsv4_operator.api.security import Url
from dsv4_operator.api.values import (
    CONTROL,
    SPACES,
    TEXT,
    AbsolutePath,
    Between,
    BoundedDuration,
    BoundedQuantity,
    Count,
    Duration,
    Matches,
    Quantity,
    SpecPart,
)
from dsv4_runtime.contract import PageCache, RecoveryPolicy, Verify
from dsv4_runtime.contract.kernels import PROVIDERS, Op

_ENV_NAME = Matches(
    r"[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable; use letters, digits and _", 256
)
_IMAGE = Matches(
    r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?", "is not the name of an image; write for example NAME@sha256:DIGEST"
)


_PAIR = "|".join(f"{op}=({'|'.join(providers)})" for op, providers in PROVIDERS.items())
_KERNELS = Matches(
    rf"|off|auto|({_PAIR})( *, *({_PAIR}))*",
    "is not a choice of kernels; write off, auto, or OPERATION=PROVIDER with commas, for example "
    f"{Op.MOE}={PROVIDERS[Op.MOE][-1]}; operations: {', '.join(Op)}",
    512,
)
_Word = Annotated[str, Matches(rf"[^{CONTROL}]*", "has a control character; remove it", 8192, shown=r"")]
"""Text that goes to the engine, which may have line breaks in it. It may be a secret, so no refusal shows it."""


class Executor(StrEnum):
    """Mechanism by which vLLM starts its workers and speaks to them."""

    RAY_V2 = "RayV2"
    """Ray actors and message queues."""
    RAY_LEGACY = "RayLegacy"
    """Ray's compiled graphs; only in images up to vLLM 0.32."""
    MP = "MP"
    """Processes of one machine."""


class CudagraphMode(StrEnum):
    """Part of a step that is replayed from a recorded graph."""

    AUTO = "Auto"
    """Backend that is known to work on the machines with the image."""
    NONE = "None"
    """Nothing: every kernel is launched by itself (`--enforce-eager`)."""
    PIECEWISE = "Piecewise"
    FULL = "Full"
    FULL_DECODE_ONLY = "FullDecodeOnly"
    FULL_AND_PIECEWISE = "FullAndPiecewise"


class KvCacheDtype(StrEnum):
    """Number formats of the KV cache."""

    AUTO = "Auto"
    """Type that the model needs: `fp8` on accelerators."""
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"


class SpeculativeMethod(StrEnum):
    """Method by which drafts are made; the heads are part of the checkpoint."""

    NONE = "None"
    MTP = "MTP"
    """The multi-token prediction layer of the checkpoints of April 2026."""
    DSPARK = "DSpark"
    """The draft stages of the checkpoints since July 2026."""


class EnvVar(SpecPart):
    """One environment variable."""

    name: Annotated[str, _ENV_NAME]
    """Its name. Those that dsv4 sets itself are refused."""
    value: _Word
    """Its value, in quotes if it looks like a number."""


class SpeculativeSpec(SpecPart):
    """Speculative decoding: drafts of several tokens, checked in one step."""

    method: SpeculativeMethod = SpeculativeMethod.NONE
    """`None`, `MTP` or `DSpark`; the checkpoint decides which of them it can do."""
    tokens: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Tokens of a draft. Default: what the checkpoint's heads were trained for."""


_Bound = Annotated[BoundedDuration, Between("1ms", "8760h", "2m")]


class EngineTimeouts(SpecPart):
    """Bounds; passing one is a failure with a cause of its own."""

    staging: _Bound | None = None
    """For the weights to be in place on every machine. Default: from the size of the model."""
    formation: _Bound = 120.0
    """From the start of Ray until every member has joined."""
    load: _Bound | None = None
    """From the start of vLLM until it answers. Default: from the size of the model."""
    first_token: _Bound | None = None
    """For the checked completion that makes an engine ready. Default: `2m` on CPU, else a minute more than one step."""
    execute_model: _Bound | None = None
    """For one step of the engine; the engine gives up after it. Default: `5m` on CPU, `15m` on accelerators, whose
    first steps may compile kernels."""
    drain: _Bound = 20.0
    """For requests that are open when a healthy engine is to end, by a change, a restart or a suspension: the engine
    takes no new ones and finishes these first. And once more for a member, from the request to stop until all of its
    processes have ended."""


class EngineSpec(SpecPart):
    """vLLM: sizes, limits, and what else to hand to it."""

    image: Annotated[str, _IMAGE] | None = None
    """The container image, by digest (`NAME@sha256:…`): a tag may mean another build tomorrow. `dsv4 up` starts no
    container and uses the vLLM beside it. Default on a cluster: the operator's own `--runtime-image`."""
    image_pull_policy: ImagePullPolicy | None = None
    """On a cluster: `IfNotPresent`, `Always` or `Never`. Default: that of Kubernetes."""
    image_pull_secrets: Annotated[tuple[SecretName, ...], Field(max_length=8)] = ()
    """On a cluster: Secrets that nodes need to fetch the image."""
    profile: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)] | None = None
    """Profile of the image, by its name, for example `vllm-0.33`. Default: from `image` and hardware."""
    executor: Executor = Executor.RAY_V2
    """`RayV2`, `RayLegacy` (images up to vLLM 0.32) or `MP` (groups of one machine)."""
    max_model_len: Annotated[Count, Field(ge=128, le=1_048_576)] | None = None
    """Longest request in tokens, prompt and answer together. Default: from the model and the machines."""
    max_num_seqs: Annotated[Count, Field(ge=1, le=512)] = 4
    """Requests that are computed at the same time; further ones wait."""
    max_num_batched_tokens: Annotated[Count, Field(ge=64, le=65_536)] = 2048
    """Tokens of one step, which bounds the memory of activations."""
    async_scheduling: StrictBool = True
    """Prepare the next step while one runs. It doubles the KV cache that every request reserves; not on CPU, and never
    with `RayLegacy`, which cannot."""
    gpu_memory_utilization: Annotated[float, Field(ge=0.1, le=0.99, strict=True)] | None = None
    """Share of a device's memory that the engine may take. Default: from the machine. Not with `kvCacheMemory`."""
    kv_cache_memory: Annotated[BoundedQuantity, Between("1Mi", "1Ei")] | None = None
    """Memory for the KV cache of each rank. Default: from the model and the machines."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Number format of the KV cache: `Auto`, `fp8`, `fp8_ds_mla`, `nvfp4_ds_mla`; images differ."""
    cudagraph_mode: CudagraphMode = CudagraphMode.AUTO
    """`Auto`, `None`, `Piecewise`, `Full`, `FullDecodeOnly` or `FullAndPiecewise`."""
    speculative: SpeculativeSpec = SpeculativeSpec()
    """Speculative decoding."""
    kernels: Annotated[str, _KERNELS] = "off"
    """Provider of the operations of a layer on accelerators: `off`, vLLM's own kernels; `auto`, by what each provider
    is seen to do on this card; or `moe=bundled,mla_decode=stock,…`, where what is not named is as in `auto`."""
    extra_args: Annotated[tuple[_Word, ...], Field(max_length=64)] = ()
    """Further command line arguments for vLLM. Flags that dsv4 sets itself, and flags that the image does not know, are
    refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = ()
    """Further environment variables of every member. Unknown names of vLLM, Ray, NCCL and Triton are refused."""
    timeouts: EngineTimeouts = EngineTimeouts()
    """Bounds for the steps of a start and for one step of the engine."""


_REPO = Matches(r"[\w.-]+/[\w.-]+", "is not a repository; write OWNER/NAME, for example deepseek-ai/DeepSeek-V4-Flash")
_COMMIT = Matches(
    r"[0-9a-f]{40}", "is not a commit; write all 40 hex digits, so that the weights cannot change", longest=40
)
# The rules that all S3-compatible stores share; the names that AWS gave out before 2018 may differ.
_BUCKET = Matches(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "is not a bucket; write its name alone, 3 to 63 of a-z, 0-9, - and .", 63
)


class Precision(StrEnum):
    """Number formats of a made checkpoint."""

    BF16 = "bf16"
    FP8 = "fp8"


class NanoSource(SpecPart):
    """A checkpoint made on the spot: the same fields give the same bytes on every machine."""

    seed: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the random weights."""
    precision: Precision = Precision.BF16
    """`bf16`, or `fp8` for the formats of the real checkpoints (not on CPU)."""
    drafts: SpeculativeMethod = SpeculativeMethod.NONE
    """Layers for speculative decoding that it brings; `spec.engine.speculative.method` uses them."""


class HuggingFaceSource(SpecPart):
    """A repository on a Hugging Face hub."""

    repo: Annotated[str, _REPO]
    """`OWNER/NAME`."""
    revision: Annotated[str, _COMMIT]
    """The commit, 40 hex digits: a branch name would let the weights change under a running deployment."""
    endpoint: Url | None = None
    """URL of a mirror. Default: `HF_ENDPOINT` of the machine's environment, or the public hub."""
    secret_key_ref: SecretKeyRef | None = None
    """An access token. Default: none; with `dsv4 up` what the hub's own client finds, such as `HF_TOKEN`."""


class S3Source(SpecPart):
    """A prefix in a bucket of an S3-compatible store, best with a `SHA256SUMS` beside the files."""

    bucket: Annotated[str, _BUCKET]
    """Its name."""
    prefix: Annotated[str, Matches(TEXT, "has a control character; remove it", 512)] = ""
    """Prefix of the checkpoint in the bucket, without a leading `/`."""
    endpoint: Url | None = None
    """URL of the store. Default: AWS."""
    region: (
        Annotated[str, Matches(r"[\w.-]*", "is not the name of a region; write for example us-east-1", 64)] | None
    ) = None
    """Region of the bucket. Default: `AWS_REGION`, else `us-east-1`."""
    secret_key_ref: SecretKeyRef | None = None
    """An AWS credentials file, of which the section `[default]` counts. Default: what AWS programs find; without any,
    the requests are not signed."""


class HttpSource(SpecPart):
    """A directory on a web server, with a `SHA256SUMS` in it."""

    url: Url
    """The directory's URL."""
    secret_key_ref: SecretKeyRef | None = None
    """A token, sent as `Authorization: Bearer`."""


class ModelSource(SpecPart):
    """Source of the weights: exactly one of the fields."""

    nano: NanoSource | None = None
    """Made on the spot; only for the variant `Nano`."""
    path: AbsolutePath | None = None
    """A directory that has the checkpoint, on every machine; used where it is. On a cluster: below a directory that
    the cluster's administrator allows, as `sharedPath`."""
    hugging_face: HuggingFaceSource | None = None
    """A Hugging Face repository, staged on every machine."""
    s3: S3Source | None = None
    """An S3-compatible store, staged on every machine."""
    http: HttpSource | None = None
    """A web server, staged on every machine."""
    shared_path: AbsolutePath | None = None
    """A directory of a shared file system that every machine has mounted; its files are copied to every machine."""

    @property
    def secret_key_ref(self) -> SecretKeyRef | None:
        """Return the `secretKeyRef` of whichever source it is."""
        remote = self.hugging_face or self.s3 or self.http
        return remote.secret_key_ref if remote is not None else None


class StagingSpec(SpecPart):
    """Staging of weights: how they come to the machines and are kept there."""

    streams: Annotated[Count, Field(ge=1, le=64)] = 8
    """Files that a machine fetches at the same time."""
    bandwidth_limit: Annotated[BoundedQuantity, Between("64Ki", "1Ei")] | None = None
    """The most that a machine fetches in a second, for example `500M`. Default: no limit."""
    from_members: StrictBool = True
    """Machines fetch from each other what one of them already has, so that the source is asked once."""
    verify: Verify = Verify.MARKER
    """Check at a start of files that were verified before: `Marker` compares size and time, `Full` reads them."""
    prefetch: StrictBool = True
    """Read the files into the page cache while the group forms."""
    page_cache: PageCache | None = None
    """`Warm`, or `Unified` for machines whose devices share the memory. Default: by `topology.hardware`."""


class ApiKeysSource(SpecPart):
    """Source of the keys of clients."""

    secret_key_ref: SecretKeyRef
    """Keys, one a line."""


class GatewaySpec(SpecPart):
    """The HTTP front of every group: it keeps requests while the engine is away."""

    hold_timeout: Duration = 600.0
    """Time for which a request waits for an engine that is away; `0s`: not at all."""
    max_held_requests: Annotated[Count, Field(ge=0, le=100_000)] = 1024
    """Requests that may wait at the same time; further ones are refused with 503."""
    max_held_bytes: Quantity = 256 * 2**20
    """Bodies of the requests that wait, together; further ones are refused with 503."""
    request_timeout: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """From the arrival of a request to the last byte of its answer. A client may ask for less: `X-Request-Timeout`."""
    max_body_bytes: Annotated[BoundedQuantity, Between("1Ki", "1Gi")] = 64 * 2**20
    """The longest body of a request."""
    api_keys: ApiKeysSource | None = None
    """Keys that clients must show one of. Default: anybody may ask."""
    drain: Duration = 15.0
    """Time that open requests get when the gateway ends; at most 15 s with `dsv4 up`."""


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
