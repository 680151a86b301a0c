"""One client request, and the accounting of the memory that the gateway keeps for clients.

Everything that a client can make the gateway store is charged to one account with a limit: connections, heads, bodies
(arriving, waiting, sent), buffered responses, and the state for continuing a stream. A request that does not fit is
refused, so the memory of the process is bounded by the account plus the program itself.
"""

from __future__ import annotations

import email.utils
import functools
import http
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from urllib.parse import unquote

import httptools

from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import Refusal
from dsv4_runtime.gateway.http_client import BODILESS, BaseConnection, Fields, Headers, Message, encode_head

MAX_HEAD_BYTES = 2**16
"""Limit for a request line with headers, and for data between two parts of a body (chunk sizes, trailers)."""
MAX_HEADERS = 100
"""Limit of headers, Envoy's default: each takes 200 bytes beside its text."""
CONNECTION_BYTES = 2**14
"""Charge for a connection: its objects, and received bytes that are not parsed yet."""
REQUEST_BYTES = 2**14
"""Charge for a request besides its head and body: its objects, and response buffers."""
SLOW_CLIENT_BYTES = 2**19
"""Charge for a response that the client does not read: the full buffers of both sides."""
GRACE_SECONDS = 5.0
"""Time after which an incomplete body may be evicted to free memory."""


class Charge:
    """Share of one owner in an account."""

    def __init__(self, account: Account) -> None:
        self.size = 0
        """Bytes."""
        self.account = account

    def take(self, size: int) -> bool:
        """Add `size` bytes; return False, with nothing added, if the account is full."""
        account = self.account
        if account.used + size > account.limit and not account.make_room(size, self):
            return False
        account.used += size
        self.size += size
        return True

    def shrink(self, size: int) -> None:
        """Reduce the charge to `size` bytes."""
        if size < self.size:
            self.account.used -= self.size - size
            self.size = size

    def release(self) -> None:
        """Release all bytes. Idempotent."""
        self.arrived()
        self.shrink(0)

    def arriving(self, evict: Callable[[], None]) -> None:
        """Register an incomplete body; `evict` must release the charge when the memory is needed elsewhere."""
        if self not in self.account.arriving:
            self.account.arriving[self] = time.monotonic(), evict

    def arrived(self) -> None:
        """Unregister the body: it is complete or was abandoned."""
        self.account.arriving.pop(self, None)


class Account:
    """Bytes in use, with a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.arriving: dict[Charge, tuple[float, Callable[[], None]]] = {}
        """Incomplete bodies, oldest first: start time and eviction callback."""

    def make_room(self, size: int, charge: Charge) -> bool:
        """Return whether `size` bytes fit, evicting old incomplete bodies if necessary.

        Without eviction, a few clients that stop sending in the middle of a body could fill the account and block all
        others.
        """
        while self.used + size > self.limit:
            oldest, (since, evict) = next(iter(self.arriving.items()), (charge, (0.0, None)))
            if evict is None or oldest is charge or time.monotonic() - since < GRACE_SECONDS:
                return False
            oldest.arrived()
            evict()
        return True


_SAFE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class ClientConnection(BaseConnection, ABC):
    """Interface of a client connection for its requests."""

    @property
    @abstractmethod
    def is_read(self) -> bool:
        """Return whether the client has read the bytes sent so far."""

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Return whether the next response is the last one of the connection."""

    @abstractmethod
    async def send(self, data: bytes, body: bytes | bytearray = b"") -> None:
        """Send `data` and `body`; wait while the client does not read, raise ClientGoneError after a disconnect."""

    @abstractmethod
    def refuse(self, refusal: Refusal) -> None:
        """Stop reading the arriving request; respond with `refusal` unless a response was started."""

    @abstractmethod
    def record(self, request: Request, body: bytearray, *, repeatable: bool) -> None:
        """Record a complete request before it is handled, for the process that continues after this one's death."""

    @abstractmethod
    def record_stream(self, *, chunked: bool) -> None:
        """Record that the response is a stream of events, before its first byte."""


