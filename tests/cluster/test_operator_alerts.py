"""Alerts of the operator: a real one on a real API server, with scripted agents, and a real Prometheus.

Each fault fires its alert and no other one. All durations of the rules are divided by `prometheus.FASTER`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import prometheus
import pytest
import yaml
from clusterkit.client import Cluster as ControlPlane
from clusterkit.layout import free_port
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from operator_world import NAME, World, addresses, agents, group, kube, manifest, operated

from dsv4_operator.kube import DSV4_DEPLOYMENTS, Client
from dsv4_runtime.contract import Cause
from dsv4_testkit import monitoring
from dsv4_testkit.scripted_agent import ScriptedAgents

__all__ = ["addresses", "agents", "kube"]

pytestmark = [prometheus.needed, pytest.mark.long, pytest.mark.usefixtures("definition"), pytest.mark.timeout(600)]
SETTLE_SECONDS = 5.0
NOT_DIVIDED = {"DSV4OperatorStalled"}
"""A quiet operator reconciles every 5 minutes, whatever the divided window is."""


def certificate(folder: Path, days: float) -> None:
    """Write a certificate that is valid for `days` more."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dsv4-operator-webhook")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=days))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    for file, content in (("tls.key", private), ("tls.crt", public)):
        (folder / "next").write_bytes(content)
        (folder / "next").replace(folder / file)


@dataclass
class Watched:
    """An operator with Prometheus."""

    world: World
    url: str
    certificates: Path
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

    async def firing(self) -> set[str]:
        return await asyncio.to_thread(prometheus.firing, self.url)


@pytest.fixture
async def watched(
    operator_kubeconfig: Path, kube: Client, agents: ScriptedAgents, namespace: str, tmp_path: Path
) -> AsyncIterator[Watched]:
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    certificate(certificates, 365)
    rules = yaml.safe_load(prometheus.faster(monitoring.ALERTS.read_text()))
    for part in rules["groups"]:
        part["rules"] = [rule for rule in part["rules"] if rule["alert"] not in NOT_DIVIDED]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    more = [f"--webhook-port={free_port()}", f"--webhook-certificates={certificates}"]
    async with operated(operator_kubeconfig, kube, namespace, tmp_path / "operator.log", more) as world:
        ports = {"operator": world.operator.port}
        with prometheus.running(tmp_path, ports, {"operator": {}}, tmp_path / "alerts.yaml") as url:
            await world.kube.create(manifest(namespace))
            await world.serving(1)
            found = Watched(world, url, certificates)
            deadline = time.monotonic() + 60
            while not await asyncio.to_thread(_scraped, url):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                await asyncio.sleep(0.5)
            assert await found.firing() == set()
            yield found


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
    certificate(watched.certificates, 13)
    await watched.fires("DSV4WebhookCertificateExpires", 60)
    certificate(watched.certificates, 365)
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
    await asyncio.sleep(45)
    assert await watched.firing() == {"DSV4OperatorFailing"}
    await world.kube.delete(DSV4_DEPLOYMENTS, world.namespace, "other")
    await watched.ends("DSV4OperatorFailing", 60)
    world.operator.end(signal.SIGKILL)
    await watched.fires("DSV4OperatorDown", 60)
    world.operator.start()
    await world.operator.until_leading()
    await watched.ends("DSV4OperatorDown", 30)
