"""The one record of a member's life, and the status made from it."""

from __future__ import annotations

import logging
import time

from dsv4_runtime.contract import (
    AgentStatus,
    EngineStatus,
    Failure,
    GroupPlan,
    Health,
    Phase,
    Process,
    Progress,
    Role,
    Verdict,
)

_log = logging.getLogger(__name__)
_KEEP_FAILURES = 20
# A start begins anew with these; what came before says nothing about how long it will take.
_FIRST_PHASES = frozenset({Phase.PREFLIGHT, Phase.RESTARTING})


class State:
    """Phase, progress, verdict and engine history of one member."""

    def __init__(self, plan: GroupPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self.phase = Phase.PREFLIGHT
        self._phase_time = time.time()
        self._phase_seconds: dict[str, float] = {}
        self.progress: Progress | None = None
        self.failure: Failure | None = None
        """What the present verdict is dead of; None while it is not dead."""
        self.joined = False
        self.processes: dict[int, str] = {}
        self.generation = 0
        """Rank 0: the engine's generation. Others: the one that the head spoke of last."""
        self.ready_time: float | None = None
        self.restarts: list[float] = []
        self.failures: list[Failure] = []

    def enter(self, phase: Phase, stage: str | None = None) -> None:
        """Begin a phase; entering the present one again only changes what it is busy with."""
        if phase is not self.phase:
            now = time.time()
            _log.info("%s -> %s%s", self.phase, phase, f": {stage}" if stage else "")
            if phase in _FIRST_PHASES:
                self._phase_seconds = {}
            else:
                spent = self._phase_seconds.get(self.phase, 0.0) + now - self._phase_time
                self._phase_seconds[self.phase] = round(spent, 3)
            self.phase, self._phase_time = phase, now
            self.progress = None
        if stage is not None:
            self.progress = Progress(stage=stage)

    def begin_generation(self) -> None:
        """The engine is about to start."""
        self.generation += 1
        self.ready_time = None
        self.failure = None

    def served(self) -> None:
        """A checked completion came back: all failures so far are over."""
        now = time.time()
        self.ready_time = now
        self.failure = None
        self.failures = [
            failure
            if failure.recover_seconds is not None
            else failure.model_copy(update={"recover_seconds": round(now - failure.time, 3)})
            for failure in self.failures
        ]

    def died(self, failure: Failure) -> None:
        """Remember a death, newest last."""
        _log.error("%s (rank %s, by %s): %s", failure.cause, failure.culprit_rank, failure.detected_by, failure.message)
        self.failure = failure
        self.failures = [*self.failures, failure][-_KEEP_FAILURES:]

    def status(self) -> AgentStatus:
        """What `/v1/status` answers now."""
        head = self._plan.members[self._rank].role is Role.HEAD
        return AgentStatus(
            deployment=self._plan.deployment,
            group=self._plan.group,
            incarnation=self._plan.incarnation,
            rank=self._rank,
            phase=self.phase,
            phase_time=self._phase_time,
            time=time.time(),
            progress=self.progress,
            verdict=self._verdict(),
            processes=tuple(Process(name=name, pid=pid) for pid, name in sorted(self.processes.items())),
            joined=self.joined,
            phase_seconds=self._phase_seconds,
            engine=EngineStatus(
                generation=self.generation,
                ready_time=self.ready_time,
                restarts=tuple(self.restarts),
                failures=tuple(self.failures),
            )
            if head
            else None,
        )

    def _verdict(self) -> Verdict:
        if self.failure is not None:
            return Verdict(health=Health.DEAD, failure=self.failure)
        return Verdict(health=Health.HEALTHY if self.phase is Phase.SERVING else Health.STARTING)