class Request(Message):
    """One request and its response: a single `send`, or `begin`, several `write` and `end`.

    All methods that send raise `ClientGoneError` after the client closed the connection.
    """

    def __init__(self, connection: ClientConnection, remote: str, charge: Charge) -> None:
        super().__init__(connection)
        self._client = connection
        self.charge = charge
        """Charge for head, body and response."""
        self.refusal: Refusal | None = None
        """Reason why the handler does not answer the request, or why its body was cut off."""
        self.method = ""
        self.target = ""
        """Path and query as received."""
        self.path = ""
        """Decoded path."""
        self.remote = remote
        """Client address."""
        self.upgrade = False
        """Whether the client requests another protocol."""
        self.keep_alive = False
        """Whether another request may follow on the connection; may be cleared until the response begins."""
        self.chunks = True
        """Whether the client accepts chunked responses: HTTP/1.1 and later."""
        self.begun = False
        """Whether any part of a response was sent."""
        self.ended = False
        self._unsent = b""
        self._chunked = self._bodiless = False

    @functools.cached_property
    def id(self) -> str:
        """The client's `X-Request-Id`, or a random one if it has none or one that does not fit into a log line."""
        given = self.header(b"x-request-id")
        return given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)

    def set_target(self, target: bytes) -> None:
        """Set target and path from the request line."""
        self.target = (target if target[:1] in b"/*" else _relative(target)).decode("latin-1")
        path = self.target.partition("?")[0]
        self.path = unquote(path) if "%" in path else path

    async def send_continue(self) -> None:
        """Send `100 Continue` to a client that waits for it; HTTP/1.0 has no interim responses (RFC 9110, 10.1.1)."""
        if self.chunks and not self.complete and self.header(b"expect").lower() == "100-continue":
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Send a complete response."""
        self._prepare(status, headers, len(body))
        self.begun = self.ended = True
        await self._client.send(self._unsent, b"" if self._bodiless else body)

    def begin(self, status: int, headers: Headers) -> None:
        """Prepare the head of a response of unknown length; it is sent in one packet with the first part.

        Until then, another head may replace it.
        """
        self._prepare(status, headers, None)

    async def write(self, data: bytes) -> None:
        """Send a part of the response; wait while the client does not read."""
        self.begun = True
        unsent, self._unsent = self._unsent, b""
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self._client.send(unsent if self._bodiless else unsent + data)

    async def end(self) -> None:
        """Complete the response."""
        self.begun = self.ended = True
        await self._client.send(self._unsent + (b"0\r\n\r\n" if self._chunked else b""))

    def record(self, body: bytearray, *, repeatable: bool) -> None:
        """Record the complete request before it is handled, for the process that continues after this one's death."""
        self._client.record(self, body, repeatable=repeatable)

    def record_stream(self) -> None:
        """Record that the response is a stream of events, before its first byte."""
        self._client.record_stream(chunked=self._chunked)

    @property
    def is_read(self) -> bool:
        """Return whether the client has read the bytes sent so far."""
        return self._client.is_read

    def abort(self) -> None:
        """Abort the connection, which marks the response as incomplete."""
        self._client.abort()

    def put(self, data: bytes) -> None:
        """Append a part of the body, or refuse the request if the account is full."""
        if self.charge.take(len(data)):
            super().put(data)
        else:
            self._client.refuse(errors.NO_MEMORY)

    def finish(self) -> None:
        """Mark the body as complete."""
        self.charge.arrived()
        super().finish()

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the request and discard its body; the rest of the connection is not parsed."""
        self.refusal, self.keep_alive = refusal, False
        self.drop()
        self.charge.release()
        self.fail(refusal.message)

    def release(self) -> None:
        """Discard all data kept for the request."""
        self.drop()
        self.headers = []
        self._unsent = b""
        self.charge.release()

    def _prepare(self, status: int, headers: Headers, length: int | None) -> None:
        if self.begun:
            raise RuntimeError("the answer has begun already")
        self._chunked = False
        self._bodiless = self.method == "HEAD" or status in BODILESS
        framing: Headers = []
        if length is not None and not self._bodiless:
            framing.append((b"Content-Length", b"%d" % length))
        elif length is None and self.chunks and not self._bodiless:
            self._chunked = True
            framing.append((b"Transfer-Encoding", b"chunked"))
        # An unread rest of the body would be parsed as the next request. Without a length, only closing ends the
        # response.
        self.keep_alive &= self.complete and (length is not None or self._chunked or self._bodiless)
        self.keep_alive &= not self._client.ending
        if not self.keep_alive:
            framing.append((b"Connection", b"close"))
        elif not self.chunks:
            framing.append((b"Connection", b"keep-alive"))
        if not any(name.lower() == b"date" for name, _ in headers):
            framing.append((b"Date", _date(int(time.time()))))
        first = b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))
        self._unsent = encode_head(first, [*headers, *framing])


@functools.lru_cache(maxsize=1)
def _date(now: int) -> bytes:
    return email.utils.formatdate(now, usegmt=True).encode()


def wrong_head(version: str, headers: Fields, size: int) -> Refusal | None:
    """Return the refusal for an invalid head of `size` bytes that the parser accepts, else None."""
    if size > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        return errors.head_too_large(MAX_HEAD_BYTES, MAX_HEADERS)
    if version not in ("1.0", "1.1"):
        return errors.malformed(f"its version is HTTP/{version}")
    names = [name for name, _, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return errors.malformed(f"it has {hosts} Host headers and not one (RFC 9112, 3.2)")
    codings = [value for name, _, value in headers if name == b"transfer-encoding"]
    if version == "1.0" and codings:
        return errors.malformed("HTTP/1.0 has no Transfer-Encoding (RFC 9112, 6.1)")
    if codings and b",".join(codings).lower() != b"chunked":
        return errors.malformed("its Transfer-Encoding is not chunked alone; the gateway decodes no other coding")
    return None


def _relative(target: bytes) -> bytes:
    """Return path and query of an absolute target (RFC 9112, 3.2.2)."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
