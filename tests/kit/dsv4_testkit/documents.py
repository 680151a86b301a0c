"""Documents exchanged between operator and runtime, complete except for fields that a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4_runtime.contract import (
    AgentStatus,
    EnginePlan,
    Expectations,
    GroupPlan,
    Health,
    MemberPlan,
    MemberPorts,
    Phase,
    RecoveryPolicy,
    Role,
    Timeouts,
    Verdict,
    WeightsPlan,
    WeightsSource,
)

_HEAD = MemberPorts(agent=18090, gcs=16379, dashboard=18265, api=18000)
_OTHERS = MemberPorts(agent=18090)


def member_plan(rank: int = 0, address: str = "127.0.0.1", **changes: Any) -> MemberPlan:
    """Return a member with one device; rank 0 is the head."""
    role, ports = (Role.WORKER, _OTHERS) if rank else (Role.HEAD, _HEAD)
    fields = {"role": role, "address": address, "devices": 1, "ports": ports, "ray_args": ("start",)}
    return MemberPlan(rank=rank, **{**fields, **changes})


def group_plan(addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2"), **changes: Any) -> GroupPlan:
    """Return a plan with one member at each of `addresses`; fields can be replaced by name."""
    fields: dict[str, Any] = {
        "namespace": "default",
        "deployment": "nano",
        "group": 0,
        "incarnation": 1,
        "members": tuple(member_plan(rank, address) for rank, address in enumerate(addresses)),
        "ray_token_file": "/nowhere",
        "engine": EnginePlan(args=(), served_name="nano"),
        "weights": WeightsPlan(source=WeightsSource.PATH, path="/nowhere"),
        "timeouts": Timeouts(preflight=1, staging=1, formation=1, load=1, first_token=1, drain=3),
        "expectations": Expectations(world_size=len(addresses), memory_bytes=0, shm_bytes=0, ready_seconds=1),
        "recovery": RecoveryPolicy(
            max_restarts=3, window_seconds=3600, backoff_base_seconds=10, backoff_max_seconds=60
        ),
    }
    return GroupPlan(**{**fields, **changes})


def agent_status(rank: int = 0, phase: Phase = Phase.SERVING, *, now: float = 0.0, **changes: Any) -> AgentStatus:
    """Return the status of a healthy member in a phase that began at `now`."""
    fields: dict[str, Any] = {"deployment": "nano", "group": 0, "incarnation": 1, "phase_time": now, "time": now}
    fields["verdict"] = Verdict(health=Health.HEALTHY)
    return AgentStatus(rank=rank, phase=phase, **{**fields, **changes})
