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
    ObjectName,
    SchedulerSpec,
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
    f"{Op.MOE}={PROVIDERS[Op.MOE][1]}; operations: {', '.join(Op)}",
    512,
)
_FLAG = Matches(r"--[a-z0-9][a-z0-9-]*", "is not a flag; write for example --engram-config", 128)
_FORMAT = Matches(r"[a-z0-9_]+", "is not a load format; write for example instanttensor", 64)
_Word = Annotated[str, Matches(rf"[^{CONTROL}]*", "has a control character; remove it", 8192, shown=r"")]
"""Text for the engine, which may contain line breaks. It may be a secret, so messages omit it."""


class Executor(StrEnum):
    """Mechanism by which vLLM starts its workers and communicates with them."""

    RAY_V2 = "RayV2"
    """Ray actors and message queues."""
    RAY_LEGACY = "RayLegacy"
    """Ray's compiled graphs; only in images up to vLLM 0.32."""
    MP = "MP"
    """Processes of vLLM, without Ray; on each machine of a group dsv4 starts its own."""


class CudagraphMode(StrEnum):
    """Part of a step that is replayed from a recorded CUDA graph."""

    AUTO = "Auto"
    """Mode that is known to work with the machines and the image."""
    NONE = "None"
    """Every kernel is launched separately (`--enforce-eager`)."""
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
    """Draft method; the heads are part of the checkpoint."""

    NONE = "None"
    MTP = "MTP"
    """The multi-token prediction layer of the checkpoints of April 2026."""
    DSPARK = "DSpark"
    """The draft stages of the checkpoints since July 2026."""


class EnvVar(SpecPart):
    """One environment variable."""

    name: Annotated[str, _ENV_NAME]
    """Name of the variable. Variables that dsv4 sets itself are refused."""
    value: _Word
    """Value of the variable, in quotes if it looks like a number."""


class SpeculativeSpec(SpecPart):
    """Speculative decoding: drafts of several tokens, checked in one step."""

    method: SpeculativeMethod = SpeculativeMethod.NONE
    """`None`, `MTP` or `DSpark`; the checkpoint must support it."""
    tokens: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Tokens per draft. Default: the number for which the checkpoint's heads were trained."""


_Bound = Annotated[BoundedDuration, Between("1ms", "8760h", "2m")]


class EngineTimeouts(SpecPart):
    """Timeouts; each has its own failure cause."""

    staging: _Bound | None = None
    """For the staging of the weights on every machine. Default: from the size of the model."""
    formation: _Bound = 120.0
    """From the start of Ray until every member has joined."""
    load: _Bound | None = None
    """From the start of vLLM until it is healthy. Default: from the size of the model."""
    first_token: _Bound | None = None
    """For the checked completion that makes an engine ready. Default: `2m` on CPU, else a minute more than one step."""
    execute_model: _Bound | None = None
    """For one step of the engine, after which the engine fails. Default: `5m` on CPU, `15m` on accelerators, whose
    first steps may compile kernels."""
    drain: _Bound = 20.0
    """For the open requests of a healthy engine that is to end because of a change, a restart or a suspension: the
    engine accepts no new requests and finishes these. Also for each member, from the request to stop to the end of all
    its processes."""


