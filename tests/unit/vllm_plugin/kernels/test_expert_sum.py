"""Shared and routed experts, added by the bundled kernels inside vLLM's own MoE runner, interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.vllm_script import told_by_fork


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("summing_with_vllm.py"))


def test_the_hook_matches_the_installed_vllm(found: dict[str, Any]) -> None:
    assert found["unknown"] == []
    assert found["gone"].startswith("SharedExperts.")


def test_the_sum_is_vllms_bit_for_bit_in_vllms_order(found: dict[str, Any]) -> None:
    """With one stream the shared experts run first; with their own stream the wait for them is after the routing."""
    assert found["sum"] == {
        "one stream": [True, True, True, True, True, ["shared", "routed"]],
        "two streams": [
            *(True, True, True, True, True),
            ["input recorded", "input waited for", "shared", "output recorded", "routed", "output waited for"],
        ],
    }


def test_ranks_reduce_the_sum_once(found: dict[str, Any]) -> None:
    """Two all-reduces of the same tensor: vLLM's own and the one behind the hook."""
    assert found["reduced"] == [True, 2, True]


def test_parameters_keep_the_names_that_weights_are_loaded_by(found: dict[str, Any]) -> None:
    assert found["names"] == [["shared_experts.weight"]] * 2


def test_every_sum_left_to_vllm_has_a_reason(found: dict[str, Any]) -> None:
    assert found["refused"] == {
        "taken": "taken",
        "expert parallel": "the experts are spread over ranks",
        "data parallel": "tokens are spread over ranks",
        "sequence parallel": "tokens are spread over ranks",
        "balanced": "the experts are spread over ranks",
        "gated": "the shared experts have a gate",
        "scaled": "the routed experts' result is scaled",
        "latent": "the routed experts' input or result is transformed",
        "padded": "the routed experts' input is padded",
        "two at once": "a step is split into two that run at once",
        "adapters": "an adapter may change the experts",
        "other experts": "",
    }


def test_the_experts_take_the_tokens_of_all_data_parallel_ranks(found: dict[str, Any]) -> None:
    """vLLM's gathering dispatch provides them; dispatches with an unbounded number of tokens are refused."""
    gathered = found["gathered"]
    assert gathered["same"] is True
    assert gathered["sizes"] == [5, 10, 16, 10]
    assert gathered["reasons"].pop("allgather_reducescatter") == ""
    assert all(gathered["reasons"].values()), gathered["reasons"]


def test_padding_is_no_expert_of_any_rank(found: dict[str, Any]) -> None:
    """As an index into the map of experts, the id -1 of padding would select the last one."""
    for rank, (token, padding) in enumerate(found["ids"]):
        assert token == [one - 2 * rank if one // 2 == rank else -1 for one in (0, 5, 2, 7, 3, 6)]
        assert padding == [-1] * 6
