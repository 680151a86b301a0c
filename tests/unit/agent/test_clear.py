from __future__ import annotations

import asyncio
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.agent.cleanup import Obstacle, find_obstacle, gpu_memory, port_free, short_of_memory, with_retained
from dsv4_runtime.agent.decide.actions import ReleaseWeights
from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import Cause, GpuProcess, GpuSignals, GroupPlan, Health, Phase, Process, Signals, Verdict
from dsv4_runtime.util.keeper import VARIABLE, Client
from dsv4_testkit.documents import agent_status


def peer(*roles: str, heard: float = 20.0) -> Peer:
    processes = tuple(Process(name=role, pid=number) for number, role in enumerate(roles))
    status = agent_status(1, Phase.RESTARTING, verdict=Verdict(health=Health.STARTING), processes=processes)
    return Peer(status=status, heard=heard, asked=heard)


def gpus(*used: int | None) -> Signals:
    return Signals(time=0.0, gpus=tuple(GpuSignals(index=i, memory_used=memory) for i, memory in enumerate(used)))


@pytest.fixture
def left(make_plan: Any) -> Any:
    """Return a function that finds the obstacle to a restart, for a plan with an unused API port."""
    head = make_plan().head
    with socket.socket() as probe:
        probe.bind((head.address, 0))
        port = probe.getsockname()[1]
    head = head.model_copy(update={"ports": head.ports.model_copy(update={"api": port})})

    def ask(
        own: tuple[str, ...] = ("agent", "raylet"),
        other: Peer | None = None,
        signals: Signals | None = None,
        idle: int | None = 0,
        needed: int | None = None,
        broken: str | None = None,
    ) -> Obstacle | None:
        peers = {1: other or peer("agent", "raylet")}
        before = {} if idle is None else {1: idle}
        return find_obstacle(own, {0: None, 1: signals}, peers, before, head, 10.0, needed, broken)

    ask.head = head  # type: ignore[attr-defined]
    return ask


def test_nothing_is_left(left: Any) -> None:
    assert left() is None
    assert left(signals=gpus(None)) is None, "the driver does not tell"


def test_processes_of_either_side(left: Any) -> None:
    assert left(own=("agent", "worker")) == Obstacle(0, "its worker process still runs", Cause.PROCESS_STUCK)
    assert left(other=peer("agent", "worker")) == Obstacle(1, "its worker process still runs", Cause.PROCESS_STUCK)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_prerequisite_it_is_useless_to_wait(left: Any, rank: int) -> None:
    other = peer("agent")
    assert other.status is not None
    broken = replace(other, status=other.status.model_copy(update={"broken": "/run/m1 was removed"}))
    found = left(other=broken) if rank else left(broken="/run/m1 was removed")
    assert found == Obstacle(rank, "/run/m1 was removed", Cause.PREFLIGHT_FAILED, lasting=True)


@pytest.mark.parametrize("gone", [".", "ray/session_latest/sockets/raylet", "token", "tmp", None])
async def test_a_removed_directory_is_a_missing_prerequisite(make_plan: Any, tmp_path: Path, gone: str | None) -> None:
    root = tmp_path / "m0"
    (root / "ray/session_latest/sockets").mkdir(parents=True)
    for name in ("raylet", "plasma_store"):
        (root / "ray/session_latest/sockets" / name).touch()
    (root / "token").touch()
    context = Member(make_plan(ray_token_file=str(root / "token")), 0, root, "token").context
    assert context.broken() is None, "without a Ray node nothing is missing"
    context.record.joined = True
    assert context.broken() is None
    if gone == ".":
        shutil.rmtree(root)
    elif gone == "tmp":
        shutil.rmtree(root / gone)
    elif gone is not None:
        (root / gone).unlink()
    if gone in (None, "tmp"):
        assert context.broken() is None
        assert (root / "tmp").is_dir(), "what can be made again is"
    else:
        assert f"{root / gone} of rank 0 was removed" in str(context.broken())
        assert context.status().broken == context.broken()


def test_an_old_answer_proves_nothing(left: Any) -> None:
    assert left(other=peer("agent", heard=9.0)) == Obstacle(1, "it has not answered since")
    assert left(other=Peer()) == Obstacle(1, "it has not answered since")


def test_memory_of_accelerators(left: Any) -> None:
    assert left(signals=gpus(2**34, 2**33), idle=2**34) == Obstacle(
        1, "its accelerators still hold 8.0 GiB more than before"
    )
    assert left(signals=gpus(2**34), idle=2**34 - 2**28) is None, "the driver's own"
    assert gpu_memory(None) is None
    assert gpu_memory(gpus(5, None)) == 5


def test_the_port(left: Any) -> None:
    head = left.head
    with socket.socket() as taken:
        taken.bind((head.address, head.ports.api))
        taken.listen()
        assert not port_free(head)
        assert left() == Obstacle(0, f"port {head.ports.api} is still taken")
    assert port_free(head)


