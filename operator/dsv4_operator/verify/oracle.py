"""Log-probabilities as an oracle: a document of them, its collection from an endpoint, and the comparison of two.

Every case has a prompt, its greedy continuation, and the log-probabilities of both as the endpoint scores them in one
prefill. The candidate scores the tokens of the reference, so that every position is comparable also after the first
different token of its own continuation. The format is in docs/verify.md.

`pressure` compares outputs with those of the same requests alone, while the KV cache is exhausted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv4_operator.verify.checks import SENTENCE, SHIFT_NATS, Figures, Session, decoded_as_scored, filler, text_of
from dsv4_operator.verify.endpoint import (
    TIE_NATS,
    Client,
    Defect,
    Divergence,
    Reason,
    Reply,
    Skip,
    Token,
    divergence,
    shorten,
)

_T = TypeVar("_T")

FORMAT = "dsv4-logprobs/1"
PROMPTS: tuple[tuple[str, str], ...] = (
    ("english", "The history of the lighthouse begins with a storm. In the winter of that year, the village"),
    ("chinese", "春天来了，河边的柳树长出了新的叶子。孩子们在草地上"),
    ("code", "def is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n    for d in range(2,"),
    ("list", "Planets by distance from the sun:\n1. Mercury\n2. Venus\n3."),
    ("numbers", "2, 4, 8, 16, 32, 64, 128,"),
    ("mixed", 'JSON: {"name": "Zoë", "tags": ["a", "β", "日本"], "size":'),
    ("dialogue", "Customer: My parcel has not arrived.\nAgent: I am sorry. Could you tell me"),
    ("long", " ".join(filler(16, seed=7))),
)
"""Fixed prompts; their names are part of the format."""
SCALE_BOUND = 0.005
"""Deviation of the scale of logits from 1 that rounding explains."""
DECISIVE_NATS = 1.0
"""Margin of the reference from which on another first choice is a decisive difference."""
DECISIVE_SHARE = 0.005


class Case(BaseModel):
    """Log-probabilities of one prompt."""

    model_config = ConfigDict(extra="ignore")
    name: str
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Greedy continuation."""
    scored: list[dict[str, float] | None]
    """For each token of prompt and continuation, the log-probabilities of the most likely tokens and of itself, keyed
    `token_id:N`, its own first; null for the first token."""
    decoded: list[dict[str, float]] = Field(default_factory=list)
    """The same of the continuation, from its generation."""


class Document(BaseModel):
    """A reference."""

    model_config = ConfigDict(extra="ignore")
    format: str
    model: str
    engine: str = ""
    created: str = ""
    top: int
    noise: float = Field(ge=0.0)
    """Mean difference between repetitions, in nats."""
    cases: list[Case] = Field(min_length=1)


def parse(text: str) -> Document:
    """Return the reference in `text`.

    Raises:
        ValueError: it is no reference of this format.
    """
    try:
        document = Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}") from None
    if document.format != FORMAT:
        raise ValueError(f"format: {document.format!r} is not {FORMAT!r}")
    for case in document.cases:
        if len(case.scored) != len(case.prompt_token_ids) + len(case.token_ids):
            raise ValueError(f"cases.{case.name}: scored has not one entry for each token")
    return document


def sizes(*, quick: bool) -> tuple[Sequence[tuple[str, str]], int]:
    """Return names and texts of the prompts, and the tokens of each continuation."""
    return (PROMPTS[:3], 12) if quick else (PROMPTS, 32)


async def score(client: Client, ids: Sequence[int], top: int) -> list[Token | None]:
    """Return the log-probabilities of a sequence of tokens, computed in one prefill."""
    reply = await client.complete(list(ids), max_tokens=1, prompt_logprobs=top, optional=True)
    if len(reply.prompt) != len(ids):
        raise Skip(Reason.NOT_OFFERED, "the response has no log-probabilities of the prompt")
    return reply.prompt


async def _generate(
    client: Client, prompt: str | Sequence[int], tokens: int, top: int
) -> tuple[list[int], list[int], list[Token]]:
    """Return token ids of prompt and continuation, and log-probabilities of the continuation."""
    reply = await client.complete(
        prompt,
        max_tokens=tokens,
        logprobs=top,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
        ignore_eos=True,
        optional=True,
    )
    if not reply.prompt_ids or not reply.token_ids or not reply.tokens:
        raise Skip(Reason.NOT_OFFERED, "the response has no token ids or log-probabilities (parameters of vLLM)")
    return reply.prompt_ids, reply.token_ids, reply.tokens


