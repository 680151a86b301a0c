"""The loop around the pure decisions: what it keeps, and what a failing action does to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_operator.api import ConditionType, DeploymentStatus, DSV4Deployment, GroupPhase, load
from dsv4_operator.backends.base import CALL_SECONDS
from dsv4_operator.controller import reconcile
from dsv4_operator.controller.reconcile import AGAIN_SECONDS, Endpoints, Reconciler
from dsv4_operator.kube import KubeError
from dsv4_operator.lifecycle.decide import QUIET_SECONDS
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning.facts import Facts, NodeFacts
from dsv4_runtime.contract import AgentStatus, EngineStatus, GroupPlan, Health, Phase, Progress, Verdict

NANO = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()
ENDPOINTS = Endpoints("http://127.0.0.1:8000/v1", "http://127.0.0.1:8265")


class Members:
    """A backend that only remembers. What it is told to break, breaks."""

    def __init__(self) -> None:
        self.members: dict[tuple[int, int], ObservedMember] = {}
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.asked: list[float] = []
        self.reserved: list[tuple[int | None, int]] = []
        self.drains = 0
        """How many more times the engine says that it has open requests."""
        self.fences = 0
        """How many more times members that are to end are still there."""
        self.evidence_there = asyncio.Event()
        self.evidence_there.set()
        self.engine: EngineStatus | None = None

    def _call(self, name: str, incarnation: int) -> None:
        self.calls.append(f"{name} {incarnation}")
        if name in self.broken:
            raise OSError(f"{name} is broken")

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        nodes = tuple(NodeFacts(f"n{i}", f"10.0.0.{i}", "eth0", 1, 2**34) for i in range(2))
        return Facts(nodes, True, "/s", "/w", "/t")

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        self.reserved.append((deployment.spec.engine.max_model_len, plan.incarnation))

    async def ensure_front(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        return

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
        """All members serve, or are on their way to it, and say so."""
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
    """What was saved, in its order."""

    async def save(self, deployment: DSV4Deployment) -> None:
        self.append(deployment)


@pytest.fixture
def world() -> tuple[Members, Reconciler, Saved, Clock]:
    members, saved, clock = Members(), Saved(), Clock()
    return members, Reconciler(members, ENDPOINTS, save=saved.save, clock=clock), saved, clock


async def until_formed(members: Members, reconciler: Reconciler, deployment: DSV4Deployment, incarnation: int) -> None:
    for _ in range(10):
        await reconciler.reconcile(deployment)
        if (incarnation, 1) in members.members:
            return
    raise AssertionError(members.calls)


async def test_a_number_is_kept_before_its_members_are_made(world: tuple) -> None:
    members, reconciler, saved, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    # The last one saved before `ensure` had claimed the number already.
    assert saved[0].status.groups[0].incarnation == 1
    assert members.calls[-1] == "ensure 1"


async def test_evidence_that_cannot_be_saved_delays_nothing(world: tuple) -> None:
    members, reconciler, _, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.broken = {"evidence"}
    clock.now += 5
    members.end(1, 1, clock.now)
    await until_formed(members, reconciler, deployment, 2)
    assert members.calls.index("evidence 1") < members.calls.index("fence 1") < members.calls.index("ensure 2")


async def test_a_fence_that_fails_is_tried_again_and_nothing_is_formed_meanwhile(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.broken = {"fence"}
    clock.now += 5
    members.end(1, 1, clock.now)
    for _ in range(3):
        with pytest.raises(OSError, match="fence is broken"):
            await reconciler.reconcile(deployment)
    assert "ensure 2" not in members.calls
    # The status is kept all the same, and says what is going on.
    assert saved[-1].status.groups[0].phase is GroupPhase.RECOVERING
    members.broken = set()
    await until_formed(members, reconciler, deployment, 2)


async def test_a_new_process_listens_before_it_calls_anybody_silent(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.speak(clock.now)
    await reconciler.reconcile(deployment)
    served = saved[-1]
    assert served.status.groups[0].phase is GroupPhase.SERVING
    heard = dict(members.members)

    def successor() -> Reconciler:
        members.members = {name: replace(member, status=None, heard=None) for name, member in heard.items()}
        saved.clear()
        return Reconciler(members, ENDPOINTS, save=saved.save, clock=clock)

    # It hears them in time: nothing changed, so nothing is written.
    following = successor()
    assert await following.reconcile(served) < 1
    clock.now += 1
    members.speak(clock.now)
    await following.reconcile(served)
    assert saved == []
    # It does not: then they are silent.
    following = successor()
    for _ in range(5):
        await following.reconcile(served)
        clock.now += 1
    assert saved[-1].status.groups[0].members[0].silent_since is not None
    # One is gone: that needs no listening.
    following = successor()
    members.end(1, 1, clock.now)
    await following.reconcile(served)
    assert saved[-1].status.groups[0].phase is GroupPhase.RECOVERING


async def test_a_plan_is_reserved_with_the_version_that_it_was_made_from() -> None:
    members, clock = Members(), Clock()
    told = members.reserved
    reconciler = Reconciler(members, ENDPOINTS, save=Saved().save, clock=clock)
    served = load(NANO)
    await until_formed(members, reconciler, served, 1)
    for _ in range(3):
        clock.now += 1
        members.speak(clock.now)
        await reconciler.reconcile(served)
    assert told
    assert set(told) == {(served.spec.engine.max_model_len, 1)}
    told.clear()
    engine = served.spec.engine.model_copy(update={"max_model_len": 2048})
    changed = served.model_copy(update={"spec": served.spec.model_copy(update={"engine": engine})})
    for _ in range(6):
        clock.now += 1
        await reconciler.reconcile(changed)
    assert set(told) <= {(served.spec.engine.max_model_len, 2), (2048, 2)}
    assert (2048, 2) in told


async def test_progress_alone_is_saved_now_and_then(world: tuple) -> None:
    members, _, saved, clock = world

    reconciler = Reconciler(members, ENDPOINTS, save=saved.save, progress_interval=5.0, clock=clock)
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    for second in range(20):
        clock.now += 1
        members.speak(clock.now, f"{5 * second} % of the weights")
        await reconciler.reconcile(deployment)
    messages = {member.message for one in saved for member in one.status.groups[0].members if member.rank == 0}
    assert len(messages - {""}) in (3, 4, 5)
    assert reconciler.status.groups[0].members[0].message == "95 % of the weights"
    # What matters is saved at once.
    count = len(saved)
    clock.now += 1
    members.end(1, 1, clock.now)
    await reconciler.reconcile(deployment)
    # The death before it is acted on, and then where its evidence is.
    assert len(saved) == count + 2


async def test_nothing_new_means_nothing_saved(world: tuple) -> None:
    members, reconciler, saved, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    count = len(saved)
    for _ in range(5):
        await reconciler.reconcile(deployment)
    assert len(saved) == count


async def test_a_full_disk_forms_nothing_and_does_not_keep_a_deletion_from_its_end(world: tuple) -> None:
    members, _, _, clock = world
    full = False

    async def save(_: DSV4Deployment) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    reconciler, deployment = Reconciler(members, ENDPOINTS, save=save, clock=clock), load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    full = True
    clock.now += 5
    members.end(1, 1, clock.now)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            await reconciler.reconcile(deployment)
    assert "ensure 2" not in members.calls
    for _ in range(5):
        await reconciler.reconcile(deployment, deleting=True)
    assert reconciler.ended
    assert members.members == {}


async def test_deletion_is_over_when_nothing_is_left(world: tuple) -> None:
    members, reconciler, _, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    for _ in range(10):
        await reconciler.reconcile(deployment, deleting=True)
        if reconciler.ended:
            break
    assert reconciler.ended
    assert members.members == {}


async def test_nothing_ends_before_its_open_requests_and_no_turn_waits_for_them(world: tuple) -> None:
    members, reconciler, saved, clock = world
    served = load(NANO)
    await until_formed(members, reconciler, served, 1)
    for _ in range(3):
        clock.now += 1
        members.speak(clock.now)
        await reconciler.reconcile(served)
    engine = served.spec.engine.model_copy(update={"max_model_len": 2048})
    changed = served.model_copy(update={"spec": served.spec.model_copy(update={"engine": engine})})
    members.calls.clear()
    members.drains = 3
    assert await reconciler.reconcile(changed) == 0.0
    assert members.calls == [], "kept first"
    assert saved[-1].status.groups[0].phase is GroupPhase.UPDATING
    for _ in range(3):
        assert await reconciler.reconcile(changed) == 1.0
    assert members.calls == ["drain 1"] * 3
    assert saved[-1].status.groups[0].phase is GroupPhase.UPDATING
    await reconciler.reconcile(changed)
    assert members.calls == ["drain 1"] * 4 + ["fence 1", "forget 1"]
    assert set(members.asked) == {engine.timeouts.drain}
    await until_formed(members, reconciler, changed, 2)


async def test_another_process_goes_on_with_a_drain(world: tuple) -> None:
    members, reconciler, saved, clock = world
    served = load(NANO)
    await until_formed(members, reconciler, served, 1)
    for _ in range(3):
        clock.now += 1
        members.speak(clock.now)
        await reconciler.reconcile(served)
    suspended = served.model_copy(update={"spec": served.spec.model_copy(update={"suspend": True})})
    await reconciler.reconcile(suspended)
    members.members = {name: replace(member, status=None, heard=None) for name, member in members.members.items()}
    members.calls.clear()
    members.drains = 1

    following = Reconciler(members, ENDPOINTS, save=saved.save, clock=clock)
    kept = suspended.model_copy(update={"status": saved[-1].status})
    for _ in range(2):
        clock.now += 0.5
        await following.reconcile(kept)
    assert members.calls == ["drain 1", "drain 1", "fence 1", "forget 1"]


async def test_the_count_of_open_requests_is_saved_now_and_then(world: tuple) -> None:
    members, _, saved, clock = world

    reconciler = Reconciler(members, ENDPOINTS, save=saved.save, progress_interval=5.0, clock=clock)
    served = load(NANO)
    await until_formed(members, reconciler, served, 1)
    for _ in range(3):
        clock.now += 1
        members.speak(clock.now)
        await reconciler.reconcile(served)
    suspended = served.model_copy(update={"spec": served.spec.model_copy(update={"suspend": True})})
    members.drains = 100
    await reconciler.reconcile(suspended)
    saved.clear()
    head = members.members[1, 0]
    for second in range(20):
        clock.now += 1
        stage = Progress(stage=f"waiting for {20 - second} open requests")
        said = head.status.model_copy(update={"phase": Phase.DRAINING, "progress": stage})
        members.members[1, 0] = replace(head, status=said, heard=clock.now)
        await reconciler.reconcile(suspended)
    texts = {one.status.condition(ConditionType.PROGRESSING).message for one in saved}
    assert len(saved) == len(texts) in (3, 4, 5)
    assert all("it is being stopped; waiting for " in text for text in texts)


async def test_members_that_end_slowly_hold_up_no_turn_and_nothing_is_formed_before_they_ended(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    clock.now += 5
    members.end(1, 1, clock.now)
    members.fences = 3
    for _ in range(3):
        assert await reconciler.reconcile(deployment) == AGAIN_SECONDS
        assert saved[-1].status.groups[0].phase is GroupPhase.RECOVERING
    assert members.calls[-4:] == ["evidence 1", "fence 1", "fence 1", "fence 1"]
    await until_formed(members, reconciler, deployment, 2)


async def test_a_suspended_group_is_suspended_when_its_members_ended(world: tuple) -> None:
    members, reconciler, saved, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    suspended = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"suspend": True})})
    # The cache shows no member any more, the API server still has them.
    hidden, members.members = members.members, {}
    members.fences = 2
    for _ in range(3):
        await reconciler.reconcile(suspended)
        assert saved[-1].status.groups[0].phase is GroupPhase.DRAINING
    members.members = hidden
    for _ in range(4):
        await reconciler.reconcile(suspended)
    assert saved[-1].status.groups[0].phase is GroupPhase.SUSPENDED


async def test_a_deletion_is_not_over_before_its_last_fence(world: tuple) -> None:
    members, reconciler, _, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    members.members = {}
    members.broken = {"fence"}
    for _ in range(4):
        with contextlib.suppress(OSError):
            await reconciler.reconcile(deployment, deleting=True)
        assert not reconciler.ended
    members.broken = set()
    for _ in range(2):
        await reconciler.reconcile(deployment, deleting=True)
    assert reconciler.ended


async def test_evidence_is_waited_for_between_turns_and_members_end_after_it(
    world: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, reconciler, saved, clock = world
    monkeypatch.setattr(reconcile, "_EVIDENCE_WAIT_SECONDS", 0.05)
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.evidence_there.clear()
    clock.now += 5
    members.end(1, 1, clock.now)
    for _ in range(4):
        begun = time.monotonic()
        assert await reconciler.reconcile(deployment) == AGAIN_SECONDS
        assert time.monotonic() - begun < CALL_SECONDS
    assert members.calls.count("evidence 1") == 1
    assert not {"fence 1", "forget 1"} & set(members.calls)
    members.evidence_there.set()
    await until_formed(members, reconciler, deployment, 2)
    assert saved[-1].status.groups[0].last_failure.evidence == "/evidence/1"


async def test_evidence_that_never_comes_ends_with_its_time(world: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    members, reconciler, _, clock = world
    monkeypatch.setattr(reconcile, "_EVIDENCE_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(reconcile, "_EVIDENCE_SECONDS", 0.2)
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.evidence_there.clear()
    clock.now += 5
    members.end(1, 1, clock.now)
    await until_formed(members, reconciler, deployment, 2)
    await reconciler.close()


async def test_no_replicas_are_no_reason_to_look_again_at_once(world: tuple) -> None:
    _, reconciler, _, _ = world
    deployment = load(NANO)
    none = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"replicas": 0})})
    for _ in range(3):
        assert await reconciler.reconcile(none) == QUIET_SECONDS


@pytest.mark.parametrize("error", [KubeError("the status was changed"), OSError(errno.EIO, "Input/output error")])
async def test_nothing_is_decided_on_a_status_that_was_not_saved(world: tuple, error: Exception) -> None:
    members, _, saved, clock = world
    broken = False

    async def save(deployment: DSV4Deployment) -> None:
        if broken:
            raise error
        await saved.save(deployment)

    reconciler, deployment = Reconciler(members, ENDPOINTS, save=save, clock=clock), load(NANO)
    broken = True
    for _ in range(3):
        with pytest.raises(type(error)):
            await reconciler.reconcile(deployment)
        # The claim was not kept, so it is no claim: the next turn makes it again instead of forming on it.
        assert reconciler.status == deployment.status
    assert members.calls == []
    broken = False
    await until_formed(members, reconciler, deployment, 1)
    clock.now += 5
    members.end(1, 1, clock.now)
    broken = True
    members.calls.clear()
    for _ in range(3):
        with pytest.raises(type(error)):
            await reconciler.reconcile(deployment)
    assert members.calls == [], "what died is told before it is ended"
