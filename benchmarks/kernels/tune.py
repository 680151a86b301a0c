"""Offline tuner: time candidate configurations on the present GPU and write the best into the operation's table.

`python -m benchmarks.kernels.tune mla_decode|fp8_gemm [--write]`. For other operations it only prints, because their
configurations are written by hand. A candidate with results that differ from those of the first one is omitted. The
tuner does not run while serving.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import itertools
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.kernels.candidates import ROWS, params_of
from benchmarks.kernels.timing import Timer

from dsv4_kernels.arch import detect
from dsv4_kernels.registry import operation

# The operation's folder, its configuration's class and the function that selects one.
KINDS = {
    "mla_decode": ("mla_decode", "DecodeConfig", "select"),
    "fp8_gemm": ("fp8", "GemmConfig", "select"),
    "mhc_post_pre": ("mhc", "MixConfig", "select"),
    "moe_w4a16": ("moe", "MoeConfig", "select"),
    "mla_merge_o8": ("mla_decode", "MergeConfig", "merge_config"),
    "router": ("router", "RouterConfig", "select"),
    "indexer_logits": ("indexer", "LogitsConfig", "select_prefill"),
    "indexer_paged_logits": ("indexer", "LogitsConfig", "select_paged"),
    "mla_prefill": ("mla_prefill", "PrefillConfig", "select"),
}
WITH_TABLE = ("mla_decode", "fp8_gemm")
"""Operations with a table written by the tuner."""


def config_of(name: str, candidate: tuple[int, ...]) -> Any:
    folder, kind, _ = KINDS[name]
    return getattr(importlib.import_module(f"dsv4_kernels.{folder}.api"), kind)(*candidate)


def use(name: str, candidate: tuple[int, ...]) -> None:
    """Make the operation select `candidate` regardless of its table."""
    folder, _, select = KINDS[name]
    api, config = importlib.import_module(f"dsv4_kernels.{folder}.api"), config_of(name, candidate)
    setattr(api, select, lambda *_: config)
    if name == "fp8_gemm":
        api.hopper_from = lambda *_: None


def planned(name: str, params: dict[str, Any], candidate: tuple[int, ...]) -> Any:
    """Return a plan that uses `candidate`."""
    use(name, candidate)
    return operation(name).plan(params, torch.device("cuda"), None)


def prebuild(name: str, jobs: int) -> None:
    """Compile all candidates in parallel processes; Triton's cache on disk keeps them."""
    command = [sys.executable, "-m", "benchmarks.kernels.tune", name, "--part"]
    children = [subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL) for i in range(jobs)]
    for child in children:
        child.wait()


def work(name: str) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return shapes with candidates, grouped by possible shared kernels, so that one process compiles each kernel."""
    groups: dict[Any, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for _, shapes, candidates in ROWS[name]:
        for candidate in candidates:
            for shape in shapes:
                groups.setdefault((shape[1:], candidate[:-1]), []).append((shape, candidate))
    return list(groups.values())


# bf16 results of products that are summed in another order.
DIFFERENCE = 1e-2
Times = dict[tuple[int, tuple[int, ...]], dict[str, float]]
"""Microseconds by row number and candidate, and by shape."""


def compile_part(name: str, index: int, count: int) -> None:
    """Run every `count`th of the candidates once, from `index` on, to compile it."""
    device = torch.device("cuda")
    for shape, candidate in itertools.chain.from_iterable(work(name)[index::count]):
        params = params_of(name, shape)
        try:
            planned(name, params, candidate).run(**operation(name).make_inputs(params, device, 1))
        except Exception as error:
            print(candidate, error)


def runnable(name: str, shape: tuple[int, ...], candidates: list[tuple[int, ...]]) -> dict[str, Any]:
    """Return calls of the candidates that run with this shape, by the candidate's text."""
    params = params_of(name, shape)
    inputs = operation(name).make_inputs(params, torch.device("cuda"), 1)
    calls: dict[str, Any] = {}
    first: torch.Tensor | None = None
    for candidate in candidates:
        try:
            plan = planned(name, params, candidate)
            results = plan.run(**inputs)
            torch.cuda.synchronize()
        except Exception as error:
            print(shape, candidate, f"{type(error).__name__}: {error}".splitlines()[0][:120])
            continue
        value = as_float(results)
        first = value.clone() if first is None else first
        difference = float((value - first).norm() / first.norm())
        if not difference < DIFFERENCE:
            print(shape, candidate, f"differs from {candidates[0]} by {difference:.1e}")
            continue
        calls[str(candidate)] = functools.partial(run_with, name, plan, candidate, inputs)
    return calls


