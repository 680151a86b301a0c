"""The offline tuner: time candidate configurations on the GPU at hand and write the best into the operation's table.

`python -m benchmarks.kernels.tune mla_decode|fp8_gemm [--write]`. Nothing of this runs while serving.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.kernels.timing import Timer

from dsv4_kernels.arch import detect
from dsv4_kernels.registry import operation

# Per operation: rows of (range, shapes that stand for it, candidates). Fields in the order of the configuration's
# dataclass.
DECODE_ROWS = [
    (
        {"heads": [1, 16], "tokens": [1, 16]},
        [(1, 16), (8, 16)],
        [
            (16, 64, 8, 3, 1, 0),
            (16, 64, 8, 3, 1, 1),
            (16, 64, 8, 5, 1, 1),
            (16, 32, 4, 3, 2, 0),
            (16, 128, 8, 3, 1, 1),
        ],
    ),
    (
        {"heads": [1, 16]},
        [(64, 16), (128, 16)],
        [
            (16, 32, 4, 3, 2, 0),
            (16, 32, 4, 3, 2, 1),
            (16, 32, 4, 5, 2, 1),
            (16, 128, 8, 3, 1, 0),
            (16, 128, 8, 3, 1, 1),
            (16, 64, 8, 5, 1, 1),
        ],
    ),
    (
        {"heads": [17, 32], "tokens": [1, 16]},
        [(1, 32), (8, 32)],
        [
            (32, 64, 8, 3, 1, 1),
            (32, 64, 8, 5, 1, 1),
            (16, 64, 8, 5, 1, 1),
            (16, 64, 8, 3, 1, 0),
            (16, 32, 4, 3, 2, 0),
            (16, 32, 4, 3, 2, 1),
        ],
    ),
    (
        {"heads": [17, 32]},
        [(64, 32), (128, 32)],
        [
            (32, 64, 8, 3, 1, 0),
            (32, 64, 8, 3, 1, 1),
            (32, 64, 8, 5, 1, 1),
            (64, 64, 8, 3, 1, 1),
            (64, 64, 8, 5, 1, 1),
        ],
    ),
    (
        {"tokens": [1, 16]},
        [(1, 64), (8, 64)],
        [
            (64, 64, 8, 3, 1, 1),
            (64, 64, 8, 2, 1, 1),
            (32, 64, 8, 3, 1, 1),
            (16, 32, 4, 3, 2, 1),
            (16, 64, 8, 5, 1, 0),
            (16, 64, 8, 5, 1, 1),
            (16, 64, 8, 3, 1, 1),
            (16, 128, 8, 3, 1, 1),
        ],
    ),
    (
        {},
        [(64, 64), (256, 64)],
        [
            (64, 64, 8, 3, 1, 1),
            (64, 64, 8, 5, 1, 1),
            (64, 64, 8, 2, 1, 1),
            (64, 32, 8, 5, 1, 1),
            (64, 32, 8, 3, 1, 1),
        ],
    ),
]
GEMM_ROWS = [
    (
        {"tokens": [1, 16]},
        [
            (1, 1536, 4096),
            (1, 32768, 1024),
            (1, 4096, 8192),
            (1, 4096, 2048),
            (8, 1536, 4096),
            (8, 32768, 1024),
            (8, 4096, 8192),
            (8, 4096, 2048),
        ],
        [
            (8, 64, 4, 4, 2),
            (8, 64, 4, 4, 4),
            (8, 64, 4, 6, 2),
            (8, 128, 4, 4, 2),
            (8, 128, 4, 4, 4),
            (8, 128, 4, 6, 2),
            (16, 64, 4, 4, 2),
            (16, 64, 4, 4, 4),
            (16, 64, 4, 6, 2),
            (16, 64, 4, 6, 4),
            (16, 128, 4, 4, 2),
            (16, 128, 4, 4, 4),
            (16, 128, 4, 6, 2),
            (16, 128, 4, 6, 4),
        ],
    ),
    (
        {"tokens": [17, 64]},
        [(32, 1536, 4096), (32, 32768, 1024), (32, 4096, 8192), (32, 4096, 2048)],
        [
            (32, 64, 4, 5, 2),
            (64, 64, 4, 5, 2),
            (32, 128, 4, 4, 2),
            (64, 128, 8, 4, 1),
        ],
    ),
    (
        {"tokens": [65, 256]},
        [(128, 1536, 4096), (128, 32768, 1024), (128, 4096, 8192), (128, 4096, 2048)],
        [
            (64, 128, 4, 4, 1),
            (128, 128, 8, 4, 1),
            (128, 64, 4, 4, 2),
            (64, 64, 4, 5, 2),
        ],
    ),
    (
        {},
        [(1024, 32768, 1024), (1024, 4096, 8192), (4096, 32768, 1024), (4096, 4096, 8192)],
        [
            (128, 128, 8, 4, 1),
            (128, 128, 8, 3, 1),
            (128, 128, 4, 4, 1),
            (64, 128, 4, 4, 1),
            (256, 64, 8, 4, 1),
            (256, 128, 8, 3, 1),
        ],
    ),
]
FIELDS = {
    "mla_decode": ("block_h", "block_n", "num_warps", "num_stages", "waves", "bf16"),
    "fp8_gemm": ("block_m", "block_n", "num_warps", "num_stages", "waves"),
}
ROWS: dict[str, list[Any]] = {"mla_decode": DECODE_ROWS, "fp8_gemm": GEMM_ROWS}


def params_of(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if name == "mla_decode":
        return {"tokens": shape[0], "heads": shape[1], "window": 128, "topk": 512, "dense": True}
    return {"tokens": shape[0], "n": shape[1], "k": shape[2]}


def as_config(name: str, candidate: tuple[int, ...]) -> dict[str, Any]:
    fields = dict(zip(FIELDS[name], candidate, strict=True))
    return {k: bool(v) if k == "bf16" else v for k, v in fields.items()}


def planned(name: str, params: dict[str, Any], candidate: tuple[int, ...]) -> Any:
    """A plan that uses `candidate` whatever the table says."""
    api = importlib.import_module(f"dsv4_kernels.{name}.api")
    configs = importlib.import_module(f"dsv4_kernels.{name}.configs")
    kind = configs.DecodeConfig if name == "mla_decode" else configs.GemmConfig
    config = kind(**as_config(name, candidate))
    api.select = lambda *_: config
    return operation(name).plan(params, torch.device("cuda"), None)


def prebuild(name: str, jobs: int) -> None:
    """Compile all candidates in parallel processes first; Triton's cache on disk keeps them."""
    command = [sys.executable, "-m", "benchmarks.kernels.tune", name, "--part"]
    children = [subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL) for i in range(jobs)]
    for child in children:
        child.wait()


