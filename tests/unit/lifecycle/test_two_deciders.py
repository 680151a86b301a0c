"""One group and two operators: leadership changes at any moment, and requests of the former leader arrive late.

A request that was sent before the lease was lost may be executed at any later time. The guard of writes refuses
everything after that. So one request of an interrupted list of actions may still be under way: in a formation it is the
head's Service, the plan, the token, or the pods. Pods mount the plan and the token, and fencing removes both: pods of a
fenced incarnation only start if one late request for each of the three arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4_operator.api import DSV4Deployment, Finding, GroupPhase, GroupStatus, Reason
from dsv4_operator.lifecycle import Action, CollectEvidence, Fence, Form
from dsv4_operator.lifecycle.decide import decide
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.planning import PlanRefused
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.group_world import SCHEDULES, BackendError, World, deployment_of, kept_status, plan_of

ENDED = (GroupPhase.SUSPENDED, GroupPhase.STOPPED)
STAGES = ("head", "plan", "token", "pods")
SKEWS = st.sampled_from([-86_400.0, -20.0, 0.0, 0.4, 86_400.0])
"""Offset of an operator's clock from the others in seconds; up to a day."""
QUIET_LOOKS = 12
"""Rounds without a change: 24 s, more than the longest wait of the specification and of the silence rules."""


@dataclass
class Server(World):
    """The API server and the machines behind it, reduced to the parts that a formation and a fence use."""

    compares: bool = True
    """Whether the Service of the head can only advance, by a comparison of its version."""
    head: int = 0
    """Incarnation in the Service of the head."""
    plans: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)

    def execute(self, action: Action, halfway: bool) -> bool:
        if isinstance(action, Form):
            for stage in STAGES:
                self.stage(action.plan, stage, halfway=halfway and stage == "pods")
            return False
        waits = super().execute(action, halfway)
        if isinstance(action, Fence):
            self.plans.discard(action.incarnation)
            self.tokens.discard(action.incarnation)
        return waits

    def stage(self, plan: GroupPlan, stage: str, *, halfway: bool = False) -> None:
        """Execute one request of a formation."""
        if stage == "head":
            if self.compares and self.head > plan.incarnation:
                raise BackendError("superseded")
            self.head = plan.incarnation
        elif stage == "plan":
            self.plans.add(plan.incarnation)
        elif stage == "token":
            self.tokens.add(plan.incarnation)
        elif plan.incarnation in self.plans & self.tokens:
            # Pods without their plan or token are created but never start.
            self.form(plan, halfway=halfway)

    def form(self, plan: GroupPlan, *, halfway: bool) -> None:
        super()._form(plan, halfway)

    def arrive(self, late: _Late) -> None:
        """Execute a request that was sent long ago."""
        try:
            if isinstance(late.action, Form):
                self.stage(late.action.plan, late.stage)
            else:
                self.execute(late.action, halfway=False)
        except BackendError:
            pass


@dataclass(frozen=True)
class _Late:
    """One request under way."""

    action: Action
    stage: str
    version: int
    """Version of the head's Service when it was read."""


