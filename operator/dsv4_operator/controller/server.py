"""The operator's own HTTP: `/livez`, `/readyz` and `/metrics`. It tells nothing secret and takes no orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Problem = Callable[[], str | None]
"""Problem in words for people; None if there is none."""


class ProbeServer:
    """Answers probes and scrapes."""

    def __init__(self, port: int, *, live: Problem, ready: Problem, metrics: Callable[[], bytes]) -> None:
        """Args:
        port: where to listen, on all addresses.
        live: what only a new process would mend.
        ready: what keeps this process from its work.
        metrics: in Prometheus' text format.
        """
        self._port = port
        application = web.Application()
        application.router.add_get("/livez", _probe(live))
        application.router.add_get("/readyz", _probe(ready))

        async def scrape(_: web.Request) -> web.Response:
            return web.Response(body=metrics(), headers={"Content-Type": _TEXT})

        application.router.add_get("/metrics", scrape)
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, None, self._port).start()

    async def close(self) -> None:
        """Listen no more."""
        await self._runner.cleanup()


def _probe(problem: Problem) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        wrong = problem()
        return web.Response(status=503 if wrong else 200, text=(wrong or "ok") + "\n")

    return answer
