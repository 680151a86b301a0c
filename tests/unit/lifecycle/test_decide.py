"""Decisions about one group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from words import short, stranger

from dsv4_operator.api import GroupPhase
from dsv4_operator.lifecycle import (
    CollectEvidence,
    Decision,
    Fence,
    Forget,
    Form,
    record_evidence,
)
from dsv4_operator.lifecycle.status import exhausted_sentence
from dsv4_operator.lifecycle.watch import FRESH_SECONDS
from dsv4_runtime.contract import Cause, EngineStatus, Failure, Health, Phase, Verdict

Scene = Any


def test_a_group_is_claimed_then_formed_then_serves(scene: Scene) -> None:
    claim = scene.look()
    assert (short(claim), scene.phase, scene.status.incarnation) == ([], GroupPhase.FORMING, 1)
    assert claim.next_time == scene.now, "nothing is made before the claim is kept"
    assert short(scene.look()) == ["form 1"]
    assert short(scene.look(1.0)) == ["form 1"], "again until the members were seen"
    scene.says(Phase.PREFLIGHT, None)
    assert short(scene.look()) == []
    assert scene.phase is GroupPhase.STARTING
    scene.says(Phase.LOADING)
    scene.look(1.0)
    assert scene.phase is GroupPhase.STARTING
    scene.says(Phase.SERVING)
    decision = scene.look(1.0)
    assert (short(decision), scene.phase) == ([], GroupPhase.SERVING)
    assert scene.status.ready_time == scene.now - 1.0
    assert scene.status.restarts == ()


def test_a_group_that_serves_is_decided_again_when_a_member_may_first_be_silent(scene: Scene) -> None:
    def seconds(decision: Decision) -> float:
        return round(decision.next_time - scene.now, 2)

    scene.serve()
    scene.says(Phase.SERVING)
    assert (seconds(scene.look()), scene.phase) == (3.1, GroupPhase.SERVING)
    scene.members[1] = replace(scene.members[1], heard=scene.now + 1.0)
    assert seconds(scene.look(1.5)) == 1.6, "of the member that was heard first"
    assert seconds(scene.look(1.0)) == 1.0, "not at once"
    decision = scene.look(0.6)
    assert [member.silent_since is not None for member in scene.status.members] == [True, False]
    assert seconds(decision) == 1.0
    # By a clock that was set back since.
    scene.members = [replace(member, heard=scene.now + 900.0) for member in scene.members]
    assert seconds(scene.look()) == 3.1
    scene.members[1] = replace(scene.members[1], heard=None, status=None)
    assert seconds(scene.look()) == 1.0
    scene.members[1] = replace(scene.members[1], waiting="its image is pulled")
    assert seconds(scene.look()) == 1.0, "its agent cannot answer, so it is not silent"


def test_a_group_whose_backend_reports_silence_is_decided_again_after_a_minute(scene: Scene) -> None:
    scene.serve()
    scene.silence_is_event = True
    scene.says(Phase.SERVING)
    decision = scene.look()
    assert (decision.next_time, scene.phase) == (scene.now + 60.0, GroupPhase.SERVING)
    # The event of the silence leads to a decision, and each second to another one while it lasts.
    decision = scene.look(FRESH_SECONDS + 0.05)
    assert [member.silent_since is not None for member in scene.status.members] == [True, True]
    assert decision.next_time == scene.now + 1.0
    for _ in range(10):
        if scene.phase is GroupPhase.SERVING:
            scene.look(1.0)
    assert scene.phase is GroupPhase.RECOVERING


def test_numbers_that_others_use_are_left_out(scene: Scene) -> None:
    """Pods of an earlier deployment of the same name still exist until their kubelets report their end."""
    scene.used_incarnation = 3
    scene.look()
    assert scene.status.incarnation == 4
    assert short(scene.look()) == ["fence 3", "form 4"]
    # Foreign members that appear later change nothing.
    scene.used_incarnation = 99
    scene.serve()
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL", ended_time=scene.now)
    scene.look(1.0)
    scene.members = []
    scene.look(10.0)
    assert scene.status.incarnation == 5
    assert short(scene.look()) == ["fence 4", "form 5"]


def test_time_in_a_queue_is_no_time_of_the_specification(scene: Scene) -> None:
    """A scheduler chooses the nodes of the members: the group is queued until the last one is placed."""
    scene.look()
    scene.look()
    waiting = {"queued": True, "waiting": "no quota"}
    scene.members = [replace(scene.member(rank, None, **waiting), node="") for rank in (0, 1)]
    scene.look(1.0)
    assert scene.phase is GroupPhase.QUEUED
    tried = scene.status.revision_time
    assert scene.look(50_000.0).actions == ()
    scene.members[0] = scene.member(0, None, waiting="its pod is starting")
    scene.look(1.0)
    assert scene.phase is GroupPhase.QUEUED
    scene.says(Phase.JOINING)
    scene.look(1.0)
    assert scene.phase is GroupPhase.STARTING
    assert scene.status.revision_time == tried + 50_002.0
    assert [member.silent_since for member in scene.status.members] == [None, None]


def test_a_lost_placement_ends_the_incarnation_and_spends_nothing(scene: Scene) -> None:
    scene.serve()
    for incarnation in range(1, 8):
        # The head also reports the death of the other rank; the removal explains both.
        scene.members = [
            scene.member(0, Phase.FAILED, failure=scene.died(1, Cause.NODE_LOST, after=-1.0)),
            scene.member(1, Phase.DRAINING, removal="PreemptionByScheduler"),
        ]
        assert short(scene.look())[-1] == f"fence {incarnation}"
        assert (scene.phase, scene.status.last_failure.cause) == (GroupPhase.RECOVERING, Cause.PLACEMENT_LOST)
        scene.members = []
        scene.look(3.5)
        assert scene.phase is GroupPhase.RECOVERING, "its pods may be removed at once again"
        scene.look(0.5)
        assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, incarnation + 1)
        scene.serve()
    assert (scene.status.restarts, scene.status.total_restarts) == ((), 0)
    # A death of the engine in the next incarnation counts as usual.
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL", ended_time=scene.now)
    scene.look()
    scene.members = []
    scene.look(10.0)
    assert len(scene.status.restarts) == 1


def test_members_made_halfway_are_completed(scene: Scene) -> None:
    scene.look()
    scene.look()
    scene.members = [scene.member(0, Phase.JOINING)]
    assert short(scene.look(1.0)) == ["form 1"]
    scene.members = []
    assert short(scene.look(1.0)) == [], "one that was there is gone: not made again"


def test_a_dead_member_means_evidence_fence_and_another_incarnation(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL", ended_time=scene.now)
    decision = scene.look(1.0)
    assert short(decision) == ["collectevidence 1", "fence 1"]
    assert scene.phase is GroupPhase.RECOVERING
    failure = scene.status.last_failure
    assert (failure.cause, failure.culprit_rank, failure.culprit_node) == (Cause.MEMBER_LOST, 1, "node-1")
    assert (failure.level, failure.detected_by, failure.generation) == (2, "exit", 1)
    assert short(scene.look(1.0)) == ["fence 1", "forget 1"], "the head still lives"
    scene.members = [replace(member, ended="exit code 0") for member in scene.members]
    assert short(scene.look(1.0)) == ["forget 1"]
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 2)
    scene.members = []
    assert short(scene.look()) == ["fence 1", "form 2"], "fenced again: the listing may have been old"
    assert scene.status.restarts == (scene.now,)
    scene.says(Phase.SERVING)
    scene.look(2.0)
    scene.look()
    assert scene.phase is GroupPhase.SERVING
    assert scene.status.total_restarts == 1
    assert scene.status.last_failure.recover_seconds == 3.0


def test_evidence_is_recorded_with_the_death(scene: Scene) -> None:
    scene.serve()
    scene.members[0] = replace(scene.members[0], ended="exit code 0")
    status = record_evidence(scene.look().status, 1, "/evidence/1")
    assert status.last_failure is not None
    assert status.last_failure.evidence == status.history[0].evidence == "/evidence/1"
    assert record_evidence(status, 1, None) == status
    assert record_evidence(status, 9, "x") == status


def test_the_second_restart_waits_and_the_third_is_too_many(scene: Scene) -> None:
    scene.serve()
    for number in (1, 2):
        scene.members[1] = replace(scene.members[1], ended="exit code 1")
        scene.look()
        scene.members = []
        waiting = scene.look()
        if number == 2:
            assert scene.phase is GroupPhase.RECOVERING
            assert waiting.next_time == scene.status.next_restart_time == scene.status.restarts[0] + 4.0
            scene.now = waiting.next_time
        scene.serve()
    assert len(scene.status.restarts) == 2
    scene.members[0] = replace(scene.members[0], ended="exit code 1")
    decision = scene.look()
    assert short(decision) == ["collectevidence 3", "fence 3"]
    assert scene.phase is GroupPhase.FAILED
    assert (scene.status.exhausted_generation, scene.status.last_failure.level) == (1, 3)
    scene.members = [replace(member, ended="exit code 0") for member in scene.members]
    assert short(scene.look()) == [], "what is left of it stays to be looked at"
    assert short(scene.look(86_400.0)) == [], "not even when the window has passed"
    scene.generation = 2
    assert short(scene.look()) == ["forget 3"]
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 4)


def test_a_survivor_of_a_failed_group_is_fenced(new_scene: Any) -> None:
    scene = new_scene(budget=0)
    scene.serve()
    scene.members[0] = replace(scene.members[0], ended="exit code 1")
    scene.look()
    assert scene.phase is GroupPhase.FAILED
    decision = scene.look(1.0)
    assert (short(decision), decision.next_time) == (["fence 1"], scene.now + 1.0)


@pytest.mark.parametrize("cause", [Cause.CONFIG_ERROR, Cause.PORT_CONFLICT])
def test_the_same_deterministic_cause_twice_ends_it_early(new_scene: Any, cause: Cause) -> None:
    scene = new_scene(budget=9)
    for _ in range(2):
        for _ in range(2):
            scene.look(10.0)
        scene.members = [scene.member(0, Phase.FAILED, failure=scene.died(0, cause)), scene.member(1, Phase.JOINING)]
        scene.look()
        scene.members = []
    assert scene.phase is GroupPhase.FAILED
    assert len(scene.status.restarts) == 1


def never_serve(scene: Scene, *doubted: bool | None) -> None:
    """Run incarnations whose first responses are wrong; `doubted`: whether unverifiable files would explain it."""
    for said in doubted:
        for _ in range(2):
            scene.look(10.0)
        wrong = scene.died(0, Cause.CANARY_FAILED).model_copy(update={"generation": 1, "weights_doubted": said})
        scene.members = [scene.member(0, Phase.FAILED, failure=wrong), scene.member(1, Phase.LOADING)]
        scene.look()
        scene.members = []


def test_two_consecutive_failures_with_doubted_weights_end_the_recovery_early(new_scene: Any) -> None:
    """Without reference digests of the files, every new incarnation would die of the same cause."""
    scene = new_scene(budget=9)
    never_serve(scene, True, True)
    assert scene.phase is GroupPhase.FAILED
    assert len(scene.status.restarts) == 1
    told = exhausted_sentence(scene.deployment, scene.status)
    assert "died of CanaryFailed twice in a row, which a retry cannot correct" in told


@pytest.mark.parametrize("doubted", [(None, True), (True, None), (None, None)])
def test_wrong_answers_without_doubted_weights_use_the_budget(new_scene: Any, doubted: tuple[bool | None, ...]) -> None:
    scene = new_scene(budget=9)
    never_serve(scene, *doubted)
    assert scene.phase is GroupPhase.RECOVERING


def test_failures_of_two_members_are_one_death(new_scene: Any) -> None:
    scene = new_scene(budget=9)
    for _ in range(2):
        scene.look(10.0)
    heads, others = (scene.died(rank, Cause.STAGING_FAILED, after=1.0 - rank) for rank in (0, 1))
    told = EngineStatus(generation=0, failures=(heads,))
    scene.members = [
        scene.member(0, Phase.FAILED, failure=heads, engine=told),
        scene.member(1, Phase.FAILED, failure=others),
    ]
    scene.look(2.0)
    assert scene.phase is GroupPhase.RECOVERING
    assert [(found.level, found.culprit_rank) for found in scene.status.history] == [(2, 1)]
    assert scene.status.last_failure == scene.status.history[-1]


def test_a_deterministic_cause_with_service_in_between_is_no_repetition(new_scene: Any) -> None:
    scene = new_scene(budget=9)
    for _ in range(2):
        scene.now += 10.0
        scene.serve()
        scene.members[0] = scene.member(0, Phase.FAILED, failure=scene.died(0, Cause.PORT_CONFLICT))
        scene.look()
        scene.members = []
    assert scene.phase is GroupPhase.RECOVERING


def test_restarts_by_the_heads_agent_are_taken_over(scene: Scene) -> None:
    scene.serve()
    death = scene.died(0).model_copy(update={"level": 1, "generation": 1})
    engine = EngineStatus(generation=2, restarts=(scene.now + 0.1234,), failures=(death,))
    scene.members[0] = scene.member(0, Phase.RESTARTING, engine=engine)
    scene.look(1.0)
    assert scene.phase is GroupPhase.RESTARTING
    assert (scene.status.engine_generation, scene.status.total_restarts) == (2, 1)
    assert scene.status.last_failure.cause is Cause.ENGINE_CORE_DIED
    assert scene.status.last_failure.culprit_node == "node-0"

    recovered = death.model_copy(update={"recover_seconds": 3.0})
    engine = EngineStatus(generation=2, ready_time=scene.now, restarts=engine.restarts, failures=(recovered,))
    scene.members[0] = scene.member(0, Phase.SERVING, engine=engine)
    scene.look(1.0)
    assert scene.phase is GroupPhase.SERVING
    assert (len(scene.status.history), scene.status.total_restarts) == (1, 1)
    assert scene.status.last_failure.recover_seconds == 3.0

    scene.members[1] = replace(scene.members[1], ended="exit code 1")
    scene.look()
    scene.members = []
    scene.look(10.0)
    form = scene.look().actions[-1]
    assert isinstance(form, Form)
    assert len(form.plan.restarts) == 2, "the next agent knows what both levels have spent"


def test_restarts_by_an_agent_until_its_fence_are_charged(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = replace(scene.members[1], ended="exit code 1")
    scene.look()
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=2, restarts=(scene.now,)))
    assert short(scene.look()) == ["fence 1", "forget 1"]
    assert (scene.phase, scene.status.restarts) == (GroupPhase.RECOVERING, (scene.now,))


def test_a_failed_level_one_recovery_is_recorded_once_as_level_two(scene: Scene) -> None:
    scene.serve()
    death = scene.died(0).model_copy(update={"generation": 1})
    engine = EngineStatus(generation=1, failures=(death,))
    verdict = death.model_copy(update={"message": "the same death, told again"})
    scene.members[0] = scene.member(0, Phase.FAILED, engine=engine, failure=verdict)
    scene.look()
    assert scene.phase is GroupPhase.RECOVERING
    assert [failure.level for failure in scene.status.history] == [2]


def test_an_agent_that_repeats_old_deaths_does_not_change_the_history(new_scene: Any) -> None:
    scene = new_scene(budget=50)
    scene.serve()
    deaths = tuple(
        Failure(time=scene.now + n, cause=Cause.UNKNOWN, message="", detected_by="exit", generation=n, level=1)
        for n in range(1, 15)
    )
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=15, ready_time=scene.now, failures=deaths))
    scene.look()
    first = scene.status.history
    scene.look()
    assert [failure.engine_generation for failure in first] == list(range(5, 15))
    assert scene.status.history == first


def test_a_refused_plan_forms_nothing_and_is_tried_again(scene: Scene) -> None:
    scene.refuse = True
    decision = scene.look()
    assert (short(decision), scene.phase) == ([], GroupPhase.PENDING)
    assert decision.refusal is not None
    assert scene.now < decision.next_time <= scene.now + 60
    scene.refuse = False
    scene.look(15.0)
    scene.refuse = True
    assert scene.look().refusal is not None, "between claim and forming, too"
    scene.refuse = False
    assert short(scene.look(15.0)) == ["form 1"]


def test_unknown_incarnations_are_fenced_and_not_adopted(scene: Scene) -> None:
    scene.members = [stranger(scene, 3), stranger(scene, 7)]
    assert short(scene.look()) == ["fence 3", "forget 3", "fence 7", "forget 7"]
    assert scene.phase is GroupPhase.PENDING
    scene.members = []
    scene.look()
    assert scene.status.incarnation == 8, "no number is used twice, not even a stranger's"
    assert short(scene.look()) == ["fence 7", "form 8"]


def test_leftovers_of_another_incarnation_are_cleared_away_while_serving(scene: Scene) -> None:
    scene.serve()
    scene.members.append(stranger(scene, 9))
    assert short(scene.look()) == ["fence 9", "forget 9"]
    assert scene.phase is GroupPhase.SERVING


def test_evidence_comes_first_and_the_key_is_right(scene: Scene) -> None:
    scene.serve()
    scene.members[0] = replace(scene.members[0], ended="exit code 0")
    first, second, *_ = scene.look().actions
    assert isinstance(first, CollectEvidence)
    assert isinstance(second, Fence)
    assert str(first.key) == "default/nano/0"


def test_a_dead_verdict_alone_is_left_to_the_head(scene: Scene) -> None:
    scene.serve()
    status = scene.members[0].status
    dead = Verdict(health=Health.DEAD, failure=scene.died(0))
    scene.members[0] = replace(scene.members[0], status=status.model_copy(update={"verdict": dead}))
    assert short(scene.look()) == []
    assert scene.phase is GroupPhase.RESTARTING


def test_forget_is_the_only_action_for_ended_members(scene: Scene) -> None:
    scene.serve()
    scene.members.append(replace(stranger(scene, 9), ended="exit code 0"))
    assert scene.look().actions == (Forget(scene.look().actions[0].key, 9),)


def test_a_number_is_claimed_before_it_is_formed(scene: Scene) -> None:
    claim = scene.look()
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 1)
    assert claim.actions == (), "its members come after the claim was kept"
    assert [type(action) for action in scene.look().actions] == [Form]


def test_earlier_incarnations_are_fenced_before_members_are_formed(scene: Scene) -> None:
    scene.serve()
    scene.members = [replace(member, ended="exit code 1", ended_time=scene.now) for member in scene.members]
    scene.look()
    # The cache no longer shows the members, which proves nothing: fencing reads the API server itself.
    scene.members = []
    scene.look()
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 2)
    decision = scene.look()
    assert short(decision) == ["fence 1", "form 2"]


def test_a_head_whose_clock_is_a_day_ahead_delays_no_restart(scene: Scene) -> None:
    scene.serve()
    day = 86_400.0
    ahead = EngineStatus(generation=3, ready_time=scene.now, restarts=(scene.now + day, scene.now + day + 5))
    scene.members[0] = scene.member(0, engine=ahead)
    scene.look(1.0)
    scene.members[1] = replace(scene.members[1], ended="exit code 1", ended_time=scene.now)
    decision = scene.look(1.0)
    assert scene.phase is GroupPhase.RECOVERING
    assert scene.status.next_restart_time == scene.now
    assert decision.next_time == scene.now


def test_restarts_in_the_future_leave_the_status(scene: Scene) -> None:
    scene.serve()
    ours, theirs = scene.now, scene.now + 86_400.0
    scene.kept = scene.status.model_copy(update={"restarts": (ours, theirs)})
    scene.look(1.0)
    assert scene.status.restarts == (ours,)


def test_the_pause_after_a_lost_placement_is_bounded_by_any_clock(scene: Scene) -> None:
    """The operator that dated it had a clock that was ahead by a day."""
    scene.serve()
    scene.members = [scene.member(0), scene.member(1, Phase.DRAINING, removal="PreemptionByScheduler")]
    scene.look()
    scene.members = []
    scene.look(-86_400.0)
    assert scene.phase is GroupPhase.RECOVERING
    scene.look(4.0)
    assert (scene.phase, scene.status.incarnation) == (GroupPhase.FORMING, 2)


@pytest.mark.parametrize("gone", [True, False])
def test_a_silence_is_noticed_after_an_operator_whose_clock_was_ahead(scene: Scene, gone: bool) -> None:
    """Otherwise the loss of a member would be noticed a day later."""
    scene.serve()
    scene.members = [scene.member(0)] if gone else [scene.member(0), scene.member(1, None)]
    day = 86_400.0
    scene.now += day
    scene.members[0] = scene.member(0)
    scene.look()
    assert scene.status.members[1].silent_since > scene.now - 10.0
    scene.now -= day
    for _ in range(8):
        scene.now += 2.0
        scene.members[0] = scene.member(0)
        scene.look()
    assert scene.phase is GroupPhase.RECOVERING


def test_no_duration_counts_from_the_future(scene: Scene) -> None:
    """Otherwise a change that never serves would be taken back a day late."""
    scene.look()
    scene.look()
    scene.says(Phase.LOADING)
    scene.look()
    day = scene.now + 86_400.0
    fields = ("phase_time", "revision_time", "formed_time")
    scene.kept = scene.status.model_copy(update=dict.fromkeys(fields, day))
    scene.look(1.0)
    assert [getattr(scene.status, name) for name in fields] == [scene.now] * 3
    scene.look(1.0)
    assert [getattr(scene.status, name) for name in fields] == [scene.now - 1.0] * 3
