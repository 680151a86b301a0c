"""Gateways without processes of their own, for clusters whose gateway images are nowhere.

Their pods are on nodes of KWOK, with addresses of this machine (`scripted_agent.routed`). They answer the operator's
canary as they are told; the check of the token is the real one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from dsv4_operator.builders import names
from dsv4_operator.kube import PODS, SECRETS, Client
from dsv4_runtime.contract.gateway import CanaryReport
from dsv4_runtime.contract.token import canary_token


class ScriptedGateway:
    """Answers the canary of one deployment, for a pod of its own and for every other one of its gateways."""

    def __init__(self, kube: Client, namespace: str, deployment: str) -> None:
        self._kube, self._namespace, self._deployment = kube, namespace, deployment
        self.problem = ""
        """Why it answers nobody; empty: it does."""
        self.asked = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        chosen = names.selector(names.labels(self._deployment))
        found = [one.get("data") or {} for one in await self._kube.list(SECRETS, self._namespace, labels=chosen)]
        keys = [base64.b64decode(data[names.TOKEN_KEY_ENTRY]) for data in found if names.TOKEN_KEY_ENTRY in data]
        opens = [f"Bearer {canary_token(key.decode().strip())}" for key in keys]
        known = request.headers.get("Authorization") in opens
        reason = self.problem if known else "wrong canary token"
        report = CanaryReport(ok=not reason, reason=reason, gateway="scripted")
        status = 401 if not known else 503 if reason else 200
        return web.Response(status=status, text=report.to_json(), content_type="application/json")

    @contextlib.asynccontextmanager
    async def running(self, node: str = "fake1") -> AsyncIterator[ScriptedGateway]:
        """Have its pod on `node` and its port open."""
        labels = names.labels(self._deployment, component=names.GATEWAY)
        name = f"{self._deployment}-scripted-gateway"
        await self._kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"namespace": self._namespace, "name": name, "labels": labels},
                "spec": {
                    "nodeName": node,
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "gateway", "image": "dsv4.test/none:1"}],
                },
            }
        )
        application = web.Application()
        application.router.add_get("/dsv4/canary", self.answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        listening = asyncio.create_task(self._listen(runner))
        try:
            yield self
        finally:
            listening.cancel()
            (ended,) = await asyncio.gather(listening, return_exceptions=True)
            await runner.cleanup()
            await self._kube.delete(PODS, self._namespace, name, grace_seconds=0)
            assert isinstance(ended, asyncio.CancelledError), f"a port was not opened: {ended!r}"

    async def _listen(self, runner: web.AppRunner) -> None:
        """Open the port of every gateway that has an address of this machine: the others are on real nodes."""
        chosen = names.selector(names.labels(self._deployment, component=names.GATEWAY))
        opened: set[str] = set()
        while True:
            pods = await self._kube.list(PODS, self._namespace, labels=chosen)
            addresses = {
                str(pod["status"]["podIP"])
                for pod in pods
                if str(pod["spec"].get("nodeName")).startswith("fake") and (pod.get("status") or {}).get("podIP")
            }
            for address in addresses - opened:
                await web.TCPSite(runner, address, names.GATEWAY_PORT).start()
            opened |= addresses
            await asyncio.sleep(0.1)
