"""User requests for a running group: another specification, a restart, a pause, a suspension, its deletion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from words import short

from dsv4_operator.api import GroupPhase
from dsv4_operator.api.deployment import PAUSED, RESTART_AT
from dsv4_runtime.contract import Cause, Phase

Scene = Any


def test_a_changed_specification_forms_again_without_a_charge(scene: Scene) -> None:
    scene.serve()
    scene.seed, scene.generation = 1, 2
    planned = scene.look()
    assert (short(planned), planned.next_time) == ([], scene.now), "nobody is asked to end before it is kept"
    assert scene.phase is GroupPhase.UPDATING
    assert short(scene.look()) == ["drain 1", "fence 1", "forget 1"]
    assert scene.phase is GroupPhase.UPDATING
    scene.members = []
    scene.look()
    assert short(scene.look()) == ["fence 1", "form 2"]
    assert scene.status.restarts == ()


def test_some_changes_are_applied_without_a_restart(scene: Scene) -> None:
    scene.serve()
    scene.budget, scene.generation = 7, 2
    assert short(scene.look()) == []
    assert scene.phase is GroupPhase.SERVING


def test_a_refused_change_leaves_the_running_group_alone(scene: Scene) -> None:
    scene.serve()
    scene.seed, scene.generation, scene.refuse = 1, 2, True
    decision = scene.look()
    assert (short(decision), scene.phase) == ([], GroupPhase.SERVING)
    assert decision.refusal is not None


def test_suspend_and_resume(scene: Scene) -> None:
    scene.serve()
    scene.suspend = True
    assert short(scene.look()) == []
    assert scene.phase is GroupPhase.DRAINING
    decision = scene.look()
    assert short(decision) == ["drain 1", "fence 1", "forget 1"]
    assert decision.next_time == scene.now + 1.0
    assert scene.phase is GroupPhase.DRAINING
    scene.members = []
    scene.look()
    assert scene.phase is GroupPhase.SUSPENDED
    assert short(scene.look(300.0)) == []
    scene.suspend = False
    scene.look()
    assert short(scene.look()) == ["fence 1", "form 2"]
    assert scene.status.restarts == ()


def test_members_that_appear_while_suspended_are_fenced(new_scene: Any) -> None:
    scene = new_scene(suspend=True)
    scene.look()
    assert scene.phase is GroupPhase.SUSPENDED
    scene.members = [scene.member(0, incarnation=4)]
    assert short(scene.look()) == ["fence 4", "forget 4"]


@pytest.mark.parametrize(("change", "drains"), [({"replicas": 0}, True), ({"deleting": True}, False)])
def test_a_removed_group_is_fenced_and_stopped(scene: Scene, change: dict[str, Any], drains: bool) -> None:
    scene.serve()
    for name, value in change.items():
        setattr(scene, name, value)
    assert short(scene.look()) == []
    assert short(scene.look()) == [*(["drain 1"] if drains else []), "fence 1", "forget 1"]
    scene.members = []
    decision = scene.look()
    assert scene.phase is GroupPhase.STOPPED
    assert short(decision) == ["fence 1"], "before the last word, once more"


def test_a_requested_restart_is_not_charged_and_happens_once(scene: Scene) -> None:
    scene.serve()
    scene.annotations[RESTART_AT] = "2026-11-21T10:00:00Z"
    assert short(scene.look()) == []
    assert short(scene.look()) == ["drain 1", "fence 1", "forget 1"]
    assert scene.phase is GroupPhase.UPDATING
    scene.members = []
    scene.serve()
    assert (scene.status.incarnation, scene.status.restarts, scene.status.total_restarts) == (2, (), 0)
    assert short(scene.look(1.0)) == []


def test_a_requested_restart_ends_the_failed_state(new_scene: Any) -> None:
    scene = new_scene(budget=0)
    scene.serve()
    scene.members = [replace(member, ended="exit code 1", ended_time=scene.now) for member in scene.members]
    scene.look()
    assert scene.phase is GroupPhase.FAILED
    scene.members = []
    scene.look(1.0)
    assert scene.phase is GroupPhase.FAILED
    scene.annotations[RESTART_AT] = "now"
    scene.serve()
    assert scene.status.incarnation == 2


def test_while_paused_no_action_is_taken_and_the_status_is_updated(scene: Scene) -> None:
    scene.serve()
    scene.annotations[PAUSED] = "true"
    scene.members[1] = replace(scene.members[1], ended="exit code 1", ended_time=scene.now)
    scene.suspend = True
    for _ in range(3):
        assert short(scene.look(1.0)) == []
    assert scene.status.members[1].message == "ended: exit code 1"
    scene.suspend = False
    scene.annotations[PAUSED] = "false"
    assert short(scene.look(1.0))[:2] == ["collectevidence 1", "fence 1"]


def test_a_paused_deployment_that_is_deleted_is_ended(scene: Scene) -> None:
    scene.serve()
    scene.annotations[PAUSED] = "true"
    scene.deleting = True
    scene.look()
    assert "fence 1" in short(scene.look())


def test_an_eviction_during_a_pause_spends_nothing(scene: Scene) -> None:
    """After the pause its pod is gone, and nothing tells its end from another one."""
    scene.serve()
    scene.annotations[PAUSED] = "true"
    evicted = scene.member(1, Phase.DRAINING, removal="EvictionByEvictionAPI: evicting")
    scene.members[1] = evicted
    for _ in range(3):
        assert short(scene.look(1.0)) == []
    scene.members = [scene.member(0, Phase.FAILED, failure=scene.died(1, Cause.RAY_WORKER_DIED, after=1.0))]
    for _ in range(3):
        assert short(scene.look(100.0)) == []
    (recorded,) = scene.status.history
    assert (recorded.cause, recorded.culprit_rank, recorded.culprit_node) == (Cause.PLACEMENT_LOST, 1, "node-1")
    assert "EvictionByEvictionAPI" in recorded.message
    scene.annotations.clear()
    assert short(scene.look(1.0))[:2] == ["collectevidence 1", "fence 1"]
    assert scene.phase is GroupPhase.RECOVERING
    assert scene.status.history == (recorded,)
    scene.members = []
    scene.look(5.0)
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 2)
    assert (scene.status.restarts, scene.status.total_restarts) == ((), 0)


def test_a_death_during_a_pause_spends_a_restart(scene: Scene) -> None:
    scene.serve()
    scene.annotations[PAUSED] = "true"
    scene.look(1.0)
    for _ in range(3):
        scene.now += 5.0
        scene.members = [scene.member(0)]
        scene.look()
    assert not scene.status.history
    scene.annotations.clear()
    scene.look()
    assert scene.status.last_failure.cause is Cause.MEMBER_LOST
    scene.members = []
    scene.look(5.0)
    assert len(scene.status.restarts) == 1


def test_a_pause_is_no_time_of_the_specification(scene: Scene) -> None:
    scene.look()
    scene.look()
    scene.says(Phase.LOADING)
    scene.look(1.0)
    tried = scene.status.revision_time
    scene.annotations[PAUSED] = "true"
    scene.look(10.0)
    scene.look(50_000.0)
    assert scene.status.revision_time == tried
    scene.annotations.clear()
    scene.now += 2.0
    scene.says(Phase.LOADING)
    scene.look()
    assert (scene.phase, scene.status.paused_time) == (GroupPhase.STARTING, None)
    # The pause is known since the reconcile before the long wait.
    assert scene.status.revision_time == tried + 50_002.0
    scene.look(1.0)
    assert scene.status.revision_time == tried + 50_002.0, "once"


@pytest.mark.parametrize("placed", ["before the pause ends", "after the pause"])
def test_a_pause_in_a_queue_counts_once(scene: Scene, placed: str) -> None:
    scene.look()
    scene.look()
    waits = [replace(scene.member(rank, None, queued=True, waiting="no quota"), node="") for rank in (0, 1)]
    scene.members = waits
    scene.look(1.0)
    assert scene.phase is GroupPhase.QUEUED
    began, tried = scene.now, scene.status.revision_time
    scene.look(100.0)
    scene.annotations[PAUSED] = "true"
    scene.look(100.0)
    if placed == "before the pause ends":
        scene.now += 100.0
        scene.says(Phase.LOADING)
        scene.look()
        assert scene.phase is GroupPhase.STARTING
    scene.look(100.0)
    scene.annotations.clear()
    scene.now += 100.0
    scene.says(Phase.LOADING)
    scene.look()
    assert scene.phase is GroupPhase.STARTING
    assert scene.status.revision_time == tried + (scene.now - began)
