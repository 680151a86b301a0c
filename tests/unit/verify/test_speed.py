"""Cases, prompts, figures and comparisons of `dsv4 bench`, as pure functions."""

from __future__ import annotations

import json
import math
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.verify import speed
from dsv4_operator.verify.speed import Case, PromptClass, Repetition, Verdict, judge, ratio_interval

KINDS = st.sampled_from(PromptClass)


def case(**fields: object) -> Case:
    values = {
        "profile": "chat",
        "prompts": PromptClass.PROSE,
        "input_tokens": 256,
        "output_tokens": 32,
        "shared_tokens": 64,
        "concurrency": 2,
        "requests": 8,
    }
    return Case(**{**values, **fields})  # type: ignore[arg-type]


def repetition(rate: float = 100.0, time: float = 0.5, **fields: float) -> Repetition:
    figures = dict.fromkeys(speed.RATES, rate) | dict.fromkeys(speed.TIMES, time)
    return Repetition({**figures, **fields}, 8, 0, 255.5, 32.0)


def result(**fields: object) -> str:
    times = {
        f"{percentile}_{name}_ms": 20.0 for percentile in ("p50", "p95") for name in ("ttft", "tpot", "itl", "e2el")
    }
    found = {
        "completed": 8,
        "failed": 0,
        "duration": 2.0,
        "request_throughput": 4.0,
        "output_throughput": 128.0,
        "total_input_tokens": 2048,
        "total_output_tokens": 256,
        **times,
    }
    return json.dumps({**found, **fields})


@given(
    st.lists(st.sampled_from(speed.PROFILES), min_size=1),
    st.lists(st.integers(1, 64)),
    st.lists(st.integers(1, 100_000)),
    st.booleans(),
)
def test_cases_are_distinct_and_complete(
    profiles: list[speed.Profile], concurrency: list[int], contexts: list[int], quick: bool
) -> None:
    found = speed.cases(profiles, concurrency, contexts, quick=quick)
    assert len({each.key for each in found}) == len(found)
    assert {each.profile for each in found} == {each.name for each in profiles}
    assert all(each.requests >= 2 * each.concurrency for each in found)
    assert all(0 <= each.shared_tokens <= each.input_tokens for each in found)
    if concurrency:
        assert {each.concurrency for each in found} == set(concurrency)
    if contexts:
        assert {each.input_tokens for each in found} == set(contexts)


@given(st.integers(1, 100_000), st.integers(1, 4096), st.integers(0, 200_000))
def test_rows_that_fit_have_room_for_the_longest_prompt(tokens: int, output: int, context: int) -> None:
    found = case(input_tokens=tokens, output_tokens=output).fits(context)
    assert found == (context == 0 or tokens * 1.03 + output <= context)


@given(KINDS, st.integers(16, 3000), st.floats(0, 0.9), st.floats(1, 6), st.integers(1, 6))
def test_prompts_have_their_length_and_share_only_the_common_part(
    kind: PromptClass, tokens: int, share: float, density: float, count: int
) -> None:
    wanted = case(prompts=kind, input_tokens=tokens, shared_tokens=round(tokens * share))
    texts = speed.prompts(wanted, count, density, seed="1", nonce="abcd")
    assert texts == speed.prompts(wanted, count, density, seed="1", nonce="abcd")
    assert {len(text) for text in texts} == {round(tokens * density)}
    assert all(text.startswith("abcd") for text in texts)
    common = round(wanted.shared_tokens * density)
    assert len({text[: len("abcd ") + common] for text in texts if common and common + 5 < len(text)}) <= 1
    if tokens * (1 - share) * density > 400:
        assert len(set(texts)) == count
    if not common:
        assert len({text[:6] for text in texts}) == count


@given(KINDS, st.text("abcdef0123456789", min_size=8, max_size=8), st.text("abcdef0123456789", min_size=8, max_size=8))
def test_another_nonce_changes_the_start_and_keeps_the_content(kind: PromptClass, one: str, other: str) -> None:
    wanted = case(prompts=kind)
    texts = [speed.prompts(wanted, 3, 4.0, seed="1", nonce=nonce) for nonce in (one, other)]
    assert [text.replace(one, other, 1) for text in texts[0]] == texts[1]


