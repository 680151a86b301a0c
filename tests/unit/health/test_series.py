"""Series recorded by a head with the nano engine on two cores, judged again sample by sample.

The signals of a driver were recorded on an H100; here they are those of the accelerator of rank 1 of a loaded group.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dsv4_runtime.contract import Cause, GpuSignals, Health, HealthPolicy, Signals
from dsv4_runtime.health.rules import Judgement, judge
from dsv4_runtime.health.samples import FATAL_XIDS, Sample, Viewer

FOLDER = Path(__file__).parent / "series"
SERIES = sorted(FOLDER.glob("*.json"))
TOLD = 31
"""The XID in the recording: a fault of a program, which only ends that program."""
SAMPLES = TypeAdapter(list[Sample])


def judged(samples: list[Sample]) -> list[Judgement]:
    return [judge(samples[: end + 1], HealthPolicy(), samples[end].time) for end in range(len(samples))]


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_a_recorded_series(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text())
    expected, samples = document["expected"], SAMPLES.validate_python(document["samples"])
    verdicts = judged(samples)
    before, last = verdicts[:-1], verdicts[-1]
    assert [verdict for verdict in before if verdict.health is Health.DEAD] == [], "too early"
    if expected["health"] == "Dead":
        assert (last.health, last.cause, last.culprit_rank) == (
            Health.DEAD,
            expected["cause"],
            expected["culprit"],
        )
    else:
        assert last.health is not Health.DEAD


def test_there_are_series() -> None:
    assert len(SERIES) >= 4


def beside_load(looks: list[tuple[GpuSignals, ...]]) -> list[Sample]:
    """Return the group under load with these signals, half a second apart, for the accelerator of rank 1."""
    samples = SAMPLES.validate_python(json.loads((FOLDER / "load.json").read_text())["samples"])
    viewer, found = Viewer(1), []
    for sample, gpus in zip(samples, looks, strict=False):
        seen = viewer.view(Signals(time=sample.time, gpus=gpus), 0.0, None)
        head, worker = sample.ranks
        worker = dataclasses.replace(worker, xid=seen.xid, gpu_busy=seen.gpu_busy)
        found.append(dataclasses.replace(sample, ranks=(head, worker)))
    return found


@pytest.mark.parametrize("xid", [TOLD, *sorted(FATAL_XIDS)])
def test_recorded_driver_errors_are_judged_by_their_number(xid: int) -> None:
    """The recorded error, and the same series with an error that ends every program, which was not recorded."""
    text = (FOLDER / "gpu" / "xid-31-of-an-h100.json").read_text()
    looks = [TypeAdapter(tuple[GpuSignals, ...]).validate_python(look["gpus"]) for look in json.loads(text)["looks"]]
    at = next(number for number, (gpu,) in enumerate(looks) if gpu.xid == TOLD)
    changed = [tuple(gpu.model_copy(update={"xid": gpu.xid and xid}) for gpu in gpus) for gpus in looks]
    samples = beside_load(changed)
    verdicts = judged(samples)
    assert [verdict for verdict in verdicts[:at] if verdict.health is Health.DEAD] == []
    assert len(samples) > at + 5
    for verdict in verdicts[at:]:
        if xid == TOLD:
            assert verdict.health is not Health.DEAD
        else:
            assert (verdict.health, verdict.cause, verdict.culprit_rank) == (Health.DEAD, Cause.XID_ERROR, 1)
            assert f"XID {xid}" in verdict.message
