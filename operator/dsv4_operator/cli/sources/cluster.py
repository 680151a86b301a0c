"""Deployments of a cluster, read and changed through `kubectl`; pods, events and logs of their members."""

from __future__ import annotations

import base64
import binascii
import json
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dsv4_operator.api import DSV4Deployment, GroupStatus, InvalidDeployment, parse
from dsv4_operator.api.deployment import NAME_PATTERN, PAUSED, RESTART_AT, is_paused
from dsv4_operator.api.values import format_time, parse_time
from dsv4_operator.builders import names
from dsv4_operator.builders.names import (
    COMPONENT,
    DEPLOYMENT,
    GROUP,
    INCARNATION,
    MEMBER,
    PLAN_DIRECTORY,
    PLAN_FILE,
    RANK,
    head_name,
    incarnation_name,
    mounted_name,
    parse_member_name,
    selector,
)
from dsv4_operator.cli.output import (
    CommandError,
    ExitCode,
    LogComponent,
    LogOptions,
    LogOrigin,
    bad_input,
    decode_line,
    local_datetime,
    note,
    print_log_line,
    program_name,
)
from dsv4_operator.cli.sources.base import (
    EVIDENCE_TAIL_BYTES,
    DeploymentSource,
    DeploymentView,
    EvidenceFile,
    RetryingPoll,
    ServiceAccess,
    first_key,
    names_hint,
    read_all,
    read_file,
)
from dsv4_operator.cli.sources.kubectl import CALL_SECONDS, Kubectl, KubectlError, PortForward
from dsv4_operator.planning import Facts, catalog_facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_operator.planning.setup import measured_of
from dsv4_runtime.contract import Process

RESOURCE = "dsv4deployments.dsv4.dev"
_RUNNING_PODS = "status.phase!=Succeeded,status.phase!=Failed"
_EVIDENCE_LINES = 10_000
_OTHER_KINDS = ("services", "endpointslices", "deployments.apps", "poddisruptionbudgets", "networkpolicies")
_AGENT_STATUS = """
import json, os, sys, urllib.request
plan = json.load(open(sys.argv[1]))
member = plan["members"][int(sys.argv[2])]
address = os.environ.get("DSV4_POD_IP") or member["address"]
url = f"http://{address}:{member['ports']['agent']}/v1/status"
token = open(plan["rayTokenFile"]).read().strip()
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5)
print(json.dumps(json.load(answer), indent=1))
"""
"""Prints the status of the agent in whose pod it runs; the token does not leave the pod."""


