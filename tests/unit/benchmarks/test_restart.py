"""Command lines of the benchmark of restarts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.gpu.restart import arguments, read_options


@pytest.mark.parametrize(
    "further", [[], ["--tensor-parallel-size", "2"], ["--kv-cache-dtype", "auto", "--", "x"]], ids=len
)
def test_arguments_of_vllm_follow_the_options(further: list[str]) -> None:
    """As in the documented command lines, where options stand between the model and `--`."""
    own = ["/tmp/slice", "--kernels", "auto", "--ways", "retained", "standby", "--runs", "2", "--out", "restart.json"]
    options = read_options([*own, *(["--", *further] if further else [])])
    assert (options.model, options.runs, options.ways) == ("/tmp/slice", 2, ["retained", "standby"])
    assert options.out == Path("restart.json")
    assert options.further == further
    given = arguments(options.model, 1, options.further)
    assert given == arguments("/tmp/slice", 1, []) + further
