from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent import engine
from dsv4_runtime.contract import EnginePlan, GroupPlan, WeightsPlan, WeightsSource
from dsv4_runtime.engine import completion
from dsv4_runtime.engine.completion import (
    BadCompletion,
    KnownAnswer,
    check,
    check_answer,
    difference,
    known_answer,
    known_request,
)

CHOICE = {"text": "a", "logprobs": {"token_logprobs": [-1.5]}}
GOOD = {"choices": [CHOICE], "usage": {"completion_tokens": 1}}


def test_one_token_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {**GOOD, "choices": []},
        {**GOOD, "choices": [CHOICE, CHOICE]},
        {**GOOD, "choices": [{**CHOICE, "text": None}]},
        {**GOOD, "choices": [{"text": "a"}]},
        {**GOOD, "choices": [{**CHOICE, "logprobs": {"token_logprobs": []}}]},
        {**GOOD, "choices": [{**CHOICE, "logprobs": {"token_logprobs": [None]}}]},
        {**GOOD, "choices": [{**CHOICE, "logprobs": {"token_logprobs": [float("nan")]}}]},
        {**GOOD, "choices": [{**CHOICE, "logprobs": {"token_logprobs": [-9999.0]}}]},
        {**GOOD, "choices": [{**CHOICE, "logprobs": {"token_logprobs": [0.5]}}]},
        {**GOOD, "choices": ["a"]},
        {**GOOD, "usage": {"completion_tokens": 0}},
        {"choices": [CHOICE]},
    ],
)
def test_anything_else_does_not(body: object) -> None:
    with pytest.raises(BadCompletion):
        check(body)


def test_an_answer_over_http() -> None:
    check_answer(200, json.dumps(GOOD).encode())
    for status, body in ((500, json.dumps(GOOD).encode()), (200, b""), (200, b"{}"), (200, b"\xff")):
        with pytest.raises(BadCompletion):
            check_answer(status, body)


def told(**changes: object) -> bytes:
    """vLLM's response to the known request."""
    tokens = known_request("nano")["max_tokens"]
    assert isinstance(tokens, int)
    logprobs = {
        "tokens": [f"token_id:{number}" for number in range(tokens)],
        "token_logprobs": [-1.0] * tokens,
        "top_logprobs": [{"token_id:1": -1.0, "token_id:2": -1.75}] * tokens,
    }
    choice = {"text": "a", "logprobs": logprobs | changes}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


def test_the_known_question_has_an_answer_of_tokens_with_their_margins() -> None:
    answer = known_answer(200, told())
    assert answer.tokens[1] == "token_id:1"
    assert (answer.logprobs[0], answer.margins[0]) == (-1.0, 0.75)


@pytest.mark.parametrize(
    "changes",
    [
        *({"tokens": ["token_id:1"]}, {"tokens": None}, {"top_logprobs": None}, {"top_logprobs": [None] * 8}),
        *({"top_logprobs": [{"token_id:1": -1.0}] * count} for count in (0, 7, 9)),
    ],
)
def test_half_an_answer_is_none(changes: dict[str, object]) -> None:
    with pytest.raises(BadCompletion):
        known_answer(200, told(**changes))


KNOWN = KnownAnswer(("a", "b", "c"), (-1.0, -2.0, -3.0), (1.0, 0.09, 1.0))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "same"),
    [
        ("abc", (-1.0, -2.0, -3.0), True),
        ("abc", (-1.0, -2.0, -3.0 + 0.045), True),
        ("abc", (-1.0, -2.0, -3.0 + 0.055), False),
        ("abc", (-1.0 - 0.055, -2.0, -3.0), False),
        ("xbc", (-1.0, -2.0, -3.0), False),
        ("abx", (-1.0, -2.0, -3.0), False),
        # The second token was as likely as an alternative. Tokens after a difference are not compared.
        ("axx", (-1.0, -2.0, -9.0), True),
    ],
)
def test_an_answer_is_the_same_but_for_rounding(tokens: str, logprobs: tuple[float, ...], same: bool) -> None:
    found = difference(KNOWN, KnownAnswer(tuple(tokens), logprobs, KNOWN.margins), 0.05)
    assert (found is None) is same, found


@pytest.mark.parametrize(("margin", "same"), [(1.09, True), (0.91, True), (1.11, False), (0.89, False)])
def test_a_certain_token_shows_a_change_by_its_distance_from_the_next(margin: float, same: bool) -> None:
    found = difference(KNOWN, KnownAnswer(KNOWN.tokens, KNOWN.logprobs, (margin, 0.09, 1.0)), 0.05)
    assert (found is None) is same, found


def test_answers_are_stored_per_configuration(make_plan: Callable[..., GroupPlan], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    plan = make_plan()
    key = engine.answer_key(plan)
    assert engine.stored_answer(folder, key) is None
    assert engine.store_answer(folder, key, KNOWN)
    assert engine.stored_answer(folder, key) == KNOWN
    same = {"incarnation": 7, "env": {"RAY_AUTH_TOKEN_PATH": "/elsewhere"}}
    assert engine.answer_key(make_plan(**same)) == key
    others: list[dict[str, object]] = [
        {"env": {"VLLM_USE_DEEP_GEMM": "1"}},
        {"engine": EnginePlan(args=("--enforce-eager",), served_name="nano")},
        {"engine": EnginePlan(args=(), served_name="nano", image="other")},
        {"weights": WeightsPlan(source=WeightsSource.NANO, path="/nowhere", seed=1)},
    ]
    assert len({key, *(engine.answer_key(make_plan(**change)) for change in others)}) == 5
    for damaged in ("{", "[]", f'{{"{key}": {{"tokens": ["a", "b"], "logprobs": [-1, -2], "margins": [1]}}}}'):
        engine.answer_file(folder).write_text(damaged)
        assert engine.stored_answer(folder, key) is None
    assert engine.store_answer(folder, key, KNOWN)


def test_an_answer_to_another_question_is_not_compared(
    make_plan: Callable[..., GroupPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = engine.answer_key(make_plan())
    monkeypatch.setattr(completion, "_ANSWER_TOKENS", 9)
    assert engine.answer_key(make_plan()) != key


def test_only_the_newest_answers_are_kept_and_a_full_disk_keeps_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for number in range(40):
        engine.store_answer(folder, str(number), KNOWN)
    assert [engine.stored_answer(folder, key) is not None for key in ("0", "7", "8", "39")] == [
        False,
        False,
        True,
        True,
    ]
    assert not engine.store_answer(tmp_path / "gone" / "checkpoint", "a", KNOWN)
