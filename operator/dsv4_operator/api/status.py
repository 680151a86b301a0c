"""Status of a deployment: conditions, reasons, phases and groups.

Names of conditions, reasons and phases are stable, because alerts depend on them. `read_status` never rejects a status:
unreadable parts are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from dsv4_operator.api.values import Time
from dsv4_runtime.contract import Cause, KernelStatus, Phase, Process, Report, Role, StartStep


class ConditionType(StrEnum):
    """Types of the conditions in a deployment's status."""

    READY = "Ready"
    """Every wanted group serves: a checked completion succeeded in its present engine generation. On a cluster, a
    completion through the public Service succeeded too."""
    ACCEPTED = "Accepted"
    """The specification has a valid plan on the available machines."""
    PROGRESSING = "Progressing"
    """A start, recovery, update or stop is in progress."""
    DEGRADED = "Degraded"
    """A group died and does not serve again yet."""
    RECOVERY_EXHAUSTED = "RecoveryExhausted"
    """A group failed too often or for a non-retryable cause; recovery stopped until the specification changes."""
    ROLLED_BACK = "RolledBack"
    """The specification was given up, and groups run from the last one with which all of them served."""
    SUSPENDED = "Suspended"
    """No group runs because of `spec.suspend`."""


class ConditionStatus(StrEnum):
    """The value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Reason of a condition or an event."""

    PLAN_ACCEPTED = "PlanAccepted"
    PLAN_REFUSED = "PlanRefused"
    SPEC_INVALID = "SpecInvalid"
    """The specification breaks a rule that the API server did not check."""
    NOT_ALLOWED = "NotAllowed"
    """The policy of the cluster's administrator forbids the specification."""
    HARDWARE_UNSUPPORTED = "HardwareUnsupported"
    NODES_MISSING = "NodesMissing"
    MEMORY_SHORT = "MemoryShort"
    MEMORY_UNCERTAIN = "MemoryUncertain"
    """The plan expects too little memory by less than its uncertainty, and `spec.engine.allowTight` is not set."""

    PENDING = "Pending"
    GROUP_FORMING = "GroupForming"
    FORMING_FAILED = "FormingFailed"
    """The members of a group have not been created for five minutes; the message contains the reason."""
    GROUP_QUEUED = "GroupQueued"
    """The scheduler of `spec.topology.scheduler` has not placed all members of a group."""
    SCHEDULER_MISSING = "SchedulerMissing"
    """The scheduler of `spec.topology.scheduler`, or its queue, is not in the cluster."""
    KUBERAY_UNAVAILABLE = "KubeRayUnavailable"
    """KubeRay, which the specification requires, is not in the cluster, is too old, or makes no pods."""
    GROUP_STARTING = "GroupStarting"
    ENGINE_READY = "EngineReady"
    ALL_GROUPS_READY = "AllGroupsReady"
    GROUPS_NOT_READY = "GroupsNotReady"
    ENDPOINT_NOT_READY = "EndpointNotReady"
    """Every group serves, but no completion through the public Service succeeds."""

    ENGINE_DEAD = "EngineDead"
    """An engine died and is restarted in place (level 1)."""
    GROUP_DEAD = "GroupDead"
    """A group died and is formed again (level 2)."""
    ENGINE_RESTARTING = "EngineRestarting"
    GROUP_RECOVERING = "GroupRecovering"
    RESTART_BACKOFF = "RestartBackoff"
    GROUP_RECOVERED = "GroupRecovered"
    RECOVERY_EXHAUSTED = "RecoveryExhausted"
    RECOVERY_AVAILABLE = "RecoveryAvailable"

    GPU_THROTTLED = "GpuThrottled"
    """A GPU of a member is slow: its clock is low, its power is capped, or it is hot."""

    GROUP_MOVING = "GroupMoving"
    """A group that serves is ended because nodes of its members are cordoned, and is formed again on other nodes."""
    MOVE_BLOCKED = "MoveBlocked"
    """A group stays on cordoned nodes; the message contains the reason."""
    UPDATE_STARTED = "UpdateStarted"
    UPDATE_COMPLETED = "UpdateCompleted"
    """All groups serve with a changed specification."""
    ROLLED_BACK = "RolledBack"
    NOT_ROLLED_BACK = "NotRolledBack"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    SCALED_TO_ZERO = "ScaledToZero"
    GROUP_STOPPING = "GroupStopping"
    GROUP_STOPPED = "GroupStopped"
    TERMINATING = "Terminating"
    STEADY = "Steady"
    ACTION_FAILED = "ActionFailed"
    """A part of the reconcile failed and is repeated; the message contains the reason."""
    STATE_NOT_SAVED = "StateNotSaved"
    """The state directory of `dsv4 up` cannot be written; the status is kept in memory."""
    FOREIGN_OBJECT = "ForeignObject"
    """An object with a needed name belongs to another owner. It is not changed."""
    OBJECT_TERMINATING = "ObjectTerminating"
    """An object with a needed name is still being removed."""
    OBJECT_IGNORED = "ObjectIgnored"
    """A pod with the name or the labels of a member is none, or labels of a member were changed."""
    PAUSED = "Paused"
    """The annotation `dsv4.dev/paused` stops the reconciliation."""


