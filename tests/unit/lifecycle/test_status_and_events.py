"""Status and events of a deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    MoveStatus,
    Reason,
)
from dsv4_operator.api.deployment import PAUSED
from dsv4_operator.api.findings import Finding
from dsv4_operator.api.status import read_status
from dsv4_operator.lifecycle import Event, EventType, compute_status, events, refused_status, update_status
from dsv4_operator.lifecycle.observed import UNTRIED
from dsv4_operator.lifecycle.status import Problem, undetermined
from dsv4_operator.planning import PlanRefused
from dsv4_runtime.contract import Cause, EngineStatus, KernelStatus, Phase, ProviderStatus

Scene = Any
URL = "http://127.0.0.1:8000/v1"


def status_of(
    scene: Scene, previous: DeploymentStatus | None = None, refusal: PlanRefused | None = None
) -> DeploymentStatus:
    groups = [] if scene.kept is None else [scene.kept]
    return compute_status(scene.deployment, groups, refusal, URL, None, previous, scene.now, deleting=scene.deleting)


def true(status: DeploymentStatus) -> set[str]:
    return {condition.type for condition in status.conditions if condition.status is ConditionStatus.TRUE}


def reason(status: DeploymentStatus, kind: ConditionType) -> Reason:
    condition = status.condition(kind)
    assert condition is not None
    return condition.reason


def message(status: DeploymentStatus, kind: ConditionType) -> str:
    condition = status.condition(kind)
    assert condition is not None
    return condition.message


def test_from_nothing_to_serving(scene: Scene) -> None:
    assert status_of(scene).phase is DeploymentPhase.PENDING
    scene.look()
    starting = status_of(scene)
    assert (starting.phase, true(starting)) == (DeploymentPhase.STARTING, {"Accepted", "Progressing"})
    assert starting.expected_ready_seconds == 45.0
    scene.serve()
    serving = status_of(scene, starting)
    assert (serving.phase, true(serving)) == (DeploymentPhase.SERVING, {"Accepted", "Ready"})
    assert (serving.replicas, serving.ready_replicas, serving.endpoint) == (1, 1, URL)
    assert DeploymentStatus.model_validate_json(serving.to_json()) == serving


def reached(scene: Scene, unreachable: str | None, previous: DeploymentStatus | None = None) -> DeploymentStatus:
    assert scene.kept is not None
    return compute_status(scene.deployment, [scene.kept], None, URL, None, previous, scene.now, unreachable=unreachable)


def test_ready_needs_an_answer_through_the_endpoint(scene: Scene) -> None:
    scene.look()
    starting = reached(scene, "no gateway is ready")
    assert reason(starting, ConditionType.READY) is Reason.GROUPS_NOT_READY, "the engine is what is missing"
    scene.serve()
    lost = reached(scene, "gateway g: agent credentials rejected (401)", starting)
    # The group serves, so its phase and its supervision do not change.
    assert (lost.phase, true(lost), lost.ready_replicas) == (DeploymentPhase.SERVING, {"Accepted"}, 1)
    assert reason(lost, ConditionType.READY) is Reason.ENDPOINT_NOT_READY
    assert message(lost, ConditionType.READY) == (
        "1 of 1 groups answer, the endpoint does not: gateway g: agent credentials rejected (401)"
    )
    assert "Ready" in true(reached(scene, None, lost))


def test_an_endpoint_that_does_not_answer_is_one_event_and_one_that_was_not_tried_is_none(scene: Scene) -> None:
    scene.serve()
    untried = reached(scene, UNTRIED)
    first = reached(scene, "401", untried)
    other = reached(scene, "no answer", first)
    again = reached(scene, None, other)
    steps = ((None, untried), (untried, first), (first, other), (other, again), (again, first))
    told = [[event for event in events(*step) if event.reason is Reason.ENDPOINT_NOT_READY] for step in steps]
    assert [len(found) for found in told] == [0, 1, 0, 0, 1]
    assert told[1][0].type is EventType.WARNING


def test_the_time_of_a_condition_changes_with_its_status_only(scene: Scene) -> None:
    scene.look()
    first = status_of(scene)
    scene.now += 60
    second = status_of(scene, first)
    assert second == first
    scene.serve()
    third = status_of(scene, second)
    times = {condition.type: condition.last_transition_time for condition in third.conditions}
    assert times[ConditionType.READY] == scene.now
    assert times[ConditionType.ACCEPTED] == first.conditions[0].last_transition_time


def test_a_recovery(scene: Scene) -> None:
    scene.serve()
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL")
    scene.look()
    down = status_of(scene)
    assert (down.phase, true(down)) == (DeploymentPhase.RECOVERING, {"Accepted", "Progressing", "Degraded"})
    assert message(down, ConditionType.DEGRADED) == (
        "group 0 is down after MemberLost on member 1 (node-1): member 1: its agent ended: killed by SIGKILL"
    )
    scene.members = []
    scene.look()
    assert scene.phase is GroupPhase.FORMING
    assert status_of(scene).phase is DeploymentPhase.RECOVERING, "until it serves again"
    scene.serve()
    assert status_of(scene).phase is DeploymentPhase.SERVING


def test_a_failed_deployment_is_reported_with_its_cause(new_scene: Any) -> None:
    scene = new_scene(budget=0)
    scene.serve()
    scene.members[0] = scene.member(0, Phase.FAILED, failure=scene.died(0))
    scene.look()
    status = status_of(scene)
    assert (status.phase, true(status)) == (DeploymentPhase.FAILED, {"Accepted", "Degraded", "RecoveryExhausted"})
    assert message(status, ConditionType.RECOVERY_EXHAUSTED) == (
        "group 0 used up its 0 restarts within 10m (spec.recovery.maxRestarts); "
        "last: EngineCoreDied on member 0 (node-0): EngineCoreDied it was; "
        "correct that, then apply a changed specification (or `dsv4 down` and `dsv4 up`) to try again"
    )


def test_a_repeated_deterministic_failure_is_reported_as_exhausted(new_scene: Any) -> None:
    scene = new_scene(budget=5)
    for _ in range(2):
        for _ in range(2):
            scene.look(10.0)
        scene.members = [scene.member(0, Phase.FAILED, failure=scene.died(0, Cause.PORT_CONFLICT)), scene.member(1)]
        scene.look()
        scene.members = []
    text = message(status_of(scene), ConditionType.RECOVERY_EXHAUSTED)
    assert text.startswith("group 0 died of PortConflict twice in a row, which a retry cannot correct; last: ")


def test_a_refusal(scene: Scene) -> None:
    scene.refuse = True
    refusal = scene.look().refusal
    status = status_of(scene, refusal=refusal)
    assert (status.phase, true(status)) == (DeploymentPhase.PENDING, set())
    assert reason(status, ConditionType.ACCEPTED) is reason(status, ConditionType.READY) is Reason.MEMORY_SHORT
    assert message(status, ConditionType.ACCEPTED) == "too little memory; add some"


def test_a_refused_change_is_not_ready_although_the_old_one_serves(scene: Scene) -> None:
    scene.serve()
    scene.seed, scene.generation, scene.refuse = 1, 2, True
    status = status_of(scene, refusal=scene.look().refusal)
    assert (status.ready_replicas, status.observed_generation) == (1, 2)
    assert "Ready" not in true(status)


def test_reports_of_members_hide_neither_a_refusal_nor_a_problem(scene: Scene) -> None:
    """`dsv4 status` reads the members when the loop does not respond."""
    scene.serve()
    assert scene.kept is not None
    refused = PlanRefused(Reason.MEMORY_SHORT, Finding("", Reason.MEMORY_SHORT, "1 GiB is free; end other programs"))
    problem = Problem("the state directory cannot be written; make space there", None, Reason.STATE_NOT_SAVED)
    restarting = scene.kept.model_copy(update={"phase": GroupPhase.RESTARTING})
    for refusal, problems in ((refused, [problem]), (refused, []), (None, [problem]), (None, [])):
        saved = compute_status(scene.deployment, [scene.kept], refusal, URL, None, None, scene.now, problems=problems)
        known = scene.deployment.model_copy(update={"status": saved})
        assert update_status(known, [scene.kept], scene.now + 5) == saved
        found = update_status(known, [restarting], scene.now + 5)
        assert "Ready" not in true(found)
        assert found.condition(ConditionType.ACCEPTED) == saved.condition(ConditionType.ACCEPTED)
        assert reason(found, ConditionType.PROGRESSING) is (
            Reason.STATE_NOT_SAVED if problems else Reason.ENGINE_RESTARTING
        )


@pytest.mark.parametrize("phase", GroupPhase)
def test_progress_without_a_problem_follows_from_the_groups(scene: Scene, phase: GroupPhase) -> None:
    move = MoveStatus(nodes=("a",), blocked="no node is free")
    for group in (GroupStatus(index=0, phase=phase), GroupStatus(index=0, phase=phase, move=move)):
        saved = compute_status(scene.deployment, [group], None, URL, None, None, scene.now)
        known = scene.deployment.model_copy(update={"status": saved})
        serving = GroupStatus(index=0, phase=GroupPhase.SERVING)
        assert reason(update_status(known, [serving], scene.now), ConditionType.PROGRESSING) is Reason.STEADY


def test_each_group_that_was_given_up_has_an_event_of_its_own(scene: Scene) -> None:
    def failed(index: int, cause: Cause) -> GroupStatus:
        last = FailureStatus(time=1.0, cause=cause, deterministic=True)
        return GroupStatus(index=index, phase=GroupPhase.FAILED, last_failure=last, history=(last,))

    spec = scene.deployment.spec.model_copy(update={"replicas": 2})
    deployment = scene.deployment.model_copy(update={"spec": spec})
    first, second = failed(0, Cause.CONFIG_ERROR), failed(1, Cause.WEIGHTS_CORRUPT)
    one = compute_status(deployment, [first, GroupStatus(index=1)], None, URL, None, None, scene.now)
    both = compute_status(deployment, [first, second], None, URL, None, one, scene.now)
    found = [each for each in (*events(None, one), *events(one, both)) if each.reason is Reason.RECOVERY_EXHAUSTED]
    assert [each.group for each in found] == [0, 1]
    for each, cause, other in zip(found, ("ConfigError", "WeightsCorrupt"), (1, 0), strict=True):
        assert cause in each.message
        assert f"group {other}" not in each.message


def test_suspend(scene: Scene) -> None:
    scene.serve()
    scene.suspend = True
    scene.look()
    draining = status_of(scene)
    assert (draining.phase, true(draining)) == (DeploymentPhase.DRAINING, {"Accepted", "Progressing"})
    scene.members = []
    scene.look()
    suspended = status_of(scene)
    assert (suspended.phase, true(suspended)) == (DeploymentPhase.SUSPENDED, {"Accepted", "Suspended"})
    assert suspended.replicas == 0


def test_deleting_and_scaling_to_nothing(scene: Scene) -> None:
    scene.serve()
    scene.replicas = 0
    assert reason(status_of(scene), ConditionType.READY) is Reason.SCALED_TO_ZERO
    scene.deleting = True
    assert status_of(scene).phase is DeploymentPhase.TERMINATING
    assert reason(status_of(scene), ConditionType.READY) is Reason.TERMINATING


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((GroupPhase.SERVING, GroupPhase.SERVING), DeploymentPhase.SERVING),
        ((GroupPhase.SERVING, GroupPhase.RECOVERING), DeploymentPhase.DEGRADED),
        ((GroupPhase.SERVING, GroupPhase.FAILED), DeploymentPhase.DEGRADED),
        ((GroupPhase.FAILED, GroupPhase.RECOVERING), DeploymentPhase.FAILED),
        ((GroupPhase.RESTARTING, GroupPhase.STARTING), DeploymentPhase.RECOVERING),
        ((GroupPhase.UPDATING, GroupPhase.SERVING), DeploymentPhase.UPDATING),
        ((GroupPhase.STARTING, GroupPhase.SERVING), DeploymentPhase.STARTING),
        ((GroupPhase.PENDING, GroupPhase.PENDING), DeploymentPhase.PENDING),
        ((GroupPhase.SERVING,), DeploymentPhase.STARTING),
    ],
)
def test_the_summary_of_several_groups(
    new_scene: Any, phases: tuple[GroupPhase, ...], expected: DeploymentPhase
) -> None:
    scene = new_scene(replicas=2)
    groups = [GroupStatus(index=index, phase=phase) for index, phase in enumerate(phases)]
    assert compute_status(scene.deployment, groups, None, None, None, None, scene.now).phase is expected


class Log:
    """The events of a scene, decision by decision."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.previous: DeploymentStatus | None = None

    def look(self, after: float = 0.0) -> list[Event]:
        decision = self.scene.look(after)
        status = status_of(self.scene, self.previous, decision.refusal)
        found = events(self.previous, status)
        self.previous = status
        return list(found)


