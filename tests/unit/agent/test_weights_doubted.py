"""What casts doubt on the files of the weights, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4_runtime.agent.decide.actions import (
    DoubtWeights,
    Run,
    SaveEvidence,
)
from dsv4_runtime.agent.decide.events import (
    ApiAnswered,
    ApiEnded,
    Done,
    Event,
    FirstCompletion,
    FirstError,
    Judged,
    ProcessEnded,
    Staged,
    Started,
    Task,
    TaskFailed,
)
from dsv4_runtime.contract import (
    Cause,
    EngineStatus,
    Health,
    Phase,
)
from dsv4_runtime.health.rules import Judgement

MakeReplay = Callable[..., Any]
CORE = ProcessEnded("engine-core")


def warm(replay: Any, *, restarted: bool = True) -> None:
    """From the start to an engine that is asked for its first completion: the second one, or the first."""
    for event in (Started(), Done(Task.PREFLIGHT), Done(Task.PROVE), Staged(replay.verified), Done(Task.JOIN)):
        replay.feed(event)
    replay.join()
    replay.feed(ApiAnswered())
    if restarted:
        replay.feed(FirstCompletion())
        replay.restart()
        replay.feed(ApiAnswered())
    replay.done.clear()


def test_what_was_verified_before_an_earlier_engine_says_nothing_about_this_one(fresh: MakeReplay) -> None:
    replay = fresh()
    replay.verified = True
    warm(replay)
    replay.feed(FirstCompletion("the log probability is nan", wrong=True))
    replay.pass_to(replay.clock + 4)
    assert replay.failure[0] is Cause.CANARY_FAILED


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
    assert Run(Task.SCRUB) not in head.all(Run)
    head.feed(FirstCompletion())
    assert Run(Task.SCRUB) in head.all(Run)
    worker.serve()
    worker.head_says(1, Phase.LOADING)
    assert Run(Task.SCRUB) not in worker.all(Run)
    worker.head_says(1, Phase.SERVING)
    assert Run(Task.SCRUB) in worker.all(Run)


@pytest.mark.parametrize(("verified", "cause"), [(False, Cause.CANARY_FAILED), (True, Cause.ENGINE_WRONG)])
def test_a_first_completion_that_is_wrong_casts_doubt_on_the_weights(
    fresh: MakeReplay, verified: bool, cause: Cause
) -> None:
    replay = fresh()
    replay.verified = verified
    warm(replay, restarted=not verified)
    replay.feed(FirstCompletion("the log probability is nan", wrong=True))
    replay.pass_to(replay.clock + 4)
    assert replay.failure[0] is cause
    assert replay.all(DoubtWeights) == [DoubtWeights("the first completion failed: the log probability is nan")]
    assert replay.phases[-1] is Phase.FAILED, "the same files would do the same"
    kinds = [type(action) for _, action in replay.done]
    assert kinds.index(DoubtWeights) < kinds.index(SaveEvidence)


def test_a_loader_that_cannot_read_a_file_casts_doubt_on_the_weights(serving: MakeReplay) -> None:
    replay = serving()
    replay.restart()
    replay.done.clear()
    replay.feed(FirstError("SafetensorError: Error while deserializing header", Cause.WEIGHTS_CORRUPT))
    replay.feed(CORE)
    replay.pass_to(replay.clock + 4)
    assert len(replay.all(DoubtWeights)) == 1
    assert replay.phases[-1] is Phase.FAILED


@pytest.mark.parametrize("event", [FirstCompletion("TimeoutError"), CORE, ApiEnded(-9)])
def test_other_deaths_before_the_first_completion_do_not(fresh: MakeReplay, event: Event) -> None:
    replay = fresh()
    warm(replay)
    replay.feed(event)
    replay.pass_to(replay.clock + 4)
    assert replay.all(DoubtWeights) == []
    assert Run(Task.CLEAR) in replay.all(Run)


def test_an_engine_that_served_does_not_cast_doubt_on_the_weights(serving: MakeReplay) -> None:
    replay = serving()
    replay.feed(Judged(Judgement(Health.DEAD, Cause.CANARY_FAILED, None, "completion", "it is nan", 0.0)))
    replay.pass_to(replay.clock + 4)
    assert replay.all(DoubtWeights) == []
    assert Run(Task.CLEAR) in replay.all(Run)


def test_a_member_doubts_its_weights_once_the_head_does(serving: MakeReplay) -> None:
    replay = serving(1)
    replay.head_says(1, Phase.WARMING)
    assert replay.all(DoubtWeights) == []
    for phase in (Phase.WARMING, Phase.FAILED):
        replay.tell(0, engine=EngineStatus(generation=1, weights_doubted="it is nan"), phase=phase)
    assert replay.all(DoubtWeights) == [DoubtWeights("it is nan")]
