"""Providers that are wrong by 1 %, end, or never return: excluded on this card after observation."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import needs
import pytest
from page import Page

if reason := needs.gpu():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("dsv4_kernels")

from dsv4_runtime.contract.kernels import BUNDLED, Op
from dsv4_runtime.vllm_plugin.kernels import trial
from dsv4_runtime.vllm_plugin.kernels.evidence import Trial, choose, standings

SECONDS = 30.0
TRIED = (Trial(Op.FP8_LINEAR, "t8", "fp8_gemm", {"tokens": 8, "n": 1536, "k": 4096}),)
CHILD = """
import os, signal, sys, time
from dsv4_kernels.registry import Provider, register_provider
from dsv4_runtime.vllm_plugin.kernels import trial
from dsv4_runtime.vllm_plugin.kernels.providers import find

def changed(name, change):
    def make(params, device):
        run = find("fp8_gemm", "bundled")[1].make(params, device)
        return lambda **inputs: change(run(**inputs))
    register_provider("fp8_gemm", Provider(name=name, missing=lambda: None, make=make))

changed("wrong", lambda out: out.mul_(1.01))
changed("segfaults", lambda out: os.kill(os.getpid(), signal.SIGSEGV))
changed("hangs", lambda out: time.sleep(600))
trial.run_child(trial.Path(sys.argv[1]))
"""


def test_bad_providers_are_excluded_and_the_right_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(trial, "names", lambda op: (BUNDLED, "wrong", "segfaults", "hangs"))
    begun = time.monotonic()
    found = standings(trial.gather(TRIED, SECONDS, (sys.executable, str(script))), TRIED)
    seconds = time.monotonic() - begun
    seen = {standing.provider: standing.excluded for standing in found}
    for name, reason in seen.items():
        page.row("Bad providers", ("provider", "what was seen"), name, reason or "right")
    assert seen[BUNDLED] is None
    assert "wrong: " in (seen["wrong"] or "")
    assert seen["segfaults"] == "t8: its process was ended by SIGSEGV"
    assert seen["hangs"] == f"t8: not done after {SECONDS:.0f} s"
    assert seconds <= SECONDS + 5
    assert choose(found, eight_bit_activations=False).provider(Op.FP8_LINEAR) == BUNDLED
