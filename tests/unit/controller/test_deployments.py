"""Events of the watch of deployments, and the reconciliations that they cause."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_operator.api import ClusterPolicy, DeploymentStatus, DSV4Deployment, parse
from dsv4_operator.backends import registry
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.pods.ownership import ObjectTerminating
from dsv4_operator.controller.admission import judge
from dsv4_operator.controller.deployments import Dependencies, Deployments
from dsv4_operator.controller.reconcile import Endpoints
from dsv4_operator.kube import Client, Conflict, Listing, Manifest, Unavailable
from dsv4_operator.lifecycle import Event
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.fake_kube import FakeKube
from dsv4_testkit.supervised import Supervised
from dsv4_testkit.waiting import free_ports

NANO = Path(__file__).parents[3] / "examples" / "nano.yaml"
KEY = ("team", "nano")


def server_of(**spec: object) -> FakeKube:
    """Return an API server with one deployment."""
    live: Manifest = yaml.safe_load(NANO.read_text())
    live["metadata"] |= {"name": "nano", "namespace": "team", "generation": 1}
    live["spec"] |= spec
    return FakeKube([live])


def live(server: FakeKube) -> Manifest:
    return copy.deepcopy(server.objects["DSV4Deployment", *KEY])


class NoMachines:
    """Backend without nodes and members."""

    async def facts(self, _: DSV4Deployment) -> Facts:
        return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", placed={})

    def refresh(self, _: DSV4Deployment, facts: Facts) -> Facts:
        return facts

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        return Observed(GroupKey.of(deployment, group), ())

    async def ensure_frontend(self, _: DSV4Deployment, __: DeploymentStatus) -> None:
        return

    def endpoint_problem(self, _: DSV4Deployment, __: object) -> None:
        return

    def reserve(self, _deployment: DSV4Deployment, _plan: GroupPlan) -> None:
        raise AssertionError("nothing can be planned")

    async def release(self, namespace: str, name: str) -> None:
        return


async def test_own_writes_cause_no_reconciliation() -> None:
    server, backend = server_of(), NoMachines()
    kube: Any = server
    found: Client = kube
    made: Any = backend
    dependencies = Dependencies(
        found, lambda _: made, lambda _: Endpoints("", ""), lambda *_: None, clock=lambda: 1000.0
    )
    deployments = Deployments(dependencies)
    assert deployments.handle_event(live(server), gone=False) == KEY
    await deployments.reconcile(KEY)
    assert len(server.writes()) == 1
    echo = live(server)
    assert deployments.handle_event(echo, gone=False) is None
    # Reconciliation without changes writes nothing.
    await deployments.reconcile(KEY)
    assert len(server.writes()) == 1
    # Another writer changed the object.
    changed = live(server)
    changed["metadata"] |= {"resourceVersion": "9", "generation": 2}
    assert deployments.handle_event(changed, gone=False) == KEY
    # Another object of that name, and the late deletion event of the first.
    other = copy.deepcopy(echo)
    other["metadata"] |= {"uid": "v", "resourceVersion": "10"}
    assert deployments.handle_event(other, gone=False) == KEY
    assert deployments.handle_event(echo, gone=True) is None
    assert deployments.handle_event(echo, gone=False) is None
    assert deployments.knows(KEY)
    assert deployments.handle_event(other, gone=True) == KEY
    assert not deployments.knows(KEY)


def deployments_without_machines(server: Any, told: list[Event] | None = None) -> Deployments:
    backend: Any = NoMachines()
    events = told if told is not None else []
    return Deployments(
        Dependencies(server, lambda _: backend, lambda _: Endpoints("", ""), lambda _, event: events.append(event))
    )


async def settled(deployments: Deployments) -> None:
    """Reconcile until no immediate reconciliation is due."""
    async with asyncio.timeout(60):
        while await deployments.reconcile(KEY) == 0.0:
            pass


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[list[tuple[Manifest, bool]], Manifest | None]:
    """Generate watch events of several consecutive objects with one name, and the object that exists in the end.

    Events of one UID are in order; those of different UIDs are in any order, as kopf delivers them. Deletion events may
    be missing, as after an interrupted watch.
    """
    version, sequences = 0, []
    final: Manifest | None = None
    for number in range(draw(st.integers(1, 4))):
        events: list[tuple[Manifest, bool]] = []
        for _ in range(draw(st.integers(1, 3))):
            version += 1
            one = live(server_of())
            one["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(version)}
            events.append((one, False))
        final = copy.deepcopy(events[-1][0])
        sequences.append(events)
        version += 1
        ended = copy.deepcopy(final)
        ended["metadata"]["resourceVersion"] = str(version)
        events.append((ended, True))
    if draw(st.booleans()):
        sequences[-1].pop()
    else:
        final = None
    for events in sequences:
        if events[-1][1] and draw(st.booleans()):
            events.pop()
    order = draw(st.permutations([index for index, events in enumerate(sequences) for _ in events]))
    return [sequences[index].pop(0) for index in order], final


@settings(max_examples=200, deadline=None)
@given(lifetimes())
def test_the_existing_deployment_is_known_after_any_order_of_events(
    case: tuple[list[tuple[Manifest, bool]], Manifest | None],
) -> None:
    events, final = case

    async def run() -> None:
        server = FakeKube()
        if final is not None:
            server.objects["DSV4Deployment", *KEY] = copy.deepcopy(final)
        server._version = 1000
        deployments = deployments_without_machines(server)
        for manifest, gone in events:
            deployments.handle_event(copy.deepcopy(manifest), gone)
        await settled(deployments)
        assert deployments.knows(KEY) is (final is not None)
        if final is not None:
            assert deployments._states[KEY].uid == final["metadata"]["uid"]
        else:
            assert not list(deployments.observed())
        await deployments.close()

    asyncio.run(run())


def listing(version: int, *items: Manifest) -> Listing:
    kept = ("metadata", "spec", "status")
    return Listing([{name: item[name] for name in kept if name in item} for item in items], str(version))


async def test_lists_complete_the_watch() -> None:
    server = server_of()
    deployments = deployments_without_machines(server)
    deployments.handle_event(live(server), gone=False)
    assert await deployments.reconcile(KEY)
    found = live(server)
    version = int(found["metadata"]["resourceVersion"])
    assert deployments.handle_listing(listing(version, found), None) == [], "a list without news"
    # Of another namespace, and older than the deployment.
    assert deployments.handle_listing(listing(version), "other") == []
    assert deployments.handle_listing(listing(version - 1), None) == []
    changed = copy.deepcopy(found)
    changed["metadata"] |= {"resourceVersion": str(version + 1), "generation": 2}
    assert deployments.handle_listing(listing(version + 1, changed), "team") == [KEY]
    server._put(("DSV4Deployment", *KEY), changed)
    assert await deployments.reconcile(KEY)
    # Its end was missed.
    del server.objects["DSV4Deployment", *KEY]
    assert deployments.handle_listing(listing(version + 9), None) == [KEY]
    assert await deployments.reconcile(KEY) is None
    assert not deployments.knows(KEY)
    assert list(deployments.observed()) == []
    # Another one of its name, whose creation was missed.
    other = copy.deepcopy(changed)
    other["metadata"] |= {"uid": "v", "resourceVersion": str(version + 20)}
    assert deployments.handle_listing(listing(version + 20, other), None) == [KEY]
    assert deployments.knows(KEY)


async def test_a_status_that_cannot_be_written_because_the_deployment_is_gone_drops_it() -> None:
    server = server_of()
    deployments = deployments_without_machines(server)
    deployments.handle_event(live(server), gone=False)
    await deployments.reconcile(KEY)
    # Another generation causes a write of the status.
    changed = live(server)
    changed["metadata"] |= {"resourceVersion": "9", "generation": 2}
    deployments.handle_event(changed, gone=False)
    del server.objects["DSV4Deployment", *KEY]
    assert await deployments.reconcile(KEY) is None
    assert not deployments.knows(KEY)


async def test_an_object_that_is_still_being_removed_is_waited_for_and_reported() -> None:
    class Waits(NoMachines):
        async def ensure_frontend(self, _: DSV4Deployment, __: DeploymentStatus) -> None:
            raise ObjectTerminating("Service team/nano is being deleted")

    server, told, waits = server_of(), list[Event](), Waits()
    backend: Any = waits
    kube: Any = server
    deployments = Deployments(
        Dependencies(kube, lambda _: backend, lambda _: Endpoints("", ""), lambda _, event: told.append(event))
    )
    deployments.handle_event(live(server), gone=False)
    pauses = [await deployments.reconcile(KEY) for _ in range(3)]
    assert all(pause is not None and 0 < pause <= 2.2 for pause in pauses), pauses
    assert [event.reason for event in told if event.type == "Warning"].count("ObjectTerminating") == 1


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch, supervised: Supervised) -> AsyncIterator[LocalBackend]:
    """Yield a third backend, which runs the operator's members as processes of this machine."""
    # Short path, because Ray creates sockets below it.
    with tempfile.TemporaryDirectory(prefix="d") as root:
        state = DeploymentState(Path(root), "nano")
        state.prepare()
        processes = supervised.again()
        processes.listen()
        backend = LocalBackend(state, processes, isolated=False, changed=lambda: None)
        monkeypatch.setitem(registry.BACKENDS, "Processes", lambda _: backend)
        yield backend
        for _, incarnation, _ in list(backend._members):
            async with asyncio.timeout(60):
                while not await backend.fence(parse(live(server_of())), 0, incarnation):
                    await asyncio.sleep(0.1)
        await backend.close()
        await processes.close()


