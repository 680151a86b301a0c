"""Local backend with real agents. Without weights they stop at staging and start no Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsv4_operator.api import DSV4Deployment, parse
from dsv4_operator.backends.local import backend as local_backend
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.facts import model_here
from dsv4_operator.backends.local.gpus import Card
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.local.supervisor import OUTSIDE
from dsv4_operator.planning.setup import with_settings
from dsv4_runtime.contract import WeightsSource
from dsv4_runtime.contract.plan import OUTSIDE_NETWORK
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Drafts
from dsv4_testkit.conformance import Bounded, Conformance, fenced, formed, live, over, planned, until
from dsv4_testkit.supervised import Supervised
from dsv4_testkit.waiting import Pauses, suspend


class LocalWorld:
    """One member on this machine's loopback."""

    def __init__(self, root: Path, ports: dict[str, int], supervised: Supervised) -> None:
        self.deployment: DSV4Deployment = parse(
            {
                "apiVersion": "dsv4.dev/v1alpha1",
                "kind": "DSV4Deployment",
                "metadata": {"name": "conform"},
                "spec": {
                    "model": {"variant": "Nano", "source": {"path": str(root / "missing")}},
                    "topology": {"hardware": "CPU"},
                    "network": {"ports": ports},
                    "engine": {"maxModelLen": 1024, "kvCacheMemory": "64Mi"},
                },
            }
        )
        self.state = DeploymentState(root, "conform")
        self.state.prepare()
        self.supervised = supervised
        self.connect()

    def connect(self) -> None:
        """Create the backend and adopt running members, as a loop does at its start."""
        self.processes = self.supervised.again()
        self.local = LocalBackend(self.state, self.processes, isolated=False, changed=lambda: None)
        self.processes.listen()
        self.local.adopt()
        self.backend: Any = Bounded(self.local)

    async def close(self) -> None:
        await self.backend.close()
        await self.processes.close()

    async def end(self, incarnation: int, rank: int) -> None:
        running = self.local._members[0, incarnation, rank]
        os.kill(running.agent, signal.SIGKILL)


@pytest.fixture
async def world(unused_tcp_port_factory: object, supervised: Supervised) -> AsyncIterator[LocalWorld]:
    # Ray's own ports are refused.
    free = (port for _ in range(100) if (port := unused_tcp_port_factory()) not in (10001, 52365))  # type: ignore[operator]
    ports = {name: next(free) for name in ("api", "dashboard", "gcs", "agent")}
    # Short path, because Ray creates sockets below it.
    with tempfile.TemporaryDirectory(prefix="d") as root:
        world = LocalWorld(Path(root), ports, supervised)
        yield world
        for _, incarnation, _ in list(world.local._members):
            await fenced(world, incarnation)
        await world.close()


class TestLocal(Conformance):
    """Conformance tests with one local member."""


async def test_every_incarnation_has_another_token_and_the_one_before_opens_nothing(world: LocalWorld) -> None:
    tokens: list[str] = []
    for incarnation in (1, 2):
        await formed(world, incarnation)
        await until(world, "the member is heard", lambda seen: all(one.status for one in live(seen)))
        assert stat.S_IMODE(world.state.token().stat().st_mode) == 0o600
        tokens.append(world.state.token().read_text())
        url = f"{world.local._members[0, incarnation, 0].url}/v1/status"
        found = []
        async with aiohttp.ClientSession() as session:
            for token in tokens:
                async with session.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
                    found.append(answer.status)
        assert found == [*[401] * (incarnation - 1), 200]
        await fenced(world, incarnation)


