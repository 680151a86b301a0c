"""Launches and busy time of a whole engine from a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.gpu.engine import covered, drafting, graph_sizes, layers_of

VLLM = "void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<__nv_bfloat16>"


def profile(*names: str) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(name=name, device_type="DeviceType.CUDA", time_range=SimpleNamespace(start=at))
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize("first", [VLLM, "front_insert_kernel"])
def test_a_layer_begins_at_the_kernel_that_stores_the_key(first: str) -> None:
    """Two steps of three layers; kernels after the last layer of a step belong to no layer."""
    step = [first, "a", "b", first, "a", first, "a", "head", "sample"]
    assert layers_of(profile(*step, *step), 3) == 2 * [[first, "a", "b"], [first, "a"]]


def test_no_layers_without_a_layers_beginning() -> None:
    assert layers_of(profile("a", "b"), 3) == []


def test_time_in_which_two_kernels_run_counts_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 3.0), (2.0, 4.0), (2.5, 3.0)]) == 6.0
    assert covered([]) == 0.0


@pytest.mark.parametrize(
    ("text", "method", "tokens", "sampling"),
    [("mtp:3", "mtp", 3, "greedy"), ("dspark:5:probabilistic", "dspark", 5, "probabilistic")],
)
def test_drafts_are_greedy_by_default(text: str, method: str, tokens: int, sampling: str) -> None:
    wanted = {"method": method, "num_speculative_tokens": tokens, "draft_sample_method": sampling}
    assert drafting(text) == wanted
    assert drafting(None) is None


def test_graphs_hold_the_drafts_of_as_many_requests() -> None:
    """vLLM rounds sizes to multiples of the tokens that one request verifies, and omits sizes beyond the largest."""
    assert graph_sizes([512], None) == [1, 2, 4, 8, 16, 32, 64, 512]
    assert graph_sizes([], drafting("dspark:5")) == [6, 12, 24, 48, 96, 192, 384]
