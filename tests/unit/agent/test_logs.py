from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsv4_runtime.contract import Cause
from dsv4_runtime.engine.logs import (
    LogTail,
    WorkerLogs,
    bound,
    core_failed,
    core_lost,
    fatal,
    kv_cache,
    loaded_bytes,
    progress,
    shutting_down,
    worker_lost,
)

# Lines in the format of vLLM 0.32.
SHARDS = "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<00:00, 10.95it/s]"
INIT = "(EngineCore pid=581) INFO [core.py:396] init engine (profile, create kv cache, warmup model) took 1.5 s"


@pytest.mark.parametrize(
    ("line", "stage", "percent"),
    [
        (SHARDS, "loading shards 2/4", 50.0),
        ("Prefetching checkpoint files: 70% (32/46)", "prefetching files 32/46", 70.0),
        (INIT, "engine ready", None),
        ("INFO:     Application startup complete.", "API server ready", None),
    ],
)
def test_progress_lines(line: str, stage: str, percent: float | None) -> None:
    found = progress(line)
    assert found is not None
    assert (found.stage, found.percent) == (stage, percent)


MANY = "(Worker pid=9) Multi-thread loading shards:  25% Completed | 1/4 [00:00<00:00, 10.95it/s]"
EAGER = "Loading safetensors checkpoint shards (eager):  75% Completed | 3/4 [00:00<00:00, 10.95it/s]"
WEIGHTS = "(RayWorkerProc pid=9) INFO 11-23 [loading.py:99] dsv4 weights: 20.100 of 78.412 GB at 3.104 GB/s"
SMALL = "INFO 11-23 [loading.py:99] dsv4 weights: 0.005 of 0.010 GB at 0.251 GB/s"


@pytest.mark.parametrize(
    ("lines", "stage", "percent"),
    [
        ([WEIGHTS], "loading 20.1/78.4 GB at 3.10 GB/s", 25.6),
        ([SHARDS, WEIGHTS], "loading shards 2/4, 20.1/78.4 GB at 3.10 GB/s", 25.6),
        ([WEIGHTS, EAGER], "loading shards 3/4, 20.1/78.4 GB at 3.10 GB/s", 25.6),
        ([MANY], "loading shards 1/4", 25.0),
        ([SMALL], "loading 5.0/10.0 MB at 0.25 GB/s", 50.0),
    ],
)
def test_progress_reports_files_and_bytes_of_the_weights_together(lines: list[str], stage: str, percent: float) -> None:
    told = None
    for line in lines:
        told = progress(line, told)
    assert told is not None
    assert (told.stage, told.percent) == (stage, percent)


def test_the_end_of_the_load_ends_its_figures() -> None:
    told = progress("Loading weights took 25.30 seconds", progress(WEIGHTS))
    assert told is not None
    assert (told.stage, told.weights) == ("weights loaded", None)


def test_other_lines_are_no_progress() -> None:
    assert progress("INFO: 127.0.0.1 - GET /health 200 OK") is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("api_server.py: error: unrecognized arguments: --no-such-flag", Cause.CONFIG_ERROR),
        ("OSError: [Errno 98] Address already in use", Cause.PORT_CONFLICT),
        ("RuntimeError: [enforce fail] posix_memalign: Cannot allocate memory", Cause.OUT_OF_MEMORY_HOST),
        ("ERROR 11-21 [ray_executor_v2.py:522] RayWorkerProc rank=[1] died unexpectedly", Cause.RAY_WORKER_DIED),
        ("2026-11-21 ERR scripts.py:1307 -- Some Ray subprocesses exited unexpectedly:", Cause.RAYLET_DIED),
        ("(EngineCore pid=427) ERROR 11-21 10:01:39 [core.py:1510] EngineCore failed to start.", None),
        ("ValueError: no such thing", None),
        (
            "ValueError: Free memory on device cuda:0 (9.1/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.3, 23.73 GiB). Decrease GPU memory utilization or reduce GPU memory used by other.",
            Cause.OUT_OF_MEMORY_GPU,
        ),
        ("RuntimeError: CUDA error: out of memory", Cause.OUT_OF_MEMORY_GPU),
        ("RuntimeError: CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", Cause.OUT_OF_MEMORY_GPU),
    ],
)
def test_fatal_lines(line: str, cause: Cause | None) -> None:
    assert fatal(line) == (line, cause)


