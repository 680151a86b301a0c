"""Measure the host's time for a run of each plan of an engine with Flash's layers, without a GPU.

    python benchmarks/kernels_host.py --arch sm_121

A run checks its tensors, selects its configuration and launches, here with and without Triton's own search for the
compiled kernel (`dsv4_kernels.plan`), in turns. Launches end at the interface of Triton to the driver, and the tensors
have no memory. Outside of CUDA graphs, as in a prefill, a short step waits for this time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.arch import Arch
from dsv4_kernels.indexer.api import LogitsPlan
from dsv4_kernels.indexer.reference import logits_inputs
from dsv4_kernels.moe.api import MoePlan
from dsv4_kernels.plan import Launcher, Plan
from dsv4_kernels.precompile import make_plan
from dsv4_testkit.launches import record_launches
from dsv4_testkit.plans import FLASH

META = torch.device("meta")
REPEATS, ROUNDS = 50, 21


def main() -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=Arch, default=Arch.SM_121)
    launches = record_launches(parser.parse_args().arch)
    print(
        "| plan | sizes | launches | Triton's search, host µs | without it | faster by |\n|---|---|---:|---:|---:|---:|"
    )
    for described in FLASH:
        plan = make_plan(described, META)
        run = last_run(plan)
        run()
        launches.clear()
        run()
        count = len(launches)
        sizes = ", ".join(f"{name} {value}" for name, value in plan.shape.items())
        searched, found = microseconds(run, launches)
        row = f"{count} | {searched:.1f} | {found:.1f} | {searched / found:.2f}"
        print(f"| {type(plan).__name__} | {sizes} | {row} |", flush=True)


def last_run(plan: Plan) -> Callable[[], Any]:
    """Return the last run of the plan's warm-up, which has the most tokens, as a repeatable call."""
    if isinstance(plan, MoePlan):
        return experts(plan)  # Its warm-up launches without a run.
    if isinstance(plan, LogitsPlan):
        inputs = logits_inputs({"rows": 2048, "keys": 2048, "heads": plan.heads}, META, 0)
        return lambda: plan.run(**inputs)
    kind = type(plan)
    original, calls = kind.run, []

    def recorded(self: Plan, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(self, *args, **kwargs)

    kind.run = recorded  # type: ignore[method-assign]
    try:
        plan.warmup()
    finally:
        kind.run = original  # type: ignore[method-assign]
    args, kwargs = calls[-1]
    return lambda: plan.run(*args, **kwargs)


def experts(plan: MoePlan) -> Callable[[], Any]:
    """Return a run of the experts with 2,048 tokens."""
    tokens, s = 2048, plan.shape

    def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    inputs = {
        "x": empty(tokens, s["hidden"], dtype=torch.bfloat16),
        "topk_ids": empty(tokens, s["topk"], dtype=torch.int32),
        "topk_weights": empty(tokens, s["topk"], dtype=torch.float32),
        "w13": empty(s["experts"], 2 * s["inter"], s["hidden"] // 2),
        "w13_scale": empty(s["experts"], 2 * s["inter"], s["hidden"] // 32),
        "w2": empty(s["experts"], s["hidden"], s["inter"] // 2),
        "w2_scale": empty(s["experts"], s["hidden"], s["inter"] // 32),
        "out": empty(tokens, s["hidden"], dtype=torch.bfloat16),
    }
    if plan.adds:
        inputs["addend"] = empty(tokens, s["hidden"], dtype=torch.bfloat16)
    return lambda: plan.run(**inputs)


def microseconds(run: Callable[[], Any], launches: list[Any]) -> tuple[float, float]:
    """Return the microseconds of a run with and without Triton's search, each of the fastest, least disturbed round."""
    key, rounds = Launcher._key, {True: [], False: []}
    for number in range(2 * ROUNDS):
        searched = number % 2 == 0
        Launcher._key = _no_key if searched else key
        begun = time.perf_counter()
        for _ in range(REPEATS):
            run()
        rounds[searched].append((time.perf_counter() - begun) / REPEATS * 1e6)
        launches.clear()
    Launcher._key = key
    return min(rounds[True]), min(rounds[False])


def _no_key(launcher: Launcher, values: tuple[Any, ...]) -> None:
    """Use Triton's search for every launch."""


if __name__ == "__main__":
    main()
