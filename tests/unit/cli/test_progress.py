from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsv4_operator.api import ConditionType, GroupPhase
from dsv4_operator.cli import render, up
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_operator.cli.up import Stage, StartOutcome
from dsv4_runtime.contract import Cause, Phase
from dsv4_testkit.rollout_world import Asked, World


def starting(make: Any, *members: Any, **more: Any) -> Any:
    group = make.group(GroupPhase.STARTING, members=members, ready_time=None)
    return make.status(group, ready=False, **more)


def test_view_of_a_start(make: Any) -> None:
    status = starting(
        make,
        make.member(0, Phase.LOADING, "loading shards 2/4"),
        make.member(1, None, silent_since=make.now - 12),
        expected_ready_seconds=45,
    )
    assert up.start_view("nano", status, 23.4, make.now) == (
        "nano   Starting   0:23 of about 0:45\n"
        "RANK   ROLE     ADDRESS      PHASE     MESSAGE\n"
        "0      Head     10.88.0.10   Loading   loading shards 2/4\n"
        "1      Worker   10.88.0.11   -         started; no answer yet after 12 s"
    )
    assert up.start_view("nano", None, 1, make.now) == "nano   Pending   0:01"


def test_view_names_the_group_when_there_are_several(make: Any) -> None:
    groups = [make.group(index=index, members=(make.member(0),)) for index in (0, 1)]
    assert render.members_table(make.status(*groups), make.now).splitlines()[1:] == [
        "0       0      Head   10.88.0.10   Serving   -",
        "1       0      Head   10.88.0.10   Serving   -",
    ]


def test_a_start_gives_each_transition_once(make: Any) -> None:
    first = starting(make, make.member(0, Phase.PREFLIGHT), make.member(1, None))
    assert up.transitions(None, first, members=True) == [
        "starting the engine in incarnation 1",
        "rank 0 is the head at 10.88.0.10",
        "rank 0 Preflight",
        "rank 1 is the worker at 10.88.0.11",
    ]
    assert up.transitions(first, first, members=True) == []
    second = starting(make, make.member(0, Phase.LOADING, "loading shards 1/4"), make.member(1, Phase.JOINING))
    assert up.transitions(first, second, members=True) == ["rank 0 Loading: loading shards 1/4", "rank 1 Joining"]
    third = starting(make, make.member(0, Phase.LOADING, "loading shards 2/4"), make.member(1, Phase.JOINING))
    assert up.transitions(second, third, members=True) == [], "progress within a phase is no transition"
    silent = starting(make, make.member(0, Phase.LOADING), make.member(1, Phase.JOINING, silent_since=make.now))
    assert up.transitions(third, silent, members=True) == ["rank 1 no longer answers"]
    assert up.transitions(silent, make.status(), members=False) == ["serving"]


def test_a_member_that_has_not_answered_yet_is_not_lost(make: Any) -> None:
    begun = starting(make, make.member(0, Phase.LOADING), make.member(1, None))
    waiting = starting(make, make.member(0, Phase.LOADING), make.member(1, None, silent_since=make.now))
    assert up.transitions(begun, waiting, members=True) == []
    answered = starting(make, make.member(0, Phase.LOADING), make.member(1, Phase.PREFLIGHT))
    silent = starting(make, make.member(0, Phase.LOADING), make.member(1, Phase.PREFLIGHT, silent_since=make.now))
    assert up.transitions(answered, silent, members=True) == ["rank 1 no longer answers"]


def test_a_death_and_the_recovery(make: Any) -> None:
    healthy = make.status()
    death = make.failure()
    dead = make.status(make.failed_group(death, phase=GroupPhase.RESTARTING), ready=False)
    assert up.transitions(healthy, dead, members=False) == [
        "died: EngineCoreDied on rank 0 (local-0): killed by SIGKILL",
        "restarting the engine in place",
    ]
    mended = make.status(make.failed_group(death.model_copy(update={"recover_seconds": 12.34})))
    assert up.transitions(dead, mended, members=False) == ["serving again after 12 s"]
    assert up.transitions(mended, mended, members=False) == []


