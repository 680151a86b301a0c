"""The page reads the result files in the format in which the kernels' benchmark writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[3] / "benchmarks" / "kernels" / "table.py"
_SPEC = importlib.util.spec_from_file_location("kernel_table", FILE)
assert _SPEC
assert _SPEC.loader
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    errors = {"out": {"max": 1e-3, "diff": 2e-6}, "scale": {"max": 5e-4, "diff": 3e-6}}
    row = {"op": "mla_decode", "case": "t1", "params": {"tokens": 1, "norm": True}, "bytes": 10, "flops": 20}
    ours = {"errors": errors, "cold_us": 12.345678, "iqr_us": 0.5, "hot_us": 10.0}
    peers = {"dsv4": ours, "there": {"wrong": "out: 3, not 4", "errors": errors}, "absent": {"skipped": "no wheel"}}
    table.write(tmp_path / "run.csv", {"gpu": "NVIDIA H200", "copy_gbs": 4250.5}, [{**row, "providers": peers}])
    machine, cases = table.read(tmp_path / "run.csv")
    assert machine == {"gpu": "NVIDIA H200", "copy_gbs": 4250.5}
    (case,) = cases
    assert {name: case[name] for name in row} == row
    found = case["providers"]
    assert found["dsv4"] == {"cold_us": 12.34568, "iqr_us": 0.5, "hot_us": 10.0, "max": 1e-3, "diff": 3e-6, "note": ""}
    assert found["there"] == {"max": 1e-3, "diff": 3e-6, "note": "wrong: out: 3, not 4"}
    assert found["absent"] == {"note": "skipped: no wheel"}


def test_the_tables_that_are_kept_can_be_read() -> None:
    kept = sorted(FILE.with_name("results").glob("*.csv"))
    assert kept
    for path in kept:
        machine, cases = table.read(path)
        assert machine["copy_gbs"] > 0
        assert all("dsv4" in case["providers"] for case in cases)
