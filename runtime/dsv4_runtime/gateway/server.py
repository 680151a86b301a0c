"""The gateway's server: its own few paths, everything else to the proxy, and a good end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time

import aiohttp

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.account import Account
from dsv4_runtime.gateway.downstream import HttpServer
from dsv4_runtime.gateway.engine import Availability
from dsv4_runtime.gateway.exchange import LAST_WORDS_SECONDS, Exchange, access
from dsv4_runtime.gateway.groups import Groups
from dsv4_runtime.gateway.http1 import Headers
from dsv4_runtime.gateway.keys import Keys
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.proxy import Proxy
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.route import RouteFile

_log = logging.getLogger("dsv4.gateway")
_ENDING_SECONDS = 0.5
MAX_CONNECTIONS = 4096
_TEXT = [(b"Content-Type", b"text/plain; charset=utf-8")]
_METRICS = [(b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8")]
_JSON = [(b"Content-Type", b"application/json")]
_SCRAPE = aiohttp.ClientTimeout(total=5.0)
_ANSWER_SECONDS = 10.0
"""Time that a client may take to read what the gateway itself says."""


class Gateway:
    """One gateway, from its first connection to its last."""

    def __init__(
        self,
        settings: GatewaySettings,
        routes: RouteFile,
        keys: Keys | None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        number: int | None = None,
    ) -> None:
        self._max_connections = max_connections
        self._account = Account(settings.max_client_bytes)
        self._settings = settings
        self._metrics = GatewayMetrics(number)
        self._groups = Groups(routes)
        self._metrics.observe_groups(self._groups)
        self._proxy = Proxy(settings, self._groups, self._metrics, keys)
        self._metrics.observe_requests(lambda: self._proxy.active)
        self._metrics.observe_clients(lambda: self._account.used)
        self._keys = keys
        self._draining = False
        self._began = int(time.time())
        self._scraper = aiohttp.ClientSession(timeout=_SCRAPE)

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Answer until `stop` is set, then drain."""
        server = HttpServer(self._handle, self._account, max_connections=self._max_connections, refused=self._refused)
        watching = asyncio.create_task(self._groups.run())
        try:
            await server.start(listener)
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                stopping.cancel()
                await watching
            await self._drain()
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await server.close(LAST_WORDS_SECONDS)
            self._proxy.close()
            await self._scraper.close()

    def _refused(self, remote: str, refusal: errors.Refusal) -> None:
        """Count a head that is no request, and write its line in the access log."""
        self._metrics.requests.labels(refusal.outcome).inc()
        self._metrics.refused.labels(refusal.code).inc()
        access.info("- %s - - status=%d outcome=%s refused=%s", remote, refusal.status, refusal.outcome, refusal.code)

    async def _drain(self) -> None:
        """Finish what was begun; who comes now is told to go elsewhere, on connections that stay open until then."""
        self._draining = True
        _log.info("draining %d requests", self._proxy.active)
        if not await self._idle(self._settings.drain_seconds):
            self._proxy.end_all()
            await self._idle(LAST_WORDS_SECONDS + _ENDING_SECONDS)

    async def _idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._proxy.idle.wait()
        except TimeoutError:
            return False
        return True

    async def _handle(self, request: Request) -> None:
        match request.path:
            case "/healthz":
                await _tell(request, 200, _TEXT, b"ok\n")
            case "/readyz":
                await self._tell_state(request, self._can_answer_or_hold())
            case "/health":
                await self._tell_state(request, self._groups.state is Availability.HEALTHY)
            case "/metrics":
                await _tell(request, 200, _METRICS, await self._scrape())
            case "/dsv4/fatal-requests" if self._keys is None or self._keys.admit(request):
                await _tell(request, 200, _JSON, self._proxy.fatal.to_json().encode())
            case _ if self._draining:
                exchange = Exchange(request, self._settings)
                try:
                    await exchange.refuse(errors.draining())
                finally:
                    exchange.account(self._metrics)
            case _ if self._models_asked(request):
                await _tell(request, 200, _JSON, self._models())
            case _:
                await self._proxy.answer(request)

    def _can_answer_or_hold(self) -> bool:
        if self._groups.state is Availability.HEALTHY:
            return True
        return self._groups.given_up is None and self._settings.hold_timeout_seconds > 0

    async def _tell_state(self, request: Request, good: bool) -> None:
        status = 200 if good and not self._draining else 503
        await _tell(request, status, _TEXT, f"{self._groups.state}\n".encode())

    def _models_asked(self, request: Request) -> bool:
        """Tell whether it is about the models, from somebody who may ask, while the engine cannot say."""
        if (request.method, request.path) != ("GET", "/v1/models") or self._groups.state is Availability.HEALTHY:
            return False
        return self._keys is None or self._keys.admit(request)

    def _models(self) -> bytes:
        data = [
            {"id": name, "object": "model", "created": self._began, "owned_by": "vllm"}
            for name in self._settings.served_names
        ]
        return json.dumps({"object": "list", "data": data}).encode()

    async def _scrape(self) -> bytes:
        """Return the gateway's metrics and, while it answers, those of its own group's vLLM.

        Always of the same group: counters of different engines under one name would jump.
        """
        theirs = b""
        own = next(iter(self._groups.all.values()), None)
        if own is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._scraper.get(own.api + "/metrics", headers=own.auth) as answer:
                    if answer.status == 200:
                        theirs = await answer.read()
        return self._metrics.text() + theirs


async def _tell(request: Request, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer of the gateway's own; whoever does not read it is left."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await request.send(status, headers, body)
    except TimeoutError:
        request.abort()