def test_the_memory_of_the_weights() -> None:
    line = "INFO 11-20 03:12:45 [model_runner.py:425] Model loading took 78.42 GiB memory and 93.1 seconds"
    assert loaded_bytes(line) == round(78.42 * 2**30)
    assert loaded_bytes("Loading weights took 93.10 seconds") is None


def test_the_size_of_the_kv_cache() -> None:
    line = (
        "INFO [kv_cache_utils.py:2327] CPU KV cache size: 13,809 tokens, "
        "Maximum concurrency for 1,024 tokens per request: 13.49x"
    )
    assert kv_cache(line) == (13_809, 13.49)
    assert kv_cache("GPU KV cache size: unknown") is None


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: this error rate is low",
        "INFO no errors",
        "0 failed",
        "ERROR 11-21 16:33:53 [dump_input.py:72] Dumping input data for V1 LLM engine (v0.32.0) with config: model='x'",
    ],
)
def test_harmless_lines(line: str) -> None:
    assert fatal(line) is None


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("(APIServer pid=379) INFO [launcher.py:254] [shutdown] API server: shutdown triggered", True),
        ("INFO:     Shutting down", True),
        ("RayWorkerProc rank=[1] died unexpectedly, shutting down executor.", False),
    ],
)
def test_lines_of_a_shutdown_by_vllm_are_recognised(line: str, ends: bool) -> None:
    assert shutting_down(line) is ends


def test_lines_of_a_fatal_error_of_enginecore_are_recognised() -> None:
    assert core_failed("(EngineCore pid=1) ERROR 11-21 16:40:35 [core.py:1512] EngineCore encountered a fatal error.")
    assert core_failed(
        "(EngineCore_DP0 pid=1) ERROR 11-21 16:40:35 [core.py:2663] EngineCore encountered a fatal error."
    )
    assert not core_failed("EngineDeadError: EngineCore encountered an issue. See stack trace (above).")


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) ERROR 11-21 16:40:35 [serving.py:88] no model `EngineCore encountered a fatal error.`",
        "(APIServer pid=1) ERROR 11-21 16:40:35 [serving.py:88] no model `(EngineCore pid=1) ERROR 11-21 16:40:35"
        " [core.py:1512] EngineCore encountered a fatal error.`",
        "EngineCore encountered a fatal error.",
    ],
)
def test_text_of_clients_is_no_fatal_error_of_enginecore(line: str) -> None:
    assert not core_failed(line)


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        (
            "(APIServer pid=379) WARNING 11-23 10:00:00 [core_client.py:817] [shutdown] MPClient: engine core exited"
            " unexpectedly; starting cleanup",
            True,
        ),
        (
            "(APIServer pid=379) ERROR 10-23 18:21:12 [core_client.py:597] Engine core proc EngineCore_DP0 died"
            " unexpectedly, shutting down client.",
            True,
        ),
        ("(APIServer pid=1) ERROR 11-21 16:40:35 [serving.py:88] no model `engine core exited unexpectedly`", False),
        ("(APIServer pid=379) INFO [launcher.py:254] [shutdown] API server: shutdown triggered", False),
    ],
)
def test_lines_about_a_lost_enginecore_are_recognised(line: str, lost: bool) -> None:
    assert core_lost(line) is lost


AT = "11-26 08:28:54 [multiproc_executor.py:315]"


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        (f"(EngineCore pid=9) ERROR {AT} Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting", True),
        (f"(EngineCore_DP0 pid=9) ERROR {AT} Worker proc VllmWorker-0 died unexpectedly, shutting down", True),
        (f"(MainProcess pid=9) ERROR {AT} Worker proc VllmWorker-1 died unexpectedly (exit code: -9)", False),
        ("(APIServer pid=1) ERROR 11-21 16:40:35 [serving.py:88] no model `Worker proc X died unexpectedly`", False),
    ],
)
def test_lines_about_a_lost_worker_are_recognised(line: str, lost: bool) -> None:
    assert worker_lost(line) is lost


