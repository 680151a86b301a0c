"""Alerts on a real engine: each fault of a nano deployment fires its alert in a real Prometheus, and no other one.

Prometheus scrapes the gateways, and the operator's exporter with the status of the deployment. All durations of the
rules are divided by `FASTER`. `test_operator_alerts.py` tests the alerts of the operator, `test_monitoring.py` those of
faults that are impossible without GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import prometheus
import pytest
import yaml
from prometheus import FASTER, faster

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.backends.local.supervisor import read_report
from dsv4_operator.controller.observability import OperatorMetrics
from dsv4_testkit import monitoring
from dsv4_testkit.faults.load import Load, Shape
from dsv4_testkit.faults.own import Own
from dsv4_testkit.faults.system import DSV4, HOOK
from dsv4_testkit.faults.table import BY_NAME
from dsv4_testkit.harness import MANIFEST, Deployment

pytestmark = [prometheus.needed, pytest.mark.long, pytest.mark.timeout(900)]
SETTLE_SECONDS = 8.0
"""Time for a further alert after the expected one."""
BACKOFF = "backoff: {{base: 0s, max: 0s}}"


@dataclass
class World:
    """A deployment with Prometheus."""

    system: DSV4
    url: str
    seen: set[str] = field(default_factory=set)
    """Alerts that fired in earlier steps."""

    @property
    def deployment(self) -> Deployment:
        assert self.system.deployment is not None
        return self.system.deployment

    def strike(self, fault: str) -> None:
        """Inflict a fault and wait until the group serves again."""
        died = time.time()
        BY_NAME[fault].action.strike(self.system)
        self.wait(
            lambda: bool(self.system.verdicts(died)) and self.system.verdicts(died)[-1].recovered is not None, 150
        )
        self.wait(self.system.settled, 60)

    def fires(self, alert: str, within: float) -> None:
        """Wait for an alert; no further one may fire."""
        began = time.monotonic()
        self.wait(
            lambda: alert in prometheus.firing(self.url), within, lambda: f"{alert}: {prometheus.firing(self.url)}"
        )
        print(f"{alert}: after {time.monotonic() - began:.0f} s", flush=True)
        time.sleep(SETTLE_SECONDS)
        self.seen.add(alert)
        self.quiet()

    def quiet(self) -> None:
        """Check that no alerts fire except those of earlier steps."""
        assert prometheus.firing(self.url) <= self.seen, self.deployment.log()[-2000:]

    def wait(self, condition: Callable[[], bool], seconds: float, text: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{text()}\n{self.deployment.log()[-2000:]}"
            time.sleep(0.5)

    def load(self, seconds: float, **shape: Any) -> None:
        with Load(self.deployment.api, self.deployment.name, Shape(**shape), "0") as load:
            time.sleep(seconds)
        assert load.answered()

    def ask(self, tokens: int = 4, timeout: float = 60.0) -> int:
        """Return the HTTP status of a request."""
        body = {"model": self.deployment.name, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.deployment.api}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return int(error.code)


@contextlib.contextmanager
def exporter(deployment: Deployment) -> Iterator[int]:
    """Serve the operator's metrics of the deployment's status and of the beats of its loop; yield the port."""
    state, metrics, beats = DeploymentState(deployment.root, deployment.name), OperatorMetrics(), set[float]()

    def deployments() -> list[DSV4Deployment]:
        return [found for found in (state.object(),) if found is not None]

    metrics.observe(deployments, lambda: True, lambda: 0, lambda: None)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (supervisor := state.holder()) and (report := read_report(supervisor)) and report.beat not in beats:
                beats.add(report.beat or 0.0)
                metrics.reconciles.labels("ok").inc()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics.text())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def world(
    folder: Path,
    name: str,
    *,
    nodes: int = 1,
    restarts: int = 50,
    manifest: str = MANIFEST,
    operator: bool = True,
) -> Iterator[World]:
    """Start a deployment and Prometheus, with the operator's exporter or as on a machine without Kubernetes."""
    rules = folder / "alerts.yaml"
    rules.write_text(faster(monitoring.ALERTS.read_text()))
    system = DSV4()
    system.deployment = Deployment(name, nodes=nodes, restarts=restarts, manifest=manifest)
    system.deployment.environment[HOOK] = str(system.deployment.root / "order")
    labels = {"namespace": "default", "deployment": name}
    try:
        print(f"{name}: up {system.deployment.up():.0f} s", flush=True)
        with exporter(system.deployment) as port:
            ports = {"gateway": system.deployment.api, **({"operator": port} if operator else {})}
            with prometheus.running(folder, ports, {"operator": {}, "gateway": labels}, rules) as url:
                found = World(system, url)
                found.wait(lambda: _scraped(url, len(ports)), 60, lambda: (folder / "log").read_text())
                found.load(5.0, clients=2)
                found.quiet()
                yield found
    finally:
        system.close()


