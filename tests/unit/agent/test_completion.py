from __future__ import annotations

import pytest

from dsv4_runtime.engine.completion import BadCompletion, check

GOOD = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}


def test_one_token_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {**GOOD, "choices": []},
        {**GOOD, "choices": [{"text": "a"}, {"text": "b"}]},
        {**GOOD, "choices": [{"text": None}]},
        {**GOOD, "choices": ["a"]},
        {**GOOD, "usage": {"completion_tokens": 0}},
        {"choices": [{"text": "a"}]},
    ],
)
def test_anything_else_does_not(body: object) -> None:
    with pytest.raises(BadCompletion):
        check(body)
