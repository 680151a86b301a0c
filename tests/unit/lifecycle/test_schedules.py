"""One group against an adversary that kills, hides and delays at any moment, and restarts the decider at any point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4_operator.api import DSV4Deployment, GroupPhase, GroupStatus, load
from dsv4_operator.api.annotations import PAUSED, RESTART_AT
from dsv4_operator.lifecycle import (
    Action,
    CollectEvidence,
    Drain,
    Fence,
    Forget,
    Form,
    GroupKey,
    Observed,
    ObservedMember,
    decide,
    record_evidence,
)
from dsv4_operator.lifecycle.watch import ALIVE
from dsv4_operator.planning import Facts, NodeFacts, plan_group
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    EngineStatus,
    Failure,
    GroupPlan,
    Health,
    Phase,
    Verdict,
    permit,
)

KEY = GroupKey("default", "nano", 0)
WINDOW = 600.0
START = 1_800_000_000.0
PLANNED = (GroupPhase.UPDATING, GroupPhase.DRAINING)
PROMISING = (Phase.SERVING, Phase.DRAINING)
LIFE = (Phase.PREFLIGHT, Phase.STAGING, Phase.JOINING, Phase.LOADING, Phase.WARMING, Phase.SERVING)
MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano, generation: %(generation)d, annotations: {%(annotations)s}}
spec:
  suspend: %(suspend)s
  model: {variant: Nano, source: {nano: {seed: %(seed)d}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
  engine: {timeouts: {drain: 8s}}
  recovery: {maxRestarts: %(budget)d, window: 10m, backoff: {base: 1s, max: 8s}}
"""
NODES = tuple(NodeFacts(f"node-{rank}", f"10.0.0.{rank + 1}", "eth0", 1, 2**36) for rank in range(2))
FACTS = Facts(NODES, True, "/state", "/weights", "/token")


@cache
def deployment_of(
    generation: int, suspend: bool, seed: int, budget: int, restarts: int = 0, paused: bool = False
) -> DSV4Deployment:
    asked = {RESTART_AT: str(restarts)} if restarts else {}
    if paused:
        asked[PAUSED] = "true"
    annotations = ", ".join(f'{name}: "{value}"' for name, value in asked.items())
    values = {"generation": generation, "suspend": str(suspend).lower(), "seed": seed, "budget": budget}
    return load(MANIFEST % (values | {"annotations": annotations}))


@cache
def plan_of(seed: int, budget: int, incarnation: int, restarts: tuple[float, ...]) -> GroupPlan:
    return plan_group(deployment_of(1, False, seed, budget), FACTS, group=0, incarnation=incarnation, restarts=restarts)


class BackendError(Exception):
    """The backend could not do all that it was asked for."""


@dataclass
class Member:
    incarnation: int
    rank: int
    started: float
    restarts_before: tuple[float, ...]
    life: int = 0
    engine_restarts: tuple[float, ...] = ()
    failure: Failure | None = None
    ended: str | None = None
    ended_time: float | None = None
    silent: bool = False
    open: bool = False
    """Rank 0: whether it has requests that it does not finish."""
    asked: float | None = None
    """Rank 0: when it was asked to drain."""
    heard: float | None = None
    status: AgentStatus | None = None

    @property
    def phase(self) -> Phase:
        if self.failure:
            return Phase.FAILED
        return LIFE[self.life] if self.asked is None else Phase.DRAINING

    @property
    def well(self) -> bool:
        return not (self.ended or self.failure or self.silent)

    def drain(self, seconds: float, now: float) -> bool:
        """As `Backend.drain`."""
        if not self.well or self.phase not in (Phase.SERVING, Phase.DRAINING):
            return False
        self.asked = now if self.asked is None else self.asked
        return self.open and now - self.asked < seconds

    def speak(self, now: float) -> None:
        if self.silent or self.ended:
            return
        engine = EngineStatus(generation=1 + len(self.engine_restarts), restarts=self.engine_restarts)
        self.heard = now
        self.status = AgentStatus.model_construct(
            deployment=KEY.deployment,
            group=KEY.group,
            incarnation=self.incarnation,
            rank=self.rank,
            phase=self.phase,
            phase_time=now if self.asked is None else self.asked,
            time=now,
            progress=None,
            verdict=Verdict(health=Health.DEAD if self.failure else Health.HEALTHY, failure=self.failure),
            processes=(),
            engine=engine if self.rank == 0 else None,
        )


