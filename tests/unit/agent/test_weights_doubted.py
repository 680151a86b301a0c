"""Failures that make a member verify its weight files, and failures that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import (
    DoubtWeights,
    KeepAnswer,
    RecordFailure,
    ReportDead,
    ReportVerified,
    SaveEvidence,
    StartTask,
)
from dsv4_runtime.agent.decide.events import (
    AgentEvent,
    ApiAnswered,
    ApiEnded,
    Done,
    FirstCompletion,
    FirstError,
    Judged,
    ProcessEnded,
    Staged,
    Started,
    Task,
    TaskFailed,
    WeightsRead,
)
from dsv4_runtime.contract import (
    Cause,
    EngineStatus,
    Failure,
    Health,
    Phase,
    Verdict,
)
from dsv4_runtime.engine.completion import KnownAnswer
from dsv4_runtime.health.rules import Judgement

MakeReplay = Callable[..., Any]
CORE = ProcessEnded("engine-core")


ANSWER = KnownAnswer(("token_id:5", "token_id:9"), (-1.5, -2.5), (0.5, 1.5))


def warm(replay: Any, *, restarted: bool = True) -> None:
    """Replay the events from the start to the first completion request, of the second engine or of the first."""
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged(replay.verified), Done(Task.JOIN)):
        replay.feed(event)
    replay.join()
    replay.feed(ApiAnswered())
    if restarted:
        replay.feed(FirstCompletion())
        replay.restart()
        replay.feed(ApiAnswered())
    replay.done.clear()


def test_a_verification_before_an_earlier_engine_does_not_count_for_the_present_one(fresh: MakeReplay) -> None:
    replay = fresh()
    replay.verified = True
    warm(replay)
    replay.feed(FirstCompletion("the log probability is nan", wrong=True))
    replay.pass_to(replay.clock + 4)
    assert StartTask(Task.VERIFY) in replay.all(StartTask)
    assert replay.all(ReportDead) == [], "first it is to be known whether the files are right"


@pytest.mark.parametrize(("place", "shared"), [("7:1", True), ("7:2", False), ("", False)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_file_of_a_shared_directory_has_no_culprit_rank(
    serving: MakeReplay, rank: int, place: str, shared: bool
) -> None:
    replay = serving(rank)
    replay.tell(1 - rank, weights_place="7:1")
    replay.feed(replace(replay.state.view, weights_place=place))
    replay.feed(TaskFailed(Task.SCRUB, Cause.WEIGHTS_CORRUPT, "model-1 is wrong", "staging"))
    cause, culprit, message = replay.failure
    assert cause is Cause.WEIGHTS_CORRUPT
    assert culprit == (None if shared else rank)
    assert message == "model-1 is wrong" + ("; ranks 0, 1 share the directory /nowhere" if shared else "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_became_wrong_while_the_engine_serves_is_named_and_read_again(
    serving: MakeReplay, rank: int
) -> None:
    replay = serving(rank)
    replay.feed(TaskFailed(Task.SCRUB, Cause.WEIGHTS_CORRUPT, "model-1 is not what its source says", "staging"))
    assert replay.failure == (Cause.WEIGHTS_CORRUPT, rank, "model-1 is not what its source says")
    assert replay.all(DoubtWeights) == [DoubtWeights("model-1 is not what its source says")]
    assert replay.phases[-1] is Phase.FAILED


def test_the_files_are_read_while_the_engine_serves(fresh: MakeReplay) -> None:
    head, worker = fresh(0), fresh(1)
    warm(head, restarted=False)
    assert StartTask(Task.SCRUB) not in head.all(StartTask)
    head.feed(FirstCompletion())
    assert StartTask(Task.SCRUB) in head.all(StartTask)
    worker.serve()
    worker.head_says(1, Phase.LOADING)
    assert StartTask(Task.SCRUB) not in worker.all(StartTask)
    worker.head_says(1, Phase.SERVING)
    assert StartTask(Task.SCRUB) in worker.all(StartTask)


NAN = FirstCompletion("the log probability is nan", wrong=True)
FAILED = "the first completion failed: the log probability is nan"


def test_a_first_answer_that_is_wrong_has_every_member_read_its_files_first(fresh: MakeReplay) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(NAN)
    assert replay.all(DoubtWeights) == [DoubtWeights(FAILED)], "which tells the other members"
    replay.feed(WeightsRead(Task.VERIFY))
    replay.pass_to(replay.clock + 4)
    assert replay.all(ReportDead) == [], "rank 1 still reads"
    replay.tell(1, weights_verified=True)
    replay.pass_to(replay.clock + 4)
    assert replay.failure == (Cause.ENGINE_WRONG, 0, FAILED)
    assert replay.phases[-1] is Phase.FAILED, "the same files would do the same"


def test_a_wrong_answer_with_already_verified_files_is_a_fault_of_the_engine(
    fresh: MakeReplay,
) -> None:
    replay = fresh()
    replay.verified = True
    warm(replay, restarted=False)
    replay.tell(1, weights_verified=True)
    replay.feed(NAN)
    replay.pass_to(replay.clock + 4)
    assert StartTask(Task.VERIFY) not in replay.all(StartTask)
    assert replay.failure[0] is Cause.ENGINE_WRONG


def test_a_wrong_file_is_the_cause_of_a_wrong_answer(fresh: MakeReplay) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(NAN)
    replay.feed(TaskFailed(Task.VERIFY, Cause.WEIGHTS_CORRUPT, "model-1 is not what its source says", "staging"))
    assert replay.failure == (Cause.WEIGHTS_CORRUPT, 0, f"model-1 is not what its source says; {FAILED}")
    assert DoubtWeights("model-1 is not what its source says") in replay.all(DoubtWeights)
    assert replay.phases[-1] is Phase.FAILED


def test_the_wrong_file_of_another_rank_is_named(fresh: MakeReplay) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(NAN)
    replay.feed(WeightsRead(Task.VERIFY))
    told = Failure(time=0.0, cause=Cause.WEIGHTS_CORRUPT, culprit_rank=1, message="model-1", detected_by="staging")
    replay.tell(1, phase=Phase.FAILED, verdict=Verdict(health=Health.DEAD, failure=told))
    replay.pass_to(replay.clock + 4)
    assert replay.failure[:2] == (Cause.WEIGHTS_CORRUPT, 1)


@pytest.mark.parametrize("own", [None, False])
def test_without_a_comparison_of_the_files_the_cause_is_the_failed_canary(fresh: MakeReplay, own: bool | None) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(NAN)
    if own is not None:
        replay.feed(WeightsRead(Task.VERIFY, right=False))
        replay.tell(1, weights_verified=False)
    replay.pass_to(replay.clock + 20 + 4)
    assert replay.failure[0] is Cause.CANARY_FAILED
    assert replay.phases[-1] is Phase.FAILED
    kinds = [type(action) for _, action in replay.done]
    assert kinds.index(DoubtWeights) < kinds.index(SaveEvidence)
    assert [action.failure.weights_doubted for action in replay.all(RecordFailure)] == [True], "for the operator"


def test_another_death_while_the_files_are_read_is_that_death(fresh: MakeReplay) -> None:
    replay = fresh()
    warm(replay, restarted=False)
    replay.feed(NAN)
    replay.feed(CORE)
    replay.pass_to(replay.clock + 4)
    assert replay.failure[0] is Cause.ENGINE_CORE_DIED
    replay.feed(Done(Task.CLEAR))
    replay.feed(ApiAnswered())
    replay.done.clear()
    replay.feed(NAN)
    assert StartTask(Task.VERIFY) in replay.all(StartTask), "the next engine is asked the same"


def test_an_answer_is_kept_once_every_members_files_are_known_to_be_right(fresh: MakeReplay) -> None:
    replay = fresh()
    warm(replay, restarted=False)
    replay.feed(FirstCompletion(unknown=ANSWER))
    assert replay.all(KeepAnswer) == []
    replay.feed(WeightsRead(Task.SCRUB))
    assert replay.all(KeepAnswer) == []
    replay.tell(1, weights_verified=True)
    replay.tell(1)
    assert replay.all(KeepAnswer) == [KeepAnswer(ANSWER)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_verification_begun_under_an_earlier_engine_does_not_count(serving: MakeReplay, rank: int) -> None:
    replay = serving(rank)
    replay.feed(WeightsRead(Task.SCRUB)) if rank == 0 else replay.head_says(1, Phase.SERVING)
    if rank == 0:
        replay.restart()
    else:
        replay.feed(WeightsRead(Task.SCRUB))
        assert replay.state.verified
        replay.head_says(2, Phase.LOADING)
    assert replay.all(ReportVerified)[-1] == ReportVerified(None)
    replay.feed(WeightsRead(Task.SCRUB))
    assert replay.state.verified is None


def test_a_file_that_the_loader_cannot_read_makes_the_weights_doubted(serving: MakeReplay) -> None:
    replay = serving()
    replay.restart()
    replay.done.clear()
    replay.feed(FirstError("SafetensorError: Error while deserializing header", Cause.WEIGHTS_CORRUPT))
    replay.feed(CORE)
    replay.pass_to(replay.clock + 4)
    assert len(replay.all(DoubtWeights)) == 1
    assert replay.phases[-1] is Phase.FAILED


@pytest.mark.parametrize("event", [FirstCompletion("TimeoutError"), CORE, ApiEnded(-9)])
def test_other_deaths_before_the_first_completion_do_not(fresh: MakeReplay, event: AgentEvent) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(event)
    replay.pass_to(replay.clock + 4)
    assert replay.all(DoubtWeights) == []
    assert StartTask(Task.CLEAR) in replay.all(StartTask)


def test_failures_of_an_engine_that_served_do_not_make_the_weights_doubted(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(Judged(Judgement(Health.DEAD, Cause.CANARY_FAILED, None, "completion", "it is nan", 0.0)))
    replay.pass_to(replay.clock + 4)
    assert [action.failure.weights_doubted for action in replay.all(RecordFailure)] == [None]
    assert replay.all(DoubtWeights) == []
    assert StartTask(Task.CLEAR) in replay.all(StartTask)


def test_a_member_verifies_its_weights_if_the_head_doubts_them(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.WARMING)
    assert replay.all(DoubtWeights) == []
    for phase in (Phase.WARMING, Phase.FAILED):
        replay.tell(0, engine=EngineStatus(generation=1, weights_doubted="it is nan"), phase=phase)
    assert replay.all(DoubtWeights) == [DoubtWeights("it is nan")]
    assert replay.all(StartTask).count(StartTask(Task.VERIFY)) == 1
    replay.tell(0, engine=EngineStatus(generation=2), phase=Phase.WARMING)
    replay.tell(0, engine=EngineStatus(generation=2, weights_doubted="it is nan"), phase=Phase.WARMING)
    assert replay.all(StartTask).count(StartTask(Task.VERIFY)) == 2