class Operators(RuleBasedStateMachine):
    compares = True

    @initialize(skews=st.tuples(SKEWS, SKEWS))
    def begin(self, skews: tuple[float, float]) -> None:
        self.server = Server(compares=self.compares)
        self.skews = skews
        self.leader = 0
        self.kept: str | None = None
        self.late: list[_Late] = []
        self.seed, self.generation, self.suspend, self.deleting, self.refused = 0, 1, False, False, False
        self.snapshots: list[Observed] = [self.server.observe()]

    @property
    def deployment(self) -> DSV4Deployment:
        return deployment_of(self.generation, self.suspend, self.seed, 3)

    def status(self) -> GroupStatus:
        return GroupStatus() if self.kept is None else kept_status(self.kept)

    def plan(self, incarnation: int, restarts: Sequence[float]) -> GroupPlan:
        if self.refused:
            raise PlanRefused(Reason.MEMORY_SHORT, Finding("", Reason.MEMORY_SHORT, "too little memory", "add some"))
        return plan_of(self.seed, 3, incarnation, tuple(restarts))

    def step(self, age: int = 0, halfway: int = 99, deposed: int = 99, stage: str = "pods") -> None:
        """Decide and act as the leader. The leader is deposed before action `deposed`, which is then under way."""
        self.snapshots = [*self.snapshots[-3:], self.server.observe()]
        observed = self.snapshots[max(0, len(self.snapshots) - 1 - age)]
        previous = None if self.kept is None else self.status()
        now = self.server.now + self.skews[self.leader]
        decision = decide(self.deployment, observed, previous, self.plan, now, deleting=self.deleting)
        status = decision.status
        if any(isinstance(action, CollectEvidence) for action in decision.actions):
            self.kept = status.to_json()
        for index, action in enumerate(decision.actions):
            if index == deposed:
                self._sent(action, stage)
                self.leader = 1 - self.leader
                return
            try:
                if self.server.execute(action, index == halfway):
                    break
            except BackendError:
                if not isinstance(action, CollectEvidence):
                    break
        else:
            status = decision.completed or status
        self.kept = status.to_json()

    def _sent(self, action: Action, stage: str) -> None:
        if not isinstance(action, Form):
            self.late.append(_Late(action, stage, self.server.head))
            return
        for earlier in STAGES[: STAGES.index(stage)]:
            try:
                self.server.stage(action.plan, earlier)
            except BackendError:
                return
        self.late.append(_Late(action, stage, self.server.head))

    @rule(age=st.integers(0, 3), halfway=st.integers(0, 5), deposed=st.integers(0, 5), stage=st.sampled_from(STAGES))
    def troubled_turn(self, age: int, halfway: int, deposed: int, stage: str) -> None:
        self.step(age, halfway, deposed, stage)

    @rule(turns=st.integers(1, 5), seconds=st.sampled_from([0.1, 1.0, 11.0]))
    def calm_turns(self, turns: int, seconds: float) -> None:
        for _ in range(turns):
            self.step()
            self.server.now += seconds

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def something_arrives_late(self, data: st.DataObject) -> None:
        late = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        self.server.arrive(late)

    @precondition(lambda self: self.server.alive())
    @rule(data=st.data())
    def member_ends(self, data: st.DataObject) -> None:
        alive = self.server.alive()
        self.server.end(alive[data.draw(st.integers(0, len(alive) - 1))], "exit code 1")

    @rule(broken=st.booleans(), unobserved=st.booleans())
    def trouble(self, broken: bool, unobserved: bool) -> None:
        self.server.fence_broken, self.server.unobserved = broken, unobserved

    @rule(what=st.sampled_from(["revision", "suspend", "resume", "refuse", "accept", "delete"]))
    def user(self, what: str) -> None:
        self.server.touched = True
        match what:
            case "revision":
                self.seed = 1 - self.seed
            case "suspend" | "resume":
                self.suspend = what == "suspend"
            case "refuse" | "accept":
                self.refused = what == "refuse"
                return
            case "delete":
                self.deleting = True
                return
        self.generation += 1

    @invariant()
    def one_incarnation(self) -> None:
        if hasattr(self, "server"):
            assert len({member.incarnation for member in self.server.alive()}) <= 1

    @invariant()
    def the_head_service_selects_live_members(self) -> None:
        if hasattr(self, "server"):
            assert {member.incarnation for member in self.server.alive()} <= {self.server.head}

    @invariant()
    def ended_groups_have_no_live_members(self) -> None:
        if hasattr(self, "server") and self.status().phase in ENDED and not self.late:
            assert not self.server.alive(), f"{self.status().phase}, and members live"

    def settled(self) -> tuple[object, ...]:
        """Return the state that stays constant once nothing more happens."""
        status, alive = self.status(), self.server.alive()
        return status.phase, status.incarnation, [(one.incarnation, one.rank, one.phase) for one in alive]

    def teardown(self) -> None:
        """After the trouble ends, a deleted group has no remains, and any other group serves or waits correctly."""
        if not hasattr(self, "server"):
            return
        self.server.fence_broken = self.server.unobserved = self.refused = False
        while self.late:
            self.server.arrive(self.late.pop())
            self.one_incarnation()
        quiet, looks = 0, 0
        while quiet < QUIET_LOOKS and looks < 80:
            before = self.settled()
            self.step()
            for member in self.server.alive():
                member.live(2)
            self.one_incarnation()
            self.the_head_service_selects_live_members()
            self.server.now += 2.0
            over = self.status().phase in (*ENDED, GroupPhase.SERVING, GroupPhase.FAILED)
            quiet, looks = quiet + 1 if over and self.settled() == before else 0, looks + 1
        phase = self.status().phase
        if self.deleting:
            assert phase is GroupPhase.STOPPED
            assert not self.server.alive()
        elif self.suspend:
            assert phase is GroupPhase.SUSPENDED
            assert not self.server.alive()
        else:
            assert phase in (GroupPhase.SERVING, GroupPhase.FAILED)


TestOperators = Operators.TestCase
TestOperators.settings = settings(
    max_examples=SCHEDULES, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_schedules_detect_a_deposed_operator_that_moves_the_head_back() -> None:
    """First of the two violations that these schedules detect: the one that the API server's comparison prevents."""
    machine = Operators()
    machine.compares = False
    machine.begin((0.0, 0.0))
    machine.step()
    machine.step(deposed=0, stage="head")
    machine.seed, machine.generation = 1, 2
    for _ in range(8):
        machine.step()
        machine.server.now += 1.0
    machine.server.arrive(machine.late.pop())
    with pytest.raises(AssertionError):
        machine.the_head_service_selects_live_members()


def test_a_suspension_whose_fence_fails_unseen_is_not_over() -> None:
    """Second violation: a suspended group with members that no listing shows and that a failing fence left running."""
    machine = Operators()
    machine.begin((0.0, 0.0))
    for _ in range(3):
        machine.step()
    assert machine.server.alive()
    machine.trouble(broken=True, unobserved=True)
    machine.user("suspend")
    for _ in range(3):
        machine.step()
        machine.ended_groups_have_no_live_members()
    assert machine.status().phase is GroupPhase.DRAINING
    machine.trouble(broken=False, unobserved=True)
    for _ in range(3):
        machine.step()
    assert machine.status().phase is GroupPhase.SUSPENDED
    machine.ended_groups_have_no_live_members()
