"""The operator as a process of this machine, which tests may end in any way."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from clusterkit.layout import free_port

from dsv4_operator.backends.local.network import die_with_parent

POLICY = {
    "tolerationKeys": ["kwok.x-k8s.io/node"],
    "images": ["dsv4.test/"],
    "engineVariables": ["APP_WITH_A_MISTAKE"],
}
START_SECONDS = 90.0
"""Limit for the start of an interpreter during other work."""


class OperatorProcess:
    """`dsv4-operator` for one namespace."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        log: Path,
        *,
        identity: str | None = None,
        profile: Path | None = None,
        backends: Sequence[str] = (),
        more: Sequence[str] = (),
        namespaces: Sequence[str] = (),
    ) -> None:
        """Args:
        kubeconfig: account of the operator.
        namespace: of deployments and lease.
        log: the output is appended here.
        identity: None: a new one each time.
        profile: file for cProfile's result, written when the operator ends.
        backends: allowed by its policy besides Pods.
        more: further flags.
        namespaces: namespaces of further deployments.
        """
        self.log = log
        self.port = free_port()
        """Of its metrics."""
        policy = log.with_suffix(".policy")
        policy.write_text(json.dumps({**POLICY, "backends": backends}))
        profiled = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
        self._command = [sys.executable, *profiled, "-m", "dsv4_operator.controller.operator"]
        self._command += [f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", f"--lease-namespace={namespace}"]
        self._command += [f"--policy={policy}", *(f"--namespace={one}" for one in namespaces)]
        self._command += [f"--metrics-port={self.port}", "--runtime-image=dsv4.test/none:1", *more]
        self._command += [f"--identity={identity}"] if identity else []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; see `leads`."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        return self._process.wait(seconds)

    def kill(self) -> None:
        """Kill it, also if it is stopped or has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(60)

    @property
    def pid(self) -> int:
        """Return its process id; it must have been started."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def rss_bytes(self) -> int:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

    def metrics(self) -> dict[str, float]:
        """Return every sample by its name with labels; empty while it does not respond."""
        try:
            text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60, trust_env=False).text
        except httpx.HTTPError:
            return {}
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def requests(self) -> dict[str, float]:
        """Return the number of requests to the API server by method."""
        found: dict[str, float] = {}
        for name, value in self.metrics().items():
            if match := re.match(r'dsv4_operator_requests_total\{method="(\w+)"', name):
                found[match[1]] = found.get(match[1], 0) + value
        return found

    @property
    def leads(self) -> bool:
        return self.metrics().get("dsv4_operator_leading") == 1.0

    async def until_leading(self, seconds: float = START_SECONDS) -> float:
        """Wait until it leads; return the seconds."""
        began = time.monotonic()
        await until("it leads", lambda: self.leads, seconds=seconds, said=self.log)
        return time.monotonic() - began


async def until(what: str, true: Callable[[], bool], *, seconds: float, said: Path | None = None) -> None:
    """Wait for a condition; fail after `seconds` with the end of the log `said`."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(true):
        if time.monotonic() > deadline:
            words = said.read_text()[-3000:] if said is not None else ""
            raise AssertionError(f"{what}: not so after {seconds:.0f} s\n{words}")
        await asyncio.sleep(0.05)
