"""One request of a client, as its handler sees it."""

from __future__ import annotations

import email.utils
import http
import time
from collections.abc import Callable
from urllib.parse import unquote

import httptools

from dsv4_runtime.gateway import errors, http1
from dsv4_runtime.gateway.errors import Refusal
from dsv4_runtime.gateway.http1 import BODILESS, Fields, Headers

CONNECTION_BYTES = 2**14
"""Charged for a connection: its objects, and what was received and not parsed yet."""
REQUEST_BYTES = 2**14
"""Charged for a request beside its head and body: its objects, and the buffers of its answer."""
SLOW_CLIENT_BYTES = 2**19
"""Charged for an answer whose client does not read: both sides' buffers, full."""
GRACE_SECONDS = 5.0
"""Time that a body may take to arrive before it makes room for others."""


class Charge:
    """One owner's share of an account."""

    def __init__(self, account: Account) -> None:
        self.size = 0
        """Bytes."""
        self.account = account

    def take(self, size: int) -> bool:
        """Add `size` bytes; False, with nothing added, if there is no room for them."""
        account = self.account
        if account.used + size > account.limit and not account.make_room(size, self):
            return False
        account.used += size
        self.size += size
        return True

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self.account.used -= self.size - size
            self.size = size

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self.arrived()
        self.shrink(0)

    def arriving(self, evict: Callable[[], None]) -> None:
        """Note that this is of a body that arrives; `evict` has to release it when others need the room."""
        if self not in self.account.arriving:
            self.account.arriving[self] = time.monotonic(), evict

    def arrived(self) -> None:
        """Note that the body is complete, or will never be."""
        self.account.arriving.pop(self, None)