class BuildSpec(SpecPart):
    """A build of vLLM that no image profile describes, by its differences from one. `dsv4 plan --from-log LOG
    --write-build FILE` writes it."""

    base: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)]
    """Image profile of the most similar build, for example `vllm-0.33`."""
    flags: Annotated[tuple[Annotated[str, _FLAG], ...], Field(max_length=64)] = ()
    """Further flags of the build, with any values."""
    variables: Annotated[tuple[Annotated[str, _ENV_NAME], ...], Field(max_length=64)] = ()
    """Further environment variables that the build reads, with any values."""
    load_formats: Annotated[tuple[Annotated[str, _FORMAT], ...], Field(max_length=16)] = ()
    """Load formats, the fastest first. Default: those of `base`."""
    kv_cache_dtypes: Annotated[tuple[KvCacheDtype, ...], Field(max_length=8)] = ()
    """Number formats of the KV cache. Default: those of `base`."""
    speculative: Annotated[tuple[SpeculativeMethod, ...], Field(max_length=4)] = ()
    """Draft methods. Default: those of `base`."""
    least_draft_tokens: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Shortest draft that the build accepts for `DSpark`. Default: that of `base`."""
    tensor_parallel_sizes: Annotated[tuple[Annotated[Count, Field(ge=1, le=16)], ...], Field(max_length=16)] = ()
    """Further tensor-parallel sizes, for which the build pads heads and groups."""
    weights_factor: Annotated[float, Field(ge=0.5, le=2, strict=True)] | None = None
    """Memory of the loaded weights over the bytes of their tensors. Default: that of `base`."""
    non_torch_gib: Annotated[float, Field(ge=-64, le=64, strict=True)] | None = None
    """Non-torch memory in vLLM's profile in GiB, which is negative if memory is released during it. Default: that of
    `base`."""


class EngineSpec(SpecPart):
    """vLLM: image, sizes, limits and further settings."""

    image: Annotated[str, _IMAGE] | None = None
    """Container image, by digest (`NAME@sha256:…`), because a tag can change. `dsv4 up` starts no container and uses
    the installed vLLM. Default on a cluster: the operator's `--runtime-image`."""
    image_pull_policy: ImagePullPolicy | None = None
    """On a cluster: `IfNotPresent`, `Always` or `Never`. Default: that of Kubernetes."""
    image_pull_secrets: Annotated[tuple[SecretName, ...], Field(max_length=8)] = ()
    """On a cluster: Secrets for pulling the image."""
    profile: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)] | None = None
    """Name of the image profile, for example `vllm-0.33`. Default: from `image` and hardware."""
    build: BuildSpec | None = None
    """A build that no image profile describes. Not with `profile`."""
    executor: Executor = Executor.RAY_V2
    """`RayV2`, `RayLegacy` (images up to vLLM 0.32) or `MP` (vLLM's own processes, without Ray)."""
    max_model_len: Annotated[Count, Field(ge=128, le=1_048_576)] | None = None
    """Maximum tokens of a request, prompt and completion together. Default: from the model and the machines."""
    max_num_seqs: Annotated[Count, Field(ge=1, le=512)] = 4
    """Requests that are processed concurrently; further ones wait."""
    max_num_batched_tokens: Annotated[Count, Field(ge=64, le=65_536)] = 2048
    """Tokens of one step, which bounds the memory of activations."""
    async_scheduling: StrictBool = True
    """Prepare the next step while one runs. Doubles the KV cache that every request reserves. Not on CPU, and not
    supported by `RayLegacy`."""
    gpu_memory_utilization: Annotated[float, Field(ge=0.1, le=0.99, strict=True)] | None = None
    """Share of a device's memory for the engine. Default: from the machine. Not with `kvCacheMemory`."""
    kv_cache_memory: Annotated[BoundedQuantity, Between("1Mi", "1Ei")] | None = None
    """Memory for the KV cache of each rank. Default: from the model and the machines."""
    allow_tight: StrictBool = False
    """Start on a cluster although the plan expects no room for one request of the greatest length, if the interval of
    its memory contains enough. Without it such a plan is refused."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Number format of the KV cache: `Auto`, `fp8`, `fp8_ds_mla`, `nvfp4_ds_mla`; depends on the image."""
    cudagraph_mode: CudagraphMode = CudagraphMode.AUTO
    """`Auto`, `None`, `Piecewise`, `Full`, `FullDecodeOnly` or `FullAndPiecewise`."""
    speculative: SpeculativeSpec = SpeculativeSpec()
    """Speculative decoding."""
    kernels: Annotated[str, _KERNELS] | None = None
    """Provider of the operations of a layer on accelerators: `off`, vLLM's own kernels; `auto`, selected by
    measurements on this card; or `moe=bundled,mla_decode=stock,…`, with `auto` for all operations that are not listed.
    Default: `auto` on GB10 and RTXPRO6000 with the released vLLM 0.32 or 0.33, `off` otherwise."""
    retain_weights: StrictBool = False
    """Whether the weights stay in the devices' memory when an engine ends, for the next one on the same agents."""
    extra_args: Annotated[tuple[_Word, ...], Field(max_length=64)] = ()
    """Further arguments for vLLM. Flags that dsv4 sets itself, and flags unknown to the image, are refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = ()
    """Further environment variables of every member. Unknown names of vLLM, Ray, NCCL and Triton are refused."""
    timeouts: EngineTimeouts = EngineTimeouts()
    """Timeouts of the steps of a start and of one step of the engine."""


_REPO = Matches(r"[\w.-]+/[\w.-]+", "is not a repository; write OWNER/NAME, for example deepseek-ai/DeepSeek-V4-Flash")
_COMMIT = Matches(
    r"[0-9a-f]{40}", "is not a commit; write all 40 hex digits, so that the weights cannot change", longest=40
)
# Rules of all S3-compatible stores; bucket names at AWS from before 2018 may differ.
_BUCKET = Matches(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "is not a bucket; write its name alone, 3 to 63 of a-z, 0-9, - and .", 63
)


class Precision(StrEnum):
    """Number formats of a generated checkpoint."""

    BF16 = "bf16"
    FP8 = "fp8"


class NanoSource(SpecPart):
    """A generated checkpoint: equal fields give equal bytes on every machine."""

    seed: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the random weights."""
    precision: Precision = Precision.BF16
    """`bf16`, or `fp8` for the formats of the real checkpoints (not on CPU)."""
    drafts: SpeculativeMethod = SpeculativeMethod.NONE
    """Layers for speculative decoding in the checkpoint, for `spec.engine.speculative.method`."""