def reasons(found: list[Event]) -> list[Reason]:
    return [event.reason for event in found]


def test_events_of_a_start_and_a_recovery(scene: Scene) -> None:
    log = Log(scene)
    assert reasons(log.look()) == [Reason.PLAN_ACCEPTED, Reason.GROUP_FORMING]
    assert log.look() == []
    scene.says(Phase.LOADING)
    assert reasons(log.look()) == [Reason.GROUP_STARTING]
    scene.says(Phase.SERVING)
    assert reasons(log.look()) == [Reason.ENGINE_READY]
    assert log.look(1.0) == []
    scene.members[1] = replace(scene.members[1], ended="killed by SIGKILL")
    found = log.look()
    assert reasons(found) == [Reason.GROUP_DEAD, Reason.GROUP_RECOVERING]
    assert (found[0].type, found[0].group) == (EventType.WARNING, 0)
    scene.members = []
    assert reasons(log.look()) == [Reason.GROUP_FORMING]
    log.look(2.0)
    scene.says(Phase.SERVING)
    log.look()
    found = log.look()
    assert reasons(found) == [Reason.GROUP_RECOVERED]
    assert found[0].message == "answers again, 2.0 s after MemberLost"


def test_events_of_level_one_even_if_it_was_too_quick_to_be_seen(scene: Scene) -> None:
    log = Log(scene)
    log.look()
    scene.serve()
    log.look()
    death = scene.died(0).model_copy(update={"level": 1, "generation": 1, "recover_seconds": 2.5})
    engine = EngineStatus(generation=2, ready_time=scene.now, restarts=(scene.now,), failures=(death,))
    scene.members[0] = scene.member(0, engine=engine)
    found = log.look(1.0)
    assert reasons(found) == [Reason.ENGINE_DEAD, Reason.GROUP_RECOVERED]
    assert found[1].message == "answers again, 2.5 s after EngineCoreDied"
    assert log.look() == []


