"""Compile plans before they are made, without a GPU: `python -m dsv4_kernels.precompile ARCH MULTIPROCESSORS`.

The first engine on a machine compiles a hundred kernels, one after another in its own process. They are known as soon
as the layers of the model exist: this program compiles them in processes of its own while the weights are loaded, and
the engine finds them in Triton's cache. Each line of standard input is a plan, a JSON object:

    {"plan": "dsv4_kernels.router.api:RouterPlan", "args": [8192, 4096, 256, 6], "options": {}}

"device" among the arguments stands for the torch device. Standard output has a line for each compiled plan with its
time, or with the error. An empty line stops the program once all plans are compiled; the end of the input stops it at
once, so that it does not outlive a killed engine. Five minutes without a line stop it too, since it holds memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from dsv4_kernels.arch import Arch, TargetGPU, compile_for
from dsv4_kernels.plan import Plan

DEVICE = "device"
"""Stands for the torch device among a plan's arguments."""
_LOCK = "dsv4-precompile.lock"
_MARKS = "dsv4-precompiled"
_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 300
_REPORTING = threading.Lock()
_SHARES = 4
"""Most processes that compile one plan; the largest would else take as long as all others together."""


class CompileOnly:
    """Triton driver without a device: `arch` is the target of the compiler.

    Triton keeps the target of a device number, so a process that compiles for several needs a number for each.
    """

    launches = False

    def __init__(self, arch: Arch, device: int = 0) -> None:
        self._target, self._device = GPUTarget("cuda", arch.spec.capability, 32), device

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def line(plan: type[Plan], *args: Any, **options: Any) -> str:
    """Return the line of the input that describes `plan(*args, **options)`; `DEVICE` where the device is."""
    name = f"{plan.__module__}:{plan.__qualname__}"
    # Sizes may be integers of another kind, as NumPy's are.
    return json.dumps({"plan": name, "args": args, "options": options}, sort_keys=True, default=int)


def compiled_mark(described: str, target: TargetGPU) -> Path:
    """Return the file that is there once the plan of a `line` has been compiled into Triton's cache for `target`.

    It lies in that cache, so that it goes with it; another release of Triton or of the kernels has other marks.
    """
    whole = json.dumps([described, target.arch, target.multiprocessors, triton.__version__, _sources()])
    return Path(triton.knobs.cache.dir, _MARKS, hashlib.sha256(whole.encode()).hexdigest())


def was_used_before() -> bool:
    """Return whether any plan has been compiled into Triton's cache."""
    return any(Path(triton.knobs.cache.dir, _MARKS).glob("*"))


@functools.cache
def _sources() -> str:
    """Return the SHA-256 of the package's Python files."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def launch_nothing(target: TargetGPU) -> None:
    """Make every later launch in this process compile its kernel for `target` without launching it.

    As `JITFunction.warmup` does; the launches are those of the plans' own code, with tensors on "meta".
    """
    compile_for(target)
    driver.set_active(CompileOnly(target.arch))
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Not returned: a `Launcher` would keep and launch it.
        if compiled is not None and compiled.hash not in made:
            made.add(compiled.hash)
            compile_launcher(compiled)

    made: set[str] = set()
    JITFunction.run = compile_only


def prepare_forks() -> None:
    """Do the work that each process would repeat before its first kernel.

    torch imports its compiler for arithmetic on "meta", and Triton hashes all its files for the keys of its cache.
    """
    _ = torch.empty(1, device="meta") * 2
    triton_key()


def compile_launcher(kernel: Any) -> None:
    """Compile the host launcher of a kernel, where Triton has a C compiler build one for each kind of arguments.

    Triton 3.6 does so at the first launch of a kernel, in a quarter of a second each; later versions share one.
    """
    if hasattr(nvidia, "make_launcher"):
        # A missing launcher is reported by the launch.
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def share_of_kernels(index: int, count: int) -> Iterator[list[str]]:
    """Compile one of `count` shares of the launched kernels inside the context; yield the names of the compiled ones.

    Processes that launch the same kernels compile all of them together, each kernel once.
    """
    taken: list[str] = []

    def is_of_another(*, key: str, fn: Any, **_: Any) -> bool:
        # Hashed even so: some kernels' hashes depend on those before (see `hash_helpers`).
        share = zlib.crc32(f"{fn.jit_function.cache_key}{key}".encode()) % count
        if share == index:
            taken.append(fn.name)
        return share != index

    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = is_of_another
    try:
        yield taken
    finally:
        triton.knobs.runtime.jit_cache_hook = previous


def compile_plan(described: str, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Compile the kernels of the plan of a `line`, or one of `shares` of them; return line, kernels, seconds, error."""
    begun, error = time.monotonic(), None
    with share_of_kernels(share, shares) as kernels:
        try:
            make_plan(described, torch.device("meta")).warmup()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
    seconds = round(time.monotonic() - begun, 1)
    return {"plan": described, "kernels": len(kernels), "seconds": seconds, "error": error}