def deployments_of(server: Any, told: list[Event]) -> Deployments:
    nothing: Any = object()
    backends = registry.Backends(
        registry.BackendDependencies(server, nothing, nothing, "", ClusterPolicy(), lambda *_: None)
    )
    return Deployments(
        Dependencies(server, backends.of, lambda _: Endpoints("", ""), lambda _, event: told.append(event))
    )


async def test_a_third_backend_is_one_line_in_the_table(machine: LocalBackend) -> None:
    ports = dict(zip(("api", "dashboard", "gcs", "agent"), free_ports(4), strict=True))
    server, told = server_of(backend="Processes", network={"ports": ports}), list[Event]()
    # Without weights the agent stops at staging.
    server.objects["DSV4Deployment", *KEY]["spec"]["model"]["source"] = {"path": "/missing"}
    deployments = deployments_of(server, told)
    deployments.handle_event(live(server), gone=False)
    async with asyncio.timeout(60):
        while not machine._members:
            await deployments.reconcile(KEY)
            status = live(server)["status"]
            assert [group["phase"] for group in status["groups"]] == ["Forming"], status["conditions"]
    ((group, incarnation, rank), member) = next(iter(machine._members.items()))
    assert (group, incarnation, rank) == (0, live(server)["status"]["groups"][0]["incarnation"], 0)
    assert Path(f"/proc/{member.agent}").exists()
    await deployments.close()


