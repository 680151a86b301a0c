"""Engine deaths at random moments under eight clients: number of lost requests and duration of recovery at level 1."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from dsv4_testkit.faults.load import Load, Outcome, Shape, counts
from dsv4_testkit.faults.report import percentile
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, MODEL, increase
from dsv4_testkit.harness import phases

_CLIENTS = 8
_VICTIMS = ((0, "engine-core"), (0, "worker"), (1, "worker"), (0, "api"))
_SETTLE_SECONDS = 240.0
_ENGINE_PHASES = ("Loading", "Warming")


def deaths(system: DSV4, number: int, seed: int, store: Store) -> int:
    """Run the series and store the result; return 1 after a lost request, a silently cut stream, or slow recoveries."""
    try:
        system.start()
        system.ready()
        entry = _run(system, number, seed)
    finally:
        system.close()
    store.note("deaths", entry)
    print(json.dumps(entry, indent=1))
    return int(bool(entry["failed"] or entry["silent"] or entry["p95"] > entry["cold"] + 5.0))


def _run(system: DSV4, number: int, seed: int) -> dict[str, Any]:
    assert system.deployment is not None
    chance = random.Random(seed)
    spent = phases(system.deployment)
    cold = sum(spent[phase] for phase in _ENGINE_PHASES)
    begun, seconds, levels, replayed = time.time(), [], [], system.replayed()
    # Each victim occurs equally often, in random order.
    victims = [_VICTIMS[turn % len(_VICTIMS)] for turn in range(number)]
    chance.shuffle(victims)
    with Load(system.api, MODEL, Shape(clients=_CLIENTS), str(seed)) as load:
        for turn, (rank, process) in enumerate(victims, 1):
            # Wait until clients receive responses again and some requests are in progress.
            since = time.time()
            _wait(lambda: load.answered(since) >= _CLIENTS, "the clients have no answers")  # noqa: B023
            time.sleep(chance.uniform(0.2, 4.0))
            pid, struck = system.pid(rank, process), time.time()
            os.kill(pid, signal.SIGKILL)
            _wait(
                lambda: any(verdict.recovered for verdict in system.verdicts(struck)[-1:]) and system.settled(),  # noqa: B023
                f"{process} of rank {rank} was killed and it does not come back",
            )
            said = system.verdicts(struck)
            first, last = said[0], said[-1]
            assert last.recovered is not None, last
            seconds.append(last.recovered - struck)
            levels.append(last.level)
            print(
                f"[{turn}/{number}] {process} of rank {rank}: {first.cause}, noticed {first.time - struck:.2f} s,"
                f" recovered {seconds[-1]:.1f} s, level {last.level}; lost so far: {counts(load.done)}",
                flush=True,
            )
        requests = load.stop()
    after, found = system.replayed(), counts(requests)
    return {
        "struck": begun,
        "deaths": number,
        "clients": _CLIENTS,
        "cold": cold,
        "p50": percentile(seconds, 50),
        "p95": percentile(seconds, 95),
        "levels": levels,
        "sent": len(requests),
        "answered": found[Outcome.ANSWERED],
        "replayed": increase(replayed, after),
        "failed": found[Outcome.FAILED],
        "ended": found[Outcome.ENDED],
        "silent": found[Outcome.SILENT],
        "errors": list(dict.fromkeys(r.detail[:200] for r in requests if r.outcome is not Outcome.ANSWERED))[:5],
    }


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {_SETTLE_SECONDS:.0f} s")
        time.sleep(0.2)