def test_a_driver_that_does_not_answer_proves_nothing(left: Any) -> None:
    old = gpus(0).model_copy(update={"gpus_age": 8.0})
    assert left(signals=old) == Obstacle(1, "the driver of its accelerators has not answered for 8 s")


def card(used: int, *processes: GpuProcess, total: int = 80 * 2**30) -> Signals:
    gpu = GpuSignals(index=3, memory_used=used, memory_total=total, processes=processes)
    return Signals(time=0.0, gpus=(gpu,))


def retaining(plan: GroupPlan) -> GroupPlan:
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"retain_weights": True})})


def test_retained_weights_are_no_memory_of_the_ended_engine(left: Any, make_plan: Any, tmp_path: Path) -> None:
    """The next engine maps the retained weights. The same memory without retained weights is an obstacle."""
    member = Member(retaining(make_plan()), 0, tmp_path, "token")
    keeper = member.context.keeper
    assert keeper is not None
    file = os.memfd_create("weights")
    try:
        Client(Path(member.context.env[VARIABLE])).offer("0.0-0", {"bytes": 60 * GIB}, [file])
        before = card(61 * GIB)
        after = with_retained(before, keeper)
        assert after.gpus[0].memory_retained == 60 * GIB
        assert left(signals=before, idle=GIB, needed=70 * GIB) is not None
        assert left(signals=after, idle=GIB, needed=70 * GIB) is None
        assert left(signals=after, idle=GIB, needed=80 * GIB) is not None
        keeper.drop("a test")
        assert with_retained(before, keeper) == before
    finally:
        os.close(file)
        keeper.close()


def test_every_member_releases_its_weights(make_plan: Any, tmp_path: Path) -> None:
    async def release() -> None:
        member = Member(retaining(make_plan()), 1, tmp_path, "token")
        keeper = member.context.keeper
        assert keeper is not None
        try:
            with open(os.memfd_create("weights"), "rb") as file:
                await asyncio.to_thread(Client(keeper.path).offer, "0.1-0", {"bytes": GIB}, [file.fileno()])
            assert keeper.held() == GIB
            member.act(ReleaseWeights(Cause.CANARY_FAILED))
            async with asyncio.timeout(60):
                while keeper.held():
                    await asyncio.sleep(0.01)
        finally:
            keeper.close()

    asyncio.run(release())


def test_without_the_setting_nothing_is_retained(make_plan: Any, tmp_path: Path) -> None:
    member = Member(make_plan(), 0, tmp_path, "token")
    assert member.context.keeper is None
    assert VARIABLE not in member.context.env


GIB = 2**30
WORKER = GpuProcess(pid=41, name="VLLM::Worker", memory=GIB // 2, own=True)
HOG = GpuProcess(pid=4711, name="python3", memory=60 * GIB)


def test_a_process_of_the_engine_that_still_has_memory_of_a_gpu_is_named(left: Any) -> None:
    """The amount of memory and the total over all processes do not matter."""
    assert left(signals=card(GIB, WORKER, HOG), idle=GIB) == Obstacle(
        1, "on GPU 3 process 41 (VLLM::Worker) holds 0.5 GiB", Cause.PROCESS_STUCK
    )


def test_processes_are_reported_on_gpus_without_memory_of_their_own(left: Any) -> None:
    """GB10 reports no memory per GPU, but processes."""
    shared = GpuSignals(index=0, processes=(WORKER,))
    assert left(signals=Signals(time=0.0, gpus=(shared,)), idle=None) == Obstacle(
        1, "on GPU 0 process 41 (VLLM::Worker) holds 0.5 GiB", Cause.PROCESS_STUCK
    )
    assert left(signals=Signals(time=0.0, gpus=(shared.model_copy(update={"processes": ()}),)), idle=None) is None


def test_memory_of_another_program_is_not_the_engines(left: Any) -> None:
    idle = gpu_memory(card(GIB))
    assert idle is not None
    assert left(signals=card(61 * GIB, HOG), idle=idle) is None
    assert left(signals=card(61 * GIB, HOG), idle=idle, needed=10 * GIB) is None, "the engine fits beside it"


def test_another_program_that_leaves_no_room_is_the_cause_and_named(left: Any) -> None:
    assert left(signals=card(61 * GIB, HOG), idle=GIB, needed=24 * GIB) == Obstacle(
        1,
        "GPU 3 has 19.0 GiB of free memory, and the engine needs 24.0 GiB; process 4711 (python3) holds 60.0 GiB",
        Cause.OUT_OF_MEMORY_GPU,
    )
    unseen = left(signals=card(61 * GIB), idle=GIB, needed=24 * GIB)
    assert unseen.cause is Cause.OUT_OF_MEMORY_GPU
    assert unseen.description.endswith("whose the rest is cannot be seen from this member")
    assert "a process outside this member holds 60.0 GiB" in (
        short_of_memory(card(61 * GIB, GpuProcess(pid=0, memory=60 * GIB)).gpus, 24 * GIB) or ""
    )
