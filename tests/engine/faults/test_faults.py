"""CI's choice of the fault suite: every way to die that is more than a killed process, and two that are no deaths.

`test_main_job.py` kills processes; `benchmarks/faults.py` runs the whole table. One deployment, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faultlab import report
from faultlab.judge import inflict
from faultlab.load import Shape
from faultlab.system import DSV4
from faultlab.table import BOUND, BY_NAME, Fault, Kind

pytestmark = pytest.mark.engine

BUSY = 2.0
"""The bounds of the table are p95 of an idle machine; a runner that does other work gets this much more."""
SEED = 1

CHOICE = (
    "exception in a step of rank 1",
    "hang in a step of rank 1",
    "SIGSTOP worker of rank 1",
    "all frames of member 1 lost for 8 s",
    "logits of rank 1 are not numbers",
    "kill -9 agent of rank 1",
    "link of member 1 down",
)


@pytest.fixture(scope="module")
def system() -> Iterator[DSV4]:
    found = DSV4()
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("fault", [BY_NAME[name] for name in CHOICE], ids=lambda fault: fault.name)
def test_it_is_noticed_named_and_repaired(system: DSV4, fault: Fault) -> None:
    result = inflict(system, fault, 1, SEED, Shape())
    print(f"\n{fault.name}: {report.line(result)}")
    assert result.false_restarts == 0
    # A stream that had begun may end with an error event; nobody is left without a word, or without an answer.
    assert (result.failed, result.silent) == (0, 0), result.errors
    if fault.kind is Kind.NONE:
        assert result.verdict == "Healthy"
        return
    assert not result.missed
    assert result.detected is not None
    assert result.detected <= BUSY * BOUND[fault.kind]
    assert result.cause in fault.causes, result.message
    assert fault.rank is None or result.culprit == fault.rank
    assert result.level == fault.level
    assert result.recovered is not None
