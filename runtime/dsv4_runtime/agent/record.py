"""Record of a member's state, and the status derived from it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping

from dsv4_runtime.contract import (
    KV_CACHE,
    AgentStatus,
    EngineStatus,
    Failure,
    GroupPlan,
    Health,
    KernelStatus,
    Phase,
    Process,
    Progress,
    RestartBudget,
    Role,
    Signals,
    StartStep,
    Verdict,
)
from dsv4_runtime.contract.kernels import STOCK
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.log_lines import MemoryLog, memory_differences

_log = logging.getLogger(__name__)


class Kernels:
    """Choice of the lowest rank in the log; a different choice of another rank is a warning and a note.

    Ray drops lines of other workers that differ in numbers only, possibly those of rank 0; a line that names another
    provider is never dropped.
    """

    def __init__(self) -> None:
        self._choices: dict[str, dict[int, KernelStatus]] = {}
        self._refused: dict[str, str] = {}

    def chosen(self, rank: int, choice: KernelStatus) -> None:
        """Record the provider of an operation on a rank."""
        known = self._choices.setdefault(choice.op, {})
        if rank not in known and known and (first := known[min(known)]).provider != choice.provider:
            _log.warning(
                "kernels: rank %d computes %s by %s, rank %d by %s: their machines differ, or kept different "
                "evidence; name the provider in spec.engine.kernels to have one",
                rank, choice.op, choice.provider, min(known), first.provider,
            )  # fmt: skip
        known[rank] = choice

    def not_attached(self, ops: tuple[str, ...], why: str) -> None:
        """Record that vLLM computes these operations in a process, regardless of the choice."""
        self._refused |= dict.fromkeys(ops, why)

    def status(self) -> tuple[KernelStatus, ...]:
        """Return the provider of each logged operation, in the order of the log."""
        return tuple(self._status(op, known) for op, known in self._choices.items())

    def _status(self, op: str, known: dict[int, KernelStatus]) -> KernelStatus:
        choice = known[min(known)]
        if op in self._refused and choice.provider != STOCK:
            return choice.model_copy(
                update={"provider": STOCK, "note": f"{choice.provider} was chosen; {self._refused[op]}"}
            )
        others = [f"rank {rank}: {one.provider}" for rank, one in known.items() if one.provider != choice.provider]
        return choice.model_copy(update={"note": ", ".join(others)}) if others else choice


_KEEP_FAILURES = 20
# Difference between the planned and the logged size of the KV cache above which the plan was wrong.
_KV_TOLERANCE = 0.09
# Above the plan; a pipeline stage with fewer layers may be below it.
_WEIGHTS_TOLERANCE = 0.03
# A start begins with one of these; the durations of earlier phases belong to another start.
_FIRST_PHASES = frozenset({Phase.PREFLIGHT, Phase.RESTARTING})
_START_PHASES = frozenset({*_FIRST_PHASES, Phase.STAGING, Phase.JOINING, Phase.LOADING, Phase.WARMING})


def _step(phase: Phase, stage: str | None) -> str:
    """Return the step of a start with this progress: while vLLM loads, the text before the first number."""
    return re.split(r" \d", stage, maxsplit=1)[0] if stage and phase is Phase.LOADING else ""


class Changes:
    """Notifies all waiting tasks, once for each change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next change. Take it before reading the state, so that no change is missed."""
        return self._next

    def notify(self) -> None:
        """Announce a change."""
        event, self._next = self._next, asyncio.Event()
        event.set()


class MemberRecord:
    """Phase, progress, verdict and engine history of one member.

    Changes that watchers receive immediately (phase, verdict, progress, generation) go through methods, which notify
    them.
    """

    def __init__(self, plan: GroupPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self.phase = Phase.PREFLIGHT
        self._phase_time = unix_time()
        self._steps: dict[tuple[Phase, str], float] = {}
        """Seconds of each finished step of the present start, in order of their beginnings."""
        self._step, self._step_time = "", self._phase_time
        self.changes = Changes()
        self.progress: Progress | None = None
        self.failure: Failure | None = None
        """Failure of the present verdict; None while it is not dead."""
        self.suspicion: Failure | None = None
        """Failure that a suspect engine is about to have; None while it is not suspect."""
        self.signals: Signals | None = None
        self.warnings: tuple[str, ...] = ()
        """As in the status."""
        self.disk_rate: float | None = None
        """Rate at which this member's disk read the checkpoint, in bytes a second."""
        self.joined = False
        self.finishing = False
        """Whether the engine finishes its open requests and accepts no new ones, as requested (`finish`)."""
        self.processes: dict[int, str] = {}
        self.generation = 0
        """Rank 0: generation of the engine. Others: the latest generation in the head's status."""
        self.ready_time: float | None = None
        self.kv_cache: tuple[int, float] | None = None
        """(tokens, requests of the maximum length at once), from this generation's log."""
        self.weights_repaired: tuple[str, ...] = ()
        """Wrong files of the checkpoint that were fetched again."""
        self.weights_place = ""
        """As in the status; read once, because a file server may stop to answer."""
        self.weights_verified: bool | None = None
        """Whether the content of these files was read and is right."""
        self.weights_doubted: str | None = None
        """Reason to read the weights' files again before the next start."""
        self.kernels = Kernels()
        """Providers of the operations of a layer, from this generation's log."""
        self.memory: dict[str, float] = {}
        """Memory in this generation's log, by the fields of `MemoryLog`."""
        self.restarts: list[float] = []
        self.failures: list[Failure] = []

    def enter(self, phase: Phase, stage: str | None = None) -> None:
        """Begin a phase; for the present phase only change its stage."""
        if phase is not self.phase:
            now = unix_time()
            _log.info("%s -> %s%s", self.phase, phase, f": {stage}" if stage else "")
            if phase in _FIRST_PHASES:
                self._steps = {}
            else:
                self._end_step(now)
            self.phase, self._phase_time = phase, now
            self._step, self._step_time = _step(phase, stage), now
            self.progress = None
            self.suspicion = None
        self.finishing = False
        if stage is not None:
            self._show(Progress(stage=stage))
        self.changes.notify()

    def _show(self, progress: Progress) -> None:
        step = "loading weights" if progress.weights is not None else _step(self.phase, progress.stage)
        if step != self._step:
            now = unix_time()
            self._end_step(now)
            self._step, self._step_time = step, now
        self.progress = progress

    def _end_step(self, now: float) -> None:
        """Add the duration of the present step; a step that vLLM logs for several ranks is one."""
        if self.phase in _START_PHASES:
            key = (self.phase, self._step)
            self._steps[key] = self._steps.get(key, 0.0) + max(0.0, now - self._step_time)

    def finish(self, stage: str) -> None:
        """Report the drain of open requests: the phase is `Draining`, and the health remains."""
        suspicion = self.suspicion
        self.enter(Phase.DRAINING, stage)
        self.finishing, self.suspicion = True, suspicion
        self.changes.notify()

    def advance(self, progress: Progress) -> None:
        """Report progress of the present phase."""
        if progress != self.progress:
            self._show(progress)
            self.changes.notify()

    def suspect(self, suspicion: Failure | None) -> None:
        """Report that the engine is suspect of this failure, or no longer suspect."""
        before, self.suspicion = self.suspicion, suspicion
        if (before and before.cause) != (suspicion and suspicion.cause):
            if suspicion is not None:
                _log.warning("suspect %s (rank %s): %s", suspicion.cause, suspicion.culprit_rank, suspicion.message)
            else:
                _log.info("no longer suspect")
            self.changes.notify()

    def follow(self, generation: int) -> None:
        """Take over a new engine generation from the head's status; not on rank 0."""
        self.generation = generation
        self.failure = None
        self.changes.notify()

    def begin_generation(self) -> None:
        """Begin the next engine generation, before its start."""
        self.generation += 1
        self.ready_time = None
        self.kv_cache = None
        self.kernels = Kernels()
        self.memory = {}
        self.weights_doubted = None
        self.failure = None
        self.changes.notify()

    def served(self) -> None:
        """Report a checked completion: all failures up to now are recovered."""
        now = unix_time()
        self.ready_time = now
        self.failure = None
        self.failures = [
            failure
            if failure.recover_seconds is not None
            else failure.model_copy(update={"recover_seconds": round(now - failure.time, 3)})
            for failure in self.failures
        ]
        self.changes.notify()

    def loaded(self, size: int) -> None:
        """Log the difference between the memory of a rank's weights and the plan's maximum."""
        if planned := self._plan.expectations.weights_bytes:
            error = size / planned - 1
            level = logging.INFO if error <= _WEIGHTS_TOLERANCE else logging.WARNING
            _log.log(level, "weights: %.2f GiB, planned %.2f (%+.1f %%)", size / 2**30, planned / 2**30, 100 * error)

    def cached(self, tokens: int, concurrency: float) -> None:
        """Record the size of the KV cache and log its difference from the plan."""
        self.kv_cache = (tokens, concurrency)
        planned = self._plan.expectations.kv_tokens
        if planned:
            error = tokens / planned - 1
            level = logging.INFO if abs(error) <= _KV_TOLERANCE else logging.WARNING
            _log.log(level, "KV cache: %d tokens, planned %d (%+.1f %%)", tokens, planned, 100 * error)
            if expected := self._plan.expectations.kv_concurrency:
                _log.log(level, "KV cache: %.2f requests at once, planned %.2f", concurrency, expected)
        self.changes.notify()

    def add_memory(self, figures: Mapping[str, float]) -> None:
        """Record memory figures of the engine's log: of several ranks the first, of their caches the smallest."""
        for name, value in figures.items():
            known = self.memory.get(name, value)
            self.memory[name] = min(known, value) if name == "kv" else known

    def _beyond_plan(self) -> dict[str, int]:
        expected = self._plan.expectations
        if self.kv_cache is None or not expected.memory:
            return {}
        return memory_differences(expected.memory, MemoryLog(**self.memory), KV_CACHE)  # type: ignore[arg-type]

    def mark_dead(self, failure: Failure) -> None:
        """Report that the engine is dead; the final cause may follow (`record_failure`)."""
        self.failure = failure
        self.suspicion = None
        self.changes.notify()

    def record_failure(self, failure: Failure) -> None:
        """Report a failure and keep it as the newest."""
        _log.error("%s (rank %s, by %s): %s", failure.cause, failure.culprit_rank, failure.detected_by, failure.message)
        self.failure = failure
        self.suspicion = None
        self.failures = [*self.failures, failure][-_KEEP_FAILURES:]
        self.changes.notify()

    def warn(self, warnings: tuple[str, ...]) -> None:
        """Report and log the present warnings."""
        for text in warnings:
            if text not in self.warnings:
                _log.warning("%s", text)
        if warnings != self.warnings:
            self.warnings = warnings
            self.changes.notify()

    def status(self) -> AgentStatus:
        """Return the response to `/v1/status`."""
        head = self._plan.members[self._rank].role is Role.HEAD
        return AgentStatus(
            deployment=self._plan.deployment,
            group=self._plan.group,
            incarnation=self._plan.incarnation,
            rank=self._rank,
            node=self._plan.members[self._rank].node or "",
            phase=self.phase,
            phase_time=self._phase_time,
            time=unix_time(),
            progress=self.progress,
            verdict=self._verdict(),
            processes=tuple(Process(name=name, pid=pid) for pid, name in sorted(self.processes.items())),
            model_digest=self._plan.model_digest,
            joined=self.joined,
            signals=self.signals,
            warnings=self.warnings,
            start=tuple(
                StartStep(phase=phase, step=step, seconds=round(seconds, 3))
                for (phase, step), seconds in self._steps.items()
            ),
            disk_bytes_per_second=self.disk_rate,
            weights_repaired=self.weights_repaired,
            weights_place=self.weights_place,
            weights_verified=self.weights_verified,
            engine=EngineStatus(
                generation=self.generation,
                ready_time=self.ready_time,
                restarts=tuple(self.restarts),
                budget=RestartBudget(
                    max_restarts=self._plan.recovery.max_restarts,
                    window_seconds=self._plan.recovery.window_seconds,
                    restarts=self._plan.restarts,
                ),
                weights_doubted=self.weights_doubted,
                failures=tuple(self.failures),
                kv_cache_tokens=self.kv_cache[0] if self.kv_cache else None,
                kv_concurrency=self.kv_cache[1] if self.kv_cache else None,
                kv_planned_tokens=self._plan.expectations.kv_tokens,
                kernels=self.kernels.status(),
                memory_of=self._plan.expectations.memory_of,
                memory=self._beyond_plan(),
            )
            if head
            else None,
        )

    def _verdict(self) -> Verdict:
        if self.failure is not None:
            return Verdict(health=Health.DEAD, failure=self.failure)
        if self.phase is not Phase.SERVING and not self.finishing:
            return Verdict(health=Health.STARTING)
        if self.suspicion is not None:
            return Verdict(health=Health.SUSPECT, failure=self.suspicion)
        return Verdict(health=Health.HEALTHY)
