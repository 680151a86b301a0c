"""Pods and events of a cluster's deployment, and the logs of its members."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api.values import parse_time
from dsv4_operator.builders.names import (
    COMPONENT,
    DEPLOYMENT,
    GROUP,
    INCARNATION,
    MEMBER,
    RANK,
    parse_member_name,
    selector,
)
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.logs import LogComponent, LogOptions, LogOrigin, decode_line, print_log_line
from dsv4_operator.cli.output import local_datetime, note
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, RetryingPoll
from dsv4_operator.cli.sources.kubectl import Kubectl

POLL_SECONDS = 2.0
"""Interval of reads of events that are followed."""
LOG_SECONDS = 120.0
"""Limit for reading a complete log."""
_CONTAINER = "agent"
_MAX_LOGS = 1000
"""Limit of logs that are followed at the same time; that of `kubectl` is 5 by default."""


@dataclass(frozen=True, slots=True)
class Pod:
    """Pod of one member."""

    name: str
    group: int
    incarnation: int
    rank: int
    container: str
    running: bool
    """Whether commands can be executed in the container."""


def parse_pod(document: dict[str, Any]) -> Pod | None:
    """Return the member in a Pod object; None for other pods, such as those of the gateway."""
    labels = document["metadata"].get("labels") or {}
    try:
        group, incarnation, rank = (int(labels[key]) for key in (GROUP, INCARNATION, RANK))
    except (KeyError, ValueError):
        return None
    container = document["spec"]["containers"][0]
    statuses = document.get("status", {}).get("containerStatuses") or []
    states: dict[str, Any] = {each["name"]: each.get("state") or {} for each in statuses}
    return Pod(
        name=document["metadata"]["name"],
        group=group,
        incarnation=incarnation,
        rank=rank,
        container=container["name"],
        running="running" in states.get(container["name"], {}),
    )


def deployment_selector(name: str) -> str:
    """Return the option that selects the objects of a deployment."""
    return f"--selector={DEPLOYMENT}={name}"


def list_pods(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """Return the Pod objects of a deployment."""
    return kubectl.items("pods", deployment_selector(name))


@dataclass(frozen=True, slots=True)
class KubeEvent:
    """An event, which may have occurred several times."""

    uid: str
    time: float
    """Unix time of the latest occurrence."""
    type: str
    reason: str
    message: str
    count: int

    def __str__(self) -> str:
        """Return a line in the log format of the reconcile loop under `dsv4 up`."""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{local_datetime(self.time)} {self.type} {self.reason}: {self.message}{times}"


def parse_event(document: dict[str, Any]) -> KubeEvent:
    """Parse an Event object of either API (`v1`, `events.k8s.io/v1`)."""
    series = document.get("series") or {}
    stamp = (
        series.get("lastObservedTime")
        or document.get("lastTimestamp")
        or document.get("eventTime")
        or document["metadata"]["creationTimestamp"]
    )
    return KubeEvent(
        uid=document["metadata"]["uid"],
        time=parse_time(stamp),
        type=document.get("type") or "",
        reason=document.get("reason") or "",
        message=document.get("message") or "",
        count=series.get("count") or document.get("count") or 1,
    )


def is_part_of(name: str, deployment: str) -> bool:
    """Return whether an object called `name` is the deployment or a part of it; `nano-2-0-head` is not `nano`'s."""
    return re.fullmatch(rf"{re.escape(deployment)}(-\d+-(i\d+(-r\d+)?|head|gateway.*|evidence.*))?", name) is not None


def list_events(kubectl: Kubectl, *selectors: str) -> list[dict[str, Any]]:
    """Return the Event objects of the namespace that match the field selectors."""
    return kubectl.items("events", *([f"--field-selector={','.join(selectors)}"] if selectors else []))


# `kubectl logs --prefix` writes pod and container before each line, and the agent its label before copied lines.
_LINE = re.compile(rb"\[pod/([^/\]]+)/[^\]]+\] (?:\[(ray|vllm) rank \d+\] )?(.*)", re.DOTALL)


