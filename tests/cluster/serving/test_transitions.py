"""Planned changes during requests from clients in their own pod to the Service: none of their requests fails.

`DSV4_TEST_ROUNDS` sets the number of repetitions of each change; the default is 1.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from clusterkit.client import KubectlError
from clusterkit.waiting import until
from nano_world import MANIFEST, OPERATOR_NODE, READY_SECONDS, RELEASE, Nano

from dsv4_testkit.faults import load
from dsv4_testkit.faults.load import Outcome, Request

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

ROUNDS = int(os.environ.get("DSV4_TEST_ROUNDS", "1"))
CLIENTS = 8
LONGEST_SECONDS = 30.0
"""Limit for a response or an error, while the engine does not restart."""
_SETTLED_SECONDS = 5.0
_EVERY_SECONDS = 0.5
_POD = "clients"
_CLIENTS = (
    inspect.getsource(load)
    + f"""
import dataclasses, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
shape = Shape(clients={CLIENTS}, tokens=(2, 6), prompt_words=(2, 6), chat=0.0, pause=0.5, patience=240.0)
ended = lambda request: print(json.dumps(dataclasses.asdict(request)), flush=True)
with Load(8000, "nano", shape, "clients", host=sys.argv[1], ended=ended):
    signal.sigwait([signal.SIGTERM])
