"""The offline tuner: time candidate configurations on the GPU at hand and write the best into the operation's table.

`python -m benchmarks.kernels.tune mla_decode|fp8_gemm [--write]`; for mhc_post_pre, moe_w4a16 and mla_merge_o8 it only
prints, their tables being made by hand. Nothing of this runs while serving.
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
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.kernels.timing import Timer

from dsv4_kernels.arch import detect
from dsv4_kernels.registry import operation

# Per operation: rows of (range, shapes that stand for it, candidates). Fields in the order of the configuration's
# dataclass.
# (block_h, block_n, num_warps, num_stages, waves)
_DECODE_16 = [
    *((16, 32, 4, 1, waves) for waves in (1, 2, 3)),
    (16, 32, 4, 3, 2),
    *((16, 64, 4, 1, waves) for waves in (1, 2, 3)),
    *((16, 64, 8, 1, waves) for waves in (1, 2)),
    (16, 128, 8, 1, 1),
]
_DECODE_32 = [
    *((32, 64, warps, 1, waves) for warps in (4, 8) for waves in (1, 2)),
    (32, 128, 8, 1, 1),
]
_DECODE_64 = [*((64, 64, 8, stages, 1) for stages in (1, 2)), (64, 64, 8, 1, 2), (64, 128, 8, 1, 1)]
_DECODE_TOKENS = [([1, 1], 1), ([2, 2], 2), ([3, 5], 4), ([6, 11], 8), ([12, 23], 16), ([24, 47], 32), ([48, 95], 64)]
_DECODE_TOKENS.append(([96, 191], 128))
_DECODE_HEADS = [
    ({"heads": [1, 16]}, 16, _DECODE_16),
    ({"heads": [17, 32]}, 32, _DECODE_16 + _DECODE_32),
    ({}, 64, _DECODE_16 + _DECODE_32 + _DECODE_64),
]
DECODE_ROWS: list[Any] = []
for _when, _heads, _candidates in _DECODE_HEADS:
    DECODE_ROWS += [({**_when, "tokens": span}, [(t, _heads)], _candidates) for span, t in _DECODE_TOKENS]
    DECODE_ROWS.append((_when, [(256, _heads)], _candidates))
# (block_m, block_n, num_warps, num_stages, waves)
_GEMM_8 = [
    *((8, 64, 4, stages, waves) for stages in (4, 6, 8) for waves in (1, 2, 3, 4)),
    *((8, 32, 2, stages, waves) for stages in (6, 8) for waves in (1, 2, 4)),
    *((8, 128, 4, stages, waves) for stages in (4, 6) for waves in (1, 2)),
    *((16, 64, 4, 6, waves) for waves in (1, 2)),
]
# Ranges of n and k that take the shapes of the two models apart, at 1 to 8 tokens.
_GEMM_8_ROWS: list[tuple[dict[str, Any], list[tuple[int, int]]]] = [
    ({"n": [16384, None]}, [(32768, 1024), (65536, 1536)]),
    ({"n": [7168, None], "k": [1, 2048]}, [(8192, 1024)]),
    ({"n": [7168, None], "k": [1, 3072]}, [(7168, 3072)]),
    ({"n": [7168, None], "k": [1, 8192]}, [(8192, 4096)]),
    ({"n": [7168, None]}, [(7168, 16384)]),
    ({"n": [1, 2560]}, [(1536, 4096)]),
    ({"k": [1, 2048]}, [(4096, 2048)]),
    ({"k": [1, 4096]}, [(4096, 4096)]),
    ({}, [(4096, 8192)]),
]
_GEMM_16 = [(16, n, 4, stages, waves) for n in (64, 128) for stages in (4, 6) for waves in (2, 4)]
_GEMM_64 = [(32, 64, 4, 5, 2), (64, 64, 4, 5, 2), (32, 128, 4, 4, 2), (64, 128, 8, 4, 1)]
_GEMM_256 = [(64, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 64, 4, 4, 2), (64, 64, 4, 5, 2)]
_GEMM_MANY = [(128, 128, 8, 4, 1), (64, 128, 4, 4, 1), (256, 64, 8, 4, 1), (256, 128, 8, 3, 1)]
GEMM_ROWS: list[Any] = [
    ({"tokens": [1, 8], **when}, [(t, *size) for size in sizes for t in (1, 8)], _GEMM_8)
    for when, sizes in _GEMM_8_ROWS
]
GEMM_ROWS += [
    ({"tokens": [9, 16], "n": [16384, None]}, [(16, 32768, 1024)], _GEMM_16),
    ({"tokens": [9, 16]}, [(16, 1536, 4096), (16, 4096, 8192), (16, 4096, 2048)], _GEMM_16),
    ({"tokens": [17, 64], "n": [16384, None]}, [(32, 32768, 1024)], _GEMM_64),
    ({"tokens": [17, 64]}, [(32, 1536, 4096), (32, 4096, 8192), (32, 4096, 2048)], _GEMM_64),
    ({"tokens": [65, 256], "n": [16384, None]}, [(128, 32768, 1024)], _GEMM_256),
    ({"tokens": [65, 256], "n": [1, 4096], "k": [1, 4096]}, [(128, 1536, 4096), (128, 4096, 2048)], _GEMM_256),
    ({"tokens": [65, 256]}, [(128, 4096, 8192), (128, 8192, 1024)], _GEMM_256),
    ({"n": [16384, None]}, [(1024, 32768, 1024), (4096, 32768, 1024)], _GEMM_MANY),
    ({"n": [4097, None], "k": [1, 2048]}, [(1024, 8192, 1024), (4096, 8192, 1024)], _GEMM_MANY),
    ({"n": [4097, None]}, [(1024, 7168, 16384), (4096, 7168, 3072), (4096, 7168, 16384)], _GEMM_MANY),
    ({}, [(1024, 4096, 8192), (4096, 4096, 8192)], _GEMM_MANY),
]
# (block_t, block_c, span, num_warps, num_stages, apart, apply_warps, coefficients)
_MHC = [
    (64, 32, 512, 8, 2, False, 8, 0),
    *((*tile, True, 8, 32) for tile in ((64, 32, 512, 8, 2), (64, 32, 512, 8, 3), (128, 32, 512, 16, 2))),
    *((128, 16, span, 8, 2, True, 8, 32) for span in (256, 512, 1024)),
    (128, 16, 512, 8, 3, True, 8, 32),
    *((64, 16, span, 4, 2, True, 8, 32) for span in (256, 512, 1024)),
    (64, 16, 512, 4, 3, True, 8, 32),
    (64, 16, 512, 4, 2, False, 8, 32),
    (32, 32, 512, 4, 2, True, 8, 32),
    *((64, 16, 512, 4, 2, True, warps, tokens) for warps, tokens in ((4, 32), (16, 32), (8, 16), (8, 64))),
    *((32, block, span, 4, stages, True, 8, 32) for block, span, stages in ((32, 256, 2), (32, 1024, 2), (32, 512, 3))),
    *((32, 64, 512, warps, 2, True, 8, 32) for warps in (4, 8)),
    *((32, 32, 512, 4, 2, True, warps, tokens) for warps, tokens in ((4, 32), (8, 8), (8, 16))),
    (16, 64, 512, 4, 2, True, 8, 32),
]
_MHC_ONE = (16, 32, 32, 4, 2, False, 8, 0)
_MHC_FEW = [(16, 32, 512, 4, 2, False, 8, 0), (16, 32, 512, 4, 2, False, 8, 32)]
MHC_ROWS: list[Any] = [
    ({"tokens": [t, t], "hidden": [h, h]}, [(t, h)], _MHC + _MHC_FEW * (t < 1024))
    for h in (4096, 7168)
    for t in (256, 1024, 2048, 4096, 8192)
]
# One token and few: nothing to choose from yet, but a time to compare with.
MHC_ROWS += [({"tokens": [t, t], "hidden": [4096, 4096]}, [(t, 4096)], [_MHC_ONE]) for t in (1, 8)]
# (m, up_n, up_k, up_warps, up_stages, up_split, down_n, down_k, down_warps, down_stages, down_split): each product's
# tiles with the other's as they are.
_MOE_UP = [(32, 128, 4, 2), (32, 128, 4, 3), (32, 128, 4, 4), (32, 128, 8, 2), (64, 128, 8, 2), (64, 128, 4, 2)]
_MOE_DOWN = [(64, 128, 4, 2), (128, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (64, 256, 4, 2), (256, 128, 8, 2)]


def _moe(*sizes: int) -> list[tuple[int, ...]]:
    pairs = [(up, _MOE_DOWN[0]) for up in _MOE_UP] + [(_MOE_UP[0], down) for down in _MOE_DOWN[1:]]
    return [(m, *up, 1, *down, 1) for m in sizes for up, down in pairs]


# Tokens of Flash that are 12, 24 and 48 pairs to an expert.
MOE_ROWS: list[Any] = [
    ({"rows": [6, 16]}, [(512,)], [(16, 32, 256, 2, 3, 1, 32, 256, 2, 3, 1), *_moe(16, 32)]),
    ({"rows": [17, 32]}, [(1024,)], _moe(32, 64)),
    ({"rows": [33, 63]}, [(2048,)], _moe(64, 32, 128)),
]
# (block_parts, num_warps, rows); whole heads of one, two and several parts of attention.
_MERGE = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (4, 16), (8, 16)]
MERGE_ROWS: list[Any] = [
    ({"parts": [parts, parts]}, [(tokens, parts)], [(parts, *rest) for rest in _MERGE] + [(2, 2, 1)] * (parts == 1))
    for parts in (1, 2)
    for tokens in (8, 128, 512, 2048)
]
# The operation's folder and its configuration's class.
KINDS = {
    "mla_decode": ("mla_decode", "DecodeConfig"),
    "fp8_gemm": ("fp8_gemm", "GemmConfig"),
    "mhc_post_pre": ("mhc", "MixConfig"),
    "moe_w4a16": ("moe", "MoeConfig"),
    "mla_merge_o8": ("mla_merge", "MergeConfig"),
}
# Only operations whose table the tuner writes have names of fields.
FIELDS = {
    "mla_decode": ("block_h", "block_n", "num_warps", "num_stages", "waves"),
    "fp8_gemm": ("block_m", "block_n", "num_warps", "num_stages", "waves"),
}
ROWS: dict[str, list[Any]] = {
    "mla_decode": DECODE_ROWS,
    "fp8_gemm": GEMM_ROWS,
    "mhc_post_pre": MHC_ROWS,
    "moe_w4a16": MOE_ROWS,
    "mla_merge_o8": MERGE_ROWS,
}


def params_of(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if name == "mla_decode":
        return {"tokens": shape[0], "heads": shape[1], "window": 128, "topk": 512, "dense": True}
    if name == "mhc_post_pre":
        return {"tokens": shape[0], "hidden": shape[1], "norm": True}
    if name == "moe_w4a16":
        return {"tokens": shape[0], "hidden": 4096, "inter": 2048, "experts": 256, "topk": 6}
    if name == "mla_merge_o8":
        return {"tokens": shape[0], "parts": shape[1], "heads": 64}
    return {"tokens": shape[0], "n": shape[1], "k": shape[2]}


def as_config(name: str, candidate: tuple[int, ...]) -> dict[str, Any]:
    return dict(zip(FIELDS[name], candidate, strict=True))


def use(name: str, candidate: tuple[int, ...]) -> None:
    """Have the operation select `candidate` whatever its table says."""
    folder, kind = KINDS[name]
    api = importlib.import_module(f"dsv4_kernels.{folder}.api")
    config = getattr(importlib.import_module(f"dsv4_kernels.{folder}.configs"), kind)(*candidate)
    api.select = lambda *_: config
    if name == "fp8_gemm":
        api.hopper_from = lambda *_: None


def planned(name: str, params: dict[str, Any], candidate: tuple[int, ...]) -> Any:
    """A plan that uses `candidate`."""
    use(name, candidate)
    return operation(name).plan(params, torch.device("cuda"), None)


def prebuild(name: str, jobs: int) -> None:
    """Compile all candidates in parallel processes first; Triton's cache on disk keeps them."""
    command = [sys.executable, "-m", "benchmarks.kernels.tune", name, "--part"]
    children = [subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL) for i in range(jobs)]
    for child in children:
        child.wait()


