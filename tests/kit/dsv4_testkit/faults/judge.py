"""One run of one fault: cause it under load at a random moment, observe the recovery, assess the run."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsv4_testkit.faults.load import Load, Outcome, Request, Shape, counts, outage
from dsv4_testkit.faults.system import MODEL, System, Verdict, increase
from dsv4_testkit.faults.table import Fault, Kind

_TICK, _SHORT_TICK = 0.2, 0.05
_SURVIVED = (Kind.NONE, Kind.OWN)
_FLOWING_SECONDS = 120.0
_RECOVERY_SECONDS = 240.0
_AFTER_SECONDS = 15.0
"""Time for which a fault without a death is observed beyond its end."""


@dataclass(frozen=True)
class Result:
    """Result of one fault. Seconds count from the fault; None: the event did not occur, or is not reported."""

    system: str
    fault: str
    run: int
    kind: str
    moment: float
    """Seconds of load before the fault."""
    struck: float
    """Unix time."""
    verdict: str
    """`Dead` or `Healthy`."""
    detected: float | None
    cause: str | None
    cause_right: bool | None
    """None: there is no expected cause."""
    culprit: int | None
    culprit_right: bool | None
    level: int | None
    level_right: bool | None
    by: str
    message: str
    recovered: float | None
    """Until the system's own next verified completion."""
    back: float | None
    """Until the response that ended the longest wait of the clients."""
    missed: bool
    false_restarts: int
    sent: int
    answered: int
    replayed: float | None
    failed: int
    ended: int
    silent: int
    replaced: float | None = None
    """Until the struck process of dsv4 was continued or replaced."""
    disorder: str = ""
    """Events out of order in the reports of the repair."""
    errors: tuple[str, ...] = ()
    """Up to five different errors that clients received."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def moment(seed: int, fault: Fault, run: int) -> float:
    """Return the seconds of load before a fault: random, and reproducible by the seed."""
    return random.Random(f"{seed}/{fault.name}/{run}").uniform(0.5, 5.0)


def inflict(system: System, fault: Fault, run: int, seed: int, shape: Shape) -> Result:
    """Run `fault` once against a system that serves."""
    system.ready()
    before, replayed = system.restarts(), system.replayed()
    wait = moment(seed, fault, run)
    requests: list[Request] = []
    if fault.idle:
        time.sleep(wait)
        begun = time.time()
        struck, verdicts, replaced = _watch(system, fault, None)
    else:
        with Load(system.api, MODEL, shape, f"{seed}/{fault.name}/{run}") as load:
            _until(lambda: load.answered() >= shape.clients, _FLOWING_SECONDS)
            time.sleep(wait)
            begun = time.time()
            struck, verdicts, replaced = _watch(system, fault, load)
            if not verdicts and fault.kind not in _SURVIVED:
                # Before the load ends: its clients would wait for a system that is not repaired.
                system.heal(fault)
            requests = load.stop()
    if fault.idle and not verdicts and fault.kind not in _SURVIVED:
        system.heal(fault)
    after, total = system.replayed(), system.restarts()
    return judge(
        system.name,
        fault,
        run,
        wait,
        struck,
        verdicts,
        requests,
        restarts=None if before is None or total is None else total - before,
        replayed=increase(replayed, after),
        patience=system.patience,
        replaced=replaced,
        disorder=system.disorder(struck if fault.nth else begun)
        if verdicts and verdicts[-1].recovered is not None
        else "",
    )


def _watch(system: System, fault: Fault, load: Load | None) -> tuple[float, list[Verdict], float | None]:
    """Cause the fault and wait until the system has recovered.

    Returns the Unix time of the fault, the deaths detected since then, and the seconds until the struck process of dsv4
    was replaced.
    """
    begun = time.time()
    undo = fault.action.strike(system)
    struck, replaced = getattr(fault.action, "struck", time.time()), None
    try:
        if (repaired := getattr(fault.action, "repaired", None)) is not None:
            waited = _until(lambda: repaired(system), system.patience, _SHORT_TICK)
            replaced = time.time() - struck if waited else None
        if fault.kind in _SURVIVED:
            _until(lambda: bool(system.verdicts(begun)), fault.action.seconds + _AFTER_SECONDS)
        elif not _until(lambda: len(system.verdicts(begun)) > fault.nth, system.patience):
            return struck, [], replaced
        if system.verdicts(begun):
            _until(lambda: system.settled() and _recovered(system.verdicts(begun)), _RECOVERY_SECONDS)
        over = time.time()
        if load is not None:
            # Two more responses for each client: the second one was computed after recovery.
            _until(lambda: load.answered(over) >= 2 * load.clients, _RECOVERY_SECONDS)
        return struck, system.verdicts(begun), replaced
    finally:
        undo()


def _recovered(verdicts: Sequence[Verdict]) -> bool:
    return bool(verdicts) and verdicts[-1].recovered is not None


def judge(
    system: str,
    fault: Fault,
    run: int,
    wait: float,
    struck: float,
    verdicts: Sequence[Verdict],
    requests: Sequence[Request],
    *,
    restarts: int | None,
    replayed: float | None,
    patience: float,
    replaced: float | None = None,
    disorder: str = "",
) -> Result:
    """Assess a run from the verdicts of the system and the requests of the clients."""
    named = verdicts[fault.nth] if len(verdicts) > fault.nth else None
    if fault.kind in _SURVIVED and verdicts:
        named = verdicts[0]
    due = fault.kind not in _SURVIVED
    own = fault.kind is Kind.OWN and named is None
    late = named is not None and named.time - struck > patience
    # The level that completed the repair: a start that fails twice in place is followed by a new incarnation.
    level = verdicts[-1].level if verdicts else None
    says = named is not None and named.cause is not None
    # A failed start is tried twice in place before a new incarnation; each attempt counts as one restart.
    expected = 0 if not due else max(1, len(verdicts)) if fault.nth else 1
    number = counts(requests)
    return Result(
        system=system,
        fault=fault.name,
        run=run,
        kind=fault.kind,
        moment=round(wait, 2),
        struck=struck,
        verdict="Replaced" if own and replaced is not None else "Healthy" if named is None else "Dead",
        detected=replaced if own else None if named is None else max(0.0, named.time - struck),
        cause=named.cause if named else None,
        cause_right=named.cause in fault.causes if due and named is not None and says else None,
        culprit=named.culprit if named else None,
        culprit_right=named.culprit == fault.rank
        if due and named is not None and says and fault.rank is not None
        else None,
        level=level,
        level_right=level == fault.level if due and level is not None else None,
        by=named.by if named else "",
        message=named.message[:300] if named else "",
        recovered=verdicts[-1].recovered - struck if verdicts and verdicts[-1].recovered is not None else None,
        back=outage(requests, struck),
        missed=(due and (named is None or late)) or (fault.kind is Kind.OWN and replaced is None),
        replaced=replaced,
        disorder=disorder,
        false_restarts=len(verdicts) - expected if restarts is None and not due else max(0, (restarts or 0) - expected),
        sent=len(requests),
        answered=number[Outcome.ANSWERED],
        replayed=replayed,
        failed=number[Outcome.FAILED],
        ended=number[Outcome.ENDED],
        silent=number[Outcome.SILENT],
        errors=tuple(dict.fromkeys(r.detail[:200] for r in requests if r.outcome is not Outcome.ANSWERED))[:5],
    )


def _until(condition: Any, seconds: float, tick: float = _TICK) -> bool:
    """Return whether `condition` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(tick)
    return False