def test_the_repair_is_reported_after_the_cause(scene: Scene) -> None:
    log = Log(scene)
    log.look()
    scene.serve()
    log.look()
    death = scene.died(0).model_copy(update={"generation": 1})
    # The agent has detected a death and compares the members; the first sign may not be the cause.
    first = death.model_copy(update={"message": "a process ended"})
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=1), failure=first)
    assert log.look(0.5) == []
    assert (scene.kept.phase, undetermined(scene.kept)) == (GroupPhase.RESTARTING, "a process ended")
    decided = death.model_copy(update={"level": 1})
    for failures, generation in (((decided,), 1), ((decided, decided.model_copy(update={"generation": 2})), 2)):
        engine = EngineStatus(generation=generation, failures=failures)
        scene.members[0] = scene.member(0, Phase.RESTARTING, engine=engine, failure=failures[-1])
        assert reasons(log.look(0.5)) == [Reason.ENGINE_DEAD, Reason.ENGINE_RESTARTING]
        assert undetermined(scene.kept) is None
        assert log.look(0.5) == []
    served = tuple(one.model_copy(update={"recover_seconds": 2.5}) for one in failures)
    scene.members[0] = scene.member(
        0, engine=EngineStatus(generation=3, ready_time=scene.now, restarts=(scene.now,), failures=served)
    )
    assert reasons(log.look(1.0)) == [Reason.GROUP_RECOVERED]


