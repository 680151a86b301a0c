"""The bundled prefill and front inside vLLM's own attention classes, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.vllm_script import told_by_fork


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("prefill_vllm.py"))


@pytest.mark.parametrize("ratio", ["1", "4", "128"])
def test_prefill_is_that_of_vllms_class(found: dict[str, Any], ratio: str) -> None:
    """Two chunks of requests; the workspace of the step was already reserved in the dummy step."""
    assert found["prefill"][ratio]["differing"] < 0.05
    assert found["prefill"][ratio]["reserved"] is True


@pytest.mark.parametrize(
    ("bundled", "name"),
    [
        ("both", "BundledDeepseekV4FlashMLAAttention [8, 32, 64]"),
        ("prefill", "BundledDeepseekV4FlashInferSM120Attention [8, 32, 64]"),
        ("decode", "BundledDeepseekV4FlashInferSM120Attention [8, 32, 64]"),
        ("none", "DeepseekV4FlashInferSM120Attention [8, 32, 64]"),
        ("images", "BundledDeepseekV4FlashInferSM120Attention [8, 32, 64]"),
    ],
)
def test_a_layer_needs_no_flashinfer_where_nothing_of_it_would_run(
    found: dict[str, Any], bundled: str, name: str
) -> None:
    assert found["classes"][bundled] == name


def test_heads_are_padded_as_long_as_flashmla_runs(found: dict[str, Any]) -> None:
    assert found["classes"]["FlashMLA, decode alone"] == "64"


def test_the_attached_front_computes_the_results_of_vllm(found: dict[str, Any]) -> None:
    assert found["front"] == {"warnings": [], "norms": True, "queries": True, "entries": True, "dummy step": True}
