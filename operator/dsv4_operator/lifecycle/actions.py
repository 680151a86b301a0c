"""Actions that `decide` may ask for, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment, GroupStatus
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_operator.planning import PlanRefused
from dsv4_runtime.contract import GroupPlan


@dataclass(frozen=True, slots=True)
class Form:
    """Create the members of `plan` that do not exist (`Backend.ensure`)."""

    plan: GroupPlan
    deployment: DSV4Deployment
    """Deployment that the plan was made from."""


@dataclass(frozen=True, slots=True)
class CollectEvidence:
    """Save what the members left, then `record_evidence`. If it fails, go on: evidence never delays a recovery."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Have a healthy engine finish its open requests; until it says that it has, do none of the actions after it."""

    key: GroupKey
    incarnation: int
    seconds: float
    """The longest that they get, from the first time that the engine is asked."""


@dataclass(frozen=True, slots=True)
class Fence:
    """End every member; until it has failed or is over, do none of the actions after it."""

    key: GroupKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what fencing left."""

    key: GroupKey
    incarnation: int


Action = Form | CollectEvidence | Drain | Fence | Forget

Planner = Callable[[int, Sequence[float]], GroupPlan]
"""Makes the plan of an incarnation from its number and the restarts that are used; raises `PlanRefused`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about one group now."""

    actions: tuple[Action, ...]
    """In this order; one that fails ends the list, except `CollectEvidence`, and so does one that is not over yet."""
    next_look: float
    """Unix time at which to decide again at the latest; any news is a reason to do so earlier."""
    status: GroupStatus
    """To be kept, also when an action failed. The next decision must be given the status as it was last kept."""
    completed: GroupStatus | None = None
    """To be kept in the place of `status` once every action is over; None: `status`."""
    refusal: PlanRefused | None = None
    """Reason why the specification could not be planned, if it had to be."""
    error: Exception | None = None
    """Exception of a decision or a plan that failed because of a defect; the group stays as it is."""
