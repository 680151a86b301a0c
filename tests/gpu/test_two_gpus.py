"""`dsv4 up` of the Nano model over two GPUs of this machine, tensor parallel: it responds, and recovers as a whole."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import needs
import pytest
from page import Page
from served import DEATH_SECONDS, HANG_SECONDS, MANIFEST, SERVES_SECONDS, recovered

from dsv4_operator.backends.local.gpus import find
from dsv4_runtime.util.peer_copies import Outcome, try_copies
from dsv4_testkit.harness import Deployment

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)
if len(find().cards) < 2:
    pytest.skip("there is one GPU", allow_module_level=True)


@pytest.fixture(scope="module")
def deployment(page: Page) -> Iterator[Deployment]:
    found = Deployment("nano-two-gpus", nodes=2, restarts=20, manifest=MANIFEST)
    try:
        seconds = found.up(SERVES_SECONDS)
        page.row("Engine", ("what", "here"), "two GPUs: from `dsv4 up` to ready", f"{seconds:.1f} s")
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


def test_both_gpus_compute_the_answer(deployment: Deployment, page: Page) -> None:
    begun = time.monotonic()
    answer = deployment.complete("How far is the sea?", tokens=64, timeout=120)
    assert answer["usage"]["completion_tokens"] == 64
    page.row("Engine", ("what", "here"), "two GPUs: 64 tokens, alone", f"{time.monotonic() - begun:.2f} s")
    page.row("Engine", ("what", "here"), "two GPUs: its text", answer["choices"][0]["text"])
    plan = json.loads(max(deployment.directory.glob("i*/plan.json")).read_text())
    held = {card.uuid for card in find().cards if {pid for pid, _ in card.holders} & set(workers(deployment))}
    assert held == set(plan["members"][0]["gpus"])
    assert len(held) == 2


def test_a_worker_killed(deployment: Deployment, page: Page) -> None:
    since = time.time()
    os.kill(workers(deployment)[-1], signal.SIGKILL)
    failure = recovered(deployment, page, "two GPUs: one worker killed", since)
    assert failure["level"] == 1
    assert failure["seconds"] <= DEATH_SECONDS


def test_a_worker_stopped(deployment: Deployment, page: Page) -> None:
    since = time.time()
    os.kill(workers(deployment)[-1], signal.SIGSTOP)
    failure = recovered(deployment, page, "two GPUs: one worker stopped (SIGSTOP)", since)
    assert (failure["cause"], failure["level"]) == ("EngineHung", 1)
    assert failure["seconds"] <= HANG_SECONDS


def test_nothing_is_left_on_the_gpus(deployment: Deployment) -> None:
    ours = {one["pid"] for member in deployment.group()["members"] for one in member["processes"]}
    assert deployment.run("down", deployment.name, timeout=90).returncode == 0
    assert deployment.remains() == []
    assert not ours & {pid for card in find().cards for pid, _ in card.holders}