def traced(error: str, place: str = "core.py:1512", said: str = "EngineCore encountered a fatal error.") -> list[str]:
    """Lines of a traceback in vLLM's format."""
    origin = f"(EngineCore pid=402) ERROR 11-23 07:23:32 [{place}]"
    inner = ["Traceback (most recent call last):", '  File "core.py", line 1496, in run', "    busy_loop_func(self)"]
    return [f"{origin} {text}" for text in (said, *inner, error)]


API = "(APIServer pid=380) ERROR 11-23 07:23:32 [async_llm.py:906] AsyncLLM output_handler failed."

SURVIVED = "(EngineCore pid=402) ERROR 11-23 07:20:12 [fa_utils.py:212] Cannot use FA version 2: it is not installed"

BARE = [
    "Traceback (most recent call last):",
    '  File "plugins/__init__.py", line 69, in load_plugins_by_group',
    "    func = plugin.load()",
    "ModuleNotFoundError: No module named 'dsv4_kernels'",
]


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (traced("RuntimeError: Worker failed with error 'x'"), (0, "RuntimeError: Worker failed with error 'x'", None)),
        (
            traced("torch.OutOfMemoryError: CUDA out of memory.", said="EngineCore failed to start."),
            (0, "torch.OutOfMemoryError: CUDA out of memory.", Cause.OUT_OF_MEMORY_GPU),
        ),
        # Of two errors the first one caused the other. Lines of other processes and unrelated lines are not part of the
        # traceback.
        ([*traced("OSError: a"), *traced("ValueError: b")[1:]], (0, "OSError: a", None)),
        ([*traced("OSError: a")[:3], API, *traced("OSError: a")[3:]], (0, "OSError: a", None)),
        # A line with a known cause and EngineCore's own fatal line have priority over earlier errors.
        ([API, *traced("OSError: a")], (1, "OSError: a", None)),
        (
            [SURVIVED, *traced("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")],
            (1, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Cause.XID_ERROR),
        ),
        # Error whose text follows on the next lines; the first of them is included.
        (
            [*traced("tvm_ffi.DialectError:"), traced("error: cudaErrorIllegalAddress (700)")[-1], traced("more")[-1]],
            (0, "tvm_ffi.DialectError: error: cudaErrorIllegalAddress (700)", None),
        ),
        # Error of another process, followed by its traceback.
        (
            [
                *traced("ray.exceptions.RayTaskError(AttributeError): ray::RayWorkerProc.initialize_worker() (pid=9)"),
                *(traced("")[2:4]),
                traced("AttributeError: '_C' object has no attribute 'init_cpu_memory_env'")[-1],
            ],
            (
                0,
                "ray.exceptions.RayTaskError(AttributeError): AttributeError: '_C' object has no attribute "
                "'init_cpu_memory_env'",
                None,
            ),
        ),
        # The API server loads plugins before it configures logging.
        (
            ["Failed to load plugin dsv4", *BARE, "INFO 11-23 07:20:14 [api_utils.py:339] version 0.33.0"],
            (0, BARE[-1], Cause.PLUGIN_NOT_LOADED),
        ),
        (
            traced("ImportError: x", "__init__.py:72", "Failed to load plugin dsv4"),
            (0, "ImportError: x", Cause.PLUGIN_NOT_LOADED),
        ),
        (["Failed to load plugin dsv4", "one", *BARE], (0, None, Cause.PLUGIN_NOT_LOADED)),
        ([SURVIVED, "MemoryError"], (1, None, Cause.OUT_OF_MEMORY_HOST)),
        (["MemoryError", *traced("OSError: a")], (0, None, Cause.OUT_OF_MEMORY_HOST)),
        ([SURVIVED, API], (0, None, None)),
        ([traced("")[0], *traced("OSError: a", "core.py:9")[1:]], (0, None, None)),
        ([traced("")[0], traced("said at the same place")[4]], (0, None, None)),
    ],
)
def test_the_first_fatal_line_comes_with_the_error_of_its_traceback(
    tmp_path: Path, lines: list[str], first: tuple[int, str | None, Cause | None]
) -> None:
    path = tmp_path / "vllm.log"
    tail = LogTail(path)
    with path.open("w") as file:
        for line in lines:
            # Lines may also be read one at a time.
            file.write(f"{line}\n")
            file.flush()
            tail.read()
    at, error, cause = first
    assert tail.first_fatal == (f"{lines[at]} {error}" if error else lines[at], cause)
    tail.forget()
    assert tail.first_fatal is None
    tail.close()