HISTORY_LENGTH = 10
"""Length of a group's failure history."""

_LARGEST_REPAIR = 100


class StatusPart(Report):
    """A part of the status."""


class GroupPhase(StrEnum):
    """Phase of a group's lifecycle."""

    PENDING = "Pending"
    """No member runs, and none may be formed yet."""
    FORMING = "Forming"
    """The incarnation is claimed, and its members are being created."""
    QUEUED = "Queued"
    """All members exist; the scheduler of `spec.topology.scheduler` has not placed all of them."""
    STARTING = "Starting"
    """All members exist; the engine has not served in this incarnation yet."""
    SERVING = "Serving"
    RESTARTING = "Restarting"
    """Level 1: the head's agent restarts the engine in place."""
    RECOVERING = "Recovering"
    """Level 2: the incarnation is dead and is being fenced; another one follows."""
    UPDATING = "Updating"
    """The incarnation is being fenced because the specification changed, or its nodes are cordoned."""
    DRAINING = "Draining"
    """The group is being stopped on request."""
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"
    """Not wanted: fewer replicas, or the deployment is being deleted."""
    FAILED = "Failed"
    """Level 3: recovery given up until the specification changes."""


class DeploymentPhase(StrEnum):
    """Summary of the groups for users; programs read the conditions."""

    PENDING = "Pending"
    STARTING = "Starting"
    SERVING = "Serving"
    DEGRADED = "Degraded"
    RECOVERING = "Recovering"
    UPDATING = "Updating"
    DRAINING = "Draining"
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class MemberStatus(StatusPart):
    """One member of a group's present incarnation."""

    rank: int
    """0 is the head."""
    role: Role = Role.WORKER
    """`Head` or `Worker`."""
    node: str = ""
    """Machine of the member."""
    address: str = ""
    """Address in the group's network."""
    phase: Phase | None = None
    """Phase reported by its agent; absent until the agent has answered once."""
    phase_time: Time | None = None
    """Start of that phase, by the member's clock."""
    message: str = ""
    """Progress, or the end of the member."""
    processes: tuple[Process, ...] = ()
    """Processes of the member with known process ids."""
    warnings: tuple[str, ...] = ()
    """Conditions that make the member slow and stop nothing: a low clock, a power cap or a high temperature of a
    GPU."""
    silent_since: Time | None = None
    """Time since which its agent has not answered; absent while it answers."""


