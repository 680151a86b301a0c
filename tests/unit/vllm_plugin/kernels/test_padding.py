"""Decodes of different lengths together with a prompt, in the installed vLLM's own sparse indexer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4_testkit.vllm_script import told_by_fork

BATCHES = ("[2, 1]", "[1, 2]", "[3, 1, 1]", "[1, 1, 4]", "[2, 2]", "[1]")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("padding_with_vllm.py"))


@pytest.mark.parametrize("decodes", BATCHES)
def test_a_chunk_beside_decodes_gets_the_keys_that_it_gets_alone(found: dict[str, Any], decodes: str) -> None:
    chunk_is_the_same, _, chosen = found[decodes]
    assert chosen
    assert chunk_is_the_same


@pytest.mark.parametrize("decodes", BATCHES)
def test_decodes_get_the_keys_that_they_get_without_the_chunk(found: dict[str, Any], decodes: str) -> None:
    assert found[decodes][1]
