"""Where the memory of every rank goes, byte by byte, and what would make it fit. Pure."""

from __future__ import annotations

from dsv4_operator.planning.memory.advice import Change, advice, longest_context
from dsv4_operator.planning.memory.plan import gib, memory_plan
from dsv4_operator.planning.memory.records import (
    Engine,
    Item,
    KvPlan,
    Measured,
    MemoryPlan,
    Parallel,
    RankPlan,
    Verdict,
    Where,
)
from dsv4_operator.planning.memory.settings import deployment_plan, engine_of, parallel_of

__all__ = [
    "Change",
    "Engine",
    "Item",
    "KvPlan",
    "Measured",
    "MemoryPlan",
    "Parallel",
    "RankPlan",
    "Verdict",
    "Where",
    "advice",
    "deployment_plan",
    "engine_of",
    "gib",
    "longest_context",
    "memory_plan",
    "parallel_of",
]