@given(st.lists(st.text(min_size=4, max_size=5000), min_size=1, max_size=4))
def test_no_prompt_is_dropped_by_the_filter_of_the_generator(texts: list[str]) -> None:
    found = speed.files(texts)
    assert [each["conversations"][0]["value"] for each in json.loads(found[speed.DATA_FILE])] == texts
    tokenizer = json.loads(found["tokenizer/tokenizer.json"])
    pieces = [len(re.findall(tokenizer["pre_tokenizer"]["pattern"]["Regex"], text)) for text in texts]
    assert max(pieces) <= 201
    longest = max(map(len, texts))
    # The prompts of a repetition have equal lengths; a prompt of less than four pieces would be dropped.
    assert all(count >= 4 for count, text in zip(pieces, texts, strict=True) if len(text) == longest)


def test_the_command_line_has_no_key_and_no_prompt() -> None:
    found = speed.arguments(case(), url="http://127.0.0.1:8000/v1", model="m", folder="/tmp/x", seed=3)
    assert "--base-url=http://127.0.0.1:8000" in found
    assert "--max-concurrency=2" in found
    assert "--num-prompts=8" in found
    assert not [each for each in found if "key" in each or "header" in each]


def test_figures_of_a_result() -> None:
    found = speed.read(result(failed=1, spec_decode_acceptance_rate=75.0, spec_decode_acceptance_length=2.5))
    assert (found.completed, found.failed, found.input_tokens, found.output_tokens) == (8, 1, 256.0, 32.0)
    assert found.figures["ttftSeconds.p50"] == 0.02
    assert found.figures["inputTokensPerSecond"] == 1024.0
    assert found.figures["prefillTokensPerSecond"] == pytest.approx(256 / 0.02)
    assert found.figures["decodeTokensPerSecond"] == pytest.approx(50.0)
    assert (found.figures["acceptanceRate"], found.figures["acceptanceLength"]) == (0.75, 2.5)


def test_a_figure_without_values_is_missing() -> None:
    found = speed.read(result(p50_tpot_ms=0.0, p95_tpot_ms=0.0))
    assert not {"tpotSeconds.p50", "decodeTokensPerSecond", "acceptanceRate"} & set(found.figures)
    wanted = speed.row(case(), 0, [found])
    assert wanted.tpot_seconds.p50 is None
    assert wanted.decode_tokens_per_second is None
    assert wanted.spread == {}


METRICS = """\
# TYPE dsv4_gateway_engine_state gauge
dsv4_gateway_engine_state{gateway="1",group="0",state="healthy"} 1.0
dsv4_gateway_engine_state{gateway="1",group="0",state="away"} 0.0
dsv4_gateway_engine_state{gateway="1",group="12",state="healthy"} 1.0
dsv4_gateway_group_watts{gateway="1",group="0"} 120.5
dsv4_gateway_group_watts{gateway="1",group="12"} 80.0
"""


def test_power_is_that_of_all_groups_or_not_known() -> None:
    assert speed.power(METRICS) == (200.5, "")
    # Without the label of several gateways at one address.
    assert speed.power(METRICS.replace('gateway="1",', "")) == (200.5, "")
    part = METRICS.replace('dsv4_gateway_group_watts{gateway="1",group="12"} 80.0\n', "")
    assert speed.power(part) == (None, "not every GPU of group 12 reports its power")
    for other in ("", "<html>", 'vllm:num_requests_running{engine="0"} 1.0\n', METRICS.replace("dsv4_", "x_")):
        watts, missing = speed.power(other)
        assert watts is None
        assert "no gateway of dsv4" in missing
    assert speed.power(METRICS.replace("80.0", "NaN"))[0] is None


def test_energy_is_that_of_the_measured_time() -> None:
    """The start of the generator before it, and the idle time after it, do not count."""
    found = speed.read(result(duration=10.0))
    idle = [(float(time), 20.0) for time in (*range(30), *range(41, 50))]
    loaded = [(30 + time + 0.5, 100.0 + 10 * time) for time in range(10)]
    energy = speed.with_energy(found, sorted(idle + loaded), 40.0)
    # From 100 to 190 W in equal steps: 145 W for 10 s, 256 tokens.
    assert energy.figures["gpuWatts"] == pytest.approx(145.0, rel=0.07)
    assert energy.figures["joulesPerOutputToken"] == pytest.approx(energy.figures["gpuWatts"] * 10 / 256)
    assert energy.energy_missing == ""
    row = speed.row(case(), 0, [energy, found])
    assert row.gpu_watts == energy.figures["gpuWatts"]
    assert row.energy_missing == ""
    assert row.samples["gpuWatts"] == [row.gpu_watts]


