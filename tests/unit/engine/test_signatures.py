"""Causes of failures from log lines of vLLM, Ray, NCCL and others."""

from __future__ import annotations

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


MESSAGES = [line.split("\t", 2) for line in (Path(__file__).parent / "messages.tsv").read_text().splitlines()[1:]]
"""Origin in the library, cause and text. Texts of vLLM are those of 0.30 to 0.33 unless a version is given."""


@pytest.mark.parametrize(("source", "cause", "message"), MESSAGES, ids=[message[:50] for _, _, message in MESSAGES])
def test_messages_of_the_libraries_prove_their_cause(source: str, cause: str, message: str) -> None:
    found = diagnose(dead(message))
    assert found is not None
    assert found.cause is Cause(cause), source


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
    ],
)
@pytest.mark.parametrize("name", LOGS)
def test_lines_of_a_container_or_of_the_journal_are_read_alike(name: str, carrier: str) -> None:
    lines, cause, message = LOGS[name]
    found = diagnose([carrier + line for line in lines])
    assert found is not None
    assert found.cause is cause
    assert found.message.startswith(message)


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
        # Quadratic time would be seconds for the longer one.
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
