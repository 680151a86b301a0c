"""Write docs/kernels/measured.md, its plots and docs/kernels/operations.md from the committed results and the registry.

`python -m benchmarks.kernels.page`; needs no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels import model, table
from benchmarks.kernels.plot import loglog

from dsv4_kernels.registry import operations

RESULTS = Path("benchmarks/kernels/results")
DOCS = Path("docs/kernels")


Run = tuple[dict[str, Any], list[dict[str, Any]]]
"""A machine and its cases."""


def rows_of(runs: list[Run], op: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(machine, row) for machine, rows in runs for row in rows if row["op"] == op]


def card(machine: dict[str, Any]) -> str:
    """Return the card's short name: H200 of NVIDIA H200, H100 of NVIDIA H100 80GB HBM3."""
    return str(machine["gpu"]).removeprefix("NVIDIA ").split(" 80GB")[0]


def by_card(runs: list[Run]) -> dict[str, list[Run]]:
    cards: dict[str, list[Run]] = {}
    for run in runs:
        cards.setdefault(card(run[0]), []).append(run)
    return cards


def sections(runs: list[Run], op: str) -> list[str]:
    """Return one table, titled with card and date, for each run that contains the operation."""
    parts = []
    for machine, rows in runs:
        if any(row["op"] == op for row in rows):
            parts += [f"{card(machine)}, {machine['date']}:", "", table_of((machine, rows), op)]
    return parts


