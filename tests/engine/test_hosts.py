"""One engine on two machines without Kubernetes: host services, the loop, real Ray and vLLM, and a power cut."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsv4_operator.api import DSV4Deployment, GroupPhase, GroupStatus, parse
from dsv4_testkit.host_services import Loop, Machines, Switch

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(4000)]

START_SECONDS = 1500.0
"""Only a bound: a busy machine takes many minutes."""
REQUEST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


class Running:
    """A deployment with its machines and its loop."""

    def __init__(self, root: Path, port: Callable[[], int], restarts: int = 5) -> None:
        self.ports = {name: port() for name in ("api", "dashboard", "gcs", "agent")}
        self.deployment: DSV4Deployment = parse(
            {
                "apiVersion": "dsv4.dev/v1alpha1",
                "kind": "DSV4Deployment",
                "metadata": {"name": "nano"},
                "spec": {
                    "model": {"variant": "Nano", "source": {"nano": {"seed": 0, "precision": "bf16"}}},
                    "topology": {"hardware": "CPU", "nodesPerGroup": 2},
                    "engine": {"maxModelLen": 1024, "maxNumSeqs": 4, "maxNumBatchedTokens": 512},
                    "network": {"ports": self.ports},
                    "recovery": {"maxRestarts": restarts, "window": "1h", "backoff": {"base": "1s", "max": "30s"}},
                },
            }
        )
        self.switch = Switch()
        self.machines = Machines(root, port(), "nano", switch=self.switch)
        self.loop: Loop = self.machines.loop(self.deployment)
        self.loop.start()

    def group(self) -> GroupStatus:
        found = self.loop.object()
        return GroupStatus(index=0) if found is None or not found.status.groups else found.status.groups[0]

    def until(self, what: str, true: Callable[[GroupStatus], bool], seconds: float = START_SECONDS) -> float:
        """Wait for a condition of the group; return the seconds."""
        begun = time.monotonic()
        while not true(group := self.group()):
            log = self.loop.state.log
            last = log.read_text()[-3000:] if log.exists() else ""
            assert time.monotonic() - begun < seconds, f"{what}: {group}\n{last}"
            time.sleep(0.2)
        return time.monotonic() - begun

    def cut(self, machines: Sequence[int]) -> None:
        """Cut the power of machines; the loop runs on the first one."""
        if 0 in machines:
            self.loop.cut()
        for number in machines:
            self.machines.all[number].cut()

    def boot(self, number: int) -> None:
        """Switch a machine on."""
        self.machines.all[number].boot()
        if number == 0:
            self.loop.start()

    def weights(self) -> dict[str, str]:
        """Return the checksums of the files of the checkpoint on each machine."""
        return {
            f"{machine.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for machine in self.machines.all
            for path in sorted(machine.files.rglob("*.safetensors"))
        }

    def complete(self) -> int:
        """Return the tokens of a completion through the gateway, requested on the first machine."""
        return int(self.answer()["usage"]["completion_tokens"])

    def answer(self) -> dict[str, Any]:
        """Return a completion through the gateway, requested on the first machine."""
        body = {"model": "nano", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        url = f"http://127.0.0.1:{self.ports['api']}/v1/completions"
        command = [*self.machines.all[0].inside, sys.executable, "-c", REQUEST, url, json.dumps(body)]
        deadline = time.monotonic() + 60
        while True:
            found = subprocess.run(command, capture_output=True, check=False, timeout=90)
            if found.returncode == 0:
                found_answer: dict[str, Any] = json.loads(found.stdout)
                return found_answer
            # The sockets of the gateways exist once the loop's supervisor runs.
            assert b"Connection refused" in found.stderr, found.stderr
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def close(self) -> None:
        self.loop.cut()
        self.machines.close()
        self.switch.close()


CUTS = 20


def test_power_cuts_at_random_moments(unused_tcp_port_factory: Callable[[], int]) -> None:
    """Pairs of cuts: one while it serves, one after a random time; of any machines, which return in any order."""
    seed = int(os.environ.get("DSV4_TEST_SEED", "35"))
    source = random.Random(seed)
    print(f"DSV4_TEST_SEED={seed}")
    with tempfile.TemporaryDirectory(prefix="d") as root:
        running = Running(Path(root), unused_tcp_port_factory, restarts=2 * CUTS)
        try:
            start = running.until("it serves", lambda group: group.phase is GroupPhase.SERVING)
            first, weights = running.answer(), running.weights()
            assert weights
            seconds = []
            for number in range(CUTS // 2):
                served = running.group().incarnation
                for moment in (0.0, source.uniform(0.0, start)):
                    time.sleep(moment)
                    machines = source.choice([[0], [1], [0, 1]])
                    running.cut(machines)
                    phase = running.group().phase
                    for machine in source.sample(machines, len(machines)):
                        time.sleep(source.uniform(0.0, 5.0))
                        running.boot(machine)
                    print(f"cut of {machines} {moment:.1f} s after the last one: {phase}")
                taken = running.until(
                    f"it serves again after {2 * number + 2} cuts",
                    lambda group, served=served: group.phase is GroupPhase.SERVING and group.incarnation > served,
                    seconds=300.0,
                )
                answer = running.answer()
                assert answer["choices"][0]["text"] == first["choices"][0]["text"]
                assert running.weights() == weights
                seconds.append(taken)
            group = running.group()
            print(
                f"start {start:.1f} s; {CUTS} cuts; serving after the last machine's start in {min(seconds):.1f} to "
                f"{max(seconds):.1f} s; {group.incarnation} incarnations, {len(group.restarts)} restarts of the budget"
            )
            assert len(group.restarts) <= CUTS
        finally:
            running.close()


@pytest.fixture
def running(unused_tcp_port_factory: Callable[[], int]) -> Iterator[Running]:
    # A short path: Ray creates sockets below it.
    with tempfile.TemporaryDirectory(prefix="d") as root:
        found = Running(Path(root), unused_tcp_port_factory)
        try:
            yield found
        finally:
            found.close()


def test_a_power_cut_of_both_machines_while_serving(running: Running) -> None:
    start = running.until("it serves", lambda group: group.phase is GroupPhase.SERVING)
    assert running.complete() == 4
    first = running.group()
    assert [member.node for member in first.members] == ["spark-1", "spark-2"]
    # Only the loop is replaced, as in an upgrade: the engine keeps running.
    assert running.loop.stop(members=False) == 0
    running.loop.start()
    assert running.complete() == 4
    assert running.group().incarnation == first.incarnation

    for part in (running.loop, *running.machines.all):
        part.cut()
    for machine in running.machines.all:
        machine.boot()
    running.loop.start()
    again = running.until(
        "it serves again",
        lambda group: group.phase is GroupPhase.SERVING and group.incarnation > first.incarnation,
    )
    assert running.complete() == 4
    assert running.group().incarnation == first.incarnation + 1
    print(f"start {start:.1f} s, after a power cut of both {again:.1f} s")

    assert running.loop.stop(members=True) == 0
    assert [
        line for line in map(_line, psutil.process_iter()) if f"{running.machines.root}/state/_m/nano/i" in line
    ] == []


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
