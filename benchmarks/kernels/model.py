"""Model of decode tokens/s for DeepSeek-V4-Flash, batch 1, without speculation; no part of it was measured end to end.

time per token = bytes per rank / (reached bandwidth · kernel efficiency) + all-reduces · latency + launches · gap

`python -m benchmarks.kernels.model` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes moved by one token of Flash, from the checkpoint's shapes: weights divided by tensor parallelism, weights that
# every rank reads completely (compressor, indexer, hyper-connections, gates), and cache rows at 8192 tokens of context.
SHARDED, REPLICATED, CACHE = 9.92e9, 1.29e9, 10.2e6
ALL_REDUCES = 86
LAYERS = 43


@dataclass(frozen=True)
class Machine:
    """Assumed figures of a machine.

    `bandwidth` in GB/s is reached by copies, as published for the part; `reduce_us` is one small all-reduce; `gap_us`
    is the time between launches.
    """

    name: str
    ranks: int
    bandwidth: float
    reduce_us: float
    gap_us: float


MACHINES = (
    Machine("2 × RTX PRO 6000", 2, 1600, 7, 1.0),
    Machine("2 × DGX Spark", 2, 241, 30, 1.5),
    Machine("8 × DGX Spark", 8, 241, 40, 1.5),
)


def tokens_per_second(machine: Machine, efficiency: float, launches_per_layer: int) -> tuple[float, float, float]:
    """Return tokens/s, GB per rank and milliseconds per token."""
    size = SHARDED / machine.ranks + REPLICATED + CACHE
    seconds = size / (machine.bandwidth * 1e9 * efficiency)
    seconds += ALL_REDUCES * machine.reduce_us * 1e-6 + LAYERS * launches_per_layer * machine.gap_us * 1e-6
    return 1 / seconds, size / 1e9, seconds * 1e3


# Fraction of the copy bandwidth, from the H200 runs: products of 34 MB at T = 1, less the trivial graph's time.
EFFICIENCY = 0.85
LAUNCHES = 25


def page() -> str:
    lines = [
        "## Model of decode tokens/s",
        "",
        "**A model, not a measurement**: DeepSeek-V4-Flash, batch 1, 8192 tokens of context, no speculation. Bytes per "
        f"rank over the part's reached bandwidth times {EFFICIENCY:.0%} (what 34 MB products reach on the H200 at one "
        f"token, launch time taken off), plus {ALL_REDUCES} all-reduces, plus {LAUNCHES} launches per layer. "
        "Bandwidths and all-reduce times are assumptions from published figures of the parts; the last column shows "
        "what 60 % efficiency and 60 launches would give.",
        "",
        "| machine | GB per rank | GB/s | all-reduce µs | gap µs | ms per token | tokens/s "
        "| tokens/s at 60 %, 60 launches |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for machine in MACHINES:
        rate, size, millis = tokens_per_second(machine, EFFICIENCY, LAUNCHES)
        worse, _, _ = tokens_per_second(machine, 0.6, 60)
        lines.append(
            f"| {machine.name} | {size:.2f} | {machine.bandwidth:.0f} | {machine.reduce_us:.0f} | {machine.gap_us:.1f} "
            f"| {millis:.1f} | {rate:.0f} | {worse:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page())
