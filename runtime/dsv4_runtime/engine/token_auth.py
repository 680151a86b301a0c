"""Authentication at vLLM's own port: every request must have the incarnation's token.

The gateway checks the API keys of users, so the port behind it must not be reachable for others. vLLM's `--api-key`
guards `/v1` alone and uses the header of the users' keys; `TokenAuth` guards all paths, `/health` and `/metrics` too,
with a header of its own. vLLM loads it by `--middleware`.

It also enforces that a request which gateways try alone is alone (`Turns`).
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

TURN_HEADER = "X-DSV4-Turn"
"""In a request: `OWNER KIND`. In an answer with status 503: the `Refused` reason; the engine did not receive the
request."""
REQUEST_ID_HEADER = "X-Request-Id"
"""Header of every request of a gateway."""

_CLAIM_SECONDS = 2.0
"""Duration for which a refused exclusive request blocks new requests of others; each attempt renews it."""


class Kind(StrEnum):
    """Kinds of requests."""

    SHARED = "shared"
    """Admitted beside any other; also a request of a gateway without the header."""
    ALONE = "alone"
    """No request of another owner is admitted while it is open."""
    PROBE = "probe"
    """One harmless completion of a gateway, always admitted. Its answer proves that the engine dropped earlier aborted
    requests."""
    RELEASE = "release"
    """Ends the exclusion of the owner's open request. It has no other effect."""


_KINDS = frozenset(kind.value for kind in Kind)


class Refused(StrEnum):
    """Reasons for which a request is not admitted."""

    TAKEN = "taken"
    """An exclusive request of another owner is open or waiting."""
    BUSY = "busy"
    """Requests of others are open."""
    UNSETTLED = "unsettled"
    """Requests were aborted, and no later probe has proved that the engine dropped them."""


_REASONS = frozenset(reason.value for reason in Refused)


def refusal_reason(value: str) -> Refused:
    """Return the reason in the header of an answer; an unknown one reads as `TAKEN`."""
    return Refused(value) if value in _REASONS else Refused.TAKEN


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request."""

    owner: str
    """Empty: not known."""
    kind: Kind
    order: int


def turn_header(owner: str, kind: Kind) -> str:
    """Return the value of the header. `owner`: a random word of one gateway process, without blanks."""
    return f"{owner} {kind}"


def requested_turn(value: str | None, *, gateway: bool) -> tuple[str, Kind] | None:
    """Return owner and kind of a request with this header, if any; None: the request is not subject to turns.

    `gateway` is whether it has the header of a gateway's request (`REQUEST_ID_HEADER`).
    """
    owner, _, kind = (value or "").partition(" ")
    if owner and kind in _KINDS:
        return owner, Kind(kind)
    return ("", Kind.SHARED) if gateway else None


class Turns:
    """Open requests of one API process, and the exclusive one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._order = 0
        self._open: dict[Ticket, None] = {}
        self._aborted: dict[str, int] = {}
        """Owner to the number of its latest aborted request that may still be in the engine."""
        self._alone: Ticket | None = None
        self._claim = "", 0.0
        """Owner of a waiting exclusive request, and its expiry."""

    def enter(self, owner: str, kind: Kind) -> Ticket | Refused:
        """Admit a request, or return why it is not admitted."""
        self._order += 1
        ticket = Ticket(owner, kind, self._order)
        if kind is Kind.RELEASE:
            if self._alone is not None and self._alone.owner == owner:
                self._alone = None
            return ticket
        if kind is not Kind.PROBE:
            refused = self._refused(owner, kind)
            if refused is not None:
                return refused
        if kind is Kind.ALONE:
            self._alone, self._claim = ticket, ("", 0.0)
        self._open[ticket] = None
        return ticket

    def _refused(self, owner: str, kind: Kind) -> Refused | None:
        claimed, until = self._claim
        if self._alone is not None and (self._alone.owner != owner or kind is Kind.ALONE):
            return Refused.TAKEN
        if claimed not in ("", owner) and self._clock() < until:
            return Refused.TAKEN
        if kind is not Kind.ALONE:
            return None
        busy = any(other.owner != owner and other.kind is not Kind.PROBE for other in self._open)
        if not busy and not self._aborted:
            return None
        self._claim = owner, self._clock() + _CLAIM_SECONDS
        return Refused.BUSY if busy else Refused.UNSETTLED

    def leave(self, ticket: Ticket, *, complete: bool, proof: bool = False) -> None:
        """Close a request.

        If it is not `complete`, because its answer was not sent whole, the engine may still have it. `proof` is whether
        the engine computed the answer: a probe with status 200.
        """
        self._open.pop(ticket, None)
        if self._alone is ticket:
            self._alone = None
        if ticket.kind in (Kind.PROBE, Kind.RELEASE):
            if proof and ticket.kind is Kind.PROBE:
                self._aborted = {owner: last for owner, last in self._aborted.items() if last > ticket.order}
        elif not complete:
            self._order += 1
            self._aborted[ticket.owner] = self._order


