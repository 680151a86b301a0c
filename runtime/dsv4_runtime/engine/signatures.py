"""Error messages of vLLM, Ray, NCCL, torch, Triton, FlashInfer and InstantTensor, and the cause that each one proves.

Each row has the pattern, the cause, the origin of the text and one example that is composed around it. The patterns
match the sentences that libraries print, not the names of their symbols. They have no nested repetition, so a match
takes linear time. A line that its program marks as a warning or less proves nothing, whatever it quotes.

Read in the libraries: texts of vLLM 0.30 to 0.33, Ray 2.60, torch 2.13 (`c10d`), Triton 3.7 and NCCL (June 2026). From
public failure reports: InstantTensor's buffer size, the sparse MLA of FlashInfer, assertions of DeepGEMM and CUTLASS,
compilers, the dynamic linker, the container runtime, the kernel log, Slurm, earlyoom, SGLang. Not found in these
versions: NCCL's `Error while creating shared memory segment`, torch's `Heartbeat monitor timed out`, and of vLLM a
separate `No valid MLA attention backend` and `larger than the maximum number of tokens that can be stored in KV cache`.
Gone with vLLM 0.33: `Every node should have a unique IP address` and `Current node has no GPU available`.
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
        r"|Cannot find the config file for |Cannot find model module\. |is not a registered model\b"
        r"|Unrecognized (?:model|configuration class) "
        r"|Can't load (?:the )?(?:configuration|tokenizer|model) (?:of|for) |any variant of untagged enum",
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
        r"ray\.exceptions\.AuthenticationError|no authentication token was found|\bInvalidAuthToken\b"
        r"|RpcError: UNAUTHENTICATED",
        Cause.CONFIG_ERROR,
        "ray/exceptions.py",
        "ray.exceptions.AuthenticationError: the token differs from that of the cluster",
        remedy="give the same token to all machines of Ray (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)",
    ),
    row(
        r"Mismatched NCCL version detected|Multiple Ranks are using the same GPU|Duplicate GPU detected"
        r"|Version mismatch: The cluster was started with|Every node should have a unique IP address"
        r"|NCCL version mismatch with remote peer"
        r"|Bootstrap Root : (?:rank \d{1,9} of \d{1,9} ranks has already checked in|mismatch in )",
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
        r"|chat template .{1,300} appears path-like"
        r"|AttributeError: '\w{1,60}Config' object has no attribute ",
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
    row(
        r"is longer than \d{2,4} characters \(sizeof\(sockaddr_un|AF_UNIX path (?:length cannot exceed|too long)",
        Cause.CONFIG_ERROR,
        "pyzmq, ray/_common/utils.py, Python socket",
        "OSError: AF_UNIX path too long",
        remedy="set TMPDIR, and --temp-dir of `ray start`, to a shorter path: that of a socket has at most 107",
    ),
    row(
        r"(?:Args|Config)(?:\.__init__)?\(\) got an unexpected keyword argument",
        Cause.CONFIG_ERROR,
        "Python, of vllm/engine/arg_utils.py and vllm/config",
        "TypeError: AsyncEngineArgs.__init__() got an unexpected keyword argument 'device'",
    ),
    # The weights cannot be fetched, and the GPU is not there for this container or driver.
    row(
        r"\b(?:LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|OfflineModeIsEnabled|HfHubHTTPError|LocalTokenNotFoundError)\b|We couldn't connect to 'https://huggingface"
        r"|CAS (?:service|[Cc]lient) [Ee]rror(?!.{0,200}No space)|trying to access a gated repo"
        r"|Repository Not Found for url"
        r"|^(?:ERROR )?(?:httpx|httpcore)\.\w{1,40}: |error occurred while downloading using `hf_"
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
        r"|system not yet initialized|CUDA unknown error|CUDA error: (?:initialization|unknown) error"
        r"|\bMPS (?:server|client)\b"
        r"|CUDA driver initialization failed|no CUDA-capable device is detected|not compiled with CUDA enabled"
        r"|NVRM: API mismatch"
        r"|could not select device driver|NVIDIA-SMI has failed because|Failed to initialize NVML"
        r"|forward compatibility was attempted on non supported HW|unsupported display driver / cuda driver combination"
        r"|Found no NVIDIA driver on your system|invalid device ordinal|CUDA Driver version found is \d"
        r"|nvml error: |API call is not supported in the installed CUDA driver|^No devices were found$"
        r"|\b0 active drivers \("
        r"|NVMLError_(?:DriverNotLoaded|LibraryNotFound|LibRmVersionMismatch|NoPermission)",
        Cause.PREFLIGHT_FAILED,
        "cudaGetErrorString of CUDA 13, torch c10/cuda/CUDAFunctions.cpp, vllm/config/device.py",
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
    ),
    row(
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        Cause.PREFLIGHT_FAILED,
        "cudaGetErrorString of CUDA 13",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        remedy="end the program that holds the GPU (`nvidia-smi`), or set the mode Default (`nvidia-smi -c 0`)",
    ),
    # Image, packages, compilers and limits of the container.
    row(
        r"OCI runtime create failed|\bnvidia-container-cli: \w|unknown or invalid runtime name|exec format error"
        r"|executable file not found in \$PATH|permission denied while trying to connect to the Docker"
        r"|\b(?:vllm|ray|python3?): (?:(?:command )?not found|Permission denied)"
        r"|Error response from daemon: (?!.{0,300}(?:No such container|already (?:in use|allocated)|in progress))",
        Cause.PREFLIGHT_FAILED,
        "Docker, containerd, the shell",
        "docker: Error response from daemon: unknown or invalid runtime name: nvidia.",
        remedy="the container did not start: install the NVIDIA Container Toolkit, and use an image for this processor "
        "(arm64 for a Spark) that has the named program",
    ),
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
        r"|error while loading shared libraries: |: version `GLIBC\w{0,5}_[\d.]{1,9}' not found"
        r"|version \S{1,40} is required, but found "
        r"|operator \w{1,60}::\S{1,80} does not exist|Tried to instantiate class '\S{1,80}', but it does not exist"
        r"|PackageNotFoundError: |RuntimeEnvSetupError: |version \(.{1,40}\) does not match |failed to open libnvrtc"
        r"|is required for a normal functioning of this module"
        r"|^(?:ERROR )?AttributeError: module '[\w.]{1,120}' has no attribute ",
        Cause.PREFLIGHT_FAILED,
        "the dynamic linker, Python, InstantTensor",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        remedy="the installed packages do not fit each other: use an image that was built as a whole, and compare the "
        "versions of torch, CUDA and the named library",
    ),
    row(
        r"^(?:ERROR )?TypeError: [\w.<>]{1,200}\(\) got an unexpected keyword argument"
        r"|\(\) expected at (?:most|least) \d{1,3} argument\(s\) but received ",
        Cause.PREFLIGHT_FAILED,
        "Python, torch ATen/core/function_schema_inl.h",
        "TypeError: flash_attn_varlen_func() got an unexpected keyword argument 'num_splits'",
        consequence=True,
        remedy="vLLM calls an interface that the installed library does not have: use an image that was built as a "
        "whole, or install the library in the version that this vLLM requires",
    ),
    row(
        r"^(?:ERROR )?(?:ModuleNotFoundError|ImportError): |failed to import on the worker"
        r"|RaySystemError: System error: No module named "
        r"|Cannot find a working triton installation",
        Cause.PREFLIGHT_FAILED,
        "Python, ray/_private/function_manager.py, torch/_inductor/exc.py",
        "ModuleNotFoundError: No module named 'instanttensor'",
        consequence=True,
        remedy="install the named package in the image of each machine, in the version that this vLLM requires",
    ),
    row(
        r"Could not find nvcc|Failed to find C compiler|fatal error: [\w./-]{1,80}\.(?:h|hpp|cuh): No such file"
        r"|\bCUDA_HOME\b.{0,40} not (?:set|found|exist)|Ninja is required|\bNVCC version should be "
        r"|^(?:ERROR )?FileNotFoundError: .{0,40}'(?:ninja|nvcc|gcc)'"
        r"|\bld: cannot find -l|unsupported GNU version"
        r"|CalledProcessError: Command '\['[\w./-]{0,80}(?:gcc|g\+\+|clang|cc)',",
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
        r"Failed to setup aio: |io_setup\S{0,20} failed",
        Cause.PREFLIGHT_FAILED,
        "InstantTensor csrc/loader_io_aio.cpp",
        "RuntimeError: Failed to setup aio: Resource temporarily unavailable",
        remedy="raise the limit of the kernel (`sysctl fs.aio-max-nr=1048576`), or choose another --load-format",
    ),
    row(
        r"'cuFile\w{1,40}\(.{0,120} -> |nvidia-fs driver is not loaded",
        Cause.PREFLIGHT_FAILED,
        "InstantTensor csrc/loader_io_cufile.cpp",
        "RuntimeError: /src/csrc/loader_common.cpp:20 'cuFileDriverOpen()' -> 5001:nvidia-fs driver is not loaded.",
        remedy="this machine cannot read from the disk into the GPU: turn GPUDirect Storage off, or choose another "
        "--load-format",
    ),
    row(
        r"Too many open files|can't start new thread|pthread_create failed"
        r"|^(?!.{0,300}NCCL WARN.{0,80}[Cc]onnect).{0,1000}Resource temporarily unavailable",
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
        r"|larger than the maximum number of tokens that can be stored in KV cache"
        r"|Not enough memory\. Please try to increase --mem-fraction",
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
        r"|The server socket has failed to listen on any local network address"
        r"|because it's already occupied|is trying to use a port number \d{1,5} that is used by"
        r"|port is already allocated|Failed to start the grpc server",
        Cause.PORT_CONFLICT,
        "errno 98; torch c10d/socket.cpp; vllm/utils/network_utils.py",
        "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ),
    row(
        r"^(?>.*?No space left on device).*(?:psm_|/dev/shm|shared memory)"
        r"|^(?>.*?(?:/dev/shm|shared memory)).*No space left on device"
        r"|Insufficient space in \S{1,200}(?: for .{1,100})?: [\d.]{1,20} MiB required"
        r"|ray\.exceptions\.ObjectStoreFullError|unable to allocate shared memory\(shm\) for file"
        r"|Error while (?:creating|attaching to) shared memory segment"
        r"|might be out of shared memory|workers are out of shared memory",
        Cause.SHARED_MEMORY_FULL,
        "errno 28 in multiprocessing.shared_memory; vllm/distributed/device_communicators/shm_broadcast.py; NCCL "
        "misc/shmutils.cc; torch MapAllocator.cpp",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x8XhBw (size 9637888), error: No space "
        "left on device (28)",
    ),
    row(
        r"No space left on device|Disk quota exceeded|low on resource: ephemeral-storage|OutOfDiskError"
        r"|[Nn]ot enough (?:free )?disk space|\b(?:disk is full|disk full)\b",
        Cause.DISK_FULL,
        "errno 28 and 122",
        "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'",
    ),
    # Memory of Ray, GPU and host, in this order: the texts of the later ones are parts of the earlier ones. Ray names
    # the error of another process in front of its traceback.
    row(
        r"RayTaskError\(\w{1,200}\): ray::|because of an error raised in its creation task",
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
        r"\btorch(?:\.cuda)?\.OutOfMemoryError\b|Free memory on (?:device )?(?:cuda|xpu|hip|\()"
        r"|(?:C[Uu][Dd][Aa]|\b(?:cuda|cu)[A-Z]\w{1,40}).{0,80}out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY|\b(?:HIP|XPU|NPU) out of memory"
        r"|Failed to CUDA (?:calloc|malloc|host alloc)|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
        r"|Externally held weights on device|NVML_ERROR_INSUFFICIENT_|\[NV_ERR_NO_MEMORY\]"
        r"|INTERNAL ASSERT FAILED at \S{1,200}CUDACachingAllocator"
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
        r"line \d{1,9}: +\d{1,9} Killed\b|Exit Code: +137\b|exited with code 137\b|code=killed, status=9/KILL"
        r"|died with <Signals\.SIGKILL|Signal 9 \(SIGKILL\) received by PID|exitcode +: -9 \(pid"
        r"|died during initialization \(exit code: -9",
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
        r"|oom-kill:constraint=|NCCL WARN Failed to malloc |killed by the OOM killer|result 'oom-kill'|std::bad_alloc"
        r"|\boom[_-]kill event|low memory! at or below SIG|sending SIG(?:TERM|KILL) to process \d"
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
        r"|(?:CUDA (?:driver )?error|Triton Error \[CUDA\]|Cuda failure \d{0,3} ?'?):? ?(?:unrecoverable"
        r"|device not ready|the launch timed out|hardware stack error|invalid program counter"
        r"|operation not supported on global/shared)"
        r"|NVRM: Xid |GPU is probably locked",
        Cause.XID_ERROR,
        "cudaGetErrorString of CUDA 13; the kernel log",
        "[rank2]:[E802 22:07:03.844033572 ProcessGroupNCCL.cpp:2119] [PG ID 2 PG GUID 3 Rank 2] Process group watchdog "
        "thread terminated with exception: CUDA error: an illegal memory access was encountered",
    ),
    row(
        r"IO_PAGE_FAULT|DMAR: \[DMA (?:Read|Write)"
        r"|peer access is not supported|peer mapping resources exhausted|NCCL WARN failed to peer with device",
        Cause.PEER_TO_PEER_HANG,
        "Linux drivers/iommu, in the kernel log; cudaGetErrorString of CUDA 13; NCCL transport/p2p.cc",
        "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x23200000000 flags=0x0020]",
    ),
    # The build has no kernel for the model, its shapes, or the GPU.
    row(
        r"[Uu]nsupported (?:gpu )?architecture|Assertion error \(\S{1,300}\): Unknown recipe"
        r"|No supported CUDA architectures found|[Oo]nly supports (?:sm_?\d|SM_?\d|Ampere|Ada|Hopper|Blackwell)"
        r"|(?:CUDA error|Triton Error \[CUDA\]): invalid device function|device kernel image is invalid"
        r"|CUDA_ERROR_INVALID_IMAGE|likely was not compiled"
        r"|Failed to open: \S{1,300}\.cuh|requires GPUs? with sm_?\d|not supported in this architecture"
        r"|does not support head ?_?(?:dim|size)|^(?:ERROR )?LLVM ERROR: |PassManager::run failed"
        r"|CU(?:BLAS|DNN)_STATUS_(?:ARCH_MISMATCH|NOT_SUPPORTED)"
        r"|too many (?:resources requested for|blocks in cooperative)"
        r"|\b(?:NVCC|NVRTC|nvcc|nvrtc) compilation failed"
        r"|No compiled \w{1,60} for CUDA device capability|invalid value for --gpu-architecture"
        r"|Failed to (?:run|initialize) (?:cutlass|CUTLASS)\b.{0,200}Error Internal"
        r"|RuntimeError: Error Internal$|FlashInfer Internal Error: |\b(?:Batch|Single)\w{2,80} failed with error"
        r"|'_OpNamespace' '\w{1,40}' object has no attribute",
        Cause.KERNEL_MISSING,
        "DeepGEMM, CUTLASS, FlashInfer compilation_context.py, flash-attn, nvcc and nvrtc, torch/_ops.py",
        "RuntimeError: Assertion error (csrc/apis/hyperconnection.hpp:56): Unsupported architecture",
    ),
    row(
        r"Assertion error \(?[^() ]{0,200}(?:deep_?gemm|jit_kernels/)[^() ]{1,200}\)?:? ",
        Cause.KERNEL_MISSING,
        "DeepGEMM",
        "RuntimeError: Assertion error (/src/deepgemm-src/csrc/apis/../jit_kernels/impls/logits.hpp:233): next_n == 1",
        consequence=True,
        remedy="DeepGEMM has no kernel for these shapes or settings: change the one that the condition names, or "
        "choose another backend",
    ),
    row(
        r"Ninja build failed|ninja: build stopped|Error building extension '|^\S{1,300}\.py:\d{1,6}:\d{1,6}: error: "
        r"|\.(?:cuh?|hpp|h)\(\d{1,6}\): (?:catastrophic )?error\b|errors? detected in the compilation of ",
        Cause.KERNEL_MISSING,
        "FlashInfer jit/cpp_ext.py, torch utils/cpp_extension.py, MLIR of Triton",
        "RuntimeError: Ninja build failed. Ninja output:",
        consequence=True,
        remedy="a kernel could not be compiled at the start: the compiler's first error in the log names the reason; "
        "an image with compiled kernels for this GPU avoids it",
    ),
    row(
        r"[Nn]o (?:decode |prefill |cubin |compiled )?kernel (?:image |found )?(?:for this (?:shape|configuration)"
        r"|is available for execution on the device)|CUDA_ERROR_NO_BINARY_FOR_GPU|Failed to find a kernel that can"
        r" implement|No valid (?:CPU )?(?:MLA )?(?:attention|prefill) backend|No (?:\w{1,20} )?MoE backend supports"
        r"|(?:Error|OutOfResources): out of resource: |^(?:ERROR )?out of resource: \w{1,20} memory, Required"
        r"|ptxas (?:fatal|error) |`ptxas` failed with error code|CalledProcessError: Command '\['[\w./-]{0,200}ptxas',"
        r"|PTXAS error|PTX JIT compilation failed"
        r"|the provided PTX was compiled with an unsupported toolchain"
        r"|not (?:supported|implemented) (?:on|for) (?:(?:this|your) (?:GPU|device|architecture|compute capability)"
        r"|[Ss][Mm]_?\d)"
        r"|is only supported on (?:SM|sm_?|(?:devices with )?compute capability|Hopper|Blackwell)"
        r"|is not supported for the current GPU\. Minimum capability|Head dimension \d{1,5} is not supported by MLA"
        r"|requires (?:an SM\d{2,3}-class GPU|Blackwell datacenter GPUs)"
        r"|(?:FlashInfer|DeepGEMM) (?:backend is|sparse MLA decode APIs are) not available"
        r"|Could not run '[\w:.]{1,80}' with arguments from the ",
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
        r"|\.safetensors.{0,40}(?:is truncated|unexpected (?:EOF|end of file))|PytorchStreamReader failed reading"
        r"|(?:Error: |^|')Failed to (?:open|fstat|mmap) file: ",
        Cause.WEIGHTS_CORRUPT,
        "safetensors; vllm/model_executor/model_loader/default_loader.py; InstantTensor csrc/loader_common.cpp",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
    ),
    row(
        r"\[Errno 5\] Input/output error|\[Errno 116\] Stale file handle|\[Errno 121\] Remote I/O error"
        r"|\[Errno 107\] Transport endpoint is not connected",
        Cause.WEIGHTS_CORRUPT,
        "errno 5, 107, 116 and 121",
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
        r"|Attempted to (?:connect|merge) incompatible devices"
        r"|mlx5_core .{0,80}(?:mlx5_error_sw_reset|[Hh]ealth (?:issue|compromised)|severity=Uncorrect)",
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
        r"NCCL WARN .{0,60}[Cc]onnect to \S{1,100} (?:failed|returned) |NCCL WARN socketPollConnect ",
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
        r"|wait timeout after \d{1,12}ms, keys: |Connect timeout \[|DistStoreError: Socket Timeout",
        Cause.MEMBER_MISSING,
        "torch c10d/TCPStore.cpp, c10d/socket.cpp; Gloo",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    row(
        r"Cannot provide a placement group |Placement group creation timed out"
        r"|Not enough resources to allocate \d|Current node has no \w{1,10} available"
        r"|(?:Actor|Task)UnschedulableError|is not included in a placement group"
        r"|does not allocate any \w{1,10}s on the driver node"
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
        r"|Did not receive response from front-end process within|failed startup probe"
        r"|failed to report ZMQ addresses within timeout",
        Cause.STARTUP_TIMEOUT,
        "vllm/v1/engine/core_client.py",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight "
        "loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).",
        consequence=True,
    ),
    # Hangs. vLLM's executor and torch's watchdog end what does not answer.
    row(
        r"RPC call to \w{1,60} timed out|\bWatchdog timeout \(|\bRayChannelTimeoutError\b",
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
        r"|^(?>.*?NCCL).*[Tt]imed? ?out(?!\(ms)|watchdog got stuck for \d",
        Cause.NCCL_TIMEOUT,
        "torch c10d/ProcessGroupNCCL.cpp; ncclGetErrorString of NCCL 2.30",
        "[rank1]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=88, OpType=ALLGATHER, Timeout(ms)=600000) ran for 600057 milliseconds before timing out.",
        consequence=True,
    ),
    row(
        r"remote process exited or there was a network error|ncclRemoteError|Connection closed by remote peer"
        r"|Connection closed by peer \[|store->get\('\d{1,6}'\) got error|NCCL communicator was aborted on rank"
        r"|gloo/transport/\S{1,80}\](?:.{0,200}(?:Connection reset|Broken pipe|Timed out waiting)|$)"
        r"|DistNetworkError: (?:failed to recv|Broken pipe|Connection reset)|Barrier (?:departure )?timed out after"
        r"|Failed to get exception dump flag from the global store"
        r"|Connection was likely closed\. Did the remote server shutdown or crash",
        Cause.NCCL_TIMEOUT,
        "ncclGetErrorString of NCCL 2.30, NCCL misc/socket.cc, Gloo, torch c10d/TCPStore.cpp",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        consequence=True,
    ),
    row(
        r"NCCL [Ee]rror.{0,200}(?:unhandled system error|invalid usage|internal error)|^nccl(?:Internal|System)Error: "
        r"|Proxy Call to rank \d{1,6} failed|\bUCX +ERROR .{0,200}(?:mlx5|ibv_|rdma)|NIXL_ERR_(?:BACKEND|REMOTE)",
        Cause.FABRIC_ERROR,
        "ncclGetErrorString of NCCL 2.30, vllm/distributed/device_communicators/pynccl_wrapper.py",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        consequence=True,
        remedy="start again with NCCL_DEBUG=INFO: a line with `NCCL WARN` names the device, the peer or the limit",
    ),
    # Ray.
    row(
        r"Some Ray subprocesses exited unexpectedly|task's local raylet died|Raylet is terminated"
        r"| C \d{1,9} \d{1,9}\] \(raylet\)|The raylet exited immediately|Lost connection with local raylet"
        r"|Failed to register worker .{0,80}Raylet|Unable to register worker with raylet",
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
        r"|Could not find any running Ray instance|Failed to start GCS|current node timed out during startup"
        r"|GCS cannot find the node|from GCS\. Did GCS start successfully|Did the head node or gcs start successfully"
        r"|_InactiveRpcError\b|ray\.exceptions\.RpcError\b",
        Cause.RAY_HEAD_LOST,
        "Ray gcs_client, ray/_private/node.py, ray/_private/services.py",
        "Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.",
        consequence=True,
    ),
    row(
        r"gcs_node_manager\.cc:\d{1,5}: The node with node id: .{1,300} has been marked dead",
        Cause.NODE_LOST,
        "Ray gcs_node_manager, in gcs_server.out",
        "[2026-07-03 11:12:01,375 W 42 42] (gcs_server) gcs_node_manager.cc:415: The node with node id: 3f and "
        "address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the detector has missed too many",
        consequence=True,
        any_level=True,
    ),
    row(
        r"has been marked dead because the detector has missed too many heartbeats|because its node has died"
        r"|bee[mn] marked as dead(?: by the GCS|\.)"
        r"|health check failed due to missing too many heartbeats|ray\.exceptions\.NodeDiedError",
        Cause.NODE_LOST,
        "Ray gcs_node_manager",
        "The node with node id: 3f2a and address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        consequence=True,
    ),
    row(
        r"(?:RayWorkerProc rank=.{1,200}?|Worker proc \S{1,80}) died unexpectedly"
        r"|Worker \S{1,80} pid \d{1,9} died, exit|ActorDiedError|WorkerCrashedError"
        r"|[Aa]ctor died|A worker died or was killed while executing"
        r"|ActorUnavailableError|OwnerDiedError|ObjectLostError",
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
        r"|^(?:ERROR )?(?:BrokenPipeError|ConnectionResetError|EOFError)\b"
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
        r"\b(?:ERROR|CRITICAL|FATAL)\b|^(?!Exception (?:ignored|raised from) )[\w.]{0,200}(?:Error|Exception)\b",
        None,
        "logging of vLLM and Ray; Python",
        "AssertionError: lengths of the contexts differ",
    ),
)

REMEDIES: dict[Cause, str] = {
    Cause.CONFIG_ERROR: "correct the argument, variable or checkpoint that the message names: spec.engine.extraArgs, "
    "spec.engine.env, spec.model.checkpoint",
    Cause.DISK_FULL: "free space on the disk of the named path, or on a cluster choose a larger one (spec.storage)",
    Cause.ENGINE_CORE_DIED: "search the issues of this vLLM build for the exception in the message",
    Cause.ENGINE_HUNG: "find the rank that stopped: check its GPU, its link, and a kernel that spins",
    Cause.FABRIC_ERROR: "remove NCCL_IB_GID_INDEX, and check the path with `dsv4 doctor --peer ADDRESS` on both sides",
    Cause.KERNEL_MISSING: "use a build for this GPU, or the bundled kernels (`spec.engine.kernels: auto`)",
    Cause.KV_CACHE_TOO_SMALL: "lower spec.engine.maxModelLen to the estimate of vLLM, or raise "
    "spec.engine.gpuMemoryUtilization",
    Cause.MEMBER_MISSING: "start the missing rank, and check that the machines reach each other on all ports",
    Cause.NCCL_TIMEOUT: "find the rank that stopped first: check its log, its GPU, its link",
    Cause.NODE_LOST: "check the machine and its links",
    Cause.OUT_OF_MEMORY_GPU: "end other programs on the GPU, drop the page cache, or lower gpuMemoryUtilization",
    Cause.OUT_OF_MEMORY_HOST: "end other programs on the machine, or raise the memory limit of the container",
    Cause.PEER_TO_PEER_HANG: "set NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce, or disable IOMMU and ACS; "
    "`sudo dsv4 doctor` tests the copies",
    Cause.PREFLIGHT_FAILED: "check `nvidia-smi` in the container, the driver's version, and CUDA_VISIBLE_DEVICES; "
    "spec.engine.image must fit the driver",
    Cause.PORT_CONFLICT: "end the program that has the port, or choose another port (spec.network.ports)",
    Cause.RAY_HEAD_LOST: "check the log of Ray's head, and the link to its machine",
    Cause.RAY_MEMORY_KILL: "end other programs on the machine, or raise RAY_memory_usage_threshold",
    Cause.RAY_WORKER_DIED: "check the end of the worker's own log: the kernel may have ended it (`dmesg`)",
    Cause.RAYLET_DIED: "check the end of raylet.out on that machine",
    Cause.SHARED_MEMORY_FULL: "raise the size of /dev/shm (`--shm-size`, or an emptyDir with medium Memory)",
    Cause.STAGING_FAILED: "check name and revision in spec.model.source, the token and the network, or fetch it first",
    Cause.STARTUP_TIMEOUT: "raise VLLM_ENGINE_READY_TIMEOUT_S, and check the rate at which the disk reads the weights",
    Cause.WEIGHTS_CORRUPT: "fetch the named file again (spec.model.source) and compare its checksum",
    Cause.UNKNOWN: "read the lines before the message; search the issues of the program that printed it",
    Cause.XID_ERROR: "search `dmesg` for the XID; with an illegal address, update or change the kernel provider",
}
"""Remedy of each cause that a log can prove, in one sentence."""

# Processes (several where one forwards the log of another), level, time and place before each line of vLLM's log.
_ORIGIN = re.compile(
    r"^(?P<who>(?:\([A-Za-z][^()]{0,119}\) ){0,4}(?:\[rank\d{1,6}\]:(?: |$))?)"
    r"(?:(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:(?:[-\d]{4,10} [\d:.,]{5,15}|\.{3}|…) )?"
    r"(?:\[[^\]]{1,120}\]|[\w./]{1,120}\.py:\d{1,6}\])|\[?\w{1,80}\.py:\d{1,6}\]) ?)?"
)
# Lines of level WARNING and less: of uvicorn, Python's logging, Ray, torch's C++, NCCL, Python's warnings.
_MINOR = re.compile(
    r"^(?:DEBUG|INFO|WARNING):? |^\d{4}-\d\d-\d\d[ T][\d:,.]{8,15}(?: -)?\s(?:DEBUG|INFO|WARNING|SUCC)\b"
    r"|^\[\d{4}-\d\d-\d\d [^\]]{1,60} [DIW] \d{1,9} \d{1,9}\]|^(?:\[rank\d{1,6}\]:)?\[[DIWV]\d{0,4} [^\]]{1,100}\]"
    r"|^[-\d]{10} [\d:.]{8,20} \[[WIV]:|^(?:\S{1,100} ){1,4}NCCL INFO "
    r"|^.{0,300}\b(?:User|Future|Deprecation|Runtime|Syntax|Resource)Warning: "
)
# What a program supposes about a failure.
_GUESSES = re.compile(
    r"^(?:ERROR )?- [A-Z].*|(?:(?:[Ss]ome |[Aa] |[Tt]he )?(?:common|potential|possible)(?: root)? (?:cause|reason)s?"
    r"|[Pp]ossible reasons|[Tt]his can happen) .*|\(e\.g\.,? [^()]{0,200}\)"
)


def match(line: str) -> Signature | None:
    """Return the first signature that matches a line, with or without vLLM's prefix; None: the line is no error."""
    _, level, text = split(line)
    quiet = minor(level) or _MINOR.match(text) is not None
    said = f"ERROR {text}" if level in ("ERROR", "CRITICAL") else text
    found = _search(said, quiet=quiet)
    if found is None or (sure := _GUESSES.sub("", said)) == said:
        return found
    return _search(sure, quiet=quiet)


def _search(said: str, *, quiet: bool) -> Signature | None:
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
