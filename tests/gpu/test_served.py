"""`dsv4 up` of the Nano model on this machine's GPUs, with faults: each time it recovers without intervention."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import needs
import pytest
from page import Page
from served import DEATH_SECONDS, HANG_SECONDS, MANIFEST, SERVES_SECONDS, recovered

from dsv4_operator.backends.local.gpus import GpuInventory, find
from dsv4_runtime.contract.kernels import Op
from dsv4_testkit.harness import Deployment, unix

HOG = """
import sys, time, torch
torch.zeros(1, device="cuda")
print("waits", flush=True)
while True:
    try:
        taken = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
        break
    except torch.OutOfMemoryError:
        time.sleep(0.01)
print("holds", flush=True)
time.sleep(600)
"""
"""Allocates the memory as soon as it is free."""

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders") / "order"


@pytest.fixture(scope="module")
def deployment(orders: Path, page: Page) -> Iterator[Deployment]:
    found = Deployment(
        "nano-gpu", nodes=1, restarts=20, manifest=MANIFEST, environment={"DSV4_FAULT_FILE": str(orders)}
    )
    try:
        page.row("Engine", ("what", "here"), "from `dsv4 up` to ready", f"{found.up(SERVES_SECONDS):.1f} s")
        yield found
    finally:
        found.destroy()


def planned(deployment: Deployment) -> str:
    """Return the UUID of the GPU that the plan assigns to the member."""
    plan = json.loads(max(deployment.directory.glob("i*/plan.json")).read_text())
    (uuid,) = plan["members"][0]["gpus"]
    return str(uuid)


def test_a_chat_and_a_completion_are_answered(deployment: Deployment, page: Page) -> None:
    said = deployment.run("chat", deployment.name, "Say something.", "--max-tokens", "16", "--no-thinking", timeout=180)
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.split()) >= 2
    begun = time.monotonic()
    answer = deployment.complete("How far is the sea?", tokens=64, timeout=120)
    assert answer["usage"]["completion_tokens"] == 64
    page.row("Engine", ("what", "here"), "64 tokens, alone", f"{time.monotonic() - begun:.2f} s")
    page.row("Engine", ("what", "here"), "its text", answer["choices"][0]["text"])


def test_nothing_is_compiled_while_it_serves(deployment: Deployment, page: Page) -> None:
    """Short and long prompts, alone and together; vLLM's JIT monitor logs compilations after its warm-up."""
    lengths = (1, 30, 300, 900)
    for length in lengths:
        deployment.complete("tree " * length, tokens=32, timeout=120)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: deployment.complete("tree " * lengths[i % 4], tokens=32, timeout=120), range(8)))
    (log,) = deployment.directory.glob("i*/m0/vllm.log")
    compiled = [line for line in log.read_text().splitlines() if "JIT compilation during inference" in line]
    page.row("Engine", ("what", "here"), "kernels compiled while it served", len(compiled))
    assert compiled == []


def test_the_status_lists_the_provider_of_every_operation(deployment: Deployment, page: Page) -> None:
    said = deployment.run("kernels", deployment.name, "-o", "json", timeout=30)
    assert said.returncode == 0, said.stderr
    operations = json.loads(said.stdout)["groups"][0]["operations"]
    assert {found["op"] for found in operations} == set(Op)
    for found in operations:
        following = found.get("next", {})
        speed = f"{following['speedup']:.2f} x {following['provider']}" if following else "-"
        excluded = [f"{one['provider']}: {one['excluded']}" for one in found["standings"] if "excluded" in one]
        cells = (found["provider"], speed, found.get("note", "-"), "; ".join(excluded) or "-")
        page.row("Providers", ("operation", "provider", "speed", "note", "excluded"), found["op"], *cells)


def test_a_deployments_card_is_not_available_to_others(deployment: Deployment, found: GpuInventory) -> None:
    pid, mine = deployment.pid(0, "engine-core"), planned(deployment)
    holds = {card.uuid for card in find().cards if pid in dict(card.holders)}
    assert holds == {mine}
    other = Deployment("other", nodes=len(found.cards), manifest=MANIFEST)
    try:
        refused = other.run("up", str(other.file), "--detach", timeout=60)
        assert refused.returncode == 2
        assert "is held by the deployment 'nano-gpu'" in refused.stderr
    finally:
        other.destroy()


