"""End of members by the reconciler: deletion, open requests, fences, evidence."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dsv4_operator.api import ConditionType, GroupPhase, load
from dsv4_operator.controller import reconcile
from dsv4_operator.controller.reconcile import AGAIN_SECONDS, Reconciler
from dsv4_runtime.contract import Phase, Progress
from dsv4_testkit.reconcile_world import ENDPOINTS, NANO, until_formed, until_served


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
    await until_served(members, reconciler, served, clock)
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
    await until_served(members, reconciler, served, clock)
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
    await until_served(members, reconciler, served, clock)
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
    # The cache has no members any more, and the API server still has them.
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
    members, reconciler, _, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    members.members = {}
    members.broken = {"fence"}
    for _ in range(4):
        await reconciler.reconcile(deployment, deleting=True)
        assert not reconciler.ended
    members.broken = set()
    clock.now += 10
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
        async with asyncio.timeout(60):
            assert await reconciler.reconcile(deployment) == AGAIN_SECONDS
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
