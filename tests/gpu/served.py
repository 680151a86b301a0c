"""`dsv4 up` of the Nano model on GPUs: its manifest, and the checks of a recovery."""

from __future__ import annotations

import time
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
