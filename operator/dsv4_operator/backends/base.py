"""The one interface between the reconcile loop and whatever runs the members."""

from __future__ import annotations

from typing import Protocol

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan


class BackendError(Exception):
    """What was asked for cannot be done now; the text says why, and what helps. It is tried again."""


class Backend(Protocol):
    """Creates, watches and removes the members of groups.

    Every method is idempotent, bounded in time, and safe to repeat after the caller died between any two of them.
    """

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """The machines that the planner may use for `deployment`.

        Called first in every turn: the other methods act for the deployment as it was given here.
        """
        ...

    async def ensure(self, plan: GroupPlan, deployment: DSV4Deployment | None = None) -> None:
        """Create the members of the plan's incarnation that do not exist; members that do exist are left alone.

        Args:
            plan: of one incarnation.
            deployment: the version of the specification that it was made from; None: the one given to `facts`.
        """
        ...

    async def observe(self, key: GroupKey) -> Observed:
        """Every member that still exists, of any incarnation, with its agent's latest status."""
        ...

    async def drain(self, key: GroupKey, incarnation: int, seconds: float) -> bool:
        """Have the engine of `incarnation` finish its open requests within `seconds`; whether it still does.

        Asks the head's agent, and does not wait for the requests: ask again until it is over. Never raises; an agent
        that cannot be asked within a few seconds has nothing that could be waited for.
        """
        ...

    async def fence(self, key: GroupKey, incarnation: int) -> None:
        """End every member of `incarnation`, and return only when none of its processes can act any more."""
        ...

    async def collect_evidence(self, key: GroupKey, incarnation: int) -> str | None:
        """Save what the members of `incarnation` left (15 s at most); returns its place, None if nothing was there."""
        ...

    async def forget(self, key: GroupKey, incarnation: int) -> None:
        """Remove what `fence` left of `incarnation`, except its evidence."""
        ...
