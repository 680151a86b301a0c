"""Several groups of one member, with their backend and decider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from dsv4_operator.api import (
    DeploymentStatus,
    DSV4Deployment,
    Finding,
    GroupPhase,
    GroupStatus,
    Reason,
    load,
)
from dsv4_operator.api.deployment import PAUSED, RESTART_AT
from dsv4_operator.lifecycle import (
    Action,
    CollectEvidence,
    Drain,
    Event,
    Fence,
    Forget,
    Form,
    Hold,
    Planner,
    compute_status,
    decide_groups,
    events,
    record_evidence,
    versions,
)
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning import PlanRefused, plan_group, revision
from dsv4_runtime.contract import Cause, GroupPlan, Phase
from dsv4_testkit import group_world
from dsv4_testkit.group_world import START, BackendError, facts

NODES = tuple(f"node-{number}" for number in range(4))
LIFE = (Phase.STAGING, Phase.JOINING, Phase.LOADING, Phase.SERVING)
DEADLINE = 300.0
FACTS = facts(len(NODES))
MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano, generation: %(generation)d, annotations: {%(annotations)s}}
spec:
  suspend: %(suspend)s
  replicas: %(replicas)d
  model: {variant: Nano, source: {nano: {seed: %(seed)d}}, servedNames: [of-%(seed)d]}
  topology: {hardware: CPU}
  recovery: {maxRestarts: 2, window: 10m, backoff: {base: 1s, max: 8s}}
  rollout: {strategy: %(strategy)s, maxUnavailable: %(limit)d, progressDeadline: 5m, autoRollback: %(back)s}
  gateway: {maxHeldRequests: %(held)d}
"""


@dataclass(frozen=True)
class Asked:
    """The user's present specification."""

    replicas: int = 2
    limit: int = 1
    strategy: str = "RollingUpdate"
    back: bool = True
    seed: int = 0
    suspend: bool = False
    restarts: int = 0
    paused: bool = False
    held: int = 10
    generation: int = 1

    def but(self, **changes: object) -> Asked:
        """Return a copy with changes and the next generation, as the server counts it."""
        return Asked(**{**vars(self), "generation": self.generation + 1, **changes})  # type: ignore[arg-type]


@cache
def deployment_of(asked: Asked) -> DSV4Deployment:
    told = {RESTART_AT: str(asked.restarts)} if asked.restarts else {}
    if asked.paused:
        told[PAUSED] = "true"
    values = vars(asked) | {"suspend": str(asked.suspend).lower(), "back": str(asked.back).lower()}
    return load(MANIFEST % (values | {"annotations": ", ".join(f'{name}: "{value}"' for name, value in told.items())}))


@dataclass
class Member(group_world.Member):
    """The only member of its group."""

    lives: tuple[Phase, ...] = LIFE
    seed: int = 0
    """Seed of the specification from which it was formed."""
    node: str = ""

    @property
    def serves(self) -> bool:
        return self.ended is None and self.phase is Phase.SERVING


