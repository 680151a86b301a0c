"""`dsv4 chat`: one streamed answer, or a conversation on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import note
from dsv4_runtime.util import sse

if TYPE_CHECKING:
    import httpx

ChatMessage = dict[str, str]
CONNECT_SECONDS = 5.0


class ChatError(CommandError):
    """The server did not answer, or not with an answer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that stay the same through a conversation."""

    endpoint: str
    """The base URL, ending in `/v1`."""
    model: str
    max_tokens: int | None
    system: str | None
    thinking: bool | None
    """Passed to the model's chat template; None leaves it to the server."""
    silence_seconds: float
    """The longest wait for the next piece of an answer."""
    status: str = "dsv4 status"
    """Command that shows why there is no connection."""
    why: str = "dsv4 why"
    """Command that shows why an answer broke off."""
    key: str = ""
    """Key that requests have to show; empty if none."""

    def body(self, messages: Sequence[ChatMessage]) -> dict[str, object]:
        """Build the request for the answer to `messages`."""
        lead: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        options: dict[str, object] = {}
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.thinking is not None:
            options["chat_template_kwargs"] = {"thinking": self.thinking}
        return {
            "model": self.model,
            "messages": [*lead, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }


@dataclass(slots=True)
class ChatAnswer:
    """An answer as it grows; `tokens` is the server's count, or else the number of pieces."""

    pieces: list[str] = field(default_factory=list)
    reported_tokens: int | None = None
    finish_reason: str | None = None
    first_piece: float | None = None
    last_piece: float | None = None

    @property
    def text(self) -> str:
        """Return all of it so far."""
        return "".join(self.pieces)

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.pieces) if self.reported_tokens is None else self.reported_tokens

    def speed(self) -> str:
        """Return `24 tokens, 13.0 tokens/s`; the first token's wait is not part of the speed."""
        count = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        if self.tokens < 2 or self.first_piece is None or self.last_piece is None:
            return count
        seconds = self.last_piece - self.first_piece
        return f"{count}, {(self.tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else count


def error_text(body: str) -> str:
    """Return the message in an error that an OpenAI-compatible server sends; the start of the body if it is none."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        inner = document.get("error", document)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
        if isinstance(inner, str):
            return inner
    return " ".join(body.split())[:200] or "no reason given"


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of every event in a stream of bytes; comments and other fields are skipped."""
    splitter = sse.Splitter()
    for chunk in chunks:
        for event in splitter.feed(chunk):
            if data := sse.payload(event):
                yield data.decode(errors="replace")
    # A stream that ends without the blank line still said this.
    if data := sse.payload(splitter.rest):
        yield data.decode(errors="replace")


def read_event(answer: ChatAnswer, data: str, now: float) -> str:
    """Add one event to `answer`; returns the text that it brought.

    Raises:
        ChatError: the event says that the answer failed, or is no event of a chat.
    """
    try:
        chunk: Any = json.loads(data)
        if "error" in chunk:
            raise ChatError(f"the answer broke off: {error_text(data)}")
        if usage := chunk.get("usage"):
            answer.reported_tokens = usage["completion_tokens"]
        piece = ""
        for choice in chunk.get("choices", ()):
            piece += choice["delta"].get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"the server sent something that is no part of a chat answer: {data[:100]}") from error
    if piece:
        answer.pieces.append(piece)
        answer.first_piece = answer.first_piece or now
        answer.last_piece = now
    return piece


def stream(
    client: httpx.Client, settings: Settings, messages: Sequence[ChatMessage], answer: ChatAnswer
) -> Iterator[str]:
    """Yield the pieces of the answer to `messages` as they come; `answer` holds the sum.

    Raises:
        ChatError: with the reason, for people.
    """
    import httpx

    done = False
    try:
        with client.stream("POST", f"{settings.endpoint}/chat/completions", json=settings.body(messages)) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ChatError(f"{settings.endpoint} answered {response.status_code}: {error_text(response.text)}")
            for data in events(response.iter_bytes()):
                if data == "[DONE]":
                    done = True
                    break
                if piece := read_event(answer, data, time.monotonic()):
                    yield piece
    except httpx.ConnectError as error:
        raise ChatError(f"{settings.endpoint} does not answer ({error}); see `{settings.status}`") from error
    except httpx.TimeoutException as error:
        seconds = CONNECT_SECONDS if isinstance(error, httpx.ConnectTimeout) else settings.silence_seconds
        raise ChatError(f"{settings.endpoint} said nothing for {seconds:g} s; see `{settings.why}`") from error
    except httpx.HTTPError as error:
        raise ChatError(f"the answer broke off ({error}); see `{settings.why}`") from error
    except sse.EventTooLongError as error:
        raise ChatError(f"{settings.endpoint} sent an event that does not end; see `{settings.why}`") from error
    if not done and answer.finish_reason is None:
        raise ChatError(f"the answer broke off before its end; see `{settings.why}`")


def make_client(settings: Settings) -> httpx.Client:
    """Return a client whose every wait is bounded. The deployment is never behind the environment's proxy."""
    import httpx

    return httpx.Client(
        headers={"Authorization": f"Bearer {settings.key}"} if settings.key else {},
        timeout=httpx.Timeout(settings.silence_seconds, connect=CONNECT_SECONDS),
        trust_env=False,
    )


def once(settings: Settings, prompt: str, *, terminal: bool) -> ExitCode:
    """Stream the answer to one prompt to stdout."""
    answer = ChatAnswer()
    with make_client(settings) as client:
        _print_stream(stream(client, settings, [{"role": "user", "content": prompt}], answer))
    if terminal:
        note(f"[{answer.speed()}]")
    return ExitCode.OK


def converse(
    settings: Settings, *, address: Callable[[], str] | None = None, read: Callable[[str], str] = input
) -> ExitCode:
    """Take prompts and print answers in turn until the end of input; Ctrl-C ends an answer, at the prompt the
    conversation.

    Args:
        settings: for every answer.
        address: gives the endpoint before each answer, where that can change.
        read: asks for a prompt.
    """
    note(f"Talking to {settings.model}; Ctrl-D ends.")
    messages: list[ChatMessage] = []
    with make_client(settings) as client:
        while True:
            try:
                prompt = read("> ").strip()
            except EOFError:
                note("")
                return ExitCode.OK
            if not prompt:
                continue
            messages.append({"role": "user", "content": prompt})
            answer = ChatAnswer()
            try:
                if address is not None:
                    settings = replace(settings, endpoint=address())
                _print_stream(stream(client, settings, messages, answer))
                note(f"[{answer.speed()}]")
            except KeyboardInterrupt:
                note("\n[stopped]")
            except CommandError as error:
                note(f"error: {error}")
            if answer.text:
                messages.append({"role": "assistant", "content": answer.text})
            else:
                # Two prompts in a row are no conversation.
                messages.pop()


def read_prompt(prompt: str | None) -> str | None:
    """Return the prompt given, or all of stdin; None when there is a terminal to talk with."""
    if prompt is None and sys.stdin.isatty():
        return None
    text = sys.stdin.read() if prompt in (None, "-") else str(prompt)
    if not text.strip():
        raise bad_input("the prompt is empty; give one as an argument or on stdin")
    return text


def _print_stream(pieces: Iterator[str]) -> None:
    ended = True
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            ended = piece.endswith("\n")
    finally:
        if not ended:
            print(flush=True)
