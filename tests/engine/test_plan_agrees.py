"""The memory plan and vLLM: its planner called directly, and what it logs for the nano model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.backends.local.facts import read_checkpoint
from dsv4_operator.planning.catalog import GIB, machine_named, model
from dsv4_operator.planning.memory import EngineSettings, MemoryPlan, Parallel, memory_plan
from dsv4_operator.planning.memory.items import stages
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.engine.logs import kv_cache
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Precision
from dsv4_testkit.harness import Deployment

pytestmark = pytest.mark.engine

CASES = [
    (name, pipeline, length, batched, asynchronous, gibibytes, drafts)
    for name, drafts in (("V4-Flash", 0), ("V4-Pro", 0), ("Nano", 0), ("V4.1-Flash", 0), ("V4.1-Flash", 5))
    for pipeline in (1, 2, 4)
    for length, batched in ((1024, 512), (8192, 2048), (131_072, 4096), (1_048_576, 8192))
    for asynchronous in (False, True)
    for gibibytes in (64, 200)
    if not (name == "Nano" and length > 8192) and not (name == "V4.1-Flash" and pipeline == 4)
]


def planned(case: tuple[str, int, int, int, bool, int, int]) -> MemoryPlan:
    name, pipeline, length, batched, asynchronous, gibibytes, drafts = case
    engine = EngineSettings(length, 4, batched, asynchronous, drafts, kv_cache_memory=gibibytes * GIB)
    return memory_plan(model(name), machine_named("gb10"), Parallel(1, pipeline), engine)


def test_vllms_own_planner_finds_the_same_blocks() -> None:
    plans = [planned(case) for case in CASES]
    asked = []
    for plan in plans:
        assert plan.kv is not None
        ratios, drafts = plan.model.compress_ratios, plan.engine.speculative_tokens
        divided = [[part.start, part.stop] for part in stages(len(ratios), plan.parallel.pipeline)]
        if drafts and plan.model.speculative is not None:
            # Draft layers are window layers on the last stage.
            ratios += (0,) * plan.model.speculative.layers
            divided[-1][1] = len(ratios)
        asked.append(
            {
                "ratios": ratios,
                "sources": plan.model.kv_sources,
                "draft_tokens": drafts,
                "stages": divided,
                "available": plan.engine.kv_cache_memory,
                "length": plan.engine.max_model_len,
                "in_flight": plan.kv.in_flight_tokens,
            }
        )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    script = Path(__file__).with_name("plan_vllm.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    for case, plan, (blocks, tokens, concurrency) in zip(CASES, plans, found["plans"], strict=True):
        assert plan.kv is not None
        assert (plan.kv.blocks, plan.kv.tokens) == (blocks, tokens), case
        assert plan.kv.concurrency == pytest.approx(concurrency), case
    ours = [
        [[part.start, part.stop] for part in stages(layers, size)]
        for layers in (4, 43, 61)
        for size in (1, 2, 3, 4, 8, 16)
        if size <= layers
    ]
    assert found["stages"] == ours


def test_the_released_formats_agree_to_the_byte(tmp_path: Path) -> None:
    found = read_checkpoint(make(tmp_path / "fp8", precision=Precision.FP8), "Nano")
    assert found is not None
    assert found.weight_bytes == model("Nano-fp8").weight_bytes


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    found = Deployment("planned")
    found.up()
    yield found
    found.destroy()


@pytest.mark.long
def test_what_vllm_logs_is_what_was_planned(deployment: Deployment) -> None:
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
    # Blocks are not logged; as many tokens as 5718 blocks give and no other number of blocks.
    assert memory.kv.tokens == logged[0]
    assert memory.kv.concurrency == pytest.approx(logged[1], rel=0.01)
    assert plan.expectations.kv_tokens == logged[0]
    assert plan.expectations.kv_concurrency == pytest.approx(logged[1], rel=0.01)
    said = (deployment.directory / "i1" / "m0" / "agent.log").read_text()
    assert f"KV cache: {logged[0]} tokens, planned {logged[0]} (+0.0 %)" in said
    shown = deployment.run("status", deployment.name, timeout=60).stdout
    assert f"KV cache {logged[0]:,} tokens (planned {logged[0]:,}, +0.0 %), {logged[1]:.2f} requests" in shown


@pytest.mark.long
def test_a_running_group_is_planned_with_its_own_memory(deployment: Deployment) -> None:
    """A plan while the group runs counts what it takes as free for itself, give or take what others do meanwhile."""
    running = json.loads(deployment.run("plan", str(deployment.file), "-o", "json", timeout=60).stdout)
    deployment.run("down", deployment.name, timeout=90)
    time.sleep(2)
    alone = json.loads(deployment.run("plan", str(deployment.file), "-o", "json", timeout=60).stdout)
    with_group, without = (found["memory"]["ranks"][0]["memoryBytes"] for found in (running, alone))
    assert with_group == pytest.approx(without, abs=GIB)