@dataclass
class World:
    """Groups of one member, with their backend and decider."""

    asked: Asked = field(default_factory=Asked)
    now: float = START
    bad: dict[int, str] = field(default_factory=dict)
    """Result by seed for which no engine starts: `config`, `dies` or `never`."""
    members: dict[tuple[int, int], Member] = field(default_factory=dict)
    fenced: set[tuple[int, int]] = field(default_factory=set)
    kept: DeploymentStatus = field(default_factory=DeploymentStatus)
    told: list[Event] = field(default_factory=list)
    open_seconds: float = 0.0
    """Seconds in which engines complete open requests."""
    refused: set[int] = field(default_factory=set)
    """Seeds that cannot be planned."""
    cordoned: set[str] = field(default_factory=set)
    """Cordoned nodes of `NODES`, each with room for one member."""
    listed: set[str] = field(default_factory=set)
    """Cordoned nodes at the last list of nodes, from which the planner chooses."""
    held: dict[int, str] = field(default_factory=dict)
    """Node held for the next member of each group that moves."""
    reserved: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Node of the latest plan of each group, and the end of its reservation."""
    moves: list[tuple[int, str]] = field(default_factory=list)
    """Group and node of every member that was ended because of a cordoned node."""
    pause: float = 0.0

    @property
    def deployment(self) -> DSV4Deployment:
        return deployment_of(self.asked)

    def alive(self, group: int | None = None) -> list[Member]:
        return [one for one in self.members.values() if one.ended is None and group in (None, one.group)]

    def serving(self) -> dict[int, int]:
        """Return the seeds of serving groups, by group."""
        return {one.group: one.seed for one in self.members.values() if one.serves}

    def group(self, index: int) -> GroupStatus:
        return next((one for one in self.kept.groups if one.index == index), GroupStatus(index=index))

    def observe(self) -> list[Observed]:
        found = []
        for group in range(max(self.asked.replicas, len(self.kept.groups))):
            mine = [
                replace(one.seen(self.now), node=one.node, cordoned=one.node in self.cordoned)
                for one in self.members.values()
                if one.group == group
            ]
            # Ended members are reported as ended at this moment.
            seen = tuple(replace(one, ended_time=one.ended and self.now) for one in mine)
            found.append(Observed(GroupKey("default", "nano", group), seen))
        return found

    def planner(self, deployment: DSV4Deployment, group: int) -> Planner:
        assert deployment in versions(self.deployment, self.kept), "a version that nobody was told of"

        def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
            if seed_of(deployment) in self.refused:
                raise PlanRefused(
                    Reason.MEMORY_SHORT, Finding("", Reason.MEMORY_SHORT, "too little memory", "add some")
                )
            node = self._node_for(group)
            if node is None:
                raise PlanRefused(
                    Reason.NODES_MISSING, Finding("", Reason.NODES_MISSING, "no node is free", "add some")
                )
            self.reserved[group] = node, self.now + 15.0
            placed = {group: (FACTS.nodes[NODES.index(node)],)}
            found = replace(FACTS, placed=placed)
            return plan_group(deployment, found, group=group, incarnation=incarnation, restarts=restarts)

        return plan

    def _node_for(self, group: int) -> str | None:
        """Return a node for the next member of `group`: its last one if possible."""
        last = max((one for one in self.members.values() if one.group == group), key=_number, default=None)
        known = [last.node] if last is not None else [member.node for member in self.group(group).members]
        options = (*known, self.held.get(group), *NODES)
        return next((node for node in options if node and node not in self.listed and self._is_free(node, group)), None)

    def _is_free(self, node: str, group: int) -> bool:
        """Return whether `node` has neither a member of another group nor a reservation for one."""
        used = {one.node for one in self.alive() if one.group != group}
        used |= {kept for other, kept in self.held.items() if other != group}
        return node not in used | {
            kept for other, (kept, end) in self.reserved.items() if other != group and end > self.now
        }

    def cordon(self, *nodes: str, listed: bool = True) -> None:
        """Cordon exactly these nodes; `listed`: the planner knows it."""
        self.cordoned = set(nodes)
        if listed:
            self.listed = set(nodes)

    def step(self, observed: list[Observed] | None = None, crash: int = 99, halfway: int = 99) -> None:
        """Run one reconcile that dies before action `crash` of all groups', or fails halfway in action `halfway`."""
        seen = self.observe() if observed is None else observed
        known = self.kept
        turn = decide_groups(self.deployment, seen, known, self.planner, self.now)
        self._check(seen, known, [decision.completed or decision.status for decision in turn.decisions])
        count, groups = 0, []
        for decision in turn.decisions:
            status = decision.status
            for action in decision.actions:
                if count == crash:
                    return
                count += 1
                try:
                    if self.execute(action, count - 1 == halfway):
                        break
                except BackendError:
                    if not isinstance(action, CollectEvidence):
                        break
                if isinstance(action, CollectEvidence):
                    status = record_evidence(status, action.incarnation, "evidence")
            else:
                status = decision.completed or status
            groups.append(status)
        if count < crash < 99:
            return
        refusal = next((one.refusal for one in turn.decisions if one.refusal is not None), None)
        new = compute_status(self.deployment, groups, refusal, None, None, known, self.now, rollout=turn.rollout)
        self.told += events(known, new)
        self.kept = DeploymentStatus.model_validate_json(new.to_json())
        assert self.kept == new, "a status must survive being kept"
        self.check_names()
        self.pause = min(decision.next_time for decision in turn.decisions) - self.now

    def _check(self, seen: Sequence[Observed], known: DeploymentStatus, decided: Sequence[GroupStatus]) -> None:
        """Assert that no more groups are ended than may be unavailable, and that no rejected revision is formed."""
        before = {group.index: group for group in known.groups}
        answering = {one.key.group for one in seen for member in one.members if _answers(member)}
        # A group whose formation was not observed was never Ready, even if its agent reports that it serves.
        kept = (GroupPhase.UPDATING, GroupPhase.FORMING)
        ended = {
            group.index
            for group in decided
            if group.phase is GroupPhase.UPDATING and before[group.index].phase not in kept
        }
        if ended & answering and self.asked.strategy == "RollingUpdate":
            left = len(answering - ended)
            assert left >= self.asked.replicas - self.asked.limit, f"{sorted(ended)} ended, {left} left answering"
        moved = [
            group for group in decided if group.index in ended and group.move and before[group.index].move != group.move
        ]
        if moved:
            wanted = set(range(self.asked.replicas))
            assert len(moved) == 1, "two groups move at once"
            assert wanted - answering <= {moved[0].index}, "a group moves while another one does not answer"
        rejected = known.rollout.rejected
        for group in decided:
            earlier = before.get(group.index, GroupStatus())
            if group.incarnation > earlier.incarnation and earlier.phase is not GroupPhase.RECOVERING:
                assert group.total_restarts == earlier.total_restarts, "a planned end used a restart"
            claimed = group.incarnation > before.get(group.index, GroupStatus()).incarnation
            if claimed and rejected is not None and rejected.revision == revision(self.deployment):
                assert group.revision != rejected.revision, f"group {group.index} tries again what was given up"

    def execute(self, action: Action, halfway: bool) -> bool:
        """Execute `action`; return whether later actions must wait."""
        match action:
            case Drain(of, incarnation, seconds):
                member = self.members.get((of.group, incarnation))
                if member is None or member.silent or not (member.serves or member.asked) or halfway:
                    return False
                member.asked = member.asked or self.now
                return member.ended is None and self.now - member.asked < min(seconds, self.open_seconds)
            case Form(plan, deployment):
                key = plan.group, plan.incarnation
                assert key not in self.fenced, f"{key} came back after its fence"
                assert all(one.incarnation == plan.incarnation for one in self.alive(plan.group)), "two at once"
                assert self.group(plan.group).revision == revision(deployment), "not formed from what was claimed"
                if not halfway:
                    made = Member(plan.incarnation, 0, self.now, group=plan.group, seed=seed_of(deployment))
                    made.node = plan.members[0].node or ""
                    self.members.setdefault(key, made)
                    self.held.pop(plan.group, None)
            case Hold(plan, _):
                node = plan.members[0].node or ""
                if node in self.cordoned or not self._is_free(node, plan.group):
                    return True
                if not halfway:
                    self.held[plan.group] = node
            case Fence(of, incarnation):
                member = self.members.get((of.group, incarnation))
                if member is not None and not halfway:
                    status = self.group(of.group)
                    if status.phase is GroupPhase.UPDATING and status.move is not None and member.ended is None:
                        assert self.held.get(of.group) not in (None, member.node), "ended without another node"
                        self.moves.append((of.group, member.node))
                    self.fenced.add((of.group, incarnation))
                    member.ended = member.ended or "fenced"
            case Forget(of, incarnation):
                member = self.members.get((of.group, incarnation))
                assert member is None or member.ended is not None, "forgot a live member"
                if not halfway:
                    self.members.pop((of.group, incarnation), None)
            case CollectEvidence():
                pass
        if halfway:
            raise BackendError
        return False

    def live(self) -> None:
        """Advance members by one phase; those of a bad specification advance to their failure."""
        for one in self.alive():
            match self.bad.get(one.seed):
                case None:
                    one.live()
                case "never":
                    one.life = 2
                case how:
                    one.life = min(one.life + 1, 2)
                    if one.life == 2 and one.failure is None:
                        one.fail(Cause.CONFIG_ERROR if how == "config" else Cause.ENGINE_CORE_DIED, self.now)

    def go_on(self, looks: int = 1, seconds: float = 1.0) -> None:
        for _ in range(looks):
            self.listed = set(self.cordoned)
            self.step()
            self.live()
            self.now += seconds

    def until(self, true: Callable[[], bool], *, looks: int = 400, seconds: float = 1.0) -> None:
        for _ in range(looks):
            if true():
                return
            self.go_on(seconds=seconds)
        raise AssertionError(f"not so after {looks} looks: {self.kept.to_json(indent=1)}")

    def check_names(self) -> None:
        """Assert that the status has the names that each group serves."""
        for member in self.alive():
            group = self.group(member.group)
            if group.incarnation == member.incarnation:
                assert group.served_names == (f"of-{member.seed}",), f"group {member.group}: {group.served_names}"

    def all_serve(self, seed: int) -> bool:
        phases = [self.group(index).phase for index in range(self.asked.replicas)]
        return phases == [GroupPhase.SERVING] * self.asked.replicas and self.serving() == dict.fromkeys(
            range(self.asked.replicas), seed
        )

    def reasons(self) -> list[Reason]:
        return [event.reason for event in self.told]


def _number(member: Member) -> int:
    return member.incarnation


def _answers(member: ObservedMember) -> bool:
    said = member.status
    return member.ended is None and said is not None and said.phase is Phase.SERVING


def seed_of(deployment: DSV4Deployment) -> int:
    nano = deployment.spec.model.source.nano
    assert nano is not None
    return nano.seed
