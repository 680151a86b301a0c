"""Error messages of vLLM, Ray, NCCL, torch, Triton, FlashInfer and InstantTensor, and the cause that each one proves.

Each row has the pattern, the cause, the origin of the text and one example that is composed around it. The patterns
match the sentences that libraries print, not the names of their symbols. They have no nested repetition, so a match
takes linear time. A line that its program marks as a warning or less proves nothing, whatever it quotes.

Read in the libraries: texts of vLLM 0.30 to 0.33, Ray 2.60, torch 2.13 (`c10d`), Triton 3.7 and NCCL (June 2026). From
public failure reports: InstantTensor's buffer size, the sparse MLA of FlashInfer, assertions of DeepGEMM and CUTLASS,
compilers, the dynamic linker, the container runtime, the kernel log. Not found in these versions: NCCL's `Error while
creating shared memory segment`, torch's `Heartbeat monitor timed out`, and of vLLM a separate `No valid MLA attention
backend` and `larger than the maximum number of tokens that can be stored in KV cache`. Gone with vLLM 0.33: `Every node
should have a unique IP address` and `Current node has no GPU available`.
"""

from __future__ import annotations

import re
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
    any_level: bool = False
    """Whether a line of level INFO or WARNING proves it too."""
    remedy: str = ""
    """Remedy of this text, if it is more exact than that of its cause."""


SIGNAL = r"\*\*\* SIG\w{3,4} received |Fatal Python error: |Segfault encountered|Caught signal \d{1,2} \("


def row(
    pattern: str,
    cause: Cause | None,
    source: str,
    example: str,
    *,
    consequence: bool = False,
    waits: bool = False,
    any_level: bool = False,
    remedy: str = "",
) -> Signature:
    """Return the signature of an error text."""
    return Signature(re.compile(pattern), cause, source, example, consequence, waits, any_level, remedy)


