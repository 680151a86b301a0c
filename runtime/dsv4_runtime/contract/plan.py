"""`GroupPlan`: all that the members of one incarnation need to know, written by the planner, read by the agents.

The plan is rendered once for an incarnation and never changed: other settings require another incarnation. It contains
no secret, only the names of files with secrets, so it may be printed, logged and kept as evidence.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dsv4_runtime.contract.base import Document
from dsv4_runtime.contract.recovery import RecoveryPolicy


class HealthPolicy(Document):
    """The thresholds of `dsv4_runtime.health.rules`."""

    gpus: bool = True
    """Whether the engine computes on GPUs: then their activity is the sign of life, and processor time is not."""
    stopped: float = Field(default=2.0, gt=0)
    """A process that is stopped (SIGSTOP) for this long is hung."""
    stall_min: float = Field(default=2.5, gt=0)
    """Without any sign of life no step may take less than this and be called hung."""
    stall_max: float = Field(default=60.0, gt=0)
    stall_factor: float = Field(default=4.0, ge=1)
    """In between, so many times the engine's slow (95th percentile) steps are allowed."""
    stall_round_trips: float = Field(default=50.0, ge=0)
    """And at least so many round trips between the members: a step makes many, and the link may have become slow."""
    busy_max: float = Field(default=90.0, gt=0)
    """An engine that is visibly busy may take this long for a step: compilation, autotuning."""
    life_share: float = Field(default=0.1, gt=0, le=1)
    """A process that uses at least this share of a core is alive."""
    canary_patience: float = Field(default=1.5, gt=0)
    """A canary that has waited less than this proves nothing."""
    canary_min: float = Field(default=3.0, gt=0)
    """Between canaries of an idle engine, at least."""
    canary_max: float = Field(default=30.0, gt=0)
    """Between canaries, at most; this is the pace while steps prove that the engine works."""
    canary_load: float = Field(default=0.1, gt=0, le=1)
    """Share of an idle engine's time that canaries may take."""
    answer_tolerance: float = Field(default=0.5, gt=0)
    """Nats by which the log probabilities of the known answer may differ from start to start. The default leaves room
    for accelerators, on which the order of sums may be another one in each start."""
    start_idle: float = Field(default=30.0, gt=0)
    """A start is hung if for this long its log shows no progress and its processes use no processor, disk or more
    memory."""
    api_silent: float = Field(default=4.0, gt=0)
    """An API process that answers nothing for so long, and does nothing either, is hung."""
    link_suspect: float = Field(default=2.0, gt=0)
    """A member that is silent for this long makes the engine suspect."""
    link_lost: float = Field(default=9.0, gt=0)
    """A member that is silent for this long is lost; one second remains until its loss must be reported."""
    agent_silent: float = Field(default=4.0, gt=0)
    """An agent that is silent for this long, although its machine accepts connections for half of it, is hung."""
    link_recover: float = Field(default=3.0, ge=0)
    """After a silence that ended, an engine has as long as the silence took and this for its connections to recover."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ordered = ("stall_min", "stall_max"), ("canary_min", "canary_max"), ("link_suspect", "link_lost")
        for low, high in (*ordered, ("agent_silent", "link_lost")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is more than {high} {getattr(self, high)}; lower it")
        return self


PLAN_VERSION: Literal["dsv4.dev/plan/v1"] = "dsv4.dev/plan/v1"

GidIndex = Annotated[int, Field(ge=0, le=255)]
AnyPort = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]

_SLOWEST_DISK = 20e6
_LONGEST_LOAD = 4.0
_LEAST_LONGEST_LOAD = 3600.0
"""Compilers have been active for 36 minutes of a first start."""


class Role(StrEnum):
    """Role of a member in its Ray cluster."""

    HEAD = "Head"
    WORKER = "Worker"


RAY_COMMAND = "KUBERAY_GEN_RAY_START_CMD"
"""Environment variable in which KubeRay passes the `ray start` of a member, made from the plan's."""

OUTSIDE_NETWORK = "DSV4_OUTSIDE_NETWORK"
"""Environment variable with the descriptor of the machine's network namespace, for an agent in a private network that
leads nowhere else. Its process that fetches weights enters it."""

