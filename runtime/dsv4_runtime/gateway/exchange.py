"""One request and its response: identity, headers, progress, accounting and access log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Set

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.engine import token_auth
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.continuation import Transcript
from dsv4_runtime.gateway.errors import REQUEST_ID, Outcome, Refusal, RefusedError
from dsv4_runtime.gateway.http_client import BrokenMessageError, Fields, Headers, UpstreamResponse
from dsv4_runtime.gateway.kinds import Kinds, kinds_of
from dsv4_runtime.gateway.metrics import TRACE_HEADERS, GatewayMetrics, Trace
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.routing import EngineGeneration, Exposure, RoutedGroup

access = logging.getLogger("dsv4.gateway.access")

FINAL_EVENT_SECONDS = 2.0
"""Time to wait for a client to read before the final error event of its stream."""
_POLL_SECONDS = 0.02
_SETTLED_BYTES = 2**12
# Hop-by-hop headers (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
# Set by each side itself.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    REQUEST_ID.lower(),
    token_auth.HEADER.lower().encode(),
    token_auth.TURN_HEADER.lower().encode(),
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", REQUEST_ID.lower()}
_DIGEST_KEY = secrets.token_bytes(32)
_KEYS = frozenset({b"authorization", b"x-api-key"})
_TRACED = frozenset(name.encode() for name in TRACE_HEADERS)


def logged_path(request: Request) -> str:
    """Return the path as received, for a log line: the decoded path may contain line breaks."""
    return request.target.partition("?")[0][:100]


def key_headers(request: Request) -> Headers:
    """Return the headers with the client's API key, as received."""
    return [(name, value) for lowered, name, value in request.headers if lowered in _KEYS]


