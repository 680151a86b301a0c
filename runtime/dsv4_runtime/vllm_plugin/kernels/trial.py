"""Trials of all providers within a time limit, storage of conclusive outcomes, and the choice.

    python -m dsv4_runtime.vllm_plugin.kernels.trial CONFIG.JSON --tensor-parallel 2

Each provider of each operation runs in a separate process on the GPU of the calling process, since a wrong kernel may
end its process or never return. A provider whose process ends, or is killed at the time limit, is excluded from the
choice of this start. Outcomes are stored by card, power limit, driver, versions, sources, environment and shapes
(`evidence.Kept`). No file is required: an unreadable or unwritable file costs one warning, and the providers are tried
again at the next start.

The child process (`--child FOLDER < jobs.json`) imports torch, Triton and the operations once, and forks a process per
provider. Imports of single providers follow in their processes: vLLM's modules take 15 s on a machine where torch takes
3. Each process writes a line of JSON (`evidence.Seen`) per finished trial to a file in FOLDER. First, concurrently with
other providers, everything is compiled, run once and compared; then correct providers are timed with the lock
FOLDER/lock, one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import psutil
import torch

import dsv4_kernels
from dsv4_kernels.registry import as_outputs, compare, fresh
from dsv4_runtime.contract.kernels import KernelChoice, Op
from dsv4_runtime.util.files import replace_file
from dsv4_runtime.vllm_plugin.forking import end_with_parent
from dsv4_runtime.vllm_plugin.kernels.evidence import (
    ABSENT,
    WRONG,
    Kept,
    Seen,
    Standing,
    Trial,
    choose,
    standings,
    trials,
)
from dsv4_runtime.vllm_plugin.kernels.providers import find, names

LOGGER = logging.getLogger("vllm.dsv4")
SECONDS = 20.0
"""Time limit of all trials together, without stored outcomes."""
CHILD = (sys.executable, "-m", "dsv4_runtime.vllm_plugin.kernels.trial", "--child")
DIRECTORY = "DSV4_KERNELS_CACHE"
"""Environment variable: folder of stored outcomes; default `~/.cache/dsv4/kernels`."""
PACKAGES = (
    "torch", "triton", "vllm", "flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin", "b12x", "deep-gemm",
    "flash-mla", "tilelang", "apache-tvm-ffi", "nvidia-cutlass-dsl", "quack-kernels", "dsv4", "dsv4-kernels",
)  # fmt: skip
"""Packages of providers and their compilers."""
_VARIABLES = (
    "VLLM_USE_", "VLLM_DEEP_GEMM", "VLLM_MOE", "VLLM_FLASH", "VLLM_MXFP4", "VLLM_MARLIN", "VLLM_B12X", "VLLM_TRITON",
    "VLLM_DISABLED_KERNELS", "VLLM_BLOCKSCALE", "VLLM_SPARSE", "DG_", "FLASHINFER_", "B12X_", "TRITON_", "CUTE_",
    "TILELANG_", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
# Prefixes of variables that affect the available kernels and their compilation.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_AGAIN_SECONDS = 86400.0
"""Time after which a start tries providers without a conclusive outcome again: the restart of an engine that served
must not take `SECONDS` longer."""
_WAIT_SECONDS = 10.0
# For the lock, in addition to twice the time limit: longer than a complete trial of another process.
_GONE_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Evidence:
    """Observations on `machine` (card, driver, versions), results of the providers, and the resulting choice."""

    machine: Mapping[str, str]
    seen: tuple[Seen, ...]
    standings: tuple[Standing, ...]
    choice: KernelChoice
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "choice": {str(op): self.choice.provider(op) for op in Op},
            "seconds": round(self.seconds, 1),
            "standings": [asdict(one) for one in self.standings],
            "seen": [one.to_dict() for one in self.seen],
        }


def machine() -> dict[str, str]:
    """Return the dependencies of a trial besides the shapes.

    The card and its limits, the driver, versions, the sources of the kernels, and the environment.
    """
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {"gpu": card.name, "capability": f"{card.major}.{card.minor}", "cuda": str(torch.version.cuda)}
    # These distinguish parts of a card (MIG); the name may be equal.
    found |= {"multiprocessors": str(card.multi_processor_count), "memory": str(card.total_memory)}
    with contextlib.suppress(Exception):
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import pynvml

        pynvml.nvmlInit()
        limit = pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{card.uuid}"))
        found["power limit"] = f"{limit / 1000:.0f} W"
    with contextlib.suppress(OSError, ValueError):
        found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found["nvcc"] = shutil.which("nvcc") or "none"
    named = sorted(name for name in os.environ if name.startswith(_VARIABLES) and "CACHE" not in name)
    return found | {name: os.environ[name] for name in named} | {"sources": sources()}


@functools.cache
def sources() -> str:
    """Return the SHA-256 of the Python files of kernels and trials; "unreadable" without them."""
    found = hashlib.sha256()
    try:
        kernels = sorted(Path(dsv4_kernels.__file__).parent.rglob("*.py"))
        for file in (*kernels, *sorted(Path(__file__).parent.glob("*.py"))):
            found.update(file.read_bytes())
    except (OSError, ValueError):
        return "unreadable"
    return found.hexdigest()


class _Files:
    """The file of stored outcomes, and its lock. Errors are recorded once per kind and never raised."""

    def __init__(self, key: str) -> None:
        self.faults: dict[str, str] = {}
        self.place: Path | None = None
        with self._noting("be kept"):
            folder = Path(os.environ.get(DIRECTORY) or Path.home() / ".cache" / "dsv4" / "kernels")
            folder.mkdir(parents=True, exist_ok=True)
            self.place = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self.faults.setdefault(what, f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock of the machine, waiting at most `seconds`; continue without it on errors."""
        with contextlib.ExitStack() as held:
            with self._noting("be locked"):
                if self.place is not None:
                    self._lock(held.enter_context(self.place.with_suffix(".lock").open("w")), seconds)
            yield

    def _lock(self, file: Any, seconds: float) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"another process holds it for {seconds:.0f} s")

    def read(self) -> tuple[Kept, float, int]:
        """Return stored outcomes, end time and process id of the last trial; empty values if unreadable."""
        if self.place is None:
            return Kept(), 0.0, 0
        text = "{}"
        with self._noting("be read"), contextlib.suppress(FileNotFoundError):
            text = self.place.read_text()
        # A truncated file, or one of another release, is replaced.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            document = json.loads(text)
            return Kept.from_dict(document), float(document["ended"]), int(document["process"])
        return Kept(), 0.0, 0

    def write(self, kept: Kept) -> None:
        if self.place is None:
            return
        with self._noting("be kept"):
            document = {**kept.to_dict(), "ended": time.time(), "process": os.getpid()}
            replace_file(self.place, json.dumps(document), mode=0o644)

    def warn(self) -> None:
        """Log recorded errors in one line."""
        if self.faults:
            what = "; ".join(f"cannot {what} ({why})" for what, why in self.faults.items())
            LOGGER.warning("dsv4 kernels: evidence %s: providers are tried again at the next start", what)


