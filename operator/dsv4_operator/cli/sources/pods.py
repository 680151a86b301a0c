"""Pods and events of a cluster's deployment, and the logs of its members."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from dsv4_operator.api.values import parse_time
from dsv4_operator.builders.names import DEPLOYMENT, GROUP, INCARNATION, RANK
from dsv4_operator.cli.errors import ExitCode, bad_input
from dsv4_operator.cli.logs import LogComponent, LogOptions, LogOrigin, decode_line, print_log_line
from dsv4_operator.cli.output import local_datetime, note
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, RetryingPoll
from dsv4_operator.cli.sources.kubectl import STOP_SECONDS, Kubectl, KubectlError, first_error_line, stop

POLL_SECONDS = 2.0
"""Interval of reads of pods and events while logs are followed."""
LOG_SECONDS = 120.0
"""Limit for reading a complete log."""
_DIRECTORY_OPTION = "--directory"
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Pod:
    """Pod of one member."""

    name: str
    group: int
    incarnation: int
    rank: int
    container: str
    directory: str | None
    """Directory of the member's files in the container; None if the command line has none."""
    started: bool
    """Whether there is a log."""
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
    state = states.get(container["name"], {})
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    return Pod(
        name=document["metadata"]["name"],
        group=group,
        incarnation=incarnation,
        rank=rank,
        container=container["name"],
        directory=_option_value(command, _DIRECTORY_OPTION),
        started="running" in state or "terminated" in state,
        running="running" in state,
    )


def _option_value(command: Sequence[str], option: str) -> str | None:
    for number, argument in enumerate(command):
        if argument == option:
            return next(iter(command[number + 1 :]), None)
        if argument.startswith(f"{option}="):
            return argument.removeprefix(f"{option}=")
    return None


def deployment_selector(name: str) -> str:
    """Return the option that selects the objects of a deployment."""
    return f"--selector={DEPLOYMENT}={name}"


