"""The start of the loop over the machines of an inventory."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    GroupPhase,
    GroupStatus,
    Hardware,
    Reason,
    load,
)
from dsv4_operator.backends.hosts.documents import HOST_KEY, INVENTORY
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.gateway import bind_loopback
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.controller import standalone
from dsv4_operator.controller.queue import wait_for
from dsv4_testkit.supervised import Supervised
from dsv4_testkit.waiting import until

NANO = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()
HOSTS = "hosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]"


@pytest.fixture
def state(tmp_path: Path) -> DeploymentState:
    found = DeploymentState(tmp_path, "nano")
    found.directory.mkdir()
    found.save_manifest(load(NANO))
    return found


def write(state: DeploymentState, inventory: str, key: str, mode: int = 0o600) -> None:
    (state.directory / INVENTORY).write_text(inventory)
    (state.directory / HOST_KEY).write_text(key)
    (state.directory / HOST_KEY).chmod(mode)


@pytest.mark.parametrize(
    ("inventory", "key", "mode", "text"),
    [
        ("hosts: []", "k" * 32, 0o600, r"hosts\.json: hosts: has 0 entries"),
        ("hosts: [", "k" * 32, 0o600, r"hosts\.json: invalid YAML"),
        (HOSTS, "short", 0o600, "has fewer than 32 printable characters"),
        (HOSTS, "k" * 32, 0o644, "others may read the host key"),
    ],
)
def test_invalid_files_prevent_the_start_of_the_loop(
    state: DeploymentState, supervised: Supervised, inventory: str, key: str, mode: int, text: str
) -> None:
    write(state, inventory, key, mode)
    with pytest.raises(StateError, match=text):
        standalone._run(state, supervised.again())


def test_without_its_key(state: DeploymentState, supervised: Supervised) -> None:
    (state.directory / INVENTORY).write_text(HOSTS)
    with pytest.raises(StateError, match=r"the host key .* cannot be read"):
        standalone._run(state, supervised.again())


def test_the_saved_status_is_continued(state: DeploymentState) -> None:
    assert standalone._saved(state).status == DeploymentStatus()
    earlier = DeploymentStatus(phase=DeploymentPhase.SERVING)
    state.save_object(load(NANO).model_copy(update={"status": earlier}))
    changed = load(NANO.replace("maxNumSeqs: 4", "maxNumSeqs: 8"))
    state.save_manifest(changed)
    found = standalone._saved(state)
    assert (found.spec, found.status) == (changed.spec, earlier)


def test_after_a_loss_of_power_nothing_is_ready(state: DeploymentState) -> None:
    true = {"status": ConditionStatus.TRUE, "reason": Reason.ENGINE_READY, "message": "", "lastTransitionTime": 1.0}
    kinds = (ConditionType.ACCEPTED, ConditionType.READY)
    conditions = tuple(Condition.model_validate({**true, "type": kind}) for kind in kinds)
    earlier = DeploymentStatus(phase=DeploymentPhase.SERVING, conditions=conditions, ready_replicas=1)
    state.save_object(load(NANO).model_copy(update={"status": earlier}))
    begun = time.time() - 1
    found = standalone._saved(state).status
    assert [each.status for each in found.conditions] == [ConditionStatus.TRUE, ConditionStatus.FALSE]
    assert (found.phase, found.ready_replicas) == (DeploymentPhase.PENDING, 0)
    accepted, ready = found.conditions
    assert accepted == conditions[0]
    assert ready.last_transition_time >= begun, "it is not ready since now, and not since it became ready"


def test_after_an_end_on_request_the_restart_budget_is_whole(state: DeploymentState) -> None:
    groups = tuple(
        GroupStatus(index=index, phase=phase, incarnation=7, restarts=(1.0, 2.0))
        for index, phase in enumerate((GroupPhase.STOPPED, GroupPhase.SERVING))
    )
    state.save_object(load(NANO).model_copy(update={"status": DeploymentStatus(groups=groups)}))
    found = standalone._saved(state).status.groups
    assert [(each.incarnation, each.restarts) for each in found] == [(7, ()), (7, (1.0, 2.0))]


@pytest.mark.parametrize(
    ("home", "refused"),
    [(lambda _: "/usr/local/cuda", False), (lambda _: "", False), (lambda root: str(root / "cache" / "cuda"), True)],
)
def test_a_toolkit_of_this_machine_alone_is_refused(
    state: DeploymentState, monkeypatch: pytest.MonkeyPatch, home: Callable[[Path], str], refused: bool
) -> None:
    software = Software(cuda_home=home(state.root))
    monkeypatch.setattr(standalone, "cuda_software", lambda *_: software)
    nano = load(NANO)
    topology = nano.spec.topology.model_copy(update={"hardware": Hardware.GB10})
    deployment = nano.model_copy(update={"spec": nano.spec.model_copy(update={"topology": topology})})
    if refused:
        with pytest.raises(StateError, match="install NVIDIA's toolkit at the same path"):
            standalone._same_software(deployment, state, several=True)
    else:
        assert standalone._same_software(deployment, state, several=True) == software
    assert standalone._same_software(deployment, state, several=False) == software, "no other machine needs the path"
    engine = deployment.spec.engine.model_copy(update={"kernels": "auto"})
    unneeded = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"engine": engine})})
    expected = "" if refused else software.cuda_home
    assert standalone._same_software(unneeded, state, several=True).cuda_home == expected


class Gateways:
    """Stand-in for the gateways of a loop."""

    def __init__(self) -> None:
        self.serving, self.started, self.stopped = asyncio.Event(), asyncio.Event(), False
        self.expected = [math.inf]

    async def start(self, listener: str) -> None:
        assert listener == "api"
        self.started.set()

    async def stop(self) -> None:
        self.stopped = True

    def due(self) -> float:
        return self.expected[-1]

    def expect(self, due: float) -> None:
        self.expected.append(due)


@pytest.mark.parametrize("before", [-1000.0, 1000.0])
async def test_loops_that_end_in_their_first_reconcile_are_overdue_since_the_latest_success(
    state: DeploymentState, supervised: Supervised, monkeypatch: pytest.MonkeyPatch, before: float
) -> None:
    async def hang(*_: object, **__: object) -> float:
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(standalone.Reconciler, "reconcile", hang)
    gateways, begun = Gateways(), time.monotonic()
    gateways.expected = [begun + before]
    for _ in range(2):
        processes, count = supervised.again(), len(gateways.expected)
        backend = LocalBackend(state, processes, isolated=False, changed=lambda: None)
        front = standalone._Front(gateways, "127.0.0.1", load(NANO), started=False)  # type: ignore[arg-type]
        loop = asyncio.create_task(standalone._loop(state, load(NANO), processes, backend, front, asyncio.Event()))
        await until(lambda count=count: len(gateways.expected) >= count + 2)
        loop.cancel()
        await asyncio.wait({loop})
    # A time in the future is that of a pause, which the next loop does not continue.
    (due,) = set(gateways.expected[1:])
    assert due == begun + before if before < 0 else begun <= due <= time.monotonic()


@pytest.mark.parametrize("opens", ["no upgrade", "a group serves", "the upgrade has ended", "it takes long", "never"])
async def test_in_an_upgrade_gateways_start_when_a_group_serves(
    opens: str, supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "_HELD_SECONDS", 0.05)
    monkeypatch.setattr(standalone, "_QUEUE_SECONDS", 0.5 if opens == "it takes long" else 3600.0)
    gateways, held = Gateways(), opens != "no upgrade"
    processes = supervised.again()
    with bind_loopback({"dashboard": 0})["dashboard"] as listener:
        processes.keep("dashboard", listener.fileno())
    front = standalone._Front(gateways, "127.0.0.1", load(NANO), held=lambda: held)  # type: ignore[arg-type]
    await front.start(processes)
    try:
        assert gateways.started.is_set() == (opens == "no upgrade")
        if opens == "a group serves":
            gateways.serving.set()
        elif opens == "the upgrade has ended":
            held = False
        await wait_for(gateways.started, 0.5 if opens == "never" else 60.0)
    finally:
        await front.stop()
        front.close()
        await processes.close()
    assert gateways.started.is_set() == (opens != "never")
    assert gateways.stopped
