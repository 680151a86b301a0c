"""Plans of the bundled kernels: one per shape and process, compiled by other processes while the weights load.

The shapes of a layer are known at its construction; its plan is made later, some after the weights, some at the first
step. `announce` starts the compilation of the plan's kernels (`dsv4_kernels.precompile`), and the plan's own warm-up
finds them in Triton's cache. Nothing depends on it: the warm-up compiles all missing kernels.

FP8 codes accompany the tensor that they encode, from the kernel that produces both to the products. vLLM passes a
layer's input to its linear layers as the same object, also through custom operators and onto side streams, so that an
attribute of it is preserved. A tensor that vLLM derives from it (gathered, padded, a weak reference of a graph) lacks
the attribute, and the product quantizes as usual. Codes are valid as long as the values of their tensor: the plan's
next run overwrites both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from dsv4_kernels.arch import TargetGPU, detect, multiprocessors
from dsv4_kernels.numerics import ds_mla
from dsv4_kernels.plan import Plan
from dsv4_kernels.precompile import DEVICE, compiled_mark, line, was_used_before
from dsv4_runtime.vllm_plugin.kernels.choice import MOST_COMPILERS

__all__ = ["DEVICE", "announce", "announced_plan", "begin", "begin_anew", "finish", "gpu_target", "needed_later"]
T = TypeVar("T")
P = TypeVar("P", bound=Plan)
LOGGER = logging.getLogger("vllm.dsv4")
_FINISH_SECONDS = 60.0
_GONE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_PLANS: dict[Hashable, Any] = {}
_WARMED: set[Hashable] = set()


def shared_plan(key: Hashable, make: Callable[[], T]) -> T:
    """Return the plan with this key, made by the first caller.

    Layers of one kind run in sequence on one stream and share the plan's buffers. A kernel that runs concurrently on
    another stream needs a separate key.
    """
    if key not in _PLANS:
        _PLANS[key] = make()
    found: T = _PLANS[key]
    return found


def shared_plans() -> dict[Hashable, Any]:
    """Return all shared plans by key."""
    return dict(_PLANS)


@contextlib.contextmanager
def without_keeping_plans() -> Iterator[None]:
    """Discard the plans made within this context."""
    kept = dict(_PLANS)
    try:
        yield
    finally:
        _PLANS.clear()
        _PLANS.update(kept)


def warm_up() -> int:
    """Compile all variants of all new plans in threads; return the number of plans.

    Triton compiles mostly outside of Python's lock. One thread warms each plan on the stream of the caller: its
    launches run in sequence, and plans share no buffers.
    """
    fresh = [key for key in _PLANS if key not in _WARMED]
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def compile_plan(key: Hashable) -> None:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.inference_mode(), on_stream:
            _PLANS[key].warmup()

    with ThreadPoolExecutor(max_workers=min(len(fresh), MOST_COMPILERS, os.cpu_count() or 1) or 1) as pool:
        list(pool.map(compile_plan, fresh))
    _WARMED.update(fresh)
    return len(fresh)


@dataclass
class _Compiler:
    """The compiling process for a GPU; `process` is None if it could not be started."""

    target: TargetGPU
    process: subprocess.Popen[str] | None
    announced: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    """Members of `announced` that vLLM's profile does not launch."""
    compiled: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    running: ClassVar[_Compiler | None] = None

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, name="dsv4-precompile", daemon=True)
        self.reader.start()

    def add(self, described: str) -> None:
        if self.process is not None and described not in self.announced:
            self.announced.add(described)
            self._write(described)

    def _read(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            with self.process.stdout:
                for one in self.process.stdout:
                    # The last line of a killed process may be incomplete.
                    with contextlib.suppress(ValueError):
                        self.compiled.append(json.loads(one))

    def _write(self, text: str) -> None:
        assert self.process is not None and self.process.stdin is not None  # noqa: S101, PT018  (see `_start`)
        # For an ended process `finish` logs the result.
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{text}\n")
            self.process.stdin.flush()

    def wait_for_first(self, seconds: float) -> None:
        """Wait at most `seconds` until all plans except `later` are compiled."""
        begun = time.monotonic()
        first = self.announced - self.later
        while self.reader.is_alive() and not first <= {one["plan"] for one in tuple(self.compiled)}:
            if time.monotonic() - begun > seconds:
                break
            time.sleep(_POLL_SECONDS)
        LOGGER.info("dsv4 kernels: waited %.1f s for %s announced plans", time.monotonic() - begun, len(first))

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` until all plans are compiled, and log their number."""
        begun = time.monotonic()
        if (process := self.process) is None:
            return
        if self.announced:
            self._write("")
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]  # (see `_start`)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Kernels compiled so far are in the cache.
            process.wait(seconds if self.announced else 0.0)
        process.kill()
        process.wait()
        # A process that it started may hold the pipe.
        self.reader.join(_GONE_SECONDS)
        if not self.announced:
            return
        good, made = sum(one["error"] is None for one in self.compiled), sum(one["kernels"] for one in self.compiled)
        LOGGER.info(
            "dsv4 kernels: %s of %s announced plans were compiled beside the weights, %s kernels; waited %.1f s",
            good, len(self.announced), made, time.monotonic() - begun,
        )  # fmt: skip
        for one in self.compiled:
            if one["error"] is not None:
                LOGGER.warning("dsv4 kernels: not compiled ahead: %s: %s", one["plan"], one["error"])


def compilers() -> int:
    """Return the number of concurrent compilers: half of the processors, or `MAX_JOBS`.

    The plan sets it where compilers and weights share the memory (GB10).
    """
    jobs = os.environ.get("MAX_JOBS", "")
    most = int(jobs) if jobs.isdigit() else MOST_COMPILERS
    return max(1, min(most, MOST_COMPILERS, (os.cpu_count() or 1) // 2))


def begin(target: TargetGPU) -> None:
    """Start the process for the next announcements, unless plans were compiled into this cache before.

    Its imports run while the worker initializes its GPU. If the GPU is no `target`, the first announcement starts
    another process.
    """
    if _Compiler.running is None and not was_used_before():
        _Compiler.running = _Compiler(target, _start(target))


def announce(plan: type[Plan], *args: Any, **options: Any) -> None:
    """Compile the kernels of `plan(*args, **options)`, with `DEVICE` in place of its device.

    No effect for a plan that was compiled before on this machine and is in Triton's cache.
    """
    described = line(plan, *args, **options)
    if (target := gpu_target()) is None or compiled_mark(described, target).exists():
        return
    if _Compiler.running is not None and _Compiler.running.target != target:
        finish(0.0)
    if _Compiler.running is None:
        _Compiler.running = _Compiler(target, _start(target))
    _Compiler.running.add(described)


def announced_plan(key: Hashable, kind: type[P], *args: Any, **options: Any) -> P:
    """Return the plan with this key: `kind(*args, **options)`, made and announced by the first caller."""

    def make() -> P:
        announce(kind, *(DEVICE if isinstance(one, torch.device) else one for one in args), **options)
        return kind(*args, **options)

    return shared_plan(key, make)


@contextlib.contextmanager
def needed_later() -> Iterator[None]:
    """Exclude plans announced within this context from the wait of `begin_anew`."""
    before = frozenset() if _Compiler.running is None else frozenset(_Compiler.running.announced)
    yield
    if _Compiler.running is not None:
        _Compiler.running.later |= _Compiler.running.announced - before


def begin_anew() -> None:
    """Wait for the announced plans; if there were any, start a process for the next announcements, which imports.

    With plans that are needed later, the running process continues with them instead.
    """
    if _Compiler.running is not None and _Compiler.running.later:
        _Compiler.running.wait_for_first(_FINISH_SECONDS)
    elif finish() and (target := gpu_target()) is not None:
        _Compiler.running = _Compiler(target, _start(target))


def finish(seconds: float = _FINISH_SECONDS) -> bool:
    """Wait at most `seconds` for the announced plans; return whether there were any.

    Later announcements start another process.
    """
    running, _Compiler.running = _Compiler.running, None
    if running is None:
        return False
    running.finish(seconds)
    return bool(running.announced)


@functools.cache
def gpu_target() -> TargetGPU | None:
    """Return the compilation target of this process's GPU; None without a supported GPU."""
    device = torch.device("cuda")
    arch = detect(device) if torch.cuda.is_available() else None
    return None if arch is None else TargetGPU(arch, multiprocessors(device, arch))


def _start(target: TargetGPU) -> subprocess.Popen[str] | None:
    command = [sys.executable, "-m", "dsv4_kernels.precompile", target.arch, str(target.multiprocessors)]
    try:
        return subprocess.Popen(
            [*command, "--processes", str(compilers())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # It must not allocate GPU memory.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except OSError as error:
        LOGGER.warning("dsv4 kernels: nothing is compiled beside the weights: %s", error)
        return None


def pages(cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's cache [pages, tokens, 584] as uint8 [pages, bytes of a page] with the same row stride."""
    count, tokens, _ = cache.shape
    used = tokens * (ds_mla(tokens).data_row + ds_mla(tokens).scale_row)
    return cache.view(torch.uint8).as_strided((count, used), (cache.stride(0), 1))


def whole_rows(indices: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `indices` [T, ..., W], possibly columns of wider rows, as full rows of the first `tokens`.

    vLLM narrows the rows to the longest request of a step; a plan requires rows of the full width.
    """
    width = indices.stride(0)
    return indices.as_strided((tokens, width), (width, 1))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, copied if it does not start at a multiple of 16 bytes (a slice of some rows)."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


Codes = tuple[torch.Tensor, torch.Tensor]
"""code uint8 [T, K] (E4M3) and scale uint8 [T, K/128] (UE8M0), as `dsv4_kernels.fp8` makes them."""
_CODES_ATTRIBUTE = "dsv4_fp8"
_WANTED_CODES: dict[int, int] = {}


def want_codes(k: int, tokens: int) -> None:
    """Record that a product uses codes of up to `tokens` rows of `k` values."""
    _WANTED_CODES[k] = max(tokens, wanted_codes(k))


def wanted_codes(k: int) -> int:
    """Return the maximum number of rows of `k` values for which a product uses codes; 0 if none does."""
    return _WANTED_CODES.get(k, 0)


def give_codes(x: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """Return `x` [T, K] with its `codes` attached; its values must not change afterwards."""
    if codes is not None:
        setattr(x, _CODES_ATTRIBUTE, codes)
    return x


def given_codes(x: torch.Tensor) -> Codes | None:
    """Return the codes attached to `x`, or None."""
    return getattr(x, _CODES_ATTRIBUTE, None)
