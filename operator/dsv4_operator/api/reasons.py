"""The closed vocabulary of conditions and events. Names are stable: people's alerts depend on them."""

from __future__ import annotations

from enum import StrEnum


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
