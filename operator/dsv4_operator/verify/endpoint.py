"""Requests to an OpenAI-compatible endpoint, their responses, the types that checks share, and requests of synchronous
commands (`open_url`). None uses the environment's proxy: deployments are reached directly.

A request ends within its timeout. Responses are read completely, streams with a record of protocol violations.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import aiohttp

from dsv4_runtime.util import sse

CONNECT_SECONDS = 5.0
_LARGEST_BYTES = 64 << 20
TIE_NATS = 0.25
"""Margin between the two most likely tokens below which correct engines may choose differently: two steps of bfloat16
between logits of 16 to 32."""
INVALID = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""Errors of reading a response whose format is not that of the API."""
FINISH_REASONS = ("stop", "length", "tool_calls")


class Reason(StrEnum):
    """Identifier of a skipped check, for programs."""

    NOT_OFFERED = "NotOffered"
    TOO_WEAK = "ModelTooWeak"
    NO_REFERENCE = "NoReference"
    INCONCLUSIVE = "Inconclusive"
    TOO_LARGE = "TooLarge"
    TIME_LIMIT = "TimeLimit"
    UNREACHABLE = "Unreachable"


INCOMPLETE = frozenset({Reason.TIME_LIMIT, Reason.UNREACHABLE})
"""Reasons that a later run may not meet."""


class Defect(Exception):
    """A check found a defect.

    Args:
        text: finding, with expected and found values.
        evidence: shortened output of the endpoint.
    """

    def __init__(self, text: str, evidence: object = None) -> None:
        super().__init__(text)
        self.evidence = [] if evidence is None else [shorten(evidence)]


