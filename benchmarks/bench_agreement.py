"""Agreement of `dsv4 bench` with `vllm bench serve` on the same nano engine: `python benchmarks/bench_agreement.py`.

Both are run in turn, N times each: `dsv4 bench --quick` as users do, and vLLM's benchmark with its own flags, warm-up
and the tokenizer of the checkpoint, on the prompts of the run before, because the speed of nano depends on the tokens
(its engine has no prefix cache). Prints each run, the ratio of the means, its 95 % interval, and the spread of both.

Every step of the engine takes `--pace` seconds, longer than its computation: on a small machine the engine, the load
generator and other programs share the processors, and differences of 2 % would need hundreds of runs. `--file` keeps
the runs, so that several calls, each with an engine of its own, are one measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsv4_operator.verify import speed
from dsv4_testkit.faults.system import HOOK
from dsv4_testkit.harness import Deployment

WRAPPER = """\
#!{python}
import os, shutil, sys
for word in sys.argv:
    if word.startswith("--dataset-path="):
        shutil.copy(word.partition("=")[2], {copy!r})
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
"""A Python for `dsv4 bench` that keeps the prompts."""
OUTPUT, CLIENTS, REQUESTS = 32, 4, 8
"""Those of the profile `chat` with `--quick`."""
FIGURES = {
    "outputTokensPerSecond": "output_throughput",
    "tpotSeconds.p50": "p50_tpot_ms",
    "ttftSeconds.p50": "p50_ttft_ms",
}
_SECONDS = 300.0
Runs = dict[str, dict[str, list[float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=6, help="of each (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=0.15, help="seconds of a step, at least (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="JSON file with earlier runs, to which these are added")
    options = parser.parse_args()
    runs: Runs = {side: {name: [] for name in FIGURES} for side in ("dsv4", "vllm")}
    if options.file is not None and options.file.exists():
        runs = json.loads(options.file.read_text())
    for pair in pairs(options.runs, options.pace):
        print(pair, flush=True)
        for side, found in pair.items():
            for name in FIGURES:
                runs[side][name].append(found[name])
        if options.file is not None:
            options.file.write_text(json.dumps(runs))
    print(f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}")
    ratios = {name: compared(name, runs) for name in FIGURES}
    # The time to the first token is mostly computed in one step, which is not paced.
    return int(max(abs(ratios[name] - 1) for name in ("outputTokensPerSecond", "tpotSeconds.p50")) > 0.02)


def pairs(number: int, pace: float) -> Iterator[dict[str, dict[str, float]]]:
    """Run both in turn on an engine of their own; yield the figures of each pair."""
    deployment = Deployment("agree", nodes=1)
    hook = deployment.root / "order"
    deployment.environment[HOOK] = str(hook)
    try:
        deployment.up()
        if pace:
            order = hook.with_suffix(".new")
            order.write_text(json.dumps({"kind": "pace", "rank": 0, "seconds": pace}))
            order.replace(hook)
        (tokenizer,) = (deployment.root / "weights").glob("nano-*")
        deployment.complete(tokens=64)
        for _ in range(number):
            with tempfile.TemporaryDirectory() as folder:
                yield {"dsv4": dsv4(deployment, Path(folder)), "vllm": vllm(deployment, tokenizer, Path(folder))}
    finally:
        deployment.destroy()


def compared(name: str, runs: Runs) -> float:
    """Print the comparison of a figure; return the ratio dsv4 / vLLM of the means."""
    ours, theirs = runs["dsv4"][name], runs["vllm"][name]
    ratio = statistics.fmean(ours) / statistics.fmean(theirs)
    print(
        f"{name}: ratio {ratio:.4f} of {len(ours)} pairs, 95 % {speed.ratio_interval(theirs, ours, speed.CONFIDENCE)}"
    )
    if len(ours) > 1:
        spreads = [100 * statistics.stdev(each) / statistics.fmean(each) for each in (ours, theirs)]
        print(f"  spread of dsv4 {spreads[0]:.1f} %, of vllm {spreads[1]:.1f} %")
    return ratio


def dsv4(deployment: Deployment, folder: Path) -> dict[str, float]:
    """Run `dsv4 bench`; its prompts are in `prompts.json` of `folder` then."""
    python = folder / "python"
    python.write_text(WRAPPER.format(python=sys.executable, copy=str(folder / "prompts.json")))
    python.chmod(0o755)
    words = ["bench", deployment.name, "--quick", "--concurrency", str(CLIENTS)]
    done = deployment.run(*words, "--repeat=1", f"--python={python}", "-o", "json", timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (row,) = json.loads(done.stdout)["runs"]
    return {"inputTokens": row["measuredInputTokens"], **{name: row["samples"][name][0] for name in FIGURES}}


def vllm(deployment: Deployment, tokenizer: Path, folder: Path) -> dict[str, float]:
    """Run vLLM's benchmark on the same prompts."""
    words = [
        "--backend=openai",
        f"--base-url=http://127.0.0.1:{deployment.api}",
        "--endpoint=/v1/completions",
        f"--model={deployment.name}",
        f"--tokenizer={tokenizer}",
        "--dataset-name=sharegpt",
        f"--dataset-path={folder / 'prompts.json'}",
        f"--sharegpt-output-len={OUTPUT}",
        f"--num-prompts={REQUESTS}",
        f"--max-concurrency={CLIENTS}",
        f"--num-warmups={CLIENTS}",
        "--disable-shuffle",
        "--ignore-eos",
        "--temperature=0",
        "--percentile-metrics=ttft,tpot",
        "--metric-percentiles=50",
        "--save-result",
        f"--result-dir={folder}",
        "--result-filename=result.json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", speed.PROGRAM, *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    file = folder / "result.json"
    if done.returncode or not file.exists():
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(file.read_text())
    figures = {name: found[theirs] / (1000 if theirs.endswith("_ms") else 1) for name, theirs in FIGURES.items()}
    return {"inputTokens": found["total_input_tokens"] / REQUESTS, **figures}


if __name__ == "__main__":
    sys.exit(main())
