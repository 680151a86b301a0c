"""Responses that do not come from a Kubernetes API server, read by the client over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, Access, Client, KubeError, OwnedCache, PodCache
from dsv4_operator.kube.client import WatchEvent
from dsv4_operator.kube.resources import Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "x"}}


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with Client(Access(f"http://{host}:{port}")) as kube:
            yield kube
    finally:
        await runner.cleanup()


async def first_event(kube: Client) -> WatchEvent | None:
    async with contextlib.aclosing(kube.watch(PODS, "a", resource_version="1")) as events:
        return await anext(events, None)


REQUESTS: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "get": lambda kube: kube.get(PODS, "a", "x"),
    "list": lambda kube: kube.list(PODS),
    "apply": lambda kube: kube.apply(POD),
    "create": lambda kube: kube.create(POD),
    "patch": lambda kube: kube.patch(PODS, "a", "x", {}),
    "replace": lambda kube: kube.replace(POD),
    "delete": lambda kube: kube.delete(PODS, "a", "x"),
    "watch": first_event,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["items", "metadata", "type", "object", "resourceVersion", "continue", "code", "reason", "name"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
BODIES = st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"<html>log in</html>")


def test_every_request_returns_or_raises_a_kube_error() -> None:
    body, status = b"", 200

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body + b"\n", status=status, content_type="application/json")

    async def ask(kube: Client) -> None:
        for request in REQUESTS.values():
            with contextlib.suppress(KubeError):
                await request(kube)

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        kube = runner.run(stack.enter_async_context(served(handler)))

        @given(BODIES, st.sampled_from([200, 200, 200, 201, 401, 404, 409, 410, 422, 500]))
        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        def check(made: bytes, code: int) -> None:
            nonlocal body, status
            body, status = made, code
            runner.run(ask(kube))

        try:
            check()
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_page_of_a_proxy_is_an_unavailable_server(name: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>log in</html>\n")

    async with served(handler) as kube:
        with pytest.raises(Unavailable, match=r"not an object of the Kubernetes API"):
            await REQUESTS[name](kube)


async def test_a_page_of_a_proxy_does_not_end_a_cache() -> None:
    pages = 2

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal pages
        if pages:
            pages -= 1
            return web.Response(text="<html>log in</html>")
        if "watch" in request.query:
            await asyncio.sleep(5)
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    async with served(handler) as kube:
        cache = PodCache(kube)
        task = asyncio.create_task(cache.run())
        async with asyncio.timeout(60):
            await cache.synced()
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("namespaces", [1, 11, 40])
async def test_watches_leave_connections_for_requests(namespaces: int) -> None:
    watches = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal watches
        if "watch" in request.query:
            watches += 1
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(600)
            return stream
        if "limit" in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        return web.json_response({"metadata": {"name": "x", "resourceVersion": "1"}})

    async with served(handler) as kube:
        places = tuple(f"team-{number}" for number in range(namespaces))
        caches = PodCache(kube, namespaces=places), OwnedCache(kube, namespaces=places)
        tasks = [asyncio.create_task(cache.run()) for cache in caches]
        try:
            async with asyncio.timeout(60):
                while watches < 6 * namespaces:
                    await asyncio.sleep(0.02)
                assert await kube.get(DSV4_DEPLOYMENTS, "team-0", "x") is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("pieces", [1, 7, 4096])
async def test_events_of_any_length_arrive(pieces: int) -> None:
    event = {"type": "ADDED", "object": {"metadata": {"name": "x", "resourceVersion": "7"}, "data": "y" * 300_000}}
    line = json.dumps(event).encode() + b"\n"

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        for begin in range(0, 2 * len(line), size := len(line) // pieces + 1):
            await stream.write((2 * line)[begin : begin + size])
        return stream

    async with served(handler) as kube:
        found = [one async for one in kube.watch(PODS, "a", resource_version="1")]
        assert [one.object["data"] for one in found] == ["y" * 300_000] * 2


async def test_an_event_without_an_end_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_operator.kube.client._LINE_BYTES", 2**20)

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                await stream.write(b"x" * 2**16)
        return stream

    async with served(handler) as kube:
        with pytest.raises(Unavailable, match="more than 1048576 bytes"):
            await first_event(kube)
