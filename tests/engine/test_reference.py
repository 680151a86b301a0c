"""`dsv4 verify` on a real engine: log-probabilities of the nano model from transformers, and an exhausted KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.harness import MANIFEST, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "transformers_reference.py"
CACHE = "40Mi"
"""Little more than a request of the greatest length needs."""
TOLERANCE = 0.1
"""Mean difference in nats, as in `test_equivalence.py`."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    manifest = MANIFEST.replace("maxModelLen: 1024", f"maxModelLen: 1024, kvCacheMemory: {CACHE}")
    assert CACHE in manifest
    found = Deployment(nodes=1, seqs=16, manifest=manifest)
    found.up()
    yield found
    found.destroy()


def verified(deployment: Deployment, check: str, *options: str) -> dict[str, Any]:
    """Return the result of one check."""
    done = deployment.run("verify", deployment.name, "--only", check, "-o", "json", *options, timeout=400)
    assert done.stdout, done.stderr
    [result] = json.loads(done.stdout)["results"]
    print(f"\n{check}: {result}")
    return dict(result)


@pytest.mark.parametrize("cache", ["exact", "fp8"])
def test_log_probabilities_are_those_of_transformers(cache: str, deployment: Deployment, tmp_path: Path) -> None:
    """The reference is float32 and shares no code with vLLM or dsv4; vLLM has bfloat16 and a cache in FP8."""
    [checkpoint] = (deployment.root / "weights").glob("nano-*")
    file = tmp_path / "reference.json"
    command = [sys.executable, str(SCRIPT), str(checkpoint), str(file), "--quick"]
    command += ["--fp8-cache"] if cache == "fp8" else []
    environment = {**os.environ, "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = verified(deployment, "oracle.reference", "--reference", str(file), "--tolerance", str(TOLERANCE))
    assert result["status"] == "ok"
    assert result["figures"]["positions"] > 100
    assert "transformers" in result["figures"]["reference"]
    if cache == "exact":
        return
    # The comparison can fail: the rows of a prompt as those of another one.
    wrong = json.loads(file.read_text())
    for case in wrong["cases"]:
        keys = [next(iter(row)) if row else None for row in case["scored"]]
        case["scored"] = [None, *({key: -1.0, **row} for key, row in zip(keys[1:], case["scored"][:0:-1], strict=True))]
    file.write_text(json.dumps(wrong))
    result = verified(deployment, "oracle.reference", "--reference", str(file), "--tolerance", str(TOLERANCE))
    assert result["status"] == "failed"


def test_an_exhausted_cache_changes_no_output(deployment: Deployment) -> None:
    result = verified(deployment, "context.pressure")
    assert result["status"] == "ok"