@pytest.mark.parametrize(
    ("times", "missing", "reason"),
    [
        ([], "no driver", "no driver"),
        ([1.0, 2.0, 3.0, 4.0], "", "the power has 4 samples within 10.0 s; 5 are needed"),
        # No values for a long time, at the beginning, in the middle or at the end.
        ([6.0, 7.0, 8.0, 9.0, 9.5], "it did not answer", "it did not answer"),
        ([0.5, 1.0, 2.0, 7.5, 8.0, 9.0], "", "the power has 6 samples"),
        ([0.5, 1.0, 2.0, 3.0, 4.0, 4.5], "", "the power has 6 samples"),
        ([-3.0, -2.0, -1.0, 11.0, 12.0, 13.0, 14.0], "", "the power has 0 samples"),
    ],
)
def test_energy_that_is_not_known_has_a_reason(times: list[float], missing: str, reason: str) -> None:
    found = speed.with_energy(speed.read(result(duration=10.0)), [(time, 50.0) for time in times], 10.0, missing)
    assert not set(speed.ENERGY) & set(found.figures)
    assert found.energy_missing.startswith(reason)
    row = speed.row(case(), 0, [found])
    assert (row.gpu_watts, row.joules_per_output_token, row.energy_missing) == (None, None, found.energy_missing)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_another_file_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match="unexpected format"):
        speed.read(text)
    with pytest.raises(ValueError, match=r"\S"):
        speed.parse(text)


@pytest.mark.parametrize("name", sorted(json.loads(result())))
@pytest.mark.parametrize("value", [None, "x", [], {}])
def test_a_changed_field_of_the_generator_is_found(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="unexpected format"):
        speed.read(result(**{name: value}))


def test_a_document_is_read_as_it_was_written() -> None:
    rows = [speed.row(case(), 0, [repetition(99.0), repetition(101.0, acceptanceRate=0.5)])]
    document = speed.Document(
        dsv4="1", started="2026-01-01T00:00:00+00:00", model="m", engine="", generator="g", quick=False, runs=rows
    )
    text = document.model_dump_json(by_alias=True)
    assert speed.parse(text) == document
    written = json.loads(text)["runs"][0]
    assert (written["requests"], written["failed"], written["outputTokensPerSecond"]) == (16, 0, 100.0)
    assert written["ttftSeconds"] == {"p50": 0.5, "p95": 0.5}
    assert written["samples"]["outputTokensPerSecond"] == [99.0, 101.0]
    assert written["spread"]["outputTokensPerSecond"] == pytest.approx(statistics.stdev([99, 101]) / 100)
    for value in ("[]", "[NaN]", "[-1.0]", "[1e999]", "null"):
        with pytest.raises(ValueError, match="samples"):
            speed.parse(text.replace("[99.0,101.0]", value, 1))
    with pytest.raises(ValueError, match="schema is 2"):
        speed.parse(text.replace('"schema":1', '"schema":2'))


# Tables of Student's t distribution: probability, degrees of freedom, quantile.
TABLE = [
    (0.975, 1, 12.7062),
    (0.975, 2, 4.3027),
    (0.975, 4, 2.7764),
    (0.975, 30, 2.0423),
    (0.995, 10, 3.1693),
    (0.9995, 3, 12.9240),
    (0.975, 1000, 1.9623),
]


@pytest.mark.parametrize(("probability", "freedom", "quantile"), TABLE)
def test_quantiles_of_student(probability: float, freedom: float, quantile: float) -> None:
    assert speed.student_quantile(probability, freedom) == pytest.approx(quantile, rel=2e-5)


SAMPLES = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=6)
CLOSE = st.lists(st.floats(0.9, 1.1), min_size=3, max_size=6)