def print_logs(kubectl: Kubectl, item: DeploymentView, options: LogOptions, source: DeploymentSource) -> ExitCode:
    """Print the logs of the members' pods with `kubectl logs`, whose agents copy the logs of Ray and vLLM."""
    if options.component is LogComponent.LOOP:
        return _print_events(kubectl, item, options, source)
    grouped = max(item.object.spec.replicas, len(item.status.groups)) > 1
    wanted = {DEPLOYMENT: item.name, COMPONENT: MEMBER}
    if options.rank is not None:
        wanted[RANK] = str(options.rank)
    # `kubectl` counts the lines of all components.
    selected = options.tail is not None and options.component is not LogComponent.ALL and not options.follow
    arguments = [
        f"--selector={selector(wanted)}",
        f"--container={_CONTAINER}",
        "--prefix",
        "--ignore-errors",
        f"--max-log-requests={_MAX_LOGS}",
        f"--tail={-1 if options.tail is None or selected else options.tail}",
        *([f"--since={options.since}"] if options.since else []),
        "--follow" if options.follow else f"--request-timeout={LOG_SECONDS:.0f}s",
    ]
    last: dict[LogOrigin, deque[str]] = {}
    printed = False
    for raw in kubectl.lines("logs", *arguments):
        if (found := _LINE.fullmatch(raw)) is None or (member := parse_member_name(found[1].decode())) is None:
            note(raw.decode(errors="replace").removeprefix("error: "))
            continue
        component = LogComponent((found[2] or b"agent").decode())
        if component not in options.components:
            continue
        printed = True
        origin = LogOrigin(member[3], component, member[1] if grouped else None)
        if selected:
            last.setdefault(origin, deque(maxlen=options.tail)).append(decode_line(found[3]))
        else:
            print_log_line(origin, decode_line(found[3]), options)
    for origin, lines in last.items():
        for line in lines:
            print_log_line(origin, line, options)
    if options.follow:
        hint = source.command_line("status", item.name)
        note(f"the pods whose logs were followed have ended; see `{hint}`, and repeat the command for new pods")
    elif not printed:
        raise _no_logs(kubectl, item, options, source)
    return ExitCode.OK


def _no_logs(kubectl: Kubectl, item: DeploymentView, options: LogOptions, source: DeploymentSource) -> CommandError:
    pods = filter(None, map(parse_pod, list_pods(kubectl, item.name)))
    ranks = ", ".join(map(str, sorted({pod.rank for pod in pods})))
    hint = f"; its ranks are {ranks}" if ranks else f"; see `{source.command_line('status', item.name)}`"
    rank = f"rank {options.rank}" if options.rank is not None else ""
    component = f"component {options.component}" if options.component is not LogComponent.ALL or not rank else ""
    missing = " and ".join(filter(None, (rank, component)))
    return bad_input(f"{item.name!r} has no logs of {missing}{hint}")


def _print_events(kubectl: Kubectl, item: DeploymentView, options: LogOptions, source: DeploymentSource) -> ExitCode:
    """Print the operator's events for the deployment, oldest first."""
    shown: set[tuple[str, int]] = set()
    origin = LogOrigin(None, LogComponent.LOOP)

    def refresh(tail: int | None) -> bool:
        """Print new events; return whether the deployment still exists."""
        listed = list_events(kubectl, f"involvedObject.uid={item.object.metadata.uid}")
        found = sorted(map(parse_event, listed), key=lambda each: each.time)
        new = [each for each in found if (each.uid, each.count) not in shown]
        for each in new if tail is None else new[len(new) - min(tail, len(new)) :]:
            print_log_line(origin, str(each), options)
        shown.update((each.uid, each.count) for each in new)
        return not options.follow or item.name in source.names()

    refresh(options.tail)
    if not shown:
        why = source.command_line("why", item.name)
        note(f"there are no events of {item.name}; a cluster keeps them for an hour: see `{why}`")
    poll = RetryingPoll()
    while options.follow:
        time.sleep(POLL_SECONDS)
        if poll(lambda: refresh(None)) is False:
            break
    return ExitCode.OK
