"""Subset of the fault suite for CI: one case per recovery level and per kind of failure other than a killed process.

`test_main_job.py` kills the other processes; `benchmarks/faults.py` runs the whole table. One deployment, in order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_testkit.faults import groups, report
from dsv4_testkit.faults.actions import Frozen, OutOfMemory
from dsv4_testkit.faults.judge import inflict
from dsv4_testkit.faults.load import Shape
from dsv4_testkit.faults.matrix import BY_NAME
from dsv4_testkit.faults.system import DSV4
from dsv4_testkit.faults.table import BOUND, Fault, Kind

pytestmark = pytest.mark.engine

BUSY = 2.0
"""The bounds of the table are p95 of an idle machine; this factor allows for other work of a runner."""
SEED = 1
LOAD = Shape(clients=2, tokens=(4, 12))
"""Half of the table's load, so that two processors have time for the engine."""

CHOICE = (
    "all frames of member 1 lost for 8 s",
    "exception in a step of rank 0",
    "hang in a step of rank 1",
    "SIGSTOP worker of rank 1",
    "logits of rank 1 are not numbers",
    "member 1 out of memory",
    "link of member 1 down",
    "64 KiB of zeros in a weight file, at the next start",
    "SIGSTOP standby server, then kill -9 EngineCore",
    "kill -9 dashboard",
    "kill -9 waiting worker",
    "kill -9 gateway and kill -9 EngineCore",
    "packets from member 0 to member 1 lost",
    "kill -9 runtime-env agent of rank 1",
    "SIGSTOP API process of a start",
    "GCS frozen",
    "directory of member 1 removed, then kill -9 EngineCore",
)


@pytest.fixture(scope="module")
def deaths(request: pytest.FixtureRequest) -> int:
    """Return the number of restarts that the faults of this run use."""
    chosen = [
        item.callspec.params["fault"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return sum(1 + fault.nth for fault in chosen if fault.kind not in (Kind.NONE, Kind.OWN))


@pytest.fixture(scope="module")
def system(deaths: int, weights: Path) -> Iterator[DSV4]:
    # The budget is exactly the number of restarts that the chosen faults use.
    found = DSV4(weights, restarts=deaths, window="1h")
    try:
        found.start()
        yield found
    finally:
        found.close()


# Hangs that are detected by the same rule as another one, and slow faults whose parts have unit tests.
LONG = {
    "packets from member 0 to member 1 lost",
    "hang in a step of rank 1",
    "kill -9 dashboard",
    "kill -9 waiting worker",
    "kill -9 runtime-env agent of rank 1",
    "SIGSTOP API process of a start",
    "directory of member 1 removed, then kill -9 EngineCore",
}


_LACKS = groups.lacks()


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    found = [pytest.mark.long] if name in LONG else []
    if _LACKS is not None and isinstance(BY_NAME[name].action, (Frozen, OutOfMemory)):
        found.append(pytest.mark.skip(reason=_LACKS))
    return tuple(found)


@pytest.mark.parametrize("fault", [pytest.param(BY_NAME[name], id=name, marks=marks(name)) for name in CHOICE])
def test_every_fault_is_detected_attributed_and_repaired(system: DSV4, fault: Fault) -> None:
    result = inflict(system, fault, 1, SEED, LOAD)
    print(f"\n{fault.name}: {report.line(result)}")
    assert result.false_restarts == 0
    # A stream that had begun may end with an error event; every other request gets a response.
    assert (result.failed, result.silent) == (0, 0), result.errors
    if fault.kind is Kind.NONE:
        assert result.verdict == "Healthy"
        return
    if fault.kind is Kind.OWN:
        assert result.verdict == "Replaced"
        assert result.replaced is not None
        assert result.replaced <= BUSY * BOUND[fault.kind]
        return
    assert not result.missed
    assert result.detected is not None
    assert result.detected <= BUSY * BOUND[fault.kind]
    assert result.cause in fault.causes, result.message
    assert fault.rank is None or result.culprit == fault.rank
    assert result.level == fault.level
    assert result.recovered is not None
    assert result.disorder == ""


# `test_main_job.py` has another test of an exhausted budget.
@pytest.mark.long
def test_an_exhausted_budget_ends_the_deployment_with_a_condition(system: DSV4, deaths: int) -> None:
    system.ready()
    deployment, struck = system.deployment, time.time()
    assert deployment is not None
    os.kill(system.pid(0, "api"), signal.SIGTERM)
    status = deployment.wait("Failed", since=struck, timeout=60)
    last = status["groups"][0]["lastFailure"]
    assert (last["cause"], last["culpritRank"], last["level"]) == ("EngineExited", 0, 3)
    exhausted = next(found for found in status["conditions"] if found["type"] == "RecoveryExhausted")
    assert exhausted["status"] == "True"
    assert f"used up its {deaths} restarts" in exhausted["message"]
