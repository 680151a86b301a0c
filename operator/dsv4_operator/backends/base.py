"""Interface between the reconcile loop and the backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupStatus, Reason
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

CALL_SECONDS = 2.0
"""Longest time that a method of a `Backend` may wait for members, agents or nodes; requests have their own limits."""


class BackendError(Exception):
    """A request that cannot be executed now; the text contains the reason and the remedy. It is repeated."""

    reason: Reason = Reason.ACTION_FAILED
    """Reason of the event and the condition that report it."""
    retry_seconds: float | None = None
    """Seconds until the next attempt, for a cause that is expected to end soon; None: with backoff."""


class Backend(Protocol):
    """Creates, observes and removes the members of deployments.

    A backend keeps no state of a deployment that it could not observe again: methods get all inputs as arguments, and
    no method must be called before another. Every method is idempotent, safe to repeat after a crash of the caller
    between any two of them, and waits for `CALL_SECONDS` at most, except `collect_evidence`.
    """

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """Return the machines for plans of `deployment`, and its checkpoint where the files can be read."""
        ...

    def refresh(self, deployment: DSV4Deployment, facts: Facts) -> Facts:
        """Return `facts` with the nodes that are free now, without waiting: other groups may have reserved the nodes
        that were free before."""
        ...

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Reserve the resources of `plan`, made from `deployment`, for its members, which are to be created soon."""
        ...

    async def hold(self, deployment: DSV4Deployment, plan: GroupPlan) -> bool:
        """Keep the nodes of `plan` free for its members while the present incarnation ends; return whether they are
        still free."""
        ...

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Create the missing members of the plan's incarnation; existing members are not changed."""
        ...

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        """Return every existing member of `group`, of any incarnation, with the latest status of its agent."""
        ...

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        """Let the engine of `incarnation` finish its open requests within `seconds`; return whether the drain is
        complete.

        Incremental: call again until complete. A drain without a reachable agent is complete. Never raises.
        """
        ...

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        """End every member of `incarnation`; return whether none of its processes can act any more.

        Incremental: call again until complete.

        Raises:
            BackendError: members did not end in time; the text contains their names and the remedy.
        """
        ...

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        """Save the evidence of `incarnation`'s members within 15 s; return its location, None if there was none."""
        ...

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        """Remove the objects and files of `incarnation` that remain after `fence`, except its evidence."""
        ...

    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Reconcile Services and gateways with `deployment` and `status`; write only changes."""
        ...

    def endpoint_problem(self, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> str | None:
        """Return the reason why no request through the public endpoint is answered; None: requests are answered, or
        none are sent.

        The requests run in the background; the caller does not wait for them. `deployment` has the status at its first
        reconcile, `groups` are the present statuses.
        """
        ...

    async def release(self, namespace: str, name: str) -> None:
        """Close the connections of a deployment that this process no longer reconciles."""
        ...

    async def close(self) -> None:
        """Close all connections; members are not touched."""
        ...