class FailureStatus(StatusPart):
    """One death of an engine or a group."""

    time: Time
    """Time of the detection."""
    cause: Cause = Cause.UNKNOWN
    """Cause of the death."""
    incarnation: int = 0
    """Incarnation in which it occurred."""
    engine_generation: int | None = None
    """Engine generation that died; absent if it was not the death of an engine."""
    generation: int = 0
    """`metadata.generation` at the time of the death."""
    culprit_rank: int | None = None
    """Rank of the first failed member, if known."""
    culprit_node: str | None = None
    """Machine of that member."""
    message: str = ""
    """First fatal line, or the observation."""
    detected_by: str = ""
    """Signal that revealed it."""
    level: int | None = None
    """1: engine restart in place; 2: new incarnation; 3: given up."""
    recover_seconds: float | None = None
    """From `time` until the next checked completion; absent until then."""
    weights_doubted: bool | None = None
    """Whether damaged weights may be the cause although no file failed verification; absent if not."""
    evidence: str | None = None
    """Location of the evidence."""

    @property
    def deterministic(self) -> bool:
        """Return whether another attempt with the same result would be useless."""
        return self.cause.deterministic or self.weights_doubted is True


class KvCacheStatus(StatusPart):
    """KV cache of a group's present engine, as reported by the engine."""

    tokens: int
    """Size in tokens."""
    concurrency: float = 0.0
    """Requests of `maxModelLen` tokens that fit concurrently."""
    planned_tokens: int | None = None
    """Size in tokens in the memory plan; absent without one."""


class MeasuredItem(StatusPart):
    """One item of the memory plan, as measured at a start."""

    item: str
    """Name of the item in `dsv4 plan`."""
    difference: int
    """Measured minus planned bytes."""


class MeasuredStatus(StatusPart):
    """Memory measured at the group's latest start; the next plan of the same model, image and machine uses it."""

    of: str
    """Model, image and machine."""
    incarnation: int
    """Incarnation of the measurement."""
    time: Time | None = None
    """Time of the measurement."""
    items: tuple[MeasuredItem, ...] = ()
    """Differences from the plan."""


class MoveStatus(StatusPart):
    """Move of a group away from cordoned nodes."""

    nodes: tuple[str, ...]
    """Cordoned nodes of its members."""
    blocked: str = ""
    """Reason why the group stays; empty: it moves."""


class GroupStatus(StatusPart):
    """One group. Contains the complete state for the next decision, so that the operator may restart at any time."""

    index: int = 0
    """Index of the group, from 0."""
    phase: GroupPhase = GroupPhase.PENDING
    """Phase of the group."""
    phase_time: Time | None = None
    """Start of that phase."""
    incarnation: int = 0
    """Number of the latest incarnation; 0 before the first. Numbers are never reused."""
    fenced_below: int = 0
    """Every incarnation below this number is known to have ended."""
    revision: str = ""
    """Fingerprint of the specification of this incarnation."""
    served_names: tuple[str, ...] = ()
    """Names of the model and of its adapters in this incarnation."""
    revision_time: Time | None = None
    """Time at which the group was first formed from it, plus the time in queues and pauses since then."""
    paused_time: Time | None = None
    """Start of the present pause (`dsv4.dev/paused`)."""
    served_revision: str = ""
    """Fingerprint of the last specification with which the group served."""
    members: tuple[MemberStatus, ...] = ()
    """Members of the incarnation in rank order."""
    engine_generation: int = 0
    """Engine generations in this incarnation."""
    expected_ready_seconds: float | None = None
    """Expected duration of the start."""
    kv_cache: KvCacheStatus | None = None
    """Size of the engine's KV cache; absent until the engine has reported it."""
    kernels: tuple[KernelStatus, ...] = ()
    """Providers of a layer's operations; empty until the engine has reported them, and if all of them are vLLM's."""
    measured: MeasuredStatus | None = None
    """Memory measured at the latest start."""
    formed_time: Time | None = None
    """Time of the claim of the incarnation, plus the time in pauses since then."""
    ready_time: Time | None = None
    """Time of the first checked completion of the present engine generation."""
    start: tuple[StartStep, ...] = ()
    """Durations of the steps of the latest start that served, on the head."""
    restarts: tuple[Time, ...] = ()
    """Restarts of any level within the recovery window, oldest first."""
    total_restarts: int = 0
    """Restarts of any level since the deployment was created."""
    next_restart_time: Time | None = None
    """Earliest time of a pending restart."""
    exhausted_generation: int | None = None
    """`metadata.generation` for which recovery was given up."""
    move: MoveStatus | None = None
    """Move away from cordoned nodes; absent without cordoned nodes."""
    last_failure: FailureStatus | None = None
    """Latest death."""
    history: tuple[FailureStatus, ...] = ()
    """Latest deaths, oldest first, at most 10; the last is `lastFailure`."""


