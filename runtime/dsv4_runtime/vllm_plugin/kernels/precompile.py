"""Compile the bundled plans in a process beside the worker's, from the making of the model's layers on.

What a layer will launch is known when it is made; its plan is made later, some after the weights, some at the first
step. `announce` has the plan's kernels compiled meanwhile (`dsv4_kernels.precompile`), and the plan's own warm-up finds
them in Triton's cache. Nothing depends on it: what is not compiled by then, the warm-up compiles.
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
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dsv4_kernels.arch import TargetGPU, detect, multiprocessors
from dsv4_kernels.plan import Plan
from dsv4_kernels.precompile import DEVICE, compiled_mark, line, was_used_before
from dsv4_runtime.vllm_plugin.kernels.active import MOST_COMPILERS, shared_plan

__all__ = ["DEVICE", "announce", "announced_plan", "begin", "begin_anew", "finish", "gpu_target", "needed_later"]
LOGGER = logging.getLogger("vllm.dsv4")
_FINISH_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass
class _Compiler:
    """The process that compiles for a GPU; None where it could not be started."""

    target: TargetGPU
    process: subprocess.Popen[str] | None
    asked: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    """Those of `asked` that vLLM's profile does not launch."""
    told: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    running: ClassVar[_Compiler | None] = None

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, name="dsv4-precompile", daemon=True)
        self.reader.start()

    def ask(self, described: str) -> None:
        if self.process is not None and described not in self.asked:
            self.asked.add(described)
            self._write(described)

    def _read(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            with self.process.stdout:
                for one in self.process.stdout:
                    # The last one of a process that was killed may be a part.
                    with contextlib.suppress(ValueError):
                        self.told.append(json.loads(one))

    def _write(self, text: str) -> None:
        assert self.process is not None and self.process.stdin is not None  # noqa: S101, PT018  (see `_start`)
        # Of a process that has ended, `finish` says what it has compiled.
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{text}\n")
            self.process.stdin.flush()

    def wait_for_first(self, seconds: float) -> None:
        """Wait until all but `later` is compiled, at most `seconds`."""
        begun = time.monotonic()
        first = self.asked - self.later
        while self.reader.is_alive() and not first <= {one["plan"] for one in tuple(self.told)}:
            if time.monotonic() - begun > seconds:
                break
            time.sleep(_POLL_SECONDS)
        LOGGER.info("dsv4 kernels: waited %.1f s for %s announced plans", time.monotonic() - begun, len(first))

    def finish(self, seconds: float) -> None:
        """Wait until all that was asked for is compiled, at most `seconds`, and say how much that was."""
        begun = time.monotonic()
        if (process := self.process) is None:
            return
        if self.asked:
            self._write("")
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]  # (see `_start`)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # What it has compiled by then is in the cache.
            process.wait(seconds if self.asked else 0.0)
        process.kill()
        process.wait()
        self.reader.join()
        if not self.asked:
            return
        LOGGER.info(
            "dsv4 kernels: %s of %s announced plans were compiled beside the weights, %s kernels; waited %.1f s",
            sum(one["error"] is None for one in self.told), len(self.asked), sum(one["kernels"] for one in self.told),
            time.monotonic() - begun,
        )  # fmt: skip
        for one in self.told:
            if one["error"] is not None:
                LOGGER.warning("dsv4 kernels: not compiled ahead: %s: %s", one["plan"], one["error"])


def compilers() -> int:
    """Return how many processes or threads may compile at once: half of the processors, or `MAX_JOBS`.

    The plan sets that where compilers take from the memory that the weights go to (GB10).
    """
    jobs = os.environ.get("MAX_JOBS", "")
    most = int(jobs) if jobs.isdigit() else MOST_COMPILERS
    return max(1, min(most, MOST_COMPILERS, (os.cpu_count() or 1) // 2))


def begin(target: TargetGPU) -> None:
    """Start the process for what is announced next, unless plans were compiled into this cache before.

    It imports while the worker takes its GPU. If that is no `target`, the first announcement starts another process.
    """
    if _Compiler.running is None and not was_used_before():
        _Compiler.running = _Compiler(target, _start(target))


def announce(plan: type[Plan], *args: Any, **options: Any) -> None:
    """Have the kernels of `plan(*args, **options)` compiled; `DEVICE` stands where its device is.

    Nothing is done for a plan that was compiled so on this machine before, and is in Triton's cache.
    """
    described = line(plan, *args, **options)
    if (target := gpu_target()) is None or compiled_mark(described, target).exists():
        return
    if _Compiler.running is not None and _Compiler.running.target != target:
        finish(0.0)
    if _Compiler.running is None:
        _Compiler.running = _Compiler(target, _start(target))
    _Compiler.running.ask(described)


def announced_plan(key: Hashable, kind: type[Plan], *args: Any, **options: Any) -> Any:
    """Return the plan called `key`: `kind(*args, **options)`, made and announced by the first caller."""

    def make() -> Plan:
        announce(kind, *(DEVICE if isinstance(one, torch.device) else one for one in args), **options)
        return kind(*args, **options)

    return shared_plan(key, make)


@contextlib.contextmanager
def needed_later() -> Iterator[None]:
    """Have `begin_anew` not wait for the plans that are announced inside."""
    before = frozenset() if _Compiler.running is None else frozenset(_Compiler.running.asked)
    yield
    if _Compiler.running is not None:
        _Compiler.running.later |= _Compiler.running.asked - before


def begin_anew() -> None:
    """Wait for what was announced. If that was anything, start the process for what is announced next: it imports.

    If plans that are needed later were announced too, it is that process, which goes on with them.
    """
    if _Compiler.running is not None and _Compiler.running.later:
        _Compiler.running.wait_for_first(_FINISH_SECONDS)
    elif finish() and (target := gpu_target()) is not None:
        _Compiler.running = _Compiler(target, _start(target))


def finish(seconds: float = _FINISH_SECONDS) -> bool:
    """Wait at most `seconds` for what was announced, and return whether anything was.

    Plans announced later start another process.
    """
    running, _Compiler.running = _Compiler.running, None
    if running is None:
        return False
    running.finish(seconds)
    return bool(running.asked)


@functools.cache
def gpu_target() -> TargetGPU | None:
    """Return what this process's GPU is to the kernels; None without one that they know."""
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
            # It needs no GPU, and must take no memory of one.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except OSError as error:
        LOGGER.warning("dsv4 kernels: nothing is compiled beside the weights: %s", error)
        return None
