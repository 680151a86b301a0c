"""Status of a member as its agent reports it: phases, verdicts and their causes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from dsv4_runtime.contract.base import Report
from dsv4_runtime.contract.kernels import KernelStatus


class Phase(StrEnum):
    """Phases of a member's life, in this order; the last four can follow any other."""

    PREFLIGHT = "Preflight"
    STAGING = "Staging"
    JOINING = "Joining"
    LOADING = "Loading"
    WARMING = "Warming"
    SERVING = "Serving"
    RESTARTING = "Restarting"
    """Level 1: the engine is being restarted in place; Ray and the member stay."""
    FAILED = "Failed"
    DRAINING = "Draining"
    STOPPED = "Stopped"


class Cause(StrEnum):
    """Cause of the death of an engine or a member. Closed: a new cause is a change of this contract."""

    ENGINE_CORE_DIED = "EngineCoreDied"
    API_SERVER_DIED = "APIServerDied"
    ENGINE_EXITED = "EngineExited"
    """vLLM ended by itself with exit code 0."""
    ENGINE_HUNG = "EngineHung"
    """Requests wait, no step ends, and nothing shows that one is being computed."""
    API_SERVER_HUNG = "APIServerHung"
    """vLLM's API process runs but answers nothing, and it is not busy."""
    RAY_WORKER_DIED = "RayWorkerDied"
    RAYLET_DIED = "RayletDied"
    RAYLET_HUNG = "RayletHung"
    """A member's raylet was stopped: Ray can neither start nor end processes there."""
    RAY_HEAD_LOST = "RayHeadLost"
    RAY_HEAD_HUNG = "RayHeadHung"
    """The GCS, Ray's head on rank 0, was stopped: no engine can be started."""
    MEMBER_LOST = "MemberLost"
    """A member's agent ended."""
    AGENT_HUNG = "AgentHung"
    """A member's agent does not answer, although its machine accepts connections."""
    NODE_LOST = "NodeLost"
    """A member can no longer be reached over the network, or its node is gone."""
    LINK_LOST = "LinkLost"
    """Two members that both run can no longer reach each other; neither node is at fault."""
    PLACEMENT_LOST = "PlacementLost"
    """The scheduler of `spec.topology.scheduler` removed members, or did not place all of them in time. Uses no
    restart."""
    PREFLIGHT_FAILED = "PreflightFailed"
    STAGING_FAILED = "StagingFailed"
    FORMATION_TIMEOUT = "FormationTimeout"
    WEIGHTS_CORRUPT = "WeightsCorrupt"
    """A file of the checkpoint differs from its source: the difference was found while the file was in use, or remains
    after it was fetched again."""
    DISK_FULL = "DiskFull"
    FABRIC_ERROR = "FabricError"
    """NCCL reported an error of a network device, of its address (GID) or of a peer."""
    FABRIC_DOWN = "FabricDown"
    """A fabric link that the plan counts on is down or cannot reach its peer."""
    NCCL_SOCKET_FALLBACK = "NCCLSocketFallback"
    """NCCL runs over TCP sockets although the fabric has RDMA."""
    NCCL_TIMEOUT = "NCCLTimeout"
    XID_ERROR = "XidError"
    """The GPU's driver reported an error that ends every program on it."""
    STARTUP_TIMEOUT = "StartupTimeout"
    CANARY_FAILED = "CanaryFailed"
    """The checked completion failed or was invalid."""
    ENGINE_WRONG = "EngineWrong"
    """A new engine gives wrong or changed answers although the files of its weights are right."""
    OUT_OF_MEMORY_HOST = "OutOfMemoryHost"
    """Memory of the node or of its container ran out, and the kernel ended a process."""
    OUT_OF_MEMORY_GPU = "OutOfMemoryGPU"
    """A GPU has no memory left for the engine: another program holds it, or the engine took more than there is."""
    KV_CACHE_TOO_SMALL = "KVCacheTooSmall"
    """The memory left for the KV cache does not hold one request of the greatest length."""
    RAY_MEMORY_KILL = "RayMemoryKill"
    """Ray's memory monitor ended a worker."""
    PROCESS_STUCK = "ProcessStuck"
    """A process of the engine outlives SIGKILL: it waits for a device in the kernel."""
    SHARED_MEMORY_FULL = "SharedMemoryFull"
    """Shared memory (/dev/shm) has no room for the engine's message queues."""
    PORT_CONFLICT = "PortConflict"
    CONFIG_ERROR = "ConfigError"
    """vLLM refused its arguments or its configuration."""
    KERNEL_MISSING = "KernelMissing"
    """The build has no kernel for the model's shapes or for the GPU."""
    MEMBER_MISSING = "MemberMissing"
    """A rank waited for another one that never joined."""
    PEER_TO_PEER_HANG = "PeerToPeerHang"
    """Copies between GPUs over PCIe never end: IOMMU or ACS redirect them."""
    PLUGIN_NOT_LOADED = "PluginNotLoaded"
    """vLLM could not load dsv4's plugin, and would serve without its patches and kernels."""
    UNKNOWN = "Unknown"

    @property
    def deterministic(self) -> bool:
        """Return whether a retry is useless: two of the same in a row end the recovery."""
        return self in _DETERMINISTIC


