"""Measure the time that the host takes to run each plan of an engine with Flash's layers, without a GPU.

    python benchmarks/kernels_host.py --arch sm_121

A run checks its tensors, picks its configuration and launches; the launches end where Triton would hand them to the
driver, and the tensors have no memory. Outside of CUDA graphs, as in a prefill, this is what a short step waits for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.moe.api import MoePlan
from dsv4_kernels.plan import Plan
from dsv4_kernels.precompile import launch_nothing, make_plan
from dsv4_testkit.plans import FLASH

META = torch.device("meta")
REPEATS, ROUNDS = 50, 21


def main() -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=Arch, default=Arch.SM_121)
    arch = parser.parse_args().arch
    launch_nothing(TargetGPU(arch, arch.spec.multiprocessors))
    launches = count_launches()
    print("| plan | sizes | host µs | launches |\n|---|---|---:|---:|")
    for described in FLASH:
        plan = make_plan(described, META)
        run = last_run(plan)
        run()
        before = len(launches)
        run()
        count = len(launches) - before
        sizes = ", ".join(f"{name} {value}" for name, value in plan.shape.items())
        print(f"| {type(plan).__name__} | {sizes} | {microseconds(run):.1f} | {count} |", flush=True)


def count_launches() -> list[None]:
    """Return a list that grows by one with each launch."""
    launches: list[None] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(None)
        return original(self, *args, **kwargs)

    JITFunction.run = run
    return launches


def last_run(plan: Plan) -> Callable[[], Any]:
    """Return the last run of the plan's warm-up, the one with most tokens, to be repeated."""
    if isinstance(plan, MoePlan):
        return experts(plan)  # its warm-up launches without a run
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
    return lambda: plan.run(**inputs)


def microseconds(run: Callable[[], Any]) -> float:
    """Return the microseconds of a run in the fastest round: others were interrupted."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(REPEATS):
            run()
        rounds.append((time.perf_counter() - begun) / REPEATS * 1e6)
    return min(rounds)


if __name__ == "__main__":
    main()
