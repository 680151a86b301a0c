"""Decisions in short form, and unknown members."""

from __future__ import annotations

from typing import Any

from dsv4_operator.lifecycle import Decision, Form
from dsv4_operator.lifecycle.observed import ObservedMember


def short(decision: Decision) -> list[str]:
    """Return each action in short form, e.g. "form 2"."""
    return [
        f"form {action.plan.incarnation}"
        if isinstance(action, Form)
        else f"{type(action).__name__.lower()} {action.incarnation}"
        for action in decision.actions
    ]


def stranger(scene: Any, incarnation: int) -> ObservedMember:
    """Return a member of an incarnation that the group does not have."""
    return ObservedMember(incarnation, 0, "node-0", "10.0.0.1", scene.now)