_DETERMINISTIC = frozenset(
    {
        Cause.CONFIG_ERROR,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.KERNEL_MISSING,
        Cause.PLUGIN_NOT_LOADED,
        Cause.PORT_CONFLICT,
        Cause.PREFLIGHT_FAILED,
        Cause.STAGING_FAILED,
        Cause.WEIGHTS_CORRUPT,
        Cause.ENGINE_WRONG,
        Cause.DISK_FULL,
    }
)


class Health(StrEnum):
    """Health in a verdict."""

    STARTING = "Starting"
    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    DEAD = "Dead"


RECENT_SECONDS = 3600.0
"""Age up to which metrics count a death."""


class Failure(Report):
    """One death: its cause, place, detection and recovery."""

    time: float
    """Unix time of the detection."""
    cause: Cause
    culprit_rank: int | None = None
    message: str
    """The first fatal line, or the observation; at most 1 KiB."""
    detected_by: str
    """Signal that detected it: `exit`, `process`, `peer`, `timeout`, `log`, `completion`, `preflight`, `staging`,
    `start`, `steps`, `api`, `link` or `gpu`."""
    generation: int | None = None
    """The engine generation that died; None if it was not an engine's death."""
    level: int | None = None
    """1: engine restart in place; 2: new incarnation; 3: given up. None until decided."""
    recover_seconds: float | None = None
    """From `time` until the next checked completion. None until then."""
    weights_doubted: bool | None = None
    """Whether damaged weights would explain it, although no file was found to be wrong; None: they would not. Two such
    of the same cause in a row end the recovery."""
    evidence: str | None = None
    """Directory on rank 0's node with the saved evidence. None without evidence."""


class Verdict(Report):
    """Verdict of the evidence about the engine; a dead one has a cause."""

    health: Health
    failure: Failure | None = None
    """Failure of a dead engine, or the one that a suspect engine is about to have."""


class Process(Report):
    """A process that the agent watches."""

    name: str
    """`agent`, `ray`, `raylet`, `gcs`, `api`, `engine-core`, `worker`, `executor` (vLLM without Ray on other ranks than
    0: parent of its workers there), or `standby`: it waits for the next engine."""
    pid: int


class ProcessSignals(Report):
    """Condition of a watched process."""

    name: str
    """Its role, as in `Process`."""
    pid: int
    state: str
    """The kernel's letter: `R` running or runnable, `S` sleeping, `D` waiting for a device, `T` stopped, `Z` ended."""
    cpu_seconds: float
    """Processor time of its threads and of the processes below it, such as compilers, including ended ones."""
    below_seconds: float = 0.0
    """The part of the processes below it."""


