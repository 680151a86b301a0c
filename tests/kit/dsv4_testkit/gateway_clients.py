"""Clients of a deployment: one raw request, and a chat through OpenAI's own library, each in a thread."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import openai

from dsv4_testkit.harness import Deployment

SECONDS = 240.0
TOKENS = 96
CONTEXT = 1024
"""Context length of the deployment: tokens of a prompt and its response together."""
TIE = 0.125
"""Nats: two steps of bfloat16, the type of the nano model's logits."""


class Asked(threading.Thread):
    """One request in a separate thread."""

    def __init__(self, deployment: Deployment, path: str, body: dict[str, Any], tell: threading.Event | None = None):
        super().__init__()
        self._url, self._body = f"http://127.0.0.1:{deployment.api}{path}", {"model": deployment.name, **body}
        self._headers = deployment.headers
        self._tell = tell or threading.Event()
        self.status, self.raw, self.seconds = 0, b"", 0.0
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        request = urllib.request.Request(self._url, json.dumps(self._body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                self.status = answer.status
                for line in answer:
                    self.raw += line
                    if self.raw.count(b"\n\n") == TOKENS // 4:
                        self._tell.set()
        except urllib.error.HTTPError as error:
            self.status, self.raw = error.code, error.read()
        self.seconds = time.monotonic() - begun

    def answered(self) -> Asked:
        self.join(SECONDS)
        assert not self.is_alive()
        return self

    @property
    def chunks(self) -> list[Any]:
        events = self.raw.decode().split("\n\n")
        assert events.pop() == ""
        # A held stream contains comments.
        events = [event for event in events if not event.startswith(":")]
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks if isinstance(chunk, dict) for choice in chunk.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(_text(choice) for choice in self.choices)

    @property
    def margins(self) -> list[Margin]:
        """Margins of a response with log-probabilities."""
        return [margin for choice in self.choices for margin in _margins(choice)]


Margin = tuple[str, float]
"""Text of a token, and its difference in log-probability to the second candidate in nats."""


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def _margins(choice: Mapping[str, Any]) -> list[Margin]:
    found = choice.get("logprobs") or {}
    if "content" in found:
        best = [[entry["logprob"] for entry in token["top_logprobs"]] for token in found["content"] or ()]
    else:
        best = [list(token.values()) for token in found.get("top_logprobs", ())]
    # One token per chunk, or text that was delayed until a character was complete.
    return [(_text(choice) if last else "", first - second) for last, (first, second) in _ranked(best)]


def _ranked(best: list[list[float]]) -> list[tuple[bool, tuple[float, float]]]:
    ordered = [sorted(values, reverse=True) for values in best]
    return [(at == len(ordered) - 1, (values[0], values[1])) for at, values in enumerate(ordered)]


def same(text: str, whole: str, margins: list[Margin]) -> bool:
    """Return whether a continued response equals the whole one, or differs first at a token decided by rounding.

    The engine computes the kept tokens as a prompt, with another order of sums (docs/gateway.md). `test_equivalence.py`
    applies the same rule to one rank and two.
    """
    if text == whole:
        return True
    at = 0
    for token, margin in margins:
        at += len(token)
        if text[:at] != whole[:at]:
            print(f"\nparts after {at} characters, at {token!r} with a margin of {margin:.3f} nats")
            return margin < TIE
    return False


def len_in_tokens(deployment: Deployment, content: str) -> int:
    """Return the tokens of a chat with this message, including its template."""
    asked = Asked(deployment, "/tokenize", {"messages": [{"role": "user", "content": content}]}).answered()
    return int(json.loads(asked.raw)["count"])


class Chat(threading.Thread):
    """A greedy chat without a limit, ended by the model's context and read by OpenAI's own client."""

    def __init__(self, deployment: Deployment, **more: Any) -> None:
        super().__init__()
        url = f"http://127.0.0.1:{deployment.api}/v1"
        self._api = openai.OpenAI(base_url=url, api_key=deployment.key or "none", max_retries=0, timeout=SECONDS)
        frame = len_in_tokens(deployment, "7") - 1
        content = "7" * (CONTEXT - TOKENS - frame)
        self._ask: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "model": deployment.name}
        self._ask |= {"temperature": 0.0, "extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
        self._ask |= more
        self.text, self.finish, self.tokens = "", "", 0
        self.margins: list[Margin] = []
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._read()
        finally:
            self.started.set()

    def _read(self) -> None:
        with self._api, self._api.chat.completions.create(**self._ask, stream=True) as stream:
            for number, chunk in enumerate(stream):
                if chunk.usage is not None:
                    self.tokens = chunk.usage.total_tokens
                for choice in chunk.choices:
                    self.text += choice.delta.content or ""
                    self.margins += _margins(choice.model_dump())
                    self.finish = choice.finish_reason or self.finish
                if number == TOKENS // 4:
                    self.started.set()

    def answered(self) -> Chat:
        self.join(SECONDS)
        assert not self.is_alive()
        return self
