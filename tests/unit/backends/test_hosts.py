"""Backend for several machines with real host services and agents, without weights."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import DSV4Deployment, parse
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.hosts.backend import examine
from dsv4_operator.backends.hosts.documents import Claim, StartRequest
from dsv4_operator.backends.hosts.service import Drivers
from dsv4_operator.backends.local import gpus, network
from dsv4_operator.backends.local.facts import model_here
from dsv4_operator.backends.local.gpus import GpuInventory
from dsv4_operator.planning.setup import with_settings
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Drafts
from dsv4_testkit.conformance import Bounded, Conformance, fenced, formed, live, of, over, planned, until
from dsv4_testkit.host_services import KEY, Machines
from dsv4_testkit.waiting import suspend


def _namespaces() -> bool:
    try:
        network.check_namespaces(own_network=False)
    except network.NoNamespacesError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _namespaces(), reason="this user may not make namespaces")


class HostsWorld:
    """Two machines on loopback."""

    def __init__(self, root: Path, port: Callable[[], int]) -> None:
        ports = {name: port() for name in ("api", "dashboard", "gcs", "agent")}
        self.deployment: DSV4Deployment = parse(
            {
                "apiVersion": "dsv4.dev/v1alpha1",
                "kind": "DSV4Deployment",
                "metadata": {"name": "conform"},
                "spec": {
                    "model": {"variant": "Nano", "source": {"path": str(root / "missing")}},
                    "topology": {"hardware": "CPU", "nodesPerGroup": 2},
                    "network": {"ports": ports},
                    "engine": {"maxModelLen": 1024, "kvCacheMemory": "64Mi"},
                },
            }
        )
        self.machines = Machines(root, port(), "conform")
        self.connect()

    def connect(self, changed: Callable[[], None] = lambda: None) -> None:
        """Create the backend, as a loop does at its start."""
        self.hosts = self.machines.backend(self.deployment, changed=changed)
        self.backend: Any = Bounded(self.hosts)

    async def answering(self) -> None:
        """Wait until all host services respond."""

        async def complete() -> bool:
            facts = await self.hosts.facts(self.deployment)
            return len(facts.nodes) == len(self.machines.all)

        await over(complete, 120.0)

    async def end(self, incarnation: int, rank: int) -> None:
        while (agent := self.machines.all[rank].agent(incarnation, rank)) is None:
            await asyncio.sleep(0.02)
        os.kill(agent, signal.SIGKILL)


@pytest.fixture
async def world(unused_tcp_port_factory: Callable[[], int]) -> AsyncIterator[HostsWorld]:
    # Short path, because Ray creates sockets below it.
    with tempfile.TemporaryDirectory(prefix="d") as root:
        world = HostsWorld(Path(root), unused_tcp_port_factory)
        try:
            await world.answering()
            yield world
        finally:
            await world.hosts.close()
            world.machines.close()


class TestHosts(Conformance):
    """Conformance tests with two machines."""


def processes_of(world: HostsWorld) -> list[psutil.Process]:
    """Return all processes of members, which have the state directory in their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(f"{world.machines.root}/state/_m/conform/i" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


async def test_the_members_of_a_killed_service_run_on(world: HostsWorld) -> None:
    plan = await formed(world, 1)
    await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)), 60)
    before = {process.pid for process in processes_of(world)}
    for machine in world.machines.all:
        os.kill(machine.service(), signal.SIGKILL)
    await world.hosts.close()
    world.connect()
    await world.answering()
    seen = await until(world, "all are adopted", lambda seen: len(live(seen, 1)) == len(plan.members))
    await world.backend.ensure(world.deployment, plan)
    await until(world, "all are heard", lambda seen: all(one.status for one in live(seen)), 60)
    assert {process.pid for process in processes_of(world)} == before
    assert {member.node for member in seen.members} == {"spark-1", "spark-2"}
    await fenced(world, 1)
    assert not processes_of(world)


async def test_after_the_end_of_a_supervisor_its_member_is_reported_as_ended(world: HostsWorld) -> None:
    await formed(world, 1)
    machine = world.machines.all[1]
    machine.kill_supervisor()
    machine.start()
    seen = await until(world, "the end is reported", lambda seen: of(seen, 1)[1].ended is not None)
    assert of(seen, 1)[1].ended == "the host service was ended"
    assert of(seen, 1)[0].ended is None
    assert [process for process in processes_of(world) if "--rank" in process.cmdline()]
    await fenced(world, 1)
    assert not processes_of(world)