class GpuProcess(Report):
    """A process that has memory of a GPU."""

    pid: int
    """As the member counts; 0 if it is of another process namespace."""
    name: str = ""
    memory: int
    """Bytes."""
    own: bool = False
    """Whether it is the member's agent's child or a descendant."""


class GpuSignals(Report):
    """Condition of an accelerator; fields that its driver does not report stay None."""

    index: int
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    """The limit that the driver sets without a user's own."""
    sm_mhz: int | None = None
    """Clock of the multiprocessors."""
    sm_max_mhz: int | None = None
    celsius: int | None = None
    slowed_by: tuple[str, ...] = ()
    """The driver's reasons for a low clock: `clock setting`, `power cap`, `hardware slowdown`,
    `software thermal slowdown`, `hardware thermal slowdown`, `power brake`."""
    utilization: float | None = None
    """Share of the last moments in which it was busy, 0 to 1."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    """Bytes."""
    memory_retained: int | None = None
    """Bytes of weights that the agent keeps for the next engine, in an equal part for each of its GPUs."""
    processes: tuple[GpuProcess, ...] = ()
    """Processes with memory on it, as far as the driver reports them to this member."""
    xid: int | None = None
    """The latest error that the driver reported since the agent started."""


class Signals(Report):
    """Observations of a member's engine processes and node; input of the head's rules."""

    time: float
    """Seconds of the member's monotonic clock when it was sampled."""
    processes: tuple[ProcessSignals, ...] = ()
    memory_available: int | None = None
    """Bytes."""
    shm_free: int | None = None
    """Bytes free in /dev/shm."""
    oom_kills: int | None = None
    """Number of out-of-memory kills."""
    gpus: tuple[GpuSignals, ...] = ()
    gpus_age: float = 0.0
    """Seconds since this sample: the driver may answer late or never."""
    collectives: int | None = None
    """Collective operations that this member's engine worker has begun; None where nothing counts them."""
    idle: float | None = None
    """Seconds since this member's processes of the engine last used a processor, a disk or more memory, or started or
    ended one, such as a compiler; None: not measured."""
    stagnant: float | None = None
    """The same without the processor time of the engine's own processes, which may spin in vain."""
    silent: dict[int, float] = Field(default_factory=dict)
    """Rank to the seconds since its last sign of life at this member; ranks without one are missing."""


class WeightsProgress(Report):
    """Progress of an engine in reading its weights, from rank 0's log; values that are not logged are absent."""

    shards: int | None = None
    """Files that are read."""
    shards_total: int | None = None
    bytes_done: int | None = None
    """Bytes of tensors that the model has taken."""
    bytes_total: int | None = None
    """Bytes of all files."""
    bytes_per_second: int | None = None
    """In about the last second."""


class Progress(Report):
    """Progress of the present phase."""

    stage: str
    """In a few words, for people: `loading shards 2/4, 20.1/78.4 GB at 3.1 GB/s`."""
    percent: float | None = Field(default=None, ge=0, le=100)
    weights: WeightsProgress | None = None
    """While the engine loads them."""


class StartStep(Report):
    """Duration of one step of a start."""

    phase: Phase
    """Phase of the member."""
    step: str = ""
    """Step of the phase, such as `loading weights`; empty: the phase is not divided."""
    seconds: float
    """Duration in seconds."""


class RestartBudget(Report):
    """Restart budget of a group: at most `max_restarts` of any level within `window_seconds`."""

    max_restarts: int
    window_seconds: float
    restarts: tuple[float, ...] = ()
    """Unix times of the restarts before this incarnation, oldest first."""