class Condition(StatusPart):
    """Condition in the form of `metav1.Condition`."""

    type: ConditionType
    """Type of the condition."""
    status: ConditionStatus
    """Status of the condition."""
    observed_generation: int = 0
    """`metadata.generation` of the condition."""
    last_transition_time: Time
    """Time of the last change of `status`."""
    reason: Reason
    """Reason, for programs."""
    message: str = ""
    """Explanation, for users."""


class RejectedStatus(StatusPart):
    """A specification that was given up."""

    revision: str
    """Fingerprint of the specification."""
    time: Time
    """Time at which it was given up."""
    message: str = ""
    """Explanation, for users."""


class RolloutStatus(StatusPart):
    """Rollout state for a rollback of a changed specification."""

    served: str = ""
    """Member part of the last specification with which all groups served, as JSON."""
    rejected: RejectedStatus | None = None
    """Specification that was given up in favor of it; absent after the specification has changed again."""
    accepted: str = ""
    """Last valid specification, as JSON; groups keep running from it while a changed one is refused."""


class DeploymentStatus(StatusPart):
    """Observed state of a deployment."""

    conditions: tuple[Condition, ...] = ()
    """State for programs, one entry per type."""
    observed_generation: int = 0
    """`metadata.generation` of this status."""
    phase: DeploymentPhase = DeploymentPhase.PENDING
    """Summary for users."""
    replicas: int = 0
    """Existing groups."""
    ready_replicas: int = 0
    """Serving groups."""
    updated_replicas: int = 0
    """Groups with members of the present specification."""
    endpoint: str | None = None
    """Base URL of the OpenAI-compatible API."""
    ray_dashboard: str | None = None
    """URL of the Ray dashboard."""
    expected_ready_seconds: float | None = None
    """Expected duration of a start."""
    rollout: RolloutStatus = RolloutStatus()
    """State for a rollback of a changed specification."""
    removed_incarnation: int = 0
    """Highest incarnation of the groups removed by a lower `spec.replicas`; new groups start above it."""
    groups: tuple[GroupStatus, ...] = ()
    """Groups in order."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of type `kind`; None if there is none yet."""
        return next((condition for condition in self.conditions if condition.type is kind), None)


def read_status(data: object) -> DeploymentStatus:
    """Return the status in `data`, JSON values that another version may have written; unreadable parts are dropped."""
    if isinstance(data, DeploymentStatus):
        return data
    if not isinstance(data, Mapping):
        return DeploymentStatus()
    rest = deepcopy(dict(data))
    for _ in range(_LARGEST_REPAIR):
        try:
            return DeploymentStatus.model_validate(rest)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            location = first["loc"][:-1] if first["type"] == "missing" else first["loc"]
            if not _remove(rest, location):
                break
    return DeploymentStatus()


def _remove(data: Any, location: tuple[int | str, ...]) -> bool:
    """Delete the nearest existing value at or above `location`; False if there is none."""
    holder: Any = None
    key: int | str = ""
    for step in location:
        known = step in data if isinstance(data, dict) else isinstance(step, int) and step < len(data)
        if not known:
            break
        holder, key, data = data, step, data[step]
        if not isinstance(data, dict | list):
            break
    if holder is None:
        return False
    del holder[key]
    return True
