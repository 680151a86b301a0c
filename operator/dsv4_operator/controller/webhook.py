"""The server of the admission webhook, apart from the operator's loop, with limits on what its clients can make it do.

Whoever can reach its port can send it what the API server would never let through. So it has a thread with an event
loop of its own, and refuses unparsed what would hold the interpreter's lock, and so the operator's loop, for long.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import ssl
import threading
from pathlib import Path

import orjson
from aiohttp import web

from dsv4_operator.api import ClusterPolicy
from dsv4_operator.controller.admission import review

_log = logging.getLogger("dsv4")

PATH = "/validate"
_LOOK_SECONDS = 30.0
_STOP_SECONDS = 5.0
_CLOSE_SECONDS = 1.0

_MOST_BYTES = 4 * 2**20
"""Bytes of a review: etcd takes objects of 1.5 MiB, an update brings the old one along, and 1 MiB is for the rest."""
_MOST_VALUES = 100_000
"""Commas and colons in a review: to parse as many takes 15 ms, for which no other thread runs. The largest deployments
have a tenth of them."""
_REVIEWS = 4
"""Reviews that are computed at once."""
_OPEN = 16
"""Requests that are read, wait or are computed: 64 MiB at most."""
_CONNECTIONS = 256
_HANDSHAKE_SECONDS = 5.0
_SECONDS = 4.0
"""From a request's head to its answer: the API server waits for 5."""


class _Server(web.Server):
    """Closes connections beyond a number of them: each takes a descriptor, which the operator needs too."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()


class AdmissionServer:
    """Answers AdmissionReviews over TLS. A certificate that is renewed in place is taken over within half a minute."""

    def __init__(self, port: int, certificates: Path, policy: ClusterPolicy, runtime_image: str) -> None:
        """Args:
        port: where to listen, on all addresses.
        certificates: a directory with `tls.crt` and `tls.key`, as a Secret of kind `kubernetes.io/tls` is mounted.
        policy: what deployments may have of nodes.
        runtime_image: the operator's.

        Raises:
            OSError, ssl.SSLError: they cannot be read.
        """
        self._port, self._policy, self._runtime_image = port, policy, runtime_image
        self._files = certificates / "tls.crt", certificates / "tls.key"
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._stamp = self._look()
        self._context.load_cert_chain(*self._files)
        self.open = 0
        """Requests that are not answered."""
        self._reviewers = concurrent.futures.ThreadPoolExecutor(_REVIEWS, "review")
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def close(self) -> None:
        """Listen no more."""
        if not self._stop.done():
            self._stop.set_result(None)
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    def renew(self) -> None:
        """Use the certificate that is there now for whoever connects from now on."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._context.load_cert_chain(*self._files)
                self._stamp = stamp
                _log.info("the webhook's certificate was renewed")
        except (OSError, ssl.SSLError) as error:
            _log.warning("the webhook's certificate cannot be read, the last one stays: %s", error)

    def _look(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._started.done():
                _log.exception("the webhook ended")
            else:
                self._started.set_exception(error)
        finally:
            self._reviewers.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        server = _Server(self._answer, access_log=None)
        listening = await asyncio.get_running_loop().create_server(
            server, None, self._port, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
        )
        try:
            self._started.set_result(None)
            stop = asyncio.wrap_future(self._stop)
            while not stop.done():
                await asyncio.wait({stop}, timeout=_LOOK_SECONDS)
                self.renew()
        finally:
            listening.close()
            await server.shutdown(_CLOSE_SECONDS)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if (request.method, request.path) != ("POST", PATH):
            return web.Response(status=404, text=f"POST {PATH} alone is served\n")
        if self.open >= _OPEN:
            return _busy(f"{_OPEN} reviews are open")
        self.open += 1
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._reviewed(request)
        except TimeoutError:
            return _busy(f"not done within {_SECONDS:.0f} s")
        finally:
            self.open -= 1

    async def _reviewed(self, request: web.BaseRequest) -> web.Response:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > _MOST_BYTES:
                return _too_large(f"{_MOST_BYTES} bytes")
        if body.count(b",") + body.count(b":") > _MOST_VALUES:
            return _too_large(f"{_MOST_VALUES} commas and colons")
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._reviewers, self._review, bytes(body))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return web.Response(status=400, text=f"not an AdmissionReview: {error!r}\n")
        return web.Response(body=answer, content_type="application/json")

    def _review(self, body: bytes) -> bytes:
        return orjson.dumps(review(orjson.loads(body), self._policy, self._runtime_image))


def _busy(why: str) -> web.Response:
    return web.Response(status=503, headers={"Retry-After": "1"}, text=f"{why}; try again\n")


def _too_large(limit: str) -> web.Response:
    return web.Response(status=413, text=f"a review has at most {limit}; no deployment needs more\n")