class EngineStatus(Report):
    """Rank 0 only: the engine's life in this incarnation."""

    generation: int
    """Lives of the engine in this incarnation, the present one included; 0 before the first start."""
    ready_time: float | None = None
    """Unix time of this generation's first checked completion; None until then."""
    restarts: tuple[float, ...] = ()
    """Unix times of the level 1 restarts in this incarnation, oldest first."""
    budget: RestartBudget | None = None
    """The group's restart budget, from the plan."""
    weights_doubted: str | None = None
    """Reason to read the files of the weights again on every member before the next start; None: there is none."""
    failures: tuple[Failure, ...] = ()
    """The engine's deaths in this incarnation, oldest first, at most 20."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens, as this generation logged it; None until then."""
    kv_concurrency: float | None = None
    """Requests of the greatest length that fit into it at once, as logged."""
    kv_planned_tokens: int | None = None
    """Tokens that the plan expected in the place of `kv_cache_tokens`; None: nothing."""
    memory_of: str = ""
    """Model, image and machine that `memory` is of."""
    kernels: tuple[KernelStatus, ...] = ()
    """Providers of the operations of a layer, as this generation logged them; empty until then, and where all of them
    are vLLM's."""
    memory: dict[str, int] = Field(default_factory=dict)
    """Bytes by item of the memory plan by which this generation's log exceeds the plan; empty before that log."""


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


class DrainReport(Report):
    """Answer of an agent to `POST /v1/drain`."""

    over: bool
    """Whether the wait is over: no request is open, the bound has passed, or no engine serves on this member."""
    open: int | None = None
    """Running and waiting requests in vLLM's latest answer; None before the first answer."""


class AgentStatus(Report):
    """`GET /v1/status` of an agent."""

    deployment: str
    group: int
    incarnation: int
    rank: int
    node: str = ""
    """Machine of the member, as the plan names it; empty: the backend chose it."""
    phase: Phase
    phase_time: float
    """Unix time at which the phase began."""
    time: float
    """Unix time at which this was written, by the member's clock."""
    progress: Progress | None = None
    verdict: Verdict
    processes: tuple[Process, ...] = ()
    model_digest: str | None = None
    """Digest of all inputs of the answers, from the plan; None: not in the plan."""
    joined: bool = False
    """Whether this member's Ray node is part of the cluster."""
    warnings: tuple[str, ...] = ()
    """Conditions that make this member slow and stop nothing: a low clock, a power cap or a high temperature of a
    GPU."""
    broken: str | None = None
    """Missing prerequisite of another engine on this Ray node, such as a removed directory; None: there is none."""
    signals: Signals | None = None
    group_watts: float | None = None
    """Power of all GPUs of the group, in the head's answer to `GET /v1/watch`; None: a driver does not report it."""
    start: tuple[StartStep, ...] = ()
    """Finished steps of the present start, or of the latest one if the member serves, in order."""
    disk_bytes_per_second: float | None = None
    """Rate at which this member's disk gave the checkpoint when it was read ahead; None until that is known, and where
    all of it was in memory already."""
    weights_repaired: tuple[str, ...] = ()
    """Files of the checkpoint that differed from their source when this incarnation read them again, and were fetched
    again."""
    weights_place: str = ""
    """Identity of the checkpoint's directory, equal for members that read the same one; empty: not known."""
    weights_verified: bool | None = None
    """Whether the content of every file of the checkpoint was read since the present engine generation, or the first
    one's staging, and is right; False: there is no reference; None: not read to the end."""
    engine: EngineStatus | None = None
    fabric: FabricStatus | None = None


class MemoryUse(Report):
    """Memory of a member's machine, in bytes; what is not reported stays None."""

    available: int | None = None
    """Available to programs, from /proc/meminfo."""
    gpu_used: int | None = None
    """Of all its GPUs together."""
    gpu_total: int | None = None


class GroupReport(Report):
    """One line of `GET /v1/watch?group=1`: age and memory of the head's status of each member, and the statuses if they
    changed.

    Most lines contain no statuses and are cheap to parse.
    """

    ages: dict[int, float]
    """Rank to the seconds since its latest answer to the head; the head's own is 0, ranks without an answer are
    missing."""
    memory: dict[int, MemoryUse] = Field(default_factory=dict)
    """Rank to the memory in its latest sample."""
    members: tuple[AgentStatus, ...] | None = None
    """The latest status of every member that has answered, without `signals`; None: as in an earlier line."""
