"""Observations that a backend reports about a group: plain facts, no judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsv4_operator.api import DSV4Deployment
from dsv4_runtime.contract import AgentStatus, Cause


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Names one group of one deployment."""

    namespace: str
    deployment: str
    group: int
    uid: str = ""
    """Of the deployment; empty where nobody sets one. One that is deleted and created again has other groups."""

    @classmethod
    def of(cls, deployment: DSV4Deployment, group: int) -> GroupKey:
        """Return the key of group number `group` of `deployment`."""
        metadata = deployment.metadata
        return cls(metadata.namespace, metadata.name, group, metadata.uid or "")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.deployment}/{self.group}"


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """A process of a member as the machine's owner sees it (on Kubernetes there are none)."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ObservedMember:
    """One member of one incarnation, alive or ended, for as long as the backend remembers it."""

    incarnation: int
    rank: int
    node: str
    address: str
    started: float
    """Unix time at which the backend created it."""
    ended: str | None = None
    """Its end, for people (`exit code 0`, `killed by SIGKILL`); None while it runs."""
    ended_time: float | None = None
    """Unix time at which the backend noticed the end."""
    cause: Cause | None = None
    """Cause of its end, as far as the backend knows it; None: it does not."""
    waiting: str | None = None
    """Reason why its agent cannot answer yet, for people: an image is fetched, a node is looked for. None: it can."""
    status: AgentStatus | None = None
    """The agent's latest answer; None before the first."""
    heard: float | None = None
    """Unix time, by the observer's clock, of that answer."""
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
    """Everything about one group that `decide` may look at, besides the specification and the clock."""

    key: GroupKey
    members: tuple[ObservedMember, ...]
    """Of every incarnation that the backend still knows, in no order."""
    taken: int = 0
    """Highest incarnation whose names are in use by members that are not this deployment's, such as those of an earlier
    deployment of the same name that are still ending; 0: none."""
    strange: tuple[str, ...] = ()
    """Changes of others to the group's objects, one sentence each: pods that are ignored, labels that were changed."""