SIGNATURES: tuple[Signature, ...] = (
    # Configuration. vLLM refuses it each time.
    row(
        r"(?:^|\W)(?:vllm|vllm serve|api_server\.py|serve\.py): error: |unrecognized arguments: |: invalid choice: ",
        Cause.CONFIG_ERROR,
        "argparse, of `vllm serve`",
        "vllm serve: error: unrecognized arguments: --kv-cache-dtyp fp8",
    ),
    row(
        r"pydantic_core\._pydantic_core\.ValidationError|\d+ validation errors? for \w",
        Cause.CONFIG_ERROR,
        "pydantic, of vllm/config",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
    ),
    row(
        r"is not a local folder and is not a valid model identifier|Cannot find any model weights with `"
        r"|There is no module or parameter named |Model architectures? \[.{1,200}\] (?:are|is) not supported"
        r"|Unknown quantization method: |Quantization method specified in the model config"
        r"|Cannot find the config file for ",
        Cause.CONFIG_ERROR,
        "vllm/model_executor/model_loader, vllm/config/model.py, transformers/utils/hub.py",
        "RuntimeError: Cannot find any model weights with `/models/flash`",
    ),
    row(
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
    row(
        r"ray\.exceptions\.AuthenticationError|no authentication token was found",
        Cause.CONFIG_ERROR,
        "ray/exceptions.py",
        "ray.exceptions.AuthenticationError: the token differs from that of the cluster",
        remedy="give the same token to all machines of Ray (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)",
    ),
    row(
        r"Mismatched NCCL version detected|Multiple Ranks are using the same GPU|Duplicate GPU detected"
        r"|Version mismatch: The cluster was started with|Every node should have a unique IP address",
        Cause.CONFIG_ERROR,
        "vllm/v1/executor/ray_executor.py, NCCL init.cc, ray/_private/utils.py",
        "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids ['a', 'b'] and 1 IP",
    ),
    row(
        r"User-specified max_model_len |must be divisible by tensor parallel size"
        r"|Error\b.{0,300}(?: is not| must be| must) divisible by |failed with error '.{0,200} must divisible by "
        r"|Bfloat16 is only supported on GPUs",
        Cause.CONFIG_ERROR,
        "vllm/config/model.py, vllm/model_executor/layers, vllm/platforms/cuda.py",
        "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3).",
    ),
    row(
        r"Workers disagree on supported KV cache layouts",
        Cause.CONFIG_ERROR,
        "vllm/v1/attention/backends/utils.py",
        "AssertionError: Workers disagree on supported KV cache layouts: [['BLHNC', 'BLNHC'], ['BLHNC']].",
        remedy="use fewer pipeline stages: each needs a layer with an indexer (compress_ratios 4)",
    ),
    row(
        r"Please pass the argument `trust_remote_code=True`|does not recognize this architecture"
        r"|Tokenizer class \S{1,100} does not exist|Couldn't instantiate the backend tokenizer"
        r"|invalid (?:tool call|reasoning) parser: |[Rr]easoning parser '?\S{1,60} not found"
        r"|chat template .{1,300} appears path-like",
        Cause.CONFIG_ERROR,
        "transformers models/auto and tokenization_utils_fast.py; vllm/entrypoints, vllm/tool_parsers, vllm/reasoning",
        "ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported.",
        remedy="use an image whose vLLM and Transformers know the model, or correct the named argument",
    ),
    row(
        r"^(?:ERROR )?KeyError: ['\"](?:[a-z_]{1,40}\.){0,4}layers\.\d|Attempted to load weight \(",
        Cause.CONFIG_ERROR,
        "vllm/model_executor/models, vllm/model_executor/model_loader/weight_utils.py",
        "KeyError: 'layers.0.mlp.experts.w13_bias'",
        remedy="use a build of vLLM that reads this checkpoint's quantization, or another checkpoint of the model",
    ),
    row(
        r"Repo id must (?:be|use) |Invalid repository ID or local directory|does not appear to have a file named "
        r"|No tokenizer file found"
        r"|config file at '.{1,300}' is not a valid JSON",
        Cause.CONFIG_ERROR,
        "huggingface_hub/utils/_validators.py, vllm/transformers_utils/config.py, transformers/utils/hub.py",
        "OSError: /models/flash does not appear to have a file named config.json.",
        remedy="check the model's path inside the container: the directory must be mounted and complete",
    ),
    row(
        r"Cannot assign requested address|Unable to find address for: ",
        Cause.CONFIG_ERROR,
        "errno 99; Gloo transport/tcp/device.cc",
        "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: ^lo",
        remedy="set --host, VLLM_HOST_IP and GLOO_SOCKET_IFNAME to an address and an interface of this machine",
    ),
    row(
        r"^(?:ERROR )?(?:yaml\.\w{1,40}\.\w{1,40}Error|(?:json\.decoder\.)?JSONDecodeError)\b",
        Cause.CONFIG_ERROR,
        "PyYAML, Python json",
        "yaml.scanner.ScannerError: while scanning for the next token",
        consequence=True,
        remedy="correct the syntax of the file or of the argument: a JSON argument needs quotes around it in the shell",
    ),
    # The weights cannot be fetched, and the GPU is not there for this container or driver.
    row(
        r"\b(?:LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|OfflineModeIsEnabled|HfHubHTTPError|LocalTokenNotFoundError)\b|We couldn't connect to 'https://huggingface"
        r"|CAS service error(?!.{0,200}No space)|trying to access a gated repo|Repository Not Found for url"
        r"|^(?:ERROR )?(?:httpx|httpcore)\.\w{1,40}: "
        r"|^(?:ERROR )?[\w.]{1,100}(?:Error|Timeout): "
        r".{0,40}HTTPSConnectionPool\(host='[\w.-]{0,60}(?:huggingface|hf)\b",
        Cause.STAGING_FAILED,
        "huggingface_hub/errors.py, transformers/utils/hub.py",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the files on the Hub",
    ),
    row(
        r"Failed to download (?:cubin|.{1,200} from https?://)",
        Cause.STAGING_FAILED,
        "FlashInfer jit/cubin_loader.py",
        "RuntimeError: Failed to download cubin from https://files.example/fmha.cubin",
        consequence=True,
        remedy="use an image that has the kernels of FlashInfer (flashinfer-cubin), or allow the download",
    ),
    row(
        r"thrown while requesting (?:HEAD|GET) https://",
        Cause.STAGING_FAILED,
        "huggingface_hub/utils/_http.py",
        "'[Errno 101] Network is down' thrown while requesting HEAD https://huggingface.co/m/resolve/main/config.json",
        waits=True,
    ),
    row(
        r"No CUDA GPUs are available|Failed to infer device type|CUDA driver version is insufficient"
        r"|driver/library version mismatch|Driver/library version mismatch|driver on your system is too old"
        r"|system not yet initialized|CUDA unknown error|CUDA error: initialization error"
        r"|CUDA driver initialization failed|no CUDA-capable device is detected|not compiled with CUDA enabled"
        r"|NVRM: API mismatch"
        r"|could not select device driver|NVIDIA-SMI has failed because|Failed to initialize NVML"
        r"|forward compatibility was attempted on non supported HW|unsupported display driver / cuda driver combination"
        r"|Found no NVIDIA driver on your system|invalid device ordinal",
        Cause.PREFLIGHT_FAILED,
        "cudaGetErrorString of CUDA 13, torch c10/cuda/CUDAFunctions.cpp, vllm/config/device.py",
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
    ),
    # Image, packages, compilers and limits of the container.
    row(
        r"ErrImagePull|ImagePullBackOff|Failed to pull image",
        Cause.PREFLIGHT_FAILED,
        "Kubernetes",
        'Failed to pull image "registry.example/vllm:none": not found',
        remedy="check the image's name, its architecture (arm64 for a Spark) and the pull secret",
    ),
    row(
        r"^(?:ERROR )?(?:ImportError|OSError): .{0,400}(?:cannot open shared object file|undefined symbol: "
        r"|version `\w{1,20}_[\d.]|cannot import name )|safe_open\S{0,40} got an unexpected keyword argument"
        r"|PackageNotFoundError: |RuntimeEnvSetupError: |version \(.{1,40}\) does not match |failed to open libnvrtc"
        r"|is required for a normal functioning of this module"
        r"|^(?:ERROR )?AttributeError: module '(?:flashinfer|instanttensor|triton|torch|deep_gemm|transformers|ray)\b",
        Cause.PREFLIGHT_FAILED,
        "the dynamic linker, Python, InstantTensor",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        remedy="the installed packages do not fit each other: use an image that was built as a whole, and compare the "
        "versions of torch, CUDA and the named library",
    ),
    row(
        r"^(?:ERROR )?(?:ModuleNotFoundError|ImportError): ",
        Cause.PREFLIGHT_FAILED,
        "Python",
        "ModuleNotFoundError: No module named 'instanttensor'",
        consequence=True,
        remedy="install the named package in the image, in the version that this vLLM requires",
    ),
    row(
        r"Could not find nvcc|Failed to find C compiler|fatal error: [\w./-]{1,80}\.(?:h|hpp|cuh): No such file"
        r"|Ninja is required|^(?:ERROR )?FileNotFoundError: .{0,40}'(?:ninja|nvcc|gcc)'",
        Cause.PREFLIGHT_FAILED,
        "FlashInfer jit/cpp_ext.py, triton/runtime/build.py, gcc, torch utils/cpp_extension.py",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
        remedy="kernels are compiled at the start: use an image with compiler, Python headers and the CUDA toolkit",
    ),
    row(
        r"PermissionError: \[Errno 13\]|Read-only file system",
        Cause.PREFLIGHT_FAILED,
        "errno 13 and 30",
        "PermissionError: [Errno 13] Permission denied: '/app/.cache/vllm'",
        remedy="let the container's user write to the named path, or put HOME and the caches on a writable volume",
    ),
    row(
        r"Too many open files|can't start new thread|pthread_create failed|Resource temporarily unavailable",
        Cause.PREFLIGHT_FAILED,
        "errno 24 and 11, Python threading, OpenBLAS",
        "OSError: [Errno 24] Too many open files",
        remedy="raise the container's limits of open files (`--ulimit nofile=1048576`) and processes (`--pids-limit`)",
    ),
    # Memory for the KV cache: the same numbers at each start.
    row(
        r"KV cache is needed, which is larger than the available KV cache memory",
        Cause.KV_CACHE_TOO_SMALL,
        "vllm/v1/core/kv_cache_utils.py",
        "ValueError: To serve at least one request with the model's max seq len (1048576), 11.04 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (10.33 GiB).",
    ),
    row(
        r"No available memory for the cache blocks|Available KV cache memory: -\d"
        r"|Cannot auto-fit max_model_len: not enough GPU memory"
        r"|larger than the maximum number of tokens that can be stored in KV cache",
        Cause.KV_CACHE_TOO_SMALL,
        "vllm/v1/core/kv_cache_utils.py, vllm/v1/worker/gpu_worker.py",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        any_level=True,
    ),
    # Ports, disks, shared memory.
    row(
        r"Ray is trying to start at \S{1,80} but is already running",
        Cause.PORT_CONFLICT,
        "ray/scripts/scripts.py",
        "ConnectionError: Ray is trying to start at 10.0.0.1:6379, but is already running at 10.0.0.1:6379.",
        remedy="end the old Ray of this machine (`ray stop --force`), or choose another port",
    ),
    row(
        r"[Aa]ddress already in use|EADDRINUSE|Could not find open port after \d"
        r"|The server socket has failed to listen on any local network address",
        Cause.PORT_CONFLICT,
        "errno 98; torch c10d/socket.cpp; vllm/utils/network_utils.py",
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ),
    row(
        r"^(?>.*?No space left on device).*(?:psm_|/dev/shm|shared memory)"
        r"|^(?>.*?(?:/dev/shm|shared memory)).*No space left on device"
        r"|Insufficient space in \S{1,200}(?: for .{1,100})?: [\d.]{1,20} MiB required"
        r"|unable to allocate shared memory\(shm\) for file|Error while (?:creating|attaching to) shared memory segment"
        r"|might be out of shared memory|workers are out of shared memory",
        Cause.SHARED_MEMORY_FULL,
        "errno 28 in multiprocessing.shared_memory; vllm/distributed/device_communicators/shm_broadcast.py; NCCL "
        "misc/shmutils.cc; torch MapAllocator.cpp",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x8XhBw (size 9637888), error: No space "
        "left on device (28)",
    ),
    row(
        r"No space left on device|Disk quota exceeded|low on resource: ephemeral-storage",
        Cause.DISK_FULL,
        "errno 28 and 122",
        "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'",
    ),
    # Memory of Ray, GPU and host, in this order: the texts of the later ones are parts of the earlier ones. Ray names
    # the error of another process in front of its traceback.
    row(
        r"RayTaskError\(\w{1,200}\): ray::",
        None,
        "ray/exceptions.py",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method() (pid=8, ip=10.0.0.2)",
        consequence=True,
    ),
    row(
        r"killed due to the node running low on memory|killed due to memory pressure \(OOM\)"
        r"|ray\.exceptions\.OutOfMemoryError|exceeds the memory usage threshold of",
        Cause.RAY_MEMORY_KILL,
        "Ray raylet/worker_killing_policy",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    row(
        r"\btorch(?:\.cuda)?\.OutOfMemoryError\b|Free memory on device (?:cuda|xpu|hip)"
        r"|(?:C[Uu][Dd][Aa]|\b(?:cuda|cu)[A-Z]\w{1,40}).{0,80}out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Failed to CUDA (?:calloc|malloc|host alloc)|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Externally held weights on device|NVML_ERROR_INSUFFICIENT_|\[NV_ERR_NO_MEMORY\]"
        r"|Error in memory profiling\. Initial free memory",
        Cause.OUT_OF_MEMORY_GPU,
        "vllm/v1/worker/utils.py, torch CUDACachingAllocator.cpp, vllm csrc/cumem_allocator.cpp, triton driver.c, NCCL "
        "include/alloc.h, the CUDA driver",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94 GiB",
    ),
    row(
        r"buffer_size \(\d{1,20} B\) exceeds device memory budget",
        Cause.OUT_OF_MEMORY_GPU,
        "instanttensor/_impl.py",
        "RuntimeError: buffer_size (1268776960 B) exceeds device memory budget (793399296 B)",
    ),
    row(
        r"Call to ibv_\w{1,40} failed with error Cannot allocate memory",
        Cause.OUT_OF_MEMORY_HOST,
        "NCCL misc/ibvwrap.cc",
        "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory errno 12",
        remedy="let the container lock memory (`--ulimit memlock=-1`, capability IPC_LOCK): RDMA registers its buffers",
    ),
    row(
        r"line \d{1,9}: +\d{1,9} Killed\b|Exit Code: +137\b|exited with code 137\b",
        Cause.OUT_OF_MEMORY_HOST,
        "the shell, Kubernetes, Docker",
        "run.sh: line 12: 4312 Killed                  vllm serve /models/flash",
        consequence=True,
        remedy="a signal ended the process, most often for want of memory: look for `Out of memory` in `dmesg`",
    ),
    row(
        r"died due to signal 9 \(Kill signal\)|Killed signal terminated program",
        Cause.OUT_OF_MEMORY_HOST,
        "nvcc, gcc",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        remedy="compile fewer kernels at once (MAX_JOBS), or raise the memory limit of the container",
    ),
    row(
        r"Killed \S{1,200} due to memory pressure|low on resource: memory|OOMKilled"
        r"|invoked oom-killer|Out of memory: Killed process"
        r"|oom-kill:constraint=|NCCL WARN Failed to malloc "
        r"|\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough)"
        r"|Failed to allocate host buffer|\bOutOfMemoryError\b|out of memory",
        Cause.OUT_OF_MEMORY_HOST,
        "errno 12; the kernel log; torch c10/core/CPUAllocator.cpp; InstantTensor csrc/loader_common.cpp",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ),
    # Faults of a GPU: the driver reports each one as an XID. NCCL's watchdog prints them too, as their consequence.
    row(
        r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|uncorrectable (?:ECC|NVLink) error"
        r"|unspecified launch failure|misaligned address|an illegal instruction was encountered"
        r"|device-side assert triggered|CUDA error: hardware error|GPU has fallen off the bus"
        r"|GPU is lost|Unable to determine the device handle for GPU"
        r"|CUDA error: (?:unrecoverable|device not ready|the launch timed out)|NVRM: Xid ",
        Cause.XID_ERROR,
        "cudaGetErrorString of CUDA 13; the kernel log",
        "[rank2]:[E802 22:07:03.844033572 ProcessGroupNCCL.cpp:2119] [PG ID 2 PG GUID 3 Rank 2] Process group watchdog "
        "thread terminated with exception: CUDA error: an illegal memory access was encountered",
    ),
    row(
        r"IO_PAGE_FAULT|DMAR: \[DMA (?:Read|Write)",
        Cause.PEER_TO_PEER_HANG,
        "Linux drivers/iommu, in the kernel log",
        "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x23200000000 flags=0x0020]",
    ),
    # The build has no kernel for the model, its shapes, or the GPU.
    row(
        r"[Uu]nsupported (?:gpu )?architecture|Assertion error \(\S{1,300}\): Unknown recipe"
        r"|No supported CUDA architectures found|[Oo]nly supports (?:sm_?\d|SM_?\d|Ampere|Ada|Hopper|Blackwell)"
        r"|CUDA error: (?:invalid device function|device kernel image is invalid)|Failed to open: \S{1,300}\.cuh"
        r"|No compiled \w{1,60} for CUDA device capability|invalid value for --gpu-architecture"
        r"|Failed to (?:run|initialize) (?:cutlass|CUTLASS)\b.{0,200}Error Internal"
        r"|'_OpNamespace' '\w{1,40}' object has no attribute",
        Cause.KERNEL_MISSING,
        "DeepGEMM, CUTLASS, FlashInfer compilation_context.py, flash-attn, nvcc and nvrtc, torch/_ops.py",
        "RuntimeError: Assertion error (csrc/apis/hyperconnection.hpp:56): Unsupported architecture",
    ),
    row(
        r"Ninja build failed|ninja: build stopped|Error building extension '",
        Cause.KERNEL_MISSING,
        "FlashInfer jit/cpp_ext.py, torch utils/cpp_extension.py",
        "RuntimeError: Ninja build failed. Ninja output:",
        consequence=True,
        remedy="a kernel could not be compiled at the start: the compiler's first error in the log names the reason; "
        "an image with compiled kernels for this GPU avoids it",
    ),
    row(
        r"[Nn]o (?:decode |prefill |cubin |compiled )?kernel (?:image |found )?(?:for this (?:shape|configuration)"
        r"|is available for execution on the device)|CUDA_ERROR_NO_BINARY_FOR_GPU|Failed to find a kernel that can"
        r" implement|No valid (?:CPU )?(?:MLA )?(?:attention|prefill) backend|No (?:\w{1,20} )?MoE backend supports"
        r"|out of resource: shared memory, Required|ptxas fatal|PTXAS error|PTX JIT compilation failed"
        r"|the provided PTX was compiled with an unsupported toolchain"
        r"|not (?:supported|implemented) (?:on|for) (?:(?:this|your) (?:GPU|device|architecture|compute capability)"
        r"|[Ss][Mm]_?\d)"
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
    row(
        r"SafetensorError|Error while deserializing header|Following weights were not initialized from checkpoint"
        r"|Internal error: (?:Unchunked file size mismatch|Chunk alignment error)|size mismatch for \w"
        r"|No such file or directory: ['\"]?.{1,400}\.safetensors|Consistency check failed: file should be of size"
        r"|\.safetensors.{0,40}(?:is truncated|unexpected (?:EOF|end of file))|PytorchStreamReader failed reading",
        Cause.WEIGHTS_CORRUPT,
        "safetensors; vllm/model_executor/model_loader/default_loader.py; InstantTensor csrc/loader_common.cpp",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
    ),
    row(
        r"\[Errno 5\] Input/output error|\[Errno 116\] Stale file handle",
        Cause.WEIGHTS_CORRUPT,
        "errno 5 and 116",
        "OSError: [Errno 5] Input/output error: '/models/flash/model-00002-of-00046.safetensors'",
        remedy="the disk or the file server fails to read the file: check `dmesg` and the mount",
    ),
    row(
        r"FileNotFoundError: (?:\[Errno 2\] )?No such file or directory: ['\"]/(?!dev/shm|psm_|tmp/)",
        Cause.CONFIG_ERROR,
        "errno 2",
        "FileNotFoundError: [Errno 2] No such file or directory: '/models/flash/config.json'",
        consequence=True,
        remedy="check that the named path exists inside the container: the directory must be mounted and complete",
    ),
    # The network: NCCL names its device, the address (GID) and the peer.
    row(
        r"Call to ibv_(?!query_ece|set_ece)\w{1,40} failed"
        r"|NET/IB ?: .{0,80}async fatal event|NET/IB(?:/GIN)? ?: .{0,40}completion from peer"
        r"|Got async event : (?!port active|client reregistration|GID table|LID change)"
        r"|NET/IB: (?:Fatal error\. Detected|The error is fatal)|Failed to initialize any NET plugin"
        r"|Detected mixed local (?:Coll)?Net device counts across ranks"
        r"|NET/IB ?: (?:Unable to (?:open|query)|Remote \w{1,20} device is incompatible|No IP interface found)"
        r"|Attempted to (?:connect|merge) incompatible devices",
        Cause.FABRIC_ERROR,
        "NCCL 2.30 misc/ibvwrap.cc, transport/net_ib",
        "spark1:454:604 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev "
        "roceP2p1s0f1:1, curr state INIT, next state RTR, local GID index 3, local GID ::",
    ),
    row(
        r"No usable listening interface found|[Nn]o socket interface found|Message truncated : received"
        r"|NCCL WARN No interface found"
        r"|No route to host|Network is unreachable",
        Cause.FABRIC_ERROR,
        "NCCL 2.30 bootstrap.cc; errno 101 and 113",
        "NCCL WARN Bootstrap : no socket interface found",
        remedy="set NCCL_SOCKET_IFNAME to the interface between the machines, or remove it; check the path with "
        "`dsv4 doctor --peer ADDRESS` on both sides",
    ),
    row(
        r"NCCL WARN .{0,60}[Cc]onnect to \S{1,100} (?:failed|returned) ",
        Cause.FABRIC_ERROR,
        "NCCL misc/socket.cc",
        "NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : Connection refused",
        consequence=True,
        remedy="the peer has ended, or its address is that of a wrong interface: look at its log, set "
        "NCCL_SOCKET_IFNAME to the interface between the machines, and check the firewall",
    ),
    # A member never joined: a store or a placement group waits for it.
    row(
        r"TCP client failed to connect/validate to host \S{1,200} - retrying",
        Cause.MEMBER_MISSING,
        "torch c10d/TCPStore.cpp",
        "[W110 09:00:00.1 TCPStore.cpp:347] [c10d] TCP client failed to connect/validate to host 10.0.0.1:29500 - "
        "retrying (try=0, timeout=600000ms): Connection refused",
        waits=True,
    ),
    row(
        r"Gloo connectFullMesh failed|Name or service not known|name resolution|No address associated with hostname"
        r"|network addresses of \(.{1,200}\) cannot be retrieved",
        Cause.MEMBER_MISSING,
        "torch ProcessGroupGloo.cpp, Gloo transport/tcp/pair.cc, getaddrinfo",
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
        remedy="set GLOO_SOCKET_IFNAME and VLLM_HOST_IP on each machine to the interface between them; its host name "
        "must resolve to that address, not to 127.0.0.1",
    ),
    row(
        r"Timed out after \d{1,9} seconds waiting for clients|TCP client failed to connect/validate to host"
        r"|The client socket has (?:timed out after|failed to connect to any)"
        r"|wait timeout after \d{1,12}ms, keys: |Connect timeout \[",
        Cause.MEMBER_MISSING,
        "torch c10d/TCPStore.cpp, c10d/socket.cpp; Gloo",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    row(
        r"Cannot provide a placement group |Not enough resources to allocate \d|Current node has no \w{1,10} available"
        r"|ActorUnschedulableError"
        r"|^(?>.*?ERROR).*exceeds the total number of available \w{1,10}s in the placement group",
        Cause.MEMBER_MISSING,
        "vllm/v1/executor/ray_utils.py",
        "ValueError: Cannot provide a placement group requiring 2 GPUs (placement_group_specs=[{'GPU': 1.0}]) within "
        "1800 seconds",
    ),
    row(
        r"Waiting for creating a placement group|No available node types can fulfill"
        r"|resource request cannot be scheduled"
        r"|exceeds the total number of available \w{1,10}s in the"
        r" placement group",
        Cause.MEMBER_MISSING,
        "vllm/v1/executor/ray_utils.py",
        "(EngineCore pid=222) INFO 08-01 02:46:00 [ray_utils.py:214] Waiting for creating a placement group of specs "
        "for 10 seconds. specs=[{'node:10.0.0.1': 0.001, 'GPU': 1.0}, {'GPU': 1.0}].",
        consequence=True,
        waits=True,
    ),
    row(
        r"Timed out waiting for (?:new )?engine(?: core processe)?s to (?:start|send)"
        r"|Did not receive response from front-end process within|failed startup probe",
        Cause.STARTUP_TIMEOUT,
        "vllm/v1/engine/core_client.py",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight "
        "loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).",
        consequence=True,
    ),
    # Hangs. vLLM's executor and torch's watchdog end what does not answer.
    row(
        r"RPC call to \w{1,60} timed out|\bRayChannelTimeoutError\b",
        Cause.ENGINE_HUNG,
        "vllm/v1/executor/multiproc_executor.py, ray/exceptions.py",
        "TimeoutError: RPC call to sample_tokens timed out.",
    ),
    row(
        r"No available shared memory broadcast block found in \d",
        Cause.ENGINE_HUNG,
        "vllm/distributed/device_communicators/shm_broadcast.py",
        "(EngineCore pid=9) INFO 08-13 11:27:02 [shm_broadcast.py:802] No available shared memory broadcast block "
        "found in 60 seconds. This typically happens when some processes are hanging",
        waits=True,
    ),
    row(
        r"Watchdog caught collective operation timeout|Heartbeat monitor timed out|collective operation timed out"
        r"|^(?>.*?NCCL).*[Tt]imed? ?out",
        Cause.NCCL_TIMEOUT,
        "torch c10d/ProcessGroupNCCL.cpp; ncclGetErrorString of NCCL 2.30",
        "[rank1]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=88, OpType=ALLGATHER, Timeout(ms)=600000) ran for 600057 milliseconds before timing out.",
        consequence=True,
    ),
    row(
        r"remote process exited or there was a network error|ncclRemoteError|Connection closed by remote peer"
        r"|Connection closed by peer \[|store->get\('\d{1,6}'\) got error"
        r"|Connection was likely closed\. Did the remote server shutdown or crash",
        Cause.NCCL_TIMEOUT,
        "ncclGetErrorString of NCCL 2.30, NCCL misc/socket.cc, Gloo, torch c10d/TCPStore.cpp",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        consequence=True,
    ),
    row(
        r"NCCL error.{0,200}(?:unhandled system error|invalid usage|internal error)",
        Cause.FABRIC_ERROR,
        "ncclGetErrorString of NCCL 2.30, vllm/distributed/device_communicators/pynccl_wrapper.py",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        consequence=True,
        remedy="start again with NCCL_DEBUG=INFO: a line with `NCCL WARN` names the device, the peer or the limit",
    ),
    # Ray.
    row(
        r"Some Ray subprocesses exited unexpectedly|task's local raylet died|Raylet is terminated"
        r"| C \d{1,9} \d{1,9}\] \(raylet\)|The raylet exited immediately",
        Cause.RAYLET_DIED,
        "ray/exceptions.py, ray/_private/node.py",
        "ray.exceptions.LocalRayletDiedError: The task's local raylet died. Check raylet.out for more information.",
        consequence=True,
    ),
    row(
        r" W \d{1,9} \d{1,9}\] .{0,60}Failed to connect to GCS|WARNING .{0,60}Unable to connect to GCS",
        Cause.RAY_HEAD_LOST,
        "Ray gcs_rpc_client, ray/_private/node.py",
        "[2026-04-20 17:24:52,119 W 1 1] rpc_client.h:153: Failed to connect to GCS at address 10.0.0.1:6379 within 5 "
        "seconds.",
        waits=True,
    ),
    row(
        r"Failed to connect to GCS|GCS is (?:down|unreachable)|gcs_server\W.{0,40}exited"
        r"| C \d{1,9} \d{1,9}\] \(gcs_server\)"
        r"|Failed to get cluster ID from GCS|waiting for GCS to become available|Unable to connect to GCS"
        r"|Could not find any running Ray instance|Failed to start GCS|current node timed out during startup",
        Cause.RAY_HEAD_LOST,
        "Ray gcs_client, ray/_private/node.py, ray/_private/services.py",
        "Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.",
        consequence=True,
    ),
    row(
        r"has been marked dead because the detector has missed too many heartbeats|because its node has died"
        r"|health check failed due to missing too many heartbeats",
        Cause.NODE_LOST,
        "Ray gcs_node_manager",
        "The node with node id: 3f2a and address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        consequence=True,
    ),
    row(
        r"(?:RayWorkerProc rank=.{1,200}?|Worker proc \S{1,80}) died unexpectedly|ActorDiedError|WorkerCrashedError"
        r"|[Aa]ctor died|A worker died or was killed while executing",
        Cause.RAY_WORKER_DIED,
        "vllm/v1/executor/ray_executor_v2.py, multiproc_executor.py, ray/exceptions.py",
        "RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
        consequence=True,
    ),
    # A signal of the kernel. SIGBUS: a page of /dev/shm could not be allocated.
    row(
        r"Fatal Python error: Bus error|\*\*\* SIGBUS received|killed by signal: Bus error",
        Cause.SHARED_MEMORY_FULL,
        "Python faulthandler, Ray util/logging.cc, torch utils/data",
        "Fatal Python error: Bus error",
        consequence=True,
    ),
    row(
        rf"{SIGNAL}|stream is capturing|previous error during capture",
        None,
        "Ray util/logging.cc, Python faulthandler, torch, UCX; CUDA",
        "*** SIGSEGV received at time=1721904360 on cpu 140 ***",
        remedy="the native stack or the traceback below names the library: search its issues; a capture of CUDA graphs "
        "can be ruled out with --enforce-eager",
    ),
    row(
        r"NCCL WARN Cuda failure ",
        None,
        "NCCL include/checks.h",
        "NCCL WARN Cuda failure 1 'invalid argument'",
        remedy="search NCCL's issues for the failed call; a build of NCCL for this GPU and driver may be needed",
    ),
    # Anything else that is an error. Deaths that another process reports name no cause.
    row(
        r"EngineDeadError|Engine core initialization failed|Worker failed with error|failed to start\.$"
        r"|died unexpectedly|EngineCore encountered a fatal error|RayChannelError: |GetTimeoutError: "
        r"|ActorHandleNotFoundError: "
        r"|[Tt]he above exception was the direct cause"
        r"|WorkerProc (?:hit an exception|failed)|Traceback \(most recent call last\)|unhandled (?:system|cuda) error",
        None,
        "vllm/v1/engine, vllm/v1/executor",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        consequence=True,
    ),
    row(
        r"\b(?:ERROR|CRITICAL|FATAL)\b|^(?!Exception ignored )[\w.]{0,200}(?:Error|Exception)\b",
        None,
        "logging of vLLM and Ray; Python",
        "AssertionError: lengths of the contexts differ",
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
    Cause.UNKNOWN: "read the lines before the message; search the issues of the program that printed it",
    Cause.XID_ERROR: "search `dmesg` for the XID; with an illegal address, update or change the kernel provider",
}
"""Remedy of each cause that a log can prove, in one sentence."""

# Processes (several where one forwards the log of another), level, time and place before each line of vLLM's log.
_ORIGIN = re.compile(
    r"^(?P<who>(?:\([A-Za-z][^()]{0,119}\) ){0,4}(?:\[rank\d{1,6}\]:(?: |$))?)"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [-\d]{4,10} [\d:.,]{5,15} "
    r"(?:\[[^\]]{1,120}\]|[\w./]{1,120}\.py:\d{1,6}\]) ?)?"
)
# Lines of level WARNING and less: of uvicorn, Python's logging, Ray, torch's C++, NCCL, Python's warnings.
_MINOR = re.compile(
    r"^(?:DEBUG|INFO|WARNING):? |^\d{4}-\d\d-\d\d[ T][\d:,.]{8,15}(?: -)?\s(?:DEBUG|INFO|WARNING|SUCC)\b"
    r"|^\[\d{4}-\d\d-\d\d [^\]]{1,60} [DIW] \d{1,9} \d{1,9}\]|^(?:\[rank\d{1,6}\]:)?\[[DIWV]\d{0,4} [^\]]{1,100}\]"
    r"|^(?:\S{1,100} ){1,4}NCCL INFO |^.{0,300}\b(?:User|Future|Deprecation|Runtime|Syntax|Resource)Warning: "
)


def match(line: str) -> Signature | None:
    """Return the first signature that matches a line, with or without vLLM's prefix; None: the line is no error."""
    _, level, text = split(line)
    quiet = minor(level) or _MINOR.match(text) is not None
    said = f"ERROR {text}" if level in ("ERROR", "CRITICAL") else text
    return next(
        (one for one in SIGNATURES if (not quiet or one.waits or one.any_level) and one.pattern.search(said)), None
    )


def minor(level: str) -> bool:
    """Return whether a level of Python's logging announces no error."""
    return level in ("DEBUG", "INFO", "WARNING")


def split(line: str) -> tuple[str, str, str]:
    """Return processes, level and text of a line."""
    origin = _ORIGIN.match(line)
    assert origin is not None  # noqa: S101  (every part is optional)
    return origin["who"], origin["level"] or "", line[origin.end() :]