class HuggingFaceSource(SpecPart):
    """A repository on a Hugging Face hub."""

    repo: Annotated[str, _REPO]
    """`OWNER/NAME`."""
    revision: Annotated[str, _COMMIT]
    """Commit, 40 hex digits: the weights of a branch could change under a running deployment."""
    endpoint: Url | None = None
    """URL of a mirror. Default: `HF_ENDPOINT` of the machine's environment, or the public hub."""
    secret_key_ref: SecretKeyRef | None = None
    """Access token. Default: none; with `dsv4 up` that of the hub's client, such as `HF_TOKEN`."""


class S3Source(SpecPart):
    """A prefix in a bucket of an S3-compatible store, preferably with a `SHA256SUMS` file."""

    bucket: Annotated[str, _BUCKET]
    """Name of the bucket."""
    prefix: Annotated[str, Matches(TEXT, "has a control character; remove it", 512)] = ""
    """Prefix of the checkpoint in the bucket, without a leading `/`."""
    endpoint: Url | None = None
    """URL of the store. Default: AWS."""
    region: (
        Annotated[str, Matches(r"[\w.-]*", "is not the name of a region; write for example us-east-1", 64)] | None
    ) = None
    """Region of the bucket. Default: `AWS_REGION`, else `us-east-1`."""
    secret_key_ref: SecretKeyRef | None = None
    """AWS credentials file with a section `[default]`. Default: the credentials that AWS programs use; without any,
    requests are not signed."""


class HttpSource(SpecPart):
    """A directory on a web server that contains a `SHA256SUMS` file."""

    url: Url
    """URL of the directory."""
    secret_key_ref: SecretKeyRef | None = None
    """Token, sent as `Authorization: Bearer`."""