@dataclass
class World:
    """A backend and the machines behind it."""

    now: float = START
    members: dict[tuple[int, int], Member] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    formations: list[float] = field(default_factory=list)
    """When incarnations were decided on that the user did not ask for."""
    claimed: float = 0.0
    level_one: list[float] = field(default_factory=list)
    newest: int = 0
    touched: bool = True
    """Whether the user asked for something since the last formation."""
    fence_broken: bool = False
    blind: bool = False
    """Whether listings show no members, as one from before they were made would."""

    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.ended is None]

    def observe(self) -> Observed:
        for member in self.members.values():
            member.speak(self.now)
        return Observed(
            KEY,
            tuple(
                ObservedMember(
                    incarnation=member.incarnation,
                    rank=member.rank,
                    node=f"node-{member.rank}",
                    address=f"10.0.0.{member.rank + 1}",
                    started=member.started,
                    ended=member.ended,
                    ended_time=member.ended_time,
                    status=member.status,
                    heard=member.heard,
                )
                for member in self.members.values()
                if not self.blind
            ),
        )

    def end(self, member: Member, how: str) -> None:
        if member.ended is None:
            member.ended, member.ended_time = how, self.now

    def execute(self, action: Action, halfway: bool) -> bool:
        """Do `action`, and whether those after it have to wait; `halfway` does a part of it and fails."""
        match action:
            case Drain(_, incarnation, seconds):
                head = self.members.get((incarnation, 0))
                drains = head is not None and head.drain(seconds, self.now)
                # Halfway: its answer was lost. Then there is nothing to wait for.
                return drains and not halfway
            case Form(plan):
                self._form(plan, halfway)
            case Fence() if self.fence_broken:
                raise BackendError
            case Fence(_, incarnation):
                mine = [member for member in self.alive() if member.incarnation == incarnation]
                for member in mine[: len(mine) // 2 if halfway else None]:
                    self.end(member, "fenced")
                if not halfway:
                    self.fenced.add(incarnation)
            case Forget(_, incarnation):
                for key in [key for key in self.members if key[0] == incarnation]:
                    assert self.members[key].ended is not None, f"forgot the live member {key}"
                    if not halfway:
                        del self.members[key]
            case CollectEvidence():
                pass
        if halfway:
            raise BackendError
        return False

    def _form(self, plan: GroupPlan, halfway: bool) -> None:
        assert plan.incarnation not in self.fenced, f"incarnation {plan.incarnation} came back after its fence"
        assert {member.incarnation for member in self.alive()} <= {plan.incarnation}, "two incarnations at once"
        assert plan.incarnation >= self.newest, "an older number was formed"
        if plan.incarnation > self.newest:
            self.newest = plan.incarnation
            if not self.touched:
                self.formations.append(self.claimed)
            self.touched = False
        for member in plan.members[: 1 if halfway else None]:
            key = (plan.incarnation, member.rank)
            if key not in self.members:
                self.members[key] = Member(*key, self.now, plan.restarts)


def spliced(members: Observed, words: Observed) -> Observed:
    """The members as one observation has them, with what their agents say in another one."""
    said = {(member.incarnation, member.rank): member for member in words.members}
    mixed = []
    for member in members.members:
        other = said.get((member.incarnation, member.rank))
        mixed.append(replace(member, status=other.status, heard=other.heard) if other else member)
    return Observed(members.key, tuple(mixed))


class Group(RuleBasedStateMachine):
    @initialize(budget=st.integers(0, 3))
    def begin(self, budget: int) -> None:
        self.world = World()
        self.budget, self.generation, self.seed, self.suspend = budget, 1, 0, False
        self.restarts, self.paused = 0, False
        self.kept: dict[str, object] | None = None
        self.snapshots = [self.world.observe()]
        self.next_look = START

    @property
    def deployment(self) -> DSV4Deployment:
        return deployment_of(self.generation, self.suspend, self.seed, self.budget, self.restarts, self.paused)

    def status(self) -> GroupStatus:
        return GroupStatus() if self.kept is None else GroupStatus.model_validate(self.kept)

    def step(self, *, age: int = 0, words: int | None = None, crash: int = 99, halfway: int = 99) -> None:
        """One round of the loop: on an old observation, dying before action `crash`, or failing in `halfway`.

        `words` is the age of what the agents said, if it is another one: members and agents are heard on ways of
        their own, so either may be late, and what was once newer may become older again.
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
        assert decision.next_look >= round(self.world.now, 3)
        assert not (self.paused and decision.actions)
        status = decision.status
        self.world.claimed = status.formed_time or 0.0
        if crash > 0 and any(isinstance(action, CollectEvidence) for action in decision.actions):
            # As the loop does: what died is told before it is ended.
            self.kept = json.loads(status.to_json())
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
        self.kept = json.loads(status.to_json())
        self.next_look = decision.next_look

    def check_cut(self, fence: Fence, status: GroupStatus) -> None:
        """What is open at a healthy engine is only cut off after as long as it was promised."""
        members = [member for member in self.world.alive() if member.incarnation == fence.incarnation]
        head = next((member for member in members if member.rank == 0), None)
        planned = status.phase in (GroupPhase.UPDATING, GroupPhase.DRAINING) and status.incarnation == fence.incarnation
        if head is None or not head.open or not planned or self.status().phase not in (*PLANNED, GroupPhase.SERVING):
            return
        if self.world.blind:
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

    @rule(blind=st.booleans(), fence_broken=st.booleans())
    def backend(self, blind: bool, fence_broken: bool) -> None:
        self.world.blind, self.world.fence_broken = blind, fence_broken

    @rule()
    def quick_start(self) -> None:
        """Without it, few schedules come as far as a group that serves."""
        for _ in range(5):
            self.step()
            for member in self.world.alive():
                member.life = len(LIFE) - 1
            self.world.now += 1.0

    @precondition(lambda self: self.world.alive())
    @rule(some=st.booleans())
    def requests(self, some: bool) -> None:
        for member in self.world.alive():
            member.open = some and member.rank == 0

    @rule(steps=st.integers(1, 6))
    def progress(self, steps: int) -> None:
        for member in self.world.alive():
            member.life = min(member.life + steps, len(LIFE) - 1)

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
                member.failure = Failure(
                    time=self.world.now, cause=cause, culprit_rank=member.rank, message="gone", detected_by="process"
                )

    @precondition(lambda self: self.world.alive())
    @rule()
    def level_one(self) -> None:
        """The head restarts its engine in place, as its own reading of the budget allows."""
        head = next((member for member in self.world.alive() if member.rank == 0), None)
        if head is None or head.failure or head.silent or head.asked is not None:
            return
        if head.incarnation != self.status().incarnation:
            # Given up by a blind decider whose fence fails: the head cannot know that its restart was paid for.
            return
        restarts = (*head.restarts_before, *head.engine_restarts)
        allowed = permit(self.deployment.spec.recovery.policy(), restarts, self.world.now)
        if allowed.at is None or allowed.at > self.world.now:
            return
        head.engine_restarts = (*head.engine_restarts, self.world.now)
        head.life = LIFE.index(Phase.LOADING)
        self.world.level_one.append(self.world.now)
        # What the decider never hears of, it cannot count.
        self.world.blind = False
        self.step()

    @rule(what=st.sampled_from(["revision", "suspend", "resume", "restart"]))
    def user(self, what: str) -> None:
        self.world.touched = True
        match what:
            case "restart":
                # An annotation, which the server does not count as a change.
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
    def nobody_who_is_to_live_drains(self) -> None:
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
        """Once the trouble ends, the group serves, or was given up, or is suspended."""
        if not hasattr(self, "world"):
            return
        self.world.blind = self.world.fence_broken = self.paused = False
        for _ in range(80):
            self.step()
            for member in self.world.alive():
                member.life = min(member.life + 2, len(LIFE) - 1)
                member.silent = False
            self.one_incarnation()
            self.within_budget()
            phase = self.status().phase
            wanted = 2 if phase is GroupPhase.SERVING else 0
            end = GroupPhase.SUSPENDED if self.suspend else GroupPhase.SERVING
            if phase in (end, GroupPhase.FAILED) and len(self.world.alive()) == wanted:
                break
            self.world.now = max(self.world.now + 0.5, min(self.next_look, self.world.now + 20.0))
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
    max_examples=2000,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
