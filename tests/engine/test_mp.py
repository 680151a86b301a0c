"""`executor: MP` on two members: no Ray, vLLM on each, and the verdicts of the fault table as with Ray.

One deployment serves all tests of this file, in order; its budget is exactly the number of faults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from signal import SIGKILL, SIGSTOP

import psutil
import pytest

from dsv4_testkit.faults.actions import Signal
from dsv4_testkit.faults.matrix import BY_NAME
from dsv4_testkit.faults.table import BOUND, Fault, Kind
from dsv4_testkit.harness import MANIFEST, Deployment, inflict, network_namespaces

pytestmark = [pytest.mark.engine, pytest.mark.long]

BUSY = 2.0
"""The bounds of the table are p95 of an idle machine; this factor allows for other work of a runner."""
START_SECONDS = 600.0
SAME_AS_RAY = (
    "kill -9 Ray worker of rank 1",
    "kill -9 Ray worker of rank 0",
    "SIGSTOP worker of rank 1",
    "SIGSTOP worker of rank 0",
    "kill -9 EngineCore",
    "kill -9 API process",
)
OWN = (
    Fault("kill -9 executor of rank 1", Kind.CERTAIN, Signal("executor", 1, SIGKILL), ("RayWorkerDied",), 1, 1),
    Fault("SIGSTOP executor of rank 1", Kind.HANG, Signal("executor", 1, SIGSTOP), ("EngineHung",), 1, 1),
)
FAULTS = (*(BY_NAME[name] for name in SAME_AS_RAY), *OWN)


@pytest.fixture(scope="module")
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    faults = sum(
        getattr(item, "originalname", "") == "test_the_verdict_is_that_of_ray" for item in request.session.items
    )
    # The duration of a start is not under test here, and a busy runner needs more time.
    manifest = MANIFEST.replace("engine: {{", "engine: {{executor: MP, timeouts: {{firstToken: 10m, load: 20m}}, ")
    assert manifest != MANIFEST
    found = Deployment("mp", restarts=faults, manifest=manifest)
    before = network_namespaces()
    try:
        seconds = found.up(START_SECONDS)
        print(f"\nup to ready, weights made: {seconds:.1f} s")
        yield found
        assert found.run("down", found.name, timeout=90).returncode == 0
        assert found.remains() == []
        assert network_namespaces() <= before
    finally:
        found.destroy()


def roles(deployment: Deployment, rank: int) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in deployment.group()["members"][rank]["processes"]}


def test_each_member_runs_vllm_and_none_runs_ray(deployment: Deployment) -> None:
    for rank, expected in enumerate((("agent", "api", "engine-core", "worker"), ("agent", "executor", "worker"))):
        for name in expected:
            deployment.pid(rank, name)
    head, other = roles(deployment, 0), roles(deployment, 1)
    assert {"ray", "raylet", "gcs"} & (head.keys() | other.keys()) == set()
    assert psutil.Process(other["worker"]).ppid() == other["executor"]
    assert os.readlink(f"/proc/{head['worker']}/ns/net") != os.readlink(f"/proc/{other['worker']}/ns/net")
    # Titles of idle workers and of the Ray node begin with these texts.
    assert [line for line in deployment.remains() if "ray::" in line or "raylet" in line] == []


def test_chat(deployment: Deployment) -> None:
    done = deployment.run("chat", deployment.name, "Say something.", "--max-tokens", "8", "--no-thinking", timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 2
    assert deployment.complete(timeout=180)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_the_verdict_is_that_of_ray(deployment: Deployment, fault: Fault) -> None:
    before = deployment.group()
    old = {rank: deployment.pid(rank, "worker") for rank in (0, 1)}
    row = inflict(deployment, fault)
    print(f"\n{fault.name}: noticed {row.detected:.2f} s, answered again {row.answered:.1f} s, {row.cause}")
    after = deployment.group()
    assert row.cause in fault.causes
    assert (row.culprit, row.level) == (fault.rank, fault.level)
    assert (after["incarnation"], after["totalRestarts"]) == (before["incarnation"], before["totalRestarts"] + 1)
    # The engine has started again on both members.
    for rank, worker in old.items():
        assert deployment.pid(rank, "worker") != worker
        assert not psutil.pid_exists(worker)
    assert row.detected < BUSY * BOUND[fault.kind]
