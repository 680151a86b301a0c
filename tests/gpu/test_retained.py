"""`dsv4 up` of four layers of Flash with weights that outlive the engine, one GPU: it recovers with the same text.

Each kind of fault comes twice, after the standby server of the next engine has imported vLLM.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator

import needs
import pytest
from page import Page
from served import DEATH_SECONDS, HANG_SECONDS, flash_slice, recovered

from dsv4_runtime.vllm_plugin.warm_pool import WAITS
from dsv4_testkit.harness import Deployment

if reason := needs.gpu() or needs.engine():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(1800)

_STANDBY_SECONDS = 150.0
_STARTS_SECONDS = 600.0
_FAULTS = (signal.SIGKILL, signal.SIGSTOP) * 2


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, page: Page) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("weights") / "slice"
    manifest = flash_slice(folder).replace("kernels: auto", "kernels: auto\n    retainWeights: true")
    found = Deployment("slice-retained", nodes=1, restarts=20, manifest=manifest)
    try:
        seconds = found.up(_STARTS_SECONDS)
        page.row("Engine", ("what", "here"), "four layers, retained: from `dsv4 up` to ready", f"{seconds:.1f} s")
        yield found
    finally:
        found.destroy()
        shutil.rmtree(folder)


def text_of(deployment: Deployment) -> str:
    return str(deployment.complete("How far is the sea?", tokens=64, timeout=120)["choices"][0]["text"])


def wait_for_standby(deployment: Deployment, servers: int) -> float:
    """Wait until the last of `servers` standby servers has imported vLLM; return the seconds."""
    begun = time.monotonic()
    logs = deployment.directory
    while sum(log.read_text(errors="replace").count(WAITS) for log in logs.glob("i*/m0/standby.log")) < servers:
        assert time.monotonic() - begun < _STANDBY_SECONDS, "the standby server has not imported vLLM"
        time.sleep(0.5)
    return time.monotonic() - begun


def test_it_recovers_with_the_same_text(deployment: Deployment, page: Page) -> None:
    before = text_of(deployment)
    for number, fault in enumerate(_FAULTS, 1):
        waited = wait_for_standby(deployment, number)
        what = f"four layers, retained: EngineCore, {fault.name}"
        page.row("Engine", ("what", "here"), f"{what}: standby server ready after", f"{waited:.1f} s")
        pid, since = deployment.pid(0, "engine-core"), time.time()
        os.kill(pid, fault)
        failure = recovered(deployment, page, what, since)
        stopped = fault is signal.SIGSTOP
        assert (failure["cause"], failure["level"]) == ("EngineHung" if stopped else "EngineCoreDied", 1)
        assert failure["seconds"] <= (HANG_SECONDS if stopped else DEATH_SECONDS)
        assert text_of(deployment) == before