async def test_a_power_cut_of_both_machines(world: HostsWorld) -> None:
    plan = await formed(world, 1)
    for machine in world.machines.all:
        machine.cut()
    await world.hosts.close()
    answers = asyncio.Event()
    world.connect(changed=answers.set)
    with pytest.raises(BackendError, match=r"of spark-1 refuses connections to port .*; see `systemctl status"):
        await world.backend.fence(world.deployment, 0, 1)
    assert "of spark-2 refuses connections" in (await world.backend.facts(world.deployment)).unfit
    for machine in world.machines.all:
        machine.boot()
    async with asyncio.timeout(60):
        await answers.wait()
    await world.answering()
    seen = await until(world, "all are reported", lambda seen: len(of(seen, 1)) == len(plan.members))
    assert {member.ended for member in seen.members} == {"the machine was restarted"}
    await fenced(world, 1)
    await world.backend.forget(world.deployment, 0, 1)
    await formed(world, 2)


async def test_memory_that_the_kernel_keeps_is_reported_until_the_machine_restarts(world: HostsWorld) -> None:
    async def lost() -> int:
        return (await world.backend.facts(world.deployment)).nodes[0].lost_bytes

    async def is_lost() -> bool:
        return await lost() > 500 << 20

    machine = world.machines.all[0]
    # Two measurements, because transient pages may raise one of them.
    await asyncio.sleep(6)
    with kernel_pages(800):
        await over(is_lost)
        machine.kill_supervisor()
        machine.start()
        await world.answering()
        await over(is_lost)
        machine.cut()
        machine.boot()
        await world.answering()

        async def is_known_anew() -> bool:
            return await lost() < 300 << 20

        await over(is_known_anew, 30.0)


@contextmanager
def kernel_pages(mebibytes: int) -> Iterator[None]:
    """Hold kernel memory that belongs to no process and no file: full pipes."""
    pipes = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], before[0] + 2 * mebibytes), before[1]))
    try:
        for _ in range(mebibytes):
            reading, writing = os.pipe()
            pipes += [reading, writing]
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
            os.set_blocking(writing, False)
            os.write(writing, bytes(1 << 20))
        yield
    finally:
        for descriptor in pipes:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_no_end_is_assumed_of_a_machine_that_does_not_answer(world: HostsWorld) -> None:
    await formed(world, 1)
    service = world.machines.all[1].service()
    suspend(service)
    supervisor = world.machines.all[1].supervisor
    assert supervisor is not None
    suspend(supervisor.pid)
    try:
        with pytest.raises(BackendError, match=r"of spark-2 does not answer"):
            await world.backend.fence(world.deployment, 0, 1)
        seen = await world.backend.observe(world.deployment, 0)
        assert of(seen, 1)[1].ended is None
        # The other member was ended nevertheless.
        await until(world, "the other one ended", lambda seen: of(seen, 1)[0].ended is not None)
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
        os.kill(service, signal.SIGCONT)
    await world.answering()

    async def complete() -> bool:
        try:
            return bool(await world.backend.fence(world.deployment, 0, 1))
        except BackendError:
            return False

    await over(complete)
    assert not processes_of(world)


async def test_a_fenced_incarnation_is_never_started_again(world: HostsWorld) -> None:
    plan = await formed(world, 1)
    await fenced(world, 1)
    await world.backend.forget(world.deployment, 0, 1)
    with pytest.raises(BackendError, match="fenced"):
        await world.backend.ensure(world.deployment, plan)
    # Also after a restart of the machines.
    for machine in world.machines.all:
        machine.cut()
        machine.boot()
    await world.hosts.close()
    world.connect()
    await world.answering()
    with pytest.raises(BackendError, match="fenced"):
        await world.backend.ensure(world.deployment, plan)
    assert not processes_of(world)
    # A loop without its files continues with a higher number.
    assert (await world.backend.observe(world.deployment, 0)).used_incarnation == 1


async def test_a_machine_with_the_address_of_another_is_not_used(world: HostsWorld) -> None:
    plan = await formed(world, 1)
    first, second = world.machines.inventory.hosts
    swapped = (
        first.model_copy(update={"address": second.address}),
        second.model_copy(update={"address": first.address}),
    )
    await world.hosts.close()
    world.machines.inventory = world.machines.inventory.model_copy(update={"hosts": swapped})
    world.connect()
    with pytest.raises(BackendError, match="the machine 'spark-2' answers there"):
        await world.backend.fence(world.deployment, 0, 1)
    with pytest.raises(BackendError, match="answers there"):
        await world.backend.ensure(world.deployment, plan)
    assert (await world.backend.observe(world.deployment, 0)).members == ()
    claim = Claim(holder="loop", epoch=2)
    request = StartRequest(claim=claim, plan=plan.model_copy(update={"incarnation": 2}), rank=0, token="0" * 96)
    with pytest.raises(BackendError, match="rank 0 is planned on spark-1, and this machine is spark-2"):
        await world.hosts._client.post(f"{world.machines.inventory.url(swapped[0])}/v1/start", request)


