"""The memory plan of the nano model agrees with the log of vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsv4_operator.planning.catalog import GIB, machine_named, model
from dsv4_operator.planning.memory import EngineSettings, Parallel, memory_plan
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.engine.logs import kv_cache
from dsv4_testkit.harness import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    found = Deployment("planned")
    found.up()
    yield found
    found.destroy()


def test_the_sizes_that_vllm_logs_equal_the_plan(deployment: Deployment) -> None:
    log = (deployment.directory / "i1" / "m0" / "vllm.log").read_text(errors="replace")
    logged = next(size for line in log.splitlines() if (size := kv_cache(line)))
    plan = GroupPlan.model_validate_json((deployment.directory / "i1" / "plan.json").read_text())
    memory = memory_plan(
        model("Nano"),
        replace(machine_named("cpu"), memory_bytes=8 * GIB),
        Parallel(2),
        EngineSettings(1024, 4, 512, kv_cache_memory=GIB // 2),
    )
    assert memory.kv is not None
    # vLLM does not log blocks; only 5718 blocks result in this number of tokens.
    assert memory.kv.tokens == logged[0]
    assert memory.kv.concurrency == pytest.approx(logged[1], rel=0.01)
    assert plan.expectations.kv_tokens == logged[0]
    assert plan.expectations.kv_concurrency == pytest.approx(logged[1], rel=0.01)
    said = (deployment.directory / "i1" / "m0" / "agent.log").read_text()
    assert f"KV cache: {logged[0]} tokens, planned {logged[0]} (+0.0 %)" in said
    shown = deployment.run("status", deployment.name, timeout=120).stdout
    assert f"KV cache {logged[0]:,} tokens (planned {logged[0]:,}, +0.0 %), {logged[1]:.2f} requests" in shown


def test_a_running_group_is_planned_with_its_own_memory(deployment: Deployment) -> None:
    """A plan while the group runs counts the group's memory as free, up to changes by other processes."""
    running = json.loads(deployment.run("plan", str(deployment.file), "-o", "json", timeout=120).stdout)
    deployment.run("down", deployment.name, timeout=120)
    time.sleep(2)
    alone = json.loads(deployment.run("plan", str(deployment.file), "-o", "json", timeout=120).stdout)
    with_group, without = (found["memory"]["ranks"][0]["memoryBytes"] for found in (running, alone))
    assert with_group == pytest.approx(without, abs=GIB)
