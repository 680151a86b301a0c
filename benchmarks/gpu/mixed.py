"""A mixed load: random requests of all kinds of the OpenAI API, in batches of random size."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

LONGEST = 6000
MOST_REQUESTS = 24
MOST_TOKENS = 64
_WORDS = ["the", "of", "and", "to", "in", "is", "it", "one", "two", "red", "blue", "time", "people", "water", "light"]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

_PAUSE = 0.005
"""Seconds between two batches, in which other engines get their turn."""

Kind = Callable[[random.Random], dict[str, Any]]


def _random(draw: random.Random) -> dict[str, Any]:
    """Return random sampling options, some with a seed, some without top-k or top-p."""
    options: dict[str, Any] = {"temperature": draw.choice([0.3, 0.7, 1.0, 1.3])}
    if draw.random() < 0.6:
        options["top_p"] = draw.choice([0.5, 0.9, 0.99])
    if draw.random() < 0.5:
        options["top_k"] = draw.randint(1, 100)
    if draw.random() < 0.3:
        options["min_p"] = 0.05
    if draw.random() < 0.5:
        options["seed"] = draw.randint(0, 1000)
    return options


def _penalties(draw: random.Random) -> dict[str, Any]:
    """Return options with one penalty or all three, greedy or not."""
    every = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    chosen = every if draw.random() < 0.5 else dict([draw.choice(list(every.items()))])
    return {"temperature": draw.choice([0.0, 0.8]), **chosen}


def _structured(draw: random.Random) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = {"json": _SCHEMA} if draw.random() < 0.5 else {"choice": ["yes", "no", "perhaps"]}
    return {"temperature": draw.choice([0.0, 0.8]), "structured_outputs": StructuredOutputsParams(**wanted)}


KINDS: dict[str, Kind] = {
    "greedy": lambda draw: {"temperature": 0.0},
    "random": _random,
    "penalties": _penalties,
    "logprobs": lambda draw: {"temperature": draw.choice([0.0, 0.8]), "logprobs": draw.randint(0, 20)},
    "prompt_logprobs": lambda draw: {"temperature": 0.0, "prompt_logprobs": draw.randint(0, 20)},
    "logit_bias": lambda draw: {"temperature": 0.0, "logit_bias": {draw.randint(5, 490): 5.0 for _ in range(4)}},
    "bad_words": lambda draw: {"temperature": 0.8, "bad_words": draw.sample(_WORDS, 3)},
    "stop": lambda draw: {"temperature": 0.8, "stop": draw.sample(_WORDS, 2)},
    "min_tokens": lambda draw: {"temperature": 0.0, "min_tokens": 4},
    "structured": _structured,
}
"""Options of `SamplingParams` by kind of request."""
_RARE = {"prompt_logprobs": 0.3, "structured": 0.5}


def batch(draw: random.Random, kinds: list[str], longest: int) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Return the requests of one batch: kind, prompt of 1 to `longest` tokens, options.

    Half of the prompts are short; only short ones request log-probabilities of the prompt.
    """
    weights = [_RARE.get(kind, 1.0) for kind in kinds]
    requests = []
    for kind in draw.choices(kinds, weights, k=draw.randint(1, MOST_REQUESTS)):
        top = min(longest, 1500) if kind == "prompt_logprobs" else longest
        length = draw.randint(1, top if draw.random() < 0.5 else min(200, top))
        options = {"max_tokens": draw.randint(1, MOST_TOKENS), **KINDS[kind](draw)}
        options["max_tokens"] = max(options["max_tokens"], options.get("min_tokens", 1))
        requests.append((kind, [draw.randint(5, 495) for _ in range(length)], options))
    return requests


def refusals(llm: Any, draw: random.Random) -> dict[str, str]:
    """Return the error message by kind of request that `llm` refuses when it is alone."""
    from vllm import SamplingParams

    refused = {}
    for kind, make in KINDS.items():
        for _ in range(4):  # A kind has variants.
            try:
                parameters = SamplingParams(max_tokens=8, **make(draw))
                llm.generate([{"prompt_token_ids": [5, 6, 7]}], [parameters], use_tqdm=False)
            except Exception as error:
                refused[kind] = f"{type(error).__name__}: {error}"[:300]
                # Accepted parts of the request would be returned with the next one.
                _abort(llm)
                break
    return refused


def _abort(llm: Any) -> None:
    """Abort all remaining requests of `llm`."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


def _answered(llm: Any, requests: list[tuple[str, list[int], dict[str, Any]]], refused: dict[str, str]) -> Any:
    """Return the outputs of one batch; None if it failed, with the reason of the first such batch in `refused`."""
    from vllm import SamplingParams

    parameters = [SamplingParams(**options) for _, _, options in requests]
    try:
        return llm.generate([{"prompt_token_ids": ids} for _, ids, _ in requests], parameters, use_tqdm=False)
    except Exception as error:
        # The failing request is unknown, so the whole batch is omitted.
        refused.setdefault("batch", f"{type(error).__name__}: {error}"[:300])
        _abort(llm)
        return None


def serve(
    llm: Any,
    seconds: float,
    context: int,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve batches sequentially for `seconds`; return counts of served requests, and the refused kinds.

    Args:
        llm: a `vllm.LLM`.
        seconds: duration in which batches begin, without the waits for turns.
        context: the longest context of `llm`.
        turn: held while a batch is served, if other engines run concurrently.
        seed: selects the requests.
    """
    draw = random.Random(seed)
    longest = min(LONGEST, context - MOST_TOKENS)
    refused = refusals(llm, draw)
    counts: Counter[str] = Counter()
    tokens = prompt_tokens = batches = 0
    failed, spent = 0, 0.0
    while spent < seconds and failed < 3:
        requests = batch(draw, [kind for kind in KINDS if kind not in refused], longest)
        time.sleep(_PAUSE)
        with turn():
            begun = time.monotonic()
            outputs = _answered(llm, requests, refused)
            spent += time.monotonic() - begun
        if outputs is None:
            failed += 1
            continue
        failed = 0
        batches += 1
        counts.update(kind for kind, _, _ in requests)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        prompt_tokens += sum(len(ids) for _, ids, _ in requests)
    return {
        "seconds": round(spent, 1),
        "batches": batches,
        "requests": counts.total(),
        "kinds": dict(counts),
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "refused": refused,
    }
