"""HTTP proxy between one operator and the API server that fails as networks, load balancers and API servers fail.

The operator connects with plain HTTP on loopback and its own token, so the account and its rights are unchanged.
Faults are drawn from a seed per request. Their times depend on the machine: a seed repeats the kinds and rates of the
faults, not their exact order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_DROPPED = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})
_LINE_BYTES = 2**22
# aiohttp logs that connections which are aborted here end too early.
_QUIET = logging.getLogger("dsv4.chaos")
_QUIET.setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability of each fault per request or per watch; 0: it does not occur."""

    delay: float = 0.0
    """A request arrives up to 3 s later."""
    lost: float = 0.0
    """The connection breaks before the request arrives."""
    hung: float = 0.0
    """The request is neither executed nor answered, and the connection stays open."""
    unanswered: float = 0.0
    """The request is executed and the connection breaks before its answer."""
    late: float = 0.0
    """The connection breaks, and the request is executed up to 8 s later."""
    conflict: float = 0.0
    """409 to a write, as after a concurrent change or at a quota."""
    busy: float = 0.0
    """429 with `Retry-After`."""
    error: float = 0.0
    """500, 503 or 504 instead of an execution."""
    applied: float = 0.0
    """500 or 504 after an execution, as when etcd answers too late."""
    gone: float = 0.0
    """410 to a watch or to a page of a list, at the start or as an event."""
    ended: float = 0.0
    """A watch ends after up to 5 s: in order, with an error event, or in the middle of a line."""
    silent: float = 0.0
    """A watch stays open without any line for up to 12 s, then delivers them or breaks."""
    behind: float = 0.0
    """Every line of a watch comes up to 2 s late."""

    @classmethod
    def drawn(cls, dice: random.Random) -> Faults:
        """Return a random subset of faults with random rates: a fault that hides another one is absent in some runs."""
        rates = {one.name: dice.choice((0.0, dice.uniform(0.01, 0.2))) for one in dataclasses.fields(cls)}
        return cls(**{name: rate * _SHARES.get(name, 1.0) for name, rate in rates.items()})


