from __future__ import annotations

import pytest

from dsv4_runtime.contract import GpuSignals, ProcessSignals, Signals
from dsv4_runtime.health.samples import Pace, ProcessView, Viewer, steps_and_requests

METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="a } b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="nano"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="nano",reason="capacity"} 100.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="nano"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="nano"} 1.2e+02
vllm:iteration_tokens_total_sum{engine="0",model_name="nano"} 999.0
"""


def signals(time: float, cpu: float, pid: int = 7, *, below: float = 0.0, **changes: object) -> Signals:
    process = ProcessSignals(name="worker", pid=pid, state="S", cpu_seconds=cpu, below_seconds=below)
    return Signals.model_validate({"time": time, "processes": (process,), **changes})


def test_steps_and_requests_of_all_engines() -> None:
    assert steps_and_requests(METRICS) == (120, 7)


@pytest.mark.parametrize("text", [b"", b"vllm:num_requests_running{} 1.0\n", METRICS.replace(b"_count", b"_kount")])
def test_without_the_numbers_there_are_none(text: bytes) -> None:
    assert steps_and_requests(text) is None


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"many", b"1e999"])
def test_values_that_are_no_numbers_are_none(value: bytes) -> None:
    assert steps_and_requests(METRICS.replace(b" 4.0", b" " + value)) is None


def test_shares_refer_to_the_time_between_two_samples() -> None:
    viewer = Viewer(1)
    assert viewer.view(signals(10.0, 5.0), 0.0, None).processes == (ProcessView("worker", "S", None),)
    assert viewer.view(signals(10.5, 5.4), 0.0, None).processes[0].share == pytest.approx(0.8)
    assert viewer.view(signals(10.5, 5.4), 0.0, None).processes[0].share == pytest.approx(0.8), "the same look again"
    assert viewer.view(None, 0.0, None).processes[0].share == pytest.approx(0.8), "no news"
    assert viewer.view(signals(11.5, 5.4), 0.0, None).processes[0].share == 0.0
    assert viewer.view(signals(12.5, 0.1, pid=8), 0.0, None).processes[0].share is None, "another process"


def test_a_compiler_that_ended_does_not_make_a_share_negative() -> None:
    viewer = Viewer(1)
    viewer.view(signals(10.0, 50.0, below=40.0), 0.0, None)
    (process,) = viewer.view(signals(11.0, 20.0, below=10.0), 0.0, None).processes
    assert (process.share, process.below) == (0.0, 0.0)


def test_the_share_of_the_processes_below_is_a_part() -> None:
    viewer = Viewer(1)
    assert viewer.view(signals(10.0, 50.0, below=40.0), 0.0, None).processes[0].below is None
    (process,) = viewer.view(signals(12.0, 53.0, below=41.0), 0.0, None).processes
    assert (process.share, process.below) == (1.5, 0.5)


def test_power_above_that_of_an_idle_gpu_is_work_and_utilisation_is_not() -> None:
    """Power and utilisation of an H200 with an open context, as measured."""
    viewer, time = Viewer(0), 0.0

    def busy(watts: float | None, utilization: float | None) -> bool | None:
        nonlocal time
        time += 1.0
        gpu = GpuSignals(index=0, power_watts=watts, utilization=utilization)
        return viewer.view(signals(time, 0.0, gpus=(gpu,)), 0.0, None).gpu_busy

    assert busy(127.4, 1.0) is True, "nothing is known of idle yet"
    assert busy(126.1, 0.0) is None, "no kernel runs, so the processors have to tell"
    assert busy(688.0, 0.98) is True
    assert busy(443.0, 0.74) is True
    assert busy(142.1, 1.0) is False, "a kernel that only waits"
    assert busy(127.3, 1.0) is False
    assert busy(None, None) is None
    xid = signals(99.0, 0.0, gpus=(GpuSignals(index=0, xid=79),))
    assert viewer.view(xid, 0.0, None).xid == 79
    two = signals(100.0, 0.0, gpus=(GpuSignals(index=0, xid=13), GpuSignals(index=1, xid=79)))
    assert viewer.view(two, 0.0, None).xid == 79, "the fatal one of several"


def test_a_driver_without_utilisation_is_judged_by_power() -> None:
    viewer = Viewer(0)
    told = [
        viewer.view(signals(float(i), 0.0, gpus=(GpuSignals(index=0, power_watts=watts),)), 0.0, None).gpu_busy
        for i, watts in enumerate([40.0, 12.0, 14.0, 40.0, 12.5])
    ]
    assert told == [False, False, False, True, False]


def test_pace_is_that_of_slow_steps_and_not_of_the_slowest() -> None:
    pace = Pace()
    assert pace.slow is None
    for _ in range(30):
        pace.add(0.2)
    pace.add(70.0)
    assert pace.slow == 0.2
    for _ in range(5):
        pace.add(3.0)
    assert pace.slow == 3.0
