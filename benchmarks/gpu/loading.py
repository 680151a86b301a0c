"""Load one checkpoint in each of vLLM's ways, each in a separate process, and print seconds and GB/s.

    python -m benchmarks.gpu.loading MODEL
    python -m benchmarks.gpu.loading MODEL --ways safetensors:prefetch instanttensor --turns 3

A way is a load format, optionally followed by a colon and a strategy for safetensors. Only the worker's part of a start
runs: create the model, load its weights, prepare them. `load` is `load_weights` alone, from the first requested byte
until the model has all of them; `model` is all three parts. Each way runs with its files out of the page cache (`cold`;
without effect on a tmpfs, which keeps its files in memory) and with them in it (`warm`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("safetensors", "safetensors:prefetch", "safetensors:eager", "instanttensor")
_SECONDS = 900.0
"""Bound of one load."""


def evict(folder: Path) -> None:
    """Drop the pages of the files in `folder`; pages mapped by a process remain."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def fill(folder: Path) -> None:
    """Read the files in `folder` once, so that they are in the page cache as far as its size permits."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def load(model: str, way: str) -> dict[str, float]:
    """Return the seconds of one load in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import DefaultModelLoader
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    form, _, strategy = way.partition(":")
    config = EngineArgs(
        model=model,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        block_size=256,
        kv_cache_dtype="auto",
        enforce_eager=True,
        # vLLM requires this share of free memory before the load; the weights may use more.
        gpu_memory_utilization=0.3,
        load_format=form,
        safetensors_load_strategy=strategy or None,
    ).create_engine_config()
    took: dict[str, float] = {}
    _timed(DefaultModelLoader, "load_weights", took, "load")
    _timed(DefaultModelLoader, "load_model", took, "model")
    UniProcExecutor(config)
    return took


def _timed(kind: type, method: str, took: dict[str, float], name: str) -> None:
    """Add the seconds of each call of `method` to `took[name]`."""
    original = getattr(kind, method)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = original(self, *args, **kwargs)
        _finish()
        took[name] = took.get(name, 0.0) + time.perf_counter() - begun
        return result

    setattr(kind, method, timed)


def _finish() -> None:
    """Wait for pending copies to the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(model: str, way: str) -> dict[str, Any]:
    """Return the result of one load in a separate process, or its error."""
    command = [sys.executable, "-m", "benchmarks.gpu.loading", model, "--one", way]
    env = {**os.environ, "DSV4_KERNELS": "off"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {_SECONDS:.0f} s"}
    said = [line for line in done.stdout.splitlines() if line.startswith('{"load"')]
    if done.returncode or not said:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line] or [""]
        return {"error": f"ended with {done.returncode}: {lines[-1].strip()[:300]}"}
    result: dict[str, Any] = json.loads(said[-1])
    return result


def main() -> None:
    """Print a table, or with `--one` the seconds of one load as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a directory with the checkpoint")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), metavar="FORMAT[:STRATEGY]")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--one", metavar="FORMAT[:STRATEGY]", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = Path(options.model)
    if options.one:
        print(json.dumps(load(options.model, options.one)), flush=True)
        os._exit(0)  # The worker's threads and process groups are no longer needed.
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not total:
        parser.error(f"{folder} has no *.safetensors; name the directory of a checkpoint")
    print(f"{folder}: {total / 1e9:.2f} GB\n{'way':24} cache    load s   GB/s   model s", flush=True)
    found = []
    for way in options.ways:
        for cache, prepare in (("cold", evict), ("warm", fill)):
            runs = []
            for _ in range(options.turns):
                prepare(folder)
                runs.append(measured(options.model, way))
            errors = [run["error"] for run in runs if "error" in run]
            found.append({"way": way, "cache": cache, "bytes": total, "runs": runs})
            if errors:
                print(f"{way:24} {cache}   {errors[0]}", flush=True)
                continue
            seconds, whole = (statistics.median(run[name] for run in runs) for name in ("load", "model"))
            print(f"{way:24} {cache}   {seconds:8.2f} {total / 1e9 / seconds:6.2f}   {whole:7.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
