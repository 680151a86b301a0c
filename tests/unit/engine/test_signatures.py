"""Causes of failures from log lines of vLLM, Ray, NCCL and others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.contract import Cause
from dsv4_runtime.engine import logs
from dsv4_runtime.engine.logs import diagnose
from dsv4_runtime.engine.signatures import SIGNATURES, Signature, match

CORE = "(EngineCore pid=222) ERROR 08-22 09:01:01 [core.py:1165] "
WORKER = "(Worker_TP0 pid=300) ERROR 08-22 09:01:01 [multiproc_executor.py:990] "
API = "(APIServer pid=92) "
FAILED = f"{CORE}EngineCore failed to start."
TRACE = (f"{CORE}Traceback (most recent call last):", f'{CORE}  File "/x/core.py", line 1, in run_engine_core')
INITIALIZATION = (
    f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"
)


def dead(error: str) -> list[str]:
    """Return the log of a start that ends with `error` in EngineCore."""
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
        [
            f"{CORE}EngineCore encountered a fatal error.",
            *TRACE,
            f"{CORE}ValueError: DSpark currently requires uniform effective per-request target context lengths",
        ],
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
    "vLLM refuses a shape at the start": (
        dead("ValueError: the block size must be one of 32 and 64"),
        Cause.CONFIG_ERROR,
        "ValueError: the block size must be one of 32 and 64",
    ),
    "no kernel for the device at the start": (
        dead("ValueError: this kernel requires 128 heads, got 32"),
        Cause.KERNEL_MISSING,
        "ValueError: this kernel requires 128 heads, got 32",
    ),
    "frames quote the code, behind the names of two processes": (
        [
            f"(EngineCore pid=9) {WORKER}Traceback (most recent call last):",
            f'(EngineCore pid=9) {WORKER}  File "/x/worker.py", line 1, in load',
            f'(EngineCore pid=9) {WORKER}    raise RuntimeError("CUDA out of memory")',
            f"(EngineCore pid=9) {WORKER}IndexError: list index out of range",
        ],
        None,
        "IndexError: list index out of range",
    ),
    "frames quote the code, behind a rank": (
        [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "/x/worker.py", line 1, in load',
            '[rank0]:     raise RuntimeError("CUDA out of memory")',
            "[rank0]: torch._dynamo.exc.Unsupported: a call that is skipped",
        ],
        None,
        "torch._dynamo.exc.Unsupported: a call that is skipped",
    ),
    "an error that the configuration raises": (
        [
            f"{API}Traceback (most recent call last):",
            f'{API}  File "/x/vllm/config/speculative.py", line 1, in __post_init__',
            f"{API}KeyError: 'draft'",
        ],
        Cause.CONFIG_ERROR,
        "KeyError: 'draft'",
    ),
    "a weight that the model does not have": (
        [
            f"{WORKER}Traceback (most recent call last):",
            f'{WORKER}  File "/x/vllm/model_executor/models/flash.py", line 1, in load_weights',
            f"{WORKER}KeyError: 'hc_attn_fn'",
        ],
        Cause.CONFIG_ERROR,
        "KeyError: 'hc_attn_fn'",
    ),
    "Ray names the error of a worker in front of its traceback": (
        [
            *dead("ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method() (pid=2)"),
            f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB.",
        ],
        Cause.OUT_OF_MEMORY_GPU,
        "torch.OutOfMemoryError",
    ),
    "a lost node explains the death of its worker": (
        [
            *dead("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
            f"{CORE}The actor died because its node has died. Node Id: 4f7a",
        ],
        Cause.NODE_LOST,
        "The actor died because its node has died.",
    ),
    "NCCL's warning explains its error": (
        [
            "spark1:4:9 [0] enqueue.cc:1556 NCCL WARN Unexpected state of a channel",
            *dead("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        ],
        Cause.FABRIC_ERROR,
        "spark1:4:9 [0] enqueue.cc:1556 NCCL WARN Unexpected state of a channel RuntimeError: NCCL error",
    ),
    "a compiler explains the build that failed": (
        [
            *dead("RuntimeError: Ninja build failed. Ninja output:")[:-1],
            f"{CORE}/x/sampling.cu:3:10: fatal error: curand_kernel.h: No such file or directory",
        ],
        Cause.PREFLIGHT_FAILED,
        "/x/sampling.cu:3:10: fatal error",
    ),
    "a signal ends a worker": (
        [
            "(RayWorkerWrapper pid=24036) *** SIGSEGV received at time=1721904360 on cpu 140 ***",
            "(RayWorkerWrapper pid=24036) PC: @     0x7f17f832d44a  (unknown)  addProxyOpIfNeeded()",
        ],
        Cause.RAY_WORKER_DIED,
        "*** SIGSEGV received",
    ),
    "a wait for another process without an end": (
        [
            "(EngineCore pid=9) INFO 08-13 11:26:00 [gpu_worker.py:450] Available KV cache memory: 17.6 GiB",
            "(EngineCore pid=9) INFO 08-13 11:27:02 [shm_broadcast.py:802] No available shared memory broadcast block "
            "found in 60 seconds.",
        ],
        Cause.ENGINE_HUNG,
        "No available shared memory broadcast block",
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


MESSAGES = [line.split("\t", 2) for line in (Path(__file__).parent / "messages.tsv").read_text().splitlines()[1:]]
"""Origin in the library, cause and text. Texts of vLLM are those of 0.30 to 0.33 unless a version is given."""


@pytest.mark.parametrize(("source", "cause", "message"), MESSAGES, ids=[message[:50] for _, _, message in MESSAGES])
def test_messages_of_the_libraries_prove_their_cause(source: str, cause: str, message: str) -> None:
    found = diagnose(dead(message))
    assert found is not None
    assert found.cause is Cause(cause), source


def runs() -> dict[str, tuple[str, list[list[str]]]]:
    """Return cause (`none`: the run is good) and logs of each run in `runs.txt`, by name."""
    found = {}
    for text in (Path(__file__).parent / "runs.txt").read_text().split("\n=== ")[1:]:
        heading, _, body = text.partition("\n")
        cause, name, *_ = heading.split(" | ")
        logs = [log.replace("␍", "\r").splitlines() for log in body.split("\n---\n")]
        assert name not in found
        found[name] = cause, logs
    return found


RUNS = runs()


@pytest.mark.parametrize("name", RUNS)
def test_logs_of_whole_runs_prove_the_first_failure_or_nothing(name: str) -> None:
    cause, logs = RUNS[name]
    found = diagnose(*logs)
    if cause == "none":
        assert found is None
        return
    assert found is not None
    assert (found.cause or (Cause.ENGINE_CORE_DIED if found.core_died else Cause.UNKNOWN)) == cause
    assert found.remedy


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


SERVES = f"{API}INFO:     Application startup complete."
GOOD: dict[str, list[str]] = {
    "warnings that quote errors": [
        "(Worker_TP0 pid=3) WARNING 01-10 09:00:00 [fp8.py:100] DeepGEMM backend is not available or outdated.",
        "(Worker_TP0 pid=3) WARNING 01-10 09:00:00 [gpu_worker.py:1] no graph of size 512: CUDA out of memory",
        "(Worker_TP0 pid=3) INFO 01-10 09:00:00 [cuda.py:4] not tried: FLASHMLA is not supported on this GPU",
        "2026-01-10 09:00:00,000 - WARNING - autotuner.py:496 - skipped: [TensorRT-LLM][ERROR] Error Internal",
        "/x/torch/cuda/__init__.py:283: UserWarning: no kernel image is available for execution on the device",
    ],
    "notes of NCCL and torch": [
        "spark1:4:9 [0] NCCL INFO TORCH_NCCL_ASYNC_ERROR_HANDLING set. Timeout 600000 timed wait",
        "spark1:4:9 [0] NCCL INFO [Service thread] Connection closed by remote peer spark2<47210>",
        "spark1:4:9 [0] NCCL WARN NET/IB : rocep1s0f1:1 Got async event : GID table change",
        "[W110 09:00:00.1 socket.cpp:755] [c10d] The client socket cannot connect: Address already in use",
    ],
    "a retry of Ray that succeeds": [
        "[2026-04-20 17:24:52,119 W 1 1] rpc_client.h:153: Failed to connect to GCS at address 10.0.0.1:6379",
        "2026-04-20 17:25:02,111 SUCC scripts.py:1141 -- Ray runtime started.",
    ],
    "a retry of torch's store that succeeds": [
        "[W110 09:00:00.1 TCPStore.cpp:347] [c10d] TCP client failed to connect/validate to host 10.0.0.1:29500 - "
        "retrying (try=0, timeout=600000ms)",
        "(Worker_TP1 pid=3) INFO 01-10 09:05:20 [gpu_model_runner.py:5200] Model loading took 81.34 GiB memory",
    ],
    "a placement group that is ready": [
        "(EngineCore pid=9) INFO 01-10 09:00:00 [ray_utils.py:233] Waiting for creating a placement group of specs",
        "(RayWorkerWrapper pid=9, ip=10.0.0.2) INFO 01-10 09:00:10 [gpu_model_runner.py:1] Starting to load model",
    ],
    "an error before a complete start": [
        f"{API}ERROR 12-24 13:41:28 [repo_utils.py:65] Error retrieving safetensors, retrying 1 of 2",
        f"{CORE}CUDA out of memory in the autotuner, which continues with its defaults",
        SERVES,
    ],
    "errors of requests": [
        SERVES,
        f"{API}ERROR 01-10 10:00:00 [serving_chat.py:260] Traceback (most recent call last):",
        f"{API}ERROR 01-10 10:00:00 [serving_chat.py:260] ValueError: the request must be shorter",
        f"{API}INFO 01-10 10:00:00 [logger.py:40] Received request chatcmpl-1: prompt: 'why CUDA out of memory'",
        f"{API}ERROR:    Exception in ASGI application",
        f"{API}Traceback (most recent call last):",
        f'{API}  File "/x/starlette/routing.py", line 1, in app',
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ChatCompletionRequest",
        f'{API}INFO:     10.0.0.9:1 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
    ],
    "a traceback of a level below error": [
        "(EngineCore pid=9) DEBUG 01-10 09:00:00 [core.py:1] Traceback (most recent call last):",
        "(EngineCore pid=9) DEBUG 01-10 09:00:00 [core.py:1] ValueError: only probed",
    ],
    "an error of a destructor": [
        "Exception ignored in: <function Socket.__del__ at 0x7f>",
        "Traceback (most recent call last):",
        '  File "/x/zmq/sugar/socket.py", line 1, in __del__',
        "zmq.error.ZMQError: Socket operation on non-socket",
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_logs_of_good_runs_prove_nothing(name: str) -> None:
    assert diagnose(GOOD[name]) is None


def test_a_complete_start_of_one_log_does_not_excuse_the_errors_of_another() -> None:
    failed = [f"{WORKER}torch.OutOfMemoryError: CUDA out of memory."]
    found = diagnose(failed, [SERVES])
    assert found is not None
    assert (found.cause, found.evidence[0][0]) == (Cause.OUT_OF_MEMORY_GPU, 1)
    later = diagnose([SERVES], failed)
    assert later is not None
    assert later.evidence[0][0] == 2, "lines count through all logs"
    assert diagnose([*failed, SERVES]) is None


def test_a_text_has_its_own_remedy_and_the_lines_that_complete_it() -> None:
    found = diagnose(dead("PermissionError: [Errno 13] Permission denied: '/app/.cache/vllm'"))
    assert found is not None
    assert "writable volume" in found.remedy
    found = diagnose(
        [
            *dead("triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error")[:-2],
            f"{CORE}triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
            f"{CORE}`ptxas` stderr:",
            f"{CORE}ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        ]
    )
    assert found is not None
    assert found.message.endswith("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'")
    assert found.remedy


def test_comments_in_a_log_are_no_evidence() -> None:
    note = "# of a run with CUDA out of memory; NCCL timed out"
    assert diagnose([note]) is None
    found = diagnose([note, *dead("ValueError: No available memory for the cache blocks.")])
    assert found is not None
    assert found.cause is Cause.KV_CACHE_TOO_SMALL
    assert note not in [text for _, text in found.evidence]


@pytest.mark.parametrize(
    "carrier",
    [
        "vllm  | ",
        "[pod/nano-0/engine] ",
        "2026-08-22T09:01:01.123456789Z ",
        "Aug 22 09:01:01 spark1 vllm[92]: ",
        "[pod/nano-0/engine] 2026-08-22T09:01:01.123456789Z ",
        "\x1b[36mvllm-head-1  | \x1b[0m",
        "[36m",
        "^[[0;36m",
        "> ",
        "[vllm]: ",
        "2026-08-22 09:01:01.616 | ",
        "[2026-08-22T09:01:01Z] ",
        "[1,0]<stderr>:",
        "head.log:",
        "  Line 117: ",
        "#033[2m#033[36m",
    ],
)
@pytest.mark.parametrize("name", LOGS)
def test_lines_of_a_container_or_of_the_journal_are_read_alike(name: str, carrier: str) -> None:
    lines, cause, message = LOGS[name]
    found = diagnose([carrier + line for line in lines])
    assert found is not None
    assert found.cause is cause
    assert found.message.startswith(message)


@pytest.mark.parametrize("name", LOGS)
def test_lines_in_files_of_docker_are_read_alike(name: str) -> None:
    lines, cause, message = LOGS[name]
    found = diagnose([json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines])
    assert found is not None
    assert found.cause is cause
    assert found.message.startswith(message)
    assert diagnose(['{"log":', '{"log": ' + "[" * 5000, '{"log": 1}']) is None


HUNG = "TimeoutError: RPC call to execute_model timed out."
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
FULL = "OSError: [Errno 28] No space left on device: '/root/.cache'"


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        # The peer's own error is the cause, whenever it was logged.
        (HUNG, FAULT, Cause.XID_ERROR),
        (f"{CORE}{HUNG}", f"(Worker_TP1 pid=3) ERROR 08-22 09:05:01 [x.py:1] {FAULT}", Cause.XID_ERROR),
        # Of two proofs the earlier one, in the times of different programs.
        (f"(EngineCore pid=9) ERROR 08-22 10:12:30 [core.py:1] {FULL}", f"[rank1]:[E822 10:07:11.1 x.cpp:1] {FAULT}",
         Cause.XID_ERROR),
        (f"2026-08-22T10:12:30Z {FULL}", f"Aug 22 10:07:11 spark2 vllm[9]: {FAULT}", Cause.XID_ERROR),
        (f"2026-08-22 10:12:30,100 ERROR x.py:1 -- {FULL}", f"[2026-08-22 10:12:31,1 E 1 1] {FAULT}", Cause.DISK_FULL),
        # Without times the order of the logs.
        (FULL, f"2026-08-22T10:07:11Z {FAULT}", Cause.DISK_FULL),
    ],
)  # fmt: skip
def test_of_several_logs_the_earliest_own_error_counts(first: str, second: str, cause: Cause) -> None:
    found = diagnose([first], ["started", second])
    assert found is not None
    assert found.cause is cause


def test_a_line_without_a_time_has_that_of_the_lines_before_it() -> None:
    timed = "(EngineCore pid=9) INFO 08-22 {} [core.py:1] x"
    found = diagnose([timed.format("10:12:30"), FULL], [timed.format("10:07:11"), "y", FAULT])
    assert found is not None
    assert found.cause is Cause.XID_ERROR


def test_a_bracket_is_no_colour() -> None:
    found = diagnose(["[m] ValueError: of one program", "[1;31mValueError: of another[0m"])
    assert found is not None
    assert found.message == "ValueError: of another"
    found = diagnose(["[m] ERROR of a program"])
    assert found is not None
    assert found.message == "[m] ERROR of a program"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=200) | st.sampled_from([row.example for row in SIGNATURES]), max_size=20))
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    found = diagnose(lines)
    assert found is None or len(found.message) <= 1024


def assert_linear(*pieces: str) -> None:
    def seconds(line: str) -> float:
        begun = time.process_time()
        match(line)
        return time.process_time() - begun

    for piece in pieces:
        # Quadratic time would be a second for the longer one, each time; a garbage collection takes time once.
        short, long = (piece * (2**size // len(piece)) for size in (11, 14))
        assert any(seconds(long) < 0.33 + 20 * seconds(short) for _ in range(3)), piece


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_a_long_line_takes_linear_time(row: Signature) -> None:
    assert_linear(row.example[:20], row.example[-12:])


def test_a_long_line_of_other_texts_takes_linear_time() -> None:
    assert_linear("NCCL", "NET/IB : ", "(", " ")


def test_an_error_that_is_often_caught_does_not_hide_a_later_cause_of_a_running_engine() -> None:
    for text in (
        "ModuleNotFoundError: No module named 'lmcache'",
        "FileNotFoundError: No such file or directory: '/x'",
    ):
        found = logs.fatal(f"{CORE}{text}")
        assert found is not None
        assert found[1] is None
    found = logs.fatal(f"{CORE}torch.OutOfMemoryError: CUDA out of memory.")
    assert found is not None
    assert found[1] is Cause.OUT_OF_MEMORY_GPU


def test_a_warning_of_a_start_is_no_death() -> None:
    warned = "(Worker_TP0 pid=3) WARNING 01-10 09:00:00 [fp8.py:100] DeepGEMM backend is not available or outdated."
    assert logs.fatal(warned) is None


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