"""
)


@dataclass
class Watched:
    """Clients and the condition Ready during changes."""

    nano: Nano
    ready: list[tuple[float, bool]] = field(default_factory=list)
    """Unix time of each reading of the condition, and whether it was True."""

    def requests(self) -> list[Request]:
        """Return every request that has ended."""
        try:
            lines = self.nano.cluster.kubectl("logs", _POD, "-n", self.nano.namespace).splitlines()
        except KubectlError:
            # Its container does not run yet.
            return []
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [Request(**{**one, "outcome": Outcome(one["outcome"])}) for one in found]

    def live(self) -> dict[str, Any] | None:
        """Return the deployment; None if there is none."""
        path = f"/apis/dsv4.dev/v1alpha1/namespaces/{self.nano.namespace}/dsv4deployments/nano"
        answer = self.nano.cluster.http.get(path)
        return None if answer.status_code == 404 else answer.raise_for_status().json()

    def is_ready(self, replicas: int = 1) -> bool:
        """Return whether the present specification serves with exactly that many groups."""
        found = self.live() or {}
        status, metadata = found.get("status") or {}, found.get("metadata") or {}
        conditions = {one["type"]: one["status"] for one in status.get("conditions") or []}
        return (
            conditions.get("Ready") == "True"
            and status.get("observedGeneration") == metadata.get("generation")
            and status.get("readyReplicas") == replicas
            and len(status.get("groups") or []) == replicas
        )

    def until_ready(self, replicas: int = 1) -> None:
        until(f"Ready with {replicas}", lambda: self.is_ready(replicas), seconds=READY_SECONDS, every=_EVERY_SECONDS)

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(_EVERY_SECONDS):
            with contextlib.suppress(Exception):
                self.ready.append((time.time(), self.is_ready() or self.is_ready(2)))


@pytest.fixture(scope="module")
def watched(nano: Nano, runtime_image: str) -> Iterator[Watched]:
    container = {
        "name": "clients",
        "image": runtime_image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", _CLIENTS, f"nano.{nano.namespace}.svc.cluster.local"],
    }
    place = {"nodeSelector": {"kubernetes.io/hostname": OPERATOR_NODE}} if nano.cluster.state.settings.nodes > 2 else {}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _POD, "namespace": nano.namespace},
        "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, **place},
    }
    found = Watched(nano)
    found.until_ready()
    nano.cluster.apply(pod)
    stop = threading.Event()
    thread = threading.Thread(target=found.watch, args=(stop,), daemon=True)
    thread.start()
    try:
        until(
            "an answer", lambda: any(one.outcome is Outcome.ANSWERED for one in found.requests()), seconds=120, every=1
        )
        yield found
    finally:
        stop.set()
        thread.join(30)
        nano.cluster.kubectl("delete", "pod", _POD, "-n", nano.namespace, "--wait=false")


def delete_and_apply(watched: Watched) -> None:
    manifest = _manifest(watched)
    watched.nano.cluster.kubectl("delete", "dsv4/nano", "-n", watched.nano.namespace, "--timeout=90s", seconds=100)
    watched.nano.cluster.apply(manifest)
    watched.until_ready()


def replace_by_force(watched: Watched) -> None:
    manifest = _manifest(watched)
    place = ("-n", watched.nano.namespace, "--timeout=90s", "-f", "-")
    watched.nano.cluster.kubectl("replace", "--force", *place, input=json.dumps(manifest), seconds=100)
    watched.until_ready()


def scale_up_and_down(watched: Watched) -> None:
    for replicas in (2, 1):
        _patch(watched, {"spec": {"replicas": replicas}})
        watched.until_ready(replicas)
        time.sleep(_SETTLED_SECONDS)


def restart_operator_and_gateways(watched: Watched) -> None:
    place = ("-n", watched.nano.namespace)
    for deployment in (f"{RELEASE}-dsv4-operator", "nano-0-gateway"):
        watched.nano.cluster.kubectl("rollout", "restart", f"deployment/{deployment}", *place)
        status = ("rollout", "status", f"deployment/{deployment}", *place, "--timeout=180s")
        watched.nano.cluster.kubectl(*status, seconds=190)
    watched.until_ready()


def drain_and_uncordon(watched: Watched) -> None:
    nano = watched.nano
    node = next(pod["spec"]["nodeName"] for pod in nano.members().values() if pod["spec"]["nodeName"] != OPERATOR_NODE)
    drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s")
    try:
        nano.cluster.kubectl(*drain, seconds=310)
        until(
            "members on other nodes",
            lambda: node not in {pod["spec"]["nodeName"] for pod in nano.members().values()},
            seconds=READY_SECONDS,
            every=1,
        )
        watched.until_ready()
    finally:
        nano.cluster.kubectl("uncordon", node)


@dataclass(frozen=True)
class Change:
    """A planned change, and its consequence for clients."""

    make: Callable[[Watched], None]
    absent: bool = False
    """Whether the deployment is absent for a while, so that requests fail."""
    reforms: bool = False
    """Whether an engine starts again, so that requests wait for it."""


CHANGES = {
    "scale 1, 2, 1": Change(scale_up_and_down),
    "rollout restart": Change(restart_operator_and_gateways),
    "drain and uncordon": Change(drain_and_uncordon, reforms=True),
    "delete and apply": Change(delete_and_apply, absent=True, reforms=True),
    "replace --force": Change(replace_by_force, absent=True, reforms=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_request_fails(watched: Watched, name: str) -> None:
    change = CHANGES[name]
    begun = time.time()
    away: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        struck = time.time()
        change.make(watched)
        away.append((struck, time.time()))
        time.sleep(_SETTLED_SECONDS)
        print(f"{name}: round {number + 1} took {away[-1][1] - struck:.1f} s", flush=True)
    # The last requests end, and later ones show that the service continues.
    time.sleep(_SETTLED_SECONDS)
    requests = [one for one in watched.requests() if one.ended > begun]
    lost = [one for one in requests if one.outcome in (Outcome.FAILED, Outcome.SILENT)]
    excused = [one for one in lost if change.absent and _during(one, away)]
    slow = [
        one
        for one in requests
        if one.ended - one.sent > LONGEST_SECONDS and not (change.reforms and _during(one, away))
    ]
    late = [one for one in requests if change.reforms and one.ended > _end_of(one, away) + LONGEST_SECONDS]
    print(
        f"{name}: {ROUNDS} rounds, {len(requests)} requests, {len(lost)} failed, {len(excused)} of them without a "
        f"deployment, {sum(one.outcome is Outcome.ENDED for one in requests)} streams ended with an error event; "
        f"longest {max(one.ended - one.sent for one in requests):.1f} s"
    )
    assert sum(one.outcome is Outcome.ANSWERED for one in requests) > CLIENTS
    assert not [one for one in lost if one not in excused]
    assert not slow
    assert not late
    assert not [one for one in excused if _ready_throughout(watched, one)], "Ready=True while requests failed"


def _during(request: Request, away: list[tuple[float, float]]) -> bool:
    return any(request.ended >= begin and request.sent <= end for begin, end in away)


def _end_of(request: Request, away: list[tuple[float, float]]) -> float:
    """Return the end of the change that overlaps a request, or the time at which the request was sent."""
    return max([request.sent, *(end for begin, end in away if request.ended >= begin and request.sent <= end)])


def _ready_throughout(watched: Watched, request: Request) -> bool:
    """Return whether the condition was True at every reading from 2 s before the request to 2 s after it."""
    seen = [ready for when, ready in watched.ready if request.sent - 2 <= when <= request.ended + 2]
    return bool(seen) and all(seen)


def _manifest(watched: Watched) -> dict[str, Any]:
    found = watched.live()
    assert found is not None
    return {**MANIFEST, "metadata": {"name": "nano", "namespace": watched.nano.namespace}, "spec": found["spec"]}


def _patch(watched: Watched, changes: dict[str, Any]) -> None:
    place = ("dsv4/nano", "-n", watched.nano.namespace, "--type=merge", "-p", json.dumps(changes))
    with contextlib.suppress(KubectlError):
        watched.nano.cluster.kubectl("patch", *place)
        return
    # The webhook may be unavailable for a moment while its operator restarts.
    time.sleep(_SETTLED_SECONDS)
    watched.nano.cluster.kubectl("patch", *place)
