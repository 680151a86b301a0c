"""Compilation of announced plans in parallel with the worker, which does not depend on it."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.fp8.api import QuantPlan
from dsv4_runtime.vllm_plugin.kernels import plans
from dsv4_runtime.vllm_plugin.kernels.plans import DEVICE, announce, begin, begin_anew
from dsv4_testkit.waiting import wait_until

BUSY_SECONDS = 300.0
"""The process that compiles imports torch and Triton, which took over a minute beside other test runs."""


def finish(seconds: float = BUSY_SECONDS) -> None:
    plans.finish(seconds)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(plans, "gpu_target", lambda: TargetGPU(Arch.SM_121, 48))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # If an earlier test has loaded vLLM's configuration of loggers, they do not propagate to the root logger.
    monkeypatch.setattr(plans, "LOGGER", logging.getLogger(__name__))
    caplog.set_level(logging.INFO, __name__)
    yield
    finish(0.0)


def compiled(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("triton/*/*.cubin")))


def test_announced_plans_are_compiled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        announce(QuantPlan, 64, 256, DEVICE)
    announce(QuantPlan, tokens=64, k=100, device=DEVICE)
    finish()
    assert compiled(tmp_path) == 1
    summary, refused = (record.getMessage() for record in caplog.records)
    assert "1 of 2 announced plans were compiled beside the weights, 1 kernels; waited" in summary
    assert "k is 100, needs a multiple of 128" in refused
    finish()
    assert len(caplog.records) == 2, "there is nothing to wait for any more"
    # The next engine on this machine starts no process for it, and retries the compilations that failed.
    announce(QuantPlan, 64, 256, DEVICE)
    assert plans._Compiler.running is None
    announce(QuantPlan, tokens=64, k=100, device=DEVICE)
    assert plans._Compiler.running is not None


def test_plans_are_compiled_again_for_another_gpu_or_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    announce(QuantPlan, 64, 256, DEVICE)
    finish()
    for change in (
        lambda: monkeypatch.setattr(plans, "gpu_target", lambda: TargetGPU(Arch.SM_120, 188)),
        lambda: monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another")),
    ):
        change()
        announce(QuantPlan, 64, 256, DEVICE)
        assert plans._Compiler.running is not None
        finish()


def test_the_next_process_starts_early_where_there_was_something_to_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin_anew()
    assert plans._Compiler.running is None
    announce(QuantPlan, 64, 256, DEVICE)
    begin_anew()
    assert len(caplog.records) == 1
    assert plans._Compiler.running is not None
    process = plans._Compiler.running.process
    assert process is not None
    assert process.poll() is None
    # It received no plans, so `finish` does not wait for it.
    finish()
    assert process.poll() is not None
    assert len(caplog.records) == 1


def test_the_first_process_may_start_before_the_workers_gpu_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(TargetGPU(Arch.SM_121, 48))
    started = plans._Compiler.running
    assert started is not None
    announce(QuantPlan, 64, 256, DEVICE)
    assert plans._Compiler.running is started
    begin(TargetGPU(Arch.SM_121, 48))
    assert plans._Compiler.running is started
    finish()
    assert compiled(tmp_path) == 1
    begin(TargetGPU(Arch.SM_121, 48))
    assert plans._Compiler.running is None, "the next engine finds all in the cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    begin(TargetGPU(Arch.SM_120, 188))
    started = plans._Compiler.running
    announce(QuantPlan, 64, 256, DEVICE)
    assert plans._Compiler.running is not started, "the GPU is another one"
    assert started is not None
    assert started.process is not None
    assert started.process.poll() is not None


def test_the_wait_for_it_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    announce(QuantPlan, 64, 256, DEVICE)
    finish(0.0)
    assert "0 of 1 announced plans" in caplog.records[0].getMessage()
    announce(QuantPlan, 64, 256, DEVICE)
    finish()
    assert compiled(tmp_path) == 1


def test_a_process_that_holds_its_pipe_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, left = tmp_path / "python", tmp_path / "left"
    program.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {left}\ncat > /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    announce(QuantPlan, 64, 256, DEVICE)
    wait_until(lambda: left.exists() and left.read_text().endswith("\n"))
    begun = time.monotonic()
    finish(0.0)
    os.kill(int(left.read_text()), signal.SIGKILL)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("failure", ["it ends", "it cannot be started"])
def test_an_engine_starts_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false" if failure == "it ends" else str(tmp_path / "gone"))
    announce(QuantPlan, 64, 256, DEVICE)
    if failure == "it ends":
        assert plans._Compiler.running is not None
        assert plans._Compiler.running.process is not None
        plans._Compiler.running.process.wait(timeout=60)
    announce(QuantPlan, 128, 256, DEVICE)
    finish()
    (said,) = (record.getMessage() for record in caplog.records)
    assert ("0 of 2 announced plans" if failure == "it ends" else "nothing is compiled beside the weights") in said


def test_nothing_is_compiled_without_a_supported_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans, "gpu_target", lambda: None)
    announce(QuantPlan, 64, 256, DEVICE)
    finish()
    assert list(tmp_path.iterdir()) == []


def test_the_compilers_are_as_many_as_the_plan_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On GB10 the compilers use the memory of the weights."""
    program = tmp_path / "python"
    program.write_text(f"""#!/bin/sh
for one; do printf '%s ' "$one"; done > {tmp_path}/arguments; echo "$CUDA_VISIBLE_DEVICES." >> {tmp_path}/arguments
cat > {tmp_path}/asked
""")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("os.cpu_count", lambda: 20)
    for most, processes in (("2", 2), ("", 10), ("many", 10)):
        monkeypatch.setenv("MAX_JOBS", most)
        announce(QuantPlan, np.int64(64), 256, DEVICE)
        finish()
        asked = (tmp_path / "arguments").read_text()
        assert asked == f"-m dsv4_kernels.precompile sm_121 48 --processes {processes} .\n"
    plan, end = (tmp_path / "asked").read_text().splitlines()
    assert json.loads(plan) == {
        "plan": "dsv4_kernels.fp8.api:QuantPlan",
        "args": [64, 256, DEVICE],
        "options": {},
    }
    assert end == ""
