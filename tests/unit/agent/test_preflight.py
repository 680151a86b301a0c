from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.agent import start
from dsv4_runtime.agent.processes import reap_orphans
from dsv4_runtime.agent.start import (
    PreflightError,
    check_copies,
    check_gpus,
    check_ports,
    check_resources,
    wait_for_address,
)
from dsv4_runtime.contract import Cause, Expectations, GroupPlan
from dsv4_runtime.health import gpu
from dsv4_testkit.fake_cuda import build_cuda
from dsv4_testkit.fake_nvml import GIB, FakeNvml, Gpu
from dsv4_testkit.waiting import free_ports


async def test_an_address_without_an_interface_is_refused(make_plan: Any) -> None:
    await wait_for_address("127.0.0.1", 0.1)
    with pytest.raises(PreflightError, match=r"no interface has the member's address 192\.0\.2\.1"):
        await wait_for_address("192.0.2.1", 0.1)


def test_a_port_that_is_taken(make_plan: Any) -> None:
    # The usual ports may be those of another agent on this machine.
    plan = make_plan()
    names = ("agent", "gcs", "dashboard", "api")
    ports = plan.head.ports.model_copy(update=dict(zip(names, free_ports(4), strict=True)))
    plan = plan.model_copy(update={"members": (plan.head.model_copy(update={"ports": ports}), *plan.members[1:])})
    check_ports(plan, 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.api))
        taken.listen()
        said = rf"the api port {ports.api} of 127\.0\.0\.1 cannot be used"
        with pytest.raises(PreflightError, match=said) as caught:
            check_ports(plan, 0)
    assert caught.value.cause is Cause.PORT_CONFLICT


@pytest.mark.parametrize(
    ("field", "words"), [("memory_bytes", "GiB of memory are free"), ("shm_bytes", "/dev/shm has")]
)
def test_too_little_of_something(make_plan: Any, field: str, words: str) -> None:
    want = {"world_size": 2, "memory_bytes": 0, "shm_bytes": 0, "ready_seconds": 1, field: 2**60}
    with pytest.raises(PreflightError, match=words):
        check_resources(make_plan(expectations=Expectations(**want)))


def on_gpus(make_plan: Any, *uuids: str) -> GroupPlan:
    """Return a plan in which rank 0 has these GPUs and needs 24 GiB on each."""
    plan: GroupPlan = make_plan()
    head = plan.head.model_copy(update={"gpus": uuids or None, "devices": max(len(uuids), 1)})
    wants = plan.expectations.model_copy(update={"gpu_bytes": 24 * GIB})
    return plan.model_copy(update={"members": (head, *plan.members[1:]), "expectations": wants})


async def refusal(plan: GroupPlan) -> tuple[str, Cause]:
    with pytest.raises(PreflightError) as refused:
        await check_gpus(plan, 0)
    return str(refused.value), refused.value.cause


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml(Gpu(uuid="GPU-a"), Gpu(uuid="GPU-b"))
    monkeypatch.setattr(gpu, "pynvml", found)
    monkeypatch.setattr(start, "_GPU_SECONDS", 0.2)
    monkeypatch.setattr(start, "_GPU_PAUSE_SECONDS", 0.05)
    return found


async def test_gpus_that_are_there_and_free(make_plan: Any, driver: FakeNvml) -> None:
    await check_gpus(on_gpus(make_plan, "GPU-a", "GPU-b"), 0)
    driver.gpus[1].processes = {2**22 + 1: 70 * GIB}
    await check_gpus(on_gpus(make_plan, "GPU-a"), 0)


@pytest.mark.parametrize("fault", ["cuMemcpyPeer:1:lost", "cuInit:9:1"])
async def test_copies_between_the_gpus_of_a_pod(
    make_plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """If the plan names the GPUs, their copies were tested before planning."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_cuda(tmp_path)))
    monkeypatch.setenv("FAKE_FAULT", fault)
    plan = on_gpus(make_plan)
    head = plan.head.model_copy(update={"devices": 2, "node": "rtx-1"})

    async def refused(**values: object) -> PreflightError | None:
        changed = plan.model_copy(update={"members": (head.model_copy(update=values), *plan.members[1:])})
        try:
            await check_copies(changed, 0)
        except PreflightError as error:
            return error
        return None

    found = await refused()
    assert (found is not None) is ("lost" in fault)
    if found is not None:
        assert found.cause is Cause.PEER_TO_PEER_HANG
        assert "wrong bytes" in str(found)
        assert "kubectl annotate node rtx-1 dsv4.dev/unsafe-peer-copies='a copy by" in str(found)
    assert await refused(devices=1) is None
    assert await refused(gpus=("GPU-a", "GPU-b")) is None
    assert await refused(env={"NCCL_P2P_DISABLE": "1"}) is None


async def test_the_signal_that_ended_a_test_of_copies_is_reported(
    make_plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent collects ended children meanwhile."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_cuda(tmp_path)))
    monkeypatch.setenv("FAKE_FAULT", "cuMemcpyPeer:1:crash")
    plan = on_gpus(make_plan)
    head = plan.head.model_copy(update={"devices": 2})

    async def collect() -> None:
        while True:
            reap_orphans(frozenset())
            await asyncio.sleep(0.001)

    collecting = asyncio.create_task(collect())
    try:
        with pytest.raises(PreflightError, match=rf"ended its process \(signal {signal.SIGABRT}\)"):
            await check_copies(plan.model_copy(update={"members": (head, *plan.members[1:])}), 0)
    finally:
        collecting.cancel()


async def test_the_check_waits_for_the_memory_of_an_engine_that_just_ended(make_plan: Any, driver: FakeNvml) -> None:
    driver.gpus[0].processes = {2**22 + 1: 70 * GIB}
    asyncio.get_running_loop().call_later(0.1, driver.gpus[0].processes.clear)
    await check_gpus(on_gpus(make_plan, "GPU-a"), 0)


async def test_a_program_that_leaves_no_room_is_named(make_plan: Any, driver: FakeNvml) -> None:
    driver.gpus[1].processes = {2**22 + 1: 70 * GIB}
    assert await refusal(on_gpus(make_plan, "GPU-a", "GPU-b")) == (
        "GPU 1 has 9.1 GiB of free memory, and the engine needs 24.0 GiB; process 4194305 holds 70.0 GiB; end that "
        "program, or lower gpuMemoryUtilization",
        Cause.OUT_OF_MEMORY_GPU,
    )


async def test_gpus_or_drivers_that_are_not_there(make_plan: Any, driver: FakeNvml) -> None:
    plan = on_gpus(make_plan, "GPU-a", "GPU-c")
    assert (await refusal(plan))[0].startswith("1 of the 2 GPUs that the plan gives to this member are there")
    driver.gpus[1].lost = True
    assert await refusal(plan) == (
        "GPU 1: GPU is lost; search `dmesg` for the XID, and reset the machine",
        Cause.XID_ERROR,
    )
    driver.missing = "NVML Shared Library Not Found"
    said, cause = await refusal(plan)
    assert said.startswith("no NVIDIA driver answers (NVML Shared Library Not Found); install NVIDIA's driver")
    assert cause is Cause.PREFLIGHT_FAILED


async def test_a_driver_that_does_not_answer(make_plan: Any, driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_DRIVER_SECONDS", 0.1)
    driver.answers.clear()
    said, cause = await refusal(on_gpus(make_plan, "GPU-a"))
    assert (said.startswith("the NVIDIA driver has not answered for 0 s"), cause) == (True, Cause.XID_ERROR)
    driver.answers.set()