def evidence(config: Mapping[str, Any], tensor_parallel: int, seconds: float = SECONDS, **cut: Any) -> Evidence:
    """Return the evidence for a rank of the model of `config`, stored or gathered now.

    Concurrent callers (the ranks of one machine) wait for the first.

    Args:
        config: the model's `config.json`.
        tensor_parallel: ranks that share a layer's heads.
        seconds: time limit of the trials of this start.
        cut: further division among the engine's ranks (`evidence.trials`).
    """
    called, begun = time.time(), time.monotonic()
    tried, here = trials(config, tensor_parallel, **cut), machine()
    jobs = _jobs(tried)
    files = _Files(json.dumps([here, [(t.op, t.name, dict(t.params)) for t in tried]], sort_keys=True))
    with files.locked(2 * seconds + _WAIT_SECONDS):
        kept, ended, process = files.read()
        is_recent = bool(kept.seen) and 0.0 <= time.time() - ended < _AGAIN_SECONDS
        wanted = () if is_recent else kept.open(jobs, tried)
        if wanted and not _same_start(ended, process, called):
            kept = kept.after(_gathered(tried, seconds, wanted), tried)
            if kept.seen:
                files.write(kept)
            else:
                LOGGER.warning("dsv4 kernels: no provider of any operation could be tried; nothing is kept of it")
    files.warn()
    seen = kept.outcomes(tried)
    found = standings(seen, tried)
    eight = float(here["capability"]) >= 10
    return Evidence(here, seen, found, choose(found, eight_bit_activations=eight), time.monotonic() - begun)


def _same_start(ended: float, process: int, called: float) -> bool:
    """Return whether the last trial was made by another rank of this start: while this process ran, or waited."""
    if ended > time.time():
        # The clock was set back.
        return False
    if ended >= called:
        return True
    with contextlib.suppress(psutil.Error, OSError):
        return process != os.getpid() and ended >= psutil.Process().create_time()
    return False


