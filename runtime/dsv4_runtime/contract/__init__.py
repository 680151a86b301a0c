"""The documents between the operator and the agents: standard library and pydantic only.

The operator imports no other part of this package.
"""

from dsv4_runtime.contract.base import Document, Report
from dsv4_runtime.contract.fabric import FabricPlan, FabricSetting, FabricStatus, Rail
from dsv4_runtime.contract.kernels import KernelStatus, ProviderStatus
from dsv4_runtime.contract.plan import (
    PLAN_VERSION,
    EnginePlan,
    Expectations,
    GroupPlan,
    HealthPolicy,
    MemberPlan,
    MemberPorts,
    Reading,
    Role,
    Timeouts,
)
from dsv4_runtime.contract.recovery import Permit, RecoveryPolicy, permit
from dsv4_runtime.contract.status import (
    AgentStatus,
    Cause,
    DrainReport,
    EngineStatus,
    Failure,
    GpuProcess,
    GpuSignals,
    GroupReport,
    Health,
    Phase,
    Process,
    ProcessSignals,
    Progress,
    Signals,
    Verdict,
    WeightsProgress,
)
from dsv4_runtime.contract.weights import PageCache, Verify, WeightsPlan, WeightsSource

__all__ = [
    "PLAN_VERSION",
    "AgentStatus",
    "Cause",
    "Document",
    "DrainReport",
    "EnginePlan",
    "EngineStatus",
    "Expectations",
    "FabricPlan",
    "FabricSetting",
    "FabricStatus",
    "Failure",
    "GpuProcess",
    "GpuSignals",
    "GroupPlan",
    "GroupReport",
    "Health",
    "HealthPolicy",
    "KernelStatus",
    "MemberPlan",
    "MemberPorts",
    "PageCache",
    "Permit",
    "Phase",
    "Process",
    "ProcessSignals",
    "Progress",
    "ProviderStatus",
    "Rail",
    "Reading",
    "RecoveryPolicy",
    "Report",
    "Role",
    "Signals",
    "Timeouts",
    "Verdict",
    "Verify",
    "WeightsPlan",
    "WeightsProgress",
    "WeightsSource",
    "permit",
]
