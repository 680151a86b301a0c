"""Checked completions: one token for the canary, and the known question, whose answer must not change between starts.

Only a checked answer makes an engine `Serving`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# The most likely token of N has a probability of 1/N at least, and no vocabulary has e^30 tokens.
_LOGPROB_MIN = -30.0
_QUESTION = (
    "The harbour was quiet at dawn. Seven boats lay at the quay, 42 ropes held them, and the keeper of the lighthouse "
    "wrote into his book: wind"
)
"""About 100 tokens of the nano model, so that it fits into the least context that a deployment may have."""
_ANSWER_TOKENS = 8


class BadCompletion(Exception):
    """Answer that is not the requested completion."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The greedy answer to the known question."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Of each token, in nats."""
    margins: tuple[float, ...]
    """Nats by which each token was likelier than the next."""


def request(model: str | None) -> dict[str, object]:
    """Return the body of `POST /v1/completions`: one greedy token and its log probability; None: any model's."""
    return {
        "model": model,
        "prompt": "Hello",
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 1,
        "stream": False,
    }


def known_request(model: str) -> dict[str, object]:
    """Return the body of `POST /v1/completions` with the known question."""
    # Token ids, because texts with parts of characters do not distinguish tokens.
    more = {"prompt": _QUESTION, "max_tokens": _ANSWER_TOKENS, "logprobs": 2, "ignore_eos": True, "seed": 0}
    return {**request(model), **more, "return_tokens_as_token_ids": True}


def check_answer(status: int, body: bytes) -> None:
    """Raise `BadCompletion` unless this HTTP status and body are a valid answer to `request`."""
    check(_parsed(status, body))


def known_answer(status: int, body: bytes) -> KnownAnswer:
    """Return the answer to `known_request` in a response with this HTTP status and body.

    Raises:
        BadCompletion: it is invalid.
    """
    answer = _parsed(status, body)
    check(answer, _ANSWER_TOKENS)
    found = answer["choices"][0]["logprobs"]
    tokens, best = found.get("tokens"), found.get("top_logprobs")
    if not isinstance(tokens, list) or len(tokens) != _ANSWER_TOKENS:
        raise BadCompletion(f"{_ANSWER_TOKENS} tokens were requested, not {tokens!r:.80}")
    try:
        margins = [
            max((a - b for a, b in pairwise(sorted(one.values(), reverse=True)[:2])), default=0.0)
            for one, _ in zip(best, tokens, strict=True)
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise BadCompletion(f"the two most likely tokens of each position were requested, not {best!r:.80}") from error
    return KnownAnswer(tuple(map(str, tokens)), tuple(map(float, found["token_logprobs"])), tuple(margins))


def difference(known: KnownAnswer, now: KnownAnswer, tolerance: float) -> str | None:
    """Return how an engine's answer differs from the earlier one; None if it does not.

    Where two tokens were equally likely, rounding may choose the other one: the following tokens have another context
    and are not compared. `tolerance` is the number of nats by which rounding may move a log probability; of two tokens,
    each.
    """
    for place, (token, found) in enumerate(zip(known.tokens, now.tokens, strict=True)):
        margin, logprob = known.margins[place], known.logprobs[place]
        if token != found and margin < 2 * tolerance:
            return None
        if token != found:
            return f"token {place + 1} is {found}, and was {token}, by {margin:.3f} nats the likeliest"
        if abs(now.logprobs[place] - logprob) > tolerance:
            return f"token {place + 1} has the log probability {now.logprobs[place]:.4f}, and had {logprob:.4f}"
        # A nearly certain token keeps its probability whatever happens to the others, so the margin is compared too.
        if abs(now.margins[place] - margin) > 2 * tolerance:
            return f"token {place + 1} is {now.margins[place]:.3f} nats likelier than the next, and was {margin:.3f}"
    return None


def check(body: object, tokens: int = 1) -> None:
    """Raise `BadCompletion` unless `body` has one choice with this number of tokens, a text, and log probabilities.

    An engine with NaN values still returns a token; only the probability shows the fault.
    """
    if not isinstance(body, Mapping):
        raise BadCompletion("the answer is no JSON object")
    choices, usage = body.get("choices"), body.get("usage")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadCompletion(f"one choice was requested, not {choices!r:.80}")
    if not isinstance(choices[0].get("text"), str):
        raise BadCompletion("the choice has no text")
    asked = "one token was" if tokens == 1 else f"{tokens} tokens were"
    if not isinstance(usage, Mapping) or usage.get("completion_tokens") != tokens:
        raise BadCompletion(f"{asked} requested, but usage reports {usage!r:.80}")
    logprobs = choices[0].get("logprobs")
    given = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(given, list) or len(given) != tokens or not all(isinstance(one, int | float) for one in given):
        raise BadCompletion(f"{asked} requested with log probabilities, not {given!r:.80}")
    for one in given:
        if not math.isfinite(one) or not _LOGPROB_MIN <= one <= 1e-3:
            raise BadCompletion(f"the greedy token's log probability is {one}, which no working engine computes")


def _parsed(status: int, body: bytes) -> Any:
    text = body[:200].decode(errors="replace")
    if status != 200:
        raise BadCompletion(f"status {status}: {text}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadCompletion(f"the answer is no JSON: {text}") from error
