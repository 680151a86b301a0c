"""One deployment on the real Pods backend, with an API server in memory, a kubelet and agents controlled by a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import pytest
import yaml

from dsv4_operator.api import SchedulerType
from dsv4_operator.backends.pods import PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.observe import AgentReport, Endpoint
from dsv4_operator.backends.pods.scheduling import node_of
from dsv4_operator.builders import names
from dsv4_operator.controller.deployments import Dependencies, Deployments
from dsv4_operator.controller.reconcile import Endpoints
from dsv4_operator.kube import KubeError, NodeCache, PodCache, Resource, Unavailable
from dsv4_operator.lifecycle import Event
from dsv4_runtime.contract import AgentStatus, EngineStatus, Health, Phase, Verdict
from dsv4_testkit.fake_kube import FakeKube, copied
from dsv4_testkit.pod_objects import ALLOWED, EXAMPLES, Manifest, node

KEY = ("team", "nano")


def address(group: int, incarnation: int, rank: int) -> str:
    """Return the address of a member."""
    return f"10.{group + 1}.{incarnation % 250}.{rank}"


NAME = ("DSV4Deployment", *KEY)
UID = "uid-1"
"""Uid of the deployment, the first object of the API server."""
START = 1_000_000.0


class FailingKube(FakeKube):
    """An API server that fails chosen requests: raised exception by verb and kind."""

    def __init__(self, objects: Any = ()) -> None:
        super().__init__(objects)
        self.failing: dict[tuple[str, str], Exception] = {}
        self.hanging: set[tuple[str, str]] = set()
        """Requests without a response."""
        self.seen: set[tuple[str, str]] = set()

    def _asked(self, verb: str, name: tuple[str, str, str], **options: Any) -> None:
        super()._asked(verb, name, **options)
        self.seen.add((verb, name[0]))
        error = self.failing.get((verb, name[0]))
        if error is not None:
            raise error

    async def apply(self, manifest: Manifest, **options: object) -> Manifest:
        if ("apply", manifest["kind"]) in self.hanging:
            await asyncio.Event().wait()
        return await super().apply(manifest, **options)

    async def list(self, resource: Resource, *where: Any, **options: Any) -> list[Manifest]:
        if ("list", resource.kind) in self.hanging:
            await asyncio.Event().wait()
        return await super().list(resource, *where, **options)

    async def listing(self, resource: Resource, *_: Any, **__: Any) -> Any:
        raise AssertionError("the world fills the cache")


class Killed(BaseException):
    """The operator process was killed."""


class Interruption(StrEnum):
    """Result of one request to the API server."""

    REFUSED = "refused"
    """It is not executed."""
    UNANSWERED = "unanswered"
    """It is executed, and the response is lost."""
    LATE = "late"
    """It gets no response, and is executed by `InterruptedKube.deliver`."""
    KILLED = "killed"
    """It is not executed, and the operator gets no response to any request until `InterruptedKube.revive`."""


class InterruptedKube(FailingKube):
    """An API server that interrupts one request."""

    def __init__(self, objects: Any = ()) -> None:
        super().__init__(objects)
        self.requested = ""
        """The interrupted request; empty until it is sent."""
        self.dead = False
        """Whether the operator was killed."""
        self._left, self._how = -1, Interruption.REFUSED
        self._late: list[Callable[[], Awaitable[Any]]] = []

    def interrupt(self, number: int, how: Interruption) -> None:
        """Interrupt the request with this number, counted from 0 from now on."""
        self._left, self._how, self.requested = number, how, ""

    async def deliver(self) -> None:
        """Execute the late request, as far as its preconditions allow."""
        for request in self._late:
            with contextlib.suppress(KubeError):
                await request()
        self._late.clear()

    def revive(self) -> None:
        """Respond to a new operator."""
        self.dead = False

    async def _send(self, verb: str, *what: Any, **options: Any) -> Any:
        def request() -> Awaitable[Any]:
            return getattr(FailingKube, verb)(self, *what, **options)  # type: ignore[no-any-return]

        if self.dead:
            raise Killed
        interrupted, self._left = self._left == 0, self._left - 1
        if not interrupted:
            return await request()
        self.requested = f"{verb} {what}"[:300]
        match self._how:
            case Interruption.KILLED:
                self.dead = True
                raise Killed
            case Interruption.LATE:
                self._late.append(request)
            case Interruption.UNANSWERED:
                await request()
        raise Unavailable("no response")

    async def get(self, *what: Any, **options: Any) -> Any:
        return await self._send("get", *what, **options)

    async def list(self, *what: Any, **options: Any) -> Any:
        return await self._send("list", *what, **options)

    async def create(self, *what: Any, **options: Any) -> Any:
        return await self._send("create", *what, **options)

    async def apply(self, *what: Any, **options: Any) -> Any:
        return await self._send("apply", *what, **options)

    async def replace(self, *what: Any, **options: Any) -> Any:
        return await self._send("replace", *what, **options)

    async def patch(self, *what: Any, **options: Any) -> Any:
        return await self._send("patch", *what, **options)

    async def delete(self, *what: Any, **options: Any) -> Any:
        return await self._send("delete", *what, **options)


class _Agents:
    """Replaces `AgentClient`: no member has open requests or evidence."""

    async def drain(self, *_: object) -> bool:
        return True

    async def evidence(self, *_: object) -> bytes:
        return b"{}"

    async def close(self) -> None:
        return


class World:
    """The deployment `team/nano` of two members on four nodes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        schedulers: Sequence[SchedulerType] = (),
        server: type[FailingKube] = FailingKube,
        **spec: Any,
    ) -> None:
        """Allow `schedulers`; `server` is the API server; `spec` replaces fields of the specification."""
        self.placing = True
        """Whether a scheduler chooses nodes for pods without a required node."""
        self.lingering: set[str] = set()
        """Names of deleted pods that do not end."""
        self.now = START
        self.events: list[Event] = []
        self.reports: dict[str, AgentStatus] = {}
        """By the address of the agent."""
        live: Manifest = yaml.safe_load((EXAMPLES / "nano.yaml").read_text())
        live["metadata"] |= {"name": "nano", "namespace": "team", "generation": 1, "annotations": {}, "labels": {}}
        live["spec"] |= spec
        nodes = [{"apiVersion": "v1", "kind": "Node", **node(f"n{i}", address=f"10.0.0.{i}")} for i in range(4)]
        self.kube = server([live, *nodes])
        kube: Any = self.kube
        self.cache = PodCache(kube)
        world = self

        class Agents:
            """Replaces `AgentWatch`: reports of the agents are in the world, by address."""

            shortage = None

            def __init__(self, _client: object, incarnation: int, *_: object) -> None:
                self.incarnation = incarnation
                self.endpoints: Mapping[int, Endpoint] = {}

            def follow(self, endpoints: Mapping[int, Endpoint]) -> None:
                self.endpoints = endpoints

            def report(self, rank: int) -> AgentReport | None:
                found = world.reports.get(self.endpoints[rank].address) if rank in self.endpoints else None
                return AgentReport(found, world.now) if found is not None else None

            def stop(self) -> None:
                return

            async def close(self) -> None:
                return

        monkeypatch.setattr("dsv4_operator.backends.pods.backend.AgentWatch", Agents)
        monkeypatch.setattr("dsv4_operator.backends.pods.backend.unix_time", lambda: world.now)
        # No gateways run here.
        monkeypatch.setattr(PodsBackend, "endpoint_problem", lambda *_: None)
        self._policy = ALLOWED.model_copy(update={"schedulers": tuple(schedulers)})
        self.nodes = NodeCache(kube)
        self.backend = self._new_backend()
        self.deployments = self.operator()

    def _new_backend(self) -> PodsBackend:
        kube: Any = self.kube
        cluster = Cluster(kube, self.cache, runtime_image="runtime:1", policy=self._policy, nodes=self.nodes)
        backend = PodsBackend(cluster, changed=lambda *_: None)
        client: Any = _Agents()
        backend._agents = client
        return backend

    async def restart(self) -> None:
        """Replace the operator's process."""
        await self.close()
        self.backend = self._new_backend()
        self.deployments = self.operator()

    def operator(self) -> Deployments:
        """Return the state of a new operator process."""
        kube: Any = self.kube
        return Deployments(
            Dependencies(
                kube,
                lambda _: self.backend,
                lambda _: Endpoints("", ""),
                lambda _, event: self.events.append(event),
                clock=lambda: self.now,
            )
        )

    def live(self) -> Manifest:
        return copied(self.kube.objects[NAME])

    def put(self, manifest: Manifest) -> None:
        """Write `manifest` as another client."""
        self.kube._put(NAME, manifest)

    @property
    def status(self) -> Manifest:
        found: Manifest = self.live().get("status") or {}
        return found

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        one = next(one for one in self.status["conditions"] if one["type"] == kind)
        return one["status"], one["reason"], one["message"]

    def pods(self, incarnation: int | None = None) -> list[Manifest]:
        """Return the member pods of the API server."""
        found = []
        for (kind, _, name), one in sorted(self.kube.objects.items()):
            member = names.parse_member_name(name) if kind == "Pod" else None
            if member is not None and incarnation in (None, member[2]):
                found.append(one)
        return found

    def cordon(self, *nodes: str) -> None:
        """Cordon exactly these nodes, and update the cache."""
        for (kind, where, name), one in list(self.kube.objects.items()):
            if kind == "Node":
                changed = {**one, "spec": {**(one.get("spec") or {}), "unschedulable": name in nodes}}
                self.nodes._put(self.kube._put((kind, where, name), changed))

    def nodes_of(self, incarnation: int) -> list[str]:
        """Return the nodes of the members of an incarnation, by rank."""
        return [str(node_of(one)) for one in self.pods(incarnation)]

    def kubelet(self) -> None:
        """Start new pods, end deleted pods, and update the cache."""
        for name, one in list(self.kube.objects.items()):
            if name[0] != "Pod":
                continue
            if "deletionTimestamp" in one["metadata"]:
                if name[2] not in self.lingering:
                    del self.kube.objects[name]
            elif "status" not in one or (self.placing and one["status"]["phase"] == "Pending"):
                self._start(name[2], one)
        pods = {(one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in self._all_pods()}
        for known in list(self.cache._keys):
            if known not in pods:
                self.cache._drop(known)
        for one in pods.values():
            self.cache._put(copied(one))

    def _all_pods(self) -> list[Manifest]:
        return [one for (kind, _, _), one in self.kube.objects.items() if kind == "Pod"]

    def _start(self, name: str, pod: Manifest) -> None:
        member = names.parse_member_name(name)
        assert member is not None
        _, group, incarnation, rank = member
        required = names.part(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
        if not required and not self.placing:
            waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [waits]}
            return
        terms = required.get("nodeSelectorTerms")
        (pod["spec"]["nodeName"],) = terms[0]["matchFields"][0]["values"] if terms else [f"n{rank}"]
        pod["metadata"].setdefault("creationTimestamp", "2026-11-21T12:00:00Z")
        pod["status"] = {
            "phase": "Running",
            "podIP": address(group, incarnation, rank),
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "agent", "ready": True, "state": {"running": {"startedAt": "now"}}}],
        }
        self.reports[address(group, incarnation, rank)] = AgentStatus(
            deployment="nano",
            group=group,
            incarnation=incarnation,
            rank=rank,
            phase=Phase.SERVING,
            phase_time=self.now,
            time=self.now,
            verdict=Verdict(health=Health.HEALTHY),
            engine=EngineStatus(generation=1, ready_time=self.now) if rank == 0 else None,
        )

    def end(self, incarnation: int, rank: int, group: int = 0) -> None:
        """End a member's agent."""
        name = "Pod", "team", names.member_name("nano", group, incarnation, rank)
        pod = copied(self.kube.objects[name])
        pod["status"] = {
            "phase": "Failed",
            "containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 1}}}],
        }
        self.kube._put(name, pod)
        self.reports.pop(address(group, incarnation, rank), None)

    async def step(self) -> float:
        """Reconcile and advance the time by at most a second; return the pause to the next reconcile in seconds."""
        self.kubelet()
        if NAME in self.kube.objects:
            self.deployments.handle_event(self.live(), False)
        try:
            pause = await self.deployments.reconcile(KEY)
        except Exception:
            # As in the work queue.
            pause = 1.0
        pause = 300.0 if pause is None else pause
        self.now += min(max(pause, 0.1), 1.0)
        return pause

    async def until(self, what: Any, seconds: float) -> float:
        """Reconcile until `what()` is true; return the elapsed seconds.

        Raises:
            AssertionError: it is not true within `seconds`.
        """
        begun = self.now
        while not what():
            assert self.now - begun <= seconds, (self.status, self.events[-5:])
            await self.step()
        return self.now - begun

    async def serve(self) -> None:
        """Form the first incarnation and wait until it serves."""
        await self.until(lambda: self.status.get("phase") == "Serving", 20.0)

    def formed(self, incarnation: int, group: int = 0) -> bool:
        """Return whether exactly this incarnation of a group has members, and all of them."""
        mine = [one["metadata"]["name"] for one in self.pods()]
        mine = [name for name in mine if name.startswith(f"nano-{group}-")]
        return mine == [names.member_name("nano", group, incarnation, rank) for rank in (0, 1)]

    def change(self, **spec: Any) -> None:
        """Change the specification, as a user does; a field of None is removed."""
        live = self.live()
        live["spec"] = {name: value for name, value in (live["spec"] | spec).items() if value is not None}
        live["metadata"]["generation"] += 1
        self.put(live)

    async def close(self) -> None:
        await self.deployments.close()
        await self.backend.close()
