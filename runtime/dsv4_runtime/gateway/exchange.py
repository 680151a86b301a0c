"""One request and its answer, from the first byte to the last."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Set

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.engine import token_auth, turns
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.continuation import Transcript
from dsv4_runtime.gateway.errors import Outcome, Refusal, RefusedError
from dsv4_runtime.gateway.http1 import BrokenMessageError, Fields, Headers
from dsv4_runtime.gateway.http_client import UpstreamResponse
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.routing import Exposure

access = logging.getLogger("dsv4.gateway.access")

FINAL_EVENT_SECONDS = 2.0
"""Time for which the gateway waits for a client to make room for the error that ends its answer."""
_POLL_SECONDS = 0.02
_SETTLED_BYTES = 2**12
REQUEST_ID = "X-Request-Id"
_REQUEST_ID = REQUEST_ID.encode()
# RFC 9110, 7.6.1: about one connection, not about the message.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
# What each side writes itself.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    _REQUEST_ID.lower(),
    token_auth.HEADER.lower().encode(),
    turns.HEADER.lower().encode(),
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", _REQUEST_ID.lower()}
_DIGEST_KEY = secrets.token_bytes(32)
_KEYS = frozenset({b"authorization", b"x-api-key"})
_SAFE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Exchange:
    """State of one request as the gateway knows it, and the client's side of it."""

    def __init__(self, request: Request, settings: GatewaySettings) -> None:
        self.request = request
        self.path = request.path
        self.began = time.monotonic()
        given = request.header(b"x-request-id")
        self.id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)
        self.body = bytearray()
        self._digest = hashlib.blake2b(key=_DIGEST_KEY, digest_size=16)
        self._digest.update(f"{request.method} {self.path}\0".encode(errors="surrogateescape"))
        self.transcript: Transcript | None = None
        self.is_stream = False
        self.complete = False
        """Whether the last event of a stream was delivered."""
        self.obstacle: str | None = None
        """Reason why a stream could not be continued, known before it begins."""
        self.sent_upstream = False
        self.deaths = 0
        """Engines that died under this attempt at the request (`suspects` has those under the same request)."""
        self.exposure: Exposure | None = None
        """Of the engine that has it now."""
        self.turned_away = False
        """Whether its latest attempt was not admitted because of another request."""
        self.losses = 0
        """Connections that broke under the request since it last made progress."""
        self.model: str | None = None
        """Of the engine that had the request last; None: none had it."""
        self.replays = self.continuations = 0
        self.held = 0.0
        self.outcome = Outcome.CANCELLED
        self._status = 0
        self._bytes = 0
        self._first: float | None = None
        self._transcribed = 0
        """Bytes of the transcript that are charged."""
        self._tail = 0
        """Bytes of an incomplete event that are charged."""
        self._settings = settings

    async def read(self) -> None:
        """Read the body.

        Raises:
            RefusedError: it is too long, there is no room for it, or it is no HTTP.
        """
        request, limit = self.request, self._settings.max_body_bytes
        declared = request.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise RefusedError(errors.too_large(limit))
        await request.go_on()
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
        """Return what identifies method, path and body, within this process. Complete after `read`."""
        return self._digest.digest()

    def timeout(self) -> float:
        """Return the seconds that the request may take: the limit, or less if the client says so.

        Raises:
            RefusedError: what the client says is no time.
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
        """Return what goes to vLLM: the client's, spelled as they came, and the gateway's `own`."""
        dropped = _NOT_UPSTREAM if keep_key else _NOT_UPSTREAM | _KEYS
        return [*_passed(self.request.headers, dropped), (_REQUEST_ID, self.id.encode()), *own]

    def answer_headers(self, upstream: UpstreamResponse) -> Headers:
        """Return what goes to the client, of what vLLM gave."""
        return [*_passed(upstream.headers, _NOT_DOWNSTREAM), (_REQUEST_ID, self.id.encode())]

    def own_headers(self) -> Headers:
        """Return the headers of JSON of the gateway's own."""
        return [(b"Content-Type", b"application/json"), (_REQUEST_ID, self.id.encode())]

    @property
    def begun(self) -> bool:
        """Tell whether the client has anything of an answer."""
        return self.request.begun

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose length is not known yet; until something follows, another may take its place."""
        self._status = status
        self.request.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """Send a part of it at once.

        Raises:
            ClientGoneError: nobody is left to read it.
        """
        if self._first is None:
            self._first = time.monotonic()
        self._bytes += len(data)
        await self.request.write(data)

    def settle(self) -> None:
        """Charge what the transcript has grown by; without room for it the stream is no longer continued."""
        if self.transcript is not None and self.transcript.size - self._transcribed >= _SETTLED_BYTES:
            if self.request.charge.take(self.transcript.size - self._transcribed):
                self._transcribed = self.transcript.size
            else:
                self.transcript.obstacle = "the gateway had no room for its tokens"

    def keep_tail(self, size: int) -> bool:
        """Charge for the `size` bytes of an event that is not complete; whether there is room for them."""
        size = size if size > _SETTLED_BYTES * 16 else 0
        charge, more = self.request.charge, size - self._tail
        if more > 0 and not charge.take(more):
            return False
        if more < 0:
            charge.shrink(charge.size + more)
        self._tail = size
        return True

    async def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Send a complete answer.

        Raises:
            ClientGoneError: nobody is left to read it.
        """
        self._status, self._bytes, self._first = status, len(body), time.monotonic()
        await self.request.send(status, headers, body)

    async def refuse(self, refusal: Refusal) -> None:
        """Send the gateway's own answer to a request that has none yet.

        Raises:
            ClientGoneError: nobody is left to read it.
        """
        headers = self.own_headers()
        if refusal.retry:
            headers.append((b"Retry-After", b"%d" % errors.RETRY_AFTER_SECONDS))
        if refusal.status == 401:
            headers.append((b"WWW-Authenticate", b"Bearer"))
        self.outcome = refusal.outcome
        if refusal.code == "shutting_down":
            self.request.keep_alive = False
        await self.whole(refusal.status, headers, refusal.body())

    async def cut(self, refusal: Refusal) -> None:
        """End an answer that has begun: a stream with an error event, anything else with a broken connection.

        The connection of a client that does not read what it has been sent is broken too: it would never be done.
        """
        self.outcome = refusal.outcome
        if self.is_stream and await self._reads():
            await self.write(refusal.event(self.path))
            await self.request.end()
        else:
            self.request.abort()

    async def _reads(self) -> bool:
        """Tell whether there is room for a last event, at once or soon."""
        deadline = time.monotonic() + FINAL_EVENT_SECONDS
        while not self.request.is_read:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def account(self, metrics: GatewayMetrics) -> None:
        """Count it and write its line in the access log; neither has anything of what was asked or answered."""
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
            self.request.target.partition("?")[0][:100],  # as it was sent: decoded, it could have line breaks
            self._status if self.begun else 0,
            self.outcome,
            self._bytes,
            first,
            (now - self.began) * 1e3,
            self.held,
            self.replays,
            self.continuations,
        )


def _passed(headers: Fields, dropped: Set[bytes]) -> Headers:
    """Return the headers but the dropped ones, and those that `Connection` says are about this connection only."""
    for lowered, _, value in headers:
        if lowered == b"connection":
            dropped = dropped | {named.strip().lower() for named in value.split(b",")}
    return [(name, value) for lowered, name, value in headers if lowered not in dropped]


class Deadline:
    """The end of a request's time; it can be drawn nearer."""

    def __init__(self, seconds: float, message: str) -> None:
        self.scope = asyncio.timeout(seconds)
        self.refusal = errors.timed_out(message)

    def now(self, refusal: Refusal) -> None:
        """End it at once, for another reason."""
        self.refusal = refusal
        with contextlib.suppress(RuntimeError):  # It is over already.
            self.scope.reschedule(0.0)
