"""`dsv4 up` of the Nano model over two GPUs of this machine, tensor parallel: it responds, and recovers as a whole.

Once with weights from the disk at each start, and once with weights that outlive the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import needs
import psutil
import pytest
from page import Page
from served import DEATH_SECONDS, HANG_SECONDS, MANIFEST, SERVES_SECONDS, recovered

from dsv4_operator.backends.local.gpus import find
from dsv4_runtime.util.peer_copies import Outcome, try_copies
from dsv4_runtime.vllm_plugin.warm_pool import WAITS
from dsv4_testkit.harness import Deployment

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)
if len(find().cards) < 2:
    pytest.skip("there is one GPU", allow_module_level=True)


RETAINED = MANIFEST.replace("kernels: auto", "kernels: auto\n    retainWeights: true")
MAPPED = re.compile(r"dsv4 retained weights: .* segments mapped, .*")
"""Of each worker whose start mapped the weights; the durations in it make it unique."""


_STANDBY_SECONDS = 150.0
"""Until the processes of the next engine have imported vLLM."""


@pytest.fixture(scope="module", params=["disk", "retained"])
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deployment(weights: str, page: Page) -> Iterator[Deployment]:
    manifest = RETAINED if weights == "retained" else MANIFEST
    found = Deployment(f"two-{weights}", nodes=2, restarts=20, manifest=manifest)
    try:
        seconds = found.up(SERVES_SECONDS)
        page.row("Engine", ("what", "here"), f"two GPUs, {weights}: from `dsv4 up` to ready", f"{seconds:.1f} s")
        yield found
    finally:
        found.destroy()


def test_copies_between_the_two_gpus_are_correct(page: Page) -> None:
    found = try_copies(nvlink=True)
    page.row("Engine", ("what", "here"), "two GPUs: copies between them", found.found)
    assert found.outcome is Outcome.PASSED, found.found
    assert "by copy engine, loads and stores" in found.found


def workers(deployment: Deployment) -> list[int]:
    processes = deployment.group()["members"][0]["processes"]
    return [int(one["pid"]) for one in processes if one["name"] == "worker"]


def wait_for_standby(deployment: Deployment, servers: int) -> None:
    """Wait until Ray's two waiting workers and the last of `servers` standby servers have imported vLLM."""
    deadline = time.monotonic() + _STANDBY_SECONDS
    while (found := _standby(deployment)) != (servers, 2):
        assert time.monotonic() < deadline, f"standby servers so far, waiting workers: {found}"
        time.sleep(1.0)


def _standby(deployment: Deployment) -> tuple[int, int]:
    """Return the number of standby servers that have imported vLLM since the start, and of Ray's waiting workers."""
    logs = deployment.directory.glob("i*/m0/standby.log")
    servers, workers = sum(log.read_text(errors="replace").count(WAITS) for log in logs), 0
    for process in psutil.Process(deployment.pid(0, "agent")).children(recursive=True):
        # Ray's titles of processes replace their environment too.
        with contextlib.suppress(psutil.Error, OSError):
            if process.cmdline()[:1] == ["ray::IDLE"]:
                workers += "/libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    return servers, workers


def mapped(deployment: Deployment) -> int:
    """Return the number of loads that mapped kept memory, in the logs of all incarnations."""
    lines: set[str] = set()
    for path in deployment.directory.glob("i*/m*/**/*"):
        if path.suffix in {".log", ".out", ".err"} and path.is_file():
            lines.update(MAPPED.findall(path.read_text(errors="replace")))
    return len(lines)


def test_both_gpus_compute_the_answer(deployment: Deployment, weights: str, page: Page) -> None:
    begun = time.monotonic()
    answer = deployment.complete("How far is the sea?", tokens=64, timeout=120)
    assert answer["usage"]["completion_tokens"] == 64
    seconds = time.monotonic() - begun
    page.row("Engine", ("what", "here"), f"two GPUs, {weights}: 64 tokens, alone", f"{seconds:.2f} s")
    page.row("Engine", ("what", "here"), f"two GPUs, {weights}: its text", answer["choices"][0]["text"])
    plan = json.loads(max(deployment.directory.glob("i*/plan.json")).read_text())
    held = {card.uuid for card in find().cards if {pid for pid, _ in card.holders} & set(workers(deployment))}
    assert held == set(plan["members"][0]["gpus"])
    assert len(held) == 2


@pytest.fixture(scope="module")
def before(deployment: Deployment) -> str:
    """Return the text of the first engine."""
    return str(deployment.complete("How far is the sea?", tokens=64, timeout=120)["choices"][0]["text"])


def test_a_worker_killed(deployment: Deployment, weights: str, page: Page, before: str) -> None:
    wait_for_standby(deployment, 1)
    known, since = mapped(deployment), time.time()
    os.kill(workers(deployment)[-1], signal.SIGKILL)
    failure = recovered(deployment, page, f"two GPUs, {weights}: one worker killed", since)
    assert failure["level"] == 1
    assert failure["seconds"] <= DEATH_SECONDS
    assert mapped(deployment) - known == (2 if weights == "retained" else 0)
    assert deployment.complete("How far is the sea?", tokens=64, timeout=120)["choices"][0]["text"] == before


def test_a_worker_stopped(deployment: Deployment, weights: str, page: Page, before: str) -> None:
    wait_for_standby(deployment, 2)
    known, since = mapped(deployment), time.time()
    os.kill(workers(deployment)[-1], signal.SIGSTOP)
    failure = recovered(deployment, page, f"two GPUs, {weights}: one worker stopped (SIGSTOP)", since)
    assert (failure["cause"], failure["level"]) == ("EngineHung", 1)
    assert failure["seconds"] <= HANG_SECONDS
    assert mapped(deployment) - known == (2 if weights == "retained" else 0)
    assert deployment.complete("How far is the sea?", tokens=64, timeout=120)["choices"][0]["text"] == before


def test_nothing_is_left_on_the_gpus(deployment: Deployment) -> None:
    ours = {one["pid"] for member in deployment.group()["members"] for one in member["processes"]}
    assert deployment.run("down", deployment.name, timeout=90).returncode == 0
    assert deployment.remains() == []
    assert not ours & {pid for card in find().cards for pid, _ in card.holders}
