"""Lifecycle of groups: decisions, status and events, computed from observations. Pure."""

from dsv4_operator.lifecycle.decide import (
    Action,
    CollectEvidence,
    Decision,
    Drain,
    Fence,
    Forget,
    Form,
    Hold,
    Planner,
    record_evidence,
)
from dsv4_operator.lifecycle.rollout import decide_groups, versions, with_accepted
from dsv4_operator.lifecycle.status import (
    Event,
    EventType,
    compute_status,
    events,
    given_up,
    refused_status,
    update_status,
)
