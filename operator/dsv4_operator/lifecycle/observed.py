"""Observation of a group, as reported by a backend: facts without interpretation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsv4_operator.api import DSV4Deployment
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
    removal: str | None = None
    """Reason why its scheduler removes it, although it has not ended yet; None: it does not."""
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