class ModelSource(SpecPart):
    """Source of the weights: exactly one of the fields."""

    nano: NanoSource | None = None
    """Generated on every machine; only for the variant `Nano`."""
    path: AbsolutePath | None = None
    """Directory of the checkpoint on every machine, used in place. On a cluster: below a directory that the cluster's
    administrator allows, as `sharedPath`."""
    hugging_face: HuggingFaceSource | None = None
    """A Hugging Face repository, staged on every machine."""
    s3: S3Source | None = None
    """An S3-compatible store, staged on every machine."""
    http: HttpSource | None = None
    """A web server, staged on every machine."""
    shared_path: AbsolutePath | None = None
    """Directory of a shared file system that every machine has mounted; its files are copied to every machine."""

    @property
    def secret_key_ref(self) -> SecretKeyRef | None:
        """Return the `secretKeyRef` of the remote source; None if there is none."""
        remote = self.hugging_face or self.s3 or self.http
        return remote.secret_key_ref if remote is not None else None


class StagingSpec(SpecPart):
    """Staging of weights on the machines."""

    streams: Annotated[Count, Field(ge=1, le=64)] = 8
    """Files that a machine fetches concurrently."""
    bandwidth_limit: Annotated[BoundedQuantity, Between("64Ki", "1Ei")] | None = None
    """Bandwidth limit of a machine in bytes per second, for example `500M`. Default: no limit."""
    from_members: StrictBool = True
    """Machines fetch files from each other, so that the source sends each file once."""
    verify: Verify = Verify.MARKER
    """Check of verified files at a start: `Marker` compares size and time, `Full` reads them."""
    prefetch: StrictBool = True
    """Read the files into the page cache while the group forms."""
    page_cache: PageCache | None = None
    """`Warm`, or `Unified` for machines whose devices share the memory. Default: by `topology.hardware`."""


class ApiKeysSource(SpecPart):
    """Source of API keys."""

    secret_key_ref: SecretKeyRef
    """API keys, one per line."""


LOOPBACK = "127.0.0.1"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = Matches(
    rf"({_OCTET}[.]){{3}}{_OCTET}", "is not an IPv4 address; write that of the machine, such as 192.168.1.20", 15
)


class GatewaySpec(SpecPart):
    """Gateway of every group, which holds requests while the engine is unavailable."""

    hold_timeout: Duration = 600.0
    """Maximum time for which a request is held while the engine is unavailable; `0s`: requests are not held."""
    max_held_requests: Annotated[Count, Field(ge=0, le=100_000)] = 1024
    """Maximum number of held requests; further ones are refused with 503."""
    max_held_bytes: Quantity = 256 * 2**20
    """Maximum total size of held requests; further ones are refused with 503."""
    request_timeout: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """From the arrival of a request to the end of its answer. Clients may request less with `X-Request-Timeout`."""
    max_body_bytes: Annotated[BoundedQuantity, Between("1Ki", "1Gi")] = 64 * 2**20
    """Maximum size of a request body."""
    api_keys: ApiKeysSource | None = None
    """Accepted API keys. Default: no key is required."""
    listen: Annotated[str, _IPV4] = LOOPBACK
    """With `dsv4 up`: address at which the machine serves the API, of several machines the first one; `0.0.0.0`: all
    its addresses. Requires `apiKeys` unless it is `127.0.0.1`. On a cluster, a Service has the address."""
    drain: Duration = 300.0
    """Longest time for open requests after the termination of a gateway starts, also for those that wait for an engine.
    15 s with `dsv4 up`, and where no other gateway of the deployment answers."""


DEFAULT_BACKEND = "Pods"
KUBERAY_BACKEND = "KubeRay"
_ServedName = Annotated[
    str,
    Matches(
        rf"[^\s{SPACES}{CONTROL}-]([^{CONTROL}\t\n\r]*[^\s{SPACES}{CONTROL}])?",
        "is not a model name; write for example deepseek-v4-flash",
        253,
    ),
]


def _without_nulls(value: Any) -> Any:
    # API servers drop entries that are null.
    return {key: text for key, text in value.items() if text is not None} if isinstance(value, dict) else value


