"""One request and its answer, from the first byte to the last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import time
from collections.abc import Iterable, Set
from typing import Any

from aiohttp import ClientResponse, web
from multidict import CIMultiDict, CIMultiDictProxy

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.continuation import Transcript
from dsv4_runtime.gateway.errors import ClientGoneError, Outcome, Refusal, RefusedError
from dsv4_runtime.gateway.metrics import Metrics

_access = logging.getLogger("dsv4.gateway.access")

LAST_WORDS_SECONDS = 2.0
"""How long the gateway waits for a client to make room for the error that ends its answer."""
_LOOK_SECONDS = 0.02
REQUEST_ID = "X-Request-Id"
# RFC 9110, 7.6.1: about one connection, not about the message.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
# The client library writes these itself.
_OWN = frozenset({"host", "content-length", "expect"})
_SAFE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Exchange:
    """What the gateway knows of one request, and the client's side of it."""

    def __init__(self, request: web.BaseRequest, settings: GatewaySettings) -> None:
        self.request = request
        self.path = request.path
        self.began = time.monotonic()
        given = request.headers.get(REQUEST_ID, "")
        self.id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)
        self.body = b""
        self.parsed: dict[str, Any] | None = None
        """The body, if it is a JSON object."""
        self.transcript: Transcript | None = None
        self.response: web.StreamResponse | None = None
        """The client's; None until something was sent."""
        self.is_stream = False
        self.complete = False
        """Whether the last event of a stream was delivered."""
        self.obstacle: str | None = None
        """Why a stream could not be continued, known before it begins."""
        self.sent_upstream = False
        self.deaths = 0
        """Engines that died under the request since it last made progress."""
        self.losses = 0
        """The same, with connections that broke while the engine lived."""
        self.replays = self.continuations = 0
        self.held = 0.0
        self.outcome = Outcome.CANCELLED
        self._status = 0
        self._bytes = 0
        self._first: float | None = None
        self._settings = settings

    async def read(self) -> None:
        """Read the body.

        Raises:
            RefusedError: it is too long.
        """
        request, limit = self.request, self._settings.max_body_bytes
        if (request.content_length or 0) > limit:
            raise RefusedError(errors.too_large(limit))
        if not request.can_read_body:
            return
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts, size = [], 0
        async for part in request.content.iter_any():
            size += len(part)
            if size > limit:
                raise RefusedError(errors.too_large(limit))
            parts.append(part)
        self.body = b"".join(parts)
        try:
            parsed = json.loads(self.body.decode())
        except (ValueError, RecursionError):
            # vLLM says what is wrong with it.
            return
        self.parsed = parsed if isinstance(parsed, dict) else None

    def timeout(self) -> float:
        """Seconds that the request may take: the limit, or less if the client says so.

        Raises:
            RefusedError: what the client says is no time.
        """
        given = self.request.headers.get("X-Request-Timeout")
        limit = self._settings.request_timeout_seconds
        if given is None:
            return limit
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise RefusedError(errors.bad_timeout(given))
        return min(seconds, limit)

    def headers(self, *, keep_key: bool) -> CIMultiDict[str]:
        """What goes to vLLM."""
        dropped = _HOP_BY_HOP | _OWN | _named(self.request.headers)
        if not keep_key:
            dropped |= {"authorization", "x-api-key"}
        return self._passed(self.request.raw_headers, dropped)

    def answer_headers(self, upstream: ClientResponse) -> CIMultiDict[str]:
        """What goes to the client, of what vLLM gave."""
        return self._passed(upstream.raw_headers, _HOP_BY_HOP | {"content-length"} | _named(upstream.headers))

    def _passed(self, raw: Iterable[tuple[bytes, bytes]], dropped: Set[str]) -> CIMultiDict[str]:
        """Headers but the dropped ones, spelled as they came; the parsed ones have the library's spelling."""
        kept = CIMultiDict[str]()
        for name, value in raw:
            text = name.decode()
            if text.lower() not in dropped:
                kept.add(text, value.decode("utf-8", "surrogateescape"))
        kept[REQUEST_ID] = self.id
        return kept

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Send the head of an answer whose length is not known yet."""
        self._status, self.response = status, web.StreamResponse(status=status, headers=headers)
        if self.request.version >= (1, 1):
            self.response.enable_chunked_encoding()
        try:
            await self.response.prepare(self.request)
        except ConnectionError as error:
            raise ClientGoneError from error

    async def write(self, data: bytes) -> None:
        """Send a part of it at once."""
        response = self._open()
        if self._first is None:
            self._first = time.monotonic()
        self._bytes += len(data)
        try:
            await response.write(data)
        except ConnectionError as error:
            raise ClientGoneError from error

    async def end(self) -> web.StreamResponse:
        """Send the end of it."""
        response = self._open()
        try:
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGoneError from error
        return response

    def _open(self) -> web.StreamResponse:
        if self.response is None:
            raise RuntimeError("no answer was begun")
        return self.response

    def whole(self, status: int, headers: CIMultiDict[str], body: bytes) -> web.Response:
        """A complete answer; the server sends it."""
        self._status, self._bytes, self._first = status, len(body), time.monotonic()
        return web.Response(status=status, headers=headers, body=body)

    def refuse(self, refusal: Refusal) -> web.Response:
        """The gateway's own answer to a request that has none yet."""
        headers = CIMultiDict({"Content-Type": "application/json", REQUEST_ID: self.id})
        if refusal.retry:
            headers["Retry-After"] = str(errors.RETRY_AFTER_SECONDS)
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.outcome = refusal.outcome
        answer = self.whole(refusal.status, headers, refusal.body())
        if not self.request.content.at_eof() or refusal.code == "shutting_down":
            # What is left of the body would be taken for the next request.
            answer.force_close()
        return answer

    async def cut(self, refusal: Refusal) -> None:
        """End an answer that has begun: a stream with an error event, anything else with a broken connection.

        The connection of a client that does not read what it has been sent is broken too: it would never be done.
        """
        self.outcome = refusal.outcome
        if self.is_stream and await self._reads():
            await self.write(refusal.event(self.path))
            await self.end()
        elif self.request.transport is not None:
            self.request.transport.abort()

    async def _reads(self) -> bool:
        """Whether there is room for a last event, at once or soon."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while (transport := self.request.transport) is not None:
            low, _ = transport.get_write_buffer_limits()
            if transport.get_write_buffer_size() <= low:
                break
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    def account(self, metrics: Metrics) -> None:
        """Count it and write its line in the access log; neither has anything of what was asked or answered."""
        now = time.monotonic()
        metrics.requests.labels(self.outcome).inc()
        first = "-"
        if self._first is not None:
            metrics.first_byte.observe(self._first - self.began)
            first = f"{(self._first - self.began) * 1e3:.1f}"
        _access.info(
            "%s %s %s %s status=%d outcome=%s bytes=%d first_ms=%s total_ms=%.1f held_s=%.2f replays=%d continued=%d",
            self.id,
            self.request.remote,
            self.request.method,
            self.request.rel_url.raw_path[:100],  # as it was sent: decoded, it could have line breaks
            self._status,
            self.outcome,
            self._bytes,
            first,
            (now - self.began) * 1e3,
            self.held,
            self.replays,
            self.continuations,
        )


def _named(headers: CIMultiDictProxy[str]) -> set[str]:
    """Headers that `Connection` declares to be about this connection only."""
    return {name.strip().lower() for name in headers.get("Connection", "").split(",")}


class Deadline:
    """The end of a request's time; it can be drawn nearer."""

    def __init__(self, seconds: float, message: str) -> None:
        self.scope = asyncio.timeout(seconds)
        self.refusal = errors.too_late(message)

    def now(self, refusal: Refusal) -> None:
        """It is over, for another reason."""
        self.refusal = refusal
        with contextlib.suppress(RuntimeError):  # It is over already.
            self.scope.reschedule(0.0)
