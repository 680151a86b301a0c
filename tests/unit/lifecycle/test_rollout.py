"""Rollout of a specification to several groups, and rollback."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dsv4_operator.api import ConditionStatus, ConditionType, GroupPhase, GroupStatus, Reason
from dsv4_operator.lifecycle import EventType
from dsv4_operator.lifecycle.decide import WAITS_FOR_OTHERS
from dsv4_operator.lifecycle.rollout import _failed
from dsv4_runtime.contract import Phase
from dsv4_testkit.rollout_world import DEADLINE, LIFE, NODES, Asked, World


def serving_world(**asked: object) -> World:
    world = World(Asked().but(**asked))
    world.until(lambda: world.all_serve(0))
    world.go_on()
    world.told.clear()
    return world


def condition(world: World, kind: ConditionType) -> tuple[bool, str]:
    found = world.kept.condition(kind)
    assert found is not None
    return found.status is ConditionStatus.TRUE, found.message


def test_groups_are_updated_one_after_the_other_from_the_last() -> None:
    world = serving_world(replicas=3)
    world.asked = world.asked.but(seed=1)
    least, order = 3, []
    for _ in range(60):
        world.go_on()
        least = min(least, len(world.serving()))
        order += [group for group, seed in world.serving().items() if seed == 1 and group not in order]
    assert world.all_serve(1)
    assert (least, order) == (2, [2, 1, 0])
    assert world.reasons().count(Reason.UPDATE_STARTED) == 3
    assert world.reasons()[-1] is Reason.UPDATE_COMPLETED
    assert (world.kept.updated_replicas, condition(world, ConditionType.READY)[0]) == (3, True)


@pytest.mark.parametrize(("asked", "least"), [({"limit": 2}, 1), ({"strategy": "Recreate"}, 0)])
def test_as_many_at_once_as_may_be_down(asked: Mapping[str, object], least: int) -> None:
    world = serving_world(replicas=3, **asked)
    world.asked = world.asked.but(seed=1)
    seen = 3
    for _ in range(40):
        world.go_on()
        seen = min(seen, len(world.serving()))
    assert world.all_serve(1)
    assert seen == least


@pytest.mark.parametrize("changes", [{"held": 20}, {"limit": 2}, {"strategy": "Recreate"}, {"back": False}])
def test_fields_that_members_do_not_depend_on_cause_no_restart(changes: Mapping[str, object]) -> None:
    world = serving_world()
    before = dict(world.members)
    world.asked = world.asked.but(**changes)
    world.go_on(10)
    assert world.members == before
    assert world.kept.updated_replicas == 2


@pytest.mark.parametrize("ends", ["refused", "given up", "served"])
def test_gateways_have_the_names_that_each_group_serves(ends: str) -> None:
    """A gateway with others would refuse requests, or send them to a group whose vLLM refuses them."""
    world = serving_world()
    if ends == "refused":
        world.refused = {1}
    elif ends == "given up":
        world.bad[1] = "config"
    world.asked = world.asked.but(seed=1)

    def names() -> list[str]:
        return [name for group in world.kept.groups for name in group.served_names]

    seen = [names()]
    assert seen == [["of-0", "of-0"]], "no group has begun"

    def go_on() -> None:
        world.go_on()
        if names() != seen[-1]:
            seen.append(names())

    if ends == "refused":
        for _ in range(50):
            go_on()
        assert world.all_serve(0)
        assert len(seen) == 1
    elif ends == "given up":
        while not (world.kept.rollout.rejected and world.all_serve(0)):
            go_on()
        assert seen[1:] == [["of-0", "of-1"], ["of-0", "of-0"]]
        # A further group, which has no version yet.
        world.asked = world.asked.but(replicas=3)
        while not world.all_serve(0):
            go_on()
            assert set(names()) == {"of-0"}
    else:
        while not world.all_serve(1):
            go_on()
        assert seen[1:] == [["of-0", "of-1"], ["of-1", "of-1"]]
    assert set(names()) == {"of-1" if ends == "served" else "of-0"}


def test_names_outlive_the_specifications_that_they_are_of() -> None:
    """Of a second specification, after another group was formed from a third."""
    world = serving_world(replicas=3)
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.serving() == {0: 0, 1: 1, 2: 1})
    world.asked = world.asked.but(seed=2)
    world.until(lambda: world.group(2).phase is GroupPhase.STARTING)
    assert [group.served_names for group in world.kept.groups] == [("of-0",), ("of-1",), ("of-2",)]
    world.until(lambda: world.all_serve(2))


def test_a_group_of_an_earlier_release_gets_its_names() -> None:
    world = serving_world()
    nameless = [group.model_copy(update={"served_names": ()}) for group in world.kept.groups]
    world.kept = world.kept.model_copy(update={"groups": tuple(nameless)})
    world.step()
    world.asked = world.asked.but(seed=1)
    world.go_on()
    assert [group.served_names for group in world.kept.groups] == [("of-0",), ("of-0",)]


@pytest.mark.parametrize("how", ["config", "dies", "never"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_bad_specification_is_taken_back_and_not_tried_again(how: str, replicas: int) -> None:
    world = serving_world(replicas=replicas)
    world.bad[1] = how
    world.asked = world.asked.but(seed=1)
    world.until(lambda: bool(world.kept.rollout.rejected))
    assert len(world.serving()) == replicas - 1, "the others were not touched"
    world.until(lambda: world.all_serve(0))
    tried = set(world.fenced)
    world.go_on(200, seconds=10.0)
    assert world.all_serve(0)
    assert world.fenced == tried
    rolled_back, why = condition(world, ConditionType.ROLLED_BACK)
    expected = {
        "config": "ConfigError on member 0",
        "dies": "recovery was given up",
        "never": "did not answer within 5m",
    }
    assert rolled_back
    assert expected[how] in why
    assert world.reasons().count(Reason.ROLLED_BACK) == 1
    assert condition(world, ConditionType.READY)[0], "all groups answer, as before"
    assert world.kept.updated_replicas == 0
    # A change that does not affect the members changes nothing; another specification is tried.
    world.asked = world.asked.but(held=30)
    world.go_on(10)
    assert world.fenced == tried
    world.asked = world.asked.but(seed=2)
    world.until(lambda: world.all_serve(2))
    assert not condition(world, ConditionType.ROLLED_BACK)[0]


def test_without_rollback_the_group_fails_and_the_others_keep_serving() -> None:
    world = serving_world(replicas=2, back=False)
    world.bad[1] = "config"
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.group(1).phase is GroupPhase.FAILED)
    world.go_on(20)
    assert world.serving() == {0: 0}
    assert not condition(world, ConditionType.ROLLED_BACK)[0]
    world.asked = world.asked.but(seed=0)
    world.until(lambda: world.all_serve(0))


def test_a_first_specification_has_nothing_to_go_back_to() -> None:
    world = World(bad={0: "config"})
    world.until(lambda: {world.group(index).phase for index in range(2)} == {GroupPhase.FAILED})
    assert world.kept.rollout.rejected is None


def test_a_restart_that_fails_is_no_reason_to_go_back() -> None:
    world = serving_world(replicas=1)
    world.bad[0] = "config"
    world.asked = world.asked.but(restarts=1)
    world.until(lambda: world.group(0).phase is GroupPhase.FAILED)
    assert world.kept.rollout.rejected is None


def test_a_group_that_dies_before_its_turn_comes_back_as_it_was() -> None:
    world = serving_world(replicas=3)
    world.bad[1] = "never"
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.group(2).phase is GroupPhase.STARTING)
    world.members[0, 1].ended = "killed by SIGKILL"
    world.until(lambda: world.group(0).incarnation == 2 and world.group(0).phase is GroupPhase.SERVING)
    assert world.serving() == {0: 0, 1: 0}
    world.until(lambda: world.all_serve(0))


def test_a_group_that_is_down_is_updated_first() -> None:
    world = serving_world(replicas=3)
    world.members[0, 1].ended = "killed by SIGKILL"
    world.asked = world.asked.but(seed=1)
    world.until(lambda: 1 in world.serving().values())
    assert world.serving() == {0: 1, 1: 0, 2: 0}
    world.until(lambda: world.all_serve(1))


def test_a_third_specification_meanwhile() -> None:
    """A group that serves the second specification, which is no longer known, is not ended out of turn."""
    world = serving_world(replicas=3)
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.serving().get(2) == 1)
    world.asked = world.asked.but(seed=2)
    least = 3
    for _ in range(80):
        world.go_on()
        least = min(least, len(world.serving()))
    assert world.all_serve(2)
    assert least == 2


def test_a_change_at_the_first_answer_of_all_groups_updates_only_one() -> None:
    """The kept status of both groups is Starting, and there is no specification yet for a rollback."""
    world = World()
    world.until(lambda: {world.group(index).phase for index in range(2)} == {GroupPhase.STARTING})
    for member in world.alive():
        member.life = LIFE.index(Phase.SERVING)
    world.asked = world.asked.but(seed=1)
    world.step()
    assert sorted(world.group(index).phase for index in range(2)) == [GroupPhase.SERVING, GroupPhase.UPDATING]
    world.until(lambda: world.all_serve(1))


def test_a_specification_that_cannot_be_planned_ends_nothing() -> None:
    world = serving_world()
    world.refused = {1}
    world.asked = world.asked.but(seed=1)
    world.go_on(int(DEADLINE) + 20)
    world.members[1, 1].ended = "killed by SIGKILL"
    world.until(lambda: world.group(1).incarnation == 2 and world.all_serve(0))
    assert world.kept.rollout.rejected is None
    assert not condition(world, ConditionType.ACCEPTED)[0]
    world.refused = set()
    world.until(lambda: world.all_serve(1))


def test_suspended_groups_begin_with_the_present_specification() -> None:
    world = serving_world()
    world.asked = world.asked.but(suspend=True)
    world.until(lambda: not world.alive() and world.group(1).phase is GroupPhase.SUSPENDED)
    world.asked = world.asked.but(suspend=False, seed=1)
    world.until(lambda: world.all_serve(1))
    assert all(group.incarnation == 2 for group in world.kept.groups)


def test_no_rollback_to_an_unreadable_specification_of_another_version() -> None:
    world = serving_world()
    served = world.kept.rollout.model_copy(update={"served": '{"model":{"of":"later"}}'})
    world.kept = world.kept.model_copy(update={"rollout": served})
    world.bad[1] = "config"
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.group(1).phase is GroupPhase.FAILED)
    world.go_on(20)
    assert world.kept.rollout.rejected is None
    assert world.serving() == {0: 0}


@pytest.mark.parametrize(("phase", "late"), [(GroupPhase.QUEUED, False), (GroupPhase.STARTING, True)])
def test_a_specification_does_not_fail_while_its_group_waits_for_nodes(phase: GroupPhase, late: bool) -> None:
    group = GroupStatus(index=0, phase=phase, incarnation=2, revision="new", revision_time=1000.0)
    assert (_failed(group, "new", DEADLINE, 1001.0 + DEADLINE) is not None) is late


def test_a_change_does_not_fail_while_the_deployment_is_paused() -> None:
    world = serving_world()
    world.bad[1] = "never"
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.group(1).phase is GroupPhase.STARTING)
    world.asked = world.asked.but(paused=True)
    world.go_on(10, seconds=DEADLINE)
    world.asked = world.asked.but(paused=False)
    del world.bad[1]
    world.until(lambda: world.all_serve(1))
    assert world.kept.rollout.rejected is None
    assert Reason.ROLLED_BACK not in world.reasons()


def test_groups_move_away_from_cordoned_nodes_one_after_the_other() -> None:
    world = serving_world(replicas=3, limit=2)
    # One node is free, and each move frees none: the second group waits for the node to be uncordoned.
    world.cordon("node-1", "node-2")
    world.go_on(20)
    assert world.all_serve(0)
    assert world.moves == [(2, "node-2")]
    assert {one.group: one.node for one in world.alive()} == {0: "node-0", 1: "node-1", 2: "node-3"}
    assert world.reasons().count(Reason.GROUP_MOVING) == 1
    assert condition(world, ConditionType.PROGRESSING) == (
        False,
        "group 1: the node node-1 is cordoned, and the group stays: no node is free; add some",
    )
    world.cordon("node-1")
    world.go_on(20)
    assert world.moves == [(2, "node-2"), (1, "node-1")]
    assert world.all_serve(0)
    assert condition(world, ConditionType.PROGRESSING) == (False, "nothing is under way")
    assert [group.total_restarts for group in world.kept.groups] == [0, 0, 0]
    assert not any(group.history or group.move for group in world.kept.groups)


def test_two_groups_with_free_nodes_move_one_after_the_other() -> None:
    world = serving_world(replicas=2, limit=2)
    world.cordon("node-0", "node-1")
    least = 2
    for _ in range(30):
        world.go_on()
        least = min(least, len(world.serving()))
    assert world.all_serve(0)
    assert [group for group, _ in world.moves] == [1, 0]
    assert least == 1


def test_without_a_free_node_a_group_stays_and_one_event_has_the_reason() -> None:
    world = serving_world(replicas=1)
    world.cordon(*NODES)
    world.go_on(10)
    assert world.all_serve(0)
    assert world.moves == []
    assert [(event.type, event.reason, event.message, event.group) for event in world.told] == [
        (
            EventType.WARNING,
            Reason.MOVE_BLOCKED,
            "the node node-0 is cordoned, and the group stays: no node is free; add some",
            0,
        )
    ]
    assert condition(world, ConditionType.READY)[0]
    assert condition(world, ConditionType.ACCEPTED)[0], "the specification is not refused"
    world.cordon()
    world.go_on(2)
    assert world.group(0).move is None
    assert world.all_serve(0)


def test_a_group_does_not_move_while_another_one_is_down() -> None:
    world = serving_world(replicas=2, limit=2)
    world.alive(0)[0].ended = "killed by SIGKILL"
    world.cordon("node-1")
    world.go_on()
    move = world.group(1).move
    assert move is not None
    assert move.blocked == WAITS_FOR_OTHERS
    world.until(lambda: bool(world.moves))
    assert world.serving()[0] == 0
    world.until(lambda: world.all_serve(0))
    assert [group.total_restarts for group in world.kept.groups] == [1, 0]


def test_an_update_moves_a_group_too() -> None:
    world = serving_world(replicas=2)
    world.cordon("node-0", "node-1")
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.all_serve(1))
    world.go_on(5)
    assert world.all_serve(1)
    assert {one.node for one in world.alive()} == {"node-2", "node-3"}
    assert Reason.UPDATE_STARTED in world.reasons()


def test_an_update_ends_a_group_once_the_node_of_the_next_member_is_held() -> None:
    world = serving_world(replicas=1)
    world.open_seconds = 60.0
    world.cordon("node-0")
    world.asked = world.asked.but(seed=1)
    world.held[7] = "node-1"
    world.until(lambda: world.group(0).phase is GroupPhase.UPDATING)
    assert (world.group(0).move, world.held) == (None, {7: "node-1", 0: "node-2"})
    world.until(lambda: world.all_serve(1))
    assert [one.node for one in world.alive()] == ["node-2"]


def test_an_update_on_the_same_nodes_holds_none() -> None:
    world = serving_world(replicas=1)
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.group(0).phase is GroupPhase.UPDATING)
    assert world.held == {}


def test_a_group_moves_with_its_version_while_another_one_is_refused() -> None:
    world = serving_world(replicas=2)
    world.refused = {1}
    world.asked = world.asked.but(seed=1)
    world.go_on(3)
    world.cordon("node-0")
    world.until(lambda: world.moves == [(0, "node-0")])
    world.until(lambda: world.all_serve(0))
    assert "node-0" not in {one.node for one in world.alive()}


def test_a_version_that_is_refused_during_a_move_ends_no_group() -> None:
    world = serving_world(replicas=2)
    world.cordon("node-0")
    world.until(lambda: world.moves == [(0, "node-0")])
    world.refused = {1}
    world.asked = world.asked.but(seed=1)
    world.until(lambda: world.all_serve(0))
    world.go_on(3)
    assert world.all_serve(0)


def test_a_move_that_was_taken_meanwhile_begins_with_another_node() -> None:
    world = serving_world(replicas=1)
    world.held[7] = "node-1"
    world.cordon("node-0", "node-2")
    # The planner has an older list, according to which the node is not cordoned.
    world.listed = {"node-0"}
    world.step()
    assert world.held.keys() == {7}
    assert world.group(0).phase is GroupPhase.SERVING
    world.until(lambda: world.moves == [(0, "node-0")])
    world.until(lambda: world.all_serve(0))
    assert [one.node for one in world.alive()] == ["node-3"]
    assert (world.group(0).incarnation, world.group(0).total_restarts) == (2, 0)