def test_a_slow_gpu_is_one_event_and_stops_nothing(scene: Scene) -> None:
    log = Log(scene)
    log.look()
    scene.serve()
    log.look()
    slow = "GPU 0 runs at 799 of 3003 MHz under load, 20 W"
    scene.members[1] = scene.member(1, warnings=(slow,))
    (event,) = log.look(1.0)
    assert (event.type, event.reason) == ("Warning", Reason.GPU_THROTTLED)
    assert event.message.startswith("rank 1 on ")
    assert event.message.endswith(f": {slow}")
    assert scene.kept.members[1].warnings == (slow,)
    assert scene.kept.phase is GroupPhase.SERVING
    assert log.look(1.0) == []
    scene.members[1] = scene.member(1)
    assert log.look(1.0) == []
    assert scene.kept.members[1].warnings == ()


def test_the_kv_cache_is_that_of_the_present_engine(scene: Scene) -> None:
    scene.look()
    scene.serve()
    told = {"kv_cache_tokens": 13_809, "kv_concurrency": 13.49, "kv_planned_tokens": 14_000}
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=1, ready_time=scene.now, **told))
    scene.look(1.0)
    assert scene.status.kv_cache is not None
    assert scene.status.kv_cache.to_dict() == {"tokens": 13_809, "concurrency": 13.49, "plannedTokens": 14_000}
    scene.members[0] = scene.member(0, Phase.LOADING, engine=EngineStatus(generation=2, kv_planned_tokens=14_000))
    scene.look(1.0)
    assert scene.status.kv_cache is None