LONGEST_RAY_ROOT = 39
"""Characters of Ray's `--temp-dir`: its longest socket, `/session_<time>_<pid>/sockets/dash_MetricsHead`, has 68 more,
and Linux allows 107 (`ray/_private/node.py`, `ray/dashboard/subprocesses/utils.py`, Ray 2.60)."""
RAY_LINKS = ".r"
"""Name of the directory with links that stand for directories of Ray whose paths are longer."""


class MemberPorts(Document):
    """The ports that a member listens on, all at its own address. Those of the head only are set on rank 0."""

    agent: AnyPort
    gcs: AnyPort | None = None
    """Of Ray's GCS. Without Ray, of the rendezvous of vLLM's members (`--master-port`)."""
    dashboard: AnyPort | None = None
    api: AnyPort | None = None


class MemberPlan(Document):
    """One node's share of a group."""

    rank: int = Field(ge=0)
    role: Role
    address: str
    """The address that this member's agent, Ray node and vLLM workers use; the fabric's on real machines. A name where
    addresses are only known later: the agents replace it (`dsv4_runtime.agent.main`)."""
    node: str | None = None
    """The machine that holds the member; None: the backend's choice."""
    devices: int = Field(ge=1)
    """Accelerators of this member, one for each rank of the engine on it."""
    gpus: tuple[str, ...] | None = None
    """UUIDs of these accelerators; None: all that the member sees are its own."""
    ports: MemberPorts
    ray_args: tuple[str, ...]
    """Arguments after `ray` on this member's command line; empty: the group has no Ray nodes."""
    engine_args: tuple[str, ...] = ()
    """Arguments of vLLM on this member alone, after those of `EnginePlan`. A member other than rank 0 that has any
    starts vLLM itself, without an API server; otherwise Ray starts its workers."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of this member alone; it wins over the group's."""


_NOT_OF_THE_MODEL = ("--host=", "--port=", "--kv-cache-memory-bytes=", "--gpu-memory-utilization=")
"""Engine arguments for addresses and amounts of memory, which no answer depends on."""


class EnginePlan(Document):
    """Plan by which the agents start vLLM."""

    args: tuple[str, ...]
    """Arguments after the program's name, equal on all members that start vLLM."""
    served_name: str
    """The model name in checked completions."""
    image: str | None = None
    """The container image that the specification names; None: it leaves it open."""
    retain_weights: bool = False
    """Whether every agent keeps the weights in the devices' memory between two engines."""


class WeightsSource(StrEnum):
    """Source of a member's weights."""

    NANO = "Nano"
    """Generated from a seed (`dsv4_runtime.nano`)."""
    PATH = "Path"
    """Already in `WeightsPlan.path`."""
    HUGGING_FACE = "HuggingFace"
    """A repository of a Hugging Face hub, at one commit."""
    S3 = "S3"
    """A prefix in a bucket of an S3-compatible store."""
    HTTP = "HTTP"
    """A directory on a web server that has a `SHA256SUMS`."""
    SHARED_PATH = "SharedPath"
    """A directory of a shared file system, copied to `WeightsPlan.path`."""


class Verify(StrEnum):
    """Verification, at a start, of files that were verified when they were staged."""

    MARKER = "Marker"
    """Compares size and modification time with those of the staging; reads no content."""
    FULL = "Full"
    """Computes every SHA-256 again."""


class PageCache(StrEnum):
    """Handling of the page cache around a load."""

    WARM = "Warm"
    """Devices have memory of their own: files are read ahead, as far as free memory allows."""
    UNIFIED = "Unified"
    """Devices share the memory (GB10): files leave the page cache before the load, are read ahead only as far as they
    fit beside the loaded copy, and leave it again when free memory runs low."""