def _gathered(tried: Sequence[Trial], seconds: float, only: Collection[tuple[Op, str]]) -> tuple[Seen, ...]:
    """Return the result of `gather`; if it cannot run, the error as the fault of every provider."""
    try:
        return gather(tried, seconds, only=only)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        fault = f"{type(error).__name__}: {error}"
        return tuple(Seen(op, trial.name, name, fault=fault) for op, name in only for trial in tried if trial.op is op)


def _jobs(tried: Sequence[Trial]) -> tuple[tuple[Op, str], ...]:
    """Return all providers of all operations with trials."""
    with_trials = {trial.op for trial in tried}
    return tuple((op, name) for op in Op if op in with_trials for name in names(op))


def visible(index: int, name: str, uuid: str, given: str | None) -> str | None:
    """Return `CUDA_VISIBLE_DEVICES` of a child that uses one device of this process; None: unchanged.

    Args:
        index: number of the device in this process.
        name: its name.
        uuid: its UUID without the prefix; empty if unknown.
        given: value of the variable in this process.
    """
    entries = [entry.strip() for entry in (given or "").split(",") if entry.strip()]
    entry = entries[index] if index < len(entries) else None
    # CUDA reports another UUID for a part of a card (MIG).
    if "MIG" in name or (entry or "").startswith("MIG-"):
        return entry
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else entry or str(index)


def _own_device() -> dict[str, str]:
    """Return the environment variable that limits a child to the GPU of this process."""
    index, name, uuid = 0, "", ""
    with contextlib.suppress(Exception):
        index = torch.cuda.current_device()
        card = torch.cuda.get_device_properties(index)
        name, uuid = str(card.name), str(card.uuid)
    found = visible(index, name, uuid, os.environ.get(_VISIBLE))
    return {} if found is None else {_VISIBLE: found}


def output(folder: Path, op: Op, name: str) -> Path:
    """Return the output file of a provider's process; its exit status has the suffix `.ended`."""
    return folder / f"{op}-{name}"


