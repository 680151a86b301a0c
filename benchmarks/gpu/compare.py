"""Compare the results of `benchmarks.gpu.engine` for two choices of kernels: tokens, start, steps.

python -m benchmarks.gpu.compare stock.json bundled.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TIE_NATS = 0.1


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Return the number of prompts with different tokens, how many are not ties, and their widest margin in nats.

    Only prompts with responses in both are compared, up to the first different token. A prompt is a tie if the two best
    log-probabilities of `first` were nearly equal there.
    """
    other = wrong = 0
    widest = 0.0
    for a, b in zip(first, second, strict=False):
        if a["tokens"] != b["tokens"]:
            other += 1
            at = next(i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y)
            margin = a["best"][at][0] - a["best"][at][1]
            widest = max(widest, margin)
            wrong += margin >= TIE_NATS
    return other, wrong, widest


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args()
    first, second = (json.loads(path.read_text()) for path in (options.first, options.second))
    for key in ("alone", "batched"):
        if key in first and key in second:
            other, wrong, widest = differences(first[key], second[key])
            both = min(len(first[key]), len(second[key]))
            print(f"{key}: {both} prompts, {other} with different tokens, {wrong} not ties, widest {widest:.3f} nats")
    print(f"ready: {first['ready_s']:.1f} s, {second['ready_s']:.1f} s; ", end="")
    print(f"first token: {first['first_token_s']:.1f} s, {second['first_token_s']:.1f} s; ", end="")
    print(f"compilations after ready: {first['compilations']}, {second['compilations']}")
    for kind in ("decode", "prefill"):
        for size, a in first.get(kind, {}).items():
            b = second.get(kind, {}).get(size)
            if b is None:
                continue
            for measure in ("gpu_ms", "busy_ms", "kernels_ms", "clock_ms"):
                if measure in a and measure in b:
                    ratio = a[measure] / b[measure]
                    print(f"{kind} {size} {measure}: {a[measure]:.3f} {b[measure]:.3f}, ratio {ratio:.2f}")
            if "launches" in a:
                print(f"{kind} {size} launches: {a['launches']:.0f} {b['launches']:.0f}")


if __name__ == "__main__":
    main()