class ClusterSource:
    """A `DeploymentSource` for the cluster of `kubectl`."""

    poll_seconds = 2.0

    def __init__(self, context: str | None, kubeconfig: Path | None, namespace: str | None) -> None:
        self._kubectl = Kubectl(context, kubeconfig, namespace)
        self._given_namespace = namespace

    @cached_property
    def namespace(self) -> str:
        if self._given_namespace:
            return self._given_namespace
        return self._kubectl.run("config", "view", "--minify", "--output=jsonpath={..namespace}") or "default"

    @property
    def location(self) -> str:
        return f"in namespace {self.namespace}"

    def command_line(self, verb: str, name: str = "") -> str:
        program = program_name()
        options = self._kubectl.options or (" --cluster" if program == "dsv4" else "")
        return " ".join(part for part in (program, verb, name) if part) + options

    def names(self, *, seconds: float = CALL_SECONDS) -> list[str]:
        text = self._kubectl.run("get", RESOURCE, "--output=name", seconds=seconds)
        return [line.rpartition("/")[2] for line in text.split()]

    def get(self, name: str | None) -> DeploymentView:
        if name is not None:
            return _parse_deployment(self._document(name))
        found = self.get_all()
        if len(found) == 1:
            return found[0]
        if not found:
            raise bad_input(f"there is no deployment {self.location}; make one with `kubectl apply -f FILE`")
        raise bad_input(f"which deployment? Give its name{names_hint(item.name for item in found)}")

    def get_all(self, *, all_namespaces: bool = False) -> list[DeploymentView]:
        documents = self._kubectl.items(RESOURCE, *(["--all-namespaces"] if all_namespaces else []))
        return read_all(documents, _parse_deployment)

    def load(self, file_or_name: str) -> DSV4Deployment:
        """Return an existing deployment, or the one in a file if the argument is not a valid name."""
        valid = re.fullmatch(NAME_PATTERN, file_or_name)
        return self.get(file_or_name).object if valid else read_file(file_or_name)

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return the nodes as the operator does; machines of the catalog if the user may not list nodes."""
        from dsv4_operator.backends.pods.scheduling import Snapshot, facts

        if not chosen:
            try:
                nodes = self._kubectl.items("nodes")
                pod_list = self._kubectl.items("pods", "--all-namespaces", f"--field-selector={_RUNNING_PODS}")
                return facts(deployment, Snapshot.of_pods(nodes, pod_list))
            except KubectlError as error:
                note(
                    f"warning: planned with the machines of the catalog, not with those of the cluster: {error.reason}"
                )
        metadata = deployment.metadata
        folder = names.own_folder(deployment.spec.storage.path, metadata.namespace, metadata.name)
        return catalog_facts(deployment, kind, state_root=names.STATE_DIRECTORY, weights_root=f"{folder}/weights")

    def measured(self, name: str) -> tuple[Measured, ...]:
        try:
            return measured_of(self.get(name).object.status)
        except CommandError:
            return ()

    @contextmanager
    def api(self, item: DeploymentView) -> Iterator[ServiceAccess]:
        """Forward a port to the Service of the gateways."""
        key = ""
        if keys := item.object.spec.gateway.api_keys:
            ref = keys.secret_key_ref
            key = first_key(self._secret(ref.name, ref.key, "requests need a key that is"))
        with PortForward(self._kubectl, item.name, names.GATEWAY_PORT) as forward:
            yield ServiceAccess(lambda: f"{forward.url()}/v1", key, permanent=False)

    @contextmanager
    def dashboard(self, item: DeploymentView, group: int) -> Iterator[ServiceAccess]:
        """Forward a port to the Service of the group's head."""
        found = next((each for each in item.status.groups if each.index == group and each.members), None)
        if found is None:
            raise CommandError(f"group {group} of {item.name} has no dashboard now: {item.name} is {item.phase}")
        secret = mounted_name(item.name, item.object.metadata.uid, group, found.incarnation)
        if not self._has_secret(secret):
            # An incarnation from before names contained the UID.
            earlier = incarnation_name(item.name, group, found.incarnation)
            secret = earlier if self._has_secret(earlier) else secret
        token = self._secret(secret, names.TOKEN_ENTRY, "the page requires a token:")
        with PortForward(self._kubectl, head_name(item.name, group), names.HEAD_PORTS["dashboard"][0]) as forward:
            yield ServiceAccess(forward.url, token, permanent=False)

    def logs(self, name: str | None, options: LogOptions) -> ExitCode:
        return print_logs(self._kubectl, self.get(name), options, self)

    def evidence(self, name: str | None, *, complete: bool = False) -> tuple[str, Iterator[EvidenceFile]]:
        """Return the object, its events, pods, plans and logs, and the evidence of earlier failures."""
        item = self.get(name)
        return item.name, EvidenceCollector(self._kubectl, item, complete=complete).files()

    def strike(
        self, item: DeploymentView, group: GroupStatus, rank: int, process: Process, number: signal.Signals
    ) -> float:
        """Send a signal with `kubectl exec`; the user needs the right to use it.

        Raises:
            CommandError: there is no such pod or process.
        """
        wanted = (group.index, group.incarnation, rank)
        for pod in filter(None, map(parse_pod, list_pods(self._kubectl, item.name))):
            if (pod.group, pod.incarnation, pod.rank) == wanted and pod.running:
                script = f"date +%s.%N && kill -{int(number)} {int(process.pid)}"
                command = ("exec", pod.name, f"--container={pod.container}", "--", "sh", "-c", script)
                return float(self._kubectl.run(*command))
        raise CommandError(f"rank {rank} of {item.name} has no running pod")

    def restart(self, item: DeploymentView) -> str:
        """Set the annotation that requests new incarnations."""
        if item.object.spec.suspend:
            raise bad_input(f"{item.name} is suspended; `{self.command_line('resume', item.name)}` starts it")
        now = format_time(int(time.time()))
        self._patch(item, {"metadata": {"annotations": {RESTART_AT: now}}})
        return self._requested(item, "is being formed anew")

    def suspend(self, item: DeploymentView, suspended: bool) -> str:
        if item.object.spec.suspend is suspended:
            return f"{item.name} is {'suspended already' if suspended else 'not suspended'}"
        self._patch(item, {"spec": {"suspend": suspended}})
        return self._requested(item, "is stopping; its weights stay" if suspended else "is starting")

    def _requested(self, item: DeploymentView, action: str) -> str:
        if is_paused(item.object):
            return f"{item.name} {action} as soon as its annotation {PAUSED} is removed"
        return f"{item.name} {action}; see `{self.command_line('status', item.name)} --watch`"

    def _document(self, name: str) -> dict[str, Any]:
        # kubectl could take an invalid name for an option, or for another kind of object.
        valid = re.fullmatch(NAME_PATTERN, name)
        found = self._kubectl.document("get", RESOURCE, name, "--ignore-not-found") if valid else None
        if found is None:
            raise bad_input(f"there is no deployment {name!r} {self.location}{names_hint(self.names())}")
        document: dict[str, Any] = found
        return document

    def _patch(self, item: DeploymentView, change: dict[str, Any]) -> None:
        self._kubectl.run("patch", RESOURCE, item.name, "--type=merge", f"--patch={json.dumps(change)}")

    def _has_secret(self, name: str) -> bool:
        """Return whether the Secret exists and the user may read it."""
        try:
            return self._kubectl.document("get", "secret", name, "--ignore-not-found") is not None
        except KubectlError:
            return False

    def _secret(self, name: str, key: str, purpose: str) -> str:
        """Return the text of a Secret's entry; if it cannot be read, print a warning and return an empty text."""
        try:
            data = self._kubectl.document("get", "secret", name)["data"][key]
            return base64.b64decode(data, validate=True).decode().strip()
        except KubectlError as error:
            note(f"warning: {purpose} in Secret {name}; it cannot be read: {error.reason}")
        except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
            note(f"warning: {purpose} in Secret {name}; it has no text under {key!r}")
        return ""


