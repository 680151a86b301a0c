"""The `DSV4Deployment` object: specification, status and parsing. Pure."""

from dsv4_operator.api.cluster import (
    NetworkMode,
    NodeLossPolicy,
    NodeLossSpec,
    PortsSpec,
    SchedulerType,
    SecretKeyRef,
    StorageType,
    Toleration,
    TolerationOperator,
)
from dsv4_operator.api.deployment import API_VERSION, KIND, STORED_VERSION, DSV4Deployment, Metadata, load, parse
from dsv4_operator.api.findings import Finding, InvalidDeployment, Severity
from dsv4_operator.api.policy import ClusterPolicy
from dsv4_operator.api.spec import (
    BuildSpec,
    CudagraphMode,
    Executor,
    Hardware,
    KvCacheDtype,
    ModelSource,
    ModelSpec,
    NanoSource,
    Precision,
    RolloutStrategy,
    SpeculativeMethod,
    SpeculativeSpec,
    TablesPlace,
    TopologySpec,
    Variant,
)
from dsv4_operator.api.status import (
    HISTORY_LENGTH,
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MeasuredItem,
    MeasuredStatus,
    MemberStatus,
    MoveStatus,
    Reason,
    RejectedStatus,
    RolloutStatus,
)
