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
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dsv4_kernels.arch import TargetGPU, detect, multiprocessors
from dsv4_kernels.plan import Plan
from dsv4_kernels.precompile import DEVICE, compiled_mark, line
from dsv4_runtime.vllm_plugin.kernels.active import MOST_COMPILERS, shared_plan

__all__ = ["DEVICE", "announce", "announced_plan", "begin_anew", "finish"]
LOGGER = logging.getLogger("vllm.dsv4")
_FINISH_SECONDS = 60.0


@dataclass
class _Compiler:
    """The process that compiles; None where it could not be started."""

    process: subprocess.Popen[str] | None
    asked: set[str] = field(default_factory=set)

    running: ClassVar[_Compiler | None] = None

    def ask(self, described: str) -> None:
        if self.process is not None and described not in self.asked:
            self.asked.add(described)
            self._write(described)

    def _write(self, text: str) -> None:
        assert self.process is not None and self.process.stdin is not None  # noqa: S101, PT018  (see `_start`)
        # Of a process that has ended, `finish` says what it has compiled.
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{text}\n")
            self.process.stdin.flush()

    def finish(self, seconds: float) -> None:
        """Wait until all that was asked for is compiled, at most `seconds`, and say how much that was."""
        begun = time.monotonic()
        if (process := self.process) is None:
            return
        if not self.asked:
            process.kill()
            process.communicate()
            return
        self._write("")
        try:
            told, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # What it has compiled by now is in the cache.
            process.kill()
            told, _ = process.communicate()
        done = [json.loads(one) for one in told.splitlines()]
        LOGGER.info(
            "dsv4 kernels: %s of %s announced plans were compiled beside the weights, %s kernels; waited %.1f s",
            sum(one["error"] is None for one in done), len(self.asked), sum(one["kernels"] for one in done),
            time.monotonic() - begun,
        )  # fmt: skip
        for one in done:
            if one["error"] is not None:
                LOGGER.warning("dsv4 kernels: not compiled ahead: %s: %s", one["plan"], one["error"])


def compilers() -> int:
    """Return how many processes or threads may compile at once: half of the processors, or `MAX_JOBS`.

    The plan sets that where compilers take from the memory that the weights go to (GB10).
    """
    jobs = os.environ.get("MAX_JOBS", "")
    most = int(jobs) if jobs.isdigit() else MOST_COMPILERS
    return max(1, min(most, MOST_COMPILERS, (os.cpu_count() or 1) // 2))


def announce(plan: type[Plan], *args: Any, **options: Any) -> None:
    """Have the kernels of `plan(*args, **options)` compiled; `DEVICE` stands where its device is.

    Nothing is done for a plan that was compiled so on this machine before, and is in Triton's cache.
    """
    described = line(plan, *args, **options)
    if (target := _target()) is None or compiled_mark(described, target).exists():
        return
    if _Compiler.running is None:
        _Compiler.running = _Compiler(_start(target))
    _Compiler.running.ask(described)


def announced_plan(key: Hashable, kind: type[Plan], *args: Any, **options: Any) -> Any:
    """Return the plan called `key`: `kind(*args, **options)`, made and announced by the first caller."""

    def make() -> Plan:
        announce(kind, *(DEVICE if isinstance(one, torch.device) else one for one in args), **options)
        return kind(*args, **options)

    return shared_plan(key, make)


def begin_anew() -> None:
    """Wait for what was announced. If that was anything, start the process for what is announced next: it imports."""
    if finish() and (target := _target()) is not None:
        _Compiler.running = _Compiler(_start(target))


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
def _target() -> TargetGPU | None:
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
