"""Benchmark every operation of the registry and every available peer.

`python -m benchmarks.kernels.run [--folder NAME ...] [--op NAME ...] [--case SUBSTRING ...] [--csv FILE]`

Every provider's result is first compared with the float64 reference. A wrong provider is reported with its error and
not timed, unless it declares a reason for less exact results (`Provider.rough`) and its error is small; then its error
is printed with its time. Peers are found in third_party/peers and in an installed vLLM (see docs/kernels/README.md). A
peer that cannot be loaded, compiled or captured is reported and omitted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.kernels.peers as peers
import torch
import triton
from benchmarks.kernels import table
from benchmarks.kernels.timing import Timer, capture, ceilings

from dsv4_kernels import registry
from dsv4_kernels.registry import FOLDERS, Case, Operation, Provider, Tolerance, as_outputs, operations

# Maximum relative RMS of a timed peer with less exact results: it performs the same computation.
ROUGH = 1e-2
OURS = ("dsv4", "reference")


def load_peers() -> None:
    for module in pkgutil.iter_modules(peers.__path__):
        try:
            importlib.import_module(f"benchmarks.kernels.peers.{module.name}").register()
        except Exception as error:
            print(f"peers of {module.name} are left out: {told(error)}", flush=True)


def told(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


def doubled(tolerance: Tolerance) -> Tolerance:
    """Double the limits for a peer, which rounds to bf16 where ours keeps float32; its error is printed."""
    limits = {name: getattr(tolerance, name) for name in ("absolute", "relative", "rms", "diff")}
    return replace(tolerance, **{name: 2 * limit for name, limit in limits.items() if limit is not None})


def attempt(
    op: Operation, case: Case, provider: Provider, inputs: dict[str, Any], expected: Any
) -> tuple[Any, dict[str, Any]]:
    """Return (callable or None, facts): the callable only if the provider is available and right."""
    try:
        if reason := provider.missing():
            return None, {"skipped": reason}
        call = provider.make(case.params, torch.device("cuda"))
        kept = registry.fresh(op, inputs)
        results = op.compared(as_outputs(call(**kept)))
    except Exception as error:
        return None, {"failed": told(error)}
    errors: dict[str, Any] = {}
    faults = []
    for name, out, want, tolerance in zip(op.outputs, results, expected, op.tolerance, strict=False):
        if out is None:
            continue
        try:
            measured = registry.measure(out, want, tolerance)
        except AssertionError as error:
            return None, {"wrong": f"{name}: {error}"[:200]}
        errors[name] = {"max": measured.worst, "rms": measured.rms, "diff": measured.diff, "outside": measured.outside}
        try:
            registry.judge(name, measured, tolerance if provider.name == "dsv4" else doubled(tolerance))
        except AssertionError as error:
            faults.append(str(error)[:200])
    facts: dict[str, Any] = {"errors": errors}
    if faults and provider.rough and all(error["rms"] <= ROUGH for error in errors.values()):
        facts["rough"] = provider.rough
    elif faults:
        return None, {"wrong": faults[0], **facts}
    return (lambda: call(**kept)), facts


class Budget:
    """Seconds available to each peer for loading and compilation; a peer that exceeds them is omitted."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spent: dict[str, float] = {}

    def attempt(
        self, op: Operation, case: Case, provider: Provider, inputs: dict[str, Any], expected: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the result of `attempt`; a callable comes with the graph of its calls, which uses its memory."""
        spent = self.spent.get(provider.name, 0.0)
        if provider.name not in OURS and spent > self.seconds:
            return None, {"skipped": f"took {spent:.0f} s to be loaded and compiled for earlier cases"}
        begun = time.monotonic()
        call, facts = attempt(op, case, provider, inputs, expected)
        self.spent[provider.name] = spent + time.monotonic() - begun
        try:
            return call and (call, capture(call)), facts
        except Exception as error:
            return None, {"failed": f"not captured: {told(error)}"}


def prepare(folders: Sequence[str], index: int, count: int) -> None:
    """Call each peer of this share once, so that its compiled kernels are in its cache on disk."""
    load_peers()
    device = torch.device("cuda")
    rows = [
        (op, case, provider)
        for op in operations()
        if op.folder in folders
        for case in op.cases_with("bench")
        for provider in op.providers()
        if provider.name not in OURS
    ]
    for op, case, provider in rows[index::count]:
        try:
            if provider.missing() is None:
                inputs = op.make_inputs({**case.params, "dense": True}, device, 7)
                provider.make(case.params, device)(**inputs)
                torch.cuda.synchronize()
        except Exception as error:
            print(f"prepare {op.name} {case.name} {provider.name}: {told(error)}", flush=True)


def bench_case(op: Operation, case: Case, timer: Timer, rounds: int, budget: Budget) -> dict[str, Any]:
    device = torch.device("cuda")
    params = {**case.params, "dense": True}
    inputs = op.make_inputs(params, device, 7)
    expected = op.compared(as_outputs(op.reference(**registry.fresh(op, inputs), exact=True)))
    captured, facts = {}, {}
    for provider in op.providers():
        if provider.name == "reference":
            continue
        found, facts[provider.name] = budget.attempt(op, case, provider, inputs, expected)
        if found is not None:
            captured[provider.name] = found
    del expected
    for name, times in timer.replay({name: graph for name, (_, graph) in captured.items()}, rounds).items():
        facts[name] |= {"cold_us": times.cold, "iqr_us": times.spread, "hot_us": times.hot}
    shape = {k: v for k, v in case.params.items() if not isinstance(v, tuple)}
    return {
        "op": op.name, "case": case.name, "params": shape,
        "bytes": op.nbytes(case.params), "flops": op.flops(case.params), "providers": facts,
    }  # fmt: skip


def line(row: dict[str, Any], peak: dict[str, float]) -> str:
    parts = [f"{row['op']:<20}{row['case']:<18}"]
    ours = row["providers"].get("dsv4", {}).get("cold_us")
    for name, facts in row["providers"].items():
        if "cold_us" not in facts:
            parts.append(f"{name}: {facts.get('wrong') or facts.get('failed') or facts.get('skipped')}"[:150])
            continue
        text = f"{name} {facts['cold_us']:.1f}±{facts['iqr_us']:.1f} (hot {facts['hot_us']:.1f})"
        if name == "dsv4":
            worst = max(e["diff"] for e in facts["errors"].values())
            text += (
                f" {row['bytes'] / ours / 1e3 / peak['copy_gbs']:.0%}bw {row['flops'] / ours / 1e6:.0f}TF d{worst:.1e}"
            )
        elif ours:
            text += f" ×{facts['cold_us'] / ours:.2f}"
        if "rough" in facts:
            text += f" rough rms{max(e['rms'] for e in facts['errors'].values()):.1e}"
        parts.append(text)
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="*", choices=FOLDERS, help="only the operations of these folders")
    parser.add_argument("--op", nargs="*", help="only these operations")
    parser.add_argument("--case", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--csv", type=Path, help="file of the results")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--peer-seconds", type=float, default=120, help="limit for loading and compiling a peer, in total"
    )
    options = parser.parse_args()
    budget = Budget(options.peer_seconds)
    load_peers()
    torch.cuda.set_device(0)
    timer = Timer()
    peak = ceilings(timer)
    stamp = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "empty_graph_us": timer.empty,
        **peak,
    }
    print(json.dumps(stamp), flush=True)
    rows = []
    for op in operations():
        if (options.folder and op.folder not in options.folder) or (options.op and op.name not in options.op):
            continue
        for case in op.cases_with("bench"):
            if options.case and not any(part in case.name for part in options.case):
                continue
            try:
                rows.append(bench_case(op, case, timer, options.rounds, budget))
            except torch.OutOfMemoryError as error:
                print(f"{op.name} {case.name}: {error}", flush=True)
                continue
            print(line(rows[-1], peak), flush=True)
            if options.csv:
                table.write(options.csv, stamp, rows)


if __name__ == "__main__":
    main()