class Skip(Exception):
    """A check is not applicable, or could not be performed."""

    def __init__(self, reason: Reason, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.status = status
        """Of the response, if there is one."""


def shorten(value: object, limit: int = 400) -> str:
    """Return a value as text of at most `limit` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 40]} ... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Address:
    """Endpoint, model and key."""

    url: str
    """Base URL, ending in `/v1`."""
    model: str = ""
    """Empty: the first model of `/v1/models`."""
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Token:
    """A position of an output or a prompt."""

    text: str
    logprob: float
    top: Mapping[str, float]
    """Log-probabilities of the most likely tokens, and of the token itself."""

    def margin(self) -> float:
        """Return the distance of the token to the most likely other token, in nats; infinite without others."""
        others = [value for text, value in self.top.items() if text != self.text]
        return self.logprob - max(others) if others else float("inf")


@dataclass(slots=True)
class ToolCall:
    """A tool call, complete or during streaming."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """Content of a response of `/completions` or `/chat/completions`."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token | None] = field(default_factory=list)
    """Log-probabilities of the prompt, where requested."""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    problems: list[str] = field(default_factory=list)
    """Protocol violations."""
    chunks: int = 0
    seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def text(self) -> str:
        """Return reasoning and content."""
        return self.reasoning + self.content


class Client:
    """Sends requests to one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, address: Address, *, seconds: float) -> None:
        """Args:
        session: of the event loop.
        address: endpoint; a later `model` can be set.
        seconds: limit for one request.
        """
        self._session = session
        self.address = address
        self.model = address.model
        self.seconds = seconds
        self.logprobs = True
        """Whether requests may ask for log-probabilities; some servers reject such requests."""
        self.requests = 0

    @property
    def root(self) -> str:
        """Return the URL without `/v1`."""
        return self.address.url.removesuffix("/v1")

    async def send(self, path: str, body: Mapping[str, Any] | None = None, *, root: bool = False) -> tuple[int, bytes]:
        """Return status and body of the response to a POST of `body`, or to a GET.

        Raises:
            Skip: no connection, or no complete response in time.
            Defect: the connection broke off, or the body is too long.
        """
        url = (self.root if root else self.address.url) + path
        headers = {"Authorization": f"Bearer {self.address.key}"} if self.address.key else {}
        limits = aiohttp.ClientTimeout(total=self.seconds, sock_connect=CONNECT_SECONDS)
        self.requests += 1
        data = bytearray()
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(
                method, url, json=body, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > _LARGEST_BYTES:
                        raise Defect(f"{path}: the response is longer than {_LARGEST_BYTES >> 20} MiB")
                return response.status, bytes(data)
        except TimeoutError:
            if _finished(bytes(data)):
                raise Defect(
                    f"{path}: the stream has a finish reason and does not end within {self.seconds:g} s", _tail(data)
                ) from None
            raise Skip(Reason.UNREACHABLE, f"{url} sent no complete response within {self.seconds:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise Skip(Reason.UNREACHABLE, f"{url} does not answer: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            if not data:
                raise Skip(
                    Reason.UNREACHABLE, f"{url} closed the connection: {error or type(error).__name__}"
                ) from None
            raise Defect(f"{path}: the response broke off: {error}", _tail(data)) from None

    async def document(
        self, path: str, body: Mapping[str, Any] | None = None, *, root: bool = False, optional: bool = False
    ) -> Any:
        """Return the JSON body of a response with status 200.

        Raises:
            Skip: with `optional`, the endpoint rejects the request (status 4xx).
            Defect: another status or no JSON.
        """
        status, data = await self.send(path, body, root=root)
        return _json(path, _checked(path, status, data, optional=optional))

    async def post(self, path: str, body: Mapping[str, Any], *, optional: bool = False) -> Reply:
        """Return the reply to a generation request, streamed if `body` has `stream`.

        Raises:
            Skip: as `document`.
            Defect: as `document`, or the response has no valid choice.
        """
        began = time.monotonic()
        if not self.logprobs:
            body = {name: value for name, value in body.items() if name not in ("logprobs", "top_logprobs")}
        status, data = await self.send(path, {"model": self.model, **body})
        data = _checked(path, status, data, optional=optional)
        try:
            reply = read_stream(data) if body.get("stream") else read_document(_json(path, data))
        except INVALID as error:
            raise Defect(f"{path}: the response has an invalid format: {error!r}", _tail(data)) from None
        if reply.problems:
            raise Defect(f"{path}: {'; '.join(dict.fromkeys(reply.problems))}", _tail(data))
        reply.seconds = time.monotonic() - began
        return reply

    async def complete(self, prompt: str | Sequence[int], *, optional: bool = False, **body: Any) -> Reply:
        """Return the greedy completion of `prompt`, unless `body` has other parameters."""
        return await self.post(
            "/completions", {"prompt": prompt, "temperature": 0.0, **streamed(body)}, optional=optional
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | str = False,
        optional: bool = False,
        **body: Any,
    ) -> Reply:
        """Return the greedy answer to `messages`.

        Args:
            messages: conversation.
            thinking: reasoning off, on, or an effort (`high`, `max`). Templates ignore unknown arguments.
            optional: as `document`.
            body: further parameters.
        """
        template: dict[str, Any] = {"thinking": bool(thinking), "enable_thinking": bool(thinking)}
        if isinstance(thinking, str):
            template["reasoning_effort"] = thinking
        request = {"messages": list(messages), "temperature": 0.0, "chat_template_kwargs": template, **streamed(body)}
        return await self.post("/chat/completions", request, optional=optional)


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body`, for a stream with the option that requests usage."""
    return {**body, "stream_options": {"include_usage": True}} if body.get("stream") else dict(body)


def _checked(path: str, status: int, data: bytes, *, optional: bool) -> bytes:
    if status == HTTPStatus.OK:
        return data
    text = f"{path} answers HTTP {status}: {error_text(data)}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Skip(Reason.UNREACHABLE, f"{text}; check --key-file")
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT):
        raise Skip(Reason.UNREACHABLE, text, status)
    if optional and HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Skip(Reason.NOT_OFFERED, text)
    raise Defect(text)


def error_text(data: bytes) -> str:
    """Return the message of an error response; of other bodies the first characters."""
    try:
        document = json.loads(data)
        error = document.get("error", document)
        return shorten(error["message"] if isinstance(error, dict) else error, 200)
    except INVALID:
        return shorten(data.decode(errors="replace"), 200)


