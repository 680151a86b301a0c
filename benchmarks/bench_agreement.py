"""Agreement of `dsv4 bench` with `vllm bench serve` on the same nano engine: `python benchmarks/bench_agreement.py`.

Both run in turn, N times each: `dsv4 bench` as users run it, and vLLM's benchmark with its own flags, warm-up and the
tokenizer of the checkpoint. The texts differ but have the same kind and length, because the speed of nano depends on
the tokens. The output is each run, the ratio of the means, its 95 % interval, and the spread of both.
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
from pathlib import Path

from dsv4_operator.verify import speed
from dsv4_testkit.harness import Deployment

PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
INPUT, OUTPUT, CLIENTS, REQUESTS = 256, 256, 4, 8
"""Values of the profile `chat` with 256 input tokens."""
FIGURES = {"outputTokensPerSecond": "output_throughput", "tpotSeconds.p50": "p50_tpot_ms"}
_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=6, help="runs of each benchmark (default: %(default)s)")
    options = parser.parse_args()
    deployment = Deployment("agree", nodes=1)
    ours: dict[str, list[float]] = {name: [] for name in FIGURES}
    theirs: dict[str, list[float]] = {name: [] for name in FIGURES}
    try:
        deployment.up()
        (tokenizer,) = (deployment.root / "weights").glob("nano-*")
        deployment.complete(tokens=64)
        # The first pair is a warm-up of the engine and does not count.
        for number in range(options.runs + 1):
            for side in (dsv4, vllm) if number % 2 == 0 else (vllm, dsv4):
                found = side(deployment, tokenizer, number)
                print(f"pair {number}, {side.__name__}: {found}", flush=True)
                for name in FIGURES if number else ():
                    (ours if side is dsv4 else theirs)[name].append(found[name])
    finally:
        deployment.destroy()
    print(f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}")
    worst = 0.0
    for name in FIGURES:
        ratio = statistics.fmean(ours[name]) / statistics.fmean(theirs[name])
        interval = speed.ratio_interval(theirs[name], ours[name], speed.CONFIDENCE)
        spreads = [100 * statistics.stdev(each[name]) / statistics.fmean(each[name]) for each in (ours, theirs)]
        worst = max(worst, abs(ratio - 1))
        print(f"{name}: ratio {ratio:.4f}, 95 % interval {interval}")
        print(f"  spread of dsv4 {spreads[0]:.1f} %, of vllm {spreads[1]:.1f} %")
    return int(worst > 0.02)


def dsv4(deployment: Deployment, tokenizer: Path, number: int) -> dict[str, float]:
    words = ["bench", deployment.name, "--profile", "chat", "--input", str(INPUT), "--concurrency", str(CLIENTS)]
    done = deployment.run(*words, "--repeat", "1", "--seed", str(number), "-o", "json", timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (row,) = json.loads(done.stdout)["runs"]
    return {"inputTokens": row["measuredInputTokens"], **{name: row["samples"][name][0] for name in FIGURES}}


def vllm(deployment: Deployment, tokenizer: Path, number: int) -> dict[str, float]:
    profile = next(each for each in speed.PROFILES if each.name == "chat")
    (case,) = speed.cases([profile], (CLIENTS,), (INPUT,))
    sample = speed.prompts(case, 1, 3.0, seed="sample", nonce=f"s{number}")[0]
    density = len(sample) / deployment.complete(sample, tokens=1)["usage"]["prompt_tokens"]
    texts = speed.prompts(case, REQUESTS, density, seed=f"vllm/{number}", nonce=f"v{number}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.json")
        data.write_text(json.dumps([{"conversations": [{"value": text}, {"value": ""}]} for text in texts]))
        words = [
            "--backend=openai",
            f"--base-url=http://127.0.0.1:{deployment.api}",
            "--endpoint=/v1/completions",
            f"--model={deployment.name}",
            f"--tokenizer={tokenizer}",
            "--dataset-name=sharegpt",
            f"--dataset-path={data}",
            f"--sharegpt-output-len={OUTPUT}",
            f"--num-prompts={REQUESTS}",
            f"--max-concurrency={CLIENTS}",
            f"--num-warmups={CLIENTS}",
            f"--seed={1000 + number}",
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
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        file = Path(folder, "result.json")
        if done.returncode or not file.exists():
            raise RuntimeError(done.stderr[-2000:])
        found = json.loads(file.read_text())
    figures = {name: found[theirs] / (1000 if theirs.endswith("_ms") else 1) for name, theirs in FIGURES.items()}
    return {"inputTokens": found["total_input_tokens"] / REQUESTS, **figures}


if __name__ == "__main__":
    sys.exit(main())