def test_kernels_of_the_status_are_those_of_the_present_engine(scene: Scene) -> None:
    scene.look()
    scene.serve()
    standings = (ProviderStatus(provider="triton", excluded="t8: wrong: rms above 5e-3"),)
    found = KernelStatus(op="moe", provider="bundled", standings=standings)
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=1, ready_time=scene.now, kernels=(found,)))
    scene.look(1.0)
    assert scene.status.kernels == (found,)
    assert read_status({"groups": [scene.status.to_dict()]}).groups[0].kernels == (found,)
    scene.members[0] = scene.member(0, Phase.LOADING, engine=EngineStatus(generation=2))
    scene.look(1.0)
    assert scene.status.kernels == ()


def test_measured_memory_is_kept_after_the_engines_end(scene: Scene) -> None:
    scene.look()
    scene.serve()
    told = {"memory_of": "V4-Flash on gb10", "memory": {"weights": 7}}
    scene.members[0] = scene.member(0, engine=EngineStatus(generation=1, ready_time=scene.now, **told))
    scene.look(1.0)
    first = scene.status.measured
    assert first is not None
    assert (first.of, first.incarnation) == ("V4-Flash on gb10", scene.status.incarnation)
    assert [(item.item, item.difference) for item in first.items] == [("weights", 7)]
    scene.look(1.0)
    assert scene.status.measured == first, "the same start is not written twice"
    scene.members[0] = scene.member(0, Phase.LOADING, engine=EngineStatus(generation=2))
    scene.look(1.0)
    assert scene.status.measured == first


def test_events_of_a_wait_and_of_the_end(scene: Scene) -> None:
    log = Log(scene)
    scene.serve()
    log.look()
    for expected in (Reason.GROUP_RECOVERING, Reason.RESTART_BACKOFF, Reason.RECOVERY_EXHAUSTED):
        scene.members[0] = scene.member(0, Phase.FAILED, failure=scene.died(0))
        assert reasons(log.look()) == [Reason.GROUP_DEAD, expected]
        scene.members = []
        if expected is not Reason.RECOVERY_EXHAUSTED:
            scene.look(5.0)
            scene.serve()
            log.look()


def test_events_of_requests(scene: Scene) -> None:
    log = Log(scene)
    scene.serve()
    log.look()
    scene.seed, scene.generation = 1, 2
    assert reasons(log.look()) == [Reason.UPDATE_STARTED]
    scene.suspend = True
    assert reasons(log.look()) == [Reason.GROUP_STOPPING]
    scene.members = []
    assert reasons(log.look()) == [Reason.SUSPENDED]
    scene.deleting = True
    assert reasons(log.look()) == [Reason.GROUP_STOPPED]


def test_a_refusal_is_reported_once(scene: Scene) -> None:
    log = Log(scene)
    scene.refuse = True
    assert reasons(log.look()) == [Reason.MEMORY_SHORT]
    assert log.look(15.0) == []
    scene.refuse = False
    assert reasons(log.look(15.0)) == [Reason.PLAN_ACCEPTED, Reason.GROUP_FORMING]


def test_a_pause_is_the_reason_of_the_progressing_condition(scene: Scene) -> None:
    scene.serve()
    scene.annotations[PAUSED] = "true"
    scene.look()
    assert reason(status_of(scene), ConditionType.PROGRESSING) is Reason.PAUSED


def test_an_unreadable_specification_is_refused_and_running_groups_continue(scene: Scene) -> None:
    nothing = refused_status(DeploymentStatus(), "spec.x: is wrong; write y", 3, scene.now)
    assert true(nothing) == set()
    assert {condition.type for condition in nothing.conditions} == {ConditionType.ACCEPTED, ConditionType.READY}
    assert nothing.observed_generation == 3
    scene.serve()
    serving = status_of(scene)
    refused = refused_status(serving, "spec.x: is wrong; write y", 3, scene.now)
    # The groups are not observed, so their last known state is not valid now.
    ready = refused.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.status, refused.ready_replicas) == (ConditionStatus.UNKNOWN, 0)
    assert refused.groups == serving.groups
    assert reason(refused, ConditionType.ACCEPTED) is Reason.SPEC_INVALID
    (event,) = events(serving, refused)
    assert (event.type, event.message) == (EventType.WARNING, "spec.x: is wrong; write y")
    assert refused_status(refused, "spec.x: is wrong; write y", 3, scene.now + 60) == refused