def _json(path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Defect(f"{path}: the response is no JSON: {error}", _tail(data)) from None


def _tail(data: bytes | bytearray) -> str:
    return bytes(data[-400:]).decode(errors="replace")


def _finished(data: bytes) -> bool:
    return any(f'"finish_reason":{gap}"{reason}"'.encode() in data for gap in ("", " ") for reason in FINISH_REASONS)


def events(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and data of each server-sent event, including a last one without its blank line."""
    splitter = sse.Splitter()
    for event in [*splitter.feed(data), splitter.rest]:
        if payload := sse.payload(event):
            yield sse.name(event).decode(errors="replace"), payload.decode(errors="replace")


def read_document(document: Mapping[str, Any]) -> Reply:
    """Return the content of a response that is not streamed."""
    reply = Reply(usage=dict(document.get("usage") or {}))
    choice = document["choices"][0]
    message = choice.get("message")
    reply.finish = choice.get("finish_reason")
    reply.token_ids = choice.get("token_ids")
    reply.prompt_ids = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if message is None:
        reply.content = choice["text"]
        reply.tokens = _legacy_tokens(choice.get("logprobs"))
        reply.prompt = _prompt_tokens(choice.get("prompt_logprobs"))
    else:
        if message.get("role") != "assistant":
            reply.problems.append(f"the role of the message is {message.get('role')!r}, not 'assistant'")
        reply.content = message.get("content") or ""
        reply.reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            reply.calls.append(ToolCall(call.get("id") or "", function["name"], function["arguments"]))
        reply.tokens = _chat_tokens(choice.get("logprobs"))
    _check_end(reply)
    return reply


def read_stream(data: bytes) -> Reply:
    """Return the content of a stream, with a problem for each violation of its protocol."""
    reply, done, ids = Reply(), False, set()
    for _, payload in events(data):
        if done:
            reply.problems.append("events follow [DONE]")
            break
        if payload == "[DONE]":
            done = True
            continue
        chunk = json.loads(payload)
        if chunk.get("error"):
            raise Defect(f"the stream ends with an error: {error_text(payload.encode())}")
        ids.add(chunk.get("id"))
        reply.chunks += 1
        if usage := chunk.get("usage"):
            reply.usage = dict(usage)
        reply.prompt_ids = reply.prompt_ids or chunk.get("prompt_token_ids")
        for choice in chunk["choices"]:
            _add(reply, choice)
    if not done:
        reply.problems.append("the stream ends without [DONE]")
    if len(ids) > 1:
        reply.problems.append(f"the chunks have {len(ids)} different ids")
    _check_end(reply)
    return reply


def _add(reply: Reply, choice: Mapping[str, Any]) -> None:
    delta = choice.get("delta")
    if reply.finish is not None and (choice.get("text") or (delta or {}).get("content")):
        reply.problems.append("content follows the finish reason")
    if delta is None:
        reply.content += choice["text"]
        reply.tokens += _legacy_tokens(choice.get("logprobs"))
    else:
        reply.content += delta.get("content") or ""
        reply.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            index = part["index"]
            if index == len(reply.calls):
                reply.calls.append(ToolCall())
            elif not 0 <= index < len(reply.calls):
                reply.problems.append(f"a tool call has the index {index} after {len(reply.calls)} calls")
                continue
            call, function = reply.calls[index], part.get("function") or {}
            call.id = call.id or part.get("id") or ""
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""
        reply.tokens += _chat_tokens(choice.get("logprobs"))
    if (more := choice.get("token_ids")) is not None:
        reply.token_ids = [*(reply.token_ids or []), *more]
    reply.prompt_ids = reply.prompt_ids or choice.get("prompt_token_ids")
    if finish := choice.get("finish_reason"):
        if reply.finish is not None:
            reply.problems.append("the stream has two finish reasons")
        reply.finish = finish


def _check_end(reply: Reply) -> None:
    if reply.finish not in FINISH_REASONS:
        reply.problems.append(f"finish_reason is {reply.finish!r}, not one of {', '.join(FINISH_REASONS)}")
    if not reply.usage:
        reply.problems.append("usage is missing")
    for name in ("prompt_tokens", "completion_tokens"):
        if not isinstance(reply.usage.get(name), int | None):
            reply.problems.append(f"usage.{name} is {shorten(reply.usage[name], 80)}, not a number of tokens")
    if reply.finish == "tool_calls" and not reply.calls:
        reply.problems.append("finish_reason is 'tool_calls' without a tool call")


def _legacy_tokens(document: Mapping[str, Any] | None) -> list[Token]:
    if not document or not document.get("tokens"):
        return []
    # Some servers have no others.
    tops = document.get("top_logprobs") or [None] * len(document["tokens"])
    rows = zip(document["tokens"], document["token_logprobs"], tops, strict=True)
    return [Token(text, value, {**(top or {}), text: value}) for text, value, top in rows if value is not None]


def _chat_tokens(document: Mapping[str, Any] | None) -> list[Token]:
    found = []
    for row in (document or {}).get("content") or ():
        top = {each["token"]: each["logprob"] for each in row.get("top_logprobs") or ()}
        found.append(Token(row["token"], row["logprob"], {**top, row["token"]: row["logprob"]}))
    return found


def _prompt_tokens(rows: Sequence[Mapping[str, Any] | None] | None) -> list[Token | None]:
    """Return vLLM's `prompt_logprobs`, token ids as `token_id:N`; its first entry of a position is the token itself."""
    found: list[Token | None] = []
    for row in rows or ():
        if not row:
            found.append(None)
            continue
        top = {f"token_id:{number}": float(value["logprob"]) for number, value in row.items()}
        own = next(iter(top))
        found.append(Token(own, top[own], top))
    return found


@dataclass(frozen=True, slots=True)
class Divergence:
    """First position at which two outputs differ."""

    position: int
    margin: float
    """Larger margin of the two choices, in nats."""
    tokens: tuple[str, str]

    @property
    def tie(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.margin < TIE_NATS

    def __str__(self) -> str:
        one, other = self.tokens
        return f"token {self.position} is {other!r} instead of {one!r} (margin {self.margin:.2f} nats)"


def divergence(one: Sequence[Token], other: Sequence[Token]) -> Divergence | None:
    """Return the first difference of two greedy outputs with log-probabilities; None if they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.text != b.text:
            margins = [abs(each.logprob - each.top.get(text, -1e9)) for each, text in ((a, b.text), (b, a.text))]
            return Divergence(position, min(max(margins), 99.0), (a.text, b.text))
    if len(one) != len(other):
        shorter = min(len(one), len(other))
        texts = [each[shorter].text if len(each) > shorter else "end" for each in (one, other)]
        longer = max(one, other, key=len)[shorter]
        return Divergence(shorter, min(longer.margin(), 99.0), (texts[0], texts[1]))
    return None


# Requests of synchronous commands

_LARGEST_READ = 1 << 20
ERRORS = (aiohttp.ClientError, OSError)
"""Errors of a request: no connection, no response in time, or a broken response."""


class HttpResponse:
    """Response whose body arrives while it is read."""

    def __init__(self, runner: asyncio.Runner, response: aiohttp.ClientResponse) -> None:
        self._runner = runner
        self._content = response.content
        self.status = response.status

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the body as they arrive."""
        while data := self._runner.run(self._content.readany()):
            yield data

    def read(self) -> bytes:
        """Return the body, at most its first MiB."""
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
            if len(data) > _LARGEST_READ:
                break
        return bytes(data[:_LARGEST_READ])


@contextmanager
def open_url(
    method: str,
    url: str,
    *,
    token: str = "",
    body: Any = None,
    total_seconds: float | None = None,
    silence_seconds: float | None = None,
) -> Iterator[HttpResponse]:
    """Yield the response to a request; redirects are not followed.

    Args:
        method: HTTP method.
        url: address.
        token: bearer token; empty if none is required.
        body: JSON document to send.
        total_seconds: limit for the whole response.
        silence_seconds: limit for the next bytes.

    Raises:
        ERRORS: the request failed.
    """
    limits = aiohttp.ClientTimeout(total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def request() -> tuple[aiohttp.ClientSession, aiohttp.ClientResponse]:
        session = aiohttp.ClientSession(timeout=limits, headers=headers)
        try:
            return session, await session.request(method, url, json=body, allow_redirects=False)
        except BaseException:
            await session.close()
            raise

    with asyncio.Runner() as runner:
        session, response = runner.run(request())
        try:
            yield HttpResponse(runner, response)
        finally:
            response.close()
            runner.run(session.close())


def reason(error: Exception) -> str:
    """Return the cause of one of `ERRORS`."""
    if isinstance(error, aiohttp.ClientConnectorError) and (error.os_error.errno or 0) > 0:
        # asyncio's text has the address only.
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__