async def test_a_slow_network_setup_of_a_member_delays_no_reconciliation(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with too few processors the setup of a new process takes seconds."""
    monkeypatch.setattr(network, "member_command", lambda command, _: list(command))
    monkeypatch.setattr(network, "in_own_network", lambda _: False)
    monkeypatch.setattr(network, "unplug", lambda *_: None)
    local = LocalBackend(world.state, world.processes, isolated=True, changed=lambda: None)
    backend: Any = Bounded(local)
    plan = await planned(world, 1)
    await backend.ensure(world.deployment, plan)
    assert len(local._members) == len(plan.members)
    # The member ends even while it waits for its network.
    await over(lambda: backend.fence(world.deployment, 0, 1))
    await backend.close()


@pytest.mark.parametrize(("source", "given"), [(WeightsSource.HTTP, True), (WeightsSource.PATH, False)])
async def test_members_that_download_get_the_network_of_the_machine(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch, source: WeightsSource, given: bool
) -> None:
    seen = world.state.root / "seen"
    script = f'readlink "/proc/self/fd/${{{OUTSIDE_NETWORK}:-none}}" > {seen}.new; mv {seen}.new {seen}; exec sleep 60'
    monkeypatch.setattr(network, "member_command", lambda *_: ["sh", "-c", script])
    monkeypatch.setattr(network, "in_own_network", lambda _: False)
    monkeypatch.setattr(network, "unplug", lambda *_: None)
    processes = world.supervised.again()
    with open("/proc/self/ns/net", "rb") as outside:
        processes.keep(OUTSIDE, outside.fileno())
    processes.listen()
    backend = LocalBackend(world.state, processes, isolated=True, changed=lambda: None)
    plan = await planned(world, 1)
    weights = plan.weights.model_copy(update={"source": source, "origin": "http://models.example.com/"})
    await backend.ensure(world.deployment, plan.model_copy(update={"weights": weights}))
    async with asyncio.timeout(30):
        while not seen.exists():
            await asyncio.sleep(0.02)
    assert seen.read_text().strip() == (os.readlink("/proc/self/ns/net") if given else "")
    await over(lambda: backend.fence(world.deployment, 0, 1), 15.0)
    await backend.close()
    await processes.close()


async def test_the_next_loop_plans_with_the_memory_that_running_members_hold(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two groups one may die after a restart of the loop: its successor has the memory of the first plan."""
    await formed(world, 1)
    before = (await world.local.facts(world.deployment)).nodes[0].memory_bytes
    monkeypatch.setattr(local_backend, "available_memory", lambda: 7)
    card = Card(0, "GPU-0", "NVIDIA GB10", (12, 1), memory_bytes=2**30, free_bytes=7, holders=((1, 5),))
    await world.close()
    world.connect()
    world.local._cards = (card,)
    (node,) = (await world.local.facts(world.deployment)).nodes
    assert node.memory_bytes == before
    assert [(gpu.free_bytes, gpu.taken_by) for gpu in node.gpus] == [(None, "")]
    await fenced(world, 1)
    world.local._cards = ()
    (node,) = (await world.local.facts(world.deployment)).nodes
    assert node.memory_bytes == 7, "it is measured again when no member runs"


async def test_the_plan_is_of_the_checkpoint_in_its_directory(world: LocalWorld, tmp_path: Path) -> None:
    folder = make(tmp_path / "mine", drafts=Drafts.MTP)
    deployment = with_settings(world.deployment, {"model.source.path": str(folder)})
    found = (await world.backend.facts(deployment)).model
    assert found is not None
    assert (found, found.name) == (model_here(deployment.spec.model), "mine")
    assert (await world.backend.facts(world.deployment)).model is None


async def test_an_agent_that_does_not_answer_delays_no_reconciliation(world: LocalWorld) -> None:
    plan = await formed(world, 1)
    heard = (await until(world, "it answers", lambda seen: seen.members[0].heard is not None)).members[0].heard
    agent = world.local._members[0, 1, 0].agent
    suspend(agent)
    try:
        with Pauses() as pauses:
            for _ in range(3):
                (member,) = (await world.backend.observe(world.deployment, 0)).members
                assert member.status is not None, "what it said last is still known"
        assert pauses.ran < 5.0
    finally:
        os.kill(agent, signal.SIGCONT)
    assert heard is not None
    again = await until(world, "it answers again", lambda seen: (seen.members[0].heard or 0.0) > heard + 0.5)
    assert len(again.members) == len(plan.members)


async def test_the_next_loop_adopts_the_members(world: LocalWorld) -> None:
    plan = await formed(world, 1)
    await until(world, "it answers", lambda seen: seen.members[0].heard is not None)
    agents = {key: running.agent for key, running in world.local._members.items()}
    token = world.state.token().read_text()
    await world.close()
    world.connect()
    world.backend = Bounded(world.local)
    assert {key: running.agent for key, running in world.local._members.items()} == agents
    adopted = await until(world, "it answers again", lambda seen: seen.members[0].heard is not None)
    assert len(adopted.members) == len(plan.members)
    assert adopted.members[0].ended is None
    await world.backend.ensure(world.deployment, plan)
    assert world.state.token().read_text() == token
    assert {key: running.agent for key, running in world.local._members.items()} == agents
    # The exit of an agent while no loop runs is detected later, with its reason.
    await world.close()
    os.kill(agents[0, 1, 0], signal.SIGKILL)
    world.connect()
    world.backend = Bounded(world.local)
    ended = await until(world, "its end is known", lambda seen: seen.members[0].ended is not None)
    assert ended.members[0].ended == "killed by SIGKILL"


async def test_an_end_is_known_although_the_log_cannot_be_read(world: LocalWorld) -> None:
    """A directory in its place, as without a free descriptor: an end that is missed blocks the group forever."""
    await formed(world, 1)
    await until(world, "it answers", lambda seen: seen.members[0].heard is not None)
    log = world.state.member(1, 0) / "agent.log"
    log.unlink()
    log.mkdir()
    await world.end(1, 0)
    ended = await until(world, "its end is known", lambda seen: seen.members[0].ended is not None)
    assert ended.members[0].ended == "killed by SIGKILL"


async def test_a_damaged_token_key_is_replaced(world: LocalWorld) -> None:
    await formed(world, 1)
    await world.close()
    world.state.token_key.write_bytes(b"\xff\xfe")
    world.connect()
    world.backend = Bounded(world.local)
    world.state.save_token_key("key")
    assert world.state.token_key.read_text() == "key"