async def test_the_plan_is_of_the_checkpoint_in_its_directory(world: HostsWorld, tmp_path: Path) -> None:
    folder = make(tmp_path / "mine", drafts=Drafts.MTP)
    deployment = with_settings(world.deployment, {"model.source.path": str(folder)})
    found = (await world.backend.facts(deployment)).model
    assert found is not None
    assert (found, found.name) == (model_here(deployment.spec.model), "mine")
    assert (await world.backend.facts(world.deployment)).model is None


async def test_a_machine_keeps_its_members_and_fences_at_another_address(world: HostsWorld) -> None:
    plan = await formed(world, 1)
    machine = world.machines.all[1]
    assert await examine(world.machines.inventory, KEY) == []
    machine.kill_supervisor()
    (found,) = await examine(world.machines.inventory, KEY)
    assert (found.field, found.reason) == ("hosts[1].address", "ServiceMissing")
    world.machines.move(1, 3)
    await world.hosts.close()
    world.connect()
    await world.answering()
    assert (await world.backend.facts(world.deployment)).nodes[1].address.endswith(".3")
    seen = await until(world, "all are reported", lambda seen: len(of(seen, 1)) == len(plan.members))
    # That of the other machine runs on, so it is fenced first.
    assert [of(seen, 1)[rank].ended for rank in (0, 1)] == [None, "the host service was ended"]
    await fenced(world, 1)
    await world.backend.forget(world.deployment, 0, 1)
    with pytest.raises(BackendError, match="fenced"):
        await world.backend.ensure(world.deployment, plan)
    second = await formed(world, 2)
    assert second.members[1].address.endswith(".3")


async def test_two_incarnations_never_run_at_once(world: HostsWorld) -> None:
    await formed(world, 1)
    second = await planned(world, 2)
    with pytest.raises(BackendError, match="incarnation 1 still runs"):
        await world.backend.ensure(world.deployment, second)
    await fenced(world, 1)
    await world.backend.ensure(world.deployment, second)


async def test_another_loop_is_refused_until_the_lease_ends(world: HostsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = await formed(world, 1)
    other = world.machines.backend(world.deployment, "other")
    try:
        for _ in range(2):
            with pytest.raises(BackendError, match="'loop' manages the members"):
                await other.fence(world.deployment, 0, 1)
        # Another loop may observe.
        assert len((await other.observe(world.deployment, 0)).members) == len(plan.members)
        begun = time.monotonic()
        assert len(live(await world.backend.observe(world.deployment, 0))) == len(plan.members)

        async def taken() -> bool:
            try:
                return await other.fence(world.deployment, 0, 1)
            except BackendError:
                return False

        await over(taken, 120.0)
        assert time.monotonic() - begun > 10
        with pytest.raises(BackendError, match="other"):
            await world.backend.ensure(world.deployment, plan)
    finally:
        await other.close()


async def test_every_request_needs_the_key(world: HostsWorld) -> None:
    url = world.machines.inventory.url(world.machines.inventory.hosts[0])
    async with aiohttp.ClientSession() as session:
        for method, path in (
            ("GET", "/v1/report"),
            ("POST", "/v1/lease"),
            ("POST", "/v1/start"),
            ("POST", "/v1/fence"),
            ("POST", "/v1/forget"),
            ("GET", "/v1/evidence?group=0&incarnation=1"),
            ("GET", "/other"),
        ):
            for headers in ({}, {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": KEY}):
                async with session.request(method, url + path, headers=headers, data=b"{}") as answer:
                    assert answer.status == 401, (method, path, headers)
        right = {"Authorization": f"Bearer {KEY}"}
        async with session.post(f"{url}/v1/start", headers=right, data=b'{"claim": 7}') as answer:
            assert answer.status == 400
            assert "claim" in await answer.text()


VERSIONS = st.sampled_from(["", "580.95", "590.44"])


@given(st.lists(st.tuples(VERSIONS, st.floats(0.0, 2000.0)), max_size=8))
def test_a_changed_driver_is_reported_until_members_ran_with_it(runs: list[tuple[str, float]]) -> None:
    drivers, proven = Drivers(), ""
    for version, seconds in runs:
        # A restart of the machine or of the service, then a member.
        drivers = Drivers(before=drivers.before).found(GpuInventory(driver=version))
        assert drivers.changed == (proven if version and proven != version else "")
        drivers = drivers.proven(seconds)
        if version and seconds >= 600.0:
            proven = version
        assert drivers.before == proven
        assert drivers.changed in ("", proven)


def test_a_driver_without_an_answer_is_named_where_it_has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = GpuInventory(problem="Driver/library version mismatch")
    monkeypatch.setattr(gpus, "has_device", lambda: True)
    assert Drivers().found(mismatch).problem == "Driver/library version mismatch"
    monkeypatch.setattr(gpus, "has_device", lambda: False)
    assert Drivers().found(mismatch).problem == ""
