"""One group of two members with its backend and machines in memory, for tests of deciders."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from dsv4_operator.api import DSV4Deployment, GroupStatus, load
from dsv4_operator.api.deployment import PAUSED, RESTART_AT
from dsv4_operator.lifecycle import Action, CollectEvidence, Drain, Fence, Forget, Form
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning import Facts, NodeFacts, plan_group
from dsv4_runtime.contract import AgentStatus, Cause, EngineStatus, Failure, GroupPlan, Health, Phase, Verdict

SCHEDULES = int(os.environ.get("DSV4_SCHEDULES", "2000"))
"""Number of tried schedules. 10,000, the number of the lifecycle's acceptance, take minutes (docs/measurements.md)."""
KEY = GroupKey("default", "nano", 0)
START = 1_800_000_000.0
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


def facts(count: int) -> Facts:
    """Return `count` machines without accelerators, each with the resources for a member of Nano."""
    nodes = tuple(NodeFacts(f"node-{n}", f"10.0.0.{n + 1}", "eth0", 1, 2**36) for n in range(count))
    return Facts(nodes, isolated=True, state_root="/state", weights_root="/weights", ray_token_file="/token")


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
    return plan_group(
        deployment_of(1, False, seed, budget), facts(2), group=0, incarnation=incarnation, restarts=restarts
    )


@lru_cache(maxsize=256)
def kept_status(text: str) -> GroupStatus:
    """Parse a stored status; fields that are not serialized are lost."""
    return GroupStatus.model_validate_json(text)


class BackendError(Exception):
    """The backend did not complete an action."""


@dataclass
class Member:
    """A member and the reports of its agent."""

    incarnation: int
    rank: int
    started: float
    group: int = 0
    restarts_before: tuple[float, ...] = ()
    lives: tuple[Phase, ...] = LIFE
    """The phases of its start; it stays in the last one."""
    life: int = 0
    """Index of its current phase."""
    engine_restarts: tuple[float, ...] = ()
    failure: Failure | None = None
    ended: str | None = None
    ended_time: float | None = None
    silent: bool = False
    open: bool = False
    """Rank 0: whether it has requests that do not complete."""
    asked: float | None = None
    """Rank 0: time of the first drain request."""
    heard: float | None = None
    status: AgentStatus | None = None
    told: tuple[object, ...] = ()
    """Values from which `status` was made."""

    @property
    def phase(self) -> Phase:
        if self.failure:
            return Phase.FAILED
        return self.lives[self.life] if self.asked is None else Phase.DRAINING

    @property
    def well(self) -> bool:
        return not (self.ended or self.failure or self.silent)

    def live(self, steps: int = 1) -> None:
        """Advance by `steps` phases."""
        self.life = min(self.life + steps, len(self.lives) - 1)

    def fail(self, cause: Cause, now: float) -> None:
        self.failure = Failure(time=now, cause=cause, culprit_rank=self.rank, message="as told", detected_by="process")

    def drain(self, seconds: float, now: float) -> bool:
        """Implement `Backend.drain`."""
        if not self.well or self.phase not in (Phase.SERVING, Phase.DRAINING):
            return False
        self.asked = now if self.asked is None else self.asked
        return self.open and now - self.asked < seconds

    def seen(self, now: float) -> ObservedMember:
        """Return the member as observed by a backend, with a current report unless it is silent or ended."""
        if not (self.silent or self.ended):
            self.heard, self.status = now, self._said(now)
        place = self.group + self.rank
        return ObservedMember(
            self.incarnation, self.rank, f"node-{place}", f"10.0.0.{place + 1}", self.started,
            ended=self.ended, ended_time=self.ended_time, status=self.status, heard=self.heard,
        )  # fmt: skip

    def _said(self, now: float) -> AgentStatus:
        times = {"time": now, "phase_time": now if self.asked is None else self.asked}
        told = self.phase, self.failure, self.engine_restarts
        if self.status is None or told != self.told:
            self.told = told
            return self._anew().model_copy(update=times)
        # A new status costs ten times as much as a copy, and a schedule has hundreds.
        return self.status.model_copy(update=times)

    def _anew(self) -> AgentStatus:
        engine = EngineStatus(generation=1 + len(self.engine_restarts), restarts=self.engine_restarts)
        return AgentStatus.model_construct(
            deployment=KEY.deployment,
            group=self.group,
            incarnation=self.incarnation,
            rank=self.rank,
            phase=self.phase,
            phase_time=0.0,
            time=0.0,
            progress=None,
            signals=None,
            verdict=Verdict(health=Health.DEAD if self.failure else Health.HEALTHY, failure=self.failure),
            processes=(),
            engine=None if self.rank else engine,
        )


@dataclass
class World:
    """A backend and its machines."""

    now: float = START
    members: dict[tuple[int, int], Member] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    formations: list[float] = field(default_factory=list)
    """Times of the claims of incarnations that were not requested by the user."""
    claimed: float = 0.0
    level_one: list[float] = field(default_factory=list)
    newest: int = 0
    touched: bool = True
    """Whether the user requested a change since the last formation."""
    fence_broken: bool = False
    unobserved: bool = False
    """Whether observations contain no members, like a listing from before their creation."""

    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.ended is None]

    def observe(self) -> Observed:
        seen = tuple(member.seen(self.now) for member in self.members.values())
        return Observed(KEY, () if self.unobserved else seen)

    def end(self, member: Member, how: str) -> None:
        if member.ended is None:
            member.ended, member.ended_time = how, self.now

    def execute(self, action: Action, halfway: bool) -> bool:
        """Execute `action`; return whether later actions must wait. `halfway` executes a part of it and fails."""
        match action:
            case Drain(_, incarnation, seconds):
                head = self.members.get((incarnation, 0))
                drains = head is not None and head.drain(seconds, self.now)
                # Halfway: the response was lost, so there is no wait.
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
                self.members[key] = Member(*key, self.now, restarts_before=plan.restarts)


def spliced(members: Observed, words: Observed) -> Observed:
    """Return the members of one observation with the agent reports of another."""
    said = {(member.incarnation, member.rank): member for member in words.members}
    mixed = []
    for member in members.members:
        other = said.get((member.incarnation, member.rank))
        mixed.append(replace(member, status=other.status, heard=other.heard) if other else member)
    return Observed(members.key, tuple(mixed))