def as_float(results: Any) -> torch.Tensor:
    """Return the first result as float32; codes are compared unchanged, unwritten scores as zeros."""
    return (results[0] if isinstance(results, tuple) else results).float().nan_to_num(0.0, 0.0, 0.0)


def timed(name: str) -> Times:
    """Time every candidate with every shape of its row, cold."""
    timer, times = Timer(256 << 20), Times()
    for index, (when, shapes, candidates) in enumerate(ROWS[name]):
        for shape in shapes:
            measured = timer.time(runnable(name, shape, candidates), 12)
            for candidate in candidates:
                if str(candidate) in measured:
                    times.setdefault((index, candidate), {})[str(shape)] = measured[str(candidate)].cold
            best = sorted(measured.items(), key=lambda item: item[1].cold)
            print(when, shape, "  ".join(f"{k}:{v.cold:.1f}" for k, v in best), flush=True)
    return times


def winners(name: str, times: Times) -> list[dict[str, Any]]:
    """Return the best candidate of every row, by the geometric mean over its shapes, as rows of the table."""
    rows = []
    for index, (when, shapes, candidates) in enumerate(ROWS[name]):
        complete = [c for c in candidates if len(times.get((index, c), {})) == len(shapes)]
        score = {c: math.exp(sum(map(math.log, times[index, c].values())) / len(shapes)) for c in complete}
        # Within the noise the earlier candidate is selected, so that the table has fewer different ones.
        best_score = min(score.values())
        winner = next(c for c in complete if score[c] <= 1.01 * best_score)
        rows.append({"when": when, "config": asdict(config_of(name, winner)) if name in WITH_TABLE else winner})
        print("winner", when, winner, f"{score[winner]:.1f}", flush=True)
    return rows


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Insert `rows` into the table of this architecture."""
    provenance = {
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "how": "measured: benchmarks/kernels/tune.py, geometric mean over the shapes of each row, cold L2",
    }
    path = (
        Path(importlib.import_module(f"dsv4_kernels.{KINDS[name][0]}").__path__[0])
        / "tuning"
        / f"{detect('cuda')}.json"
    )
    kernels = json.loads(path.read_text())["kernels"] if path.exists() else {}
    path.write_text(as_text({**kernels, name: rows}, provenance))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(ROWS))
    parser.add_argument("--write", action="store_true", help="write the table of this architecture")
    parser.add_argument("--part", help="i/n: only compile this share (used by the tuner itself)")
    options = parser.parse_args()
    if options.write and options.op not in WITH_TABLE:
        parser.error(f"--write: {options.op} has no table that the tuner writes; change its api.py by hand")
    if options.part:
        index, count = map(int, options.part.split("/"))
        compile_part(options.op, index, count)
        return
    # Drawing the merge's inputs on the CPU takes longer than compiling its kernels.
    if options.op != "mla_merge_o8":
        prebuild(options.op, 12)
    rows = winners(options.op, timed(options.op))
    if options.write:
        write(options.op, rows)


def as_text(kernels: dict[str, list[dict[str, Any]]], provenance: dict[str, str]) -> str:
    """Return the table as JSON with one row per line, so that a change of one row is one line."""
    tables = []
    for name, rows in kernels.items():
        lines = ",\n".join(f"      {json.dumps(row)}" for row in rows)
        tables.append(f'    "{name}": [\n{lines}\n    ]')
    head = json.dumps(provenance, indent=4).replace("\n}", "\n  }")
    return f'{{\n  "provenance": {head},\n  "kernels": {{\n' + ",\n".join(tables) + "\n  }\n}\n"


def run_with(name: str, plan: Any, candidate: tuple[int, ...], inputs: dict[str, Any]) -> Any:
    use(name, candidate)
    return plan.run(**inputs)


if __name__ == "__main__":
    main()