def test_an_error_that_an_engine_served_in_spite_of_is_no_reason_for_its_death(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(f"{SURVIVED}\n")
    tail = LogTail(path)
    tail.read()
    tail.survived()
    assert tail.first_fatal is None
    with path.open("a") as file:
        file.write(f"{API}\n")
    tail.read()
    assert tail.first_fatal == (API, None)
    tail.close()


def test_workers_of_ray_are_read_from_files_of_their_own(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path / "session" / "logs")
    assert logs.read() == []
    (tmp_path / "session" / "logs").mkdir(parents=True)
    one, other, none = (
        tmp_path / "session" / "logs" / name for name in ("worker-a-1.out", "worker-b-2.err", "gcs.out")
    )
    for path in (one, other, none):
        path.write_text(f"{path.name}\n")
    assert logs.read() == ["worker-a-1.out", "worker-b-2.err"]
    with other.open("a") as file:
        file.write(
            "(Worker_TP0 pid=2) INFO 11-23 19:58:29 [loading.py:100] dsv4 weights: 0.115 of 0.115 GB at 0.306 GB/s\n"
        )
    (line,) = logs.read()
    found = progress(line)
    assert found is not None
    assert found.weights is not None
    assert (found.weights.bytes_done, found.weights.bytes_total) == (115_000_000, 115_000_000)
    logs.close()


def test_logs_of_ended_workers_are_closed_before_the_next_engine(tmp_path: Path) -> None:
    def open_logs() -> int:
        links = (os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())
        return sum(link.startswith(str(tmp_path)) for link in links)

    logs = WorkerLogs(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as waits, subprocess.Popen(["true"]) as ended:
        ended.wait(60)
        for worker in (waits, ended):
            for kind in ("out", "err"):
                (tmp_path / f"worker-{'0' * 56}-ffffffff-{worker.pid}.{kind}").write_text("an earlier line\n")
        assert len(logs.read()) == 4
        assert open_logs() == 4
        logs.forget()
        assert open_logs() == 2
        for path in tmp_path.iterdir():
            with path.open("a") as file:
                file.write(f"{path.name}\n")
        assert [str(waits.pid) in line for line in logs.read()] == [True, True]
        waits.kill()
    logs.close()
    assert open_logs() == 0


def test_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == []
    with path.open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == ["one"]
        file.write(b"o\n 10%\r 20%\r\x1b[31mred\x1b[0m\n")
        assert tail.read() == ["two", " 10%", " 20%", "red"]
        assert tail.read() == []
        file.write(b"x" * 5000)
        assert tail.read() == ["x" * 4096]
    tail.close()
    assert list(tail.last)[:2] == ["one", "two"]


def test_a_log_that_grew_too_large_keeps_its_last_half_and_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    tail = LogTail(path)
    with path.open("ab") as writer:
        writer.write(b"".join(b"line %04d\n" % number for number in range(1000)))
        writer.flush()
        assert len(tail.read()) == 1000
        bound(path, 20_000)
        assert path.stat().st_size == 10_000, "not too large"
        bound(path, 5_000)
        assert path.stat().st_size == 0
        kept = path.with_name("vllm.log.1").read_text().splitlines()
        assert (kept[-1], len(kept)) == ("line 0999", 249)
        writer.write(b"and on\n")
        writer.flush()
    assert tail.read() == ["and on"]
    assert path.stat().st_size == 7
    tail.close()
    bound(tmp_path / "missing.log", 1)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("(raylet) 1 worker(s) were killed due to the node running low on memory. x", Cause.RAY_MEMORY_KILL),
        ("OSError: [Errno 28] No space left on device: '/psm_1a2b'", Cause.SHARED_MEMORY_FULL),
        ("[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", Cause.NCCL_TIMEOUT),
    ],
)
def test_lines_that_name_a_cause(line: str, cause: Cause) -> None:
    assert fatal(line) == (line, cause)
