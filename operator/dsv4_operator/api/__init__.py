"""The `DSV4Deployment` object: specification, status, and reading it from text. Pure."""

from dsv4_operator.api.deployment import API_VERSION, KIND, DSV4Deployment, Metadata
from dsv4_operator.api.engine import (
    CudagraphMode,
    EngineSpec,
    EngineTimeouts,
    EnvVar,
    Executor,
    KvCacheDtype,
    SpeculativeMethod,
    SpeculativeSpec,
)
from dsv4_operator.api.findings import Finding, InvalidDeployment
from dsv4_operator.api.gateway import GatewaySpec
from dsv4_operator.api.load import load, parse
from dsv4_operator.api.model_source import (
    HttpSource,
    HuggingFaceSource,
    ModelSource,
    NanoSource,
    Precision,
    S3Source,
    StagingSpec,
)
from dsv4_operator.api.network import FabricMember, FabricSpec, NetworkSpec, PortsSpec
from dsv4_operator.api.reasons import ConditionStatus, ConditionType, Reason
from dsv4_operator.api.spec import (
    BackoffSpec,
    DeploymentSpec,
    Hardware,
    ModelSpec,
    RecoverySpec,
    TopologySpec,
    Variant,
)
from dsv4_operator.api.status import (
    HISTORY_LENGTH,
    Condition,
    DeploymentPhase,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MemberStatus,
    read_status,
)

__all__ = [
    "API_VERSION",
    "HISTORY_LENGTH",
    "KIND",
    "BackoffSpec",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "CudagraphMode",
    "DSV4Deployment",
    "DeploymentPhase",
    "DeploymentSpec",
    "DeploymentStatus",
    "EngineSpec",
    "EngineTimeouts",
    "EnvVar",
    "Executor",
    "FabricMember",
    "FabricSpec",
    "FailureStatus",
    "Finding",
    "GatewaySpec",
    "GroupPhase",
    "GroupStatus",
    "Hardware",
    "HttpSource",
    "HuggingFaceSource",
    "InvalidDeployment",
    "KvCacheDtype",
    "KvCacheStatus",
    "MemberStatus",
    "Metadata",
    "ModelSource",
    "ModelSpec",
    "NanoSource",
    "NetworkSpec",
    "PortsSpec",
    "Precision",
    "Reason",
    "RecoverySpec",
    "S3Source",
    "SpeculativeMethod",
    "SpeculativeSpec",
    "StagingSpec",
    "TopologySpec",
    "Variant",
    "load",
    "parse",
    "read_status",
]
