"""Helpers that build the observations of a backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import DSV4Deployment, Finding, GroupPhase, GroupStatus, Reason, load
from dsv4_operator.lifecycle import Decision
from dsv4_operator.lifecycle.decide import decide
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_runtime.contract import AgentStatus, Cause, EngineStatus, Failure, GroupPlan, Health, Phase, Verdict
from dsv4_testkit.group_world import facts

# Helper modules are in this directory; with import mode importlib, pytest does not add it to the path.
sys.path.insert(0, str(Path(__file__).parent))

KEY = GroupKey("default", "nano", 0)
START = 1_800_000_000.0
MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano, generation: %(generation)d}
spec:
  suspend: %(suspend)s
  replicas: %(replicas)d
  model: {variant: Nano, source: {nano: {seed: %(seed)d}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
  recovery: {maxRestarts: %(budget)d, window: 10m, backoff: {base: 4s, max: 8s}}
"""


@dataclass
class Scene:
    """One group, step by step: change the observations, then call `look`."""

    now: float = START
    generation: int = 1
    seed: int = 0
    suspend: bool = False
    replicas: int = 1
    budget: int = 2
    deleting: bool = False
    refuse: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    members: list[ObservedMember] = field(default_factory=list)
    used_incarnation: int = 0
    silence_is_event: bool = False
    kept: GroupStatus | None = None

    @property
    def deployment(self) -> DSV4Deployment:
        asked = load(
            MANIFEST
            % {
                "generation": self.generation,
                "suspend": str(self.suspend).lower(),
                "replicas": self.replicas,
                "seed": self.seed,
                "budget": self.budget,
            }
        )
        metadata = asked.metadata.model_copy(update={"annotations": self.annotations})
        return asked.model_copy(update={"metadata": metadata})

    def plan(self, incarnation: int, restarts: Sequence[float]) -> GroupPlan:
        if self.refuse:
            raise PlanRefused(Reason.MEMORY_SHORT, Finding("", Reason.MEMORY_SHORT, "too little memory", "add some"))
        return plan_group(self.deployment, facts(2), group=0, incarnation=incarnation, restarts=restarts)

    def look(self, after: float = 0.0) -> Decision:
        """Decide `after` seconds from now, and keep the status as if all actions were completed."""
        self.now += after
        decision = decide(
            self.deployment,
            Observed(KEY, tuple(self.members), self.used_incarnation, silence_is_event=self.silence_is_event),
            self.kept,
            self.plan,
            self.now,
            deleting=self.deleting,
        )
        status = decision.completed or decision.status
        self.kept = GroupStatus.model_validate_json(status.to_json())
        assert self.kept == status, "a status must survive being kept"
        return decision

    @property
    def phase(self) -> GroupPhase:
        assert self.kept is not None
        return self.kept.phase

    @property
    def status(self) -> GroupStatus:
        assert self.kept is not None
        return self.kept

    def member(self, rank: int, phase: Phase | None = Phase.SERVING, **changes: Any) -> ObservedMember:
        """Return a member of the present incarnation whose agent reports `phase`, or has not reported yet (None)."""
        incarnation = changes.pop("incarnation", self.status.incarnation)
        failure: Failure | None = changes.pop("failure", None)
        warnings = changes.pop("warnings", ())
        engine = changes.pop("engine", EngineStatus(generation=1, ready_time=self.now) if rank == 0 else None)
        status = phase and AgentStatus(
            deployment=KEY.deployment,
            group=KEY.group,
            incarnation=incarnation,
            rank=rank,
            phase=phase,
            phase_time=self.now,
            time=self.now,
            verdict=Verdict(health=Health.DEAD if failure else Health.HEALTHY, failure=failure),
            engine=engine,
            warnings=warnings,
        )
        return ObservedMember(
            incarnation=incarnation,
            rank=rank,
            node=f"node-{rank}",
            address=f"10.0.0.{rank + 1}",
            started=self.now,
            status=status or None,
            heard=changes.pop("heard", self.now if status else None),
            **changes,
        )

    def says(self, head: Phase | None, worker: Phase | None = Phase.SERVING) -> None:
        """Set both members, with agents that report these phases."""
        self.members = [self.member(0, head), self.member(1, worker)]

    def serve(self) -> None:
        """Bring the group to phase Serving from any state."""
        for _ in range(4):
            self.look()
            if self.phase is GroupPhase.FORMING:
                break
        self.look()
        self.says(Phase.SERVING)
        self.look()
        self.look(1.0)
        assert self.phase is GroupPhase.SERVING

    def died(self, rank: int, cause: Cause = Cause.ENGINE_CORE_DIED, after: float = 0.0) -> Failure:
        return Failure(
            time=self.now + after, cause=cause, culprit_rank=rank, message=f"{cause} it was", detected_by="process"
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def new_scene() -> Callable[..., Scene]:
    return Scene
