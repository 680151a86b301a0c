"""vLLM's memory profile includes the memory that attention allocates after it, as vLLM's own classes allocate it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsv4_runtime.vllm_plugin import loading
from dsv4_testkit.vllm_script import told_by_fork

TOKENS = 64
WIDTH = 8192
"""Width of an index row at a context of 1 Mi tokens."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("reserve_vllm.py"))


def test_the_buffers_are_as_large_as_vllms_builder_makes_them(found: dict[str, Any]) -> None:
    assert found["builder"] == found["reserved"] == 4 * TOKENS * (2 * WIDTH + 1)


def test_the_profile_holds_them_where_the_rank_has_such_layers(found: dict[str, Any]) -> None:
    assert found["profiled"] == [found["builder"]]
    assert found["profiled without"] == []


def test_every_change_finds_its_symbol_in_this_vllm(found: dict[str, Any]) -> None:
    assert found["attached"] == [True, True, True]


def test_the_workspace_is_as_wide_as_the_longest_rows_need(found: dict[str, Any]) -> None:
    assert found["before"]["workspace"] < found["needed"], "vLLM's own dummy step takes the indexer's width"
    assert found["workspace"] == found["needed"]


def test_copies_of_a_prefill_on_sm12x_are_made_in_the_dummy_step(found: dict[str, Any]) -> None:
    slots, padded = 4 * TOKENS * WIDTH, found["prepared"]
    assert {slots, padded} <= set(found["copies"])
    assert slots not in found["before"]["copies"]
    assert 4 * TOKENS * 512 in found["copies of 4"]
    assert slots not in found["copies of windows"]


@pytest.mark.parametrize(
    ("length", "width"), [(1, 128), (16_384, 128), (16_385, 256), (131_072, 1024), (1 << 20, WIDTH)]
)
def test_width(length: int, width: int) -> None:
    assert loading.c128_width(length) == width


def test_another_vllm_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ModuleType("other")

    class Runner:
        def profile_run(self) -> None: ...

    other.GPUModelRunner = Runner  # type: ignore[attr-defined]
    before = Runner.profile_run
    monkeypatch.setitem(sys.modules, "other", other)
    with caplog.at_level(logging.WARNING):
        loading._attach_reserve("other", loading._profile)
    assert Runner.profile_run is before
    (warning,) = caplog.records
    assert "its parameters are ['self'], expected ['self', 'randomize_inputs']" in warning.getMessage()
