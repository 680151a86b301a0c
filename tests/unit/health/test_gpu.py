"""The watch over accelerators, with a driver that answers late, not at all, or with errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.contract import Signals
from dsv4_runtime.health import gpu, vitals
from dsv4_runtime.health.gpu import GpuWatch
from dsv4_runtime.health.samples import GPU_FRESH_SECONDS, Viewer


class Driver:
    """One accelerator as `pynvml` shows it."""

    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.watts = 100_000
        self.errors: list[int] = []
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.shut = False

    def nvmlInit(self) -> None:
        self.answers.wait(30)

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, *_: object) -> None:
        return

    def nvmlDeviceGetPowerUsage(self, _: object) -> int:
        self.asked += 1
        self.answers.wait(30)
        return self.watts

    def nvmlDeviceGetUtilizationRates(self, _: object) -> Any:
        return SimpleNamespace(gpu=100)

    def nvmlDeviceGetMemoryInfo(self, _: object) -> Any:
        raise self.NVMLError("not supported")

    def nvmlEventSetWait_v2(self, *_: object) -> Any:
        if not self.errors:
            raise self.NVMLError("timeout")
        return SimpleNamespace(device=0, eventData=self.errors.pop(0))

    def nvmlDeviceGetIndex(self, device: int) -> int:
        return device


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(gpu, "pynvml", found)
    monkeypatch.setattr(gpu, "_SAMPLE_SECONDS", 0.02)
    yield found
    found.answers.set()


def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_driver_says_and_how_old_it_is(driver: Driver) -> None:
    watch = GpuWatch()
    until(lambda: watch.latest()[0])
    (seen,), age = watch.latest()
    assert (seen.power_watts, seen.utilization, seen.memory_used, seen.xid) == (100.0, 1.0, None, None)
    assert age < 5
    watch.close()
    until(lambda: driver.shut)


def test_a_driver_that_never_answers_is_waited_for_by_nobody_and_asked_once(driver: Driver) -> None:
    driver.answers.clear()
    sampler = vitals.Vitals()  # also its initialisation hangs
    begun = time.monotonic()
    for _ in range(5):
        assert sampler.sample({}, {}).gpus == ()
    driver.answers.set()
    until(lambda: sampler.sample({}, {}).gpus)
    driver.answers.clear()
    until(lambda: sampler.sample({}, {}).gpus_age > 0.3)
    asked = driver.asked
    for _ in range(5):
        time.sleep(0.05)
        sampler.sample({}, {})
        sampler.forget()
    assert driver.asked == asked
    assert sampler.sample({}, {}).gpus_age > 0.5
    assert time.monotonic() - begun < 10
    assert threading.active_count() < 5
    sampler.close()


def test_errors_of_an_engine_that_has_ended_are_forgotten(driver: Driver) -> None:
    watch = GpuWatch()
    driver.errors.append(79)
    until(lambda: watch.latest()[0] and watch.latest()[0][0].xid == 79)
    driver.errors.append(31)
    watch.forget()
    for _ in range(20):
        assert watch.latest()[0][0].xid is None
        time.sleep(0.01)
    driver.errors.append(48)
    until(lambda: watch.latest()[0][0].xid == 48)
    watch.close()


def test_what_was_asked_before_it_is_forgotten_is_forgotten_too(driver: Driver) -> None:
    watch = GpuWatch()
    until(lambda: watch.latest()[0])
    driver.answers.clear()
    driver.errors.append(79)
    until(lambda: not driver.errors)  # read, and now the thread hangs with it
    watch.forget()
    asked = driver.asked
    driver.answers.set()
    until(lambda: driver.asked > asked + 1)
    assert watch.latest()[0][0].xid is None
    watch.close()


def test_an_old_answer_is_no_sign_of_life() -> None:
    busy = gpu.GpuSignals(index=0, power_watts=400.0, utilization=1.0, xid=79)
    for age, shown in ((0.0, True), (GPU_FRESH_SECONDS, True), (GPU_FRESH_SECONDS + 0.1, None)):
        view = Viewer(1).view(Signals(time=1.0, gpus=(busy,), gpus_age=age), 1.0, None)
        assert (view.gpu_busy, view.xid) == (shown, 79)
