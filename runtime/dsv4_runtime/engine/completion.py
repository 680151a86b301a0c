"""The checked completion: one token, asked for and looked at. Nothing else makes an engine `Serving`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

# The most likely token of N has a probability of 1/N at least, and no vocabulary has e^30 tokens.
_LOGPROB_MIN = -30.0


class BadCompletion(Exception):
    """What came back was not the completion that was asked for."""


def request(model: str) -> dict[str, object]:
    """The body of `POST /v1/completions`: one greedy token and its log probability."""
    return {
        "model": model,
        "prompt": "Hello",
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 1,
        "stream": False,
    }


def check_answer(status: int, body: bytes) -> None:
    """Raise `BadCompletion` unless an answer with this HTTP status and body is the one to `request`."""
    text = body[:200].decode(errors="replace")
    if status != 200:
        raise BadCompletion(f"status {status}: {text}")
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise BadCompletion(f"the answer is no JSON: {text}") from error
    check(answer)


def check(body: object) -> None:
    """Raise `BadCompletion` unless `body` is the answer to `request`: one choice, one token, a text, a probability.

    An engine whose numbers have become NaN still answers with a token; only the probability shows it.
    """
    if not isinstance(body, Mapping):
        raise BadCompletion("the answer is no JSON object")
    choices, usage = body.get("choices"), body.get("usage")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadCompletion(f"one choice was asked for, not {choices!r:.80}")
    if not isinstance(choices[0].get("text"), str):
        raise BadCompletion("the choice has no text")
    if not isinstance(usage, Mapping) or usage.get("completion_tokens") != 1:
        raise BadCompletion(f"one token was asked for, but usage says {usage!r:.80}")
    logprobs = choices[0].get("logprobs")
    given = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], int | float):
        raise BadCompletion(f"one log probability was asked for, not {given!r:.80}")
    if not math.isfinite(given[0]) or not _LOGPROB_MIN <= given[0] <= 1e-3:
        raise BadCompletion(f"the greedy token's log probability is {given[0]}, which no working engine computes")
