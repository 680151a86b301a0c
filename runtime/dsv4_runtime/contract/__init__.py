"""The documents between the operator and the agents: standard library and pydantic only.

The operator imports no other part of this package.
"""

from dsv4_runtime.contract.base import Document, Report
from dsv4_runtime.contract.plan import (
    PLAN_VERSION,
    EnginePlan,
    Expectations,
    GroupPlan,
    MemberPlan,
    MemberPorts,
    Role,
    Timeouts,
    WeightsPlan,
    WeightsSource,
)
from dsv4_runtime.contract.recovery import Permit, RecoveryPolicy, permit
from dsv4_runtime.contract.status import (
    AgentStatus,
    Cause,
    EngineStatus,
    Failure,
    Health,
    Phase,
    Process,
    Progress,
    Verdict,
)

__all__ = [
    "PLAN_VERSION",
    "AgentStatus",
    "Cause",
    "Document",
    "EnginePlan",
    "EngineStatus",
    "Expectations",
    "Failure",
    "GroupPlan",
    "Health",
    "MemberPlan",
    "MemberPorts",
    "Permit",
    "Phase",
    "Process",
    "Progress",
    "RecoveryPolicy",
    "Report",
    "Role",
    "Timeouts",
    "Verdict",
    "WeightsPlan",
    "WeightsSource",
    "permit",
]
