"""A backend in memory, a clock and a store for tests of the reconciler."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.controller.reconcile import Endpoints, Reconciler
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_runtime.contract import AgentStatus, EngineStatus, GroupPlan, Health, Phase, Progress, Verdict

NANO = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()
ENDPOINTS = Endpoints("http://127.0.0.1:8000/v1", "http://127.0.0.1:8265")


class Members:
    """A backend that keeps its members in memory. Calls named in `broken` fail."""

    def __init__(self) -> None:
        self.members: dict[tuple[int, int], ObservedMember] = {}
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.asked: list[float] = []
        self.reserved: list[tuple[int | None, int]] = []
        self.refreshed: Facts | None = None
        """Facts after reservations of other groups."""
        self.drains = 0
        """Remaining calls of `drain` with open requests."""
        self.fences = 0
        """Remaining calls of `fence` after which fenced members still exist."""
        self.evidence_there = asyncio.Event()
        self.evidence_there.set()
        self.engine: EngineStatus | None = None
        self.unreachable: str | None = None
        """Reason for which the public endpoint is unreachable."""

    def _call(self, name: str, incarnation: int) -> None:
        self.calls.append(f"{name} {incarnation}")
        if name in self.broken:
            raise OSError(f"{name} is broken")

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        nodes = tuple(NodeFacts(f"n{i}", f"10.0.0.{i}", "eth0", 1, 2**34) for i in range(2))
        return Facts(nodes, True, "/s", "/w", "/t")

    def refresh(self, deployment: DSV4Deployment, facts: Facts) -> Facts:
        return self.refreshed or facts

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        self.reserved.append((deployment.spec.engine.max_model_len, plan.incarnation))

    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        return

    def endpoint_problem(self, deployment: DSV4Deployment, groups: object) -> str | None:
        return self.unreachable

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        self._call("ensure", plan.incarnation)
        for member in plan.members:
            key = (plan.incarnation, member.rank)
            self.members[key] = ObservedMember(*key, f"n{member.rank}", member.address, started=0.0)

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        return Observed(GroupKey.of(deployment, group), tuple(self.members.values()))

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        self._call("drain", incarnation)
        self.asked.append(seconds)
        self.drains -= 1
        return self.drains < 0

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        self._call("fence", incarnation)
        self.fences = max(-1, self.fences - 1)
        if self.fences >= 0:
            return False
        for name, member in list(self.members.items()):
            if name[0] == incarnation:
                self.members[name] = ObservedMember(
                    *name, member.node, member.address, started=0.0, ended="killed", ended_time=1.0
                )
        return True

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        self._call("evidence", incarnation)
        await self.evidence_there.wait()
        return f"/evidence/{incarnation}"

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        self._call("forget", incarnation)
        self.members = {name: member for name, member in self.members.items() if name[0] != incarnation}

    def speak(self, now: float, stage: str = "") -> None:
        """Set a status for all members: serving, or in `stage` of loading."""
        for (incarnation, rank), member in self.members.items():
            engine = EngineStatus(generation=1, ready_time=now) if rank == 0 else None
            known = member.status.engine if member.status is not None else self.engine
            status = AgentStatus(
                deployment="nano",
                group=0,
                incarnation=incarnation,
                rank=rank,
                phase=Phase.LOADING if stage else Phase.SERVING,
                phase_time=1000.0,
                progress=Progress(stage=stage) if stage else None,
                time=now,
                verdict=Verdict(health=Health.HEALTHY),
                engine=(known or engine) if rank == 0 else None,
            )
            self.engine = status.engine or self.engine
            self.members[incarnation, rank] = replace(member, status=status, heard=now)

    def end(self, incarnation: int, rank: int, now: float) -> None:
        member = self.members[incarnation, rank]
        self.members[incarnation, rank] = ObservedMember(
            incarnation, rank, member.node, member.address, started=0.0, ended="exit code 0", ended_time=now
        )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Saved(list[DSV4Deployment]):
    """Saved deployments in order."""

    async def save(self, deployment: DSV4Deployment) -> None:
        self.append(deployment)


async def until_formed(members: Members, reconciler: Reconciler, deployment: DSV4Deployment, incarnation: int) -> None:
    for _ in range(10):
        await reconciler.reconcile(deployment)
        if (incarnation, 1) in members.members:
            return
    raise AssertionError(members.calls)


async def until_served(members: Members, reconciler: Reconciler, deployment: DSV4Deployment, clock: Clock) -> None:
    """Form the first incarnation, and report three times, a second apart, that it serves."""
    await until_formed(members, reconciler, deployment, 1)
    for _ in range(3):
        clock.now += 1
        members.speak(clock.now)
        await reconciler.reconcile(deployment)
