"""A plan of two members for the agent's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.contract import (
    EnginePlan,
    Expectations,
    GroupPlan,
    MemberPlan,
    MemberPorts,
    RecoveryPolicy,
    Role,
    Timeouts,
    WeightsPlan,
    WeightsSource,
)

MakePlan = Callable[..., GroupPlan]


@pytest.fixture
def make_plan() -> MakePlan:
    """A plan whose fields can be replaced by name."""

    def make(**changes: Any) -> GroupPlan:
        head = MemberPorts(agent=18090, gcs=16379, dashboard=18265, api=18000)
        fields: dict[str, Any] = {
            "namespace": "default",
            "deployment": "nano",
            "group": 0,
            "incarnation": 1,
            "members": (
                MemberPlan(rank=0, role=Role.HEAD, address="127.0.0.1", devices=1, ports=head, ray_args=()),
                MemberPlan(
                    rank=1,
                    role=Role.WORKER,
                    address="127.0.0.2",
                    devices=1,
                    ports=MemberPorts(agent=18090),
                    ray_args=(),
                ),
            ),
            "ray_token_file": "/nowhere",
            "engine": EnginePlan(args=(), served_name="nano"),
            "weights": WeightsPlan(source=WeightsSource.PATH, path="/nowhere"),
            "timeouts": Timeouts(preflight=1, staging=1, formation=1, load=1, first_token=1, drain=3),
            "expectations": Expectations(world_size=2, memory_bytes=0, shm_bytes=0, ready_seconds=1),
            "recovery": RecoveryPolicy(
                max_restarts=3, window_seconds=3600, backoff_base_seconds=10, backoff_max_seconds=60
            ),
        }
        return GroupPlan(**{**fields, **changes})

    return make
