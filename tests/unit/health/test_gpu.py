"""Monitoring of accelerators with a driver that responds late, never, or with errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.contract import GpuProcess, GpuSignals, Signals
from dsv4_runtime.health import gpu, vitals
from dsv4_runtime.health.gpu import Gpus, GpuWatch, Throttling
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


def test_values_of_the_driver_have_an_age(driver: FakeNvml) -> None:
    watch = GpuWatch()
    wait_until(lambda: watch.latest()[0])
    (seen,), age = watch.latest()
    assert (seen.power_watts, seen.utilization, seen.memory_used, seen.xid) == (100.0, 1.0, None, None)
    assert age < 60
    watch.close()
    wait_until(lambda: driver.shut)


def test_a_driver_that_never_answers_blocks_no_caller_and_gets_one_request(driver: FakeNvml) -> None:
    # Earlier tests may have left idle threads of a pool.
    before = set(threading.enumerate())
    driver.answers.clear()
    sampler = vitals.Vitals()  # its initialisation hangs too
    begun = time.monotonic()
    for _ in range(5):
        assert sampler.sample({}, {}).gpus == ()
    driver.answers.set()
    wait_until(lambda: sampler.sample({}, {}).gpus)
    driver.answers.clear()
    # An old sample alone may be due to a thread that runs late.
    wait_until(lambda: driver.blocked == 1)
    wait_until(lambda: sampler.sample({}, {}).gpus_age > 0.3)
    asked = driver.asked
    for _ in range(5):
        time.sleep(0.05)
        sampler.sample({}, {})
        sampler.forget()
    assert driver.asked == asked
    assert sampler.sample({}, {}).gpus_age > 0.5
    assert time.monotonic() - begun < 60
    assert len(set(threading.enumerate()) - before) < 4
    sampler.close()


def test_errors_of_an_ended_engine_are_dropped(driver: FakeNvml) -> None:
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


def test_errors_read_before_a_reset_are_dropped_too(driver: FakeNvml) -> None:
    watch = GpuWatch()
    wait_until(lambda: watch.latest()[0])
    driver.answers.clear()
    driver.errors.append((0, 79))
    wait_until(lambda: not driver.errors)  # the error was read, and the thread now hangs
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


def test_processes_with_gpu_memory_are_listed_with_their_origin(driver: FakeNvml) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        # The kernel closes the descriptor that ends `Popen`'s wait just before it renames the process.
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


def signals(**values: Any) -> GpuSignals:
    """Return the signals of a loaded GPU without anything unusual."""
    usual = {"utilization": 1.0, "sm_mhz": 2400, "sm_max_mhz": 3003, "celsius": 60}
    limits = {"power_watts": 90.0, "power_limit_watts": 600.0, "power_default_watts": 600.0}
    return GpuSignals(**{"index": 0, **usual, **limits, **values})


ADVICE = "; if that stays, disconnect the machine's power supply for a minute"
SLOW = {"sm_mhz": 799, "power_watts": 19.5}
HOT = {"celsius": 95}
CAPPED = {"power_limit_watts": 300.0, "slowed_by": ("power cap",)}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (SLOW, f"GPU 0 runs at 799 of 3003 MHz under load, 20 W, 60 °C{ADVICE}"),
        (
            {**SLOW, "slowed_by": ("power brake",)},
            "GPU 0 runs at 799 of 3003 MHz under load, 20 W, 60 °C (power brake)",
        ),
        (HOT, "GPU 0 has 95 °C, 90 W; check its cooling"),
        (CAPPED, "GPU 0 is slowed by its power limit of 300 of 600 W (nvidia-smi --power-limit)"),
    ],
)
def test_a_slow_gpu_is_a_warning_after_a_minute_and_until_a_minute_after_its_end(
    values: dict[str, Any], text: str
) -> None:
    throttling, bound = Throttling(), gpu.SUSTAINED_SECONDS
    assert throttling.update([signals(**values)], 0.0) == ()
    assert throttling.update([signals(**values)], bound - 0.1) == ()
    assert throttling.update([signals(**values)], bound) == (text,)
    # The warning keeps its text while the values change.
    assert throttling.update([signals(**{**values, "power_watts": 22.0})], bound + 1) == (text,)
    assert throttling.update([signals()], 200.0) == (text,)
    assert throttling.update([signals()], 200.0 + bound - 0.1) == (text,)
    assert throttling.update([signals()], 200.0 + bound) == ()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**SLOW, "utilization": 0.1},
        {**SLOW, "utilization": None},
        {"sm_mhz": None, "sm_max_mhz": None, "celsius": None, "power_watts": None},
        {"sm_mhz": 1600},
        {"celsius": 89},
        {"slowed_by": ("power cap",)},
        {"power_limit_watts": 300.0},
        {**CAPPED, "power_default_watts": None},
    ],
)
def test_an_idle_or_usual_gpu_and_missing_values_are_no_warning(values: dict[str, Any]) -> None:
    throttling = Throttling()
    assert all(throttling.update([signals(**values)], float(second)) == () for second in range(0, 600, 10))


@pytest.mark.parametrize("seed", range(50))
def test_warnings_need_a_minute_without_interruption(seed: int) -> None:
    """Random series of states of two GPUs: a warning begins and ends only after a minute of one state."""
    draw, throttling, now = random.Random(seed), Throttling(), 0.0
    held = dict.fromkeys((0, 1), (False, 0.0))
    warned = dict.fromkeys((0, 1), False)
    for _ in range(400):
        now += draw.choice([0.5, 5.0, 20.0])
        for index, (slow, since) in held.items():
            if draw.random() < 0.1:
                slow, since = not slow, now
            held[index] = slow, since
            if now - since >= gpu.SUSTAINED_SECONDS:
                warned[index] = slow
        samples = [signals(index=index, **(SLOW if slow else {})) for index, (slow, _) in held.items()]
        found = throttling.update(samples, now)
        assert {index for index in warned if any(f"GPU {index} " in text for text in found)} == {
            index for index, present in warned.items() if present
        }


def test_clock_power_and_temperature_are_read_from_the_driver(driver: FakeNvml) -> None:
    driver.gpus = [Gpu(clock=799, max_clock=3003, celsius=95, limit=300.0, default_limit=600.0, slowed_by=0x4 | 0x80)]
    (seen,) = Gpus().sample()
    assert (seen.sm_mhz, seen.sm_max_mhz, seen.celsius) == (799, 3003, 95)
    assert (seen.power_limit_watts, seen.power_default_watts) == (300.0, 600.0)
    assert seen.slowed_by == ("power cap", "power brake")
    driver.gpus = [Gpu(clock=None, total=None)]
    (seen,) = Gpus().sample()
    assert (seen.sm_mhz, seen.slowed_by) == (None, ())


def test_a_member_reports_its_slow_gpu_and_old_samples_count_for_nothing(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SUSTAINED_SECONDS", 0.2)
    driver.gpus = [Gpu(clock=799, max_clock=3003)]
    sampler = vitals.Vitals()
    wait_until(lambda: bool(sampler.sample({}, {})) and sampler.warnings)
    assert sampler.warnings == (f"GPU 0 runs at 799 of 3003 MHz under load, 100 W, 60 °C{ADVICE}",)
    driver.gpus[0].clock = 3003
    monkeypatch.setattr(vitals, "GPU_FRESH_SECONDS", -1.0)
    for _ in range(10):
        time.sleep(0.05)
        sampler.sample({}, {})
    assert sampler.warnings
    sampler.close()


def test_a_holder_with_a_name_that_is_no_text_is_listed() -> None:
    """The kernel cuts names after 15 bytes, also within a character: the thread of the samples must not end."""
    script = "open('/proc/self/comm', 'wb').write('größe-der-moänge'.encode()); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{holder.pid}/comm").read_text()
        found = gpu._process(SimpleNamespace(pid=holder.pid, usedGpuMemory=1))
        assert found.name.startswith("größe-der-mo")
    finally:
        holder.kill()
        holder.communicate()