def table_of(run: Run, op: str) -> str:
    """Return all cases of one operation: ours with spread, bandwidth, rate and error, then each peer and the ratio."""
    rows = rows_of([run], op)
    peers = sorted({name for _, row in rows for name in row["providers"]} - {"dsv4"})
    head = ["case", "µs cold ± IQR", "hot", "GB/s (of copy)", "TFLOP/s", "error (max; diff)"]
    lines = ["| " + " | ".join(head + peers) + " |", "|---|" + "---:|" * (len(head) + len(peers) - 1)]
    for machine, row in rows:
        ours = row["providers"]["dsv4"]
        if "cold_us" not in ours:
            lines.append(f"| {row['case']} | {ours['note']} |")
            continue
        rate = row["bytes"] / ours["cold_us"] / 1e3
        cells = [
            row["case"],
            f"{ours['cold_us']:.1f} ± {ours['iqr_us']:.1f}",
            f"{ours['hot_us']:.1f}",
            f"{rate:.0f} ({rate / machine['copy_gbs']:.0%})",
            f"{row['flops'] / ours['cold_us'] / 1e6:.1f}",
            f"{ours['max']:.1e}; {ours['diff']:.1e}",
        ]
        for peer in peers:
            facts = row["providers"].get(peer, {})
            if "cold_us" in facts:
                rough = f"; rough, {facts['max']:.1e}" if facts["note"].startswith("rough") else ""
                cells.append(f"{facts['cold_us']:.1f} (×{facts['cold_us'] / ours['cold_us']:.2f}){rough}")
            else:
                cells.append("wrong" if facts.get("note", "").startswith("wrong") else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


BATCHES = (
    *((f"decode-h{h}", "mla_decode", {"heads": h}, "tokens", f"sparse MLA decode, {h} heads, 128 + 512 entries")
      for h in (64, 32, 16)),
    ("gemm-wq_b", "fp8_gemm", {"n": 32768, "k": 1024}, "tokens", "FP8 product wq_b 1024 → 32768"),
    ("gemm-wo_b", "fp8_gemm", {"n": 4096, "k": 8192}, "tokens", "FP8 product wo_b 8192 → 4096"),
    ("mhc-seam", "mhc_post_pre", {"hidden": 4096}, "tokens", "hyper-connections between two sublayers, 4096 values"),
    ("compressor-r4", "compressor_store", {"ratio": 4}, "tokens", "compressor, head 512, ratio 4"),
    ("compressor-r128", "compressor_store", {"ratio": 128}, "tokens", "compressor, head 512, ratio 128"),
    ("topk-r1", "topk", {"rows": 1, "k": 512}, "width", "512 of the scores of one row"),
    ("router", "router", {"hidden": 4096, "experts": 256}, "tokens", "router, 256 experts, 4096 values"),
)  # fmt: skip
"""Plots of time over one parameter: name, operation, common parameters of the cases, the varied parameter, title."""


def batch_plots(runs: list[Run], name: str) -> list[tuple[str, str]]:
    """Return plots of time over tokens or scores for the card called `name`."""
    plots = []
    for key, op, common, over, title in BATCHES:
        series: dict[str, list[tuple[float, float]]] = {}
        for _, row in rows_of(runs, op):
            if row["params"].get("hashed") or any(row["params"][of] != value for of, value in common.items()):
                continue
            for provider, facts in row["providers"].items():
                if "cold_us" in facts:
                    series.setdefault(provider, []).append((row["params"][over], facts["cold_us"]))
        if len({x for line in series.values() for x, _ in line}) > 1:
            axis = "scores" if over == "width" else over
            plots.append((f"{key}-{slug(name)}", loglog(f"{title}, {name}", axis, "µs, cold L2", series)))
    return plots


def slug(name: str) -> str:
    return "-".join(name.lower().split())


def roofline(runs: list[Run], name: str) -> list[tuple[str, str]]:
    """Return a plot of TFLOP/s over FLOP per byte of every measured case with products on the card called `name`.

    The limits are copy bandwidth and bf16 rate of its first run. Empty if there is no such case.
    """
    machine, _ = runs[0]
    peak, bandwidth = machine["bf16_tflops"], machine["copy_gbs"]
    series: dict[str, list[tuple[float, float]]] = {}
    for _, rows in runs:
        for row in rows:
            ours = row["providers"].get("dsv4", {})
            if row["flops"] and "cold_us" in ours and not row["op"].startswith("mla_merge"):
                point = (row["flops"] / row["bytes"], row["flops"] / ours["cold_us"] / 1e6)
                series.setdefault(row["op"], []).append(point)
    series = {
        op: points for op, points in series.items() if op in ("mla_decode", "fp8_gemm", "wo_a_einsum", "moe_w4a16")
    }
    if not series:
        return []
    limit = "copy bandwidth and bf16 rate of the run"
    series[limit] = [(x, min(x * bandwidth / 1e3, peak)) for x in (1, 4, 16, 64, peak * 1e3 / bandwidth, 1024, 4096)]
    text = loglog(f"Roofline, {name}", "FLOP per byte", "TFLOP/s", series, base=4.0, lines=(limit,))
    return [(f"roofline-{slug(name)}", text)]


def operations_page() -> str:
    """Return the registry as a table."""
    lines = [
        "# Operations",
        "",
        "Written by `python -m benchmarks.kernels.page` from the registry. The contract of each is the docstring of "
        "its folder.",
        "",
        "| operation | what it does | contract | results compared | cases: interpreter / GPU / benchmark |",
        "|---|---|---|---|---|",
    ]
    for op in operations():
        counts = " / ".join(str(len(op.cases_with(tag))) for tag in ("cpu", "gpu", "bench"))
        link = f"[{op.folder}](../../kernels/dsv4_kernels/{op.folder}/__init__.py)"
        lines.append(f"| `{op.name}` | {op.summary} | {link} | {', '.join(op.outputs)} | {counts} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    runs = [table.read(path) for path in sorted(RESULTS.glob("*.csv"))]
    (DOCS / "plots").mkdir(parents=True, exist_ok=True)
    cards = by_card(runs).items()
    plots = [plot for name, own in cards for plot in (*batch_plots(own, name), *roofline(own, name))]
    for old in (DOCS / "plots").glob("*.svg"):
        old.unlink()
    for name, text in plots:
        (DOCS / "plots" / f"{name}.svg").write_text(text)
    parts = [
        "# Measured",
        "",
        "Written by `python -m benchmarks.kernels.page` from the files in benchmarks/kernels/results.",
        "",
    ]
    for path, (m, _) in zip(sorted(RESULTS.glob("*.csv")), runs, strict=True):
        parts.append(
            f"- {path.name}: {m['gpu']}, torch {m['torch']}, Triton {m['triton']}, {m['date']}; "
            f"copy {m['copy_gbs']:.0f} GB/s, bf16 product {m['bf16_tflops']:.0f} TFLOP/s, "
            f"a graph with one trivial kernel {m['empty_graph_us']:.1f} µs."
        )
    parts += [
        "",
        "Cold: L2 is emptied by reading 256 MiB before every replay. Hot: ten replays in a row. Every time is that "
        "of a CUDA graph and contains the trivial graph's. Providers take turns within one run. Peers: time and, in "
        "brackets, peer's time over ours; rough: outside of the tolerance, with its largest error.",
        "Errors are against the float64 reference on the same quantised inputs.",
        "",
    ]
    parts += [f"![{name}](plots/{name}.svg)" for name, _ in plots]
    for op in operations():
        if rows_of(runs, op.name):
            parts += ["", f"## {op.name}", "", *sections(runs, op.name)]
    (DOCS / "measured.md").write_text("\n".join(parts) + "\n" + model.page())
    (DOCS / "operations.md").write_text(operations_page())


if __name__ == "__main__":
    main()
