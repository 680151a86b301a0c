"""The bundled router and choice of keys inside the installed vLLM's own classes, interpreted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_kernels.indexer.api import TopkPlan
from dsv4_runtime.contract.kernels import ALL_BUNDLED, KernelChoice
from dsv4_runtime.vllm_plugin.kernels import indexer, plans
from dsv4_testkit.vllm_script import told_by_fork


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("routing_with_vllm.py"))


def test_the_hooks_match_the_installed_vllm(found: dict[str, Any]) -> None:
    """Since vLLM 0.33 the scores of prompts begin at column 0: for earlier versions the hook must not be attached."""
    assert found["unknown"] in ([], ["as_fp32_logits is gone"])


@pytest.mark.parametrize("kind", ["learned", "hashed"])
def test_the_experts_get_the_result_of_vllms_routing(found: dict[str, Any], kind: str) -> None:
    assert found[kind] is True


def test_padding_of_a_step_gets_no_experts(found: dict[str, Any]) -> None:
    assert found["padding"] == [[[-1] * 6] * 2, [[0.0] * 6] * 2]


def test_every_routing_left_to_vllm_has_a_reason(found: dict[str, Any]) -> None:
    assert found["refused"] == {
        "expert parallel": "the experts are spread over ranks",
        "data parallel": "tokens are spread over ranks",
        "vision": "images have a bias of their own",
        "half": "the gate is torch.float16 (256, 64), needs bfloat16 without bias, 64 wide",
        "padded": "the gate is torch.bfloat16 (256, 64), needs bfloat16 without bias, 128 wide",
        "two at once": "a step is split into two that run at once",
        "monolithic": "the experts' kernel routes by itself",
        "on a CPU": "CPURouter chooses the experts",
        "another model": "",
    }


def test_keys_are_chosen_as_vllm_does_in_decode_and_in_prompts(found: dict[str, Any]) -> None:
    assert found["keys"] == {
        "unplanned": ["decode", "prompt"],
        "agree": [True, True],
        "others": ["decode", "decode"],
        "rest": "other",
    }


def test_vllm_fills_no_rows_that_are_written_whole(found: dict[str, Any]) -> None:
    """If vLLM's kernels may run, which leave positions unwritten, the rows are filled before."""
    assert found["filled"] == {
        "rows": {
            "planned": 0,
            "prompts are vLLM's": 5,
            "another by name": 5,
            "another count": 5,
            "wider buffer": 5,
        },
        "filled": [True, True],
    }


@pytest.mark.parametrize("width", [16384, 16385, 40000, 65536])
def test_a_plan_has_room_for_every_chunk_of_a_prompt(width: int) -> None:
    tokens, most_scores = 300, 1 << 22
    plan = TopkPlan(indexer.planned_rows(tokens, width, most_scores), width, 512, torch.device("cpu"))
    for narrow in range(1, width + 1, 1 if width < 20000 else 997):
        assert plan.holds(min(tokens, most_scores // narrow), narrow), narrow


@pytest.mark.parametrize(
    ("chosen", "backend", "ratio"),
    [(KernelChoice({}), "auto", 4), (ALL_BUNDLED, "persistent", 4), (ALL_BUNDLED, "auto", 1)],
    ids=["not chosen", "another by name", "another model"],
)
def test_operations_that_are_not_bundled_are_not_planned(
    monkeypatch: pytest.MonkeyPatch, chosen: KernelChoice, backend: str, ratio: int
) -> None:
    monkeypatch.setattr(indexer, "choice", lambda: chosen)
    monkeypatch.setattr(indexer, "_TOPK_PLANS", {})
    indexer.plan_topk(SimpleNamespace(topk_backend=backend, compress_ratio=ratio), 1 << 20)
    assert indexer._TOPK_PLANS == {}


def test_layers_share_a_plan_which_is_announced_once_made(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[Any] = []
    for name, value in (
        ("choice", lambda: ALL_BUNDLED),
        ("_TOPK_PLANS", {}),
        ("announce", lambda *a: announced.append(a)),
    ):
        monkeypatch.setattr(indexer, name, value)
    monkeypatch.setattr(plans, "_PLANS", {})
    buffer = torch.empty((4, 16), dtype=torch.int32)
    for width in (300, 300, 20000):
        layer = SimpleNamespace(topk_tokens=16, max_model_len=width, topk_indices_buffer=buffer)
        vars(layer).update(topk_backend="auto", compress_ratio=4)
        indexer.plan_topk(layer, 1 << 20)
    assert [plan.width for plan in plans._PLANS.values()] == [300, 20000]
    assert indexer._TOPK_PLANS[16, buffer.device].width == 20000
    assert announced == [(TopkPlan, 9, 300, 16, "device"), (TopkPlan, 9, 20000, 16, "device")]
