"""Causes that log lines of vLLM, Ray, NCCL and others prove."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.contract import Cause
from dsv4_runtime.engine import logs
from dsv4_runtime.engine.signatures import SIGNATURES, Signature, diagnose, match

CORE = "(EngineCore pid=222) ERROR 08-22 09:01:01 [core.py:1165] "
WORKER = "(Worker_TP0 pid=300) ERROR 08-22 09:01:01 [multiproc_executor.py:990] "
API = "(APIServer pid=92) "
FAILED = f"{CORE}EngineCore failed to start."
TRACE = (f"{CORE}Traceback (most recent call last):", f'{CORE}  File "/x/core.py", line 1, in run_engine_core')
INITIALIZATION = (
    f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"
)


def dead(error: str) -> list[str]:
    """A start that ends with `error` in EngineCore."""
    return [FAILED, *TRACE, CORE + error, INITIALIZATION]


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_each_example_proves_its_cause_alone_and_in_the_log_of_a_start(row: Signature) -> None:
    assert match(row.example) is row
    for lines in ([row.example], dead(row.example)):
        found = diagnose(lines)
        assert found is not None
        assert found.cause is row.cause


LOGS: dict[str, tuple[list[str], Cause | None, str]] = {
    "a cuBLAS fault is not the timeout that follows it": (
        [
            f"{WORKER}WorkerProc hit an exception.",
            f"{WORKER}Traceback (most recent call last):",
            f'{WORKER}  File "/x/layers.py", line 1, in forward',
            f"{WORKER}RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx`",
            f"{CORE}EngineCore encountered a fatal error.",
            "[rank1]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 1] Watchdog caught collective operation timeout",
        ],
        None,
        "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx`",
    ),
    "the KV cache does not fit": (
        [
            "(Worker_TP1 pid=301) INFO 08-22 09:01:00 [gpu_worker.py:450] Available KV cache memory: 10.33 GiB",
            *dead(
                "ValueError: To serve at least one request with the model's max seq len (1048576), 11.04 GiB KV cache "
                "is needed, which is larger than the available KV cache memory (10.33 GiB)."
            ),
        ],
        Cause.KV_CACHE_TOO_SMALL,
        "ValueError: To serve at least one request",
    ),
    "no memory is left for the KV cache": (
        [
            "(Worker_TP0 pid=300) INFO 09-20 09:01:00 [gpu_worker.py:450] Available KV cache memory: -1.42 GiB",
            *dead("ValueError: No available memory for the cache blocks."),
        ],
        Cause.KV_CACHE_TOO_SMALL,
        "Available KV cache memory: -1.42 GiB",
    ),
    "the driver has no memory for the drafter": (
        [
            "(Worker_TP0 pid=300) INFO 08-03 18:03:00 [gpu_model_runner.py:5332] Loading drafter model...",
            *dead("RuntimeError: Worker failed with error 'CUDA driver error: out of memory', please check the stack"),
        ],
        Cause.OUT_OF_MEMORY_GPU,
        "RuntimeError: Worker failed with error 'CUDA driver error: out of memory'",
    ),
    "a rank does not answer": (
        [
            "(EngineCore pid=222) INFO 09-06 11:20:00 [shm_broadcast.py:705] No available shared memory broadcast "
            "block found in 60 seconds. This typically happens when some processes are hanging",
            f"{CORE}EngineCore encountered a fatal error.",
            *TRACE,
            f"{CORE}TimeoutError",
            CORE,
            f"{CORE}The above exception was the direct cause of the following exception:",
            CORE,
            *TRACE,
            f"{CORE}TimeoutError: RPC call to sample_tokens timed out.",
        ],
        Cause.ENGINE_HUNG,
        "TimeoutError: RPC call to sample_tokens timed out.",
    ),
    "a pinned GID index is empty on one device": (
        [
            "spark1:454:604 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on "
            "dev roceP2p1s0f1:1, curr state INIT, next state RTR, local GID index 3, local GID ::",
            *dead("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        ],
        Cause.FABRIC_ERROR,
        "spark1:454:604 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed",
    ),
    "a configuration is refused, with its reason": (
        [
            f"{API}Traceback (most recent call last):",
            f'{API}  File "/x/serve.py", line 1, in cmd',
            f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
            f"{API}  Value error, nvfp4 KV cache is not supported with MLA backends. [type=value_error]",
        ],
        Cause.CONFIG_ERROR,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig Value error, nvfp4 KV cache",
    ),
    "an assertion of a drafter names no cause": (
        dead("ValueError: DSpark currently requires uniform effective per-request target context lengths"),
        None,
        "ValueError: DSpark currently requires uniform",
    ),
    "a killed worker is named by Ray": (
        dead("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
        Cause.RAY_WORKER_DIED,
        "ray.exceptions.ActorDiedError",
    ),
    "a worker that ran out of memory is no dead worker": (
        [
            f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            *dead("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
        ],
        Cause.OUT_OF_MEMORY_GPU,
        "torch.OutOfMemoryError",
    ),
    "the first collective over PCIe never ends": (
        [
            "box:12:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
            "[rank0]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600012 milliseconds",
        ],
        Cause.PEER_TO_PEER_HANG,
        "[rank0]:[E709 10:21:20 ProcessGroupNCCL.cpp:700]",
    ),
    "a later collective is a timeout": (
        [
            "box:12:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
            "[rank0]:[E709 10:21:20 ProcessGroupNCCL.cpp:700] [Rank 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=5120, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600012 milliseconds",
        ],
        Cause.NCCL_TIMEOUT,
        "[rank0]:[E709 10:21:20 ProcessGroupNCCL.cpp:700]",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_cause_of_a_log_is_its_first_proof_and_not_a_consequence(name: str) -> None:
    lines, cause, message = LOGS[name]
    found = diagnose(lines)
    assert found is not None
    assert found.cause is cause
    assert found.message.startswith(message)
    number, text = found.evidence[0]
    assert lines[number - 1].endswith(text)


MESSAGES: tuple[tuple[str, Cause], ...] = (
    (
        "ValueError: Free memory on device cuda:0 (20.1/119.7 GiB) on startup is less than desired",
        Cause.OUT_OF_MEMORY_GPU,
    ),
    ("ValueError: Externally held weights on device cuda:0 (94/119 GiB) exceed the desired", Cause.OUT_OF_MEMORY_GPU),
    ("spark1:4:4 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'", Cause.OUT_OF_MEMORY_GPU),
    ("NCCL WARN Failed to CUDA calloc 4194304 bytes", Cause.OUT_OF_MEMORY_GPU),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        Cause.OUT_OF_MEMORY_GPU,
    ),
    ("RuntimeError: CUDA error: out of memory", Cause.OUT_OF_MEMORY_GPU),
    ("OSError: [Errno 12] Cannot allocate memory", Cause.OUT_OF_MEMORY_HOST),
    ("MemoryError: Unable to allocate 4.00 GiB for an array", Cause.OUT_OF_MEMORY_HOST),
    ("std::runtime_error: Failed to allocate host buffer: Cannot allocate memory", Cause.OUT_OF_MEMORY_HOST),
    ("1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 crashed due to others", Cause.RAY_MEMORY_KILL),
    ("OSError: [Errno 28] No space left on device: 'psm_4f2a'", Cause.SHARED_MEMORY_FULL),
    ("RuntimeError: unable to allocate shared memory(shm) for file </torch_12_3>", Cause.SHARED_MEMORY_FULL),
    ("OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address",
        Cause.PORT_CONFLICT,
    ),
    ("error: [Errno 98] Address already in use", Cause.PORT_CONFLICT),
    ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available", Cause.KV_CACHE_TOO_SMALL),
    ("RuntimeError: CUDA error: device-side assert triggered", Cause.XID_ERROR),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Cause.XID_ERROR),
    ("RuntimeError: CUDA error: unspecified launch failure", Cause.XID_ERROR),
    ("RuntimeError: CUDA error: misaligned address", Cause.XID_ERROR),
    ("NVRM: Xid (PCI:000f:01:00): 119, pid=1, Timeout after 45s of waiting for RPC response", Cause.XID_ERROR),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", Cause.KERNEL_MISSING),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456", Cause.KERNEL_MISSING),
    ("ValueError: No valid attention backend found for cuda with head_size=576", Cause.KERNEL_MISSING),
    ("ValueError: Failed to find a kernel that can implement the Fp8 linear layer", Cause.KERNEL_MISSING),
    ("triton.compiler.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error", Cause.KERNEL_MISSING),
    ("ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}", Cause.WEIGHTS_CORRUPT),
    ("RuntimeError: Internal error: Unchunked file size mismatch.", Cause.WEIGHTS_CORRUPT),
    ("ValueError: There is no module or parameter named 'model.indexer' in DeepseekV4ForCausalLM", Cause.CONFIG_ERROR),
    ("usage: vllm serve [model_tag]\nvllm serve: error: argument --tensor-parallel-size: invalid", Cause.CONFIG_ERROR),
    ("api_server.py: error: argument --kv-cache-dtype: invalid choice: 'nvfp4'", Cause.CONFIG_ERROR),
    ("NCCL WARN NET/IB : roceP2p1s0f1:1 async fatal event: local catastrophic error", Cause.FABRIC_ERROR),
    (
        "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<41234> with status=IBV_WC_RETRY_EXC_ERR(12)",
        Cause.FABRIC_ERROR,
    ),
    ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory errno 12", Cause.OUT_OF_MEMORY_HOST),
    ("NCCL WARN NET/Socket : No usable listening interface found", Cause.FABRIC_ERROR),
    ("OSError: [Errno 113] No route to host", Cause.FABRIC_ERROR),
    (
        "torch.distributed.DistNetworkError: TCP client failed to connect/validate to host 10.0.0.1:29500",
        Cause.MEMBER_MISSING,
    ),
    (
        "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//1",
        Cause.MEMBER_MISSING,
    ),
    ("ValueError: Current node has no GPU available. current_node_resource={}", Cause.MEMBER_MISSING),
    ("TimeoutError: RPC call to execute_model timed out.", Cause.ENGINE_HUNG),
    ("[Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping debug info", Cause.NCCL_TIMEOUT),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4",
        Cause.NCCL_TIMEOUT,
    ),
    ("ray.exceptions.LocalRayletDiedError: The task's local raylet died.", Cause.RAYLET_DIED),
    ("Failed to connect to GCS within 60 seconds", Cause.RAY_HEAD_LOST),
)


@pytest.mark.parametrize(("message", "cause"), MESSAGES, ids=[message[:50] for message, _ in MESSAGES])
def test_messages_of_the_libraries_prove_their_cause(message: str, cause: Cause) -> None:
    found = diagnose(dead(message.splitlines()[-1]))
    assert found is not None
    assert found.cause is cause


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=92) INFO 08-22 09:00:00 [api_server.py:12] Started server process [92]",
        "(Worker_TP0 pid=300) INFO 08-22 09:01:00 [gpu_worker.py:450] Available KV cache memory: 17.6 GiB",
        "box:12:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "(EngineCore pid=222) INFO 08-22 09:00:00 [core.py:120] Initializing a V1 LLM engine (v0.33.0)",
        "Loading safetensors checkpoint shards:  50% Completed | 23/46 [00:10<00:10,  2.2it/s]",
    ],
)
def test_lines_of_a_good_start_prove_nothing(line: str) -> None:
    assert diagnose([line]) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=200) | st.sampled_from([row.example for row in SIGNATURES]), max_size=20))
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    found = diagnose(lines)
    assert found is None or len(found.message) <= 1024


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_a_long_line_takes_linear_time(row: Signature) -> None:
    def seconds(line: str) -> float:
        begun = time.process_time()
        for _ in range(3):
            match(line)
        return time.process_time() - begun

    for piece in (row.example[:20], row.example[-12:], "NCCL", "NET/IB : ", "(", " "):
        # Quadratic time takes seconds for the longer one.
        assert seconds(piece * (2**14 // len(piece))) < 1.0 + 20 * seconds(piece * (2**11 // len(piece)))


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=222) INFO 08-01 02:46:00 [ray_utils.py:214] Waiting for creating a placement group of specs",
        "(EngineCore pid=222) WARNING 08-01 02:45:50 [ray_utils.py:320] The number of required GPUs exceeds the total "
        "number of available GPUs in the placement group.",
    ],
)
def test_a_wait_for_resources_is_no_death(line: str) -> None:
    assert logs.fatal(line) is None
    found = diagnose([line])
    assert found is not None
    assert found.cause is Cause.MEMBER_MISSING, "the run ended in it"
    later = diagnose([line, *dead("ValueError: an assertion")])
    assert later is not None
    assert later.message == "ValueError: an assertion", "the wait was over"


def test_the_stage_of_a_start_names_the_wait_for_resources() -> None:
    found = logs.progress(
        "(EngineCore pid=1) INFO 08-01 02:46:00 [ray_utils.py:214] Waiting for creating a placement group of specs for"
    )
    assert found is not None
    assert found.stage == "waiting for Ray's resources"
