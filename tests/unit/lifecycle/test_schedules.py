"""One group against kills, hidden and delayed observations, and restarts of the decider at any point."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4_operator.api import DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.lifecycle import CollectEvidence, Fence, record_evidence
from dsv4_operator.lifecycle.decide import decide
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_runtime.contract import (
    Cause,
    GroupPlan,
    Phase,
    permit,
)
from dsv4_testkit.group_world import (
    LIFE,
    SCHEDULES,
    START,
    BackendError,
    World,
    deployment_of,
    kept_status,
    plan_of,
    spliced,
)

WINDOW = 600.0
PLANNED = (GroupPhase.UPDATING, GroupPhase.DRAINING)
PROMISING = (Phase.SERVING, Phase.DRAINING)


class Group(RuleBasedStateMachine):
    @initialize(budget=st.integers(0, 3))
    def begin(self, budget: int) -> None:
        self.world = World()
        self.budget, self.generation, self.seed, self.suspend = budget, 1, 0, False
        self.restarts, self.paused = 0, False
        self.kept: str | None = None
        self.snapshots = [self.world.observe()]
        self.next_time = START

    @property
    def deployment(self) -> DSV4Deployment:
        return deployment_of(self.generation, self.suspend, self.seed, self.budget, self.restarts, self.paused)

    def status(self) -> GroupStatus:
        return GroupStatus() if self.kept is None else kept_status(self.kept)

    def step(self, *, age: int = 0, words: int | None = None, crash: int = 99, halfway: int = 99) -> None:
        """Run one round of the loop: on an old observation, with a crash before action `crash` or a failure in
        `halfway`.

        `words` is the age of the agents' reports if it differs: members and reports are observed on separate paths, so
        either may be late, and a later observation may be older than an earlier one.
        """
        self.snapshots = [*self.snapshots[-3:], self.world.observe()]
        observed = self.snapshots[max(0, len(self.snapshots) - 1 - age)]
        if words is not None:
            said = self.snapshots[max(0, len(self.snapshots) - 1 - words)]
            observed = spliced(observed, said)
        previous = None if self.kept is None else self.status()

        def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
            return plan_of(self.seed, self.budget, incarnation, tuple(restarts))

        decision = decide(self.deployment, observed, previous, plan, self.world.now)
        assert decision.next_time >= round(self.world.now, 3)
        assert not (self.paused and decision.actions)
        status = decision.status
        self.world.claimed = status.formed_time or 0.0
        if crash > 0 and any(isinstance(action, CollectEvidence) for action in decision.actions):
            # As in the loop: the death is published before its members are ended.
            self.kept = status.to_json()
        fresh = (age, words, crash, halfway) == (0, None, 99, 99)
        for index, action in enumerate(decision.actions):
            if index == crash:
                return
            if fresh and isinstance(action, Fence):
                self.check_cut(action, status)
            try:
                if self.world.execute(action, index == halfway):
                    break
            except BackendError:
                if not isinstance(action, CollectEvidence):
                    break
            if isinstance(action, CollectEvidence):
                status = record_evidence(status, action.incarnation, "evidence")
        else:
            status = decision.completed or status
        if len(decision.actions) > crash:
            return
        self.kept = status.to_json()
        self.next_time = decision.next_time

    def check_cut(self, fence: Fence, status: GroupStatus) -> None:
        """Open requests of a healthy engine are only cut off after the promised time."""
        members = [member for member in self.world.alive() if member.incarnation == fence.incarnation]
        head = next((member for member in members if member.rank == 0), None)
        planned = status.phase in (GroupPhase.UPDATING, GroupPhase.DRAINING) and status.incarnation == fence.incarnation
        if head is None or not head.open or not planned or self.status().phase not in (*PLANNED, GroupPhase.SERVING):
            return
        if self.world.unobserved:
            return
        if len(members) == 2 and all(member.well for member in members) and head.phase in PROMISING:
            bound = self.deployment.spec.engine.timeouts.drain
            assert head.asked is not None, "nobody asked it to finish"
            assert self.world.now - head.asked >= bound, "open requests were cut off"

    @rule(age=st.integers(0, 3), words=st.integers(0, 3), crash=st.integers(0, 6), halfway=st.integers(0, 6))
    def troubled_look(self, age: int, words: int, crash: int, halfway: int) -> None:
        self.step(age=age, words=words, crash=crash, halfway=halfway)

    @rule(crash=st.integers(0, 3))
    def killed(self, crash: int) -> None:
        self.step(crash=crash)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0, 100.0]), looks=st.integers(1, 6))
    def calm_looks(self, seconds: float, looks: int) -> None:
        for _ in range(looks):
            self.step()
            self.world.now += seconds

    @rule(unobserved=st.booleans(), fence_broken=st.booleans())
    def backend(self, unobserved: bool, fence_broken: bool) -> None:
        self.world.unobserved, self.world.fence_broken = unobserved, fence_broken

    @rule()
    def quick_start(self) -> None:
        """Without this rule, few schedules reach a group that serves."""
        for _ in range(5):
            self.step()
            for member in self.world.alive():
                member.live(len(LIFE))
            self.world.now += 1.0

    @precondition(lambda self: self.world.alive())
    @rule(some=st.booleans())
    def requests(self, some: bool) -> None:
        for member in self.world.alive():
            member.open = some and member.rank == 0

    @rule(steps=st.integers(1, 6))
    def progress(self, steps: int) -> None:
        for member in self.world.alive():
            member.live(steps)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), how=st.sampled_from(["dies", "fails", "silent", "speaks", "config"]))
    def trouble(self, data: st.DataObject, how: str) -> None:
        member = data.draw(st.sampled_from(self.world.alive()))
        match how:
            case "dies":
                self.world.end(member, "killed by SIGKILL")
            case "silent" | "speaks":
                member.silent = how == "silent"
            case _:
                cause = Cause.CONFIG_ERROR if how == "config" else Cause.ENGINE_CORE_DIED
                member.fail(cause, self.world.now)

    @precondition(lambda self: self.world.alive())
    @rule()
    def level_one(self) -> None:
        """The head restarts its engine in place if its own computation of the budget allows it."""
        head = next((member for member in self.world.alive() if member.rank == 0), None)
        if head is None or head.failure or head.silent or head.asked is not None:
            return
        if head.incarnation != self.status().incarnation:
            # Given up by a blind decider whose fence fails: the head cannot know that its restart was used.
            return
        restarts = (*head.restarts_before, *head.engine_restarts)
        allowed = permit(self.deployment.spec.recovery.policy(), restarts, self.world.now)
        if allowed.at is None or allowed.at > self.world.now:
            return
        head.engine_restarts = (*head.engine_restarts, self.world.now)
        head.life = LIFE.index(Phase.LOADING)
        self.world.level_one.append(self.world.now)
        # The decider cannot count a restart that it does not observe.
        self.world.unobserved = False
        self.step()

    @rule(what=st.sampled_from(["revision", "suspend", "resume", "restart"]))
    def user(self, what: str) -> None:
        self.world.touched = True
        match what:
            case "restart":
                # An annotation: the API server does not increase the generation.
                self.restarts += 1
                return
            case "revision":
                self.seed = 1 - self.seed
            case _:
                self.suspend = what == "suspend"
        self.generation += 1

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.paused = paused

    @invariant()
    def one_incarnation(self) -> None:
        if hasattr(self, "world"):
            assert len({member.incarnation for member in self.world.alive()}) <= 1

    @invariant()
    def no_incarnation_that_continues_is_drained(self) -> None:
        if hasattr(self, "world") and self.status().phase in ALIVE:
            drains = {member.incarnation for member in self.world.alive() if member.asked is not None}
            assert self.status().incarnation not in drains

    @invariant()
    def within_budget(self) -> None:
        if not hasattr(self, "world"):
            return
        times = sorted((*self.world.formations, *self.world.level_one))
        for first in times:
            inside = [time for time in times if first <= time < first + WINDOW]
            assert len(inside) <= self.budget, f"{len(inside)} restarts within the window, {self.budget} are allowed"

    def teardown(self) -> None:
        """After the trouble ends, the group serves, was given up, or is suspended."""
        if not hasattr(self, "world"):
            return
        self.world.unobserved = self.world.fence_broken = self.paused = False
        for _ in range(80):
            self.step()
            for member in self.world.alive():
                member.live(2)
                member.silent = False
            self.one_incarnation()
            self.within_budget()
            phase = self.status().phase
            wanted = 2 if phase is GroupPhase.SERVING else 0
            end = GroupPhase.SUSPENDED if self.suspend else GroupPhase.SERVING
            if phase in (end, GroupPhase.FAILED) and len(self.world.alive()) == wanted:
                break
            self.world.now = max(self.world.now + 0.5, min(self.next_time, self.world.now + 20.0))
        status = self.status()
        alive = self.world.alive()
        if self.suspend:
            assert status.phase is GroupPhase.SUSPENDED
            assert not alive
        elif status.phase is GroupPhase.FAILED:
            assert status.exhausted_generation == self.generation
            assert not alive
        else:
            assert status.phase is GroupPhase.SERVING, f"stuck in {status.phase}"
            assert {(member.incarnation, member.rank) for member in alive} == {
                (status.incarnation, 0),
                (status.incarnation, 1),
            }


TestGroup = Group.TestCase
TestGroup.settings = settings(
    max_examples=SCHEDULES,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
