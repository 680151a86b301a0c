"""Alerts of the operator: a real one on a real API server, with scripted agents, and a real Prometheus.

Each fault fires its alert and no other one. All durations of the rules are divided by `prometheus.FASTER`.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import prometheus
import pytest
import yaml
from clusterkit.client import Cluster as ControlPlane
from clusterkit.layout import free_port
from operator_world import NAME, World, addresses, agents, group, kube, manifest, operated

from dsv4_operator.api.deployment import RESTART_AT
from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.builders import names
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, SECRETS, Client
from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import GatewayRoute, GatewaySettings
from dsv4_testkit import monitoring
from dsv4_testkit.certificates import certificate
from dsv4_testkit.scripted_agent import ScriptedAgents

__all__ = ["addresses", "agents", "kube"]

pytestmark = [prometheus.needed, pytest.mark.long, pytest.mark.usefixtures("definition"), pytest.mark.timeout(600)]
SETTLE_SECONDS = 5.0
NOT_DIVIDED = {"DSV4OperatorStalled"}
"""A quiet operator reconciles every 5 minutes, whatever the divided window is."""


class Gateway:
    """A real gateway; its mounted files, which are the kubelet's part, are written by the test."""

    def __init__(self, world: World, folder: Path, port: int) -> None:
        self._world, self._folder, self._port = world, folder, port
        self._process: subprocess.Popen[bytes] | None = None

    async def mount(self) -> None:
        """Write the key of the Secret, and the address of the present head."""
        world, folder = self._world, self._folder
        folder.mkdir(exist_ok=True)
        found = await world.live()
        name = names.token_key_name(NAME, found["metadata"]["uid"])
        secret = await world.kube.get(SECRETS, world.namespace, name)
        assert secret is not None
        head = await world.kube.get(PODS, world.namespace, f"{NAME}-0-i{group(found)['incarnation']}-r0")
        assert head is not None
        key, agent = folder / "key", f"http://{head['status']['podIP']}"
        route = GatewayRoute(agent=f"{agent}:8090", api=f"{agent}:8000", token_key_file=str(key))
        limits = GatewaySettings(
            served_names=("nano",),
            hold_timeout_seconds=10,
            max_held_requests=10,
            max_held_bytes=2**20,
            request_timeout_seconds=60,
            max_body_bytes=2**20,
            drain_seconds=0,
        )
        files = {
            "key": base64.b64decode(secret["data"][names.TOKEN_KEY_ENTRY]).decode(),
            "route.json": route.to_json(),
            "settings.json": limits.to_json(),
        }
        for file, text in files.items():
            (folder / "next").write_text(text)
            (folder / "next").replace(folder / file)

    def start(self) -> None:
        """Start it, instead of the one before: as the pod of a rollout."""
        self.kill()
        words = [f"--settings={self._folder}/settings.json", f"--route={self._folder}/route.json"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsv4_runtime.gateway.main", *words, f"--listen=127.0.0.1:{self._port}"],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)


@dataclass
class Watched:
    """An operator with Prometheus."""

    world: World
    url: str
    certificates: Path
    gateway: Gateway
    seen: set[str] = field(default_factory=set)

    async def fires(self, alert: str, within: float) -> None:
        """Wait for an alert; no further one may fire."""
        began = time.monotonic()
        await self.until(lambda firing: alert in firing, within)
        print(f"{alert}: after {time.monotonic() - began:.0f} s", flush=True)
        await asyncio.sleep(SETTLE_SECONDS)
        assert await self.firing() == self.seen | {alert}

    async def ends(self, alert: str, within: float) -> None:
        await self.until(lambda firing: alert not in firing, within)

    async def until(self, true: Callable[[set[str]], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true(firing := await self.firing()):
            assert time.monotonic() < deadline, f"{firing}\n{self.world.operator.log.read_text()[-3000:]}"
            await asyncio.sleep(0.5)

    async def until_metric(self, query: str, seconds: float) -> None:
        """Wait until a query has a result."""
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(prometheus.ask, self.url, query):
            assert time.monotonic() < deadline, query
            await asyncio.sleep(0.5)

    async def firing(self) -> set[str]:
        return await asyncio.to_thread(prometheus.firing, self.url)


@pytest.fixture
async def watched(
    operator_kubeconfig: Path, kube: Client, agents: ScriptedAgents, namespace: str, tmp_path: Path
) -> AsyncIterator[Watched]:
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    certificate(certificates, "webhook", hours=365 * 24)
    rules = yaml.safe_load(prometheus.faster(monitoring.ALERTS.read_text()))
    for part in rules["groups"]:
        part["rules"] = [rule for rule in part["rules"] if rule["alert"] not in NOT_DIVIDED]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    more = [f"--webhook-port={free_port()}", f"--webhook-certificates={certificates}"]
    async with operated(operator_kubeconfig, kube, namespace, tmp_path / "operator.log", more) as world:
        ports = {"operator": world.operator.port, "gateway": free_port()}
        labels = {"operator": {}, "gateway": {"namespace": namespace, "deployment": NAME}}
        with prometheus.running(tmp_path, ports, labels, tmp_path / "alerts.yaml") as url:
            await world.kube.create(manifest(namespace))
            await world.serving(1)
            found = Watched(world, url, certificates, Gateway(world, tmp_path / "gateway", ports["gateway"]))
            deadline = time.monotonic() + 60
            while not await asyncio.to_thread(_scraped, url):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                await asyncio.sleep(0.5)
            assert await found.firing() == set()
            try:
                yield found
            finally:
                found.gateway.kill()


def _scraped(url: str) -> bool:
    try:
        return bool(prometheus.ask(url, "count_over_time(dsv4_group_phase[1m]) >= 3"))
    except OSError:
        return False


async def test_reports_of_agents(watched: Watched, agents: ScriptedAgents) -> None:
    """The agents' reports are scripted; status, metrics and alerts are those of the operator."""
    world = watched.world
    head = agents.agent(world.namespace, NAME, 0)
    head.state.warn(("GPU 0: clock 1200 of 2600 MHz under load",))
    await watched.fires("DSV4GpuThrottled", 60)
    head.state.warn(())
    await watched.ends("DSV4GpuThrottled", 30)
    script = agents.script(world.namespace, NAME, 0)
    script.fails = Cause.NCCL_SOCKET_FALLBACK
    await world.until("it has failed", lambda found: bool(group(found).get("history")))
    script.fails = None
    await world.serving(2)
    await watched.fires("DSV4SocketFallback", 20)


async def test_a_certificate_that_expires(watched: Watched) -> None:
    certificate(watched.certificates, "webhook", hours=13 * 24)
    await watched.fires("DSV4WebhookCertificateExpires", 60)
    certificate(watched.certificates, "webhook", hours=365 * 24)
    await watched.ends("DSV4WebhookCertificateExpires", 60)


async def test_a_quota_and_the_end_of_the_operator(watched: Watched, cluster: ControlPlane) -> None:
    world = watched.world
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": world.namespace},
        "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}},
    }
    cluster.apply(quota)
    await world.kube.create(manifest(world.namespace, "other"))
    await watched.fires("DSV4OperatorFailing", 120)
    # It lasts, although the pauses between attempts grow.
    await asyncio.sleep(60)
    assert await watched.firing() == {"DSV4OperatorFailing"}
    await world.kube.delete(DSV4_DEPLOYMENTS, world.namespace, "other")
    await watched.ends("DSV4OperatorFailing", 60)
    world.operator.end(signal.SIGKILL)
    await watched.fires("DSV4OperatorDown", 60)
    world.operator.start()
    await world.operator.until_leading()
    await watched.ends("DSV4OperatorDown", 30)


async def test_another_token_key(watched: Watched) -> None:
    """A gateway that runs keeps its token; a new one has a key that the agents do not know."""
    world, gateway = watched.world, watched.gateway
    await gateway.mount()
    gateway.start()
    rejected = "dsv4_gateway_credentials_rejected == 0 and on () dsv4_gateway_watch_age_seconds < 3"
    await watched.until_metric(rejected, 30)
    found = await world.live()
    name = names.token_key_name(NAME, found["metadata"]["uid"])
    changed = {"data": {names.TOKEN_KEY_ENTRY: base64.b64encode(b"another key").decode()}}
    await world.kube.patch(SECRETS, world.namespace, name, changed)
    await gateway.mount()
    await asyncio.sleep(SETTLE_SECONDS)
    await watched.until_metric(rejected, 5)
    gateway.start()
    await watched.fires("DSV4CredentialsRejected", 60)
    # The remedy; at once, although the operator has the former key in its cache.
    await world.change(annotations={RESTART_AT: "2026-11-26T00:00:00Z"})
    await world.serving(2)
    await gateway.mount()
    await watched.ends("DSV4CredentialsRejected", 30)
    await watched.until_metric(rejected, 10)