def work(name: str) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Shapes with candidates, those together that may share a compiled kernel, so that one process compiles it."""
    groups: dict[Any, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for _, shapes, candidates in ROWS[name]:
        for candidate in candidates:
            for shape in shapes:
                groups.setdefault((shape[1:], candidate[:-1]), []).append((shape, candidate))
    return list(groups.values())


Times = dict[tuple[int, tuple[int, ...]], dict[str, float]]
"""Microseconds by the number of the row with its candidate, and by the shape."""


def compile_part(name: str, index: int, count: int) -> None:
    """Run every `count`th of the candidates once, from `index` on, so that it is compiled."""
    device = torch.device("cuda")
    for shape, candidate in itertools.chain.from_iterable(work(name)[index::count]):
        params = params_of(name, shape)
        try:
            planned(name, params, candidate).run(**operation(name).make_inputs(params, device, 1))
        except Exception as error:
            print(candidate, error)


def runnable(name: str, shape: tuple[int, ...], candidates: list[tuple[int, ...]]) -> dict[str, Any]:
    """A call of each candidate that runs with this shape, by the candidate's text."""
    params = params_of(name, shape)
    inputs = operation(name).make_inputs(params, torch.device("cuda"), 1)
    calls: dict[str, Any] = {}
    for candidate in candidates:
        try:
            plan = planned(name, params, candidate)
            plan.run(**inputs)
            torch.cuda.synchronize()
        except Exception as error:
            print(shape, candidate, str(error).splitlines()[0][:120])
            continue
        calls[str(candidate)] = functools.partial(run_with, name, plan, candidate, inputs)
    return calls


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
    """The best candidate of every row, by the geometric mean over its shapes, as rows of the table."""
    rows = []
    for index, (when, shapes, candidates) in enumerate(ROWS[name]):
        complete = [c for c in candidates if len(times.get((index, c), {})) == len(shapes)]
        score = {c: math.exp(sum(map(math.log, times[index, c].values())) / len(shapes)) for c in complete}
        # Within the noise the earlier candidate wins, so that the table has fewer different ones.
        best_score = min(score.values())
        winner = next(c for c in complete if score[c] <= 1.01 * best_score)
        rows.append({"when": when, "config": as_config(name, winner) if name in FIELDS else winner})
        print("winner", when, winner, f"{score[winner]:.1f}", flush=True)
    return rows


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Put `rows` into the table of this architecture."""
    provenance = {
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "how": "measured: benchmarks/kernels/tune.py, geometric mean over the shapes of each row, cold L2",
    }
    path = Path(importlib.import_module(f"dsv4_kernels.{name}").__path__[0]) / "tuning" / f"{detect('cuda')}.json"
    kernels = json.loads(path.read_text())["kernels"] if path.exists() else {}
    path.write_text(as_text({**kernels, name: rows}, provenance))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(ROWS))
    parser.add_argument("--write", action="store_true", help="write the table of this architecture")
    parser.add_argument("--part", help="i/n: only compile this share (used by the tuner itself)")
    options = parser.parse_args()
    if options.write and options.op not in FIELDS:
        parser.error(f"--write: {options.op} has no table that the tuner writes; change its configs.py by hand")
    if options.part:
        index, count = map(int, options.part.split("/"))
        compile_part(options.op, index, count)
        return
    # The merge's inputs take longer to draw, on the CPU, than its kernels take to compile.
    if options.op != "mla_merge_o8":
        prebuild(options.op, 12)
    rows = winners(options.op, timed(options.op))
    if options.write:
        write(options.op, rows)


def as_text(kernels: dict[str, list[dict[str, Any]]], provenance: dict[str, str]) -> str:
    """The table as JSON with one row per line, so that a change of one row is one line."""
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
