"""The checked completion: one token, asked for and looked at. Nothing else makes an engine `Serving`."""

from __future__ import annotations

from collections.abc import Mapping


class BadCompletion(Exception):
    """What came back was not the completion that was asked for."""


def request(model: str) -> dict[str, object]:
    """The body of `POST /v1/completions`: one greedy token."""
    return {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0.0, "stream": False}


def check(body: object) -> None:
    """Raise `BadCompletion` unless `body` is the answer to `request`: one choice, one token, a text."""
    if not isinstance(body, Mapping):
        raise BadCompletion("the answer is no JSON object")
    choices, usage = body.get("choices"), body.get("usage")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadCompletion(f"one choice was asked for, not {choices!r:.80}")
    if not isinstance(choices[0].get("text"), str):
        raise BadCompletion("the choice has no text")
    if not isinstance(usage, Mapping) or usage.get("completion_tokens") != 1:
        raise BadCompletion(f"one token was asked for, but usage says {usage!r:.80}")
