"""Peers in the kernels' benchmark cannot end a run, and a new results file is enough for a new page."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("dsv4_kernels")

from dsv4_kernels.registry import Provider, operation

ROOT = Path(__file__).parents[3]
H100 = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-25"}
RATES = {"empty_graph_us": 4.0, "copy_gbs": 2800.0, "bf16_tflops": 700.0}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.kernels.{name}")


def facts(cold: float, **more: Any) -> dict[str, Any]:
    errors = {"y": {"max": 2.2e-4, "diff": 1e-7, "rms": 2.2e-4, "outside": 0.0}}
    return {"cold_us": cold, "iqr_us": 0.1, "hot_us": cold - 1, "errors": errors, **more}


def row(op: str, case: str, params: dict[str, int], **providers: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "case": case, "params": params, "bytes": 10**6, "flops": 10**6, "providers": providers}


def rows() -> list[dict[str, Any]]:
    seam = {"hidden": 4096, "norm": True}
    stock = facts(20.0, rough="its product takes TF32 inputs")
    broken = {"failed": "OSError: no nvcc"}
    return [
        row("mhc_post_pre", "flash-t1", {"tokens": 1, **seam}, dsv4=facts(11.0), stock=stock),
        row("mhc_post_pre", "flash-t4096", {"tokens": 4096, **seam}, dsv4=facts(200.0), stock=stock),
        row("indexer_paged_logits", "b1-n2048", {"batch": 1}, dsv4=facts(10.0), DeepGEMM=broken),
        row("mla_prefill", "s512-h64", {"tokens": 512}, dsv4=facts(100.0), FlashMLA=facts(60.0)),
        row("front_norm", "t1", {"tokens": 1}, dsv4=facts(5.0)),
        row("front_insert", "t1-h64", {"tokens": 1}, dsv4=facts(5.5)),
    ]


def of_peer(module: Callable[[str], ModuleType], provider: Provider) -> tuple[Any, dict[str, Any]]:
    """Return the callable and the facts of a peer of `mhc_post` on the CPU."""
    op = operation("mhc_post")
    case = op.cases_with("cpu")[1]
    inputs = op.make_inputs(case.params, torch.device("cpu"), 1)
    expected = (op.reference(**inputs, exact=True),)
    return module("run").attempt(op, case, provider, inputs, expected)  # type: ignore[no-any-return]


def scaled(by: float) -> Callable[..., Any]:
    reference = operation("mhc_post").reference
    return lambda params, device: lambda **inputs: reference(**inputs) * by


def test_a_less_exact_peer_is_timed_only_with_a_declared_reason_and_small_errors(
    module: Callable[[str], ModuleType],
) -> None:
    call, seen = of_peer(module, Provider("peer", lambda: None, scaled(1.009), rough="rounds twice"))
    assert call is not None
    assert seen["rough"] == "rounds twice"
    for unlike in (Provider("peer", lambda: None, scaled(1.009)), Provider("peer", lambda: None, scaled(1.1), "far")):
        call, seen = of_peer(module, unlike)
        assert call is None
        assert seen["wrong"].startswith("residual: ")
    call, seen = of_peer(module, Provider("peer", lambda: None, scaled(1.0), rough="rounds twice"))
    assert call is not None
    assert "rough" not in seen


def test_a_peer_that_cannot_be_found_or_compiled_is_reported(module: Callable[[str], ModuleType]) -> None:
    def gone() -> str | None:
        raise ImportError("libcuda.so.1: cannot open\nmore")

    call, seen = of_peer(module, Provider("peer", gone, scaled(1.0)))
    assert (call, seen) == (None, {"failed": "ImportError: libcuda.so.1: cannot open"})
    call, seen = of_peer(module, Provider("peer", lambda: None, lambda params, device: 1 / 0))
    assert (call, seen) == (None, {"failed": "ZeroDivisionError: division by zero"})


def test_a_result_that_a_peer_does_not_give_is_not_compared(module: Callable[[str], ModuleType]) -> None:
    call, seen = of_peer(module, Provider("peer", lambda: None, lambda params, device: lambda **inputs: (None,)))
    assert call is not None
    assert seen == {"errors": {}}


def test_a_peer_that_has_used_its_seconds_up_is_left_out(module: Callable[[str], ModuleType]) -> None:
    op = operation("mhc_post")
    budget = module("run").Budget(2.0)
    budget.spent["peer"] = 3.0
    peer = Provider("peer", lambda: None, lambda params, device: 1 / 0)
    found = budget.attempt(op, op.cases[0], peer, {}, ())
    assert found == (None, {"skipped": "took 3 s to be loaded and compiled for earlier cases"})


def test_a_module_of_peers_that_cannot_be_loaded_leaves_the_others(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = module("run")
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        raise OSError("undefined symbol")

    monkeypatch.setattr(run.importlib, "import_module", load)
    run.load_peers()
    assert len(loaded) > 5
    assert "peers of vllm_engine are left out: OSError: undefined symbol" in capsys.readouterr().out


def test_goals_are_judged_from_a_run(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    module("table").write(tmp_path / "run.csv", {**H100, **RATES}, rows())
    found = list(module("goals").verdicts(module("table").read(tmp_path / "run.csv")))
    assert found == [
        ("pass", "seam, T = 1: ≤ 12 µs: mhc_post_pre flash-t1: 11.0 µs"),
        ("miss", "seam, T = 4096: ≥ 70 % of copy: mhc_post_pre flash-t4096: 0% of copy bandwidth (200.0 µs)"),
        (
            "no figure",
            "paged logits: ≥ 0.8 of DeepGEMM: indexer_paged_logits b1-n2048 DeepGEMM: failed: OSError: no nvcc",
        ),
        (
            "pass",
            "prefill MLA: ≥ 0.5 of FlashMLA: mla_prefill s512-h64: 0.60 of FlashMLA's speed (100.0 against 60.0 µs)",
        ),
        ("pass", "front, T = 1: ≤ 6 µs: front_norm t1: 5.0 µs"),
        ("pass", "front, T = 1: ≤ 6 µs: front_insert t1-h64: 5.5 µs"),
        (
            "miss",
            "front, T = 1, both: ≤ 6 µs: front_insert t1-h64: 6.5 µs with front_norm's 5.0, the trivial graph "
            "counted once",
        ),
    ]


def test_a_page_is_made_of_runs_on_two_cards(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, table = module("page"), module("table")
    monkeypatch.chdir(tmp_path)
    page.RESULTS.mkdir(parents=True)
    plots = page.DOCS / "plots"
    plots.mkdir(parents=True)
    (plots / "gone.svg").write_text("of a result that was removed")
    decode = row("mla_decode", "t1", {"tokens": 1, "heads": 64, "topk": 512}, dsv4=facts(10.0))
    more = row("mla_decode", "t8", {"tokens": 8, "heads": 64, "topk": 512}, dsv4=facts(12.0))
    table.write(page.RESULTS / "h100-second-half.csv", {**H100, **RATES}, rows())
    table.write(page.RESULTS / "h200.csv", {**H100, **RATES, "gpu": "NVIDIA H200"}, [decode, more, rows()[0]])
    page.main()
    assert {path.stem for path in plots.iterdir()} == {"decode-h64-h200", "mhc-seam-h100", "roofline-h200"}
    assert "H200" not in (plots / "mhc-seam-h100.svg").read_text()
    text = (page.DOCS / "measured.md").read_text()
    seam = text[text.index("## mhc_post_pre") :].split("\n## ")[0]
    assert seam.index("H100, 2026-11-25:") < seam.index("H200, 2026-11-25:")
    assert "20.0 (×1.82); rough, 2.2e-04" in seam