class Account:
    """Bytes in use, with a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.arriving: dict[Charge, tuple[float, Callable[[], None]]] = {}
        """Bodies that are not complete, the oldest first: when they began, and how to end them."""

    def make_room(self, size: int, charge: Charge) -> bool:
        """Return whether there is room for `size` bytes; ends bodies that have been arriving for long to make it.

        Who sends slowly holds room that others need: with every body at its own pace, a few clients that send nothing
        more could fill the account and keep all others out.
        """
        while self.used + size > self.limit:
            oldest, (since, evict) = next(iter(self.arriving.items()), (charge, (0.0, None)))
            if evict is None or oldest is charge or time.monotonic() - since < GRACE_SECONDS:
                return False
            oldest.arrived()
            evict()
        return True


_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class ClientConnection(http1.BaseConnection):
    """Connection that a request came on, as far as the request needs it."""

    @property
    def is_read(self) -> bool:
        """Tell whether the client takes what it is sent, as far as it is there."""
        raise NotImplementedError

    @property
    def ending(self) -> bool:
        """Tell whether the answer that is to begin is the last one."""
        raise NotImplementedError

    async def send(self, data: bytes, body: bytes | bytearray = b"") -> None:
        """Send bytes, and `body` after them; wait for a client that does not read.

        Raises:
            ClientGoneError: the client closed the connection.
        """
        raise NotImplementedError

    def refuse(self, refusal: Refusal) -> None:
        """Read no more of the request that is arriving; its answer is `refusal` if it has none yet."""
        raise NotImplementedError


class Request(http1.Message):
    """One request, and the way back to whoever asked it. An answer is one `send`, or `begin`, `write`s and `end`."""

    def __init__(self, connection: ClientConnection, remote: str, charge: Charge) -> None:
        super().__init__(connection)
        self._client = connection
        self.charge = charge
        """Memory that is kept for it: its head, its body, its answer."""
        self.refusal: Refusal | None = None
        """Reason why it is not answered by the handler, or why its body ended."""
        self.method = ""
        self.target = ""
        """Path and query as they came over the wire."""
        self.path = ""
        """Decoded."""
        self.remote = remote
        """The client's address."""
        self.upgrade = False
        """Whether another protocol is wanted."""
        self.keep_alive = False
        """Whether another request may follow on the connection; may be taken back until the answer begins."""
        self.chunks = True
        """Whether the client can read an answer whose length is not known: not before HTTP/1.1."""
        self.begun = False
        """Whether the client has anything of an answer."""
        self.ended = False
        self._unsent = b""
        self._chunked = self._bodiless = False

    def aim(self, target: bytes) -> None:
        """Set target and path to what the request line has."""
        self.target = (target if target[:1] in b"/*" else _relative(target)).decode("latin-1")
        path = self.target.partition("?")[0]
        self.path = unquote(path) if "%" in path else path

    async def go_on(self) -> None:
        """Tell a client that waits for it (`Expect: 100-continue`) to send the body."""
        if not self.complete and self.header(b"expect").lower() == "100-continue":
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Send a whole answer.

        Raises:
            ClientGoneError: the client closed the connection.
        """
        self._prepare(status, headers, len(body))
        self.begun = self.ended = True
        await self._client.send(self._unsent, b"" if self._bodiless else body)

    def begin(self, status: int, headers: Headers) -> None:
        """Prepare the head of an answer whose length is not known; it is sent with what comes next, in one packet.

        Until then another may take its place.
        """
        self._prepare(status, headers, None)

    async def write(self, data: bytes) -> None:
        """Send a part of the answer; wait for a client that does not read.

        Raises:
            ClientGoneError: the client closed the connection.
        """
        self.begun = True
        unsent, self._unsent = self._unsent, b""
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self._client.send(unsent if self._bodiless else unsent + data)

    async def end(self) -> None:
        """Send the end of it.

        Raises:
            ClientGoneError: the client closed the connection.
        """
        self.begun = self.ended = True
        await self._client.send(self._unsent + (b"0\r\n\r\n" if self._chunked else b""))

    @property
    def is_read(self) -> bool:
        """Tell whether the client takes what it is sent, as far as it is there."""
        return self._client.is_read

    def abort(self) -> None:
        """Break the connection: whoever reads knows that the answer is not whole."""
        self._client.abort()

    def put(self, data: bytes) -> None:
        """Append a piece of the body, or refuse the request if the gateway has no room for it."""
        if self.charge.take(len(data)):
            super().put(data)
        else:
            self._client.refuse(errors.no_memory())

    def finish(self) -> None:
        """Note that the body is complete."""
        self.charge.arrived()
        super().finish()

    def refuse(self, refusal: Refusal) -> None:
        """End the body here: nothing that follows on the connection can be understood, or is wanted."""
        self.refusal, self.keep_alive = refusal, False
        self.drop()
        self.charge.release()
        self.fail(refusal.message)

    def release(self) -> None:
        """Forget everything that was kept for it."""
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
        # What is left of the request would be taken for the next one. Without a length, the end says what the end is.
        self.keep_alive &= self.complete and (length is not None or self._chunked or self._bodiless)
        self.keep_alive &= not self._client.ending
        if not self.keep_alive:
            framing.append((b"Connection", b"close"))
        elif not self.chunks:
            framing.append((b"Connection", b"keep-alive"))
        if not any(name.lower() == b"date" for name, _ in headers):
            framing.append((b"Date", email.utils.formatdate(usegmt=True).encode()))
        first = b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))
        self._unsent = http1.encode_head(first, [*headers, *framing])


def wrong_head(version: str, headers: Fields, size: int, limit: int) -> Refusal | None:
    """Return what is wrong with a head of `size` bytes that the parser lets pass; None: nothing."""
    if size > limit:
        return errors.head_too_large(limit)
    if version not in ("1.0", "1.1"):
        return errors.malformed(f"its version is HTTP/{version}")
    names = [name for name, _, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return errors.malformed(f"it has {hosts} Host headers and not one (RFC 9112, 3.2)")
    if version == "1.0" and b"transfer-encoding" in names:
        return errors.malformed("HTTP/1.0 has no Transfer-Encoding (RFC 9112, 6.1)")
    return None


def _relative(target: bytes) -> bytes:
    """Return path and query of a target that has scheme and host (RFC 9112, 3.2.2)."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