def gather(
    tried: Sequence[Trial],
    seconds: float,
    child: Sequence[str] = CHILD,
    only: Collection[tuple[Op, str]] | None = None,
) -> tuple[Seen, ...]:
    """Run all providers of all operations with trials; kill unfinished ones after `seconds`.

    Args:
        tried: the trials.
        seconds: time limit of all together.
        child: command; gets the folder of the results as argument and the providers with their trials as JSON.
        only: operations and providers to run; None: all.

    Raises:
        OSError: no folder for the results, or no process can be started.
    """
    jobs = [
        (op, name, [trial for trial in tried if trial.op is op])
        for op, name in (_jobs(tried) if only is None else only)
    ]
    with tempfile.TemporaryDirectory(prefix="dsv4-kernels-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        ended = _run_all(jobs, seconds, child, folder)
        seen: list[Seen] = []
        for op, name, trials_of in jobs:
            written = output(folder, op, name)
            own, text = ended or None, ""
            with contextlib.suppress(OSError, ValueError):
                own = int(written.with_suffix(".ended").read_text())
            with contextlib.suppress(OSError):
                text = written.read_text(errors="replace")
            seen += _results(op, name, text, trials_of, own, seconds)
    return tuple(seen)


def _run_all(
    jobs: Sequence[tuple[Op, str, Sequence[Trial]]], seconds: float, child: Sequence[str], folder: Path
) -> int | None:
    """Run the providers for at most `seconds`; return the exit code of their parent, None if it had not ended."""
    wanted = [{"op": op, "provider": name, "trials": list(map(asdict, its))} for op, name, its in jobs]
    given = folder / "jobs.json"
    given.write_text(json.dumps({"parent": os.getpid(), "jobs": wanted}))
    with given.open() as source:
        process = subprocess.Popen(
            [*child, str(folder)],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | _own_device(),
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    ended = process.poll()
    # With its children.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Killed providers hold their memory until they have ended.
    begun = time.monotonic()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while ended is None and time.monotonic() - begun < _GONE_SECONDS:
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
    return ended


def _results(op: Op, name: str, text: str, tried: Sequence[Trial], ended: int | None, seconds: float) -> list[Seen]:
    """Return the outcomes printed by a child, and a fault for each missing trial."""
    seen = []
    for line in text.splitlines():
        # A killed process may leave a part of a line.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            seen.append(Seen.from_dict(json.loads(line)))
    if ended is None:
        fault = f"not done after {seconds:.0f} s"
    elif ended < 0:
        # Most real-time signals have no name.
        known = -ended in list(signal.Signals)
        fault = f"its process was ended by {signal.Signals(-ended).name if known else f'signal {-ended}'}"
    else:
        fault = f"its process ended with {ended}"
    done = {one.trial for one in seen}
    return seen + [Seen(op, trial.name, name, fault=fault) for trial in tried if trial.name not in done]


def large_products() -> bool:
    """Return whether FP8 products of prompts are bundled on this card: whether the kernels have a body for them."""
    return tuple(torch.cuda.get_device_capability()) == (9, 0)


def main() -> None:
    """Print the evidence for a model's configuration as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="the model's config.json")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="ranks have whole experts")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    found = evidence(
        json.loads(options.config.read_text()), options.tensor_parallel, options.seconds,
        data_parallel=options.data_parallel, expert_parallel=options.expert_parallel,
        large_products=large_products(),
    )  # fmt: skip
    print(json.dumps(found.to_dict(), indent=1))


ROUNDS = 15
_FLUSH_BYTES = 256 << 20


def try_one(op: Op, name: str, trial: Trial, device: torch.device) -> tuple[Seen, Callable[[], Any] | None]:
    """Return the outcome of the provider, and a call to time if it is correct or known to be rough."""
    compared = False
    try:
        row, provider = find(trial.operation, name)
        reason = provider.missing()
        if reason is not None:
            return Seen(op, trial.name, name, fault=f"{ABSENT}: {reason}"), None
        inputs = row.make_inputs(trial.params, device, 0)
        expected = as_outputs(row.reference(**fresh(row, inputs), exact=True))
        run = provider.make(trial.params, device)
        found = as_outputs(run(**fresh(row, inputs)))
        results = tuple(None if out is None else out.clone() for out in found)
        torch.cuda.synchronize()
        compared = True
        errors = compare(row, results, expected)
    except Exception as error:
        # Assertions of the provider itself are no comparison.
        if compared and isinstance(error, AssertionError):
            why = f"it {provider.rough}: {error}" if provider.rough else str(error)
            rough = (lambda: run(**inputs)) if provider.rough else None
            return Seen(op, trial.name, name, fault=f"{WRONG}{why}"[:300]), rough
        return Seen(op, trial.name, name, fault=f"{type(error).__name__}: {error}".splitlines()[0][:300]), None
    return Seen(op, trial.name, name, error=max(e.rms for e in errors.values())), lambda: run(**inputs)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replay of `call` as a CUDA graph, as in an engine; `call` itself if the capture fails."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return lambda: graph.replay()


def time_cold(call: Callable[[], Any]) -> float:
    """Return the median microseconds of `call` with a cold L2 cache."""
    run = captured(call)
    flush = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    marks = []
    for _ in range(ROUNDS + 2):
        # A read evicts the cache; writes would leave lines to write back within the timed span.
        torch.sum(flush, dim=0, out=total)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in marks[2:]))


def try_provider(op: Op, name: str, tried: Sequence[Trial], lock: Path, results: IO[str]) -> None:
    """Write the outcome of each trial of the provider: correctness, then time, alone on the card.

    Not to the standard output, to which libraries print.
    """

    def write(seen: Seen) -> None:
        print(json.dumps(seen.to_dict()), file=results, flush=True)

    device = torch.device("cuda", torch.cuda.current_device())
    right = []
    for trial in tried:
        seen, call = try_one(op, name, trial, device)
        if call is None:
            write(seen)
        else:
            right.append((seen, call))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for seen, call in right:
            write(replace(seen, microseconds=time_cold(call)))


def _fork_provider(job: Mapping[str, Any], folder: Path) -> int:
    """Start the process of one provider, its output in `folder`; return its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        end_with_parent(parent)
        op, name = Op(job["op"]), job["provider"]
        tried = [Trial(**{**one, "op": op}) for one in job["trials"]]
        with output(folder, op, name).open("w") as results:
            try_provider(op, name, tried, folder / "lock", results)
        status = 0
    finally:
        # Without the parent's exit handlers.
        os._exit(status)


def run_child(folder: Path) -> None:
    """Try the providers listed on standard input concurrently, each in a forked process."""
    given = json.load(sys.stdin)
    end_with_parent(given["parent"])
    if torch.cuda.is_initialized():
        raise SystemExit("an import initialised CUDA, which does not live through a fork")
    running = {_fork_provider(job, folder): output(folder, Op(job["op"]), job["provider"]) for job in given["jobs"]}
    while running:
        pid, status = os.wait()
        if (place := running.pop(pid, None)) is not None:
            place.with_suffix(".ended").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(Path(sys.argv[2]))
    else:
        main()
