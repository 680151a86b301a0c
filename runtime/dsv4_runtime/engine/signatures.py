"""Error messages of vLLM, Ray, NCCL, torch, Triton, FlashInfer and InstantTensor, and the cause that each one proves.

Each row has the pattern, the cause, the origin of the text and one example that is composed around it. The patterns
match the sentences that libraries print, not the names of their symbols. They have no nested repetition, so a match
takes linear time.

Read in the libraries: texts of vLLM 0.30 to 0.33, Ray 2.60, torch 2.13 (`c10d`), Triton 3.7 and NCCL (June 2026). From
public failure reports: InstantTensor's buffer size, the sparse MLA of FlashInfer, the kernel log. Not found in these
versions: NCCL's `Error while creating shared memory segment`, torch's `Heartbeat monitor timed out`, and of vLLM a
separate `No valid MLA attention backend` and `larger than the maximum number of tokens that can be stored in KV cache`.
Gone with vLLM 0.33: `Every node should have a unique IP address` and `Current node has no GPU available`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4_runtime.contract import Cause


@dataclass(frozen=True, slots=True)
class Signature:
    """One error text of a library."""

    pattern: re.Pattern[str]
    cause: Cause | None
    """None: an error that names no cause; its text is the only information."""
    source: str
    example: str
    consequence: bool = False
    """Whether the text usually follows another failure, which is named instead if the log has it."""
    waits: bool = False
    """Whether the text only reports a wait, which may still succeed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a failure according to log lines."""

    cause: Cause | None
    message: str
    """Error text without time and process, at most 1 KiB."""
    core_died: bool
    """Whether the log reports the end of EngineCore."""
    evidence: tuple[tuple[int, str], ...]
    """Numbers, from 1, and texts of the lines that prove it, the decisive one first."""


def _row(
    pattern: str, cause: Cause | None, source: str, example: str, *, consequence: bool = False, waits: bool = False
) -> Signature:
    return Signature(re.compile(pattern), cause, source, example, consequence, waits)


SIGNATURES: tuple[Signature, ...] = (
    # Configuration. vLLM refuses it each time.
    _row(
        r"(?:^|\W)(?:vllm|vllm serve|api_server\.py|serve\.py): error: |unrecognized arguments: |: invalid choice: ",
        Cause.CONFIG_ERROR,
        "argparse, of `vllm serve`",
        "vllm serve: error: unrecognized arguments: --kv-cache-dtyp fp8",
    ),
    _row(
        r"pydantic_core\._pydantic_core\.ValidationError|\d+ validation errors? for \w",
        Cause.CONFIG_ERROR,
        "pydantic, of vllm/config",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
    ),
    _row(
        r"is not a local folder and is not a valid model identifier|Cannot find any model weights with `"
        r"|There is no module or parameter named |Model architectures? \[.{1,200}\] (?:are|is) not supported"
        r"|Unknown quantization method: |Quantization method specified in the model config"
        r"|Cannot find the config file for ",
        Cause.CONFIG_ERROR,
        "vllm/model_executor/model_loader, vllm/config/model.py, transformers/utils/hub.py",
        "RuntimeError: Cannot find any model weights with `/models/flash`",
    ),
    _row(
        r"VLLM_PORT '.{1,200}' (?:must be a valid integer|appears to be a URI)"
        r"|World size \(\d{1,9}\) is larger than the number of available GPUs"
        r"|[Cc]urrent platform .{1,40} does not support ray"
        r"|Selected (?:MLA prefill )?backend \S{1,80} is not valid for this configuration"
        r"|moe_backend='?\w{1,40}'? is not supported for |no '\w{1,40}' kernel exists for"
        r"|is not a flashinfer moe_ep backend|Unknown (?:all2all|MLA prefill) backend: "
        r"|is not a DeepSeek V4(?:\.1)? attention backend",
        Cause.CONFIG_ERROR,
        "vllm/envs.py, vllm/config/parallel.py, vllm/platforms/cuda.py, vllm/model_executor/layers/fused_moe/oracle",
        "ValueError: VLLM_PORT 'tcp://10.96.12.7:8000' appears to be a URI. This may be caused by a Kubernetes service "
        "discovery issue",
    ),
    _row(
        r"Mismatched NCCL version detected|Multiple Ranks are using the same GPU|Duplicate GPU detected"
        r"|Version mismatch: The cluster was started with|Every node should have a unique IP address",
        Cause.CONFIG_ERROR,
        "vllm/v1/executor/ray_executor.py, NCCL init.cc, ray/_private/utils.py",
        "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids ['a', 'b'] and 1 IP",
    ),
    # The weights cannot be fetched, and the GPU is not there for this container or driver.
    _row(
        r"\b(?:LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|OfflineModeIsEnabled)\b|We couldn't connect to 'https://huggingface",
        Cause.STAGING_FAILED,
        "huggingface_hub/errors.py, transformers/utils/hub.py",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the files on the Hub",
    ),
    _row(
        r"No CUDA GPUs are available|Failed to infer device type|CUDA driver version is insufficient"
        r"|forward compatibility was attempted on non supported HW|unsupported display driver / cuda driver combination"
        r"|Found no NVIDIA driver on your system|invalid device ordinal",
        Cause.PREFLIGHT_FAILED,
        "cudaGetErrorString of CUDA 13, torch c10/cuda/CUDAFunctions.cpp, vllm/config/device.py",
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
    ),
    # Memory for the KV cache: the same numbers at each start.
    _row(
        r"KV cache is needed, which is larger than the available KV cache memory",
        Cause.KV_CACHE_TOO_SMALL,
        "vllm/v1/core/kv_cache_utils.py",
        "ValueError: To serve at least one request with the model's max seq len (1048576), 11.04 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (10.33 GiB).",
    ),
    _row(
        r"No available memory for the cache blocks|Available KV cache memory: -\d"
        r"|Cannot auto-fit max_model_len: not enough GPU memory"
        r"|larger than the maximum number of tokens that can be stored in KV cache",
        Cause.KV_CACHE_TOO_SMALL,
        "vllm/v1/core/kv_cache_utils.py, vllm/v1/worker/gpu_worker.py",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
    ),
    # Ports, disks, shared memory.
    _row(
        r"[Aa]ddress already in use|EADDRINUSE|Could not find open port after \d"
        r"|The server socket has failed to listen on any local network address",
        Cause.PORT_CONFLICT,
        "errno 98; torch c10d/socket.cpp; vllm/utils/network_utils.py",
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ),
    _row(
        r"^(?>.*?No space left on device).*(?:psm_|/dev/shm|shared memory)"
        r"|^(?>.*?(?:/dev/shm|shared memory)).*No space left on device"
        r"|Insufficient space in \S{1,200}(?: for .{1,100})?: [\d.]{1,20} MiB required"
        r"|unable to allocate shared memory\(shm\) for file|Error while creating shared memory segment",
        Cause.SHARED_MEMORY_FULL,
        "errno 28 in multiprocessing.shared_memory; vllm/distributed/device_communicators/shm_broadcast.py; NCCL "
        "misc/shmutils.cc; torch MapAllocator.cpp",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x8XhBw (size 9637888), error: No space "
        "left on device (28)",
    ),
    _row(
        r"No space left on device|Disk quota exceeded",
        Cause.DISK_FULL,
        "errno 28 and 122",
        "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'",
    ),
    # Memory of Ray, GPU and host, in this order: the texts of the later ones are parts of the earlier ones.
    _row(
        r"killed due to the node running low on memory|killed due to memory pressure \(OOM\)",
        Cause.RAY_MEMORY_KILL,
        "Ray raylet/worker_killing_policy",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    _row(
        r"Free memory on device (?:cuda|xpu|hip)|(?:C[Uu][Dd][Aa]|\b(?:cuda|cu)[A-Z]\w{1,40}).{0,80}out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Failed to CUDA (?:calloc|malloc|host alloc)|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Externally held weights on device|NVML_ERROR_INSUFFICIENT_",
        Cause.OUT_OF_MEMORY_GPU,
        "vllm/v1/worker/utils.py, torch CUDACachingAllocator.cpp, vllm csrc/cumem_allocator.cpp, triton driver.c, NCCL "
        "include/alloc.h, the CUDA driver",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94 GiB",
    ),
    _row(
        r"buffer_size \(\d{1,20} B\) exceeds device memory budget",
        Cause.OUT_OF_MEMORY_GPU,
        "instanttensor/_impl.py",
        "RuntimeError: buffer_size (1268776960 B) exceeds device memory budget (793399296 B)",
    ),
    _row(
        r"Out of memory: Killed process|oom-kill:constraint=|NCCL WARN Failed to malloc "
        r"|\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough)"
        r"|Failed to allocate host buffer|\bOutOfMemoryError\b|out of memory",
        Cause.OUT_OF_MEMORY_HOST,
        "errno 12; the kernel log; torch c10/core/CPUAllocator.cpp; InstantTensor csrc/loader_common.cpp",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ),
    # Faults of a GPU: the driver reports each one as an XID. NCCL's watchdog prints them too, as their consequence.
    _row(
        r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|uncorrectable (?:ECC|NVLink) error"
        r"|unspecified launch failure|misaligned address|an illegal instruction was encountered"
        r"|device-side assert triggered|CUDA error: hardware error|GPU has fallen off the bus"
        r"|CUDA error: (?:unrecoverable|device not ready|the launch timed out)|NVRM: Xid ",
        Cause.XID_ERROR,
        "cudaGetErrorString of CUDA 13; the kernel log",
        "[rank2]:[E802 22:07:03.844033572 ProcessGroupNCCL.cpp:2119] [PG ID 2 PG GUID 3 Rank 2] Process group watchdog "
        "thread terminated with exception: CUDA error: an illegal memory access was encountered",
    ),
    _row(
        r"IO_PAGE_FAULT|DMAR: \[DMA (?:Read|Write)",
        Cause.PEER_TO_PEER_HANG,
        "Linux drivers/iommu, in the kernel log",
        "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x23200000000 flags=0x0020]",
    ),
    # The build has no kernel for the model, its shapes, or the GPU.
    _row(
        r"[Nn]o (?:decode |prefill |cubin |compiled )?kernel (?:image |found )?(?:for this (?:shape|configuration)"
        r"|is available for execution on the device)|CUDA_ERROR_NO_BINARY_FOR_GPU|Failed to find a kernel that can"
        r" implement|No valid (?:CPU )?(?:MLA )?(?:attention|prefill) backend|No (?:\w{1,20} )?MoE backend supports"
        r"|out of resource: shared memory, Required|ptxas fatal|PTXAS error|PTX JIT compilation failed"
        r"|the provided PTX was compiled with an unsupported toolchain"
        r"|not (?:supported|implemented) (?:on|for) (?:this|your) (?:GPU|device|architecture|compute capability)"
        r"|is only supported on (?:SM|sm_?|(?:devices with )?compute capability|Hopper|Blackwell)"
        r"|is not supported for the current GPU\. Minimum capability|Head dimension \d{1,5} is not supported by MLA"
        r"|requires (?:an SM\d{2,3}-class GPU|Blackwell datacenter GPUs)"
        r"|(?:FlashInfer|DeepGEMM) (?:backend is|sparse MLA decode APIs are) not available",
        Cause.KERNEL_MISSING,
        "vllm/platforms/cuda.py, vllm/config/vllm.py, vllm/model_executor/kernels/linear, vllm/v1/attention/backends, "
        "vllm/utils/flashinfer.py, CUDA 13, triton/runtime/errors.py, FlashInfer",
        "RuntimeError: SM120 sparse-MLA has no decode kernel for this shape: num_heads=32 topk=1152",
    ),
    # Weights.
    _row(
        r"SafetensorError|Error while deserializing header|Following weights were not initialized from checkpoint"
        r"|Internal error: (?:Unchunked file size mismatch|Chunk alignment error)|size mismatch for \w",
        Cause.WEIGHTS_CORRUPT,
        "safetensors; vllm/model_executor/model_loader/default_loader.py; InstantTensor csrc/loader_common.cpp",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
    ),
    # The network: NCCL names its device, the address (GID) and the peer.
    _row(
        r"Call to ibv_(?!query_ece|set_ece)\w{1,40} failed"
        r"|NET/IB ?: .{0,80}async fatal event|NET/IB(?:/GIN)? ?: .{0,40}completion from peer"
        r"|NET/IB: (?:Fatal error\. Detected|The error is fatal)|Failed to initialize any NET plugin"
        r"|Detected mixed local (?:Coll)?Net device counts across ranks"
        r"|NET/IB ?: (?:Unable to (?:open|query)|Remote \w{1,20} device is incompatible|No IP interface found)"
        r"|Attempted to (?:connect|merge) incompatible devices",
        Cause.FABRIC_ERROR,
        "NCCL 2.30 misc/ibvwrap.cc, transport/net_ib",
        "spark1:454:604 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev "
        "roceP2p1s0f1:1, curr state INIT, next state RTR, local GID index 3, local GID ::",
    ),
    _row(
        r"No usable listening interface found|Bootstrap ?: no socket interface found|Message truncated : received"
        r"|No route to host|Network is unreachable",
        Cause.FABRIC_ERROR,
        "NCCL 2.30 bootstrap.cc; errno 101 and 113",
        "NCCL WARN Bootstrap : no socket interface found",
    ),
    # A member never joined: a store or a placement group waits for it.
    _row(
        r"Timed out after \d{1,9} seconds waiting for clients|TCP client failed to connect/validate to host"
        r"|The client socket has timed out after|wait timeout after \d{1,12}ms, keys: |Connect timeout \[",
        Cause.MEMBER_MISSING,
        "torch c10d/TCPStore.cpp, c10d/socket.cpp; Gloo",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    _row(
        r"Cannot provide a placement group |Not enough resources to allocate \d|Current node has no \w{1,10} available"
        r"|^(?>.*?ERROR).*exceeds the total number of available \w{1,10}s in the placement group",
        Cause.MEMBER_MISSING,
        "vllm/v1/executor/ray_utils.py",
        "ValueError: Cannot provide a placement group requiring 2 GPUs (placement_group_specs=[{'GPU': 1.0}]) within "
        "1800 seconds",
    ),
    _row(
        r"Waiting for creating a placement group|exceeds the total number of available \w{1,10}s in the"
        r" placement group",
        Cause.MEMBER_MISSING,
        "vllm/v1/executor/ray_utils.py",
        "(EngineCore pid=222) INFO 08-01 02:46:00 [ray_utils.py:214] Waiting for creating a placement group of specs "
        "for 10 seconds. specs=[{'node:10.0.0.1': 0.001, 'GPU': 1.0}, {'GPU': 1.0}].",
        consequence=True,
        waits=True,
    ),
    _row(
        r"Timed out waiting for (?:new )?engine core processes to start",
        Cause.STARTUP_TIMEOUT,
        "vllm/v1/engine/core_client.py",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight "
        "loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).",
        consequence=True,
    ),
    # Hangs. vLLM's executor and torch's watchdog end what does not answer.
    _row(
        r"RPC call to \w{1,60} timed out|\bRayChannelTimeoutError\b",
        Cause.ENGINE_HUNG,
        "vllm/v1/executor/multiproc_executor.py, ray/exceptions.py",
        "TimeoutError: RPC call to sample_tokens timed out.",
    ),
    _row(
        r"Watchdog caught collective operation timeout|Heartbeat monitor timed out|collective operation timed out"
        r"|^(?>.*?NCCL).*[Tt]imed? ?out",
        Cause.NCCL_TIMEOUT,
        "torch c10d/ProcessGroupNCCL.cpp; ncclGetErrorString of NCCL 2.30",
        "[rank1]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=88, OpType=ALLGATHER, Timeout(ms)=600000) ran for 600057 milliseconds before timing out.",
        consequence=True,
    ),
    _row(
        r"remote process exited or there was a network error|ncclRemoteError|Connection closed by remote peer"
        r"|Connection closed by peer \[|Connection was likely closed\. Did the remote server shutdown or crash",
        Cause.NCCL_TIMEOUT,
        "ncclGetErrorString of NCCL 2.30, NCCL misc/socket.cc, Gloo, torch c10d/TCPStore.cpp",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        consequence=True,
    ),
    # Ray.
    _row(
        r"Some Ray subprocesses exited unexpectedly|task's local raylet died|Raylet is terminated",
        Cause.RAYLET_DIED,
        "ray/exceptions.py, ray/_private/node.py",
        "ray.exceptions.LocalRayletDiedError: The task's local raylet died. Check raylet.out for more information.",
        consequence=True,
    ),
    _row(
        r"Failed to connect to GCS|GCS is (?:down|unreachable)|gcs_server\W.{0,40}exited",
        Cause.RAY_HEAD_LOST,
        "Ray gcs_client",
        "Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.",
        consequence=True,
    ),
    _row(
        r"has been marked dead because the detector has missed too many heartbeats"
        r"|health check failed due to missing too many heartbeats",
        Cause.NODE_LOST,
        "Ray gcs_node_manager",
        "The node with node id: 3f2a and address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        consequence=True,
    ),
    _row(
        r"(?:RayWorkerProc rank=.{1,200}?|Worker proc \S{1,80}) died unexpectedly|ActorDiedError|WorkerCrashedError"
        r"|[Aa]ctor died",
        Cause.RAY_WORKER_DIED,
        "vllm/v1/executor/ray_executor_v2.py, multiproc_executor.py, ray/exceptions.py",
        "RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
        consequence=True,
    ),
    # Anything else that is an error. Deaths that another process reports name no cause.
    _row(
        r"EngineDeadError|Engine core initialization failed|Worker failed with error|failed to start\.$"
        r"|died unexpectedly|EngineCore encountered a fatal error|[Tt]he above exception was the direct cause"
        r"|WorkerProc (?:hit an exception|failed)|Traceback \(most recent call last\)|unhandled (?:system|cuda) error",
        None,
        "vllm/v1/engine, vllm/v1/executor",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        consequence=True,
    ),
    _row(
        r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]{0,200}(?:Error|Exception)\b",
        None,
        "logging of vLLM and Ray; Python",
        "ValueError: DSpark currently requires uniform effective per-request target context lengths",
    ),
)

REMEDIES: dict[Cause, str] = {
    Cause.CONFIG_ERROR: "correct the argument, field or checkpoint that the message names",
    Cause.DISK_FULL: "free space on the disk of the named path",
    Cause.ENGINE_CORE_DIED: "search the issues of this vLLM build for the exception in the message",
    Cause.ENGINE_HUNG: "find the rank that stopped: check its GPU, its link, and a kernel that spins",
    Cause.FABRIC_ERROR: "remove NCCL_IB_GID_INDEX, and check the path with `dsv4 doctor --peer ADDRESS` on both sides",
    Cause.KERNEL_MISSING: "use a build for this GPU, or the bundled kernels (`spec.engine.kernels: auto`)",
    Cause.KV_CACHE_TOO_SMALL: "lower maxModelLen to the estimate of vLLM, or raise gpuMemoryUtilization",
    Cause.MEMBER_MISSING: "start the missing rank, and check that the machines reach each other on all ports",
    Cause.NCCL_TIMEOUT: "find the rank that stopped first: check its log, its GPU, its link",
    Cause.NODE_LOST: "check the machine and its links",
    Cause.OUT_OF_MEMORY_GPU: "end other programs on the GPU, drop the page cache, or lower gpuMemoryUtilization",
    Cause.OUT_OF_MEMORY_HOST: "end other programs on the machine, or raise the memory limit of the container",
    Cause.PEER_TO_PEER_HANG: "set NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce, or disable IOMMU and ACS; "
    "`sudo dsv4 doctor` tests the copies",
    Cause.PREFLIGHT_FAILED: "check `nvidia-smi` in the container, the driver's version, and CUDA_VISIBLE_DEVICES",
    Cause.PORT_CONFLICT: "end the program that has the port, or choose another port",
    Cause.RAY_HEAD_LOST: "check the log of Ray's head, and the link to its machine",
    Cause.RAY_MEMORY_KILL: "end other programs on the machine, or raise RAY_memory_usage_threshold",
    Cause.RAY_WORKER_DIED: "check the end of the worker's own log: the kernel may have ended it (`dmesg`)",
    Cause.RAYLET_DIED: "check the end of raylet.out on that machine",
    Cause.SHARED_MEMORY_FULL: "raise the size of /dev/shm (`--shm-size`, or an emptyDir with medium Memory)",
    Cause.STAGING_FAILED: "check the checkpoint's name and revision, the token and the network, or fetch it first",
    Cause.STARTUP_TIMEOUT: "raise VLLM_ENGINE_READY_TIMEOUT_S, and check the rate at which the disk reads the weights",
    Cause.WEIGHTS_CORRUPT: "fetch the named file again and compare its checksum",
    Cause.XID_ERROR: "search `dmesg` for the XID; with an illegal address, update or change the kernel provider",
}
"""Remedy of each cause that a log can prove, in one sentence."""

# Process, level, time and place before each line of vLLM's log.
_ORIGIN = re.compile(
    r"^(?:\([^()]{1,120}\) )?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [-\d]{4,10} [\d:.]{5,15} \[[^\]]{1,120}\] ?)?"
)
# In front of the lines: a container's name (Docker Compose), a pod, a time of `kubectl logs` or Docker, the journal.
_CARRIER = re.compile(
    r"^(?:[\w.-]{1,80} {0,20}\| ?|\[pod/[^\]]{1,200}\] ?|\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-][\d:]{4,6}) "
    r"|[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S{1,80} \S{1,80}\[\d{1,9}\]: )"
)
_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
_PYDANTIC = re.compile(r"\d+ validation errors? for \w")
_FRAME = re.compile(r"^\s+(?:File \"|\S|\^)|^Traceback |^\s*$|^\s*[~^]+\s*$")
_EXCEPTION = re.compile(r"^[\w.]{1,200}(?:Error|Exception)\b")
_P2P_CHANNEL = re.compile(r"NCCL INFO Channel .{1,80} via P2P/")
_FIRST_COLLECTIVE = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=[1-9],")
_LINE_LIMIT = 4096
_EVIDENCE = 5
_CORE_DIED = re.compile(
    r"EngineCore (?:encountered a fatal error|failed to start)|EngineDeadError|Engine core initialization failed"
    r"|[Ee]ngine core (?:proc .{1,80} died|exited) unexpectedly"
)


def match(line: str) -> Signature | None:
    """Return the first signature that matches a line; None: the line is no error."""
    return next((one for one in SIGNATURES if one.pattern.search(line)), None)


def diagnose(lines: Iterable[str]) -> Diagnosis | None:
    """Return the cause that log lines prove; None if no line is an error.

    The first line that proves a cause counts. Without one, the first exception of its own or text that usually follows
    another failure counts, whichever is earlier. Of errors without a cause the exception that ends the first traceback
    is the message.

    Args:
        lines: of logs of vLLM, Ray or NCCL, in order of time, with or without vLLM's prefixes.
    """
    found: list[tuple[int, str, Signature]] = []
    texts: list[str] = []
    peer_to_peer: tuple[int, str] | None = None
    core_died = False
    for number, line in enumerate(lines, 1):
        line = _ANSI.sub("", line)[:_LINE_LIMIT].rstrip()
        for _ in range(2):
            line = _CARRIER.sub("", line, count=1)
        text = _ORIGIN.sub("", line, count=1)
        texts.append(text)
        core_died = core_died or _CORE_DIED.search(text) is not None
        if peer_to_peer is None and _P2P_CHANNEL.search(text):
            peer_to_peer = number, text
        whole = line if text == line else f"{_level(line)}{text}"
        # No library begins a line with this: it is a note of a person.
        if text.startswith("# "):
            continue
        if not _FRAME.match(text) and (signature := match(whole)) is not None:
            found.append((number, text, signature))
    if not found:
        return None
    number, text, signature = min(found, key=lambda one: (_rank(one[2]), one[0]))
    cause, evidence = signature.cause, [(number, text)]
    if cause is Cause.NCCL_TIMEOUT and peer_to_peer is not None and _FIRST_COLLECTIVE.search(text):
        # The first collectives over PCIe never end where IOMMU or ACS redirect the copies (NVIDIA/nccl#2079).
        cause = Cause.PEER_TO_PEER_HANG
        evidence.append(peer_to_peer)
    message = text
    if _PYDANTIC.search(text):
        details = [part.strip() for part in texts[number : number + 8] if part.startswith(" ") or "rror" in part]
        message = " ".join([text, *details[:2]])
    elif cause is None and not _EXCEPTION.match(text) and (error := _exception(texts, number)) is not None:
        message = error[1]
        evidence.insert(0, error)
    others = [(at, said) for at, said, other in found if other.cause is not None and (at, said) not in evidence]
    return Diagnosis(cause, message[:1024], core_died, tuple([*evidence, *others][:_EVIDENCE]))


def _rank(signature: Signature) -> int:
    if signature.cause is None and signature.consequence:
        return 3
    if signature.waits:
        return 2
    return 1 if signature.cause is None or signature.consequence else 0


def _level(line: str) -> str:
    """Return the level of vLLM's prefix, which is part of an error's text for the last signature."""
    return "ERROR " if re.match(r"^(?:\([^()]{1,120}\) )?(?:ERROR|CRITICAL) ", line) else ""


def _exception(texts: list[str], number: int) -> tuple[int, str] | None:
    """Return number and text of the exception that ends the first traceback from line `number` on."""
    begun = False
    for index in range(number - 1, len(texts)):
        text = texts[index]
        if text.startswith("Traceback "):
            begun = True
        elif begun and not _FRAME.match(text):
            return index + 1, text
    return None
