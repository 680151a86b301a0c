"""Status of a deployment: conditions, reasons, phases and groups.

Names of conditions, reasons and phases are stable, because alerts depend on them. `read_status` never rejects a status:
unreadable parts are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, ValidationError

from dsv4_operator.api.values import Time
from dsv4_runtime.contract import Cause, KernelStatus, Phase, Process, Report, Role


class ConditionType(StrEnum):
    """Types of the conditions in a deployment's status."""

    READY = "Ready"
    """Every wanted group answers: a checked completion came back in its present engine generation. On a cluster, a
    completion came back through the public Service too."""
    ACCEPTED = "Accepted"
    """The specification could be planned on the machines at hand."""
    PROGRESSING = "Progressing"
    """Something is under way: a start, a recovery, an update, a stop."""
    DEGRADED = "Degraded"
    """A group died and does not serve again yet."""
    RECOVERY_EXHAUSTED = "RecoveryExhausted"
    """A group failed too often or in a way that trying again cannot mend; dsv4 stopped and waits for a change."""
    ROLLED_BACK = "RolledBack"
    """The specification was given up, and groups run from the last one that all of them answered with."""
    SUSPENDED = "Suspended"
    """Nothing runs because `spec.suspend` asks for it."""


class ConditionStatus(StrEnum):
    """The value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Reason for the value of a condition, or the occurrence that an event reports."""

    PLAN_ACCEPTED = "PlanAccepted"
    PLAN_REFUSED = "PlanRefused"
    SPEC_INVALID = "SpecInvalid"
    """The specification breaks a rule that the API server did not check."""
    NOT_ALLOWED = "NotAllowed"
    """The specification asks for what the cluster's administrator does not allow."""
    HARDWARE_UNSUPPORTED = "HardwareUnsupported"
    NODES_MISSING = "NodesMissing"
    MEMORY_SHORT = "MemoryShort"

    PENDING = "Pending"
    GROUP_FORMING = "GroupForming"
    FORMING_FAILED = "FormingFailed"
    """The members of a group have not been created for five minutes; the message has the reason."""
    GROUP_STARTING = "GroupStarting"
    ENGINE_READY = "EngineReady"
    ALL_GROUPS_READY = "AllGroupsReady"
    GROUPS_NOT_READY = "GroupsNotReady"
    ENDPOINT_NOT_READY = "EndpointNotReady"
    """Every group answers, but no completion comes back through the public Service."""

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

    UPDATE_STARTED = "UpdateStarted"
    UPDATE_COMPLETED = "UpdateCompleted"
    """All groups answer with a changed specification."""
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
    """A part of the reconcile failed and is tried again; the message has the reason, for example the API server's."""
    FOREIGN_OBJECT = "ForeignObject"
    """An object of a name that the deployment needs belongs to somebody else. It is not touched."""
    OBJECT_TERMINATING = "ObjectTerminating"
    """An object of a name that the deployment needs is still being removed."""
    OBJECT_IGNORED = "ObjectIgnored"
    """A pod with the name or the labels of a member is none, or a member's labels were changed."""
    PAUSED = "Paused"
    """The annotation `dsv4.dev/paused` keeps dsv4 from doing anything."""


HISTORY_LENGTH = 10
"""Failures that a group's status remembers."""

_LARGEST_REPAIR = 100


class StatusPart(Report):
    """A part of the status."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class GroupPhase(StrEnum):
    """Phase of a group's lifecycle."""

    PENDING = "Pending"
    """Nothing runs and nothing may be formed yet."""
    FORMING = "Forming"
    """An incarnation has its number, and its members are being created."""
    STARTING = "Starting"
    """All members exist; the engine has not served in this incarnation yet."""
    SERVING = "Serving"
    RESTARTING = "Restarting"
    """Level 1: the head's agent restarts the engine in place."""
    RECOVERING = "Recovering"
    """Level 2: the incarnation is dead, is being fenced, and another one follows."""
    UPDATING = "Updating"
    """The incarnation is being fenced because the specification changed."""
    DRAINING = "Draining"
    """The group is being stopped on request."""
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"
    """No longer wanted: fewer replicas, or the deployment is being deleted."""
    FAILED = "Failed"
    """Level 3: given up until the specification changes."""


class DeploymentPhase(StrEnum):
    """A summary of the groups for people; programs read the conditions."""

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
    """The machine that it runs on."""
    address: str = ""
    """Its address in the group's network."""
    phase: Phase | None = None
    """Phase that its agent reports; absent until the agent has answered once."""
    phase_time: Time | None = None
    """Beginning of that phase, by the member's clock."""
    message: str = ""
    """Progress, or how it ended."""
    processes: tuple[Process, ...] = ()
    """Processes of the member that are known by number."""
    silent_since: Time | None = None
    """Since when its agent has not answered; absent while it answers."""


class FailureStatus(StatusPart):
    """One death of an engine or a group."""

    time: Time
    """Time at which it was noticed."""
    cause: Cause = Cause.UNKNOWN
    """Cause of the death."""
    incarnation: int = 0
    """The incarnation that it happened in."""
    engine_generation: int | None = None
    """The life of the engine, within the incarnation, that it ended; absent if it was not an engine's death."""
    generation: int = 0
    """The `metadata.generation` that it happened under."""
    culprit_rank: int | None = None
    """The member that it began on, where known."""
    culprit_node: str | None = None
    """That member's machine."""
    message: str = ""
    """The first fatal line, or what was seen."""
    detected_by: str = ""
    """The signal that showed it."""
    level: int | None = None
    """1: engine restart in place; 2: new incarnation; 3: given up."""
    recover_seconds: float | None = None
    """From `time` until the next checked completion; absent until then."""
    weights_doubted: bool | None = None
    """Whether damaged weights would explain it, although no file was found to be wrong; absent if not."""
    evidence: str | None = None
    """Place of the evidence."""

    @property
    def deterministic(self) -> bool:
        """Return whether trying again cannot help if the same happens again."""
        return self.cause.deterministic or self.weights_doubted is True


