"""A deployment without a private network, as for users without root or without iproute2: one member on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsv4_testkit.harness import MANIFEST, Deployment, first_failure

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

_STANDBY_SECONDS = 240.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    programs = tmp_path_factory.mktemp("bin")
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(place).glob("*"):
            if file.name != "ip":
                (programs / file.name).unlink(missing_ok=True)
                (programs / file.name).symlink_to(file)
    assert shutil.which("ip", path=str(programs)) is None
    # Ray's executor has a worker for each device; one device needs no Ray.
    manifest = MANIFEST.replace("devicesPerNode: 1", "devicesPerNode: 2")
    found = Deployment("shared", nodes=1, environment={"PATH": str(programs)}, manifest=manifest)
    try:
        found.up(400.0)
        assert "network shared" in found.log()
        yield found
    finally:
        found.destroy()


def waiting(deployment: Deployment) -> list[int]:
    """Return Ray's waiting processes that have imported vLLM."""
    below = psutil.Process(deployment.pid(0, "agent")).children(recursive=True)
    idle = [process.pid for process in below if process.cmdline()[:1] == ["ray::IDLE"]]
    return [pid for pid in idle if "/libtorch" in Path(f"/proc/{pid}/maps").read_text()]


def workers(deployment: Deployment) -> set[int]:
    return {one["pid"] for one in deployment.group()["members"][0]["processes"] if one["name"] == "worker"}


def test_the_next_engine_gets_the_waiting_workers_of_ray(deployment: Deployment) -> None:
    deadline = time.monotonic() + _STANDBY_SECONDS
    while len(found := waiting(deployment)) < 2:
        assert time.monotonic() < deadline, f"waiting: {found}\n{deployment.log()}"
        time.sleep(1.0)
    since = time.time()
    os.kill(deployment.pid(0, "engine-core"), signal.SIGKILL)
    failure = first_failure(deployment.wait("Serving", since=since), since)
    assert (failure["cause"], failure["level"]) == ("EngineCoreDied", 1)
    assert deployment.complete(timeout=180)["usage"]["completion_tokens"] == 4
    deadline = time.monotonic() + 60.0
    # The status lists the processes of a new engine shortly after it serves.
    while workers(deployment) != set(found):
        assert time.monotonic() < deadline, f"workers {workers(deployment)}, waiting before: {found}"
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "MemberLost"), (signal.SIGSTOP, "NodeLost")], ids=["killed", "stopped"]
)
def test_no_process_of_a_lost_agent_delays_the_next_one(
    deployment: Deployment, number: signal.Signals, cause: str
) -> None:
    """Without a process namespace, Ray and the engine outlive the agent, with their ports and memory."""
    agent = psutil.Process(deployment.pid(0, "agent"))
    below = agent.children(recursive=True)
    assert {"raylet", "gcs_server"} <= {process.name() for process in below}
    since = time.time()
    agent.send_signal(number)
    failure = first_failure(deployment.wait("Serving", since=since), since)
    assert (failure["cause"], failure["level"]) == (cause, 2)
    assert [process for process in below if process.is_running()] == []
    assert deployment.complete(timeout=180)["usage"]["completion_tokens"] == 4
