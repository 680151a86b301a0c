"""Bundled FP8 products in vLLM's own reload of weights and after sleep: no state except parameters and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.vllm_script import told_by_fork

LAYERS = ("alone", "both", "wo_a")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("reloading_with_vllm.py"))


def test_a_reload_reaches_the_tensors_that_graphs_read(found: dict[str, Any]) -> None:
    assert found["reload"]["moved"] == []
    assert found["reload"]["stale"] == []


def test_eager_products_use_the_reloaded_weights(found: dict[str, Any]) -> None:
    assert found["reload"]["first"] == {"both": True, "alone": True}
    assert found["reload"]["eager"] == {"both": True, "alone": True}


def test_scales_are_persistent_buffers_and_nothing_else_is_kept(found: dict[str, Any]) -> None:
    """vLLM saves buffers before sleep, exports them, and skips non-persistent ones in a reload."""
    assert found["reload"]["exported"] == [f"{name}.dsv4_weight_scale" for name in LAYERS]
    assert found["reload"]["persistent"] == []
    assert found["reload"]["others"] == []


def test_products_are_right_after_their_memory_was_lost(found: dict[str, Any]) -> None:
    assert found["sleep"] == {"restored": [True] * 3, "eager": {"both": True, "alone": True}}


def test_scales_of_another_kind_are_refused_or_stay_with_vllm(found: dict[str, Any]) -> None:
    assert found["other"]["said"] == [
        "both: the block scales of the new weights are no powers of two, those that the engine was started with are; "
        "restart the engine",
        "False, None",
        "layers.0.wo_a: its block scales are no powers of two; set DSV4_KERNELS=o_proj=stock",
    ]


def test_the_output_of_prompts_does_not_depend_on_lost_memory(found: dict[str, Any]) -> None:
    assert found["output"] == [True] * 3
