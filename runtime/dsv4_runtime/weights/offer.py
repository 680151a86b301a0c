"""Report of a member on its copy of the checkpoint, and the choice of the one that fetches from the origin."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from dsv4_runtime.contract import Report


class Stance(StrEnum):
    """State of a member's work on its weights."""

    AWAY = "Away"
    """Not yet at staging."""
    BLOCKED = "Blocked"
    """Another process stages into the same directory; this member waits for it."""
    ACTIVE = "Active"
    COMPLETE = "Complete"


class Offer(Report):
    """`GET /v1/weights` of an agent."""

    stance: Stance = Stance.AWAY
    claimed: bool = False
    """Whether it fetches from the origin."""
    held: int = 0
    """Bytes that it has, finished or not."""
    files: dict[str, str] = Field(default_factory=dict)
    """Finished files that it hands out, with their SHA-256."""


def fetches_from_origin(me: int, held: int, claimed: bool, others: Mapping[int, Offer]) -> bool:
    """Tell whether this member is the one that fetches from the origin what no member has.

    Members that see the same agree on one: who has begun goes on, the lowest rank if several have; else who has the
    most bytes begins, the lowest rank among equals.

    Args:
        me: this member's rank.
        held: bytes that it has.
        claimed: whether it has begun.
        others: the latest offers of the members that can be reached.
    """
    active = {rank: offer for rank, offer in others.items() if offer.stance is Stance.ACTIVE}
    begun = [rank for rank, offer in active.items() if offer.claimed] + ([me] if claimed else [])
    if begun:
        return min(begun) == me
    return all((offer.held, -rank) < (held, -me) for rank, offer in active.items())
