"""Rules for each kind of death, and for states that must never count as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_runtime.contract import Cause, Health, HealthPolicy
from dsv4_runtime.health.rules import HEALTHY, Judgement, judge, stall_bound
from dsv4_runtime.health.samples import ProcessView, RankView, Sample
from dsv4_testkit.errors import raises_naming

POLICY = HealthPolicy()
TICK = 0.5


def rank(number: int, now: float, *, share: float = 0.0, state: str = "S", **changes: Any) -> RankView:
    """Return a member whose worker (and EngineCore and API on rank 0) sleeps by default."""
    roles = {"api": 0.0, "engine-core": 0.0, "worker": share} if number == 0 else {"worker": share}
    stopped = changes.pop("stopped", ())
    processes = tuple(
        ProcessView(role, "T" if role in stopped else state if role == "worker" else "S", used)
        for role, used in roles.items()
    )
    return RankView(**{"rank": number, "heard": now, "processes": processes, **changes})


@dataclass
class Series:
    """A group of two with a sample every half second; `run` appends samples and judges each."""

    now: float = 1000.0
    samples: list[Sample] = field(default_factory=list)
    answered: float = 1000.0
    stepped: float = 1000.0
    canary_sent: float | None = None
    pace: float | None = None

    def run(
        self,
        seconds: float,
        *,
        steps: bool = False,
        answers: bool = True,
        canary: bool = False,
        ranks: Callable[[float], Sequence[RankView]] | None = None,
        **changes: Any,
    ) -> Judgement:
        """Append samples for `seconds` or until the first `Dead`; return the last judgement."""
        end, verdict = self.now + seconds, None
        self.canary_sent = self.now if canary and self.canary_sent is None else self.canary_sent if canary else None
        while self.now < end - 1e-9:
            self.now += TICK
            self.answered = self.now if answers else self.answered
            self.stepped = self.now if steps else self.stepped
            views = tuple(ranks(self.now)) if ranks else (rank(0, self.now), rank(1, self.now))
            sample = Sample(
                time=self.now,
                answered=self.answered,
                stepped=self.stepped,
                canary_sent=self.canary_sent,
                pace=self.pace,
                ranks=views,
            )
            self.samples.append(replace(sample, **changes))
            verdict = judge(self.samples, POLICY, self.now)
            if verdict.health == "Dead":
                break
        assert verdict is not None
        return verdict


@pytest.fixture
def series() -> Series:
    return Series()


BUSY = {"share": 0.8, "state": "R"}


def both(**fields: Any) -> Any:
    """Return both members with these fields."""
    return lambda now: (rank(0, now, **fields), rank(1, now, **fields))


def test_without_samples_the_verdict_is_healthy() -> None:
    assert judge([], POLICY, 0.0) is HEALTHY


def test_an_idle_engine_is_healthy(series: Series) -> None:
    assert series.run(120.0).health is Health.HEALTHY


def test_a_stall_without_life_is_suspect_and_then_dead(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=2, ranks=both(**BUSY))
    began = series.now
    assert series.run(1.0, outstanding=2).health is Health.HEALTHY
    assert series.run(0.5, outstanding=2, canary=True).health is Health.SUSPECT
    dead = series.run(30.0, outstanding=2, canary=True)
    assert (dead.health, dead.cause, dead.rule) == (Health.DEAD, Cause.ENGINE_HUNG, "steps")
    assert series.now - began <= POLICY.stall_min + TICK


def test_a_recently_sent_canary_proves_no_death(series: Series) -> None:
    """The engine owes a step for long enough, but the canary may still complete."""
    series.run(10.0, steps=True, outstanding=2, ranks=both(**BUSY))
    series.run(POLICY.stall_min + 1.0, outstanding=2)
    asked = series.now
    verdict = series.run(POLICY.canary_patience - TICK, outstanding=2, canary=True)
    assert verdict.health is Health.SUSPECT
    verdict = series.run(10.0, outstanding=2, canary=True)
    assert verdict.health is Health.DEAD
    assert POLICY.canary_patience <= series.now - asked <= POLICY.canary_patience + 2 * TICK


def test_a_stall_of_an_idle_engine_is_detected_by_the_canary_alone(series: Series) -> None:
    series.run(100.0)
    began = series.now
    dead = series.run(30.0, canary=True)
    assert (dead.health, dead.cause) == (Health.DEAD, Cause.ENGINE_HUNG)
    assert series.now - began <= POLICY.stall_min + TICK


def test_aborted_requests_do_not_cause_a_stall(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    assert series.run(120.0, outstanding=1).health is Health.HEALTHY, "vLLM's number stands still when nobody steps"


def test_a_stall_with_life_may_take_a_compilations_time(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    one_works = lambda now: (rank(0, now), rank(1, now, **BUSY))  # noqa: E731
    assert series.run(70.0, outstanding=1, canary=True, ranks=one_works).health is Health.HEALTHY
    assert series.run(10.0, outstanding=1, steps=True).health is Health.HEALTHY


def test_a_runnable_rank_without_processor_time_is_alive(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    starved = lambda now: (rank(0, now), rank(1, now, state="R"))  # noqa: E731
    assert series.run(60.0, outstanding=1, canary=True, ranks=starved).health is Health.HEALTHY


def test_a_stall_with_life_is_dead_after_its_bound(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    dead = series.run(200.0, outstanding=1, canary=True, ranks=both(**BUSY))
    assert (dead.health, dead.cause) == (Health.DEAD, Cause.ENGINE_HUNG)


def test_where_there_is_a_gpu_its_power_is_life_and_a_spinning_host_is_none(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    computing = both(gpu_busy=True)
    assert series.run(60.0, outstanding=1, canary=True, ranks=computing).health is Health.HEALTHY
    assert series.run(60.0, outstanding=1, canary=True, ranks=both(gpu_busy=False, **BUSY)).health is Health.DEAD


@given(compiles=st.integers(0, 1), role=st.sampled_from(["engine-core", "executor", "worker", "api"]))
def test_compilers_are_life_while_a_gpu_only_waits(compiles: int, role: str) -> None:
    """The other rank waits for it in a kernel, and its own GPU may have kernels that wait too."""
    series = Series()
    series.run(10.0, steps=True, outstanding=1)
    compiler = ProcessView(role, "S", 0.9, below=0.9)

    def members(now: float) -> list[RankView]:
        waiting = [rank(number, now, gpu_busy=False, **BUSY) for number in (0, 1)]
        waiting[compiles] = replace(waiting[compiles], processes=(*waiting[compiles].processes, compiler))
        return waiting

    verdict = series.run(70.0, outstanding=1, canary=True, ranks=members)
    assert verdict.health is (Health.DEAD if role == "api" else Health.HEALTHY)
    began = series.now
    assert series.run(60.0, outstanding=1, canary=True, ranks=both(gpu_busy=False, **BUSY)).health is Health.DEAD
    assert series.now - began <= POLICY.stall_min + 2 * TICK


@pytest.mark.parametrize(
    ("number", "role", "cause"),
    [(0, "engine-core", Cause.ENGINE_HUNG), (1, "worker", Cause.ENGINE_HUNG), (0, "api", Cause.API_SERVER_HUNG)],
)
def test_a_stopped_process_names_the_culprit(series: Series, number: int, role: str, cause: Cause) -> None:
    series.run(10.0)
    stopped = lambda now: tuple(rank(i, now, stopped=(role,) if i == number else ()) for i in (0, 1))  # noqa: E731
    assert series.run(1.0, ranks=stopped).health is Health.SUSPECT
    began = series.now - 1.0
    dead = series.run(10.0, ranks=stopped)
    assert (dead.health, dead.cause, dead.culprit_rank, dead.rule) == (Health.DEAD, cause, number, "process")
    assert series.now - began <= POLICY.stopped + 2 * TICK


def test_of_several_stopped_processes_the_first_is_the_culprit(series: Series) -> None:
    series.run(10.0)
    late = lambda now: (rank(0, now, stopped=("api",)), rank(1, now, stopped=("worker",)))  # noqa: E731
    series.run(1.5, ranks=lambda now: (rank(0, now), rank(1, now, stopped=("worker",))))
    dead = series.run(1.0, ranks=late)
    assert (dead.health, dead.cause, dead.culprit_rank) == (Health.DEAD, Cause.ENGINE_HUNG, 1)


def test_a_process_that_continues_is_healthy_again(series: Series) -> None:
    series.run(10.0)
    stopped = lambda now: (rank(0, now, stopped=("worker",)), rank(1, now))  # noqa: E731
    for _ in range(5):
        series.run(1.5, ranks=stopped)
        assert series.run(1.0).health is Health.HEALTHY


def test_the_rank_missing_from_the_collective_is_the_culprit(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    waits = lambda now: (rank(0, now, collectives=101), rank(1, now, collectives=100))  # noqa: E731
    assert series.run(30.0, outstanding=1, canary=True, ranks=waits).culprit_rank == 1
    other = Series()
    other.run(10.0, steps=True, outstanding=1)
    nobody = both(collectives=100)
    assert other.run(30.0, outstanding=1, canary=True, ranks=nobody).culprit_rank is None


def test_an_api_that_neither_answers_nor_works_is_hung(series: Series) -> None:
    series.run(10.0)
    dead = series.run(30.0, answers=False)
    assert (dead.health, dead.cause, dead.culprit_rank) == (Health.DEAD, Cause.API_SERVER_HUNG, 0)
    assert series.now - series.answered <= POLICY.api_silent + TICK


def test_a_busy_api_is_late_and_not_dead(series: Series) -> None:
    series.run(10.0)
    busy = lambda now: (RankView(0, now, processes=(ProcessView("api", "R", 0.5),)), rank(1, now))  # noqa: E731
    assert series.run(80.0, answers=False, ranks=busy).health is Health.HEALTHY


def test_eight_seconds_of_silence_are_survived_and_ten_are_not(series: Series) -> None:
    for lasting, lost in ((8.0, False), (12.0, True)):
        series.run(20.0, steps=True, outstanding=1)
        heard = series.now
        silent = lambda now, heard=heard: (rank(0, now), rank(1, heard))  # noqa: E731
        verdict = series.run(lasting, outstanding=1, canary=True, ranks=silent)
        assert (verdict.health is Health.DEAD) == lost
        assert verdict.cause is Cause.NODE_LOST, "and not that of the stall that comes of it"
    assert verdict.culprit_rank == 1
    assert POLICY.link_lost <= series.now - heard < 10.0


def test_after_a_silence_the_engine_has_time_to_recover(series: Series) -> None:
    series.run(20.0, steps=True, outstanding=1)
    heard = series.now
    series.run(8.0, outstanding=1, canary=True, ranks=lambda now: (rank(0, now), rank(1, heard)))
    assert series.run(8.0, outstanding=1, canary=True).health is Health.HEALTHY, "TCP waits as long again"
    assert series.run(10.0, outstanding=1, canary=True).health is Health.DEAD


def test_slow_links_and_slow_steps_raise_the_bound(series: Series) -> None:
    series.run(TICK, ranks=lambda now: (rank(0, now), rank(1, now, round_trip=0.3)))
    assert stall_bound(series.samples, POLICY) == pytest.approx(15.0)
    series.run(TICK, ranks=lambda now: (rank(0, now), rank(1, now, round_trip=0.001)))
    assert stall_bound(series.samples, POLICY) == POLICY.stall_min, "the fastest of the latest counts"
    series.pace = 2.0
    series.run(TICK)
    assert stall_bound(series.samples, POLICY) == 8.0
    series.pace = 100.0
    series.run(TICK)
    assert stall_bound(series.samples, POLICY) == POLICY.stall_max


def test_a_link_that_becomes_slow_under_a_step_is_no_hang(series: Series) -> None:
    quick = lambda now: (rank(0, now), rank(1, now, round_trip=0.001))  # noqa: E731
    slow = lambda now: (rank(0, now), rank(1, now, round_trip=0.3))  # noqa: E731
    series.run(20.0, steps=True, outstanding=1, ranks=quick)
    series.run(0.7, outstanding=1, canary=True, ranks=quick)  # The first slow heartbeat is under way.
    assert series.run(12.0, outstanding=1, canary=True, ranks=slow).health is not Health.DEAD
    assert series.run(6.0, outstanding=1, canary=True, ranks=slow).health is Health.DEAD, "50 round trips are enough"


def test_one_wrong_canary_is_suspect_and_two_are_dead(series: Series) -> None:
    assert series.run(5.0, canary_wrong=1, canary_said="NaN").health is Health.SUSPECT
    dead = series.run(1.0, canary_wrong=2, canary_said="NaN")
    assert (dead.health, dead.cause) == (Health.DEAD, Cause.CANARY_FAILED)
    assert "NaN" in dead.message


def test_vllm_calls_its_engine_dead(series: Series) -> None:
    assert series.run(1.0, errored=True).health is Health.SUSPECT
    assert series.run(3.0, errored=True).cause is Cause.ENGINE_CORE_DIED


def test_an_xid_is_certain_if_it_is_fatal(series: Series) -> None:
    assert series.run(5.0, ranks=both(xid=13)).health is Health.HEALTHY, "an application's own error"
    dead = series.run(5.0, ranks=lambda now: (rank(0, now), rank(1, now, xid=79)))
    assert (dead.cause, dead.culprit_rank) == (Cause.XID_ERROR, 1)


@pytest.mark.parametrize(("accepting", "seconds"), [(1.2, 4.0), (4.0, 6.0), (None, 9.0)])
def test_an_agent_is_hung_where_its_machine_takes_connections_and_else_its_node_is_lost(
    series: Series, accepting: float | None, seconds: float
) -> None:
    series.run(20.0, steps=True, outstanding=1)
    heard = series.now

    def ranks(now: float) -> tuple[RankView, ...]:
        takes = None if accepting is None or now < heard + accepting else heard + accepting
        return rank(0, now), dataclasses.replace(rank(1, heard), accepting=takes)

    assert series.run(seconds - 2 * TICK, steps=True, outstanding=1, ranks=ranks).health is not Health.DEAD
    verdict = series.run(3 * TICK, steps=True, outstanding=1, ranks=ranks)
    assert (verdict.health, verdict.culprit_rank) == (Health.DEAD, 1)
    assert verdict.cause is (Cause.NODE_LOST if accepting is None else Cause.AGENT_HUNG)


def test_the_earliest_death_wins(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    heard = series.now
    verdict = series.run(
        30.0,
        outstanding=1,
        canary=True,
        canary_wrong=0,
        ranks=lambda now: (rank(0, now, stopped=("engine-core",) if now > heard + 8.0 else ()), rank(1, heard)),
    )
    assert (verdict.cause, verdict.culprit_rank) == (Cause.NODE_LOST, 1)


def test_a_head_that_was_stopped_itself_judges_from_the_beginning(series: Series) -> None:
    series.run(10.0, steps=True, outstanding=1)
    series.canary_sent = series.now
    series.now += 60.0
    assert series.run(1.0, outstanding=1, canary=True, answers=False).health is Health.HEALTHY


def test_a_policy_that_contradicts_itself_is_refused() -> None:
    with raises_naming(ValueError, "stall_min 100.0", "stall_max 60.0", "lower it"):
        HealthPolicy(stall_min=100.0)


# Arbitrary changes in the other values must not affect the result.
_noise = st.fixed_dictionaries({"share": st.floats(0, 2), "state": st.sampled_from("SRD")})
_step = st.tuples(
    st.booleans(), st.booleans(), _noise, _noise, st.floats(0, 3), st.none() | st.floats(0, 1), st.integers(0, 9)
)


@settings(deadline=None)  # a busy machine makes the time of an example meaningless
@given(st.lists(_step, min_size=1, max_size=60))
def test_never_dead_while_steps_advance(path: list[Any]) -> None:
    series = Series()
    for canary, outstanding, one, other, silent, round_trip, collectives in path:
        verdict = series.run(
            1.0,
            steps=True,
            canary=canary,
            outstanding=int(outstanding),
            ranks=lambda now, a=one, b=other, s=silent, r=round_trip, c=collectives: (
                rank(0, now, **a, collectives=c),
                rank(1, now - s, **b, collectives=0, round_trip=r),
            ),
        )
        assert verdict.health is not Health.DEAD


@settings(deadline=None)  # a busy machine makes the time of an example meaningless
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.1, 0.5, 2.0])), min_size=1, max_size=85))
def test_never_dead_of_a_stall_with_life_below_the_bound(path: list[tuple[int, float]]) -> None:
    series = Series()
    series.run(5.0, steps=True, outstanding=1)
    for who, share in path:
        verdict = series.run(
            1.0,
            outstanding=1,
            canary=True,
            ranks=lambda now, who=who, share=share: tuple(rank(i, now, share=share if i == who else 0) for i in (0, 1)),
        )
        assert verdict.health is not Health.DEAD


@settings(deadline=None)  # a busy machine makes the time of an example meaningless
@given(st.floats(0, 30), st.booleans())
def test_a_stall_without_life_always_ends_in_time(busy: float, loaded: bool) -> None:
    series = Series()
    series.run(5.0 + busy, steps=loaded, outstanding=int(loaded))
    began = series.now
    verdict = series.run(20.0, outstanding=int(loaded), canary=True)
    assert verdict.health is Health.DEAD
    assert series.now - began <= POLICY.stall_min + 2 * TICK
