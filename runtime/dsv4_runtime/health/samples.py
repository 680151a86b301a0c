"""Input of the rules: frozen `Sample` objects of the group, taken by the head's agent.

All times are seconds of the head's monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsv4_runtime.contract import GpuSignals, ProcessSignals, Signals

FATAL_XIDS = frozenset({48, 74, 79, 94, 95, 119, 120, 140, 154})
"""The driver ends the programs on the GPU, or the GPU has fallen off the bus (NVIDIA's XID catalogue)."""
ENGINE_ROLES = frozenset({"engine-core", "executor", "worker"})
"""Roles of the engine's processes besides vLLM's API process."""
_PACE_KEPT = 400
_IDLE_WATTS_FACTOR = 1.3
GPU_FRESH_SECONDS = 3.0
"""Age up to which a sample of the accelerators counts as current."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A watched process in one sample."""

    role: str
    """`api`, `engine-core`, `executor` or `worker`, as in `contract.Process`."""
    state: str
    """The kernel's letter, as in `contract.ProcessSignals`."""
    share: float | None
    """Processor time of its whole tree since the previous sample, in cores; None in the first sample."""
    below: float | None = None
    """The part of the processes below it: compilers."""


@dataclass(frozen=True, slots=True)
class RankView:
    """A member in one sample."""

    rank: int
    heard: float
    """Time of its last sign of life; for the head itself, the sample's time."""
    accepting: float | None = None
    """Since when its machine accepts connections without an answer of its agent; None: it does not, or the agent
    answers."""
    round_trip: float | None = None
    """Seconds of its latest heartbeat, there and back."""
    processes: tuple[ProcessView, ...] = ()
    gpu_busy: bool | None = None
    """Whether an accelerator draws more power than an idle one; None without an accelerator or a current reading."""
    collectives: int | None = None
    """Collective operations that its worker has begun; None where nothing counts them."""
    xid: int | None = None
    """Error that its accelerator's driver reported."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the group."""

    time: float
    answered: float
    """Time of the API process's latest answer."""
    errored: bool = False
    """Whether its `/health` reports a dead engine."""
    stepped: float = 0.0
    """Time of the latest observed change of the engine's step counter, or of the beginning of serving."""
    outstanding: int = 0
    """Requests that run or wait. vLLM updates the number with the results of a step, so it stands still with the
    steps."""
    canary_sent: float | None = None
    """Time at which the unanswered canary was sent."""
    canary_wrong: int = 0
    """Wrong answers to the latest canaries in a row."""
    canary_said: str = ""
    """Description of the fault."""
    pace: float | None = None
    """Seconds of the engine's slow steps; None until some were seen."""
    ranks: tuple[RankView, ...] = ()


class Pace:
    """Duration of the engine's slow steps: the 95th percentile of the latest 400 measurements.

    A higher percentile would include single long steps, for example one that waits for a compiler.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_PACE_KEPT)

    def add(self, seconds: float) -> None:
        """Add a step that took this long."""
        self._seconds.append(seconds)

    @property
    def slow(self) -> float | None:
        """Return the seconds; None before the first step."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[math.ceil(len(self._seconds) * 0.95) - 1]


class Viewer:
    """Converts successive `Signals` of a member into views; shares are differences between two of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: Signals | None = None
        self._processes: tuple[ProcessView, ...] = ()
        self._idle_watts: dict[int, float] = {}

    def view(
        self, signals: Signals | None, heard: float, round_trip: float | None, accepting: float | None = None
    ) -> RankView:
        """Return the view of `signals`; the same `signals` again change nothing."""
        if signals is not None and (self._before is None or signals.time > self._before.time):
            known = {process.pid: process for process in self._before.processes} if self._before else {}
            passed = signals.time - self._before.time if self._before else 0.0
            self._processes = tuple(_view(process, known.get(process.pid), passed) for process in signals.processes)
            self._before = signals
        gpus = self._before.gpus if self._before else ()
        return RankView(
            rank=self._rank,
            heard=heard,
            accepting=accepting,
            round_trip=round_trip,
            processes=self._processes,
            gpu_busy=self._busy(gpus) if self._before and self._before.gpus_age <= GPU_FRESH_SECONDS else None,
            collectives=self._before.collectives if self._before else None,
            xid=worst_xid(gpus),
        )

    def _busy(self, gpus: Iterable[GpuSignals]) -> bool | None:
        """Return whether a GPU computes: clearly more power than an idle GPU proves it; utilisation alone does not.

        A kernel that only waits, for example for a lost peer, keeps the utilisation at 100 % and the power at idle: on
        an H200 127 W, with 126 W for an open but idle context and 440 W and more for work. The idle power is learned
        here while the engine serves, because it is lower without a context (80 W there). Until then utilisation
        decides.

        None: no GPU reports power, or none runs a kernel, so that the processors decide.
        """
        told = [gpu for gpu in gpus if gpu.power_watts is not None]
        for gpu in told:
            if not gpu.utilization:
                least = self._idle_watts.get(gpu.index, float("inf"))
                self._idle_watts[gpu.index] = min(gpu.power_watts or 0.0, least)
        # Without a running kernel no processor spins for one, so processor time is work, such as compilation.
        if all(gpu.utilization == 0 for gpu in told):
            return None
        return any(self._works(gpu) for gpu in told)

    def _works(self, gpu: GpuSignals) -> bool:
        idle = self._idle_watts.get(gpu.index)
        return bool(gpu.utilization) if idle is None else (gpu.power_watts or 0.0) > _IDLE_WATTS_FACTOR * idle


def worst_xid(gpus: Iterable[GpuSignals]) -> int | None:
    """Return an error of a member's accelerators; of several a fatal one."""
    told = (gpu.xid for gpu in gpus if gpu.xid is not None)
    return min(told, key=lambda xid: xid not in FATAL_XIDS, default=None)


def xid_message(rank: int, xid: int | None) -> str:
    """Return the message for `xid` of `rank`."""
    return f"the driver of a GPU of rank {rank} reported XID {xid}"


def _view(now: ProcessSignals, before: ProcessSignals | None, passed: float) -> ProcessView:
    if before is None or passed <= 0:
        return ProcessView(now.name, now.state, None)
    share, below = now.cpu_seconds - before.cpu_seconds, now.below_seconds - before.below_seconds
    return ProcessView(now.name, now.state, max(0.0, share) / passed, max(0.0, below) / passed)


def steps_and_requests(metrics: bytes) -> tuple[int, int] | None:
    """Return (steps, requests that run or wait) from vLLM's `/metrics`; None if they are not in it.

    Only these lines are parsed: there are hundreds of others, and this runs every second.
    """
    found: Mapping[bytes, int | None] = {name: _total(metrics, name) for name in (_STEPS, _RUNNING, _WAITING)}
    steps, running, waiting = found[_STEPS], found[_RUNNING], found[_WAITING]
    return None if steps is None or running is None or waiting is None else (steps, running + waiting)


_STEPS = b"vllm:iteration_tokens_total_count"
_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"


def _total(metrics: bytes, name: bytes) -> int | None:
    """Return the sum of a metric over its label sets, one for each engine; None if there is none, or no number."""
    total, at = None, 0
    for opening in (b"\n" + name + b"{", b"\n" + name + b" "):
        while (at := metrics.find(opening, at)) >= 0:
            end = metrics.find(b"\n", at + 1)
            line = metrics[at + 1 : end if end >= 0 else len(metrics)]
            try:
                total = (total or 0) + int(float(line.rsplit(b" ", 1)[1]))
            except (ValueError, OverflowError):
                # `NaN`, `+Inf`, or no number.
                return None
            at += len(name)
        at = 0
    return total
