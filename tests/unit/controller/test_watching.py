"""The watch of the deployments on an API server whose answers kopf takes for its end, and of a lost namespace."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dsv4_operator.api import ClusterPolicy
from dsv4_operator.controller import operator as of_operator
from dsv4_operator.controller import watching
from dsv4_operator.controller.operator import Operator, OperatorOptions
from dsv4_operator.controller.watching import DeploymentWatch
from dsv4_operator.kube import Access, Manifest
from dsv4_testkit.waiting import free_ports


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
    watch = DeploymentWatch(Access(f"http://{host}:{port}"), "team", told)
    watch.start()
    try:
        async with asyncio.timeout(60):
            await news.wait()
    finally:
        await watch.close()
        await runner.cleanup()
    assert (server.watches, set(heard)) == (3, {"first", "second"})
    (said,) = (record.message for record in caplog.records if record.name == "dsv4")
    assert said.startswith("watching the deployments of team is broken, again in ")


GONE = "gone"
SECONDS = 30.0


class Namespaces:
    """An API server with one deployment in each namespace and nothing else. With a namespace, the operator's Role in it
    is gone, so requests get 403."""

    def __init__(self) -> None:
        self.forbidden = {GONE}
        self.reconciled: set[str] = set()
        self.listed_pods: set[str] = set()
        self.early: list[str] = []
        """Namespaces whose deployments were reconciled before their pods were listed."""
        self.news = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        if namespace in self.forbidden:
            said = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": f"not in {namespace}"}
            return web.json_response(said, status=403)
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if "leases" in parts:
            return await self._lease(request)
        if "watch" in request.query:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            await asyncio.sleep(SECONDS)
            return response
        if parts[-1] == "dsv4deployments":
            about = {"namespace": namespace, "name": "d", "uid": namespace, "resourceVersion": "1"}
            return web.json_response(_listing([{**deployment("d", 1), "metadata": about}]))
        if parts[-2] == "dsv4deployments":
            # The first reconcile of a deployment reads it.
            self.early += [namespace] if namespace not in self.listed_pods else []
            self.reconciled.add(namespace)
            self.news.set()
            return web.json_response({"kind": "Status", "code": 404, "message": "deleted"}, status=404)
        if parts[-1] == "pods":
            await asyncio.sleep(2.0)
            self.listed_pods.add(namespace)
        return web.json_response(_listing([]))

    async def _lease(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"kind": "Status", "code": 404, "message": "no lease"}, status=404)
        lease = json.loads(await request.read())
        lease["metadata"] |= {"resourceVersion": "1", "uid": "lease"}
        return web.json_response(lease)

    async def until(self, *namespaces: str) -> None:
        """Wait until the deployments of these namespaces were reconciled."""
        async with asyncio.timeout(SECONDS):
            while not self.reconciled >= set(namespaces):
                self.news.clear()
                await self.news.wait()


def _listing(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items}


async def test_a_namespace_that_is_gone_delays_no_other_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_operator, "_CACHES_SECONDS", 0.5)
    server = Namespaces()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    access = Access(f"http://{host}:{port}")
    (probes,) = free_ports(1)
    nowhere = Path("/nonexistent")
    options = OperatorOptions(
        (GONE, "team"), "system", probes, None, nowhere, "one", None, nowhere, "image", ClusterPolicy()
    )
    operator = Operator(access, options)
    running = asyncio.create_task(operator._work())
    try:
        await server.until("team")
        assert server.reconciled == {"team"}
        # Created again, with the Role.
        server.forbidden.clear()
        await server.until("team", GONE)
        assert not server.early
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await operator._backends.close()
        await operator._kube.close()
        await operator._plain.close()
        await runner.cleanup()
