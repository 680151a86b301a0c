"""A plan beside what a start of it logged, term by term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus
from dsv4_operator.api.values import format_time
from dsv4_operator.planning.memory.records import Measured, MemoryPlan, MemoryPool
from dsv4_runtime.util.memory_log import KV_CACHE, MemoryLog, logged_terms


@dataclass(frozen=True, slots=True)
class Term:
    """One figure of a log beside the plan's, in bytes."""

    name: str
    """Of the item that a difference belongs to, or `KV cache`."""
    logged: int
    planned: int
    least: int
    most: int

    @property
    def difference(self) -> int:
        """Return what was logged beyond the plan."""
        return self.logged - self.planned

    @property
    def within(self) -> bool:
        """Tell whether the plan's range has it."""
        return self.least <= self.logged <= self.most


def terms(plan: MemoryPlan, log: MemoryLog) -> Iterator[Term]:
    """Yield every figure of `log` that `plan` has, on the rank that limits all."""
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


def planned_items(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of every item in the engine's budget on the rank that limits all, and of its KV cache."""
    rank = plan.ranks[plan.tightest]
    found = {item.name: item.bytes for item in rank.items if item.where is MemoryPool.BUDGET}
    return found if rank.kv_given else found | {KV_CACHE: rank.kv_available}


def measured_of(status: DeploymentStatus, before: int | None = None) -> tuple[Measured, ...]:
    """Return what the groups of a deployment logged, of incarnations below `before`, the latest first."""
    known = [group.measured for group in status.groups if group.measured is not None]
    return tuple(
        Measured(each.of, format_time(each.time or 0.0)[:10], {item.item: item.difference for item in each.items})
        for each in sorted(known, key=lambda each: -(each.time or 0.0))
        if before is None or each.incarnation < before
    )
