"""A process that has lost the permission to write does not write, over a real connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from dsv4_operator.kube import PODS, Access, Client, KubeError
from dsv4_testkit.waiting import until


class NotAllowed(KubeError):
    """Error that the guard raises."""


class Server:
    """Accepts every request and records the complete ones."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        self.taken.append(request.method)
        return web.json_response({"kind": "Pod", "items": [], "metadata": {"resourceVersion": "1"}})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


class Slow(Access):
    """An account whose credential takes time, as with a plugin."""

    asked, there = threading.Event(), threading.Event()

    def credentials(self) -> Any:
        self.asked.set()
        assert self.there.wait(60)
        return super().credentials()


POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "x"}}


async def test_without_permission_only_reads_are_sent(server: Server) -> None:
    def guard() -> None:
        raise NotAllowed("deposed")

    async with Client(Access(server.url), guard=guard) as kube:
        await kube.list(PODS, "a")
        for write in (
            kube.create(POD),
            kube.apply(POD),
            kube.replace(POD),
            kube.patch(PODS, "a", "x", {}),
            kube.delete(PODS, "a", "x"),
        ):
            with pytest.raises(NotAllowed):
                await write
    assert server.taken == ["GET"]


async def test_a_write_is_not_sent_if_the_permission_ends_before_it_has_a_connection(server: Server) -> None:
    may_write = True
    Slow.asked.clear()
    Slow.there.clear()

    def guard() -> None:
        if not may_write:
            raise NotAllowed("deposed")

    async with Client(Slow(server.url), guard=guard) as kube:
        writing = asyncio.create_task(kube.create(POD))
        await until(Slow.asked.is_set)
        may_write = False
        Slow.there.set()
        with pytest.raises(NotAllowed, match="deposed"):
            await writing
        assert server.taken == []
        may_write = True
        await kube.create(POD)
    assert server.taken == ["POST"]