class WeightsPlan(Document):
    """The checkpoint that every member must have before the group forms."""

    source: WeightsSource
    path: str
    """Path of the checkpoint on every member."""
    seed: int | None = None
    """Of a `Nano` checkpoint."""
    precision: str | None = None
    """Of a `Nano` checkpoint: `bf16` or `fp8`."""
    drafts: str | None = None
    """Of a `Nano` checkpoint: its layers for speculative decoding, `mtp` or `dspark`. None: it has none."""
    origin: str | None = None
    """`OWNER/NAME` of a `HuggingFace` repository, `s3://BUCKET/PREFIX`, a URL, or the shared directory."""
    revision: str | None = None
    """Of a `HuggingFace` repository: the commit."""
    endpoint: str | None = None
    """URL of the hub or of the store. None: the public hub, AWS."""
    region: str | None = None
    """Of an `S3` store."""
    shared: str | None = None
    """Directory, on every member, with files by their SHA-256 that are read where they are and never written."""
    credentials_file: str | None = None
    """File, on every member, with the secret: a token (`HuggingFace`, `HTTP`), or an AWS credentials file (`S3`)."""
    streams: int = Field(default=8, ge=1, le=64)
    """Files that a member fetches at the same time."""
    bandwidth_bytes: int | None = Field(default=None, ge=1)
    """Rate at which a member may fetch from the origin and from other members, bytes a second. None: no limit."""
    from_members: bool = True
    """Whether members fetch files from other members that have them."""
    verify: Verify = Verify.MARKER
    prefetch: bool = True
    """Whether the files are read into the page cache while Ray forms."""
    page_cache: PageCache = PageCache.WARM
    pipeline_stages: int = Field(default=1, ge=1)
    """Stages that the layers are divided over; a member reads ahead only the files of its own."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        staged = self.source not in (WeightsSource.NANO, WeightsSource.PATH)
        if staged and not self.origin:
            raise ValueError(f"weights.origin: is missing; a {self.source} source needs one")
        return self

    @property
    def identity(self) -> str:
        """Return the identity of the checkpoint, equal on all members: staged files of another identity are not
        used."""
        return " ".join(filter(None, (self.source.value, self.endpoint, self.origin, self.revision)))


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
    neighbours_only: bool = False
    """Whether NCCL connects each rank with the next and the previous one alone, so that no others need a common RDMA
    network: a patched NCCL with `NCCL_SWITCHLESS_RING_ONLY=1` on four or more machines in a ring without a switch."""
    mtu: Annotated[int, Field(ge=576, le=65_535)] | None = None
    """Size in bytes of an IP packet that every path must carry whole. None: the MTU of the interfaces at both ends."""
    min_bandwidth: Annotated[float, Field(gt=0)] | None = None
    """Bus bandwidth in bytes a second that an all-reduce over all members must reach. None: it is not measured."""
    seconds: Annotated[float, Field(gt=0)] = 60.0
    """Bound for the proof, from the moment at which all members have joined the network."""
    settings: dict[int, FabricSetting] = Field(default_factory=dict)
    """Rank to its manual settings; other ranks are discovered."""

    def requires_rdma_between(self, one: int, other: int, members: int) -> bool:
        """Return whether two of `members` ranks need a common RDMA network."""
        return self.require_rdma and (not self.neighbours_only or abs(one - other) in (1, members - 1))

    def setting(self, rank: int) -> FabricSetting:
        """Return the manual settings of `rank`."""
        return self.settings.get(rank, FabricSetting())


class Reading(Document):
    """Share of a bound that is for reading a checkpoint, as long as the disks are not measured."""

    size: int = Field(ge=0)
    """Bytes that a machine reads."""
    bytes_per_second: float = Field(gt=0)
    """The rate that is counted on."""
    slack: float = Field(ge=1)
    """Factor over the time that the reading takes by that."""


class Timeouts(Document):
    """Bounds in seconds; passing one is a failure with a cause of its own."""

    preflight: Seconds
    staging: Seconds
    formation: Seconds
    """From the start of Ray on a member until every member has joined."""
    load: Seconds
    """From the start of vLLM until it answers `/health`. A planned one ends no start that still progresses before four
    times as long."""
    reading: Reading | None = None
    """Share of `load` that is for reading; None: `load` was given, and no disk changes it."""
    first_token: Seconds
    drain: Seconds
    """From SIGTERM until all processes of the agent have ended. The time for open requests before that is an argument
    of `POST /v1/drain`."""

    def load_at(self, rate: float | None) -> float:
        """Return the load's bound if the slowest disk reads `rate` bytes a second: slower ones get the time they take.

        A rate below 20 MB/s counts as that, so that the bound stays one. None: no disk was measured.
        """
        if self.reading is None or rate is None or rate >= self.reading.bytes_per_second:
            return self.load
        slower = 1 / max(rate, _SLOWEST_DISK) - 1 / self.reading.bytes_per_second
        return self.load + self.reading.slack * self.reading.size * slower

    def longest_load(self, bound: float) -> float:
        """Return the seconds after which even a start that progresses has failed, with `bound` of `load_at`.

        A bound that was given is one for every start.
        """
        return bound if self.reading is None else max(_LONGEST_LOAD * bound, _LEAST_LONGEST_LOAD)


KV_CACHE = "KV cache"
"""Item of `Expectations.memory`."""


class Expectations(Document):
    """Conditions that must be true on every member before, and on the group after, a start."""

    world_size: int = Field(ge=1)
    """Ranks of the engine: the sum of all members' devices."""
    memory_bytes: int = Field(ge=0)
    """Free memory that a member needs at the start."""
    shm_bytes: int = Field(ge=0)
    """Free space that a member needs in /dev/shm."""
    gpu_bytes: int | None = Field(default=None, ge=0)
    """Free memory that the engine needs on each accelerator at its start; None: not planned, or the member's own."""
    ready_seconds: Seconds
    """Expected duration of a start; only shown to people, never a bound."""
    weights_bytes: int | None = Field(default=None, ge=0)
    """Memory that the weights should take on the rank that has most of them; None: not planned."""
    kv_tokens: int | None = Field(default=None, ge=0)
    """Size of the KV cache that the engine should log, in tokens; None: not planned."""
    kv_concurrency: float | None = Field(default=None, ge=0)
    """Requests of the greatest length that fit into it at once, as the engine should log it."""
    memory_of: str = ""
    """Model, image and machine that the memory was planned for; empty: not planned."""
    memory: dict[str, int] = Field(default_factory=dict)
    """Bytes of each item in the engine's budget on the rank that is limited most, and of the KV cache."""