def test_a_new_incarnation_waits_for_its_turn(make: Any) -> None:
    death = make.failure(cause=Cause.MEMBER_LOST, culprit_rank=1, culprit_node=None, message="", level=2)
    dead = make.status(
        make.failed_group(death, phase=GroupPhase.RECOVERING, next_restart_time=make.now + 30), ready=False
    )
    assert up.transitions(make.status(), dead, members=True)[:3] == [
        "died: MemberLost on rank 1",
        "ending incarnation 1, to form the group again",
        "the next restart waits until 14:13:50",
    ]


def test_earlier_deaths_are_not_reported(make: Any) -> None:
    status = make.status(make.failed_group(make.failure(recover_seconds=3.0)))
    assert up.transitions(None, status, members=False) == ["serving"]


def test_outcome(make: Any) -> None:
    assert up.start_outcome(make.status(), 1) == StartOutcome(Stage.READY)
    assert up.start_outcome(make.status(), 2) == StartOutcome(Stage.STARTING), "that was about an older specification"
    assert up.start_outcome(make.status(ready=False), 1) == StartOutcome(Stage.STARTING)
    refused = make.condition(ConditionType.ACCEPTED, true=False, message="needs 8Gi, 2Gi are free")
    assert up.start_outcome(make.status(conditions=(refused,)), 1) == StartOutcome(
        Stage.FAILED, "needs 8Gi, 2Gi are free", ExitCode.BAD_INPUT, final=False
    )


@pytest.mark.parametrize(("cause", "code"), [(Cause.CONFIG_ERROR, 2), (Cause.RAY_WORKER_DIED, 1)])
def test_a_failed_deployment_is_reported_with_its_cause(make: Any, cause: Cause, code: int) -> None:
    exhausted = make.condition(ConditionType.RECOVERY_EXHAUSTED, true=True, message="5 of 5 restarts are spent.")
    group = make.failed_group(make.failure(cause=cause, culprit_node=None), phase=GroupPhase.FAILED)
    found = up.start_outcome(make.status(group, conditions=(exhausted,)), 1)
    assert found.message.split("; ") == ["5 of 5 restarts are spent", f"{cause} on rank 0: killed by SIGKILL"]
    assert found.code == code


def test_waiting_for(make: Any) -> None:
    assert up.pending_reason(None) == "the loop has reported nothing"
    status = starting(make, make.member(0, Phase.LOADING, "loading shards 1/4"), make.member(1, None))
    loading, missing = up.pending_reason(status).split(", ")
    assert all(part in loading for part in ("rank 0", "Loading", "loading shards 1/4"))
    assert all(part in missing for part in ("rank 1", "not started"))
    idle = make.status(make.group(GroupPhase.PENDING, members=()), ready=False, conditions=())
    assert up.pending_reason(idle) == "it is Starting"


def test_an_attached_up_continues_while_a_group_answers(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(asked=Asked(replicas=2))
    world.until(lambda: world.all_serve(0))
    signals = SimpleNamespace(count=0)

    def text() -> str:
        return world.deployment.model_copy(update={"status": world.kept}).to_json()

    state: Any = SimpleNamespace(name="nano", object_text=text, log="loop.log", root=None)
    process: Any = SimpleNamespace(poll=lambda: None, returncode=None, pid=1)
    started = up.StartedDeployment(state, process, cast("Any", signals), None, detach=False, timeout=1)

    def give_up(index: int) -> None:
        while world.group(index).phase is not GroupPhase.FAILED:
            for member in world.alive(index) if world.group(index).phase is GroupPhase.SERVING else ():
                member.fail(Cause.CONFIG_ERROR, world.now)
            world.go_on()

    give_up(1)
    for member in world.alive(0):
        member.fail(Cause.ENGINE_CORE_DIED, world.now)
    world.until(lambda: world.group(0).history and world.group(0).phase is GroupPhase.SERVING)
    polls = iter((0, 0, 1))

    def end(_: float) -> None:
        signals.count = next(polls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up.time, "sleep", end)
        assert started.wait_until_end() is ExitCode.INTERRUPTED
        assert "group 1" in capsys.readouterr().out
        # The latest death is that of the other group, which recovered.
        outcome = up.start_outcome(world.kept, world.deployment.metadata.generation)
        assert (outcome.stage, outcome.code) == (Stage.FAILED, ExitCode.BAD_INPUT)
        give_up(0)
        signals.count, polls = 0, iter((0, 0, 1))
        with pytest.raises(CommandError, match="group 0 used up"):
            started.wait_until_end()