def list_pods(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    """Return the Pod objects of a deployment."""
    return kubectl.items("pods", deployment_selector(name))


def member_pods(kubectl: Kubectl, name: str) -> list[Pod]:
    """Return the members of each group's latest incarnation, by group and rank."""
    found = [pod for document in list_pods(kubectl, name) if (pod := parse_pod(document))]
    latest: dict[int, int] = {}
    for pod in found:
        latest[pod.group] = max(pod.incarnation, latest.get(pod.group, 0))
    kept = [pod for pod in found if pod.incarnation == latest[pod.group]]
    return sorted(kept, key=lambda pod: (pod.group, pod.rank))


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


@dataclass(frozen=True, slots=True)
class PodLog:
    """A log of a pod."""

    pod: Pod
    origin: LogOrigin
    file: str | None
    """File in the container, readable only while the pod runs; None for the container log, kept by the kubelet."""

    def command(self, tail: int | None, *, follow: bool) -> list[str]:
        """Return the arguments of `kubectl`."""
        if self.file is None:
            return container_log(self.pod.name, self.pod.container, tail) + ["--follow"] * follow
        count = "+1" if tail is None else str(tail)
        place = [self.pod.name, f"--container={self.pod.container}"]
        return ["exec", *place, "--", "tail", "-n", count, *["-F"] * follow, self.file]


def container_log(pod: str, container: str, tail: int | None) -> list[str]:
    """Return the arguments of `kubectl` for the log of a container."""
    return ["logs", pod, f"--container={container}", f"--tail={-1 if tail is None else tail}"]


def pod_logs(pod: Pod, options: LogOptions, *, grouped: bool) -> list[PodLog]:
    """Return the selected logs of `pod` that can be read."""
    if options.rank not in (None, pod.rank):
        return []
    found = []
    for component in options.components:
        origin = LogOrigin(pod.rank, component, pod.group if grouped else None)
        if component is LogComponent.AGENT:
            found += [PodLog(pod, origin, None)] if pod.started else []
        elif pod.directory is not None and pod.running and (component is LogComponent.RAY or pod.rank == 0):
            found.append(PodLog(pod, origin, f"{pod.directory}/{component}.log"))
    return found


def print_logs(kubectl: Kubectl, item: DeploymentView, options: LogOptions, source: DeploymentSource) -> ExitCode:
    """Print the members' logs; with `follow` continue across incarnations until the deployment is deleted."""
    if options.component is LogComponent.LOOP:
        return _print_events(kubectl, item, options, source)
    grouped = max(item.object.spec.replicas, len(item.status.groups)) > 1
    if options.follow:
        with LogFollower(kubectl, item.name, options, grouped=grouped) as follower:
            if not follower.refresh():
                note(f"{item.name} has no members yet; waiting for them")
            poll = RetryingPoll()
            # None: the cluster did not respond, and the deployment may still exist.
            while poll(lambda: follower.refresh() or item.name in source.names()) is not False:
                follower.read(POLL_SECONDS)
        return ExitCode.OK
    pods = member_pods(kubectl, item.name)
    selected = [log for pod in pods for log in pod_logs(pod, options, grouped=grouped)]
    if not selected:
        ranks = ", ".join(dict.fromkeys(str(pod.rank) for pod in pods))
        hint = f"; its ranks are {ranks}" if ranks else f"; see `{source.command_line('status', item.name)}`"
        missing = f"rank {options.rank}" if options.rank is not None else f"component {options.component}"
        raise bad_input(f"{item.name!r} has no logs of {missing}{hint}")
    failures = 0
    for log in selected:
        try:
            text = kubectl.run(*log.command(options.tail, follow=False), seconds=LOG_SECONDS)
        except KubectlError as error:
            failures += 1
            note(f"{log.origin.label}: {error.reason}")
            continue
        for line in text.encode().removesuffix(b"\n").split(b"\n") if text else ():
            print_log_line(log.origin, decode_line(line), options)
    return ExitCode.FAILED if failures == len(selected) else ExitCode.OK


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


class _LogStream:
    """A log followed by a `kubectl`."""

    def __init__(self, kubectl: Kubectl, log: PodLog, tail: int | None) -> None:
        self.origin: LogOrigin = log.origin
        self.has_output = False
        """Whether any data was received."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = log.command(tail, follow=True)
        self._process = kubectl.start(*command, stdout=subprocess.PIPE, stderr=self._errors)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on data and at the end of the stream."""
        assert self._process.stdout is not None  # noqa: S101
        return self._process.stdout.fileno()

    def lines(self) -> list[bytes] | None:
        """Return the received lines; None at the end of the stream."""
        chunk = os.read(self.fileno(), _CHUNK)
        self.has_output |= bool(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if chunk:
            return lines
        # The last line may lack a line end.
        lines, self._rest = ([self._rest] if self._rest else []), b""
        return lines or None

    def error(self) -> str | None:
        """Return the error of `kubectl` after the end of the stream; None if it succeeded."""
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        self._errors.seek(0)
        return first_error_line(self._errors.read(_CHUNK).decode(errors="replace")) if code else None

    def close(self) -> None:
        """Stop `kubectl`."""
        stop(self._process)
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdout.close()
        self._errors.close()


LogKey = tuple[str, LogComponent]
"""Name of a pod, and the component."""


class LogFollower:
    """Follows the logs of the latest incarnation, across incarnations."""

    def __init__(self, kubectl: Kubectl, name: str, options: LogOptions, *, grouped: bool) -> None:
        self._kubectl, self._name, self._options, self._grouped = kubectl, name, options, grouped
        self._selector = selectors.DefaultSelector()
        self._streams: dict[LogKey, _LogStream] = {}
        self._known: set[LogKey] = set()
        self._failed: set[LogKey] = set()
        """Logs that produced an error and no data; the error is printed only once."""
        self._tail = options.tail

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._streams):
            self._close(key)
        self._selector.close()

    def refresh(self) -> bool:
        """Follow new logs, and again those that were disconnected; return whether there are pods."""
        pods = member_pods(self._kubectl, self._name)
        for pod in pods:
            for log in pod_logs(pod, self._options, grouped=self._grouped):
                key = (pod.name, log.origin.component)
                if key not in self._known:
                    self._open(key, log, self._tail)
                elif key not in self._streams and key not in self._failed and pod.running:
                    # Lines written while disconnected are skipped; `logs` without `-f` prints them.
                    self._open(key, log, 0)
        # `tail` applies to logs that exist at the start; later pods are printed from their first line.
        self._tail = None
        return bool(pods)

    def read(self, seconds: float) -> None:
        """Print the lines received within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._streams:
                time.sleep(left)
                return
            for ready, _ in self._selector.select(left):
                self._print(ready.data)

    def _print(self, key: LogKey) -> None:
        stream = self._streams[key]
        lines = stream.lines()
        for line in lines or ():
            print_log_line(stream.origin, decode_line(line), self._options)
        if lines is None:
            if error := stream.error():
                note(f"{stream.origin.label}: {error}")
                if not stream.has_output:
                    self._failed.add(key)
            self._close(key)

    def _open(self, key: LogKey, log: PodLog, tail: int | None) -> None:
        stream = _LogStream(self._kubectl, log, tail)
        self._streams[key] = stream
        self._known.add(key)
        self._selector.register(stream, selectors.EVENT_READ, key)

    def _close(self, key: LogKey) -> None:
        stream = self._streams.pop(key)
        self._selector.unregister(stream)
        stream.close()
