"""The watch over accelerators, with a driver that answers late, not at all, or with errors."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.contract import GpuProcess, Signals
from dsv4_runtime.health import gpu, vitals
from dsv4_runtime.health.gpu import DriverSilentError, Gpus, GpuWatch, within_seconds
from dsv4_runtime.health.samples import GPU_FRESH_SECONDS, Viewer
from dsv4_testkit.fake_nvml import GIB, FakeNvml, Gpu
from dsv4_testkit.waiting import wait_until


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    found = FakeNvml(Gpu(total=None))
    monkeypatch.setattr(gpu, "pynvml", found)
    monkeypatch.setattr(gpu, "_SAMPLE_SECONDS", 0.02)
    yield found
    found.answers.set()


def test_what_the_driver_says_and_how_old_it_is(driver: FakeNvml) -> None:
    watch = GpuWatch()
    wait_until(lambda: watch.latest()[0])
    (seen,), age = watch.latest()
    assert (seen.power_watts, seen.utilization, seen.memory_used, seen.xid) == (100.0, 1.0, None, None)
    assert age < 5
    watch.close()
    wait_until(lambda: driver.shut)


def test_a_driver_that_never_answers_is_waited_for_by_nobody_and_asked_once(driver: FakeNvml) -> None:
    # Tests before this one may have left idle threads of a pool.
    before = threading.active_count()
    driver.answers.clear()
    sampler = vitals.Vitals()  # also its initialisation hangs
    begun = time.monotonic()
    for _ in range(5):
        assert sampler.sample({}, {}).gpus == ()
    driver.answers.set()
    wait_until(lambda: sampler.sample({}, {}).gpus)
    driver.answers.clear()
    wait_until(lambda: sampler.sample({}, {}).gpus_age > 0.3)
    asked = driver.asked
    for _ in range(5):
        time.sleep(0.05)
        sampler.sample({}, {})
        sampler.forget()
    assert driver.asked == asked
    assert sampler.sample({}, {}).gpus_age > 0.5
    assert time.monotonic() - begun < 10
    assert threading.active_count() < before + 4
    sampler.close()


def test_errors_of_an_engine_that_has_ended_are_forgotten(driver: FakeNvml) -> None:
    watch = GpuWatch()
    driver.errors.append((0, 79))
    wait_until(lambda: watch.latest()[0] and watch.latest()[0][0].xid == 79)
    driver.errors.append((0, 31))
    watch.forget()
    for _ in range(20):
        assert watch.latest()[0][0].xid is None
        time.sleep(0.01)
    driver.errors.append((0, 48))
    wait_until(lambda: watch.latest()[0][0].xid == 48)
    watch.close()


def test_what_was_asked_before_it_is_forgotten_is_forgotten_too(driver: FakeNvml) -> None:
    watch = GpuWatch()
    wait_until(lambda: watch.latest()[0])
    driver.answers.clear()
    driver.errors.append((0, 79))
    wait_until(lambda: not driver.errors)  # read, and now the thread hangs with it
    watch.forget()
    asked = driver.asked
    driver.answers.set()
    wait_until(lambda: driver.asked > asked + 1)
    assert watch.latest()[0][0].xid is None
    watch.close()


def test_an_old_answer_is_no_sign_of_life() -> None:
    busy = gpu.GpuSignals(index=0, power_watts=400.0, utilization=1.0, xid=79)
    for age, shown in ((0.0, True), (GPU_FRESH_SECONDS, True), (GPU_FRESH_SECONDS + 0.1, None)):
        view = Viewer(1).view(Signals(time=1.0, gpus=(busy,), gpus_age=age), 1.0, None)
        assert (view.gpu_busy, view.xid) == (shown, 79)


def test_only_the_members_own_gpus_are_watched(driver: FakeNvml) -> None:
    driver.gpus = [Gpu(uuid=f"GPU-{index}") for index in range(4)]
    driver.errors = [(1, 13), (3, 79)]
    mine = Gpus(("GPU-1", "GPU-3"))
    assert [(gpu.index, gpu.xid) for gpu in mine.sample()] == [(1, 13), (3, 79)]
    mine.close()


def test_who_has_memory_and_whether_the_agent_started_it(driver: FakeNvml) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        # The kernel closes what ends `Popen`'s wait just before it renames the process.
        wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
        driver.gpus = [Gpu(processes={child.pid: GIB, os.getppid(): 2 * GIB, 2**22 + 1: 3 * GIB})]
        gpus = Gpus()
        (seen,) = gpus.sample()
        mine, other, unseen = seen.processes
        assert mine == GpuProcess(pid=child.pid, name="sleep", memory=GIB, own=True)
        assert (other.own, other.memory) == (False, 2 * GIB)
        assert unseen == GpuProcess(pid=2**22 + 1, name="", memory=3 * GIB, own=False)
        assert (seen.memory_total, seen.memory_used) == (81559 * 2**20, 6 * GIB + 600 * 2**20)
        gpus.close()
    finally:
        child.kill()
        child.wait()


def test_a_gpu_that_fell_off_the_bus_is_named(driver: FakeNvml) -> None:
    driver.gpus = [Gpu(), Gpu(lost=True)]
    gpus = Gpus()
    assert (len(gpus.sample()), gpus.silent, gpus.problem) == (1, {"GPU 1": "GPU is lost"}, "")


def test_an_answer_is_waited_for_within_a_bound(driver: FakeNvml) -> None:
    assert within_seconds(5.0, lambda: 7) == 7
    driver.answers.clear()
    with pytest.raises(DriverSilentError, match="the NVIDIA driver has not answered for 0 s"):
        within_seconds(0.05, Gpus)
