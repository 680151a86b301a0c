"""Memory plan of every rank, byte by byte, and the changes that would make it fit. Pure."""

from dsv4_operator.planning.memory.items import BadDivision
from dsv4_operator.planning.memory.plan import advice, deployment_plan, gib, memory_plan
from dsv4_operator.planning.memory.records import (
    EngineSettings,
    FitVerdict,
    Measured,
    MemoryPlan,
    MemoryPool,
    Parallel,
    RankPlan,
)

__all__ = [
    "BadDivision",
    "EngineSettings",
    "FitVerdict",
    "Measured",
    "MemoryPlan",
    "MemoryPool",
    "Parallel",
    "RankPlan",
    "advice",
    "deployment_plan",
    "gib",
    "memory_plan",
]
