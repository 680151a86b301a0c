"""The one interface between the reconcile loop and whatever runs the members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupStatus, Reason
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

CALL_SECONDS = 2.0
"""The longest that a method of a `Backend` may wait for members, agents or nodes; requests have limits of their own."""


class BackendError(Exception):
    """Error for a request that cannot be carried out now; the text says why, and what helps. It is tried again."""

    reason: Reason = Reason.ACTION_FAILED
    """Reason of the event and the condition that report it."""
    retry_seconds: float | None = None
    """Seconds until it is tried again, for a cause that is expected to end soon; None: with backoff."""


class Backend(Protocol):
    """Creates, observes and removes the members of all deployments that it runs.

    A backend keeps no state of a deployment that could not be seen again: what a method needs is its argument, and no
    method has to be called before another. Every method is idempotent, safe to repeat after the caller died between
    any two of them, and waits for `CALL_SECONDS` at most, except `collect_evidence`.
    """

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """Return the machines that the planner may use for `deployment`."""
        ...

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Keep what `plan`, made from `deployment`, takes for its members, which are to be created soon."""
        ...

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Create the members of the plan's incarnation that do not exist; members that do exist are left alone.

        Args:
            deployment: the version of the specification that the plan was made from.
            plan: of one incarnation.
        """
        ...

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        """Return every member of `group` that still exists, of any incarnation, with its agent's latest status."""
        ...

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        """Have the engine of `incarnation` finish its open requests within `seconds`; return whether it has.

        Incremental: ask again until it is over, which it also is where nobody can be asked. Never raises.
        """
        ...

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        """End every member of `incarnation`; return whether none of its processes can act any more.

        Incremental: ask again until it is so.

        Raises:
            BackendError: members do not end in the time that they have; the text names them and what helps.
        """
        ...

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        """Save what the members of `incarnation` left, within 15 s; return its place, None if nothing was there."""
        ...

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        """Remove what `fence` left of `incarnation`, except its evidence."""
        ...

    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Bring what users reach to what `deployment` and `status` ask for; write only what changed."""
        ...

    def endpoint_problem(self, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> str | None:
        """Return why no request through the public endpoint is answered, for people; None: it is, or nobody tries it.

        Requests that find out go on beside the caller, which never waits for them, and end nothing.

        Args:
            deployment: with its status as it was when it was first looked at.
            groups: as they are now.
        """
        ...

    async def release(self, namespace: str, name: str) -> None:
        """Close the connections of a deployment that this process does not look after any more."""
        ...

    async def close(self) -> None:
        """Close all connections; members are not touched."""
        ...
