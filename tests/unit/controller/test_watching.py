"""The watch of the deployments on an API server whose answers kopf takes for its end."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from aiohttp import web

from dsv4_operator.controller import watching
from dsv4_operator.controller.watching import DeploymentWatch
from dsv4_operator.kube import Access, Manifest


def kind(name: str, of: str, *, namespaced: bool = True) -> dict[str, object]:
    verbs = ["get", "list", "patch", "watch", "create"]
    return {"name": name, "singularName": of.lower(), "kind": of, "namespaced": namespaced, "verbs": verbs}


_VERSION = {"version": "v1alpha1", "groupVersion": "dsv4.dev/v1alpha1"}
# kopf waits for all of them.
DISCOVERY = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [kind("namespaces", "Namespace", namespaced=False), kind("events", "Event")]},
    "/apis": {"groups": [{"name": "dsv4.dev", "versions": [_VERSION], "preferredVersion": _VERSION}]},
    "/apis/dsv4.dev/v1alpha1": {"resources": [kind("dsv4deployments", "DSV4Deployment")]},
}


def deployment(name: str, version: int) -> Manifest:
    about = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": about, "spec": {}}


class Server:
    """Two watches fail, in ways that kopf ends for and that it does not; the third tells of a second deployment."""

    def __init__(self) -> None:
        self.watches = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if "watch" not in request.query:
            items = {"metadata": {"resourceVersion": "1"}, "items": [deployment("first", 1)]}
            return web.json_response({"kind": "DSV4DeploymentList", **items})
        self.watches += 1
        if self.watches == 2:
            return web.json_response({"kind": "Status", "code": 500, "message": "away"}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if self.watches == 1:
            error = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "leader changed"}
            await response.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
            return response
        event = {"type": "ADDED", "object": deployment("second", 2)}
        await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(600)
        return response


async def test_no_answer_ends_the_watch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_FIRST_PAUSE", 0.1)
    logging.getLogger("kopf._core.reactor").setLevel(logging.CRITICAL)
    server, heard, news = Server(), list[str](), asyncio.Event()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    def told(manifest: Manifest, gone: bool) -> None:
        assert not gone
        heard.append(manifest["metadata"]["name"])
        if "second" in heard:
            news.set()

    host, port = runner.addresses[0][:2]
    watch = DeploymentWatch(Access(f"http://{host}:{port}"), ["team"], told)
    watch.start()
    try:
        async with asyncio.timeout(60):
            await news.wait()
    finally:
        await watch.close()
        await runner.cleanup()
    assert (server.watches, set(heard)) == (3, {"first", "second"})
    (said,) = (record.message for record in caplog.records if record.name == "dsv4")
    assert said.startswith("watching the deployments is broken, again in ")
