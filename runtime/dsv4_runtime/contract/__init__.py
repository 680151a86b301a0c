"""The documents between the operator and the agents: standard library and pydantic only.

The operator imports no other part of this package.
"""

from dsv4_runtime.contract.base import Document, Report
from dsv4_runtime.contract.kernels import KernelStatus, ProviderStatus
from dsv4_runtime.contract.plan import (
    KV_CACHE,
    PLAN_VERSION,
    EnginePlan,
    Expectations,
    FabricPlan,
    FabricSetting,
    GroupPlan,
    HealthPolicy,
    MemberPlan,
    MemberPorts,
    PageCache,
    Reading,
    Role,
    Timeouts,
    Verify,
    WeightsPlan,
    WeightsSource,
)
from dsv4_runtime.contract.recovery import Permit, RecoveryPolicy, permit
from dsv4_runtime.contract.status import (
    AgentStatus,
    Cause,
    DrainReport,
    EngineStatus,
    FabricStatus,
    Failure,
    GpuProcess,
    GpuSignals,
    GroupReport,
    Health,
    MemoryUse,
    Phase,
    Process,
    ProcessSignals,
    Progress,
    Rail,
    RestartBudget,
    Signals,
    StartStep,
    Verdict,
    WeightsProgress,
)
