from __future__ import annotations

import json

import pytest

from dsv4_runtime.engine.completion import BadCompletion, check, check_answer

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
