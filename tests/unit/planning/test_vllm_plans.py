"""The memory plan against vLLM's planner, called directly; `tests/engine/test_plan_agrees.py` uses an engine's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_operator.backends.local.facts import read_checkpoint
from dsv4_operator.planning.catalog import GIB, machine_named, model
from dsv4_operator.planning.memory import EngineSettings, MemoryPlan, Parallel, memory_plan
from dsv4_operator.planning.memory.items import BadDivision, check_parallel, stages
from dsv4_runtime.nano.checkpoint import make
from dsv4_runtime.nano.recipe import Precision
from dsv4_runtime.nano.weights import RandomStreams

CASES = [
    (name, pipeline, length, batched, asynchronous, gibibytes, drafts)
    for name, drafts in (("V4-Flash", 0), ("V4-Pro", 0), ("Nano", 0), ("V4.1-Flash", 0), ("V4.1-Flash", 5))
    for pipeline in (1, 2, 4)
    for length, batched in ((1024, 512), (8192, 2048), (131_072, 4096), (1_048_576, 8192))
    for asynchronous in (False, True)
    for gibibytes in (64, 200)
    if not (name == "Nano" and (length > 8192 or pipeline > 1)) and not (name == "V4.1-Flash" and pipeline == 4)
]
DIVISIONS = [(name, count) for name in ("V4-Flash", "V4-Pro", "Nano") for count in range(1, 17)]
DIVISIONS = [(name, count) for name, count in DIVISIONS if count <= len(model(name).layers)]


def planned(case: tuple[str, int, int, int, bool, int, int]) -> MemoryPlan:
    name, pipeline, length, batched, asynchronous, gibibytes, drafts = case
    engine = EngineSettings(length, 4, batched, asynchronous, drafts, kv_cache_memory=gibibytes * GIB)
    return memory_plan(model(name), machine_named("gb10"), Parallel(1, pipeline), engine)


def division(name: str, count: int) -> dict[str, object]:
    """Return the caches of a model in `count` stages, of one request of 1024 tokens."""
    ratios = model(name).compress_ratios
    parts = [[part.start, part.stop] for part in stages(len(ratios), count)]
    room = {"available": 64 * GIB, "length": 1024, "in_flight": 512}
    return {"ratios": ratios, "sources": (), "draft_tokens": 0, "stages": parts, **room}


def is_divided(name: str, count: int) -> bool:
    try:
        check_parallel(model(name), Parallel(1, count))
    except BadDivision:
        return False
    return True


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
        input=json.dumps({"plans": asked, "divisions": [division(*one) for one in DIVISIONS]}),
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    for case, plan, (blocks, tokens, concurrency) in zip(CASES, plans, found["plans"], strict=True):
        assert plan.kv is not None
        assert (plan.kv.blocks, plan.kv.tokens) == (blocks, tokens), case
        assert plan.kv.concurrency == pytest.approx(concurrency), case
    for (name, count), allocated in zip(DIVISIONS, found["allocated"], strict=True):
        assert is_divided(name, count) == allocated, (name, count)
    ours = [
        [[part.start, part.stop] for part in stages(layers, size)]
        for layers in (4, 43, 61)
        for size in (1, 2, 3, 4, 8, 16)
        if size <= layers
    ]
    assert found["stages"] == ours


def test_the_released_formats_agree_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(_: RandomStreams, __: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.full(shape, std + mean)

    # Sizes do not depend on the values, most of whose time is that of random numbers.
    monkeypatch.setattr(RandomStreams, "normal", constant)
    found = read_checkpoint(make(tmp_path / "fp8", precision=Precision.FP8), "Nano")
    assert found is not None
    assert found.weight_bytes == model("Nano-fp8").weight_bytes