class Variant(StrEnum):
    """Variants of the model family."""

    NANO = "Nano"
    """A tiny model of the same architecture with random weights, for development and tests."""
    FLASH = "Flash"
    PRO = "Pro"


class Hardware(StrEnum):
    """Kinds of machines; a group is homogeneous."""

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
    """Location of the n-gram tables of V4.1."""

    MEMORY = "memory"
    DISK = "disk"


class ModelSpec(SpecPart):
    """The model."""

    variant: Variant
    """`Nano`, `Flash` or `Pro`."""
    source: ModelSource
    """Source of the weights: exactly one of `nano`, `path`, `huggingFace`, `s3`, `http`, `sharedPath`."""
    staging: StagingSpec = StagingSpec()
    """Transfer of the weights to the machines."""
    checkpoint: Annotated[str, Matches(TEXT, "has a control character; remove it", 64)] | None = None
    """Checkpoint, if the name of the source does not identify it, for example `V4-Flash-0731`. Default: from the
    name."""
    size: Annotated[BoundedQuantity, Between("1Gi", "1Ei")] | None = None
    """Bytes of all safetensors files together, if they differ from those of `checkpoint`: of a pruned or requantized
    one. The routed experts are planned with the difference. Files on this machine take precedence."""
    tables: TablesPlace = TablesPlace.MEMORY
    """`memory`, or `disk` for images whose engine reads the n-gram tables of V4.1 from disk on demand."""
    served_names: Annotated[tuple[_ServedName, ...], Field(min_length=1, max_length=8)] | None = None
    """Model names of the API, at most 8. Default: the deployment's name."""


class TopologySpec(SpecPart):
    """Layout of one group over machines, which are all of one kind."""

    hardware: Hardware
    """`CPU`, `GB10` (DGX Spark) or `RTXPRO6000`; for development also `H100` or `H200`. `dsv4 up` and `dsv4 plan` set a
    missing value from this machine."""
    nodes_per_group: Annotated[Count, Field(ge=1, le=16)] = 1
    """Machines of one group, at most 16."""
    devices_per_node: Annotated[Count, Field(ge=1, le=16)] = 1
    """Accelerators used on each machine; a DGX Spark has one. On CPU: engine processes."""
    tensor_parallel_size: Annotated[Count, Field(ge=1, le=16)] | None = None
    """Ranks that share each layer. Default: all of a group's devices, divided by `pipelineParallelSize`."""
    pipeline_parallel_size: Annotated[Count, Field(ge=1, le=16)] = 1
    """Pipeline stages of the layers."""
    expert_parallel: StrictBool = False
    """Whole experts on each rank instead of a share of every expert: different traffic, equal memory."""
    nodes: Annotated[tuple[NodeName, ...], Field(max_length=512)] = ()
    """On a cluster: names of the nodes, in the order of groups and ranks. Default: dsv4 chooses from all nodes."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32), BeforeValidator(_without_nulls)] = Field(
        default_factory=dict
    )
    """On a cluster: required labels of the nodes."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """On a cluster: tolerated taints of nodes."""
    topology_key: LabelKey | None = None
    """On a cluster: key of a node label, of which the nodes of each group have one value, such as `dsv4.dev/cabled`."""
    exclusive_nodes: StrictBool | None = None
    """On a cluster: at most one member of any deployment per node. Default: `true`, on CPU `false`."""
    resource_claim_template: ObjectName | None = None
    """On a cluster: ResourceClaimTemplate (`resource.k8s.io/v1`) of the namespace with the devices of one member, in
    place of `nvidia.com/gpu` of the device plugin."""
    scheduler: SchedulerSpec | None = None
    """On a cluster: the scheduler that chooses the nodes of each group. Default: dsv4 chooses them."""

    @property
    def world_size(self) -> int:
        """Return the number of devices of one group."""
        return self.nodes_per_group * self.devices_per_node

    @property
    def tensor_parallel(self) -> int:
        """Return `tensor_parallel_size`, or its default."""
        return (
            self.world_size // self.pipeline_parallel_size
            if self.tensor_parallel_size is None
            else self.tensor_parallel_size
        )

    @property
    def exclusive(self) -> bool:
        """Return `exclusive_nodes`, or its default."""
        return self.hardware is not Hardware.CPU if self.exclusive_nodes is None else self.exclusive_nodes


class BackoffSpec(SpecPart):
    """Backoff between restarts: none before the first, then `base`, doubled each time up to `max`."""

    base: Duration = 30.0
    """Wait before the second restart in a window."""
    max: Duration = 600.0
    """Longest wait."""


class RecoverySpec(SpecPart):
    """Recovery of groups. Restarts of every level use one budget."""

    max_restarts: Annotated[Count, Field(ge=0, le=100)] = 5
    """Restarts within `window`; 0: none."""
    window: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """Window in which restarts are counted."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between restarts."""
    node_loss: NodeLossSpec = NodeLossSpec()
    """On a cluster: handling of members on a lost node."""

    def policy(self) -> RecoveryPolicy:
        """Return these settings as the policy shared by the operator and the head's agent."""
        return RecoveryPolicy(
            max_restarts=self.max_restarts,
            window_seconds=self.window,
            backoff_base_seconds=self.backoff.base,
            backoff_max_seconds=self.backoff.max,
        )


