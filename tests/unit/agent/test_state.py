from __future__ import annotations

from typing import Any

import pytest

from dsv4_runtime.agent import record
from dsv4_runtime.agent.record import MemberRecord
from dsv4_runtime.contract import Cause, Failure, Health, KernelStatus, Phase, Progress, WeightsProgress


def failure(time: float, generation: int) -> Failure:
    return Failure(
        time=time, cause=Cause.ENGINE_CORE_DIED, message="it ended", detected_by="process", generation=generation
    )


def test_one_completion_ends_every_failure_before_it(make_plan: Any) -> None:
    state = MemberRecord(make_plan(), 0)
    state.begin_generation()
    state.record_failure(failure(100.0, 1))
    state.begin_generation()
    state.record_failure(failure(150.0, 2))
    assert state.status().verdict.health is Health.DEAD
    state.begin_generation()
    assert state.status().verdict.health is Health.STARTING
    state.enter(Phase.SERVING)
    state.served()
    status = state.status()
    assert status.verdict.health is Health.HEALTHY
    assert status.engine is not None
    first, second = status.engine.failures
    assert first.recover_seconds is not None
    assert second.recover_seconds is not None
    assert round(first.recover_seconds - second.recover_seconds) == 50
    state.record_failure(failure(200.0, 3))
    state.served()
    assert state.failures[0].recover_seconds == first.recover_seconds


def test_the_status_has_the_model_digest_of_the_plan(make_plan: Any) -> None:
    plan = make_plan()
    assert MemberRecord(plan, 0).status().model_digest == plan.model_digest


def test_the_logged_kv_cache_is_compared_with_the_plan(make_plan: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan()
    told = plan.expectations.model_copy(update={"kv_tokens": 14_000, "kv_concurrency": 13.67})
    state = MemberRecord(plan.model_copy(update={"expectations": told}), 0)
    state.cached(13_809, 13.49)
    state.cached(9_000, 8.79)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "KV cache: 9000 tokens, planned 14000 (-35.7 %)"),
        ("WARNING", "KV cache: 8.79 requests at once, planned 13.67"),
    ]
    engine = state.status().engine
    assert engine is not None
    assert (engine.kv_cache_tokens, engine.kv_concurrency, engine.kv_planned_tokens) == (9_000, 8.79, 14_000)


def test_logged_memory_beyond_the_plan_is_reported(make_plan: Any) -> None:
    plan = make_plan()
    told = plan.expectations.model_copy(update={"memory_of": "m", "memory": {"weights": 100, "KV cache": 50}})
    state = MemberRecord(plan.model_copy(update={"expectations": told}), 0)
    state.begin_generation()
    state.add_memory({"weights": 103, "kv": 45})
    state.add_memory({"weights": 104, "kv": 44})
    engine = state.status().engine
    assert engine is not None
    assert engine.memory == {}, "not before the engine has its cache"
    state.cached(9_000, 8.79)
    engine = state.status().engine
    assert engine is not None
    assert (engine.memory_of, engine.memory) == ("m", {"weights": 3, "non-torch memory": 3})
    state.begin_generation()
    assert state.memory == {}


def test_the_logged_weights_are_compared_with_the_plan(make_plan: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan()
    told = plan.expectations.model_copy(update={"weights_bytes": 80 * 2**30})
    state = MemberRecord(plan.model_copy(update={"expectations": told}), 0)
    caplog.set_level("INFO")
    state.loaded(79 * 2**30)
    state.loaded(84 * 2**30)
    MemberRecord(plan, 0).loaded(1)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "weights: 79.00 GiB, planned 80.00 (-1.2 %)"),
        ("WARNING", "weights: 84.00 GiB, planned 80.00 (+5.0 %)"),
    ]


def steps(state: MemberRecord) -> list[tuple[str, str, float]]:
    return [(step.phase, step.step, step.seconds) for step in state.status().start]


def test_a_start_is_divided_into_steps(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(record, "unix_time", lambda: now[0])
    state = MemberRecord(make_plan(), 0)

    def after(seconds: float, stage: str, weights: WeightsProgress | None = None) -> None:
        now[0] += seconds
        state.advance(Progress(stage=stage, weights=weights))

    after(1.0, "checking 3 of 4 addresses")
    now[0] += 1.0
    state.enter(Phase.LOADING, "starting vLLM")
    after(2.0, "loading the model")
    after(0.5, "loading shards 1/2", WeightsProgress(shards=1, shards_total=2))
    after(1.0, "loading 1.0/2.0 GB at 1.00 GB/s", WeightsProgress(bytes_done=1, bytes_total=2))
    # The second rank's line.
    after(1.0, "loading the model")
    after(0.25, "prefetching files 1/4")
    after(0.25, "prefetching files 4/4")
    now[0] += 0.25
    state.enter(Phase.WARMING)
    now[0] += 4.0
    state.enter(Phase.SERVING)
    started = [
        ("Preflight", "", 2.0),
        ("Loading", "starting vLLM", 2.0),
        ("Loading", "loading the model", 0.75),
        ("Loading", "loading weights", 2.0),
        ("Loading", "prefetching files", 0.5),
        ("Warming", "", 4.0),
    ]
    assert steps(state) == started
    # Serving is no step, and the next start begins with none.
    now[0] += 3600.0
    state.finish("waiting for open requests")
    assert steps(state) == started
    state.enter(Phase.RESTARTING)
    now[0] += 1.0
    state.enter(Phase.LOADING)
    assert steps(state) == [("Restarting", "", 1.0)]


def test_only_the_head_reports_the_engine(make_plan: Any) -> None:
    assert MemberRecord(make_plan(), 0).status().engine is not None
    assert MemberRecord(make_plan(), 1).status().engine is None


def chosen(op: str, provider: str) -> KernelStatus:
    return KernelStatus(op=op, provider=provider)


def told(state: MemberRecord) -> dict[str, tuple[str, str | None]]:
    engine = state.status().engine
    assert engine is not None
    return {found.op: (found.provider, found.note) for found in engine.kernels}


def test_the_lowest_rank_determines_the_provider_and_a_different_choice_is_a_warning(
    make_plan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = MemberRecord(make_plan(), 0)
    state.begin_generation()
    for rank, provider in ((2, "bundled"), (0, "bundled"), (1, "stock")):
        state.kernels.chosen(rank, chosen("moe", provider))
    assert told(state) == {"moe": ("bundled", "rank 1: stock")}
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "rank 1 computes moe by stock, rank 0 by bundled" in warning.getMessage()
    state.begin_generation()
    assert told(state) == {}


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_hook_that_does_not_fit_leaves_the_operation_to_vllm(make_plan: Any, refused_first: bool) -> None:
    state = MemberRecord(make_plan(), 0)
    if refused_first:
        state.kernels.not_attached(("indexer", "moe"), "stays")
    state.kernels.chosen(0, chosen("indexer", "bundled"))
    state.kernels.chosen(0, chosen("moe", "stock"))
    if not refused_first:
        state.kernels.not_attached(("indexer", "moe"), "stays")
    assert told(state) == {"indexer": ("stock", "bundled was chosen; stays"), "moe": ("stock", None)}