HEADER = "X-DSV4-Token"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"  # noqa: S105
"""The environment variable of every process of a group that names the file with the token."""

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]

_NAME = HEADER.lower().encode()
REFUSED = b'{"error":{"message":"this port is the gateway\'s; ask the gateway","type":"unauthorized","code":401}}'
"""Body of the answer to a request without the token."""
_TURN, _ID = TURN_HEADER.lower().encode(), REQUEST_ID_HEADER.lower().encode()


def headers(token: str) -> Mapping[str, str]:
    """Return the headers of a request to vLLM."""
    return {HEADER: token}


class TokenAuth:
    """ASGI: answers 401 to every request without the token, and closes such WebSockets with 1008."""

    def __init__(self, app: App) -> None:
        """Read the token.

        Raises:
            OSError: the token cannot be read; vLLM does not start then.
            ValueError: the file is empty.
        """
        self._app = app
        self._token = Path(os.environ[TOKEN_VARIABLE]).read_bytes().strip()
        self._turns = Turns()
        if not self._token:
            raise ValueError(
                f"{TOKEN_VARIABLE}: {os.environ[TOKEN_VARIABLE]} is empty; it must have the incarnation's token"
            )

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request, one WebSocket, or the server's lifespan."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._knows(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _answer(send, 401, REFUSED)
        elif scope["type"] == "http" and (wanted := _wanted(scope)) is not None:
            await self._take_turn(wanted, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _take_turn(self, wanted: tuple[str, Kind], scope: AsgiMessage, receive: Receive, send: Send) -> None:
        ticket = self._turns.enter(*wanted)
        if isinstance(ticket, Refused):
            await _answer(send, 503, b"", ticket)
            return
        status, complete, gone = 0, False, False

        async def watched(message: AsgiMessage) -> None:
            nonlocal status, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = not gone

        async def heard() -> AsgiMessage:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not complete)
            return message

        try:
            if ticket.kind is Kind.RELEASE:
                complete = True
                await _answer(send, 200, b"{}")
            else:
                await self._app(scope, heard, watched)
        finally:
            self._turns.leave(ticket, complete=complete, proof=complete and status == 200)

    def _knows(self, scope: AsgiMessage) -> bool:
        return any(name == _NAME and hmac.compare_digest(value, self._token) for name, value in scope["headers"])


def _wanted(scope: AsgiMessage) -> tuple[str, Kind] | None:
    given = {name: value for name, value in scope["headers"] if name in (_TURN, _ID)}
    value = given[_TURN].decode("latin-1") if _TURN in given else None
    return requested_turn(value, gateway=_ID in given)


async def _answer(send: Send, status: int, body: bytes, refused: Refused | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused is not None:
        headers.append((_TURN, refused.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