def _parse_deployment(document: dict[str, Any]) -> DeploymentView:
    metadata = document["metadata"]
    try:
        found = parse(document)
    except InvalidDeployment as error:
        name = f"{metadata.get('namespace')}/{metadata.get('name')}"
        raise bad_input(
            *(f"{name} cannot be read by this version of dsv4: {finding}" for finding in error.findings)
        ) from None
    created = parse_time(metadata["creationTimestamp"])
    return DeploymentView(found, running=True, created=created, stored=document)


class EvidenceCollector:
    """Collects the evidence of one deployment, best effort; missing files are listed in the archive."""

    def __init__(self, kubectl: Kubectl, item: DeploymentView, *, complete: bool = False) -> None:
        self._kubectl = kubectl
        self._item = item
        self._complete = complete
        self._missing: list[str] = []

    def files(self) -> Iterator[EvidenceFile]:
        """Yield the object, events, pods, the operator's plans and evidence, logs, and evidence on heads' nodes."""
        name = self._item.name
        yield _json_file("object.json", self._item.document())
        events = self._list("events.json", lambda: list_events(self._kubectl))
        own = [event for event in events if is_part_of(event["involvedObject"]["name"], name)]
        yield _json_file("events.json", sorted(own, key=lambda event: parse_event(event).time))
        pod_list = self._list("pods.json", lambda: list_pods(self._kubectl, name))
        yield _json_file("pods.json", pod_list)
        for document in self._list("configmaps", lambda: self._kubectl.items("configmaps", deployment_selector(name))):
            for key, text in sorted((document.get("data") or {}).items()):
                yield EvidenceFile(f"configmaps/{document['metadata']['name']}/{key}", text.encode())
        if self._complete:
            yield from self._other_objects(pod_list)
        for document in pod_list:
            yield from self._pod_files(document)
        if self._missing:
            yield EvidenceFile("missing.txt", "\n".join([*self._missing, ""]).encode())

    def _other_objects(self, pod_list: list[dict[str, Any]]) -> Iterator[EvidenceFile]:
        """Yield the deployment's objects of other kinds, never Secrets, and the nodes of its pods."""
        for kind in _OTHER_KINDS:
            read = partial(self._kubectl.items, kind, deployment_selector(self._item.name))
            yield _json_file(f"objects/{kind}.json", self._list(f"objects/{kind}.json", read))
        used = {document["spec"].get("nodeName") for document in pod_list} - {None}
        for node in sorted(used):
            yield from self._output(f"nodes/{node}.json", "get", "node", node, "--output=json")

    def _pod_files(self, document: dict[str, Any]) -> Iterator[EvidenceFile]:
        name, container = document["metadata"]["name"], main_container(document)
        log = ("logs", name, f"--container={container}", f"--tail={_EVIDENCE_LINES}")
        yield from self._output(f"pods/{name}.log", *log)
        pod = parse_pod(document)
        if pod is not None and pod.running and self._complete:
            command = ("python3", "-c", _AGENT_STATUS, f"{PLAN_DIRECTORY}/{PLAN_FILE}", str(pod.rank))
            path = f"agents/{name}.json"
            yield from self._output(path, "exec", name, f"--container={container}", "--", *command)
        if pod is None or pod.rank != 0 or not pod.running:
            return
        group = next((each for each in self._item.status.groups if each.index == pod.group), None)
        if group is not None:
            yield from self._in_place_restarts(pod, group)

    def _in_place_restarts(self, head: Pod, group: GroupStatus) -> Iterator[EvidenceFile]:
        """Yield the evidence of in-place restarts, which is stored on the head's node."""
        for directory in dict.fromkeys(failure.evidence for failure in group.history):
            if directory is not None and directory.startswith("/"):
                path = f"evidence/{group.index}-{directory.rsplit('/', 1)[-1]}.json"
                container = f"--container={head.container}"
                yield from self._output(path, "exec", head.name, container, "--", "cat", f"{directory}/evidence.json")

    def _list(self, path: str, read: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the listed objects; on an error note `path` as missing and return none."""
        try:
            return read()
        except KubectlError as error:
            self._missing.append(f"{path}: {error.reason}")
            return []

    def _output(self, path: str, *command: str) -> Iterator[EvidenceFile]:
        """Yield the end of the output of `kubectl`, if there is any."""
        try:
            text = self._kubectl.run(*command, seconds=LOG_SECONDS)
        except KubectlError as error:
            self._missing.append(f"{path}: {error.reason}")
            return
        if text:
            yield EvidenceFile(path, text.encode()[-EVIDENCE_TAIL_BYTES:])


def _json_file(path: str, value: object) -> EvidenceFile:
    return EvidenceFile(path, (json.dumps(value, indent=2) + "\n").encode())


POLL_SECONDS = 2.0
"""Interval of reads of events that are followed."""
LOG_SECONDS = 120.0
"""Limit for reading a complete log."""
_CONTAINER = "agent"
_GATEWAY_CONTAINER = "gateway"
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
    container = main_container(document)
    statuses = document.get("status", {}).get("containerStatuses") or []
    states: dict[str, Any] = {each["name"]: each.get("state") or {} for each in statuses}
    return Pod(
        name=document["metadata"]["name"],
        group=group,
        incarnation=incarnation,
        rank=rank,
        container=container,
        running="running" in states.get(container, {}),
    )


def main_container(document: dict[str, Any]) -> str:
    """Return the name of dsv4's container in a Pod object; admission webhooks may inject others before it."""
    found = [str(each["name"]) for each in document["spec"]["containers"]]
    return next((name for name in found if name in (_CONTAINER, _GATEWAY_CONTAINER)), found[0])


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
