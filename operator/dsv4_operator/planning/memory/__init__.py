"""Memory plan of every rank, byte by byte, and the changes that would make it fit. Pure."""

from __future__ import annotations

from dsv4_operator.planning.memory.advice import Change, advice, longest_context
from dsv4_operator.planning.memory.plan import gib, memory_plan
from dsv4_operator.planning.memory.records import (
    EngineSettings,
    FitVerdict,
    Item,
    KvPlan,
    Measured,
    MemoryPlan,
    MemoryPool,
    Parallel,
    RankPlan,
)
from dsv4_operator.planning.memory.settings import deployment_plan, engine_of, parallel_of

__all__ = [
    "Change",
    "EngineSettings",
    "FitVerdict",
    "Item",
    "KvPlan",
    "Measured",
    "MemoryPlan",
    "MemoryPool",
    "Parallel",
    "RankPlan",
    "advice",
    "deployment_plan",
    "engine_of",
    "gib",
    "longest_context",
    "memory_plan",
    "parallel_of",
]
