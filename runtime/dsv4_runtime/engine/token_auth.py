"""Authentication at vLLM's own port: every request has to show the incarnation's token.

The gateway asks users for their keys, so nobody else may reach what is behind it. vLLM's `--api-key` guards `/v1`
alone and takes the header that users' keys come in; `TokenAuth` guards everything, `/health` and `/metrics` too, and
has a header of its own. vLLM loads it by `--middleware`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

HEADER = "X-DSV4-Token"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"  # noqa: S105
"""The environment variable of every process of a group that names the file with the token."""

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]

_NAME = HEADER.lower().encode()
_REFUSED = b'{"error":{"message":"this port is the gateway\'s; ask the gateway","type":"unauthorized","code":401}}'


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
        if not self._token:
            raise ValueError(
                f"{TOKEN_VARIABLE}: {os.environ[TOKEN_VARIABLE]} is empty; it must have the incarnation's token"
            )

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Handle one request, one WebSocket, or the server's own start and end."""
        if scope["type"] not in ("http", "websocket") or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            told = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": told})
            await send({"type": "http.response.body", "body": _REFUSED})

    def _knows(self, scope: AsgiMessage) -> bool:
        return any(name == _NAME and hmac.compare_digest(value, self._token) for name, value in scope["headers"])