class Exchange:
    """State of one request, and its response to the client; sending raises `ClientGoneError` after a disconnect."""

    def __init__(self, request: Request, settings: GatewaySettings) -> None:
        self.request = request
        self.path = request.path
        self.began = time.monotonic()
        self.id = request.id
        self.body = bytearray()
        self._digest = hashlib.blake2b(key=_DIGEST_KEY, digest_size=16)
        self._digest.update(f"{request.method} {self.path}\0".encode(errors="surrogateescape"))
        self.transcript: Transcript | None = None
        self.is_stream = False
        self.complete = False
        """Whether the last event of a stream was delivered."""
        self.obstacle: str | None = None
        """Reason why a stream cannot be continued, known before it begins."""
        self.sent_upstream = False
        self.deaths = 0
        """Engines that ended during this attempt (`suspects` counts deaths of all equal requests)."""
        self.exposure: Exposure | None = None
        """Exposure of the engine that has the request now."""
        self.turn_refused = False
        """Whether the latest attempt was not admitted because of another request."""
        self.losses = 0
        """Connections that broke since the last progress."""
        self.names: tuple[str, ...] = ()
        """Names of the model in the request."""
        self.model: str | None = None
        """Model digest of the latest engine; None before the first attempt."""
        self.replays = self.continuations = 0
        self.held = 0.0
        self.trace: Trace | None = None
        self.outcome = Outcome.CANCELLED
        self._status = 0
        self._bytes = 0
        self._first: float | None = None
        self._transcribed = 0
        """Charged bytes of the transcript."""
        self._tail = 0
        """Charged bytes of an incomplete event."""
        self._settings = settings

    async def read(self) -> None:
        """Read the body; raise RefusedError if it is too long, does not fit into memory, or is malformed."""
        request, limit = self.request, self._settings.max_body_bytes
        declared = request.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise RefusedError(errors.too_large(limit))
        await request.send_continue()
        try:
            while part := await request.part():
                if len(self.body) + len(part) > limit:
                    raise RefusedError(errors.too_large(limit))
                self.body += part
                self._digest.update(part)
        except BrokenMessageError as error:
            raise RefusedError(request.refusal or errors.malformed(str(error))) from None

    @property
    def digest(self) -> bytes:
        """Return the keyed digest of method, path and body, valid in this process; complete after `read`."""
        return self._digest.digest()

    @functools.cached_property
    def kinds(self) -> Kinds:
        """Features of the request; complete after `read`."""
        return kinds_of(self.body)

    def timeout(self) -> float:
        """Return the time limit in seconds: the configured one, or a shorter one requested by the client.

        Raises:
            RefusedError: the client's value is invalid.
        """
        given = self.request.header(b"x-request-timeout")
        limit = self._settings.request_timeout_seconds
        if not given:
            return limit
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise RefusedError(errors.bad_timeout(given))
        return min(seconds, limit)

    def headers(self, own: Headers, *, keep_key: bool) -> Headers:
        """Return the request headers for vLLM: the client's, in their original spelling, and `own`."""
        dropped = _NOT_UPSTREAM if keep_key else _NOT_UPSTREAM | _KEYS
        if self.trace is not None:
            dropped, own = dropped | _TRACED, [*own, *self.trace.headers]
        return [*_passed(self.request.headers, dropped), (REQUEST_ID, self.id.encode()), *own]

    def answer_headers(self, upstream: UpstreamResponse) -> Headers:
        """Return the response headers for the client."""
        return [*_passed(upstream.headers, _NOT_DOWNSTREAM), (REQUEST_ID, self.id.encode())]

    def own_headers(self) -> Headers:
        """Return the headers of the gateway's own JSON responses."""
        return [(b"Content-Type", b"application/json"), (REQUEST_ID, self.id.encode())]

    def begin(self, status: int, headers: Headers) -> None:
        """Begin a response of unknown length; until a part follows, another head may replace it."""
        self._status = status
        self.request.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """Send a part of the response."""
        if self._first is None:
            self._first = time.monotonic()
            if self.is_stream:
                self.request.record_stream()
        self._bytes += len(data)
        await self.request.write(data)

    def charge_transcript(self) -> None:
        """Charge the growth of the transcript; if the account is full, the stream can no longer be continued."""
        if self.transcript is not None and self.transcript.size - self._transcribed >= _SETTLED_BYTES:
            if self.request.charge.take(self.transcript.size - self._transcribed):
                self._transcribed = self.transcript.size
            else:
                self.transcript.obstacle = "the gateway had no room for its tokens"

    def keep_tail(self, size: int) -> bool:
        """Charge `size` bytes of an incomplete event; return False if the account is full."""
        size = size if size > _SETTLED_BYTES * 16 else 0
        charge, more = self.request.charge, size - self._tail
        if more > 0 and not charge.take(more):
            return False
        if more < 0:
            charge.shrink(charge.size + more)
        self._tail = size
        return True

    async def send_whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Send a complete response."""
        self._status, self._bytes, self._first = status, len(body), time.monotonic()
        await self.request.send(status, headers, body)

    async def refuse(self, refusal: Refusal) -> None:
        """Send the response of the gateway to a request that has none."""
        self.outcome = refusal.outcome
        if refusal.code == "shutting_down":
            self.request.keep_alive = False
        await self.send_whole(refusal.status, refusal.headers(self.id), refusal.body)

    async def cut(self, refusal: Refusal) -> None:
        """End a started response: a stream with an error event, any other by closing the connection.

        The connection is also closed if the client does not read, because the event would never be delivered.
        """
        self.outcome = refusal.outcome
        if self.is_stream and await self._client_reads():
            await self.write(refusal.event(self.path))
            await self.request.end()
        else:
            self.request.abort()

    async def _client_reads(self) -> bool:
        """Return whether the client has read enough for a final event, at once or soon."""
        deadline = time.monotonic() + FINAL_EVENT_SECONDS
        while not self.request.is_read:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def event(self, name: str, group: RoutedGroup | None = None, generation: EngineGeneration | None = None) -> None:
        """Add an event to the span of the request."""
        if self.trace is None:
            return
        attributes: dict[str, str | int] = {}
        if group is not None and generation is not None:
            incarnation, number = generation.identity
            attributes = {"dsv4.group": group.index, "dsv4.incarnation": incarnation, "dsv4.generation": number}
        self.trace.event(name, attributes)

    def record(self, metrics: GatewayMetrics) -> None:
        """Count the request, write its access log line and end its span, without request or response content."""
        now = time.monotonic()
        metrics.requests.labels(self.outcome).inc()
        first = "-"
        if self._first is not None:
            metrics.first_byte.observe(self._first - self.began)
            first = f"{(self._first - self.began) * 1e3:.1f}"
        access.info(
            "%s %s %s %s status=%d outcome=%s bytes=%d first_ms=%s total_ms=%.1f held_s=%.2f replays=%d continued=%d",
            self.id,
            self.request.remote,
            self.request.method,
            logged_path(self.request),
            self._status if self.request.begun else 0,
            self.outcome,
            self._bytes,
            first,
            (now - self.began) * 1e3,
            self.held,
            self.replays,
            self.continuations,
        )
        if self.trace is not None:
            attributes: dict[str, str | int | float] = {
                "dsv4.held_seconds": self.held,
                "dsv4.replays": self.replays,
                "dsv4.continuations": self.continuations,
            }
            if self.request.begun:
                attributes["http.response.status_code"] = self._status
            if self._first is not None:
                attributes["dsv4.first_byte_seconds"] = self._first - self.began
            self.trace.end(self.outcome, attributes)


def _passed(headers: Fields, dropped: Set[bytes]) -> Headers:
    """Return the headers without `dropped` and without those named by `Connection`."""
    for lowered, _, value in headers:
        if lowered == b"connection":
            dropped = dropped | {named.strip().lower() for named in value.split(b",")}
    return [(name, value) for lowered, name, value in headers if lowered not in dropped]


class Deadline:
    """Time limit of a request, which can be shortened."""

    def __init__(self, seconds: float, message: str) -> None:
        self.scope = asyncio.timeout(seconds)
        self.refusal = errors.timed_out(message)

    def now(self, refusal: Refusal) -> None:
        """Expire now, for another reason."""
        self.refusal = refusal
        with contextlib.suppress(RuntimeError):  # It expired already.
            self.scope.reschedule(0.0)