class KvCacheStatus(StatusPart):
    """The KV cache of a group's present engine, as it says itself."""

    tokens: int
    """Its size."""
    concurrency: float = 0.0
    """Requests of `maxModelLen` tokens that fit into it at once."""
    planned_tokens: int | None = None
    """The size that the memory plan expected; absent without a plan for it."""


class MeasuredItem(StatusPart):
    """One item of the memory plan, as a start logged it."""

    item: str
    """As `dsv4 plan` calls it."""
    difference: int
    """Bytes logged beyond what was planned; negative if fewer."""


class MeasuredStatus(StatusPart):
    """Measurements of memory that the group's latest start logged; the next plan of the same uses them."""

    of: str
    """Model, image and machine."""
    incarnation: int
    """The incarnation that logged it."""
    time: Time | None = None
    """Time of the start that logged it."""
    items: tuple[MeasuredItem, ...] = ()
    """Differences from the plan."""


class GroupStatus(StatusPart):
    """One group. It also holds what the next decision needs, so that whoever decides may restart at any time."""

    index: int = 0
    """Number of the group, from 0."""
    phase: GroupPhase = GroupPhase.PENDING
    """Phase of the group."""
    phase_time: Time | None = None
    """Beginning of that phase."""
    incarnation: int = 0
    """The number of the latest incarnation; 0 before the first. A number is never used twice."""
    fenced_below: int = 0
    """Every incarnation below this number is known to have ended."""
    revision: str = ""
    """Fingerprint of the specification that this incarnation was formed from."""
    revision_time: Time | None = None
    """Time at which the group was first formed from it."""
    served_revision: str = ""
    """Fingerprint of the specification that the group last answered with."""
    members: tuple[MemberStatus, ...] = ()
    """The incarnation's members in rank order."""
    engine_generation: int = 0
    """Lives of the engine in this incarnation."""
    expected_ready_seconds: float | None = None
    """Expected duration of the start."""
    kv_cache: KvCacheStatus | None = None
    """Size of the engine's KV cache; absent until the engine has reported it."""
    kernels: tuple[KernelStatus, ...] = ()
    """Providers of a layer's operations; empty until the engine has reported them, and where all of them are vLLM's."""
    measured: MeasuredStatus | None = None
    """Memory that the latest start which got so far has logged."""
    formed_time: Time | None = None
    """Time at which the incarnation got its number."""
    ready_time: Time | None = None
    """Time at which the present engine generation first answered a checked completion."""
    restarts: tuple[Time, ...] = ()
    """Restarts of any level within the recovery window, oldest first."""
    total_restarts: int = 0
    """Restarts of any level since the deployment was created."""
    next_restart_time: Time | None = None
    """Earliest beginning of a waiting restart."""
    exhausted_generation: int | None = None
    """The `metadata.generation` under which recovery was given up."""
    last_failure: FailureStatus | None = None
    """The latest death."""
    history: tuple[FailureStatus, ...] = ()
    """The latest deaths, oldest first, at most 10; the last is `lastFailure`."""


class Condition(StatusPart):
    """One condition in the form of `metav1.Condition`."""

    type: ConditionType
    """Type of the condition."""
    status: ConditionStatus
    """Status of the condition."""
    observed_generation: int = 0
    """The `metadata.generation` that it is about."""
    last_transition_time: Time
    """Time of the last change of `status`."""
    reason: Reason
    """Reason, for programs."""
    message: str = ""
    """Explanation, for people."""


class RejectedStatus(StatusPart):
    """A specification that was given up."""

    revision: str
    """Its fingerprint."""
    time: Time
    """Time at which it was given up."""
    message: str = ""
    """Explanation, for people."""


class RolloutStatus(StatusPart):
    """Rollout state that is needed to go back from a changed specification."""

    served: str = ""
    """The part of the specification that members are formed from, as JSON, that all groups last answered with."""
    rejected: RejectedStatus | None = None
    """The specification that was given up for it; absent once the specification has changed again."""
    accepted: str = ""
    """The last valid specification, as JSON; groups keep running from it while a changed one is refused."""


class DeploymentStatus(StatusPart):
    """Status of a deployment: what dsv4 found and did."""

    conditions: tuple[Condition, ...] = ()
    """The state for programs, one entry a type."""
    observed_generation: int = 0
    """The `metadata.generation` that this status is about."""
    phase: DeploymentPhase = DeploymentPhase.PENDING
    """A summary for people."""
    replicas: int = 0
    """Groups that exist."""
    ready_replicas: int = 0
    """Groups that answer."""
    updated_replicas: int = 0
    """Groups whose members were formed from the specification as it is now."""
    endpoint: str | None = None
    """Base URL of the OpenAI-compatible API."""
    ray_dashboard: str | None = None
    """URL of the Ray dashboard."""
    expected_ready_seconds: float | None = None
    """Expected duration of a start."""
    rollout: RolloutStatus = RolloutStatus()
    """State that is needed to go back from a changed specification."""
    removed_incarnation: int = 0
    """Highest incarnation of the groups that were removed by fewer `spec.replicas`; later groups begin above it."""
    groups: tuple[GroupStatus, ...] = ()
    """The groups in order."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of type `kind`; None if there is none yet."""
        return next((condition for condition in self.conditions if condition.type is kind), None)


def read_status(data: object) -> DeploymentStatus:
    """Return the status in `data`, JSON values that possibly another version wrote; unreadable parts are left out."""
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
