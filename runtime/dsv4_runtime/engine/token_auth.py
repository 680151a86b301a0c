"""Authentication at vLLM's own port: every request has to show the incarnation's token.

The gateway asks users for their keys, so nobody else may reach what is behind it. vLLM's `--api-key` guards `/v1`
alone and takes the header that users' keys come in; `TokenAuth` guards everything, `/health` and `/metrics` too, and
has a header of its own. vLLM loads it by `--middleware`.

It also enforces that a request which gateways try alone is alone (`engine.turns`).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dsv4_runtime.engine import turns

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
_TURN, _ID = turns.HEADER.lower().encode(), turns.OWN_HEADER.lower().encode()


def headers(token: str) -> Mapping[str, str]:
    """Return what a request to vLLM has to carry."""
    return {HEADER: token}


class TokenAuth:
    """ASGI: answers 401 to every request without the token, and closes such WebSockets with 1008."""

    def __init__(self, app: App) -> None:
        """Read the token.

        Raises:
            OSError: the token cannot be read; vLLM does not start then.
            ValueError: there is none in the file.
        """
        self._app = app
        self._token = Path(os.environ[TOKEN_VARIABLE]).read_bytes().strip()
        self._turns = turns.Turns()
        if not self._token:
            raise ValueError(
                f"{TOKEN_VARIABLE}: {os.environ[TOKEN_VARIABLE]} is empty; it must have the incarnation's token"
            )

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request, one WebSocket, or the server's own start and end."""
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

    async def _take_turn(
        self, wanted: tuple[str, turns.Kind], scope: AsgiMessage, receive: Receive, send: Send
    ) -> None:
        ticket = self._turns.enter(*wanted)
        if isinstance(ticket, turns.Refused):
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
            if ticket.kind is turns.Kind.RELEASE:
                complete = True
                await _answer(send, 200, b"{}")
            else:
                await self._app(scope, heard, watched)
        finally:
            self._turns.leave(ticket, complete=complete, proof=complete and status == 200)

    def _knows(self, scope: AsgiMessage) -> bool:
        return any(name == _NAME and hmac.compare_digest(value, self._token) for name, value in scope["headers"])


def _wanted(scope: AsgiMessage) -> tuple[str, turns.Kind] | None:
    given = {name: value for name, value in scope["headers"] if name in (_TURN, _ID)}
    value = given[_TURN].decode("latin-1") if _TURN in given else None
    return turns.wanted(value, gateway=_ID in given)


async def _answer(send: Send, status: int, body: bytes, refused: turns.Refused | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused is not None:
        headers.append((_TURN, refused.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