async def test_a_backend_that_the_operator_does_not_have_is_refused_with_those_that_it_has() -> None:
    server, told = server_of(backend="Elsewhere"), list[Event]()
    deployments = deployments_of(server, told)
    deployments.handle_event(live(server), gone=False)
    await deployments.reconcile(KEY)
    (accepted,) = [one for one in live(server)["status"]["conditions"] if one["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "SpecInvalid")
    assert accepted["message"].startswith('spec.backend: "Elsewhere" is not supported')
    assert "use one of Pods, KubeRay" in accepted["message"]
    assert not live(server)["status"]["groups"]
    assert judge(live(server)).refusal == accepted["message"]
    await deployments.close()


async def test_a_deployment_that_cannot_be_read_is_tried_again() -> None:
    server = server_of()
    deployments = deployments_without_machines(server)
    deployments.handle_event(live(server), gone=False)
    server.broken = True
    with pytest.raises(Unavailable, match="the API server is away"):
        await deployments.reconcile(KEY)
    server.broken = False
    await settled(deployments)
    assert server.writes() == ["replace DSV4Deployment nano"]


async def test_the_supervision_goes_on_while_the_object_cannot_be_read() -> None:
    server = server_of()
    deployments = deployments_without_machines(server)
    deployments.handle_event(live(server), gone=False)
    await settled(deployments)
    deployments._states[KEY].unread = True
    server.broken = True
    assert await deployments.reconcile(KEY) is not None
    server.broken = False
    await deployments.reconcile(KEY)
    assert not deployments._states[KEY].unread


class Unanswering(FakeKube):
    """An API server whose answers to the next status writes are lost, before or after their execution."""

    def __init__(self, server: FakeKube) -> None:
        super().__init__()
        self.objects, self._version = server.objects, server._version
        self.lost: list[str] = []
        """For each of the next writes: `executed`, `dropped`, `late`, or `hung` and executed late."""
        self.late: list[Manifest] = []

    async def replace(self, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        kind = self.lost.pop(0) if self.lost else ""
        if kind == "hung":
            await self.hang(manifest)
        if kind == "late":
            self.late.append(copy.deepcopy(manifest))
        if kind in ("late", "dropped"):
            raise Unavailable("no answer in time")
        answer = await super().replace(manifest, subresource=subresource)
        if kind == "executed":
            raise Unavailable("the connection broke")
        return answer

    async def hang(self, manifest: Manifest) -> None:
        self.late.append(copy.deepcopy(manifest))
        await asyncio.sleep(600)

    async def deliver(self) -> None:
        """Execute the late writes now, as far as their preconditions hold."""
        late, self.late = self.late, []
        for manifest in late:
            with contextlib.suppress(Conflict):
                await super().replace(manifest, subresource="status")


class ChangedMeanwhile(FakeKube):
    """An API server on which a user changes the specification shortly before some of the status writes."""

    def __init__(self, server: FakeKube, before: Sequence[bool]) -> None:
        super().__init__()
        self.objects, self._version = server.objects, server._version
        self._before = list(before)

    async def replace(self, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        if self._before and self._before.pop(0):
            self.change()
        return await super().replace(manifest, subresource=subresource)

    def change(self) -> None:
        changed = live(self)
        changed["metadata"]["generation"] += 1
        changed["spec"]["replicas"] = changed["metadata"]["generation"]
        self._put(("DSV4Deployment", *KEY), changed)


@settings(max_examples=60, deadline=None)
@given(
    # Three changes in a row make a write give up, which is repeated after a pause.
    before=st.lists(st.sampled_from([(True,), (False,), (True, True)]), max_size=3).map(
        lambda found: [one for part in found for one in (*part, False)]
    ),
    changes=st.integers(0, 2),
)
async def test_a_specification_that_changes_before_a_status_write_is_reconciled(
    before: list[bool], changes: int
) -> None:
    """Also if the watch was interrupted meanwhile, and reports only the status that was written over it."""
    server = ChangedMeanwhile(server_of(), before)
    deployments = deployments_without_machines(server)
    for change in range(changes + 1):
        if change:
            server.change()
        if deployments.handle_event(live(server), gone=False) is not None:
            await settled(deployments)
        # The list with which the watch continues.
        assert deployments.handle_event(live(server), gone=False) is None
    found = live(server)
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.sampled_from(["executed", "dropped", "late", ""]), max_size=6),
    steps=st.lists(st.sampled_from(["reconcile", "event", "late", "change"]), min_size=4, max_size=14),
)
async def test_a_status_write_without_an_answer_never_resets_the_supervision(
    losses: list[str], steps: list[str]
) -> None:
    """Also if it is executed late; each event is reported once, and the status arrives."""
    server, told, now = Unanswering(server_of()), list[Event](), [1000.0]
    kube, backend = cast("Any", server), cast("Any", NoMachines())
    deployments = Deployments(
        Dependencies(
            kube, lambda _: backend, lambda _: Endpoints("", ""), lambda _, event: told.append(event), lambda: now[0]
        )
    )
    deployments.handle_event(live(server), gone=False)
    await deployments.reconcile(KEY)
    first = deployments._states[KEY]
    server.lost = list(losses)
    for step in (*steps, "event", "reconcile", "late", "event", "reconcile", "event", "reconcile"):
        now[0] += 20.0
        if step == "reconcile":
            await deployments.reconcile(KEY)
        elif step == "event":
            deployments.handle_event(live(server), gone=False)
        elif step == "late":
            await server.deliver()
        else:
            changed = live(server)
            changed["metadata"]["generation"] += 1
            changed["spec"]["replicas"] = changed["metadata"]["generation"]
            server._put(("DSV4Deployment", *KEY), changed)
    assert deployments._states[KEY] is first, "its state was dropped"
    (seen,) = deployments.observed()
    assert live(server)["status"] == seen.status.to_dict()
    assert seen.status.observed_generation == live(server)["metadata"]["generation"]


async def test_a_status_write_that_hangs_is_given_up_and_recognized_when_it_is_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsv4_operator.controller.deployments._WRITE_SECONDS", 0.05)
    server, told = Unanswering(server_of()), list[Event]()
    deployments = deployments_without_machines(server, told)
    deployments.handle_event(live(server), gone=False)
    server.lost = ["hung"]
    async with asyncio.timeout(60):
        await deployments.reconcile(KEY)
    assert any("no answer within 0 s" in event.message for event in told)
    assert "status" not in live(server)
    await server.deliver()
    assert deployments.handle_event(live(server), gone=False) == KEY
    before = len(told)
    await deployments.reconcile(KEY)
    assert {event.reason for event in told[before:]} & {"PlanRefused", "NodesMissing"}, "events of the executed write"