MOST_REPLICAS = 32
"""Upper bound of `spec.replicas`."""


class RolloutStrategy(StrEnum):
    """Order in which groups change to a new specification."""

    RECREATE = "Recreate"
    """All groups at once."""
    ROLLING_UPDATE = "RollingUpdate"
    """One after the other; the other groups keep serving."""


class RolloutSpec(SpecPart):
    """Rollout of a changed specification. Changes of `suspend`, `replicas`, `recovery`, `rollout` and `gateway` restart
    no group."""

    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """`RollingUpdate` (one after the other) or `Recreate` (all at once); a single group always restarts."""
    max_unavailable: Annotated[Count, Field(ge=1, le=MOST_REPLICAS)] = 1
    """With `RollingUpdate`: a serving group is not ended while this many groups are down for any reason."""
    progress_deadline: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """Time in which a group must serve with a changed specification, including its recoveries. Time in a scheduler's
    queue and time in which the deployment is paused do not count."""
    auto_rollback: StrictBool = True
    """Roll back to the last specification with which all groups served if a changed one fails: not serving within
    `progressDeadline`, a non-retryable cause, or exhausted recovery. A failed specification is not tried again until it
    changes."""


class DeploymentSpec(SpecPart):
    """Desired state of a deployment."""

    suspend: StrictBool = False
    """Stop all groups and keep the weights; `false` starts them again."""
    backend: Annotated[str, Matches(r"[A-Za-z][A-Za-z0-9]*", "is not a backend; write for example Pods", 63)] = (
        DEFAULT_BACKEND
    )
    """On a cluster: the operator's backend for the members. `Pods` creates pods directly, `KubeRay` one `RayCluster` of
    KubeRay per incarnation, if the administrator allows it (`policy.backends`). Immutable. `dsv4 up` ignores it and
    runs processes of this machine."""
    replicas: Annotated[Count, Field(ge=0, le=MOST_REPLICAS)] = 1
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
    """Gateway of every group, which holds requests while the engine is unavailable."""
    storage: StorageSpec = StorageSpec()
    """On a cluster: storage for weights, compiled kernels and evidence."""

    @property
    def network_mode(self) -> NetworkMode:
        """Return `network.mode`, or its default."""
        return (
            (
                NetworkMode.HOST_NETWORK
                if self.topology.hardware != Hardware.CPU and self.topology.nodes_per_group > 1
                else NetworkMode.POD_NETWORK
            )
            if self.network.mode is None
            else self.network.mode
        )