def work(name: str) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [
        (index, shape, candidate)
        for index, (_, shapes, candidates) in enumerate(ROWS[name])
        for candidate in candidates
        for shape in shapes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(ROWS))
    parser.add_argument("--write", action="store_true", help="write the table of this architecture")
    parser.add_argument("--part", help="i/n: only compile this share (used by the tuner itself)")
    options = parser.parse_args()
    name, device = options.op, torch.device("cuda")
    op = operation(name)
    if options.part:
        index, count = map(int, options.part.split("/"))
        for _, shape, candidate in work(name)[index::count]:
            params = params_of(name, shape)
            try:
                planned(name, params, candidate).run(**op.make_inputs(params, device, 1))
            except Exception as error:
                print(candidate, error)
        return
    prebuild(name, 12)
    timer = Timer(256 << 20)
    times: dict[tuple[int, tuple[int, ...]], dict[str, float]] = {}
    for index, (when, shapes, candidates) in enumerate(ROWS[name]):
        for shape in shapes:
            params = params_of(name, shape)
            inputs = op.make_inputs(params, device, 1)
            calls = {}
            for candidate in candidates:
                try:
                    plan = planned(name, params, candidate)
                    plan.run(**inputs)
                    torch.cuda.synchronize()
                except Exception as error:
                    print(shape, candidate, str(error).splitlines()[0][:120])
                    continue
                calls[str(candidate)] = lambda plan=plan, inputs=inputs, candidate=candidate: run_with(
                    name, plan, candidate, inputs
                )
            measured = timer.time(calls, 12)
            for candidate in candidates:
                if str(candidate) in measured:
                    times.setdefault((index, candidate), {})[str(shape)] = measured[str(candidate)].cold
            best = sorted(measured.items(), key=lambda item: item[1].cold)
            print(when, shape, "  ".join(f"{k}:{v.cold:.1f}" for k, v in best), flush=True)
    rows = []
    for index, (when, shapes, candidates) in enumerate(ROWS[name]):
        complete = [c for c in candidates if len(times.get((index, c), {})) == len(shapes)]
        score = {c: math.exp(sum(map(math.log, times[index, c].values())) / len(shapes)) for c in complete}
        winner = min(score, key=lambda c: score[c])
        rows.append({"when": when, "config": as_config(name, winner)})
        print("winner", when, winner, f"{score[winner]:.1f}", flush=True)
    if options.write:
        arch = detect("cuda")
        provenance = {
            "gpu": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "date": datetime.date.today().isoformat(),
            "how": "measured: benchmarks/kernels/tune.py, geometric mean over the shapes of each row, cold L2",
        }
        path = Path(importlib.import_module(f"dsv4_kernels.{name}").__path__[0]) / "tuning" / f"{arch}.json"
        path.write_text(json.dumps({"provenance": provenance, "kernels": {name: rows}}, indent=2) + "\n")


def run_with(name: str, plan: Any, candidate: tuple[int, ...], inputs: dict[str, Any]) -> Any:
    api = importlib.import_module(f"dsv4_kernels.{name}.api")
    configs = importlib.import_module(f"dsv4_kernels.{name}.configs")
    kind = configs.DecodeConfig if name == "mla_decode" else configs.GemmConfig
    config = kind(**as_config(name, candidate))
    api.select = lambda *_: config
    return plan.run(**inputs)


if __name__ == "__main__":
    main()
