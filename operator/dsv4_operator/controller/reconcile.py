"""One reconcile of one deployment, the same for every backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.backends.base import Backend
from dsv4_operator.lifecycle import (
    Action,
    CollectEvidence,
    Decision,
    Fence,
    Forget,
    Form,
    Planner,
    compute_status,
    decide,
    events,
    record_evidence,
)
from dsv4_operator.lifecycle.observed import GroupKey
from dsv4_operator.planning import plan_group
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

_log = logging.getLogger("dsv4")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where users reach the deployment."""

    api: str
    dashboard: str


class Reconciler:
    """Brings the groups of one deployment to what its specification asks for, one look at a time."""

    def __init__(
        self,
        backend: Backend,
        endpoints: Endpoints,
        *,
        save: Callable[[DSV4Deployment], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        backend: runs the members.
        endpoints: what the status tells users.
        save: keeps the deployment with its status; must raise if it could not, since decisions build on it.
        clock: Unix time.
        """
        self._backend = backend
        self._endpoints = endpoints
        self._save = save
        self._clock = clock
        self._kept: DSV4Deployment | None = None
        self.ended = False
        """Whether the deployment was to be deleted and nothing of it is left."""

    @property
    def status(self) -> DeploymentStatus | None:
        """The latest one that was kept; None before the first look."""
        return self._kept.status if self._kept is not None else None

    async def reconcile(self, deployment: DSV4Deployment, *, deleting: bool = False) -> float:
        """One look. Returns the seconds until the next one is due.

        Raises:
            Exception: what an action raised; the status was kept all the same.
        """
        known = self._kept.status if self._kept is not None else deployment.status
        facts = await self._backend.facts(deployment)
        decisions: list[Decision] = []
        groups: list[GroupStatus] = []
        problems: list[Exception] = []
        for index in range(max(deployment.spec.replicas, len(known.groups))):
            key = GroupKey(deployment.metadata.namespace, deployment.metadata.name, index)
            observed = await self._backend.observe(key)
            decision = decide(
                deployment,
                observed,
                next((group for group in known.groups if group.index == index), None),
                _planner(deployment, facts, index),
                self._clock(),
                deleting=deleting,
            )
            status, problem = await self._execute(decision)
            decisions.append(decision)
            groups.append(status)
            if problem is not None:
                problems.append(problem)
        refusal = next((decision.refusal for decision in decisions if decision.refusal is not None), None)
        self._keep(
            deployment,
            compute_status(
                deployment,
                groups,
                refusal,
                self._endpoints.api,
                self._endpoints.dashboard,
                known,
                self._clock(),
                deleting=deleting,
            ),
            deleting=deleting,
        )
        if problems:
            raise problems[0]
        self.ended = deleting and all(group.phase is GroupPhase.STOPPED for group in groups)
        return max(0.0, min((decision.next_look for decision in decisions), default=0.0) - self._clock())

    async def _execute(self, decision: Decision) -> tuple[GroupStatus, Exception | None]:
        """Act in order; the first action that fails ends the list, except evidence, which never delays a recovery."""
        status = decision.status
        for action in decision.actions:
            try:
                status = await self._act(action, status)
            except Exception as error:
                _log.exception("%s failed", type(action).__name__)
                if not isinstance(action, CollectEvidence):
                    return status, error
        return status, None

    async def _act(self, action: Action, status: GroupStatus) -> GroupStatus:
        match action:
            case Form(plan):
                await self._backend.ensure(plan)
            case Fence(key, incarnation):
                await self._backend.fence(key, incarnation)
            case Forget(key, incarnation):
                await self._backend.forget(key, incarnation)
            case CollectEvidence(key, incarnation):
                return record_evidence(status, incarnation, await self._backend.collect_evidence(key, incarnation))
        return status

    def _keep(self, deployment: DSV4Deployment, status: DeploymentStatus, *, deleting: bool) -> None:
        """Save if anything changed, and tell what happened."""
        kept = deployment.model_copy(update={"status": status})
        if kept == self._kept:
            return
        try:
            self._save(kept)
        except OSError as error:
            # Nothing may be formed on a status that was not kept; to end what runs needs none.
            if not deleting:
                raise
            _log.error("the status cannot be saved: %s", error)
        for event in events(self._kept.status if self._kept is not None else None, status):
            _log.info("%s %s: %s", event.type, event.reason, event.message)
        self._kept = kept


def _planner(deployment: DSV4Deployment, facts: Facts, group: int) -> Planner:
    def plan(incarnation: int, restarts: Sequence[float]) -> GroupPlan:
        return plan_group(deployment, facts, group=group, incarnation=incarnation, restarts=restarts)

    return plan
