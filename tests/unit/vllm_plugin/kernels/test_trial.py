"""Providers that end, lie or never return, as real processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import providers, trial
from dsv4_runtime.vllm_plugin.kernels.evidence import Trial, standings

TRIED = (Trial(Op.MOE, "t1", "moe_w4a16", {"tokens": 1}), Trial(Op.MOE, "t8", "moe_w4a16", {"tokens": 8}))
CHILD = """
import json, os, signal, sys, time
from dsv4_runtime.vllm_plugin.kernels import child

def try_provider(op, name, tried, lock):
    for number, trial in enumerate(tried):
        if name == "segfaults" and number:
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "hangs" and number:
            open(os.environ["HANGS"], "w").write(str(os.getpid()))
            os.fork()
            time.sleep(600)
        if name == "raises":
            raise ValueError("never seen")
        seen = {"op": op, "trial": trial.name, "provider": name, "microseconds": trial.params["tokens"] * 2.0}
        if name == "wrong":
            seen = {"op": op, "trial": trial.name, "provider": name, "fault": "wrong: out: rms above 5e-3"}
        print(json.dumps(seen), flush=True)

child.try_provider = try_provider
child.main()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))
    monkeypatch.setattr(providers, "names", lambda op: ("right", "wrong", "raises", "segfaults", "hangs"))
    return sys.executable, str(script)


def test_a_wrong_a_crashing_and_a_hanging_provider_are_excluded_within_the_bound(
    child: tuple[str, ...], tmp_path: Path
) -> None:
    begun = time.monotonic()
    found = {s.provider: s for s in standings(trial.gather(TRIED, 12.0, child), TRIED)}
    assert time.monotonic() - begun < 15.0
    assert found["right"].slowness == pytest.approx(1.0)
    assert found["wrong"].excluded == "t1: wrong: out: rms above 5e-3"
    assert found["raises"].excluded == "t1: its process ended with 1"
    assert found["segfaults"].excluded == "t8: its process was ended by SIGSEGV"
    assert found["hangs"].excluded == "t8: not done after 12 s"
    assert ends(int((tmp_path / "hangs").read_text()))
    script = str(tmp_path / "child.py")
    assert not [p for p in psutil.process_iter(["cmdline", "status"]) if script in (p.info["cmdline"] or [])]


def ends(pid: int) -> bool:
    """Whether the process has ended, now or within 2 s; init collects it."""
    for _ in range(20):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_what_was_seen_is_kept_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    machine = {"gpu": "card", "capability": "9.0"}
    monkeypatch.setenv(trial.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(trial, "machine", lambda: machine)
    monkeypatch.setattr(trial, "trials", lambda config, tensor_parallel: TRIED)
    monkeypatch.setattr(trial, "gather", lambda tried, seconds: calls.append(1) or ())
    trial.evidence({}, 1)
    trial.evidence({}, 1)
    assert len(calls) == 1
    machine["driver"] = "581"
    trial.evidence({}, 1)
    assert len(calls) == 2
    for kept in tmp_path.glob("*.json"):
        os.truncate(kept, 1)
    trial.evidence({}, 1)
    assert len(calls) == 3
