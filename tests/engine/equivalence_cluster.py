"""Two Ray nodes on this machine for `test_equivalence.py`, and the common parts of that test's processes."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

HEAD, WORKER = "127.0.0.1", "127.0.0.2"
_START_S = 60.0
_STOP_S = 15.0


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which vLLM and Ray run the nano model on a CPU (docs/decisions/0002-nano-model.md)."""
    settings = {
        "DSV4_DEV_PLATFORM": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TRANSFORMERS_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "VLLM_HOST_IP")}
    return {**inherited, **settings, **more}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants with SIGTERM, then with SIGKILL."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=_STOP_S)
    for survivor in alive:
        survivor.kill()
    process.wait(timeout=_STOP_S)


def _wait_until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"Ray did not start within {_START_S:.0f} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


@contextmanager
def two_ray_nodes(folder: Path) -> Iterator[str]:
    """Start a head and a worker with one device each, so that two ranks must go to two nodes; yield Ray's address."""
    ray = str(Path(sys.executable).with_name("ray"))
    address = f"{HEAD}:{_free_port()}"
    session = tempfile.mkdtemp(prefix="dsv4-ray-", dir="/tmp")  # Ray's sockets need a short path
    common = [
        "--num-gpus",
        "1",
        "--num-cpus",
        "1",
        "--object-store-memory",
        "80000000",
        "--disable-usage-stats",
        "--block",
    ]
    port = address.rsplit(":", 1)[1]
    head = ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", session]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for ip, arguments in ((HEAD, head), (WORKER, ["--address", address])):
            log = folder / f"ray-{ip}.log"
            with log.open("wb") as output:
                command = [ray, "start", "--node-ip-address", ip, *arguments, *common]
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(VLLM_HOST_IP=ip),
                    start_new_session=True,
                )
            processes.append(process)
            _wait_until_started(process, log)
        yield address
    finally:
        for process in reversed(processes):
            end(process)
        shutil.rmtree(session, ignore_errors=True)


def run_child(script: str, *arguments: object, log: Path, timeout_s: float, **env: str) -> None:
    """Run one of the helper scripts to its end, or fail with the last lines of its log."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**env), start_new_session=True
        )
    try:
        status = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end(process)
        status = None
    outcome = f"did not end within {timeout_s:.0f} s" if status is None else f"ended with status {status}"
    assert status == 0, f"{script} {outcome}:\n{log.read_text(errors='replace')[-4000:]}"
