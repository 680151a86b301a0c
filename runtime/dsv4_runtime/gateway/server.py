"""The gateway: its own paths, the canary, forwarding of all other requests, and draining."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

import aiohttp

from dsv4_runtime.client import read_content
from dsv4_runtime.contract.gateway import (
    EVENT_HEADERS,
    VIEW_SECONDS,
    CanaryReport,
    FatalRequests,
    GatewaySettings,
    KindReport,
    page_file,
)
from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.admission import ApiKeys
from dsv4_runtime.gateway.errors import EngineLostError
from dsv4_runtime.gateway.exchange import FINAL_EVENT_SECONDS, access, key_headers, logged_path
from dsv4_runtime.gateway.handover import Guard, Heir
from dsv4_runtime.gateway.http_client import BrokenMessageError, Headers, UnreachableError, Upstream, encode_headers
from dsv4_runtime.gateway.http_server import HttpServer
from dsv4_runtime.gateway.metrics import GatewayMetrics, Traces, merge_metrics
from dsv4_runtime.gateway.page import PAGE, PATHS, STREAM, Page
from dsv4_runtime.gateway.proxy import Proxy
from dsv4_runtime.gateway.request import Account, Request
from dsv4_runtime.gateway.routing import Availability, EngineWait, Groups, RoutedGroup, RouteFile, TokenKeyError
from dsv4_runtime.util.files import own_shortage
from dsv4_runtime.util.sse import FeedFullError, payload

T = TypeVar("T")


class SharedResult(Generic[T]):
    """Latest result of `make`, which runs once at a time and at most once per `seconds`."""

    def __init__(self, make: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._task: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def get(self) -> T:
        """Return the result; raises the exception of `make`."""
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._ended >= self._seconds):
            task = self._task = asyncio.create_task(self._run())
        # Other callers keep waiting when one is cancelled.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel a running `make`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    async def _run(self) -> T:
        try:
            return await self._make()
        finally:
            self._ended = time.monotonic()


CANARY_SECONDS = 10.0
"""Limit for the completion."""
_CANARY_SHARED_SECONDS = 2.0
_MAX_ANSWER_BYTES = 2**20


# Without a name of the model: groups may have different ones, and vLLM needs none.
_CANARY_BODY = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0.0}).encode()


class Canary:
    """Canary: completes one token in the group that would serve the next request."""

    def __init__(self, groups: Groups, upstream: Upstream) -> None:
        self._groups, self._upstream = groups, upstream
        self._name = socket.gethostname()

    def refusal(self, request: Request) -> CanaryReport | None:
        """Return the response to a request without a valid canary token, else None."""
        try:
            wanted = canary_token(self._groups.routes.token_key())
        except TokenKeyError as error:
            return self._failed(f"wrong canary token: this gateway has none to compare it with: {error}")
        scheme, _, given = request.header(b"authorization").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), wanted.encode()):
            return None
        return self._failed("wrong canary token: this gateway has another token key, or the request has no token")

    async def check(self) -> CanaryReport:
        """Return whether an engine completes one token now, without waiting for an unavailable engine."""
        found = self._groups.pick()
        if found is None:
            why = self._groups.refusal or self._groups.given_up or f"the state is {self._groups.state}"
            return self._failed(f"no healthy engine: {why}")
        group, generation = found
        begun = time.monotonic()
        reason: str | None
        try:
            async with asyncio.timeout(CANARY_SECONDS), EngineWait(generation, "canary"):
                reason = await self._complete(group)
        except TimeoutError:
            # Long responses may delay the next one; they also prove that requests are answered.
            answers = self._upstream.last_body(group.api) > begun
            reason = None if answers else f"no answer within {CANARY_SECONDS:g} s"
        except (EngineLostError, UnreachableError, BrokenMessageError) as error:
            reason = str(error)
        return CanaryReport(
            ok=reason is None,
            reason=_line(reason or ""),
            group=group.index,
            generation=f"{generation.identity[0]}-g{generation.identity[1]}",
            seconds=round(time.monotonic() - begun, 4),
            gateway=self._name,
        )

    async def _complete(self, group: RoutedGroup) -> str | None:
        """Return the problem of the response, else None."""
        headers = [(b"Content-Type", b"application/json"), *encode_headers(group.auth)]
        async with self._upstream.request(group.api, "POST", "/v1/completions", headers, (_CANARY_BODY,)) as answer:
            body = b""
            while (part := await answer.part()) and len(body) < _MAX_ANSWER_BYTES:
                body += part
        text = body[:200].decode(errors="replace")
        if answer.status != 200:
            return f"vLLM answered {answer.status}: {text}"
        try:
            choices = json.loads(body)["choices"]
        except (ValueError, TypeError, KeyError):
            choices = None
        return None if isinstance(choices, list) and choices else f"vLLM's answer has no choice: {text}"

    def _failed(self, reason: str) -> CanaryReport:
        return CanaryReport(ok=False, reason=_line(reason), gateway=self._name)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


_log = logging.getLogger("dsv4.gateway")
_ENDING_SECONDS = 0.5
ALONE_SECONDS = 15.0
"""Time without another gateway of the deployment after which a terminating gateway ends open requests."""
_PEER_CHECK_SECONDS = 2.0
_PEER_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_PEER_METRICS_SECONDS = 1.0
MAX_CONNECTIONS = 4096
_TEXT = [(b"Content-Type", b"text/plain; charset=utf-8")]
_METRICS = [(b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8")]
_JSON = [(b"Content-Type", b"application/json")]
_SCRAPE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_SCRAPE_SHARED_SECONDS = 1.0
"""Interval of scrapes of vLLM."""
_MAX_METRICS_BYTES = 32 * 2**20
_SHARE_KINDS_SECONDS = 1.0
_OWN_METRICS_PER_SECOND = 20
"""Beyond this rate, scrapes share a text: generating it takes 0.5 ms, and `/metrics` needs no key."""
REFUSALS_LOGGED = 20
"""Access log lines of refused requests per second."""
_OWN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/dsv4/process/metrics", "/dsv4/process/kinds"})
"""Served even when connections and memory for clients are exhausted."""
_WITHOUT_API_KEY = _OWN_PATHS | {"/dsv4/canary", PAGE}
"""The canary has a token of its own. The page has no data; the paths of its data require the key."""
_ANSWER_SECONDS = 10.0
"""Limit for a client to read a response of the gateway."""


class RefusalLog:
    """Access log lines of refused requests: at most `REFUSALS_LOGGED` per second, and one line that counts the others.

    Otherwise clients without a key could fill the log, which is bounded, and every line costs as much as the refusal.
    """

    def __init__(self) -> None:
        self._second = 0
        self._lines = 0
        self._others: collections.Counter[str] = collections.Counter()
        """Refusals without a line, by code."""

    def write(self, remote: str, refusal: errors.Refusal, request: Request | None) -> None:
        """Write or count a refusal; `request` is None if there is no valid head."""
        if (now := int(time.monotonic())) != self._second:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > REFUSALS_LOGGED:
            if not self._others:
                asyncio.get_running_loop().call_later(1.0, self.flush)
            self._others[refusal.code] += 1
            return
        parts = ("-", remote, "-", "-")
        if request is not None and request.method:
            parts = (request.id, remote, request.method, logged_path(request))
        outcome = refusal.status, refusal.outcome, refusal.code
        access.info("%s %s %s %s status=%d outcome=%s refused=%s", *parts, *outcome)

    def flush(self) -> None:
        """Write the number of refusals that have no line."""
        if self._others:
            counts = " ".join(f"{code}={count}" for code, count in sorted(self._others.items()))
            access.info("%d more requests were refused: %s", self._others.total(), counts)
            self._others.clear()


class Gateway:
    """One gateway process."""

    def __init__(
        self,
        settings: GatewaySettings,
        routes: RouteFile,
        keys: ApiKeys | None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        number: int | None = None,
        peers: Sequence[str] = (),
        traces: Traces | None = None,
        overdue: Callable[[], float] | None = None,
    ) -> None:
        """Args:
        settings: limits.
        routes: followed file with the groups.
        keys: accepted API keys; None: no authentication.
        max_connections: of clients.
        number: index of this process among several at one address.
        peers: base URLs of the others' own sockets.
        traces: of requests to vLLM; None: there are none.
        overdue: see `GatewayMetrics.observe`.
        """
        self._peers = tuple(peers)
        self._max_connections = max_connections
        self._account = Account(settings.max_client_bytes)
        self._settings = settings
        self._metrics = GatewayMetrics(number)
        self._groups = Groups(routes, settings.served_names)
        self._proxy = Proxy(settings, self._groups, self._metrics, keep_key=keys is None, traces=traces)
        self._metrics.observe(self._groups, lambda: self._proxy.active, lambda: self._account.used, overdue)
        self._keys = keys
        self._refusals = RefusalLog()
        self._draining = False
        self._began = int(time.time())
        self._scraper = aiohttp.ClientSession(timeout=_SCRAPE_TIMEOUT)
        self._metrics_text = b""
        self._metrics_times: collections.deque[float] = collections.deque()
        """Times of metric generations within the last second."""
        self._engine_metrics = SharedResult(self._scrape_own, _SCRAPE_SHARED_SECONDS)
        self._peer_metrics = SharedResult(self._scrape_peers, 1 / _OWN_METRICS_PER_SECOND)
        self._canaries = Canary(self._groups, self._proxy.upstream)
        self._canary = SharedResult(self._canaries.check, _CANARY_SHARED_SECONDS)
        self._page = Page(self._groups, scrape=self._scrape, gateways=self._all_gateway_metrics)
        self._figures = SharedResult(self._page.figures, _CANARY_SHARED_SECONDS)

    async def serve(
        self,
        listener: socket.socket,
        stop: asyncio.Event,
        own: socket.socket | None = None,
        *,
        inheritance: socket.socket | None = None,
        heir: bytes | None = None,
    ) -> None:
        """Serve until `stop` is set, then drain.

        Args:
            listener: clients connect to it.
            stop: ends the service.
            own: a listening socket of this process alone.
            inheritance: listening Unix socket for the client connections of another process, which this one continues
                after its end.
            heir: abstract address of such a socket of another process.
        """
        guard = Guard(heir) if heir is not None else None
        guarding = asyncio.create_task(guard.run()) if guard is not None else None
        server = HttpServer(
            self._handle,
            self._account,
            max_connections=self._max_connections,
            check=self._check,
            refused=self._refused,
            own_paths=_OWN_PATHS,
            guard=guard,
        )
        inherits = Heir(inheritance, server.adopt) if inheritance is not None else None
        watching = asyncio.create_task(self._groups.run())
        sharing = asyncio.create_task(self._share_kinds())
        try:
            await server.start(listener, *([own] if own is not None else []))
            if inherits is not None:
                inherits.start()
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                stopping.cancel()
                await watching
            await self._drain(server)
        finally:
            watching.cancel()
            sharing.cancel()
            await asyncio.wait({watching, sharing})
            if inherits is not None:
                inherits.close()
            await server.close(FINAL_EVENT_SECONDS)
            if guarding is not None:
                guarding.cancel()
            shared = self._engine_metrics, self._peer_metrics, self._canary, self._figures, self._page
            await asyncio.gather(*(one.close() for one in shared))
            self._proxy.upstream.close()
            await self._scraper.close()
            self._refusals.flush()

    def _check(self, request: Request) -> errors.Refusal | None:
        """Return the refusal of a request that lacks a valid API key."""
        if self._keys is None or request.path in _WITHOUT_API_KEY or self._keys.admit(request):
            return None
        return errors.UNAUTHORIZED

    def _refused(self, remote: str, refusal: errors.Refusal, request: Request | None) -> None:
        self._metrics.refuse(refusal)
        self._refusals.write(remote, refusal, request)

    async def _drain(self, server: HttpServer) -> None:
        """Serve as before during the lame duck period, then finish open requests only.

        Endpoints and load balancers keep sending requests for a while. During that time the gateway is not ready, and
        every response closes its connection.
        """
        self._draining = server.ending = True
        lame_duck = self._settings.lame_duck_seconds
        _log.info("draining: accepting for another %g s, %d requests are open", lame_duck, self._proxy.active)
        await asyncio.sleep(lame_duck)
        await self._page.close()
        server.retire()
        if not await self._finished():
            _log.warning("draining: %d requests are still open and are ended", self._proxy.active)
            self._proxy.end_all()
            await self._idle(FINAL_EVENT_SECONDS + _ENDING_SECONDS)

    async def _finished(self) -> bool:
        """Wait for open requests; return whether all ended within `drain_seconds` and before the deployment was gone.

        The deployment counts as gone when no other gateway answered through the Service for `ALONE_SECONDS`.
        """
        service, seen = self._settings.service_url, time.monotonic()
        deadline = seen + self._settings.drain_seconds
        if service is None:
            return await self._idle(self._settings.drain_seconds)
        while (left := deadline - time.monotonic()) > 0:
            if await self._idle(min(left, _PEER_CHECK_SECONDS)):
                return True
            if await self._peer_answers(service):
                seen = time.monotonic()
            elif time.monotonic() - seen >= ALONE_SECONDS:
                _log.warning("draining: no other gateway answers at %s", service)
                return False
        return self._proxy.idle.is_set()

    async def _peer_answers(self, service: str) -> bool:
        """Return whether a ready gateway with the same token key answers at `service`."""
        try:
            token = canary_token(self._groups.routes.token_key())
            # Without `close`, the kept connection would always reach the same gateway.
            headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
            async with self._scraper.head(f"{service}/dsv4/canary", headers=headers, timeout=_PEER_TIMEOUT) as answer:
                return answer.status == 200
        except (TokenKeyError, aiohttp.ClientError, OSError, TimeoutError) as error:
            # Without a file descriptor, this process cannot find out.
            return own_shortage(error) is not None

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
                await _respond(request, 200, _TEXT, b"ok\n")
            case "/readyz":
                await self._respond_state(request, self._readiness_problem())
            case "/health":
                healthy = self._groups.state is Availability.HEALTHY
                await self._respond_state(request, None if healthy else self._groups.state)
            case "/metrics":
                text = merge_metrics(await self._all_gateway_metrics())
                await _respond(request, 200, _METRICS, text + await self._engine_metrics.get())
            case "/dsv4/process/metrics":
                await _respond(request, 200, _METRICS, self._own_metrics())
            case "/dsv4/canary":
                await self._respond_canary(request)
            case "/dsv4/fatal-requests":
                await _respond(request, 200, _JSON, (await self._fatal_requests(request)).to_json().encode())
            case "/dsv4/process/fatal-requests":
                await _respond(request, 200, _JSON, self._proxy.suspects.found.to_json().encode())
            case "/dsv4/process/kinds":
                await _respond(request, 200, _JSON, self._proxy.suspects.kinds.report().to_json().encode())
            case path if path in PATHS:
                await self._respond_page(request)
            case _ if self._serves_models(request):
                await _respond(request, 200, _JSON, self._models())
            case _:
                await self._proxy.answer(request)

    def _readiness_problem(self) -> str | None:
        """Return why this gateway can neither answer nor hold requests, else None."""
        groups = self._groups
        if groups.state is Availability.HEALTHY:
            return None
        if (reason := groups.refusal) is not None:
            return reason
        if (reason := groups.given_up) is not None:
            return f"the engine was given up: {reason}"
        return None if self._settings.hold_timeout_seconds > 0 else str(groups.state)

    async def _respond_state(self, request: Request, problem: str | None) -> None:
        """Send 200 with the engines' state, or 503 with the reason in one line."""
        problem = "shutting down" if self._draining else problem
        text = str(self._groups.state) if problem is None else " ".join(problem.split())
        await _respond(request, 200 if problem is None else 503, _TEXT, f"{text}\n".encode())

    async def _respond_canary(self, request: Request) -> None:
        if (refusal := self._canaries.refusal(request)) is not None:
            await _respond(request, 401, _JSON, refusal.to_json().encode())
            return
        if request.method == "HEAD":
            # HEAD only checks the token.
            await _respond(request, 200, _JSON, b"")
            return
        figures = asyncio.ensure_future(self._figures.get())
        report = await self._canary.get()
        try:
            report = report.model_copy(update={"figures": await figures})
        except Exception:
            # Readiness of the deployment depends on the report, not on its figures.
            _log.exception("the canary's report has no figures")
        await _respond(request, 200 if report.ok else 503, _JSON, report.to_json().encode())

    async def _respond_page(self, request: Request) -> None:
        """Send the status page, its document, or the stream of its changes."""
        if request.method not in ("GET", "HEAD"):
            await _respond(request, 405, [*_TEXT, (b"Allow", b"GET, HEAD")], b"the status page can only be read\n")
            return
        if request.path == PAGE:
            html, about = page_file(key=self._keys is not None)
            await _respond(request, 200, encode_headers(about), html)
            return
        try:
            with self._page.feed.place():
                if request.path == STREAM and request.method == "GET":
                    await self._stream_page(request)
                    return
                async with contextlib.aclosing(self._page.feed.events(_ANSWER_SECONDS)) as events:
                    event = await anext(events, b"")
        except FeedFullError as error:
            await _respond(request, 503, [*_TEXT, (b"Retry-After", b"10")], f"the status page has {error}\n".encode())
            return
        headers = [*_JSON, (b"Cache-Control", b"no-store")]
        await _respond(request, 200 if event else 503, headers, payload(event) if event else b"{}")

    async def _stream_page(self, request: Request) -> None:
        """Send events until the client leaves, the time is over, or the gateway ends."""
        request.begin(200, encode_headers(EVENT_HEADERS))
        async with contextlib.aclosing(self._page.feed.events(VIEW_SECONDS)) as events:
            async for event in events:
                await request.write(event)
        await request.end()

    def _serves_models(self, request: Request) -> bool:
        """Return whether a client requests the models while no engine is available, or while no engine has all."""
        asked = (request.method, request.path) == ("GET", "/v1/models")
        return asked and (self._groups.state is not Availability.HEALTHY or self._groups.differ)

    def _models(self) -> bytes:
        data = [
            {"id": name, "object": "model", "created": self._began, "owned_by": "vllm"} for name in self._groups.names
        ]
        return json.dumps({"object": "list", "data": data}).encode()

    def _own_metrics(self) -> bytes:
        """Return the gateway's metrics, generated at most `_OWN_METRICS_PER_SECOND` times per second."""
        now = time.monotonic()
        while self._metrics_times and now - self._metrics_times[0] > 1.0:
            self._metrics_times.popleft()
        if len(self._metrics_times) < _OWN_METRICS_PER_SECOND:
            self._metrics_times.append(now)
            self._metrics_text = self._metrics.text()
        return self._metrics_text

    async def _all_gateway_metrics(self) -> list[bytes]:
        """Return the metrics of each gateway process at this address, the own ones first."""
        return [self._own_metrics(), *await self._peer_metrics.get()]

    async def _scrape_peers(self) -> list[bytes]:
        """Return the metrics of the other processes at this address; those that do not respond are left out."""
        return [text for text in await self._ask_peers("metrics") if text]

    async def _fatal_requests(self, request: Request) -> FatalRequests:
        """Return the fatal requests of all processes at this address, by time, and the kinds refused by this one."""
        own = self._proxy.suspects.found
        found = list(own.requests)
        for text in await self._ask_peers("fatal-requests", key_headers(request)):
            with contextlib.suppress(ValueError):
                found += FatalRequests.model_validate_json(text).requests
        return FatalRequests(requests=tuple(sorted(found, key=lambda one: one.time)), kinds=own.kinds)

    async def _share_kinds(self) -> None:
        """Read the observations of the other processes at this address: at the start, and after deaths of engines."""
        kinds = self._proxy.suspects.kinds
        kinds.shared = bool(self._peers)
        unheard = set(self._peers)
        while kinds.shared:
            if unheard or kinds.active:
                for peer, text in zip(self._peers, await self._ask_peers("kinds"), strict=True):
                    with contextlib.suppress(ValueError):
                        kinds.take(KindReport.model_validate_json(text))
                        unheard.discard(peer)
                kinds.judge()
            await asyncio.sleep(_SHARE_KINDS_SECONDS)

    async def _ask_peers(self, name: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> list[bytes]:
        """Return the answer of each other process at this address; empty if there is none in time."""

        async def ask(peer: str) -> bytes:
            asked = self._proxy.upstream.request(peer, "GET", f"/dsv4/process/{name}", headers)
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_PEER_METRICS_SECONDS), asked as answer:
                    return await answer.read() if answer.status == 200 else b""
            return b""

        return await asyncio.gather(*map(ask, self._peers))

    async def _scrape_own(self) -> bytes:
        """Return the metrics of the own group's vLLM.

        Always of the same group: counters of several engines under one name would be inconsistent.
        """
        own = next(iter(self._groups.all.values()), None)
        return b"" if own is None else await self._scrape(own)

    async def _scrape(self, group: RoutedGroup) -> bytes:
        """Return the metrics of a group's vLLM; empty while it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._scraper.get(group.api + "/metrics", headers=group.auth) as answer:
                try:
                    return await read_content(answer, _MAX_METRICS_BYTES) if answer.status == 200 else b""
                except ValueError:
                    _log.warning("vLLM's metrics have more than %d bytes: left out", _MAX_METRICS_BYTES)
        return b""


async def _respond(request: Request, status: int, headers: Headers, body: bytes) -> None:
    """Send a complete response of the gateway; abort if the client does not read it."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await request.send(status, headers, body)
    except TimeoutError:
        request.abort()
