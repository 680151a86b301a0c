"""The bundled projections inside the installed vLLM's own attention, interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.vllm_script import told_by_fork


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("projecting_with_vllm.py"))


def test_the_hooks_match_the_installed_vllm(found: dict[str, Any]) -> None:
    assert found["unknown"] == []


@pytest.mark.parametrize("ratio", ["4", "128"])
def test_few_tokens_are_projected_and_saved_at_once(found: dict[str, Any], ratio: str) -> None:
    """Uses the plan that was made ahead, for both compressors and the weights of the indexer's heads."""
    assert found["saved"][ratio] is True


def test_the_compressor_saves_only_given_inputs_and_always_stores(found: dict[str, Any]) -> None:
    assert found["stored"] == [1, 2]


def test_other_products_stay_vllms(found: dict[str, Any]) -> None:
    assert found["kept"] == dict.fromkeys(
        [
            "many tokens",
            "no compressor",
            "prepared outside of graphs",
            "one is not bundled",
            "an adapter",
            "an odd size",
            "no metadata",
        ],
        True,
    )