class GroupPlan(Document):
    """Everything that the members of one incarnation of a group need to know."""

    version: Literal["dsv4.dev/plan/v1"] = PLAN_VERSION
    namespace: str
    deployment: str
    group: int = Field(ge=0)
    incarnation: int = Field(ge=1)
    members: tuple[MemberPlan, ...] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every member."""
    ray_token_file: str
    """Path of the file with the Ray cluster's authentication token, on every member: the incarnation's own."""
    engine: EnginePlan
    weights: WeightsPlan
    timeouts: Timeouts
    expectations: Expectations
    recovery: RecoveryPolicy
    health: HealthPolicy = Field(default_factory=HealthPolicy)
    """Bounds after which an engine is suspect or dead."""
    fabric: FabricPlan | None = None
    """Checks of the members' network; None: nothing is checked, nothing is set."""
    restarts: tuple[float, ...] = ()
    """Unix times of the restarts that are used of the group's budget, of every level, oldest first."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ranks = [member.rank for member in self.members]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"members: ranks must be 0..{len(ranks) - 1} in order, not {ranks}")
        heads = [member.rank for member in self.members if member.role is Role.HEAD]
        if heads != [0]:
            raise ValueError(f"members: rank 0 and no other is the head, not {heads}")
        ports = self.head.ports
        if None in (ports.gcs, ports.dashboard, ports.api):
            raise ValueError("members[0].ports: the head needs gcs, dashboard and api")
        devices = sum(member.devices for member in self.members)
        if devices != self.expectations.world_size:
            raise ValueError(
                f"expectations.worldSize: {self.expectations.world_size} ranks do not match {devices} devices"
            )
        return self

    @property
    def head(self) -> MemberPlan:
        """Return rank 0."""
        return self.members[0]

    @property
    def model_digest(self) -> str:
        """Return a digest of all inputs of the answers: the weights, the engine's arguments and the image.

        Groups and incarnations with the same digest give the same answers, so one can continue a stream of another.
        """
        weights = self.weights.model_dump(mode="json", include={"source", "seed", "precision", "origin", "revision"})
        path = None if self.weights.origin else self.weights.path
        args = [arg for arg in self.engine.args if not arg.startswith(_NOT_OF_THE_MODEL)]
        text = json.dumps([weights, path, args, self.engine.image], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def starts_vllm(self, rank: int) -> bool:
        """Return whether the agent of `rank` starts vLLM: rank 0 always does, the others if there is no Ray."""
        return rank == 0 or bool(self.members[rank].engine_args)

    def engine_args(self, rank: int) -> tuple[str, ...]:
        """Return all arguments of vLLM on `rank`."""
        return (*self.engine.args, *self.members[rank].engine_args)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment that the plan gives to `rank`: the group's, then the member's own."""
        return {**self.env, **self.members[rank].env}