def make_plan(described: str, device: torch.device) -> Plan:
    """Make the plan of a `line` on `device`.

    Raises:
        ValueError: the line is no JSON, or the plan cannot have that size.
        AttributeError, ImportError, KeyError, TypeError: there is no such plan, or it takes other arguments.
    """
    wanted = json.loads(described)
    module, _, name = wanted["plan"].partition(":")
    kind: type[Plan] = getattr(importlib.import_module(module), name)

    def place(argument: Any) -> Any:
        return device if argument == DEVICE else argument

    return kind(*map(place, wanted["args"]), **{name: place(one) for name, one in wanted["options"].items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the plans on standard input."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_kernels.precompile", description=__doc__.partition(":")[0])
    parser.add_argument("arch", type=Arch, choices=list(Arch))
    parser.add_argument("multiprocessors", type=int)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    signal.alarm(_IDLE_SECONDS)
    cache = Path(triton.knobs.cache.dir)
    Path(cache, _MARKS).mkdir(parents=True, exist_ok=True)
    with (cache / _LOCK).open("w") as lock:
        # Ranks of one machine compile the same plans: the first fills the cache of the others.
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch_nothing(TargetGPU(options.arch, options.multiprocessors))
        torch.set_num_threads(1)
        prepare_forks()
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(
            options.processes, mp_context=context, initializer=_end_with_parent, initargs=(os.getpid(),)
        ) as pool:
            shares = max(1, min(_SHARES, options.processes // _SHARES))
            if not _submit(pool, sys.stdin, TargetGPU(options.arch, options.multiprocessors), shares):
                os._exit(1)


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the request.
        os._exit(1)


def _submit(pool: ProcessPoolExecutor, lines: Iterator[str], target: TargetGPU, shares: int) -> bool:
    """Compile every line once, in `shares`; return whether an empty line ended them."""
    seen: set[str] = set()
    for one in lines:
        signal.alarm(_IDLE_SECONDS)
        if not (described := one.strip()):
            signal.alarm(0)
            return True
        if described in seen:
            continue
        seen.add(described)
        found: list[dict[str, Any]] = []
        for share in range(shares):
            future = pool.submit(compile_plan, described, share, shares)
            future.add_done_callback(functools.partial(_collect, found, shares, target))
    return False


def _collect(found: list[dict[str, Any]], shares: int, target: TargetGPU, done: Future[dict[str, Any]]) -> None:
    """Add a share to those `found` of its plan; print the plan once all are there.

    Called by the thread of the pool, and by the main one for a share that ended before its callback was added.
    """
    if done.cancelled() or done.exception() is not None:
        return
    with _REPORTING:
        found.append(done.result())
        if len(found) < shares:
            return
        errors = [one["error"] for one in found if one["error"] is not None]
        whole = {
            "plan": found[0]["plan"],
            "kernels": sum(one["kernels"] for one in found),
            "seconds": max(one["seconds"] for one in found),
            "error": errors[0] if errors else None,
        }
        if not errors:
            # Without the mark a later start compiles the plan again.
            with contextlib.suppress(OSError):
                compiled_mark(whole["plan"], target).touch()
        print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    main()
