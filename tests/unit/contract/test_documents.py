"""Documents exchanged between operator and agents."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    Failure,
    GroupPlan,
    RecoveryPolicy,
)

PLAN: dict[str, Any] = {
    "namespace": "default",
    "deployment": "nano",
    "group": 0,
    "incarnation": 1,
    "members": [
        {
            "rank": 0,
            "role": "Head",
            "address": "10.0.0.1",
            "devices": 1,
            "ports": {"agent": 1, "gcs": 2, "dashboard": 3, "api": 4},
            "rayArgs": ["start"],
            "env": {"A": "member"},
        },
        {"rank": 1, "role": "Worker", "address": "10.0.0.2", "devices": 1, "ports": {"agent": 1}, "rayArgs": ["start"]},
    ],
    "env": {"A": "group", "B": "group"},
    "rayTokenFile": "/token",
    "engine": {"args": [], "servedName": "nano"},
    "weights": {"source": "Path", "path": "/w"},
    "timeouts": {"preflight": 1, "staging": 1, "formation": 1, "load": 1, "firstToken": 1, "drain": 1},
    "expectations": {"worldSize": 2, "memoryBytes": 0, "shmBytes": 0, "readySeconds": 1},
    "recovery": {"maxRestarts": 5, "windowSeconds": 3600, "backoffBaseSeconds": 1, "backoffMaxSeconds": 10},
}


def test_a_plan_survives_being_written() -> None:
    plan = GroupPlan.model_validate(PLAN)
    assert GroupPlan.model_validate_json(plan.to_json()) == plan
    assert plan.to_dict()["version"] == "dsv4.dev/plan/v1"


def test_a_members_environment_wins() -> None:
    plan = GroupPlan.model_validate(PLAN)
    assert plan.environment(0) == {"A": "member", "B": "group"}
    assert plan.environment(1) == {"A": "group", "B": "group"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"members": []}, "at least 1 item"),
        ({"members": PLAN["members"][::-1]}, r"ranks must be 0\.\.1 in order"),
        ({"members": [PLAN["members"][0], {**PLAN["members"][1], "role": "Head"}]}, "rank 0 and no other is the head"),
        ({"members": [{**PLAN["members"][0], "ports": {"agent": 1}}]}, "the head needs gcs, dashboard and api"),
        ({"members": PLAN["members"][:1]}, "2 ranks do not match 1 devices"),
        ({"surprise": 1}, "Extra inputs"),
        ({"incarnation": 0}, "greater than or equal to 1"),
        ({"version": "dsv4.dev/plan/v2"}, "Input should be 'dsv4.dev/plan/v1'"),
    ],
)
def test_an_inconsistent_plan_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        GroupPlan.model_validate({**PLAN, **change})


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        GroupPlan.model_validate(PLAN).incarnation = 2  # type: ignore[misc]


def test_a_newer_agents_report_is_read() -> None:
    status = AgentStatus.model_validate(
        {
            "deployment": "nano",
            "group": 0,
            "incarnation": 1,
            "rank": 0,
            "phase": "Serving",
            "phaseTime": 1,
            "time": 2,
            "verdict": {"health": "Healthy", "news": True},
            "fromTheFuture": {},
        }
    )
    assert status.to_dict()["phaseTime"] == 1.0


def test_causes_that_a_retry_cannot_fix() -> None:
    assert {cause for cause in Cause if cause.deterministic} == {
        Cause.CONFIG_ERROR,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.KERNEL_MISSING,
        Cause.PLUGIN_NOT_LOADED,
        Cause.PORT_CONFLICT,
        Cause.PREFLIGHT_FAILED,
        Cause.STAGING_FAILED,
        Cause.ENGINE_WRONG,
        Cause.WEIGHTS_CORRUPT,
        Cause.DISK_FULL,
    }


def test_unset_fields_are_omitted() -> None:
    failure = Failure(time=1, cause=Cause.UNKNOWN, message="", detected_by="exit")
    assert failure.to_dict() == {"time": 1.0, "cause": "Unknown", "message": "", "detectedBy": "exit"}


def test_a_policy_has_no_negative_numbers() -> None:
    with pytest.raises(ValidationError):
        RecoveryPolicy(max_restarts=-1, window_seconds=1, backoff_base_seconds=0, backoff_max_seconds=0)
