"""Evidence kept of an incarnation that died: a ConfigMap of at most 64 KiB. Never a prompt: agents tell none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.lifecycle.observed import ObservedMember

KEEP = 5
_BYTES = 60 * 1024
"""Of all entries; the rest of 64 KiB is for the object itself."""
_LINES = (200, 100, 50, 20, 5, 0)
"""Last lines of each log that are kept: as many as there is room for."""


def config(
    deployment: DSV4Deployment,
    group: int,
    incarnation: int,
    members: Sequence[ObservedMember],
    told: Mapping[int, bytes | None],
) -> Manifest:
    """Build the ConfigMap.

    Args:
        deployment: whose.
        group: which group.
        incarnation: which of its incarnations.
        members: as last observed.
        told: rank to what its agent answered to `/v1/evidence`; None if it did not.
    """
    room = _BYTES // max(1, len(members))
    data = {f"m{member.rank}.json": _entry(member, told.get(member.rank), room) for member in members}
    name = names.evidence_name(deployment.metadata.name, group, incarnation)
    about = names.metadata(deployment, name, component=names.EVIDENCE, group=group, incarnation=incarnation)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def superfluous(kept: Sequence[Manifest]) -> list[Manifest]:
    """Return all but the newest."""
    return sorted(kept, key=lambda one: names.number(one, names.INCARNATION) or 0)[:-KEEP]


def _entry(member: ObservedMember, told: bytes | None, room: int) -> str:
    seen: dict[str, Any] = {
        "rank": member.rank,
        "node": member.node,
        "started": member.started,
        "ended": member.ended,
        "endedTime": member.ended_time,
        "heard": member.heard,
        "status": member.status.to_dict() if member.status is not None else None,
        "agent": "did not answer" if told is None else None,
    }
    agent = _parsed(told)
    for lines in _LINES:
        text = json.dumps({**seen, **_shortened(agent, lines)}, indent=1, ensure_ascii=False)
        if len(text.encode()) <= room:
            return text
    return json.dumps({**seen, "status": None, "agent": "left out for want of room"})


def _parsed(told: bytes | None) -> dict[str, Any]:
    try:
        answer = json.loads(told or b"{}")
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _shortened(agent: Mapping[str, Any], lines: int) -> dict[str, Any]:
    logs = agent.get("lastLines") or {}
    found: dict[str, Any] = {name: agent[name] for name in ("firstFatal", "memory") if name in agent}
    if lines:
        found["lastLines"] = {name: log[-lines:] for name, log in logs.items()}
        found["window"] = (agent.get("window") or [])[-lines:]
    return found
