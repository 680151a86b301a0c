"""Gateways without processes, for clusters in which gateway images are not available.

Their pods are on nodes of KWOK, with addresses of this machine (`scripted_agent.routed`). They respond to the
operator's canary as configured; the verification of the token is real.
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
    """Responds to the canary of one deployment, for a pod of its own and for every other gateway."""

    def __init__(self, kube: Client, namespace: str, deployment: str) -> None:
        self._kube, self._namespace, self._deployment = kube, namespace, deployment
        self.problem = ""
        """Reason for failing canaries; empty: canaries succeed."""
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
        """Run its pod on `node` and open its port."""
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
        """Open the port of every gateway with an address of this machine; other gateways run on real nodes."""
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
