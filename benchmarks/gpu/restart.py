"""Time from the death of an EngineCore to the next completion, with a standby server and by a start without one.

    python -m benchmarks.gpu.restart MODEL --runs 3 --out restart.json [--logs DIR] [-- further arguments of vLLM]

With `--ways retained …` also by a standby server that maps the weights of the previous engine. `--drop-cache` removes
the files of the checkpoint from the page cache before each restart. The ways alternate on one machine with equal
arguments and caches. A restart begins with SIGKILL of the EngineCore and includes the end of the old processes. The
standby server (`dsv4_runtime.vllm_plugin.warm_pool`) has finished its imports before, as in a group that has served for
a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from dsv4_runtime.util.keeper import VARIABLE, Keeper
from dsv4_runtime.vllm_plugin.warm_pool import WAITS

WAYS = ("standby", "cold", "retained")
_READY_SECONDS = 400.0
_IMPORT_SECONDS = 180.0
_END_SECONDS = 30.0
_TICK = 0.05
_POOL = "dsv4_runtime.vllm_plugin.warm_pool"
ENGINE = "VLLM::EngineCor"


def arguments(model: str, port: int, further: list[str]) -> list[str]:
    """Return vLLM's arguments; those with an effect on the start equal those of `dsv4 up`."""
    return [
        *("--model", model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "8192", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192"),
        *("--kv-cache-dtype", "fp8", "--block-size", "256", "--kv-cache-memory-bytes", str(4 << 30)),
        *("--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching"),
        *("--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64"),
        *further,
    ]


def free_port() -> int:
    """Return a currently unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Standby:
    """A standby server."""

    def __init__(self, model: str, log: Path) -> None:
        self._log = log
        self._own, theirs = socket.socketpair()
        with log.open("ab") as output:
            command = [sys.executable, "-m", _POOL, "server", model, "worker"]
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=output, stderr=output, env=dict(os.environ), start_new_session=True
            )
        theirs.close()

    def imported(self) -> None:
        """Wait until its imports are finished."""
        begun = time.monotonic()
        while WAITS not in self._log.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(f"the standby server ended with {self.process.returncode}: see {self._log}")
            if time.monotonic() - begun > _IMPORT_SECONDS:
                raise TimeoutError(f"imports take more than {_IMPORT_SECONDS:.0f} s")
            time.sleep(0.5)

    @property
    def memory(self) -> int:
        """Return the bytes that only it uses."""
        return int(psutil.Process(self.process.pid).memory_full_info().uss)

    def become(self, args: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Send the order to become the server."""
        order = {"args": args, "env": dict(os.environ), "log": str(log)}
        self._own.sendall(f"{json.dumps(order)}\n".encode())
        return self.process


def cold(args: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the server in a new interpreter."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *args]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(os.environ),
            start_new_session=True,
        )


def completion(port: int) -> str | None:
    """Return a greedy completion; None without a response."""
    body = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except OSError:
        return None


def until_completion(server: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """Wait for the first completion and return it."""
    begun = time.monotonic()
    while (text := completion(port)) is None:
        if server.poll() is not None or time.monotonic() - begun > _READY_SECONDS:
            raise RuntimeError(f"the server does not serve (exit code {server.poll()}): see {log}")
        time.sleep(_TICK)
    return text


def end(server: subprocess.Popen[bytes]) -> None:
    """Kill the EngineCore of a server, and wait for the end of all its processes."""
    own = psutil.Process(server.pid)
    tree = own.children(recursive=True)
    cores = [process for process in tree if process.name().startswith(ENGINE)]
    if not cores:
        raise RuntimeError(f"no EngineCore below process {server.pid}: {[process.name() for process in tree]}")
    for process in cores:
        process.kill()
    for process in [*tree, own]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait(_END_SECONDS)
    psutil.wait_procs(tree, _END_SECONDS)


def device_memory() -> list[int]:
    """Return MiB in use on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True, timeout=30.0).split()]


def drop_cache(model: Path) -> None:
    """Remove the files of a checkpoint from the page cache."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `further` has the arguments after `--`."""
    usage = "%(prog)s MODEL --out FILE [options] [-- further arguments of vLLM]"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=usage)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3, help="restarts of each way (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:2]))
    parser.add_argument(
        "--drop-cache", action="store_true", help="remove the checkpoint from the page cache before restarts"
    )
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("restart-logs"))
    # A positional argument of any length would be complete, and empty, before the first option (Python 3.11).
    own = list(itertools.takewhile(lambda word: word != "--", arguments))
    return parser.parse_args(own, argparse.Namespace(further=list(arguments[len(own) + 1 :])))


def main() -> None:
    """Read the options, measure and write the result."""
    options = read_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(DSV4_KERNELS=options.kernels, VLLM_WORKER_MULTIPROC_METHOD="fork")
    options.logs.mkdir(parents=True, exist_ok=True)
    keeper = Keeper(options.logs / "keeper.sock") if "retained" in options.ways else None
    if keeper is not None:
        os.environ[VARIABLE] = str(keeper.path.absolute())
    found: dict[str, Any] = {
        "model": options.model,
        "restarts": {way: [] for way in options.ways},
        "texts": [],
        "gpu_mib": [],
        "host_mib": [],
    }

    def start(way: str, number: int, waiting: Standby | None) -> tuple[subprocess.Popen[bytes], int]:
        port, log = free_port(), options.logs / f"{number}-{way}.log"
        args = arguments(options.model, port, options.further)
        begun = time.time()
        server = waiting.become(args, log) if waiting is not None else cold(args, log)
        try:
            text = until_completion(server, port, log)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            raise
        found["texts"].append(text)
        print(f"{number} {way}: first completion {time.time() - begun:.1f} s after the start", flush=True)
        return server, port

    # A way that is named twice runs twice as often.
    order = dict(enumerate(options.ways * options.runs, 1))
    # All standby servers import at once, while the first engine starts: each needs 30 s.
    ready = {
        number: Standby(options.model, options.logs / f"{number}-waiting.log")
        for number, way in order.items()
        if way != "cold"
    }
    server = None
    try:
        server, _ = start("first", 0, None)
        for number, way in order.items():
            waiting = ready.pop(number, None)
            if waiting is not None:
                waiting.imported()
                found["standby"] = {"uss_mib": waiting.memory >> 20}
            if options.drop_cache:
                drop_cache(Path(options.model))
            begun = time.monotonic()
            end(server)
            if keeper is not None and way != "retained":
                keeper.drop(f"for a restart of the way {way}")
            server, _ = start(way, number, waiting)
            found["restarts"][way].append(time.monotonic() - begun)
            found["gpu_mib"].append(device_memory())
            # Memory of processes and shared memory, without that of waiting servers and the page cache.
            host, waits = psutil.virtual_memory(), sum(one.memory for one in ready.values())
            found["host_mib"].append((host.total - host.available - waits) >> 20)
            memory = f"{found['gpu_mib'][-1]} MiB on GPUs, {found['host_mib'][-1]} MiB of the host"
            figures = f"{found['restarts'][way][-1]:.1f} s from SIGKILL to the completion, {memory}"
            print(f"{number} {way}: {figures}", flush=True)
            options.out.write_text(json.dumps(found))
    finally:
        for one in ready.values():
            one.process.kill()
        if server is not None and server.poll() is None:
            end(server)
    medians = {way: statistics.median(found["restarts"][way]) for way in options.ways}
    found.update(medians=medians, same=len(set(found["texts"])) == 1)
    options.out.write_text(json.dumps(found))
    print(f"medians in seconds {medians}, tokens equal: {found['same']}, {found.get('standby')}")


if __name__ == "__main__":
    main()