async def collect(session: Session, client: Client) -> Document:
    """Return the log-probabilities of all prompts at an endpoint, with the noise of repetitions."""
    prompts, tokens = sizes(quick=session.quick)
    cases, noises = [], []
    for name, prompt in prompts:
        prompt_ids, ids, decoded = await _generate(client, prompt, tokens, session.top)
        scored = await score(client, [*prompt_ids, *ids], session.top)
        # Beside another request, so that the repetition meets another batch.
        again, _ = await asyncio.gather(
            score(client, [*prompt_ids, *ids], session.top), score(client, prompt_ids, session.top)
        )
        noises.append(_mean_difference(scored, again))
        rows = [None if each is None else dict(_own_first(each)) for each in scored]
        own = [dict(_own_first(each)) for each in decoded]
        cases.append(
            Case(name=name, prompt=prompt, prompt_token_ids=prompt_ids, token_ids=ids, scored=rows, decoded=own)
        )
    return Document(
        format=FORMAT,
        model=client.model,
        engine=session.facts.engine,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        top=session.top,
        noise=round(statistics.mean(noises), 6),
        cases=cases,
    )


def _own_first(token: Token) -> list[tuple[str, float]]:
    return [(token.text, token.logprob), *((text, value) for text, value in token.top.items() if text != token.text)]


def _mean_difference(one: Sequence[Token | None], other: Sequence[Token | None]) -> float:
    differences = [
        abs(a.top[key] - b.top[key])
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
        for key in a.top.keys() & b.top.keys()
    ]
    return statistics.mean(differences) if differences else 0.0


def as_token(row: Mapping[str, float]) -> Token:
    """Return an entry of a document as a token; its first key is the token itself."""
    own = next(iter(row))
    return Token(own, row[own], row)


