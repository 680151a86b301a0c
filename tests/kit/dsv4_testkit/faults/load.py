"""Clients that send requests continuously, and the outcome of each request."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_PAUSE_AFTER_FAILURE = 0.5
_WORDS = ("alpha", "river", "stone", "cloud", "seven", "north", "paper", "green")


class Outcome(StrEnum):
    """Outcome of a request for its client."""

    ANSWERED = "answered"
    FAILED = "failed"
    """No response and no token: an error, a closed connection, or no data within the patience."""
    ENDED = "ended"
    """Tokens, then an error event."""
    SILENT = "silent"
    """A stream that began and then ended or stalled without completion or error event."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request with its Unix times and outcome."""

    sent: float
    ended: float
    stream: bool
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Shape:
    """Properties of the clients' requests."""

    clients: int = 4
    prompt_words: tuple[int, int] = (4, 24)
    """A word of the list has one to six tokens of the nano model, four on average."""
    tokens: tuple[int, int] = (4, 24)
    chat: float = 0.3
    """Share of chat requests; the chat template takes 400 tokens of the nano model."""
    patience: float = 240.0
    """Seconds without data after which a client ends its request."""
    pause: float = 0.0
    """Seconds between a response and the client's next request."""


class Load:
    """Load of several clients, used as a context manager; `stop` waits until each client has finished its request."""

    def __init__(
        self,
        port: int,
        model: str,
        shape: Shape,
        seed: str,
        *,
        host: str = "127.0.0.1",
        ended: Callable[[Request], None] | None = None,
    ) -> None:
        """Create a load without starting it.

        Args:
            port: of the API.
            model: name of the model.
            shape: of the load.
            seed: of the random prompts.
            host: name or address of the API.
            ended: called with each completed request.
        """
        self._host, self._port, self._model, self._shape = host, port, model, shape
        self._ended = ended
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.clients = shape.clients
        self.done: list[Request] = []
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{number}"), number), daemon=True)
            for number in range(shape.clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            # Clients end with their connections; they are not awaited.
            self._stop.set()

    def stop(self) -> list[Request]:
        """Stop the load and return every request with its outcome."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._shape.patience + 30.0)
        return self.done

    def answered(self, since: float = 0.0) -> int:
        """Return the number of requests answered after Unix time `since`."""
        with self._lock:
            return sum(1 for request in self.done if request.outcome is Outcome.ANSWERED and request.ended > since)

    def _client(self, chance: random.Random, number: int) -> None:
        shape = self._shape
        for turn in range(10**9):
            if self._stop.is_set():
                return
            words = " ".join(chance.choices(_WORDS, k=chance.randint(*shape.prompt_words)))
            body: dict[str, Any] = {
                "model": self._model,
                "max_tokens": chance.randint(*shape.tokens),
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": (turn + number) % 2 == 0,
            }
            chat = chance.random() < shape.chat
            path = "/v1/chat/completions" if chat else "/v1/completions"
            body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
            request = ask(self._port, path, body, shape.patience, self._host)
            with self._lock:
                self.done.append(request)
                if self._ended is not None:
                    self._ended(request)
            self._stop.wait(shape.pause if request.outcome is Outcome.ANSWERED else _PAUSE_AFTER_FAILURE)


def ask(port: int, path: str, body: dict[str, Any], patience: float, host: str = "127.0.0.1") -> Request:
    """Send one request and read its response to the end."""
    sent = time.time()
    seen = _Seen()
    detail = ""
    connection = http.client.HTTPConnection(host, port, timeout=patience)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            detail = f"status {answer.status}: {answer.read(300).decode(errors='replace')}"
        elif body["stream"]:
            for line in answer:
                seen.line(line)
        else:
            seen.whole(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        detail = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            connection.close()
    return Request(sent, time.time(), bool(body["stream"]), seen.outcome(bool(body["stream"])), seen.error or detail)


class _Seen:
    """Progress of a response."""

    def __init__(self) -> None:
        self.tokens = 0
        self.events = 0
        self.finished = False
        self.done = False
        self.error = ""

    def line(self, line: bytes) -> None:
        """Process one line of an event stream."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        self.events += 1
        event = json.loads(data)
        if "error" in event:
            self.error = json.dumps(event["error"])[:300]
        for choice in event.get("choices", ()):
            self.tokens += bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
            self.finished = self.finished or choice.get("finish_reason") in ("length", "stop")

    def whole(self, data: bytes) -> None:
        """Process a response without a stream."""
        choices = json.loads(data).get("choices") or [{}]
        self.done = self.finished = choices[0].get("finish_reason") in ("length", "stop")

    def outcome(self, stream: bool) -> Outcome:
        if self.finished and self.done and not self.error:
            return Outcome.ANSWERED
        if not stream or not self.events:
            return Outcome.FAILED
        if self.error:
            return Outcome.ENDED if self.tokens else Outcome.FAILED
        return Outcome.SILENT


def counts(requests: Iterable[Request]) -> dict[str, int]:
    """Return the number of requests by outcome."""
    found = Counter(request.outcome for request in requests)
    return {outcome.value: found[outcome] for outcome in Outcome}


def outage(requests: Iterable[Request], struck: float) -> float | None:
    """Return the seconds from the fault to the end of the longest time without a response; None if none followed."""
    ends = sorted(request.ended for request in requests if request.outcome is Outcome.ANSWERED)
    later = [end for end in ends if end > struck]
    if not later:
        return None
    begins = [max([struck, *(end for end in ends if end <= struck)]), *later[:-1]]
    _, end = max(zip(begins, later, strict=True), key=lambda pause: pause[1] - pause[0])
    return end - struck
