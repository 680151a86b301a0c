"""Logged starts beside their plans: those of `runs.toml`, and the last start of a deployment."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dsv4_operator.planning.catalog.records import GIB
from dsv4_operator.planning.catalog.tables import machine_named, model
from dsv4_operator.planning.images import profile_named
from dsv4_operator.planning.memory.plan import memory_plan
from dsv4_operator.planning.memory.records import EngineSettings, MemoryPlan, Parallel
from dsv4_runtime.contract import KV_CACHE
from dsv4_runtime.util.log_lines import MemoryLog, logged_terms

TERMS = {
    "weights": ("weights", "rotary tables, top-k buffer"),
    "activations": ("activations", "MoE scratch", "images in the profile"),
    "graphs": ("CUDA graphs",),
    "kv": (),
    "concurrency": (),
}
"""Logged figures of vLLM, and the corresponding items of a plan; `kv` is the rest of the budget."""


@dataclass(frozen=True, slots=True)
class LoggedStart:
    """One logged start."""

    name: str
    source: str
    date: str
    rank: int
    plan: MemoryPlan
    logged: Mapping[str, float]
    """GiB by figure; `concurrency` in requests."""
    profile: str
    """Image profile of its build."""
    failed: bool = False
    """Whether the KV cache had no room for one request, and the engine did not start."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One logged figure beside that of the plan, with its range."""

    run: LoggedStart
    figure: str
    logged: float
    planned: float
    least: float
    most: float

    @property
    def error(self) -> float:
        """Return the relative error of the plan."""
        return self.planned / self.logged - 1


@cache
def runs() -> tuple[LoggedStart, ...]:
    """Return every run in the order of the file."""
    data = tomllib.loads((resources.files(__package__) / "runs.toml").read_text(encoding="utf-8"))
    return tuple(_run(row) for row in data["run"])


def comparisons(figure: str | None = None) -> Iterator[Comparison]:
    """Yield every logged figure, or those of `figure`, beside that of the plan."""
    for run in runs():
        for name, logged in run.logged.items():
            if figure in (None, name):
                yield Comparison(run, name, logged, *planned(run.plan, run.rank, name))


def planned(plan: MemoryPlan, rank: int, figure: str) -> tuple[float, float, float]:
    """Return the planned value, lower and upper bound of a figure of `TERMS` on one rank; GiB or requests."""
    on = plan.ranks[rank]
    if figure == "kv":
        return on.kv_available / GIB, on.kv_least / GIB, on.kv_most / GIB
    if figure == "concurrency":
        kv = plan.kv
        return (kv.concurrency, kv.concurrency_least, kv.concurrency_most) if kv else (0.0, 0.0, 0.0)
    items = [item for item in on.items if item.name in TERMS[figure]]
    expected = sum(item.bytes for item in items)
    return expected / GIB, sum(item.least for item in items) / GIB, sum(item.most for item in items) / GIB


def _run(row: Mapping[str, Any]) -> LoggedStart:
    machine, _, devices = row["on"].partition(" x")
    plan = memory_plan(
        model(row["model"]),
        machine_named(machine),
        Parallel(row["tensor"], row.get("pipeline", 1), int(devices), row.get("expert", False)),
        EngineSettings(**row["engine"], build=profile_named(row["profile"]).build),
    )
    return LoggedStart(
        row["name"],
        row["source"],
        row["date"],
        row.get("rank", 0),
        plan,
        row["logged"],
        row["profile"],
        row.get("failed", False),
    )


_ROUNDING = GIB // 100
"""vLLM logs GiB with two digits, some lines with one."""


def largest_deviation(found: Sequence[Term]) -> Term | None:
    """Return the term with the largest difference, of those outside their range if there are any."""
    outside = [term for term in found if not term.within]
    return max(outside or found, key=lambda term: abs(term.difference), default=None)


@dataclass(frozen=True, slots=True)
class Term:
    """One logged figure beside that of the plan, in bytes."""

    name: str
    """Name of the corresponding item, or `KV cache`."""
    logged: int
    planned: int
    least: int
    most: int

    @property
    def difference(self) -> int:
        """Return the logged minus the planned bytes."""
        return self.logged - self.planned

    @property
    def within(self) -> bool:
        """Return whether the logged figure is within the range of the plan."""
        return self.least <= self.logged <= self.most


def terms(plan: MemoryPlan, log: MemoryLog) -> Iterator[Term]:
    """Yield every figure in both `log` and `plan`, on the tightest rank."""
    rank = plan.ranks[plan.tightest]
    for logged, names in logged_terms(log):
        items = [item for item in rank.items if item.name in names]
        if items:
            planned, least, most = (
                sum(size) for size in zip(*((i.bytes, i.least, i.most) for i in items), strict=True)
            )
            yield Term(names[0], logged, planned, least, most)
    if log.kv is not None and not rank.kv_given:
        yield Term(KV_CACHE, log.kv, rank.kv_available, rank.kv_least, rank.kv_most)
    if log.reserved is not None and rank.kv_given:
        given = plan.engine.kv_cache_memory or 0
        yield Term(KV_CACHE, log.reserved, given, given - _ROUNDING, given + _ROUNDING)
    if log.needed is not None and plan.kv is not None:
        kv = plan.kv
        yield Term(
            "one request", log.needed, kv.request_bytes, kv.request_least - _ROUNDING, kv.request_most + _ROUNDING
        )
