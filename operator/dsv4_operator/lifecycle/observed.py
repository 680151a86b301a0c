"""Observations of a group, as reported by a backend, and of the public endpoint of a deployment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4_operator.api import DSV4Deployment, GroupPhase, GroupStatus
from dsv4_runtime.contract import AgentStatus, Cause


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Key of one group of one deployment."""

    namespace: str
    deployment: str
    group: int
    uid: str = ""
    """UID of the deployment; empty without an API server. A deployment that is created again has other groups."""

    @classmethod
    def of(cls, deployment: DSV4Deployment, group: int) -> GroupKey:
        """Return the key of group number `group` of `deployment`."""
        metadata = deployment.metadata
        return cls(metadata.namespace, metadata.name, group, metadata.uid or "")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.deployment}/{self.group}"


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """A process of a member, with its process id on the machine (none on Kubernetes)."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ObservedMember:
    """One member of one incarnation, running or ended, until the backend forgets it."""

    incarnation: int
    rank: int
    node: str
    address: str
    started: float
    """Unix time at which the backend created it."""
    ended: str | None = None
    """Description of its end (`exit code 0`, `killed by SIGKILL`); None while it runs."""
    ended_time: float | None = None
    """Unix time at which the backend noticed the end."""
    cause: Cause | None = None
    """Cause of its end, if the backend can determine it."""
    waiting: str | None = None
    """Reason why its agent cannot answer yet: an image is being pulled, a node is being chosen. None: it can."""
    queued: bool = False
    """A scheduler is to choose its node and has not done so; `waiting` has the reason."""
    cordoned: bool = False
    """Its node is cordoned: it accepts no new pods, and may be emptied."""
    removal: str | None = None
    """Reason why a scheduler or an eviction removes it, although it has not ended yet; None: nothing does."""
    status: AgentStatus | None = None
    """Latest status from the agent; None before the first."""
    heard: float | None = None
    """Unix time, by the observer's clock, of that status."""
    processes: tuple[ObservedProcess, ...] = field(default=())

    def summary(self) -> dict[str, Any]:
        """Return the member as JSON values for its evidence."""
        return {
            "rank": self.rank,
            "node": self.node,
            "started": self.started,
            "ended": self.ended,
            "endedTime": self.ended_time,
            "heard": self.heard,
            "status": self.status.to_dict() if self.status is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Observed:
    """Observation of one group; the only input of `decide` besides the specification and the clock."""

    key: GroupKey
    members: tuple[ObservedMember, ...]
    """Members of every incarnation that the backend has, in no order."""
    used_incarnation: int = 0
    """Highest incarnation whose names are in use by members of another owner, for example of an earlier deployment of
    the same name that are still terminating; 0: none."""
    anomalies: tuple[str, ...] = ()
    """Changes of the group's objects by other clients, one sentence each: ignored pods, changed labels."""
    silence_is_event: bool = False
    """Whether the backend requests a decision once a member is silent; otherwise the next decision looks for it."""


# Reachability of a deployment: a pure state machine over the results of requests through its public endpoint.

PERIOD_SECONDS = 30.0
"""Interval between requests while they succeed."""
AGAIN_SECONDS = 5.0
"""Interval between requests after a failure."""
TEXT_SECONDS = 60.0
"""Minimum interval between new messages of a lasting problem, so that not every failed request writes a status."""
UNTRIED = "no request through the public endpoint was answered yet"

UNREACHED = "the endpoint does not: "
"""Prefix of `Canary.problem` in the condition Ready."""

Lives = frozenset[tuple[int, int, int]]
"""Group, incarnation and engine generation of every group that serves."""


@dataclass(frozen=True, slots=True)
class Canary:
    """State of the public endpoint of one deployment."""

    problem: str | None = UNTRIED
    """Reason why users get no answer; None: a request was answered."""
    lives: Lives = frozenset()
    gateways: frozenset[str] = frozenset()
    suspect: bool = False
    """Whether the latest request failed after a success; the failure needs confirmation."""
    changed: bool = True
    """Whether engines or gateways changed since the latest request; a failure needs no confirmation then."""
    due: float = 0.0
    """Monotonic time of the next request."""
    message_time: float = 0.0
    """Monotonic time at which `problem` got its text."""


def lives_of(groups: Iterable[GroupStatus]) -> Lives:
    """Return the serving engines."""
    serving = (group for group in groups if group.phase is GroupPhase.SERVING)
    return frozenset((group.index, group.incarnation, group.engine_generation) for group in serving)


def adopted(problem: str | None, lives: Lives, gateways: frozenset[str], now: float) -> Canary:
    """Return the initial state of an operator that takes over a deployment with `problem` in its status.

    The first request is sent at once, and a failure is confirmed before the state changes.
    """
    return Canary(problem, lives, gateways, changed=False, due=now, message_time=now)


def seen(known: Canary, lives: Lives, gateways: frozenset[str], now: float) -> Canary:
    """Return the state after an observation of engines and gateways.

    Each new engine must answer through the endpoint once. Until then the deployment is not Ready because the engine
    does not serve, so this never revokes an earlier result.
    """
    if lives - known.lives:
        return Canary(UNTRIED, lives, gateways, due=now)
    if (lives, gateways) == (known.lives, known.gateways):
        return known
    return replace(known, lives=lives, gateways=gateways, changed=True, due=min(known.due, now))


def answered(known: Canary, at_start: Canary, problem: str | None, now: float, spread: float) -> Canary:
    """Return the state after a request.

    Args:
        known: the present state.
        at_start: the state at the start of the request.
        problem: the failure; None: the request was answered.
        now: monotonic time.
        spread: factor of the next period, about 1, so that requests of many deployments do not coincide.
    """
    if known.lives - at_start.lives:
        # The result does not cover the engine that started meanwhile.
        return replace(known, due=now)
    if problem is None:
        return replace(known, problem=None, suspect=False, changed=False, due=now + PERIOD_SECONDS * spread)
    again = replace(known, changed=False, due=now + AGAIN_SECONDS * spread)
    if known.problem is None and not known.suspect and not known.changed:
        return replace(again, suspect=True)
    if known.problem not in (None, UNTRIED) and now - known.message_time < TEXT_SECONDS:
        return again
    return replace(again, problem=problem, suspect=False, message_time=now)
