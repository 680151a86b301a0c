"""Checks of an endpoint as data, and their functions: smoke tests, context, speculative decoding.

A function returns its figures, or raises `Defect` or `Skip`. Checks of content need a model that answers simple
questions; all others find defects of serving with any weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from dsv4_operator.verify.endpoint import (
    INVALID,
    TIE_NATS,
    Client,
    Defect,
    Reason,
    Reply,
    Skip,
    Token,
    divergence,
    events,
    shorten,
)

Figures = dict[str, Any]

SENTENCE = "The small boat left the harbour before sunrise, and nobody on the shore saw the light go out."
PROBES = (
    ("What is 17 + 25? Answer with the number only.", "42"),
    ("What is the capital of France? Answer with one word.", "paris"),
    ("Repeat this word and nothing else: marmalade", "marmalade"),
)
_CAPABLE = 2
"""Minimum number of correct answers of a model that can answer."""
_TEST_VOCABULARY = 2.5
"""Characters of an English sentence per token, below which a vocabulary is that of a test model."""
MARKUP = re.compile(r"</?think>|<｜|｜>|DSML|</?tool_calls?>|</?tool_result>|<\|\w+|<(?:invoke|parameter) name=")
"""Markup of chat templates and parsers that must not be in a response."""
SHIFT_NATS = 0.15
"""Mean difference between two computations of the same log-probabilities on one engine that rounding explains."""
_LONG_TOKENS = 32_768


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check with its figures."""

    name: str
    status: Status
    text: str = ""
    """Finding, or reason of a skipped check."""
    reason: Reason | None = None
    figures: Figures = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", [], {})}


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of the endpoint that decide which checks apply."""

    model: str
    max_model_len: int
    """0 if unknown."""
    vllm: bool
    """Whether it is vLLM, according to its list of models."""
    correct: int
    """Correct answers to `PROBES`."""
    chars_per_token: float
    engine: str = ""

    @property
    def capable(self) -> bool:
        """Return whether checks of content apply."""
        return self.correct >= _CAPABLE

    @property
    def test_model(self) -> bool:
        """Return whether the vocabulary is that of a test model."""
        return self.chars_per_token < _TEST_VOCABULARY

    def context(self, share: float, limit: int = _LONG_TOKENS) -> int:
        """Return a share of the context in tokens, at most `limit`."""
        return min(int((self.max_model_len or 4096) * share), limit)


@dataclass(slots=True)
class Session:
    """State of a run: the endpoint, its facts, and responses that several checks use."""

    client: Client
    facts: Facts
    quick: bool = False
    weak: bool = False
    """Whether the user declared the model a test model."""
    against: Client | None = None
    """Second endpoint, for comparisons."""
    reference: Mapping[str, Any] | None = None
    tolerance: float = 0.05
    top: int = 8
    shared: dict[str, Reply] = field(default_factory=dict)

    def extra(self) -> dict[str, Any]:
        """Return vLLM's parameters for token ids, if offered."""
        return {"return_token_ids": True} if self.facts.vllm else {}

    def fixed(self) -> dict[str, Any]:
        """Return vLLM's parameter that prevents an early end of the output, if offered."""
        return {"ignore_eos": True} if self.facts.vllm else {}

    async def base(self) -> Reply:
        """Return the greedy continuation of `SENTENCE` with log-probabilities."""
        if "base" not in self.shared:
            count = 16 if self.quick else 48
            self.shared["base"] = await self.client.complete(
                SENTENCE, max_tokens=count, logprobs=5, **self.fixed(), **self.extra()
            )
        return self.shared["base"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    """`GROUP.NAME`."""
    summary: str
    run: Callable[[Session], Awaitable[Figures]]
    remedy: str
    quick: bool = False
    content: bool = False
    """Whether it needs a model that answers questions."""

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


async def probe(client: Client) -> Facts:
    """Return the facts of the endpoint, and set the client's model.

    Raises:
        Skip: the endpoint does not answer.
        Defect: it has no list of models, or no chat.
    """
    document = await client.document("/models")
    try:
        models = {each["id"]: each for each in document.get("data") or []}
        lengths = {name: int(each.get("max_model_len") or 0) for name, each in models.items()}
    except INVALID as error:
        raise Defect(f"/models has an unexpected format: {error!r}") from None
    if not models:
        raise Defect("/models lists no model")
    client.model = client.model or next(iter(models))
    if client.model not in models:
        raise Defect(f"/models does not list {client.model!r}; it has {', '.join(map(str, models))}")
    try:
        sentence = await client.complete(SENTENCE, max_tokens=1, logprobs=5, optional=True)
    except Skip as error:
        if error.reason is not Reason.NOT_OFFERED:
            raise
        client.logprobs = False
        sentence = await client.complete(SENTENCE, max_tokens=1)
    chars = round(len(SENTENCE) / max(sentence.prompt_tokens, 1), 2)
    correct = await _correct(client, 12)
    if correct < _CAPABLE and chars >= _TEST_VOCABULARY:
        # Models that cannot answer without reasoning.
        correct = await _correct(client, 512)
    try:
        version = (await client.document("/version", root=True, optional=True)).get("version", "")
    except (Skip, Defect, AttributeError):
        version = ""
    return Facts(
        model=client.model,
        max_model_len=lengths[client.model],
        vllm=models[client.model].get("owned_by") == "vllm",
        correct=correct,
        chars_per_token=chars,
        engine=str(version),
    )


async def _correct(client: Client, tokens: int) -> int:
    """Return the number of questions of the probe that are answered correctly within `tokens`."""
    questions = [client.chat([{"role": "user", "content": text}], max_tokens=tokens) for text, _ in PROBES]
    answers = await asyncio.gather(*questions)
    return sum(wanted in answer.text.casefold() for (_, wanted), answer in zip(PROBES, answers, strict=True))


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": text}]


def filler(count: int, seed: int = 0) -> list[str]:
    """Return `count` sentences of a long text; the same for the same seed."""
    source = random.Random(seed)  # noqa: S311
    parts = (
        ("The old", "A young", "The quiet", "One tired", "That careful"),
        ("sailor", "teacher", "farmer", "doctor", "painter"),
        ("walked to", "looked at", "talked about", "came from", "wrote of"),
        ("the river", "the market", "the mountain", "the station", "the garden"),
        ("in the morning", "after the rain", "without a word", "with a friend", "once again"),
    )
    return [" ".join(source.choice(words) for words in parts) + "." for _ in range(count)]


def text_of(session: Session, tokens: int, seed: int = 0) -> list[str]:
    """Return sentences of about `tokens` tokens."""
    sentence = filler(1)[0]
    # Test vocabularies need more tokens for these words than for the sentence of the probe.
    rate = min(session.facts.chars_per_token, 4.0) * 0.85
    return filler(max(int(tokens * rate / (len(sentence) + 1)), 12), seed)


# Smoke tests.


async def models(session: Session) -> Figures:
    """Check that the list of models has the model and, for vLLM, its context length."""
    facts = session.facts
    if facts.vllm and not facts.max_model_len:
        raise Defect("/models has no max_model_len")
    return {"model": facts.model, "max_model_len": facts.max_model_len, "engine": facts.engine}


async def capability(session: Session) -> Figures:
    """Check that the model answers simple questions; a test model need not."""
    facts = session.facts
    figures = {"correct": facts.correct, "questions": len(PROBES), "chars_per_token": facts.chars_per_token}
    if facts.capable:
        return figures
    found = f"{facts.correct} of {len(PROBES)} simple questions were answered"
    if session.weak or facts.test_model:
        raise Skip(Reason.TOO_WEAK, f"{found}: a test model")
    raise Defect(f"{found}, with a vocabulary of {facts.chars_per_token} characters per token")


async def chat(session: Session) -> Figures:
    """Check that a chat request has a message, a finish reason and usage within its limit."""
    reply = await session.client.chat(user("Say hello."), max_tokens=8)
    if reply.completion_tokens > 8:
        raise Defect(f"usage.completion_tokens is {reply.completion_tokens} with max_tokens 8", reply.text)
    if reply.finish == "length" and reply.completion_tokens != 8:
        raise Defect(f"finish_reason is 'length' after {reply.completion_tokens} of 8 tokens", reply.text)
    return {"seconds": round(reply.seconds, 2)}


async def completions(session: Session) -> Figures:
    """Check that a completion has exactly the requested number of tokens, at temperature 0 the most likely ones."""
    reply = await session.base()
    wanted = 16 if session.quick else 48
    if session.facts.vllm and (reply.completion_tokens, reply.finish) != (wanted, "length"):
        raise Defect(
            f"max_tokens {wanted} with ignore_eos gives {reply.completion_tokens} tokens and finish_reason"
            f" {reply.finish!r}",
            reply.content,
        )
    wrong = [at for at, token in enumerate(reply.tokens) if token.margin() < -TIE_NATS]
    if wrong:
        token = reply.tokens[wrong[0]]
        raise Defect(
            f"{len(wrong)} of {len(reply.tokens)} tokens at temperature 0 are not the most likely ones; the first is"
            f" token {wrong[0]}, {-token.margin():.2f} nats below the most likely",
            dict(token.top),
        )
    return {"tokens": reply.completion_tokens, "tokens_per_second": round(reply.completion_tokens / reply.seconds, 1)}


async def stream(session: Session) -> Figures:
    """Streams are complete and equal to the response without streaming."""
    whole = await session.base()
    count = 16 if session.quick else 48
    parts = await session.client.complete(
        SENTENCE, max_tokens=count, logprobs=5, stream=True, **session.fixed(), **session.extra()
    )
    _same("/completions", whole, parts)
    if parts.completion_tokens > 2 and parts.chunks < 3:
        raise Defect(f"a stream of {parts.completion_tokens} tokens has {parts.chunks} chunks: it is buffered")
    chats = [
        await session.client.chat(user("Tell me of the sea."), max_tokens=8, logprobs=True, top_logprobs=3, stream=each)
        for each in (False, True)
    ]
    _same("/chat/completions", *chats)
    return {"chunks": parts.chunks}


def _same(path: str, whole: Reply, parts: Reply) -> None:
    """Check that two greedy replies agree up to a tie."""
    found = divergence(whole.tokens, parts.tokens)
    if found is None and (whole.text, whole.finish, whole.usage.get("total_tokens")) != (
        parts.text,
        parts.finish,
        parts.usage.get("total_tokens"),
    ):
        raise Defect(f"{path}: the stream differs from the response without streaming", [whole.text, parts.text])
    if found is not None and not found.tie:
        raise Defect(f"{path}: in the stream {found}", [whole.text, parts.text])


async def usage(session: Session) -> Figures:
    """Check that counts of usage agree with token ids, sums and limits."""
    base = await session.base()
    short, doubled = await asyncio.gather(
        session.client.complete(SENTENCE, max_tokens=1, **session.extra()),
        session.client.complete(f"{SENTENCE} {SENTENCE}", max_tokens=1, **session.extra()),
    )
    for reply in (base, short, doubled):
        counts = {key: reply.usage.get(key) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        if not all(isinstance(value, int) for value in counts.values()):
            raise Defect("usage lacks a count", counts)
        if counts["total_tokens"] != reply.prompt_tokens + reply.completion_tokens:
            raise Defect("usage.total_tokens is not the sum of prompt and completion", counts)
        for name, ids in (("prompt_tokens", reply.prompt_ids), ("completion_tokens", reply.token_ids)):
            if ids is not None and counts[name] != len(ids):
                raise Defect(f"usage.{name} is {counts[name]}, and the response has {len(ids)} token ids", counts)
        if reply.tokens and len(reply.tokens) != reply.completion_tokens:
            raise Defect(f"usage.completion_tokens is {reply.completion_tokens} of {len(reply.tokens)} tokens", counts)
    if (short.completion_tokens, doubled.completion_tokens) != (1, 1):
        raise Defect(f"usage.completion_tokens is {short.completion_tokens} with max_tokens 1")
    growth = doubled.prompt_tokens / max(short.prompt_tokens, 1)
    if not 1.6 < growth < 2.4:
        raise Defect(f"twice the text has {growth:.2f} times the prompt tokens")
    return {"prompt_tokens": short.prompt_tokens}


async def stop(session: Session) -> Figures:
    """Check that a stop string ends the output and is not in it, also in a stream."""
    base = await session.base()
    text = base.content
    places = [
        at
        for at in range(len(text) // 3, len(text) - 5)
        if text.find(text[at : at + 5]) == at and text[at : at + 5].isprintable() and "\ufffd" not in text[: at + 5]
    ]
    if not places:
        raise Skip(Reason.INCONCLUSIVE, "the output has no part that can be a stop string")
    at = places[0]
    word = text[at : at + 5]
    for streamed in (False, True):
        reply = await session.client.complete(
            SENTENCE, max_tokens=base.completion_tokens or 16, stop=[word], stream=streamed, **session.fixed()
        )
        where = "in a stream" if streamed else "without streaming"
        if word in reply.content:
            raise Defect(f"the stop string {word!r} is in the output {where}", reply.content)
        if reply.content == text[:at] and reply.finish != "stop":
            raise Defect(f"finish_reason is {reply.finish!r} after a stop string {where}", reply.content)
        if reply.content != text[:at] and text.startswith(reply.content):
            raise Defect(f"the output ends before the stop string {word!r} {where}", [text, reply.content])
    return {}


def _common(one: str, other: str) -> float:
    """Return the length of the common prefix as a share of the longer text."""
    size = max(len(one), len(other), 1)
    return (
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        / size
    )


_ROUNDED = 0.1
"""Share that seeded outputs of a batch have in common with those of the same seeds alone, beyond that of others."""


def _shares(texts: Sequence[str]) -> tuple[float, float]:
    """Return the mean common shares of outputs of the same seed, and of different ones: three of one, two of others."""
    same = statistics.mean(_common(texts[a], texts[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    return same, statistics.mean(_common(texts[a], texts[b]) for a, b in ((0, 3), (0, 4), (3, 4)))


async def seed(session: Session) -> Figures:
    """Check that the same seed gives the same output, another seed another one."""

    async def output(seed: int) -> str:
        prompt = "Ten random words:"
        reply = await session.client.complete(prompt, max_tokens=12, temperature=1.5, seed=seed, **session.fixed())
        return str(reply.text)

    seeds = (11, 11, 11, 12, 13)
    texts = together = await asyncio.gather(*map(output, seeds))
    same, other = _shares(texts)
    if same < (1 + other) / 2:
        # Each batch rounds in its own way, and sampled outputs may part at any token then: once more, one at a time.
        texts = [await output(each) for each in seeds]
        same, other = _shares(texts)
    if other > 0.8:
        if same < other:
            raise Defect("outputs with one seed differ more than those with different seeds", texts)
        raise Skip(Reason.INCONCLUSIVE, "the model gives nearly the same output for every seed")
    # Rounding may change a late token of a sampled output; without a seed, outputs part at once.
    if same < (1 + other) / 2:
        raise Defect(f"outputs with the same seed have only {same:.0%} in common (different seeds: {other:.0%})", texts)
    kept = statistics.mean(map(_common, together, texts))
    if kept < other + _ROUNDED:
        raise Defect(
            f"simultaneous outputs have only {kept:.0%} in common with those of the same seeds alone "
            f"(different seeds: {other:.0%})",
            [*together, *texts],
        )
    return {"common_prefix_same_seed": round(same, 3), "common_prefix_other_seed": round(other, 3)}


async def errors(session: Session) -> Figures:
    """Invalid requests are rejected with status 4xx and a message, and the endpoint still answers."""
    model = session.client.model
    invalid: list[tuple[str, dict[str, Any]]] = [
        ("/chat/completions", {"model": model, "messages": user("Hi"), "max_tokens": -1}),
        ("/chat/completions", {"model": model, "messages": "Hi"}),
        ("/completions", {"model": f"{model}-unknown", "prompt": "Hi", "max_tokens": 1}),
    ]
    if session.facts.vllm and session.facts.max_model_len:
        beyond = [5] * (session.facts.max_model_len + 8)
        invalid.append(("/completions", {"model": model, "prompt": beyond, "max_tokens": 1}))
    for path, body in invalid:
        status, data = await session.client.send(path, body)
        if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Defect(f"{path} answers HTTP {status} to an invalid request", shorten(body, 200))
        try:
            message = json.loads(data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = None
        if not isinstance(message, str) or not message:
            raise Defect(f"{path}: the error response has no error.message", data.decode(errors="replace"))
    return {"requests": len(invalid)}


_CONVERSATION = (
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Where is the river?"},
    {"role": "assistant", "content": "Behind the house."},
    {"role": "user", "content": "And the sea?"},
)
_RENDERED = (
    "<｜begin▁of▁sentence｜>Answer briefly.<｜User｜>Where is the river?<｜Assistant｜></think>Behind the house."
    "<｜end▁of▁sentence｜><｜User｜>And the sea?<｜Assistant｜></think>"
)
"""DeepSeek-V4's documented prompt of `_CONVERSATION` without reasoning."""


async def template(session: Session) -> Figures:
    """Check that a conversation becomes the prompt of DeepSeek-V4, or of another model with all messages in order."""
    if not session.facts.vllm:
        raise Skip(Reason.NOT_OFFERED, "token ids of prompts are only offered by vLLM")
    client = session.client
    reply = await client.chat(_CONVERSATION, max_tokens=1, return_token_ids=True)
    found = reply.prompt_ids
    if found is None:
        raise Skip(Reason.NOT_OFFERED, "the response has no prompt_token_ids")
    marks, expected = await asyncio.gather(
        *(
            client.complete(text, max_tokens=1, return_token_ids=True, add_special_tokens=False)
            for text in ("<｜User｜><｜Assistant｜>", _RENDERED)
        )
    )
    if marks.prompt_tokens == 2:
        if found != expected.prompt_ids:
            texts = [await _detokenized(client, ids or []) for ids in (expected.prompt_ids, found)]
            raise Defect("the prompt of a conversation is not that of DeepSeek-V4", texts)
        thinking = (await client.chat(_CONVERSATION, thinking=True, max_tokens=1, return_token_ids=True)).prompt_ids
        if not thinking or thinking[-1] == found[-1] or thinking[-2] != found[-2]:
            raise Defect("the prompt with reasoning does not end with <｜Assistant｜><think>", [thinking, found])
        return {"template": "DeepSeek-V4", "prompt_tokens": len(found)}
    text = await _detokenized(client, found)
    at = 0
    for message in _CONVERSATION:
        at = text.find(message["content"], at)
        if at < 0:
            raise Defect(f"the prompt lacks {message['content']!r}, or has it in another place", text)
        at += len(message["content"])
    if not text[at:].strip():
        raise Defect("the prompt does not begin the answer of the assistant", text)
    return {"template": "other", "prompt_tokens": len(found)}


async def _detokenized(client: Client, ids: Sequence[int]) -> str:
    document = await client.document(
        "/detokenize", {"model": client.model, "tokens": list(ids)}, root=True, optional=True
    )
    return str(document["prompt"])


def no_markup(reply: Reply) -> None:
    """Raise `Defect` if a reply has markup of templates or parsers."""
    for name, text in (("content", reply.content), ("reasoning", reply.reasoning)):
        if found := MARKUP.search(text):
            raise Defect(f"the {name} has the markup {found.group()!r}", text[max(found.start() - 100, 0) :])


async def thinking(session: Session) -> Figures:
    """Reasoning is separated from the answer when on, and absent when off."""
    count = session.facts.context(0.5, 2048) if session.facts.capable else 12
    question = user("How many legs have two spiders and a dog together?")
    off = await session.client.chat(question, max_tokens=min(count, 256))
    on = await session.client.chat(question, thinking=True, max_tokens=count)
    if session.facts.capable:
        # The output of random weights may have any token.
        no_markup(off)
        no_markup(on)
    if off.reasoning:
        raise Defect("the response has reasoning although it is off", off.reasoning)
    if session.facts.capable and on.finish != "length":
        for name, text in (("reasoning", on.reasoning), ("content", on.content)):
            if not text.strip():
                raise Defect(f"the {name} is empty with reasoning on", on.text)
    return {"reasoning_characters": len(on.reasoning)}


async def messages(session: Session) -> Figures:
    """Anthropic's API answers, also in a stream with all of its events."""
    client = session.client
    body = {"model": client.model, "max_tokens": 6, "temperature": 0.0, "messages": user("Say hello.")}
    document = await client.document("/messages", body, optional=True)
    counts = document.get("usage") or {}
    if document.get("type") != "message" or document.get("role") != "assistant":
        raise Defect("/messages: the response is no message of the assistant", document)
    if document.get("stop_reason") not in ("end_turn", "max_tokens", "stop_sequence", "tool_use"):
        raise Defect(f"/messages: stop_reason is {document.get('stop_reason')!r}", document)
    if not counts.get("input_tokens") or not 0 <= (counts.get("output_tokens") or 0) <= 6:
        raise Defect("/messages: usage is wrong for max_tokens 6", counts)
    status, data = await client.send("/messages", {**body, "stream": True})
    if status != HTTPStatus.OK:
        raise Defect(f"/messages answers HTTP {status} to a stream")
    try:
        kinds = [json.loads(payload)["type"] for _, payload in events(data) if payload != "[DONE]"]
    except (ValueError, KeyError, TypeError):
        raise Defect("/messages: an event of the stream has no type", data[-300:].decode(errors="replace")) from None
    kinds = [kind for kind in kinds if kind != "ping"]
    balanced = kinds.count("content_block_start") == kinds.count("content_block_stop")
    if kinds[:1] != ["message_start"] or kinds[-2:] != ["message_delta", "message_stop"] or not balanced:
        raise Defect("/messages: the events of the stream are incomplete or in the wrong order", kinds[:2] + kinds[-4:])
    return {"events": len(kinds)}


async def long_prompt(session: Session) -> Figures:
    """Check that a prompt of three quarters of the context is answered."""
    tokens = session.facts.context(0.75, 512 if session.quick else _LONG_TOKENS)
    prompt = " ".join(text_of(session, tokens))
    reply = await session.client.complete(prompt, max_tokens=4, **session.fixed(), **session.extra())
    if not 0.4 * tokens < reply.prompt_tokens < 2 * tokens:
        raise Defect(f"usage.prompt_tokens is {reply.prompt_tokens} for a prompt of about {tokens} tokens")
    if reply.prompt_ids is not None and len(reply.prompt_ids) != reply.prompt_tokens:
        raise Defect(f"usage.prompt_tokens is {reply.prompt_tokens} of {len(reply.prompt_ids)}")
    return {"prompt_tokens": reply.prompt_tokens, "seconds": round(reply.seconds, 2)}


async def parallel(session: Session) -> Figures:
    """Check that requests at the same time have the outputs that they have alone."""
    starts = ("The river", "Now we may", "A day in the sun", "def main(")
    count = 6 if session.quick else 24

    def ask(text: str) -> Awaitable[Reply]:
        return session.client.complete(text, max_tokens=count, logprobs=3, **session.fixed())

    alone = [await ask(text) for text in starts]
    together = await asyncio.gather(*(ask(text) for text in starts))
    ties = 0
    for text, one, other in zip(starts, alone, together, strict=True):
        found = divergence(one.tokens, other.tokens)
        if found is not None and not found.tie:
            raise Defect(f"{text!r} beside other requests: {found}", [one.text, other.text])
        if found is None and one.text != other.text:
            raise Defect(f"{text!r} has another output beside other requests", [one.text, other.text])
        ties += found is not None
    return {"requests": len(starts), "ties": ties}


# Context.


async def _next(session: Session, prompt: str, **body: Any) -> dict[str, float]:
    """Return the log-probabilities of the most likely next tokens."""
    reply = await session.client.complete(prompt, max_tokens=1, logprobs=5, **session.fixed(), **body)
    if not reply.tokens:
        raise Skip(Reason.NOT_OFFERED, "the response has no log-probabilities")
    return dict(reply.tokens[0].top)


def _shift(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the mean difference of two distributions over their common tokens; 99 without common ones."""
    common = one.keys() & other.keys()
    return statistics.mean(abs(one[each] - other[each]) for each in common) if common else 99.0


async def prefix_cache(session: Session) -> Figures:
    """Prompts with a common prefix have the next token that they have without the prefix cache."""
    nonce = random.randrange(10**6)  # noqa: S311
    prefix = f"Report {nonce}. " + " ".join(
        text_of(session, session.facts.context(0.5, 256 if session.quick else 8192))
    )
    ends = ["The answer is", "He said that", "At the end of the day", "Now count to ten: one"]
    if session.quick:
        del ends[2:]
    worst = 0.0
    cold = await _next(session, f"{prefix} {ends[0]}")
    warm = await asyncio.gather(*(_next(session, f"{prefix} {end}") for end in ends))
    pairs = [("the repeated prompt", cold, warm[0])]
    if session.facts.vllm:
        for number, end in enumerate(ends[1:]):
            alone = await _next(session, f"{prefix} {end}", cache_salt=f"verify-{nonce}-{number}")
            pairs.append((f"the prompt that ends with {end!r}", alone, warm[number + 1]))
    for name, one, other in pairs:
        shift = _shift(one, other)
        worst = max(worst, shift)
        # The most likely token in one answer is missing in the other, or the common ones have moved.
        lost = max(one, key=lambda each: one[each]) not in other
        if lost or shift > max(SHIFT_NATS, 2 * TIE_NATS):
            raise Defect(
                f"{name} has another next token from the prefix cache (difference {shift:.2f} nats)", [one, other]
            )
    return {"largest_difference": round(worst, 4), "prompts": len(pairs)}


DEPTHS = tuple(range(5, 100, 10))
"""Depths in percent."""


async def reach(session: Session) -> Figures:
    """Check that a change at each of ten depths of a long prompt changes the next token's log-probabilities."""
    sentences = text_of(session, session.facts.context(0.7, 16_384))
    base = [await _next(session, " ".join(sentences)) for _ in range(3)]
    noise = _shift(base[1], base[2])
    effects: dict[str, float] = {}
    for depth in DEPTHS:
        for attempt in (1, 2):
            changed = list(sentences)
            at = len(sentences) * depth // 100
            # The same tokens in another order, so that no other token has another position.
            first, *middle, last = sentences[at].split()
            changed[at] = " ".join((first, *middle[attempt:], *middle[:attempt], last))
            found = await _next(session, " ".join(changed))
            effect = 99.0 if found.keys() != base[2].keys() else _shift(base[2], found)
            effects[f"{depth}%"] = max(round(effect, 5), effects.get(f"{depth}%", 0.0))
            if effect > noise:
                break
    unseen = [depth for depth, effect in effects.items() if effect <= noise]
    if unseen and noise > 0:
        raise Skip(Reason.INCONCLUSIVE, f"the engine repeats a prompt only within {noise:.4f} nats")
    if unseen:
        raise Defect(
            f"a changed sentence at {', '.join(unseen)} of the prompt has no effect on the next token", effects
        )
    return {"sentences": len(sentences), "smallest_effect": min(effects.values()), "noise": noise}


async def needles(session: Session) -> Figures:
    """Check that a fact at each of ten depths of a long prompt is found."""
    tokens = session.facts.context(0.8)
    missing, answers = [], []
    for depth in DEPTHS:
        code = str(4000 + 37 * depth)
        sentences = text_of(session, tokens, seed=depth)
        sentences.insert(len(sentences) * depth // 100, f"The code of the green box is {code}.")
        question = "What is the code of the green box? Answer with the number only."
        reply = await session.client.chat(user(f"{' '.join(sentences)}\n\n{question}"), max_tokens=32)
        answers.append(reply.content)
        if code not in reply.content:
            missing.append(f"{depth}%")
    if len(missing) > 1:
        raise Defect(f"a fact at {', '.join(missing)} of a prompt of about {tokens} tokens is not found", answers)
    return {"found": len(DEPTHS) - len(missing), "depths": len(DEPTHS), "tokens": tokens}


# Speculative decoding.

_DRAFTS = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)


async def _draft_counters(client: Client) -> dict[str, float]:
    """Return vLLM's counters of drafts, summed over engines; those of a position as `per_pos N`."""
    status, data = await client.send("/metrics", root=True)
    found: dict[str, float] = {}
    for name, labels, value in _DRAFTS.findall(data.decode(errors="replace")) if status == HTTPStatus.OK else ():
        position = re.search(r'position="(\d+)"', labels)
        key = f"per_pos {position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


async def acceptance(session: Session) -> Figures:
    """Drafts are accepted at the first position, and never more often at a later one."""
    before = await _draft_counters(session.client)
    if "drafts" not in before:
        raise Skip(Reason.NOT_OFFERED, "/metrics has no counters of drafts: no speculative decoding, or no access")
    await asyncio.gather(
        *(
            session.client.complete(text, max_tokens=48, **session.fixed())
            for text in (SENTENCE, "One, two, three, four,", "def add(a, b):", "从前有一座山")
        )
    )
    after = await _draft_counters(session.client)
    delta = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts = delta.get("drafts", 0.0)
    if drafts <= 0:
        raise Skip(Reason.INCONCLUSIVE, "no draft was made during the requests, or another process counted them")
    rates = [
        round(delta[key] / drafts, 3)
        for key in sorted((each for each in delta if each.startswith("per_pos")), key=lambda each: int(each.split()[1]))
    ]
    figures = {"drafts": int(drafts), "per_position": rates, "tokens_per_step": round(1 + sum(rates), 2)}
    if drafts >= 20 and not any(rates):
        raise Defect(f"none of {drafts:.0f} drafts was accepted", figures)
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise Defect("a later position of drafts is accepted more often than an earlier one", figures)
    return figures


async def draft_tokens(session: Session) -> Figures:
    """Greedy outputs are equal to those of the endpoint of `--against`, which may have no drafts."""
    if session.against is None:
        raise Skip(Reason.NO_REFERENCE, "--against names no endpoint without drafts")
    equal, ties, starts = 0, 0, ("The river", "One, two, three,", "def add(a, b):", "从前有一座山")
    for text in starts:
        one, other = [
            await each.complete(text, max_tokens=48, logprobs=3, **session.fixed())
            for each in (session.against, session.client)
        ]
        found = divergence(one.tokens, other.tokens)
        if found is not None and not found.tie:
            raise Defect(f"{text!r}: {found}", [one.text, other.text])
        equal, ties = equal + (found is None), ties + (found is not None)
    return {"equal": equal, "ties": ties}


def decoded_as_scored(generated: Sequence[Token], scored: Sequence[Token | None]) -> Figures:
    """Compare the log-probabilities of generated tokens with those of the same tokens as part of a prompt.

    Raises:
        Defect: they differ by more than rounding.
    """
    pairs = [(a, b) for a, b in zip(generated, scored, strict=False) if b is not None]
    if not pairs:
        raise Skip(Reason.NOT_OFFERED, "the response has no log-probabilities of the prompt")
    differences = sorted(abs(a.logprob - b.logprob) for a, b in pairs)
    mean, beyond = statistics.mean(differences), sum(each > 1.0 for each in differences)
    figures = {"tokens": len(pairs), "mean_difference": round(mean, 4), "largest_difference": round(differences[-1], 4)}
    if mean > SHIFT_NATS or beyond > max(1, len(pairs) // 20):
        raise Defect(
            f"decoding and prefill differ by {mean:.3f} nats in the mean and by more than 1 nat at {beyond} of"
            f" {len(pairs)} tokens",
            figures,
        )
    return figures
