"""The gateway's server: its own few paths, everything else to the proxy, and a good end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import socket
import time

import aiohttp

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.gateway import canary, errors
from dsv4_runtime.gateway.account import Account
from dsv4_runtime.gateway.canary import Canary
from dsv4_runtime.gateway.downstream import HttpServer
from dsv4_runtime.gateway.engine import Availability
from dsv4_runtime.gateway.exchange import LAST_WORDS_SECONDS, access
from dsv4_runtime.gateway.groups import Groups
from dsv4_runtime.gateway.http1 import Headers
from dsv4_runtime.gateway.keys import Keys
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.proxy import Proxy
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.route import RouteFile, TokenKeyError
from dsv4_runtime.gateway.shared import Shared

_log = logging.getLogger("dsv4.gateway")
_ENDING_SECONDS = 0.5
ALONE_SECONDS = 15.0
"""Time without another gateway of the deployment after which a terminating gateway ends open requests."""
_LOOK_SECONDS = 2.0
_PEER = aiohttp.ClientTimeout(total=5.0)
MAX_CONNECTIONS = 4096
_TEXT = [(b"Content-Type", b"text/plain; charset=utf-8")]
_METRICS = [(b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8")]
_JSON = [(b"Content-Type", b"application/json")]
_SCRAPE = aiohttp.ClientTimeout(total=5.0)
_SCRAPE_SHARED_SECONDS = 1.0
"""For so long the metrics of vLLM are not asked for again."""
_MOST_METRICS_BYTES = 32 * 2**20
_OWN_METRICS_A_SECOND = 20
"""Beyond it scrapes share a text: whoever reaches the gateway can scrape it, and making the text takes 0.5 ms."""
_OWN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Answered also when the gateway has no connection and no memory left for clients."""
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
        self._metrics.observe_credentials(lambda: self._groups.refusal is not None)
        self._keys = keys
        self._draining = False
        self._began = int(time.time())
        self._scraper = aiohttp.ClientSession(timeout=_SCRAPE)
        self._own = b""
        self._made: collections.deque[float] = collections.deque()
        """Times at which the gateway's metrics were made within the last second."""
        self._theirs = Shared(self._scrape, _SCRAPE_SHARED_SECONDS)
        self._canaries = Canary(self._groups, self._proxy.upstream, settings.served_names[0])
        self._canary = Shared(self._canaries.check, canary.SHARED_SECONDS)

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Answer until `stop` is set, then drain."""
        server = HttpServer(
            self._handle,
            self._account,
            max_connections=self._max_connections,
            refused=self._refused,
            own_paths=_OWN_PATHS,
        )
        watching = asyncio.create_task(self._groups.run())
        try:
            await server.start(listener)
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                stopping.cancel()
                await watching
            await self._drain(server)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await server.close(LAST_WORDS_SECONDS)
            await asyncio.gather(self._theirs.close(), self._canary.close())
            self._proxy.close()
            await self._scraper.close()

    def _refused(self, remote: str, refusal: errors.Refusal) -> None:
        """Count a head that is no request, and write its line in the access log."""
        self._metrics.requests.labels(refusal.outcome).inc()
        self._metrics.refused.labels(refusal.code).inc()
        access.info("- %s - - status=%d outcome=%s refused=%s", remote, refusal.status, refusal.outcome, refusal.code)

    async def _drain(self, server: HttpServer) -> None:
        """Answer for the time of the lame duck as before, then finish the requests that are open and no others.

        Endpoints and load balancers go on sending requests to a gateway for a while after it was told to end. Until
        then it is not ready, and every answer is the last one of its connection.
        """
        self._draining = server.ending = True
        lame_duck = self._settings.lame_duck_seconds
        _log.info("draining: accepting for another %g s, %d requests are open", lame_duck, self._proxy.active)
        await asyncio.sleep(lame_duck)
        server.retire()
        if not await self._finished():
            _log.warning("draining: %d requests are still open and are ended", self._proxy.active)
            self._proxy.end_all()
            await self._idle(LAST_WORDS_SECONDS + _ENDING_SECONDS)

    async def _finished(self) -> bool:
        """Wait for open requests; return whether all ended within `drain_seconds` and before the deployment was gone.

        The deployment counts as gone when no other gateway of it answered through the Service for `ALONE_SECONDS`.
        """
        service, seen = self._settings.service_url, time.monotonic()
        deadline = seen + self._settings.drain_seconds
        if service is None:
            return await self._idle(self._settings.drain_seconds)
        while (left := deadline - time.monotonic()) > 0:
            if await self._idle(min(left, _LOOK_SECONDS)):
                return True
            if await self._another_answers(service):
                seen = time.monotonic()
            elif time.monotonic() - seen >= ALONE_SECONDS:
                _log.warning("draining: no other gateway answers at %s", service)
                return False
        return self._proxy.idle.is_set()

    async def _another_answers(self, service: str) -> bool:
        """Return whether a ready gateway with this gateway's token key is behind `service`."""
        try:
            token = canary_token(self._groups.routes.token_key())
            # A connection of its own: one that is kept would always reach the same gateway.
            headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
            async with self._scraper.head(f"{service}/dsv4/canary", headers=headers, timeout=_PEER) as answer:
                return answer.status == 200
        except (TokenKeyError, aiohttp.ClientError, OSError, TimeoutError):
            return False

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
                await self._tell_state(request, self._unready())
            case "/health":
                healthy = self._groups.state is Availability.HEALTHY
                await self._tell_state(request, None if healthy else self._groups.state)
            case "/metrics":
                await _tell(request, 200, _METRICS, self._own_metrics() + await self._theirs.get())
            case "/dsv4/canary":
                await self._tell_canary(request)
            case "/dsv4/fatal-requests" if self._keys is None or self._keys.admit(request):
                await _tell(request, 200, _JSON, self._proxy.fatal.to_json().encode())
            case _ if self._models_asked(request):
                await _tell(request, 200, _JSON, self._models())
            case _:
                await self._proxy.answer(request)

    def _unready(self) -> str | None:
        """Return why this gateway can neither answer requests nor hold them; None: it can."""
        groups = self._groups
        if groups.state is Availability.HEALTHY:
            return None
        if (reason := groups.refusal) is not None:
            return reason
        if (reason := groups.given_up) is not None:
            return f"the engine was given up: {reason}"
        return None if self._settings.hold_timeout_seconds > 0 else str(groups.state)

    async def _tell_state(self, request: Request, problem: str | None) -> None:
        """Send 200 with the engines' state, or 503 with the reason in one line."""
        problem = "shutting down" if self._draining else problem
        text = str(self._groups.state) if problem is None else " ".join(problem.split())
        await _tell(request, 200 if problem is None else 503, _TEXT, f"{text}\n".encode())

    async def _tell_canary(self, request: Request) -> None:
        if (refusal := self._canaries.refusal(request)) is not None:
            await _tell(request, 401, _JSON, refusal.to_json().encode())
            return
        if request.method == "HEAD":
            # Only the token is checked.
            await _tell(request, 200, _JSON, b"")
            return
        report = await self._canary.get()
        await _tell(request, 200 if report.ok else 503, _JSON, report.to_json().encode())

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

    def _own_metrics(self) -> bytes:
        """Return the gateway's metrics, made at most `_OWN_METRICS_A_SECOND` times a second."""
        now = time.monotonic()
        while self._made and now - self._made[0] > 1.0:
            self._made.popleft()
        if len(self._made) < _OWN_METRICS_A_SECOND:
            self._made.append(now)
            self._own = self._metrics.text()
        return self._own

    async def _scrape(self) -> bytes:
        """Return the metrics of the vLLM of the gateway's own group; empty while it does not answer.

        Always of the same group: counters of different engines under one name would jump.
        """
        own = next(iter(self._groups.all.values()), None)
        if own is None:
            return b""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._scraper.get(own.api + "/metrics", headers=own.auth) as answer:
                if answer.status != 200:
                    return b""
                parts, size = list[bytes](), 0
                async for part in answer.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > _MOST_METRICS_BYTES:
                        _log.warning("vLLM's metrics have more than %d bytes: left out", _MOST_METRICS_BYTES)
                        return b""
                return b"".join(parts)
        return b""


async def _tell(request: Request, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer of the gateway's own; whoever does not read it is left."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await request.send(status, headers, body)
    except TimeoutError:
        request.abort()
