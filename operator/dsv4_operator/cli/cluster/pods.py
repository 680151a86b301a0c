"""The members' pods, and the events of everything that belongs to a deployment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api.values import parse_time
from dsv4_operator.builders.names import DEPLOYMENT, GROUP, INCARNATION, RANK
from dsv4_operator.cli import words
from dsv4_operator.cli.cluster.kubectl import Kubectl

_DIRECTORY = "--directory"


@dataclass(frozen=True, slots=True)
class Pod:
    """One member's pod."""

    name: str
    group: int
    incarnation: int
    rank: int
    container: str
    directory: str | None
    """Directory of the member's files, inside; None: the command line does not say."""
    started: bool
    """Whether there is a log."""
    running: bool
    """Whether something can be executed in it."""


def read_pod(document: dict[str, Any]) -> Pod | None:
    """Return the member that a Pod object is; None if it is none."""
    labels = document["metadata"].get("labels") or {}
    try:
        group, incarnation, rank = (int(labels[key]) for key in (GROUP, INCARNATION, RANK))
    except (KeyError, ValueError):
        return None
    container = document["spec"]["containers"][0]
    statuses = document.get("status", {}).get("containerStatuses") or []
    states: dict[str, Any] = {each["name"]: each.get("state") or {} for each in statuses}
    state = states.get(container["name"], {})
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    return Pod(
        name=document["metadata"]["name"],
        group=group,
        incarnation=incarnation,
        rank=rank,
        container=container["name"],
        directory=_value(command, _DIRECTORY),
        started="running" in state or "terminated" in state,
        running="running" in state,
    )


def _value(command: Sequence[str], option: str) -> str | None:
    for number, word in enumerate(command):
        if word == option:
            return next(iter(command[number + 1 :]), None)
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def latest(pods: Iterable[Pod]) -> list[Pod]:
    """Return those of each group's latest incarnation, by group and rank."""
    found = list(pods)
    newest: dict[int, int] = {}
    for pod in found:
        newest[pod.group] = max(pod.incarnation, newest.get(pod.group, 0))
    kept = [pod for pod in found if pod.incarnation == newest[pod.group]]
    return sorted(kept, key=lambda pod: (pod.group, pod.rank))


def of_deployment(name: str) -> str:
    """Return the option that selects what belongs to a deployment."""
    return f"--selector={DEPLOYMENT}={name}"


def list_pods(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """Return the Pod objects of a deployment."""
    return kubectl.items("pods", of_deployment(name))


def member_pods(kubectl: Kubectl, name: str) -> list[Pod]:
    """Return the members of each group's latest incarnation."""
    return latest(pod for document in list_pods(kubectl, name) if (pod := read_pod(document)))


@dataclass(frozen=True, slots=True)
class Happening:
    """One event; it may have happened several times."""

    uid: str
    time: float
    """Time of the latest occurrence, Unix time."""
    type: str
    reason: str
    message: str
    count: int

    def __str__(self) -> str:
        """Return a line, as the loop of `dsv4 up` logs it."""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{words.date(self.time)} {self.type} {self.reason}: {self.message}{times}"


def read_event(document: dict[str, Any]) -> Happening:
    """Read an Event object, whichever of its two forms its writer chose."""
    series = document.get("series") or {}
    stamp = (
        series.get("lastObservedTime")
        or document.get("lastTimestamp")
        or document.get("eventTime")
        or document["metadata"]["creationTimestamp"]
    )
    return Happening(
        uid=document["metadata"]["uid"],
        time=parse_time(stamp),
        type=document.get("type") or "",
        reason=document.get("reason") or "",
        message=document.get("message") or "",
        count=series.get("count") or document.get("count") or 1,
    )


def belongs(name: str, deployment: str) -> bool:
    """Tell whether an object called `name` is the deployment or a part of it; `nano-2-0-head` is not `nano`'s."""
    return re.fullmatch(rf"{re.escape(deployment)}(-\d+-(i\d+(-r\d+)?|head|gateway.*|evidence.*))?", name) is not None


def list_events(kubectl: Kubectl, *selectors: str) -> list[dict[str, Any]]:
    """Return the Event objects of the namespace, or those that field selectors choose."""
    return kubectl.items("events", *([f"--field-selector={','.join(selectors)}"] if selectors else []))