def test_engine_core_killed(deployment: Deployment, page: Page) -> None:
    pid, since = deployment.pid(0, "engine-core"), time.time()
    os.kill(pid, signal.SIGKILL)
    failure = recovered(deployment, page, "EngineCore killed", since)
    assert (failure["cause"], failure["level"]) == ("EngineCoreDied", 1)
    assert failure["seconds"] <= DEATH_SECONDS


def test_the_process_that_computes_stopped(deployment: Deployment, page: Page) -> None:
    """Stops a worker if there are several GPUs; with one, EngineCore computes itself."""
    processes = {one["name"]: int(one["pid"]) for one in deployment.group()["members"][0]["processes"]}
    name = "worker" if "worker" in processes else "engine-core"
    since = time.time()
    os.kill(processes[name], signal.SIGSTOP)
    failure = recovered(deployment, page, f"{name} stopped (SIGSTOP)", since)
    assert (failure["cause"], failure["level"]) == ("EngineHung", 1)
    assert failure["seconds"] <= HANG_SECONDS


def test_an_illegal_address_in_a_kernel(deployment: Deployment, page: Page, orders: Path) -> None:
    assert entry_points(group="vllm.general_plugins", name="dsv4_faults"), "run: pip install --no-deps tests/kit"
    whole = orders.with_suffix(".whole")
    whole.write_text(json.dumps({"kind": "astray", "rank": 0}))
    whole.rename(orders)
    since = time.time()
    # With a gateway, the request is held; without one, it is lost with the engine.
    asking = subprocess.Popen(
        deployment.command("chat", deployment.name, "Hello", "--max-tokens", "4", "--no-thinking"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        failure = recovered(deployment, page, "illegal address in a kernel", since)
    finally:
        asking.kill()
        asking.wait()
    assert (failure["cause"], failure["level"]) == ("EngineCoreDied", 1)
    # CUDA's text, or its name for the error, depending on the process that detects it first.
    assert re.search("illegal memory access|cudaErrorIllegalAddress", failure["message"])


def test_another_program_takes_the_memory(deployment: Deployment, page: Page) -> None:
    """The memory of a running engine is safe; the next engine does not fit, and the status names the other process."""
    uuid = planned(deployment)
    total = next(card.memory_bytes for card in find().cards if card.uuid == uuid)
    if total is None:
        pytest.skip("this GPU's memory is the machine's own")
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(int(0.85 * total))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
    )
    try:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "waits\n"
        deployment.complete()
        since = time.time()
        os.kill(deployment.pid(0, "engine-core"), signal.SIGKILL)
        assert hog.stdout.readline() == "holds\n"
        named = waits_for(deployment, hog.pid)
        page.row("Engine", ("what", "here"), "a hog of GPU memory is named", named)
        hog.kill()
        hog.wait()
        failure = recovered(deployment, page, "EngineCore killed, and its memory taken", since)
        assert (failure["cause"], failure["seconds"] <= DEATH_SECONDS) == ("EngineCoreDied", True)
        causes = [one["cause"] for one in deployment.group()["history"] if unix(one["time"]) > since]
        assert "OutOfMemoryGPU" in causes
    finally:
        hog.kill()
        hog.communicate()


def waits_for(deployment: Deployment, pid: int, seconds: float = 180.0) -> str:
    """Return the sentence in which the status names the process `pid`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in json.dumps(deployment.peek()).split('"'):
            if f"process {pid} " in line:
                return line
        time.sleep(0.25)
    raise AssertionError(f"process {pid} was not named within {seconds:.0f} s: {deployment.log()}")


def test_nothing_is_left_on_the_gpu(deployment: Deployment, page: Page) -> None:
    ours = {one["pid"] for member in deployment.group()["members"] for one in member["processes"]}
    assert deployment.run("down", deployment.name, timeout=90).returncode == 0
    assert deployment.remains() == []
    assert not ours & {pid for card in find().cards for pid, _ in card.holders}
