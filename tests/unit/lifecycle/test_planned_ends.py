"""Decisions about the planned end of a healthy group: its open requests complete first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from words import short, stranger

from dsv4_operator.api import ConditionType, GroupPhase
from dsv4_operator.lifecycle import Drain, compute_status
from dsv4_operator.lifecycle.decide import DRAIN_GRACE_SECONDS, DRAIN_SILENCE_SECONDS, decide
from dsv4_operator.lifecycle.observed import Observed
from dsv4_runtime.contract import Health, Phase, Progress, Verdict
from dsv4_testkit.group_world import KEY

Scene = Any


def updating(scene: Scene) -> None:
    """Change the specification of a serving group, and decide."""
    scene.serve()
    scene.seed, scene.generation = 1, 2
    scene.look()
    assert scene.phase is GroupPhase.UPDATING


def test_an_update_waits_for_open_requests_and_reports_their_number(scene: Scene) -> None:
    updating(scene)
    waits = Progress(stage="waiting for 3 open requests")
    head = scene.member(0, Phase.DRAINING)
    scene.members[0] = replace(head, status=head.status.model_copy(update={"progress": waits}))
    for _ in range(5):
        decision = scene.look(1.0)
        assert short(decision) == ["drain 1", "fence 1", "forget 1"]
        assert decision.next_time == scene.now + 1.0
    assert scene.phase is GroupPhase.UPDATING
    assert scene.status.members[0].message == "waiting for 3 open requests"
    status = compute_status(scene.deployment, [scene.status], None, None, None, None, scene.now)
    progressing = status.condition(ConditionType.PROGRESSING)
    assert progressing.message.endswith("because the specification changed; waiting for 3 open requests")


def test_a_new_operator_drains_before_the_heads_first_status(scene: Scene) -> None:
    updating(scene)
    scene.members = [replace(member, status=None, heard=None) for member in scene.members]
    assert short(scene.look(1.0)) == ["drain 1", "fence 1", "forget 1"], "another operator goes on"


def test_open_requests_have_a_bound(scene: Scene) -> None:
    updating(scene)
    bound = scene.deployment.spec.engine.timeouts.drain
    # No drain was requested in the meantime, however long it was.
    first = scene.look(300.0).actions[0]
    assert isinstance(first, Drain)
    assert first.seconds == bound
    scene.members[0] = scene.member(0, Phase.DRAINING, heard=scene.now + bound + DRAIN_GRACE_SECONDS)
    assert short(scene.look(bound)) == ["drain 1", "fence 1", "forget 1"], "its agent ends it, unless it lies"
    assert short(scene.look(DRAIN_GRACE_SECONDS)) == ["fence 1", "forget 1"]


def test_a_clock_that_is_ahead_does_not_extend_the_drain(scene: Scene) -> None:
    updating(scene)
    bound = scene.deployment.spec.engine.timeouts.drain + DRAIN_GRACE_SECONDS
    head = scene.member(0, Phase.DRAINING, heard=scene.now + 2 * bound)
    scene.members[0] = replace(head, status=head.status.model_copy(update={"phase_time": scene.now + 86_400.0}))
    assert short(scene.look(bound - 1)) == ["drain 1", "fence 1", "forget 1"]
    assert short(scene.look(1.0)) == ["fence 1", "forget 1"]


def test_the_drain_of_a_silent_head_ends_at_the_timeout(scene: Scene) -> None:
    updating(scene)
    scene.members = [replace(member, status=None, heard=None) for member in scene.members]
    for _ in range(int(DRAIN_SILENCE_SECONDS) + 1):
        assert short(scene.look(1.0)) == ["drain 1", "fence 1", "forget 1"]
    assert short(scene.look(1.0)) == ["fence 1", "forget 1"]


@pytest.mark.parametrize(
    "how", ["a worker ended", "the head ended", "the head is gone", "failed", "dead", "restarting"]
)
def test_an_engine_that_is_not_well_is_not_waited_for(scene: Scene, how: str) -> None:
    updating(scene)
    head, worker = scene.members
    dead = Verdict(health=Health.DEAD, failure=scene.died(0))
    scene.members = {
        "a worker ended": [head, replace(worker, ended="exit code 1")],
        "the head ended": [replace(head, ended="exit code 1"), worker],
        "the head is gone": [worker],
        "failed": [scene.member(0, Phase.FAILED, failure=scene.died(0)), worker],
        "dead": [replace(head, status=head.status.model_copy(update={"verdict": dead})), worker],
        "restarting": [scene.member(0, Phase.RESTARTING), worker],
    }[how]
    assert short(scene.look(1.0)) == ["fence 1", "forget 1"]


def test_an_engine_that_does_not_serve_is_ended_at_once(scene: Scene) -> None:
    scene.look()
    scene.look()
    scene.says(Phase.LOADING)
    scene.look()
    assert scene.phase is GroupPhase.STARTING
    scene.seed, scene.generation = 1, 2
    assert short(scene.look()) == []
    assert short(scene.look()) == ["fence 1", "forget 1"]


def test_an_update_that_is_taken_back_while_the_engine_drains_ends_it_all_the_same(scene: Scene) -> None:
    updating(scene)
    scene.members[0] = scene.member(0, Phase.DRAINING)
    scene.look(1.0)
    scene.seed, scene.generation = 0, 3
    assert short(scene.look(1.0)) == ["drain 1", "fence 1", "forget 1"]
    scene.members = []
    scene.serve()
    assert (scene.status.incarnation, scene.status.restarts, scene.status.history) == (2, (), ())


def test_resumed_while_it_drains(scene: Scene) -> None:
    scene.serve()
    scene.suspend = True
    scene.look()
    scene.suspend = False
    assert short(scene.look(1.0)) == ["drain 1", "fence 1", "forget 1"]
    scene.members = []
    scene.look()
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 2)


def test_deleted_while_it_drains(scene: Scene) -> None:
    updating(scene)
    scene.deleting = True
    assert short(scene.look()) == ["fence 1", "forget 1"], "its gateway waited already"


def test_unknown_incarnations_are_fenced_without_a_drain(scene: Scene) -> None:
    updating(scene)
    scene.members.append(stranger(scene, 9))
    assert short(scene.look()) == ["fence 9", "forget 9", "drain 1", "fence 1", "forget 1"]


def test_a_plan_from_an_older_list_of_nodes_moves_nothing(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = replace(scene.members[1], cordoned=True)
    seen = Observed(KEY, tuple(scene.members))
    # The plan of the scene has the nodes of the present members.
    decision = decide(scene.deployment, seen, scene.status, scene.plan, scene.now, moves=True)
    assert (short(decision), decision.completed, decision.status.move) == ([], None, None)
