"""The static gate: what it would report, and that the committed table belongs to the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4_kernels.arch import Arch
from dsv4_kernels.gate import child, table
from dsv4_kernels.static import Expect, StaticKernel

RECORD = StaticKernel(
    operation="op",
    kernel="dsv4_kernels.fp8_quant.kernel:fp8_quant_kernel",
    label="a",
    arch=Arch.SM_120,
    signature={},
    constexprs={"K": 128},
    num_warps=4,
    num_stages=2,
    expect=Expect(mma=("mx",), cp_async=8),
)
GOOD: dict[str, Any] = {
    "shared": 101_376,
    "registers": 255,
    "stack": 0,
    "local": 0,
    "mma": {"mx": 4},
    "cp_async": 8,
    "foreign": 0,
}


def test_a_row_that_keeps_its_promises_passes() -> None:
    assert child.verdict(RECORD, GOOD) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shared": 101_377}, "shared memory"),
        ({"stack": 8}, "stack"),
        ({"local": 8}, "stack"),
        ({"cp_async": 7}, "asynchronous"),
        ({"mma": {}}, "no matrix instruction"),
        ({"mma": {"bf16": 4}}, "beside the stated"),
        ({"mma": {"mx": 4, "bf16": 1}}, "beside the stated"),
        ({"foreign": 1}, "does not have"),
    ],
)
def test_every_broken_promise_is_found(change: dict[str, Any], word: str) -> None:
    broken = child.verdict(RECORD, {**GOOD, **change})
    assert len(broken) == 1
    assert word in broken[0]


def test_patterns_tell_block_scaled_from_plain_fp8() -> None:
    import re

    from dsv4_kernels.static import MMA_PATTERNS

    scaled = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 {%f1}"
    plain = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1}"
    found = {name for name, pattern in MMA_PATTERNS.items() if re.search(pattern, scaled)}
    assert found == {"mx"}
    assert {name for name, pattern in MMA_PATTERNS.items() if re.search(pattern, plain)} == {"fp8"}


def test_a_change_of_source_or_configuration_makes_a_row_stale() -> None:
    digest = child.digest(RECORD)
    rows = {("op/f/a/sm_120", "3.6"): {"digest": digest}}
    assert table.stale(rows, {("op/f/a/sm_120", "3.6"): digest}) == []
    assert "other sources" in table.stale(rows, {("op/f/a/sm_120", "3.6"): "x"})[0]
    assert "no row" in table.stale({}, {("op/f/a/sm_120", "3.6"): digest})[0]
    assert "gone" in table.stale(rows, {})[0]


def test_a_row_is_compared_field_by_field() -> None:
    row = {**GOOD, "key": "k", "triton": "3.6", "digest": "d", "broken": []}
    assert table.differences(row, row) == []
    assert "registers is 7" in table.differences(row, {**row, "registers": 7})[0]


def test_records_apply_to_the_tritons_that_would_run_them() -> None:
    keys = {(r.key, r.since, r.before) for r in child.records() if r.arch is Arch.SM_121 and r.operation == "fp8_gemm"}
    mx = [k for k in keys if "-mx" in k[0]]
    dot = [k for k in keys if "-dot" in k[0]]
    assert mx
    assert dot
    assert all(since == (3, 8) for _, since, _ in mx)
    assert all(before == (3, 8) for _, _, before in dot)


def test_the_committed_table_is_fresh_and_one_of_each_compiles(tmp_path: Path) -> None:
    """With the installed Triton: digests of every row, then for SM12x one configuration per kernel and every row that
    the change at hand changed (none is known in a shallow clone).
    """
    command = [sys.executable, "-m", "dsv4_kernels.gate", "--check", "--tritons", str(tmp_path), "--since"]
    command += ["--arch", "sm_120", "sm_121"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