_SHARES = {"hung": 0.1, "gone": 2.0, "ended": 2.0, "silent": 2.0, "behind": 2.0}
"""Factors of the rates: there are few watches, and a request that hangs blocks its part of a reconcile for 30 s."""
NONE = Faults()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A write that arrived completely."""

    time: float
    """Monotonic time."""
    method: str
    path: str


class Proxy:
    """One operator's way to the API server."""

    def __init__(self, server: str, tls: ssl.SSLContext | None, dice: random.Random) -> None:
        """Args:
        server: URL of the API server.
        tls: accepts its certificate.
        dice: draws the faults.
        """
        self._server, self._tls, self._dice = server, tls, dice
        self.faults = NONE
        self.counts: Counter[str] = Counter()
        """Requests and injected faults, by kind."""
        self.writes: list[Arrival] = []
        self.defects: list[str] = []
        """Exceptions of the proxy itself."""
        self._outage: str | None = None
        self._passable = asyncio.Event()
        self._passable.set()
        self._open: dict[int, web.BaseRequest] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._runner: web.ServerRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.port = 0

    async def __aenter__(self) -> Proxy:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=limits, auto_decompress=False, read_bufsize=_LINE_BYTES
        )
        self._runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True, access_log=None, logger=_QUIET), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort_all()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        assert self._runner is not None
        await self._runner.cleanup()
        assert self._session is not None
        await self._session.close()

    @property
    def url(self) -> str:
        """URL for the operator."""
        return f"http://127.0.0.1:{self.port}"

    def cut(self, *, refused: bool) -> None:
        """Begin an outage: connections break at once, or nothing answers any more."""
        self._outage = "refused" if refused else "unanswered"
        self._passable.clear()
        self.counts[f"outage {self._outage}"] += 1
        if refused:
            self._abort_all()

    def restore(self) -> None:
        """End an outage. Connections of its time break: their other end has given them up."""
        if self._outage is not None:
            self._outage = None
            self._abort_all()
            self._passable.set()

    def calm(self) -> None:
        """End all faults; requests that are late arrive now."""
        self.faults = NONE
        self.restore()
        self._abort_all()

    async def settle(self) -> None:
        """Wait for the late requests."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _abort_all(self) -> None:
        for request in list(self._open.values()):
            _abort(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._open[id(request)] = request
        try:
            return await self._passed(request)
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            _abort(request)
            return web.Response(status=502)
        except Exception as error:
            self.defects.append(f"{request.method} {request.path}: {error!r}")
            raise
        finally:
            del self._open[id(request)]

    async def _passed(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._outage == "refused":
            _abort(request)
            return web.Response(status=503)
        body = await request.read()
        self.counts["requests"] += 1
        if request.method != "GET":
            self.writes.append(Arrival(time.monotonic(), request.method, request.path))
        if self._outage is not None:
            # Until the outage ends, which breaks the connection, or its client gives up.
            await self._passable.wait()
            _abort(request)
            return web.Response(status=503)
        watches = request.query.get("watch") in ("1", "true")
        return await (self._watched(request) if watches else self._answered(request, body))

    def _falls(self, fault: str) -> bool:
        rate = getattr(self.faults, fault)
        fell = rate > 0 and self._dice.random() < rate
        self.counts[fault] += fell
        return fell

    async def _answered(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        writes = request.method != "GET"
        if self._falls("delay"):
            await asyncio.sleep(self._dice.uniform(0.0, 3.0))
        if self._falls("lost"):
            _abort(request)
            return web.Response(status=503)
        if self._falls("hung"):
            await asyncio.sleep(_ANSWER_SECONDS)
            _abort(request)
            return web.Response(status=503)
        if writes and self._falls("late"):
            self._later(request, body, self._dice.uniform(0.5, 8.0))
            _abort(request)
            return web.Response(status=503)
        if writes and self._falls("conflict"):
            return _status(409, "Conflict", "the object has been modified; apply your changes to the latest version")
        if self._falls("busy"):
            return _status(429, "TooManyRequests", "the server has received too many requests", {"Retry-After": "1"})
        if self._falls("error"):
            return _status(*self._dice.choice(_ERRORS))
        if "continue" in request.query and self._falls("gone"):
            return _status(410, "Expired", "The provided continue parameter is too old")
        async with self._upstream(request, body, _ANSWER_SECONDS) as answer:
            content = await answer.read()
            if self._falls("unanswered"):
                _abort(request)
                return web.Response(status=503)
            if writes and answer.status < 300 and self._falls("applied"):
                return _status(*self._dice.choice((_ERRORS[0], _ERRORS[2])))
            return web.Response(status=answer.status, body=content, headers=dict(_headers(answer.headers)))

    def _later(self, request: web.BaseRequest, body: bytes, seconds: float) -> None:
        method, path = request.method, request.path_qs
        headers = dict(_headers(request.headers))

        async def send() -> None:
            await asyncio.sleep(seconds)
            await self._passable.wait()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                assert self._session is not None
                async with self._session.request(method, self._server + path, data=body, headers=headers) as answer:
                    await answer.read()

        task = asyncio.create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @contextlib.asynccontextmanager
    async def _upstream(
        self, request: web.BaseRequest, body: bytes, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        headers = dict(_headers(request.headers))
        url = self._server + request.path_qs
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, timeout=limits
        ) as answer:
            yield answer

    async def _watched(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._falls("lost"):
            _abort(request)
            return web.Response(status=503)
        if self._falls("error"):
            return _status(*self._dice.choice(_ERRORS))
        gone = self._falls("gone")
        if gone and self._dice.random() < 0.5:
            return _status(410, "Expired", "too old resource version")
        ended = self._falls("ended")
        silent, behind = self._falls("silent"), self._falls("behind")
        async with self._upstream(request, b"", None) as answer:
            if answer.status != 200:
                return web.Response(
                    status=answer.status, body=await answer.read(), headers=dict(_headers(answer.headers))
                )
            response = web.StreamResponse(headers=dict(_headers(answer.headers)))
            response.enable_chunked_encoding()
            await response.prepare(request)
            limit = self._dice.uniform(0.0, 5.0) if gone or ended else None
            quiet = self._dice.uniform(0.0, 4.0) if silent else None
            begun = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    async for line in answer.content:
                        if quiet is not None and time.monotonic() - begun > quiet:
                            quiet = None
                            await asyncio.sleep(self._dice.uniform(4.0, 12.0))
                            if self._dice.random() < 0.5:
                                _abort(request)
                                return response
                        if behind:
                            await asyncio.sleep(self._dice.uniform(0.0, 2.0))
                        await self._passable.wait()
                        await response.write(line)
                    return response
            if gone:
                await response.write(_event(410, "Expired", "too old resource version"))
            elif (how := self._dice.choice(("in order", "error", "torn"))) == "error":
                await response.write(_event(500, "InternalError", "etcdserver: leader changed"))
            elif how == "torn":
                await response.write(b'{"type":"MODIFIED","object":{"metadata":{"name":"')
                _abort(request)
            return response


_ERRORS = (
    (500, "InternalError", "etcdserver: request timed out"),
    (503, "ServiceUnavailable", "apiserver is shutting down"),
    (504, "Timeout", "the server was unable to return a response in the time allotted"),
)


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _headers(given: Any) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in given.items() if name.lower() not in _DROPPED)


def _object(code: int, reason: str, message: str) -> dict[str, Any]:
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**about, "reason": reason, "message": f"{message} (injected)", "code": code}


def _status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(_object(code, reason, message), status=code, headers=headers)


def _event(code: int, reason: str, message: str) -> bytes:
    return json.dumps({"type": "ERROR", "object": _object(code, reason, message)}).encode() + b"\n"