class Comparison:
    """Sums over the positions of a reference and of a candidate that scored the same tokens."""

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.margins: list[float] = []
        self.positions = self.agreements = self.decisive = 0
        self.overlap = 0.0
        self._pairs: list[tuple[float, float]] = []

    def add(self, reference: Mapping[str, float], candidate: Mapping[str, float]) -> None:
        """Add one position."""
        common = reference.keys() & candidate.keys()
        self.positions += 1
        self.overlap += len(common) / max(len(reference), 1)
        self.differences += [abs(reference[key] - candidate[key]) for key in common]
        first, second = (max(each.items(), key=lambda item: item[1])[0] for each in (reference, candidate))
        ordered = sorted(reference.values(), reverse=True)
        margin = ordered[0] - ordered[1] if len(ordered) > 1 else math.inf
        self.margins.append(margin)
        self.agreements += first == second
        self.decisive += first != second and margin >= DECISIVE_NATS
        if len(common) > 2:
            means = [statistics.fmean(each[key] for key in common) for each in (reference, candidate)]
            self._pairs += [(reference[key] - means[0], candidate[key] - means[1]) for key in common]

    def scale(self) -> tuple[float, float]:
        """Return the ratio of the spreads of candidate and reference within positions, and its standard error.

        Rounding adds to both spreads alike, so the ratio is 1 for logits that are correct in the mean.
        """
        square = sum(x * x for x, _ in self._pairs)
        if square == 0 or len(self._pairs) < 30:
            return 1.0, math.inf
        ratio = math.sqrt(sum(y * y for _, y in self._pairs) / square)
        rest = sum((y - ratio * x) ** 2 for x, y in self._pairs) / (len(self._pairs) - 2)
        return ratio, math.sqrt(rest / square)

    def figures(self) -> Figures:
        """Return the figures of all positions."""
        ordered = sorted(self.differences) or [0.0]
        scale, error = self.scale()
        margins = sorted(self.margins)
        return {
            "positions": self.positions,
            "top1_agreement": round(self.agreements / max(self.positions, 1), 4),
            "topk_overlap": round(self.overlap / max(self.positions, 1), 4),
            "mean_difference": round(statistics.fmean(ordered), 5),
            "p99_difference": round(ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)], 4),
            "largest_difference": round(ordered[-1], 4),
            "decisive_differences": self.decisive,
            "scale": round(scale, 5),
            "scale_error": round(error, 5) if math.isfinite(error) else None,
            "median_margin": round(margins[len(margins) // 2], 3) if margins else None,
        }


async def compare(session: Session, reference: Document) -> Figures:
    """Compare the session's endpoint with a reference.

    Raises:
        Defect: they differ by more than noise and tolerance.
    """
    client, sums, noises = session.client, Comparison(), [reference.noise]
    parted: list[str] = []
    first: Divergence | None = None
    equal = 0
    for case in reference.cases:
        prompt_ids, _, decoded = await _generate(client, case.prompt, len(case.token_ids), reference.top)
        if prompt_ids != case.prompt_token_ids:
            at = next(
                (at for at, (a, b) in enumerate(zip(prompt_ids, case.prompt_token_ids, strict=False)) if a != b),
                min(len(prompt_ids), len(case.prompt_token_ids)),
            )
            raise Defect(
                f"{case.name}: the tokens of the prompt differ from position {at} on: another tokenizer",
                [case.prompt_token_ids[at : at + 8], prompt_ids[at : at + 8]],
            )
        sequence = [*case.prompt_token_ids, *case.token_ids]
        scored = await score(client, sequence, reference.top)
        noises.append(_mean_difference(scored, await score(client, sequence, reference.top)))
        for expected, found in zip(case.scored, scored, strict=True):
            if expected and found is not None:
                sums.add(expected, found.top)
        wanted = [as_token(row) for row in case.decoded]
        found_divergence = divergence(wanted, decoded[: len(wanted)])
        equal += found_divergence is None
        if found_divergence is not None:
            if first is None or found_divergence.position < first.position:
                first = found_divergence
            if not found_divergence.tie:
                parted.append(f"{case.name}: {found_divergence}")
    noise = statistics.mean(noises)
    figures = {
        **sums.figures(),
        "noise": round(noise, 5),
        "equal_continuations": equal,
        "continuations": len(reference.cases),
        "first_divergence": None if first is None else str(first),
        "reference": f"{reference.model} {reference.engine} {reference.created}".strip(),
    }
    limit = max(session.tolerance, 3 * noise)
    scale, error = sums.scale()
    problems = []
    if figures["mean_difference"] > limit:
        problems.append(
            f"log-probabilities differ by {figures['mean_difference']:.3f} nats in the mean (limit {limit:.3f})"
        )
    if abs(scale - 1) > max(SCALE_BOUND, 4 * error):
        problems.append(f"logits are scaled by {scale:.4f} (standard error {error:.4f})")
    if sums.decisive > max(DECISIVE_SHARE * sums.positions, 1):
        problems.append(f"{sums.decisive} of {sums.positions} positions have decisively another first choice")
    if len(parted) > len(reference.cases) // 4:
        problems.append(f"continuations part without a tie: {'; '.join(parted[:3])}")
    if problems:
        raise Defect("; ".join(problems), figures)
    return figures


# Checks.


async def self_check(session: Session) -> Figures:
    """Check that decoding gives each token the log-probability that a prefill of the same tokens gives it."""
    if not session.facts.vllm:
        raise Skip(Reason.NOT_OFFERED, "log-probabilities of prompts are only offered by vLLM")
    tokens = 16 if session.quick else 64
    prompt = " ".join(filler(3, seed=3))
    prompt_ids, ids, decoded = await _generate(session.client, prompt, tokens, session.top)
    scored = await score(session.client, [*prompt_ids, *ids], session.top)
    return decoded_as_scored(decoded, scored[len(prompt_ids) :])


async def repetition(session: Session) -> Figures:
    """Repetitions of a prefill, alone and beside other requests, agree within rounding."""
    if not session.facts.vllm:
        raise Skip(Reason.NOT_OFFERED, "log-probabilities of prompts are only offered by vLLM")
    reply = await session.client.complete(PROMPTS[-1][1], max_tokens=1, return_token_ids=True)
    ids = reply.prompt_ids or []
    one = await score(session.client, ids, session.top)
    others = await asyncio.gather(*(score(session.client, ids[: len(ids) - cut], session.top) for cut in (0, 3, 7, 11)))
    noises = [_mean_difference(one[: len(each)], each) for each in others]
    if max(noises) > SHIFT_NATS:
        raise Defect(f"repetitions differ by {max(noises):.3f} nats in the mean", noises)
    return {"noise": round(statistics.mean(noises), 5), "positions": len(one) - 1, "tie": TIE_NATS}


async def against_reference(session: Session) -> Figures:
    """Log-probabilities are those of a stored reference or of another endpoint."""
    if session.reference is not None:
        return await compare(session, Document.model_validate(session.reference))
    if session.against is not None:
        return await compare(session, await collect(session, session.against))
    raise Skip(Reason.NO_REFERENCE, "neither --reference nor --against is given")


# An exhausted KV cache.

_OVERCOMMIT = 1.5
"""Size of all requests at the same time, relative to the KV cache."""
_OUTPUT = 48
_REQUESTS = range(4, 49)
_PREFERRED_REQUESTS = 12
"""Longer prompts are preferred to more requests, because an engine computes a limited number at the same time."""
_SHARE, _FIRST, _LONGEST = 0.7, 8192, 131_072
"""Prompts: share of the context; tokens of the measured one and of the longest one, at most."""
_FULL = 0.9
"""Used share of the cache from which on it counts as exhausted without a preemption."""
_POLL_SECONDS = 0.1
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Cache:
    """Metrics of the KV cache."""

    engines: int
    """0: the endpoint does not have these metrics."""
    used: float
    """Highest used share of an engine."""
    preemptions: float


async def _cache(client: Client) -> _Cache:
    """Return vLLM's metrics of the KV cache."""
    status, data = await client.send("/metrics", root=True)
    text = data.decode(errors="replace") if status == HTTPStatus.OK else ""
    try:
        used = [float(value) for value in _USAGE.findall(text)]
        preemptions = sum(float(value) for value in _PREEMPTIONS.findall(text))
    except ValueError:
        used, preemptions = [], 0.0
    return _Cache(len(used), max(used, default=0.0), preemptions)


async def _peak(client: Client, work: Coroutine[Any, Any, _T]) -> tuple[_T, float]:
    """Return the result of `work`, and the highest used share of the KV cache meanwhile."""
    peak, task = 0.0, asyncio.ensure_future(work)
    try:
        while not task.done():
            # A busy endpoint may not answer; the requests of `work` decide.
            with contextlib.suppress(Skip, Defect):
                peak = max(peak, (await _cache(client)).used)
            await asyncio.wait({task}, timeout=_POLL_SECONDS)
        return task.result(), peak
    finally:
        task.cancel()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that together need more than the KV cache."""

    requests: int
    tokens: int
    """Of each prompt, about."""
    seconds: float
    """Estimated time of all of them, one after the other."""


def plan_load(tokens: int, longest: int, share: float, seconds: float) -> Load:
    """Return requests that need `_OVERCOMMIT` times the KV cache of all engines together.

    Args:
        tokens: of the prompt that was measured.
        longest: tokens of the longest prompt.
        share: of the caches that this prompt needs with its output.
        seconds: of its request.
    """
    count = math.ceil(_OVERCOMMIT / share)
    if count > _PREFERRED_REQUESTS:
        factor = min(count / _PREFERRED_REQUESTS, longest / tokens)
        tokens, seconds, share = round(tokens * factor), seconds * factor, share * factor
        count = math.ceil(_OVERCOMMIT / share)
    count = max(count, _REQUESTS.start)
    return Load(count, tokens, count * seconds)


async def pressure(session: Session) -> Figures:
    """Check that requests that exhaust the KV cache together have the outputs that they have alone, and that the
    endpoint answers as before afterwards.
    """
    client, facts = session.client, session.facts
    idle = await _cache(client)
    if not idle.engines or not facts.max_model_len:
        missing = "vllm:kv_cache_usage_perc in /metrics" if facts.max_model_len else "max_model_len"
        raise Skip(Reason.NOT_OFFERED, f"the size of the KV cache is not known, because there is no {missing}")
    nonce = random.randrange(10**6)  # noqa: S311

    def ask(number: int, tokens: int, output: int = _OUTPUT) -> Coroutine[Any, Any, Reply]:
        # Different from the first token on, so that no request shares blocks with another one.
        prompt = " ".join((f"{number} of {nonce}.", *text_of(session, tokens, seed=number)))
        return client.complete(prompt, max_tokens=output, logprobs=3, **session.fixed())

    before = await _sentence(session)
    tokens = facts.context(_SHARE, _FIRST)
    first, peak = await _peak(client, ask(0, tokens))
    if peak <= idle.used:
        # It ended between two samples; a gateway has new ones once a second.
        _, peak = await _peak(client, ask(0, tokens, min(10 * _OUTPUT, facts.max_model_len // 5)))
    if peak <= idle.used:
        raise Skip(Reason.INCONCLUSIVE, "the used share of the KV cache did not change with a request")
    share = (peak - idle.used) / idle.engines
    load = plan_load(tokens, facts.context(_SHARE, _LONGEST), share, first.seconds)
    if load.requests not in _REQUESTS or 2 * load.seconds > client.seconds:
        raise Skip(
            Reason.TOO_LARGE,
            f"{load.requests} requests of about {load.tokens} tokens, which may take {2 * load.seconds:.0f} s, would "
            f"exhaust the KV cache; at most {_REQUESTS[-1]} are sent, and the time must be below --timeout",
        )
    alone = [await ask(number, load.tokens) for number in range(load.requests)]
    while True:
        earlier = await _cache(client)
        together, peak = await _peak(client, _all([ask(number, load.tokens) for number in range(len(alone))]))
        ties = _judge(alone, together)
        try:
            after = await _sentence(session)
        except (Skip, Defect) as error:
            raise Defect(f"after the KV cache was exhausted, a request fails: {error}") from None
        if (problem := _difference(before, after)) is not None:
            texts = [before.text, after.text]
            raise Defect(f"after the KV cache was exhausted, a request has another output: {problem}", texts)
        preemptions = max((await _cache(client)).preemptions - earlier.preemptions, 0.0)
        if preemptions or peak >= _FULL:
            return {
                "requests": len(alone),
                "prompt_tokens": alone[0].prompt_tokens,
                "preemptions": int(preemptions),
                "largest_usage": round(peak, 3),
                "ties": ties,
            }
        # While its prompt is computed, a request needs more of a cache with windows than afterwards.
        count = math.ceil(len(alone) * _OVERCOMMIT / max(peak, 0.01))
        seconds = count * load.seconds / load.requests
        if len(alone) > load.requests or count not in _REQUESTS or 2 * seconds > client.seconds:
            break
        alone += [await ask(number, load.tokens) for number in range(len(alone), count)]
    raise Skip(
        Reason.INCONCLUSIVE,
        f"{len(alone)} requests of about {load.tokens} tokens used only {peak:.0%} of the KV cache: another limit "
        "applies, such as --max-num-seqs, or they went to several groups",
    )


async def _sentence(session: Session) -> Reply:
    return await session.client.complete(SENTENCE, max_tokens=16, logprobs=3, **session.fixed())


async def _all(work: Sequence[Coroutine[Any, Any, Reply]]) -> list[Reply | BaseException]:
    return await asyncio.gather(*work, return_exceptions=True)


def _judge(alone: Sequence[Reply], together: Sequence[Reply | BaseException]) -> int:
    """Return the number of requests whose outputs part at a tie.

    Raises:
        Defect: requests failed or have another output than alone.
        Skip: the endpoint limits the number of requests.
    """
    failed, wrong, ties = list[str](), list[tuple[str, str, str]](), 0
    for one, other in zip(alone, together, strict=True):
        if isinstance(other, Skip) and other.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise Skip(Reason.INCONCLUSIVE, f"the endpoint limits the number of requests: {other}")
        if isinstance(other, Skip | Defect):
            failed.append(str(other))
        elif isinstance(other, BaseException):
            raise other
        elif (problem := _difference(one, other)) is not None:
            wrong.append((problem, one.text, other.text))
        else:
            ties += divergence(one.tokens, other.tokens) is not None
    if failed:
        found = f"{len(failed)} of {len(alone)} requests fail while the KV cache is exhausted"
        raise Defect(f"{found}: {shorten(failed[0], 200)}", failed)
    if wrong:
        problem, *texts = wrong[0]
        found = f"{len(wrong)} of {len(alone)} requests have another output while the KV cache is exhausted"
        raise Defect(f"{found}: {problem}", texts)
    return ties


def _difference(one: Reply, other: Reply) -> str | None:
    """Return how greedy outputs of the same request differ by more than rounding; None if they do not."""
    counts = [f"{each.completion_tokens} tokens ({each.finish})" for each in (other, one)]
    if counts[0] != counts[1]:
        return " instead of ".join(counts)
    if low := sum(token.margin() < -TIE_NATS for token in other.tokens):
        return f"{low} tokens at temperature 0 are not the most likely ones"
    found = divergence(one.tokens, other.tokens)
    if found is None:
        return None if one.text == other.text else "the same tokens and another text"
    return None if found.tie else str(found)
