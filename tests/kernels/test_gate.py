"""The static gate: its findings, and agreement of the committed table with the sources."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_kernels.arch import Arch
from dsv4_kernels.gate import child, table
from dsv4_kernels.gate.__main__ import TABLE, VERSIONS
from dsv4_kernels.gate.table import MMA_PATTERNS, Expect, Row, StaticKernel, arguments_of

ROOT = Path(__file__).parents[2]
RECORD = StaticKernel(
    kernel="dsv4_kernels.fp8.kernel:fp8_quant_kernel",
    label="a",
    arch=Arch.SM_120,
    arguments=("*bf16", "*fp8e4nv", "*u8", "i32"),
    constants={"K": 128},
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


def test_a_row_that_meets_its_requirements_passes() -> None:
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
def test_every_unmet_requirement_is_found(change: dict[str, Any], word: str) -> None:
    broken = child.verdict(RECORD, {**GOOD, **change})
    assert len(broken) == 1
    assert word in broken[0]


def test_a_kernel_that_cannot_be_compiled_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assertions of Triton have no text."""

    def fails(record: StaticKernel) -> None:
        raise AssertionError

    monkeypatch.setattr(child, "compile_record", fails)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([RECORD.as_json()])))
    child.main()
    assert json.loads(capsys.readouterr().out)["broken"] == ["does not compile: AssertionError: "]


def test_patterns_distinguish_block_scaled_and_plain_fp8() -> None:
    scaled = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 {%f1}"
    plain = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1}"
    found = {name for name, pattern in MMA_PATTERNS.items() if re.search(pattern, scaled)}
    assert found == {"mx"}
    assert {name for name, pattern in MMA_PATTERNS.items() if re.search(pattern, plain)} == {"fp8"}


def test_a_change_of_source_or_configuration_makes_a_row_stale() -> None:
    row = Row(RECORD, RECORD.digest(), {version: {} for version in VERSIONS})
    assert table.stale([row], [RECORD], VERSIONS) == []
    assert "other sources" in table.stale([replace(row, digest="x")], [RECORD], VERSIONS)[0]
    assert "other sources" in table.stale([row], [replace(RECORD, num_warps=8)], VERSIONS)[0]
    assert "has results of" in table.stale([replace(row, results={"3.6": {}})], [RECORD], VERSIONS)[0]
    assert "no row" in table.stale([], [RECORD], VERSIONS)[0]
    assert "gone" in table.stale([row], [], VERSIONS)[0]


def test_the_digest_covers_called_functions_and_no_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8_quant_kernel` calls the shared function `quantize_e4m3`, which calls `ue8m0_ceil`."""
    digests: list[str] = []
    sources = table.PACKAGE
    for before, after in (
        ("", ""),
        ("def ue8m0_ceil(x):", "# A comment.\ndef ue8m0_ceil(x):"),
        ("tl.minimum(code, 254)", "tl.minimum(code, 253)"),
        ("def is_last(count_ptr, parts):", "def is_last(count_ptr, all_parts):"),
    ):
        package = tmp_path / str(len(digests))
        shutil.copytree(sources, package, ignore=shutil.ignore_patterns("__pycache__"))
        device = package / "device.py"
        assert before in device.read_text()
        device.write_text(device.read_text().replace(before, after, 1))
        monkeypatch.setattr(table, "PACKAGE", package)
        for cached in (table._module, table._source):
            cached.cache_clear()
        digests.append(RECORD.digest())
    for cached in (table._module, table._source):
        cached.cache_clear()
    whole, commented, changed, unrelated = digests
    assert whole == commented == unrelated != changed


def test_a_row_is_compared_field_by_field() -> None:
    row = {**GOOD, "key": "k", "broken": []}
    committed = table.result_of(row)
    assert table.differences("k", "3.6", committed, row) == []
    assert "registers is 7" in table.differences("k", "3.6", committed, {**row, "registers": 7})[0]
    assert "stack is 8" in table.differences("k", "3.6", committed, {**row, "stack": 8})[0]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = replace(RECORD, constants={"K": 128, "LIMIT": 10.0, "A8": True, "MMA": "mx"}, before=(3, 8))
    row = Row(record, record.digest(), {"3.6": table.result_of({**GOOD, "key": record.key, "broken": []})})
    table.write(tmp_path / "table.json", [row])
    assert table.read(tmp_path / "table.json") == [row]
    assert table.read(tmp_path / "table.json")[0].record.digest() == row.digest


def test_records_apply_to_the_tritons_that_would_run_them() -> None:
    rows = [row.record for row in table.read(ROOT / TABLE)]
    found = [one for one in rows if one.arch is Arch.SM_121 and one.function == "fp8_gemm_kernel"]
    assert {one.constants["MX"] for one in found} == {True, False}
    assert all(one.since == (3, 8) for one in found if one.constants["MX"])
    assert all(one.before == (3, 8) for one in found if not one.constants["MX"])
    assert not any(one.applies_to("3.6") and one.applies_to("3.8") for one in found)


def test_every_kernel_of_the_package_is_recorded() -> None:
    launched = {row.record.kernel for row in table.read(ROOT / TABLE)}
    kernels = {
        f"dsv4_kernels.{'.'.join(path.relative_to(table.PACKAGE).with_suffix('').parts)}:{name}"
        for path in table.PACKAGE.glob("*/*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert launched == kernels
    assert all(arguments_of(kernel) for kernel in kernels)


def test_the_committed_table_is_fresh_and_one_of_each_compiles(tmp_path: Path) -> None:
    """Checks digests of every row with the installed Triton.

    Then compiles for SM12x one configuration per kernel and every row that the current change affects (none is known in
    a shallow clone).
    """
    command = [sys.executable, "-m", "dsv4_kernels.gate", "--check", "--tritons", str(tmp_path), "--since"]
    command += ["--arch", "sm_120", "sm_121"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
