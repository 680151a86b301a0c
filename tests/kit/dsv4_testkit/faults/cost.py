"""Cost of monitoring: processor time and memory of the members' agents in fault-free operation."""

from __future__ import annotations

import json
import time
from typing import Any

import psutil

from dsv4_testkit.faults.load import Load, Shape
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, MODEL

CORE_SHARE, MEBIBYTES = 0.01, 80.0
"""Upper limits of an agent: share of one core, and memory in MiB."""
_SETTLE_SECONDS = 10.0


def cost(system: DSV4, minutes: float, seed: int, store: Store) -> int:
    """Measure half the time idle and half under load, and store the result; return 1 if an agent exceeds a limit."""
    try:
        system.start()
        system.ready()
        time.sleep(_SETTLE_SECONDS)
        entry: dict[str, Any] = {"struck": time.time(), "minutes": minutes, "idle": _measure(system, minutes * 30.0)}
        with Load(system.api, MODEL, Shape(), str(seed)) as load:
            time.sleep(_SETTLE_SECONDS)
            entry["serving"] = _measure(system, minutes * 30.0)
            load.stop()
    finally:
        system.close()
    store.note("costs", entry)
    print(json.dumps(entry, indent=1))
    agents = [*entry["idle"], *entry["serving"]]
    return int(any(agent["core"] > CORE_SHARE or agent["mebibytes"] > MEBIBYTES for agent in agents))


def _measure(system: DSV4, seconds: float) -> list[dict[str, float]]:
    """Return for each agent the used share of one core and the resident memory (RSS) in MiB."""
    agents = [psutil.Process(system.pid(rank, "agent")) for rank in (0, 1)]
    begun, before = time.monotonic(), [_cpu(agent) for agent in agents]
    time.sleep(seconds)
    passed = time.monotonic() - begun
    return [
        {
            "rank": rank,
            "core": round((_cpu(agent) - spent) / passed, 5),
            "mebibytes": round(agent.memory_info().rss / 2**20, 1),
        }
        for rank, (agent, spent) in enumerate(zip(agents, before, strict=True))
    ]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