@given(CLOSE, CLOSE, st.floats(0.1, 10))
def test_intervals_contain_the_ratio_and_scale(old: list[float], new: list[float], factor: float) -> None:
    low, high = ratio_interval(old, new, 0.95) or (0.0, 0.0)
    ratio = statistics.geometric_mean(new) / statistics.geometric_mean(old)
    assert low <= ratio * (1 + 1e-9)
    assert high >= ratio * (1 - 1e-9)
    scaled = ratio_interval(old, [value * factor for value in new], 0.95)
    assert scaled == pytest.approx((low * factor, high * factor), rel=1e-6)
    swapped = ratio_interval(new, old, 0.95)
    assert swapped == pytest.approx((1 / high, 1 / low), rel=1e-6)


@given(SAMPLES, SAMPLES, st.integers(1, 50))
def test_rates_and_times_are_judged_alike(old: list[float], new: list[float], comparisons: int) -> None:
    rates = judge(old, new, 0.05, slower_is_more=False, comparisons=comparisons)
    times = judge([1 / x for x in old], [1 / x for x in new], 0.05, slower_is_more=True, comparisons=comparisons)
    assert rates == times
    assert judge(old, old, 0.05, slower_is_more=False) is Verdict.SAME
    ends = ratio_interval(old, new, 0.999) or (math.nan, math.nan)
    assert all(map(math.isfinite, ends))


def drawn(source: random.Random, count: int, mean: float, spread: float) -> list[float]:
    return [source.gauss(mean, mean * spread) for _ in range(count)]


# The table in docs/bench.md: repetitions, spread, comparisons, share of detected slowdowns of 5 % among 400.
POWER = [(3, 0.01, 1, 0.95), (3, 0.005, 6, 0.95), (5, 0.01, 18, 0.95), (8, 0.015, 18, 0.95), (8, 0.02, 6, 0.95)]


@pytest.mark.parametrize(("count", "spread", "comparisons", "wanted"), POWER)
def test_a_slowdown_of_five_percent_is_found(count: int, spread: float, comparisons: int, wanted: float) -> None:
    source = random.Random(7)
    found = [
        judge(
            drawn(source, count, 100, spread),
            drawn(source, count, 95, spread),
            0.05,
            slower_is_more=False,
            comparisons=comparisons,
        )
        for _ in range(400)
    ]
    assert found.count(Verdict.SLOWER) >= wanted * 400


def equal_row(source: random.Random, clients: int, count: int, spread: float) -> speed.Row:
    figures = [{name: drawn(source, 1, 100, spread)[0] for name in speed.JUDGED} for _ in range(count)]
    return speed.row(case(concurrency=clients), 0, [Repetition(each, 8, 0, 255.5, 32.0) for each in figures])


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_equal_runs_rarely_fail(count: int, spread: float) -> None:
    """At most 5 % of comparisons of whole runs fail, over all their figures together."""
    source, failures, runs = random.Random(11), 0, 200
    for _ in range(runs):
        rows = [[equal_row(source, clients, count, spread) for clients in (1, 2, 4)] for _ in range(2)]
        failures += any(each.verdict is Verdict.SLOWER for each in speed.compare(*rows))
    assert failures <= 0.05 * runs


def test_a_small_certain_slowdown_is_below_the_threshold() -> None:
    old, new = [100.0, 100.1, 99.9], [98.0, 98.1, 97.9]
    assert judge(old, new, 0.05, slower_is_more=False) is Verdict.SAME
    assert judge(old, new, 0.01, slower_is_more=False) is Verdict.SLOWER
    assert judge(new, old, 0.01, slower_is_more=False) is Verdict.FASTER


def test_only_common_rows_and_judged_figures_fail() -> None:
    def rows(rate: float, p95: float, clients: int = 2) -> list[speed.Row]:
        found = [repetition(rate + part, **{"ttftSeconds.p95": p95 + part / 1000}) for part in (0.0, 0.1, 0.2)]
        return [speed.row(case(concurrency=clients), 0, found)]

    assert speed.compare(rows(100, 1), rows(100, 1, clients=4)) == []
    slower = {each.figure for each in speed.compare(rows(100, 1), rows(80, 2)) if each.verdict is Verdict.SLOWER}
    assert slower == {"outputTokensPerSecond"}
    single = [speed.row(case(), 0, [repetition()])]
    assert {each.verdict for each in speed.compare(single, single)} == {Verdict.UNKNOWN}