def _scraped(url: str, number: int) -> bool:
    try:
        return len(prometheus.ask(url, "count_over_time(up[1m]) >= 3 and up == 1")) == number
    except OSError:
        return False


def test_the_durations_are_divided() -> None:
    before, after = (
        yaml.safe_load(text) for text in (monitoring.ALERTS.read_text(), faster(monitoring.ALERTS.read_text()))
    )
    rules = [[rule for group in found["groups"] for rule in group["rules"]] for found in (before, after)]
    for one, other in zip(*rules, strict=True):
        minutes = [int(found) for found in re.findall(r"(\d+)m", one.get("for", ""))]
        assert other.get("for", "") == "".join(f"{60 * found // FASTER}s" for found in minutes)
        assert not re.search(r"\[\d+[mhd]\]", other["expr"])


def test_two_hangs(tmp_path: Path) -> None:
    with world(tmp_path, "hangs") as found:
        found.strike("SIGSTOP EngineCore")
        found.quiet()
        found.strike("SIGSTOP EngineCore")
        found.fires("DSV4EngineHangsOften", 20)


def test_a_link_and_three_restarts(tmp_path: Path) -> None:
    with world(tmp_path, "links", nodes=2) as found:
        found.strike("packets from member 0 to member 1 lost")
        found.fires("DSV4LinkFailing", 20)
        found.strike("kill -9 EngineCore")
        found.quiet()
        found.strike("kill -9 EngineCore")
        found.fires("DSV4RestartsOften", 30)


def test_damaged_weights(tmp_path: Path) -> None:
    with world(tmp_path, "damage") as found:
        found.strike("NaN in a weight file, at the next start")
        found.fires("DSV4WeightsDamaged", 30)


def test_a_budget_that_ends(tmp_path: Path) -> None:
    """The second restart waits for a backoff, the third one is not allowed."""
    manifest = MANIFEST.replace(BACKOFF, "backoff: {{base: 130s, max: 130s}}")
    with world(tmp_path, "budget", restarts=2, manifest=manifest) as found:
        found.strike("kill -9 EngineCore")
        found.fires("DSV4RestartBudgetLow", 20)
        struck = time.time()
        BY_NAME["kill -9 EngineCore"].action.strike(found.system)
        held = threading.Thread(target=lambda: found.ask(timeout=240), daemon=True)
        held.start()
        found.fires("DSV4RequestsHeld", 60)
        found.fires("DSV4GroupNotServing", 120)
        found.wait(lambda: found.system.verdicts(struck)[-1].recovered is not None, 150)
        held.join(30)
        BY_NAME["kill -9 EngineCore"].action.strike(found.system)
        found.fires("DSV4RecoveryExhausted", 60)
        assert found.ask() == 503
        found.fires("DSV4RequestsLost", 30)


def test_a_token_key_that_cannot_be_read(tmp_path: Path) -> None:
    """The loop writes a wrong or missing key anew within seconds, so the file is one that it cannot replace."""
    with world(tmp_path, "key") as found:
        key = found.deployment.directory / "token-key"
        key.unlink()
        key.mkdir()
        # Running gateways have a token already.
        for pid in Own.GATEWAY.find(found.system):
            os.kill(pid, signal.SIGKILL)
        found.fires("DSV4CredentialsRejected", 60)
        key.rmdir()
        found.wait(lambda: not prometheus.firing(found.url), 60)
        assert found.ask() == 200


def test_a_silent_loop_and_a_silent_agent(tmp_path: Path) -> None:
    """Nothing may repair them: neither the supervisor nor, for the agent, the loop."""
    with world(tmp_path, "silent", operator=False) as found:
        stopped = [found.system.network, *Own.LOOP.find(found.system), found.system.pid(0, "agent")]
        assert len(stopped) == 3
        supervisor, loop, agent = stopped
        try:
            for pid in (supervisor, loop):
                os.kill(pid, signal.SIGSTOP)
            found.fires("DSV4LoopSilent", 150)
            os.kill(agent, signal.SIGSTOP)
            found.fires("DSV4AgentSilent", 150)
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
