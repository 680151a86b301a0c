"""The first death of several, and the conditions under which silence counts as a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_operator.api import FailureStatus, GroupPhase
from dsv4_operator.lifecycle.watch import BOOT_SECONDS, FRESH_SECONDS, GONE_SECONDS, SILENT_SECONDS
from dsv4_runtime.contract import Cause, Phase, Signals
from dsv4_runtime.contract.recovery import HEARD_SECONDS

Scene = Any


def death(scene: Scene) -> FailureStatus:
    scene.look()
    assert scene.phase is GroupPhase.RECOVERING
    failure = scene.status.last_failure
    assert isinstance(failure, FailureStatus)
    return failure


def test_the_earliest_death_wins(scene: Scene) -> None:
    scene.serve()
    scene.members = [
        scene.member(0, Phase.FAILED, failure=scene.died(0, Cause.ENGINE_CORE_DIED, after=2.0)),
        scene.member(1, Phase.FAILED, failure=scene.died(1, Cause.RAYLET_DIED, after=1.0)),
    ]
    failure = death(scene)
    assert (failure.cause, failure.culprit_rank) == (Cause.RAYLET_DIED, 1)


def test_the_blamed_members_own_failure_takes_precedence(scene: Scene) -> None:
    scene.serve()
    blaming = scene.died(1, Cause.RAY_WORKER_DIED)
    scene.members = [
        scene.member(0, Phase.FAILED, failure=blaming),
        scene.member(1, Phase.FAILED, failure=scene.died(1, Cause.RAYLET_DIED, after=1.0)),
    ]
    assert death(scene).cause is Cause.RAYLET_DIED


def test_a_lost_member_is_the_cause_of_the_heads_failure(scene: Scene) -> None:
    scene.serve()
    scene.members[0] = scene.member(0, Phase.FAILED, failure=scene.died(1, Cause.RAY_WORKER_DIED))
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL", ended_time=scene.now + 1)
    assert death(scene).cause is Cause.MEMBER_LOST


def test_a_members_own_report_beats_its_end(scene: Scene) -> None:
    scene.serve()
    failed = scene.member(1, Phase.FAILED, failure=scene.died(1, Cause.OUT_OF_MEMORY_HOST, after=3.0))
    scene.members[1] = replace(failed, ended="exit code 1", ended_time=scene.now)
    assert death(scene).cause is Cause.OUT_OF_MEMORY_HOST


def test_a_report_without_a_culprit_is_about_the_reporter(scene: Scene) -> None:
    scene.serve()
    report = scene.died(0, Cause.PREFLIGHT_FAILED).model_copy(update={"culprit_rank": None})
    scene.members[1] = scene.member(1, Phase.FAILED, failure=report)
    failure = death(scene)
    assert (failure.culprit_rank, failure.culprit_node) == (1, "node-1")


def test_failed_without_a_cause(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = scene.member(1, Phase.FAILED)
    failure = death(scene)
    assert (failure.cause, failure.message) == (Cause.UNKNOWN, "member 1: its agent failed and gave no cause")


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.STOPPED])
def test_an_unrequested_stop_is_a_death(scene: Scene, phase: Phase) -> None:
    scene.serve()
    scene.members[1] = scene.member(1, phase)
    assert death(scene).cause is Cause.MEMBER_LOST


def test_an_end_with_exit_code_0_is_a_death(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = replace(scene.members[1], ended="exit code 0")
    failure = death(scene)
    assert (failure.message, failure.time) == ("member 1: its agent ended: exit code 0", scene.now)


def look_on(scene: Scene, seconds: float) -> None:
    """Decide once a second for `seconds`."""
    for _ in range(int(seconds)):
        scene.look(1.0)


def test_silence_becomes_a_death(scene: Scene) -> None:
    scene.serve()
    look_on(scene, SILENT_SECONDS - 1)
    assert scene.phase is GroupPhase.SERVING
    assert scene.status.members[0].silent_since is not None
    scene.members[0] = scene.member(0)
    scene.look(1.5)
    assert scene.phase is GroupPhase.RECOVERING
    failure = scene.status.last_failure
    assert (failure.cause, failure.detected_by, failure.culprit_rank) == (Cause.NODE_LOST, "timeout", 1)


def test_no_member_is_lost_after_a_pause_of_the_loop(scene: Scene) -> None:
    """The loop was blocked, and its first request afterwards got no immediate response."""
    scene.serve()
    scene.look(300.0)
    assert scene.phase is GroupPhase.SERVING
    assert scene.now - scene.status.members[0].silent_since == FRESH_SECONDS
    look_on(scene, SILENT_SECONDS - FRESH_SECONDS - 1)
    assert scene.phase is GroupPhase.SERVING
    look_on(scene, 2)
    assert scene.phase is GroupPhase.RECOVERING


def hears(scene: Scene, rank: int, other: int, silent: float) -> Any:
    """Return member `rank`; its agent has received nothing from `other` for `silent` seconds."""
    member = scene.member(rank)
    signals = Signals(time=0.0, silent={other: silent})
    return replace(member, status=member.status.model_copy(update={"signals": signals}))


def test_a_member_that_another_member_reaches_is_not_lost(scene: Scene) -> None:
    scene.serve()
    for _ in range(5):
        scene.now += SILENT_SECONDS
        scene.members[0] = hears(scene, 0, 1, silent=0.4)
        scene.look()
        assert scene.phase is GroupPhase.SERVING
    scene.members[0] = hears(scene, 0, 1, silent=9.0)
    assert death(scene).cause is Cause.NODE_LOST


def test_reports_of_a_silent_member_do_not_count(scene: Scene) -> None:
    scene.serve()
    scene.members = [hears(scene, 0, 1, silent=0.4), hears(scene, 1, 0, silent=0.4)]
    scene.look()
    look_on(scene, SILENT_SECONDS + 2)
    assert scene.status.last_failure.cause is Cause.NODE_LOST


@pytest.mark.parametrize("heard", [True, False])
def test_two_reachable_members_that_report_each_other_have_lost_their_link(scene: Scene, heard: bool) -> None:
    """If one of them does not respond to the operator either, the first report is accepted."""
    scene.serve()
    blaming = scene.died(1, Cause.NODE_LOST)
    second = scene.member(1, Phase.FAILED, failure=scene.died(0, Cause.NODE_LOST, after=0.3))
    scene.members = [
        scene.member(0, Phase.FAILED, failure=blaming),
        second if heard else replace(second, heard=scene.now - HEARD_SECONDS - 1),
    ]
    failure = death(scene)
    if heard:
        assert (failure.cause, failure.culprit_rank, failure.culprit_node) == (Cause.LINK_LOST, None, None)
        assert failure.message.startswith("rank 0 and rank 1 both run and no longer reach each other")
    else:
        assert (failure.cause, failure.culprit_rank) == (Cause.NODE_LOST, 1)


def test_a_healthy_member_that_the_head_cannot_reach_is_not_blamed(scene: Scene) -> None:
    scene.serve()
    scene.members = [scene.member(0, Phase.FAILED, failure=scene.died(1, Cause.NODE_LOST)), scene.member(1)]
    assert death(scene).cause is Cause.LINK_LOST


@given(st.integers(3, 6), st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_the_majority_of_members_decides_between_node_and_link(
    new_scene: Callable[..., Any], members: int, data: st.DataObject
) -> None:
    scene = new_scene()
    scene.serve()
    observer, lost = data.draw(st.permutations(range(members)))[:2]
    others = [rank for rank in range(members) if rank not in (observer, lost)]
    hearing = data.draw(st.sets(st.sampled_from(others)))
    found = {rank: hears(scene, rank, lost, silent=0.4 if rank in hearing else 9.0) for rank in others}
    found[observer] = scene.member(observer, Phase.FAILED, failure=scene.died(lost, Cause.NODE_LOST))
    found[lost] = scene.member(lost)
    scene.members = [found[rank] for rank in sorted(found)]
    failure = death(scene)
    if len(hearing) >= len(others) - len(hearing) + 1:
        assert (failure.cause, failure.culprit_rank) == (Cause.LINK_LOST, None)
    else:
        assert (failure.cause, failure.culprit_rank) == (Cause.NODE_LOST, lost)


@pytest.mark.parametrize("cause", [Cause.WEIGHTS_CORRUPT, Cause.LINK_LOST])
def test_a_shared_fault_is_no_members(scene: Scene, cause: Cause) -> None:
    scene.serve()
    report = scene.died(0, cause).model_copy(update={"culprit_rank": None})
    scene.members[1] = scene.member(1, Phase.FAILED, failure=report)
    failure = death(scene)
    assert (failure.culprit_rank, failure.culprit_node) == (None, None)


def test_an_answer_ends_the_silence(scene: Scene) -> None:
    scene.serve()
    scene.look(SILENT_SECONDS - 1)
    scene.says(Phase.SERVING)
    scene.look()
    assert [member.silent_since for member in scene.status.members] == [None, None]
    scene.look(SILENT_SECONDS - 1)
    assert scene.phase is GroupPhase.SERVING


def test_a_new_agent_has_longer_for_its_first_answer(scene: Scene) -> None:
    scene.look()
    scene.look()
    scene.says(None, None)
    scene.look()
    scene.look(BOOT_SECONDS - 1)
    assert scene.phase is GroupPhase.STARTING
    scene.look(2.0)
    assert scene.phase is GroupPhase.RECOVERING


def test_a_new_operator_gives_every_member_time_to_respond(scene: Scene) -> None:
    scene.serve()
    scene.now += 3600.0
    scene.members = [replace(member, status=None, heard=None) for member in scene.members]
    scene.look()
    assert scene.phase is GroupPhase.SERVING, "its first question may have been lost"
    scene.look(SILENT_SECONDS + 1)
    assert scene.phase is GroupPhase.RECOVERING


def test_a_member_that_is_gone(scene: Scene) -> None:
    scene.serve()
    scene.members = scene.members[:1]
    scene.look()
    assert scene.phase is GroupPhase.SERVING, "a listing may lag behind"
    scene.says(Phase.SERVING)
    scene.look(GONE_SECONDS - 1)
    scene.members = [scene.member(0)]
    scene.look()
    scene.members = [replace(scene.member(0), heard=scene.now + GONE_SECONDS + 1)]
    scene.look(GONE_SECONDS + 1)
    assert scene.status.last_failure.message == "member 1: it is gone"


def test_a_status_of_another_incarnation_is_ignored(scene: Scene) -> None:
    scene.serve()
    status = scene.members[1].status
    scene.members[1] = replace(
        scene.members[1], status=status.model_copy(update={"incarnation": 99, "phase": Phase.FAILED})
    )
    scene.look()
    assert scene.phase is GroupPhase.SERVING


def test_members_of_the_status(scene: Scene) -> None:
    scene.serve()
    head, worker = scene.status.members
    assert (head.role, head.node, head.address, head.phase) == ("Head", "node-0", "10.0.0.1", Phase.SERVING)
    assert (worker.role, worker.rank) == ("Worker", 1)
