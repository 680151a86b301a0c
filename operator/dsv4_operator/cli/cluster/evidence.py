"""Evidence in a cluster that tells why a deployment died; best effort, and what could not be had is listed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from dsv4_operator.api import GroupStatus
from dsv4_operator.cli.cluster.kubectl import Kubectl, KubectlError
from dsv4_operator.cli.cluster.pod_logs import WHOLE_SECONDS, agent_log, pod_logs
from dsv4_operator.cli.cluster.pods import Pod, belongs, list_events, list_pods, of_deployment, read_event, read_pod
from dsv4_operator.cli.evidence import TAIL_BYTES
from dsv4_operator.cli.log_lines import LogComponent, LogOptions
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.source import Piece

_LINES = 10_000
_ALL_LOGS = LogOptions(None, LogComponent.ALL, follow=False, tail=_LINES, form=None, colour=False)


class Collection:
    """The evidence of one deployment, asked for piece by piece."""

    def __init__(self, kubectl: Kubectl, item: DeploymentView) -> None:
        self._kubectl = kubectl
        self._item = item
        self._missing: list[str] = []

    def pieces(self) -> Iterator[Piece]:
        """Yield the object, events, pods, the operator's plans and evidence, logs, and evidence on heads' nodes."""
        yield _json("object.json", self._item.document())
        events = self._list("events.json", lambda: list_events(self._kubectl))
        own = [event for event in events if belongs(event["involvedObject"]["name"], self._item.name)]
        yield _json("events.json", sorted(own, key=lambda event: read_event(event).time))
        pods = self._list("pods.json", lambda: list_pods(self._kubectl, self._item.name))
        yield _json("pods.json", pods)
        selector = of_deployment(self._item.name)
        for document in self._list("configmaps", lambda: self._kubectl.items("configmaps", selector)):
            for key, text in sorted((document.get("data") or {}).items()):
                yield _piece(f"configmaps/{document['metadata']['name']}/{key}", text.encode())
        for document in pods:
            yield from self._of_pod(document)
        if self._missing:
            yield _piece("missing.txt", "\n".join([*self._missing, ""]).encode())

    def _of_pod(self, document: dict[str, Any]) -> Iterator[Piece]:
        pod = read_pod(document)
        if pod is None:
            # The gateway's.
            name, container = document["metadata"]["name"], document["spec"]["containers"][0]["name"]
            yield from self._text(f"pods/{name}.log", *agent_log(name, container, _LINES))
            return
        for log in pod_logs(pod, _ALL_LOGS, grouped=False):
            command = log.command(_LINES, follow=False)
            yield from self._text(f"pods/{pod.name}/{log.origin.component}.log", *command)
        group = next((each for each in self._item.status.groups if each.index == pod.group), None)
        if group is not None and pod.rank == 0 and pod.running:
            yield from self._kept_by(pod, group)

    def _kept_by(self, head: Pod, group: GroupStatus) -> Iterator[Piece]:
        """Return the evidence of restarts in place, which lies on the node of the head."""
        for place in dict.fromkeys(failure.evidence for failure in group.history):
            if place is not None and place.startswith("/"):
                path = f"evidence/{group.index}-{place.rsplit('/', 1)[-1]}.json"
                container = f"--container={head.container}"
                yield from self._text(path, "exec", head.name, container, "--", "cat", f"{place}/evidence.json")

    def _list(self, what: str, question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the answer, empty if there is none."""
        try:
            return question()
        except KubectlError as error:
            self._missing.append(f"{what}: {error.reason}")
            return []

    def _text(self, path: str, *command: str) -> Iterator[Piece]:
        """Yield the end of what `kubectl` prints."""
        try:
            yield _piece(path, self._kubectl.run(*command, seconds=WHOLE_SECONDS).encode()[-TAIL_BYTES:])
        except KubectlError as error:
            self._missing.append(f"{path}: {error.reason}")


def _json(path: str, value: object) -> Piece:
    return _piece(path, (json.dumps(value, indent=2) + "\n").encode())


def _piece(path: str, data: bytes) -> Piece:
    return Piece(path, data, time.time())
