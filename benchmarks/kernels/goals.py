"""Report which goals of the second half of the registry a run of the benchmark reaches.

`python -m benchmarks.kernels.goals FILE ...`; needs no GPU. The exit status is 1 if a goal is missed or has no figure.
All times are cold and include every launch; each contains that of a graph with one trivial kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels import table

Run = tuple[dict[str, Any], list[dict[str, Any]]]
Judge = Callable[[Run, dict[str, Any]], tuple[float, str] | None]


@dataclass(frozen=True)
class Goal:
    """Limit of an operation's cases: at most `limit`, or at least with `least`.

    `judge(run, row)` returns the measured number and its text, or None if a figure is missing.
    """

    name: str
    op: str
    cases: tuple[str, ...]
    limit: float
    judge: Judge
    least: bool = False


def cold(row: dict[str, Any], provider: str = "dsv4") -> float | None:
    return row["providers"].get(provider, {}).get("cold_us")  # type: ignore[no-any-return]


def micros(run: Run, row: dict[str, Any]) -> tuple[float, str] | None:
    ours = cold(row)
    return None if ours is None else (ours, f"{ours:.1f} µs")


def bandwidth(run: Run, row: dict[str, Any]) -> tuple[float, str] | None:
    ours = cold(row)
    if ours is None:
        return None
    share = row["bytes"] / ours / 1e3 / run[0]["copy_gbs"]
    return share, f"{share:.0%} of copy bandwidth ({ours:.1f} µs)"


def against(peer: str) -> Judge:
    def judge(run: Run, row: dict[str, Any]) -> tuple[float, str] | None:
        ours, theirs = cold(row), cold(row, peer)
        if ours is None or theirs is None:
            return None
        return theirs / ours, f"{theirs / ours:.2f} of {peer}'s speed ({ours:.1f} against {theirs:.1f} µs)"

    return judge


def front(run: Run, row: dict[str, Any]) -> tuple[float, str] | None:
    """Estimate the time of both launches in one graph from two graphs; both contain the trivial graph's time."""
    norm = next((cold(other) for other in run[1] if (other["op"], other["case"]) == ("front_norm", "t1")), None)
    insert = cold(row)
    if norm is None or insert is None:
        return None
    both = norm + insert - run[0]["empty_graph_us"]
    return both, f"{both:.1f} µs with front_norm's {norm:.1f}, the trivial graph counted once"


ONE_TOKEN = ("r4-t1", "r128-t1")
GOALS = (
    Goal("seam, T = 1: ≤ 12 µs", "mhc_post_pre", ("flash-t1",), 12, micros),
    Goal("seam, T = 4096: ≥ 70 % of copy", "mhc_post_pre", ("flash-t4096",), 0.7, bandwidth, least=True),
    Goal("paged logits: ≥ 0.8 of DeepGEMM", "indexer_paged_logits", (), 0.8, against("DeepGEMM"), least=True),
    Goal("top-k, R = 1, N = 262144: ≤ 30 µs", "topk", ("r1-n262144-k512", "r1-n262144-k1024"), 30, micros),
    Goal("compressor, T = 1: ≤ 7 µs", "compressor_save", ONE_TOKEN, 7, micros),
    Goal("compressor, T = 1: ≤ 7 µs", "compressor_store", ONE_TOKEN, 7, micros),
    Goal("compressor, T = 1: ≤ 7 µs", "compressor_store_indexer", ("r4-t1",), 7, micros),
    Goal("prefill MLA: ≥ 0.5 of FlashMLA", "mla_prefill", (), 0.5, against("FlashMLA"), least=True),
    Goal("front, T = 1: ≤ 6 µs", "front_norm", ("t1",), 6, micros),
    Goal("front, T = 1: ≤ 6 µs", "front_insert", ("t1-h64",), 6, micros),
    Goal("front, T = 1, both: ≤ 6 µs", "front_insert", ("t1-h64",), 6, front),
)


def verdicts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield a verdict ("pass", "miss" or "no figure") and its text for each case of each goal of a run."""
    for goal in GOALS:
        found = {row["case"]: row for row in run[1] if row["op"] == goal.op}
        for name in (goal.cases or tuple(found)) if found else ():
            measured = goal.judge(run, found[name]) if name in found else None
            what = f"{goal.name}: {goal.op} {name}"
            if measured is None:
                notes = found.get(name, {}).get("providers", {})
                why = "; ".join(f"{who}: {facts['note']}" for who, facts in notes.items() if facts["note"])
                yield "no figure", f"{what} {why}".rstrip()
                continue
            value, text = measured
            yield "pass" if (value >= goal.limit if goal.least else value <= goal.limit) else "miss", f"{what}: {text}"


def report(runs: list[Run]) -> str:
    lines = []
    for run in runs:
        lines.append(f"{run[0]['gpu']}, a graph with one trivial kernel {run[0]['empty_graph_us']:.1f} µs")
        lines += [f"{verdict:<10}{text}" for verdict, text in verdicts(run)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    runs = [table.read(path) for path in parser.parse_args().files]
    print(report(runs))
    return 0 if all(verdict == "pass" for run in runs for verdict, _ in verdicts(run)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
