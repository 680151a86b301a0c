"""`dsv4 up` on GPUs: manifests of the nano model and of four layers of Flash, and the checks of a recovery."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from page import Page

from dsv4_testkit.harness import Deployment, first_failure, unix

MANIFEST = """\
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {{name: {name}}}
spec:
  model: {{variant: Nano, source: {{nano: {{seed: 0, precision: fp8}}}}}}
  topology: {{nodesPerGroup: 1, devicesPerNode: {nodes}}}
  engine:
    maxModelLen: 4096
    maxNumSeqs: 8
    maxNumBatchedTokens: 2048
    gpuMemoryUtilization: 0.3
    kernels: auto
    extraArgs: [--load-format=safetensors]
  network: {{ports: {{api: {api}, dashboard: {dashboard}}}}}
  recovery: {{maxRestarts: {restarts}, window: {window}, backoff: {{base: 0s, max: 0s}}}}
"""
COLUMNS = ("what was done", "cause", "level", "verdict after", "serves again after")
DEATH_SECONDS, HANG_SECONDS = 3.0, 6.0
SERVES_SECONDS = 400.0
"""A start on a machine without compiled kernels took up to 281 s."""


def flash_slice(folder: Path) -> str:
    """Make four layers of Flash with random weights (14 GB, half a minute) in `folder`; return their manifest."""
    command = [sys.executable, "-m", "benchmarks.gpu.flash_slice", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)
    text = MANIFEST.replace("{{nano: {{seed: 0, precision: fp8}}}}", f"{{{{path: {folder}}}}}")
    text = text.replace("gpuMemoryUtilization: 0.3", "gpuMemoryUtilization: 0.6")
    assert str(folder) in text
    return text


def recovered(deployment: Deployment, page: Page, what: str, since: float) -> dict[str, Any]:
    """Wait until it serves again and responds; return the resulting failure."""
    status = deployment.wait("Serving", since=since, timeout=SERVES_SECONDS)
    deployment.complete(timeout=120)
    answered = time.time() - since
    failure = first_failure(status, since)
    verdict = unix(failure["time"]) - since
    cells = (failure["cause"], failure.get("level"), f"{verdict:.2f} s", f"{answered:.1f} s")
    page.row("Deaths", COLUMNS, what, *cells)
    return {**failure, "seconds": verdict}
