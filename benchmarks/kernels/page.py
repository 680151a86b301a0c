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


def section(runs: list[Run], op: str) -> str:
    """Every case of one operation: ours with spread, bandwidth, rate and error, then each peer and the ratio."""
    rows = rows_of(runs, op)
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
                cells.append(f"{facts['cold_us']:.1f} (×{facts['cold_us'] / ours['cold_us']:.2f})")
            else:
                cells.append("wrong" if facts.get("note", "").startswith("wrong") else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def batch_plots(runs: list[Run]) -> list[tuple[str, str]]:
    """Time against tokens: decode by heads, and two products by T."""
    plots = []
    for heads in (64, 32, 16):
        series: dict[str, list[tuple[float, float]]] = {}
        for _, row in rows_of(runs, "mla_decode"):
            if row["params"]["heads"] == heads:
                for name, facts in row["providers"].items():
                    if "cold_us" in facts:
                        series.setdefault(name, []).append((row["params"]["tokens"], facts["cold_us"]))
        if series:
            title = f"sparse MLA decode, {heads} heads, 128 + 512 entries, H200"
            plots.append((f"decode-h{heads}", loglog(title, "tokens", "µs, cold L2", series)))
    for case, (n, k) in {"wq_b": (32768, 1024), "wo_b": (4096, 8192)}.items():
        series = {}
        for _, row in rows_of(runs, "fp8_gemm"):
            if (row["params"]["n"], row["params"]["k"]) == (n, k):
                for name, facts in row["providers"].items():
                    if "cold_us" in facts:
                        series.setdefault(name, []).append((row["params"]["tokens"], facts["cold_us"]))
        if series:
            title = f"FP8 product {case} {k} → {n}, H200"
            plots.append((f"gemm-{case}", loglog(title, "tokens", "µs, cold L2", series)))
    return plots


def roofline(runs: list[Run]) -> str:
    """TFLOP/s over FLOP per byte of every measured case with products, under the copy bandwidth and bf16 rate of the
    run.
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
        name: points
        for name, points in series.items()
        if name in ("mla_decode", "fp8_gemm", "wo_a_einsum", "moe_w4a16")
    }
    limit = "copy bandwidth and bf16 rate of the run"
    series[limit] = [(x, min(x * bandwidth / 1e3, peak)) for x in (1, 4, 16, 64, peak * 1e3 / bandwidth, 1024, 4096)]
    return loglog("Roofline, H200", "FLOP per byte", "TFLOP/s", series, base=4.0, lines=(limit,))


def operations_page() -> str:
    """The registry as a table."""
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
    plots = [*batch_plots(runs), ("roofline", roofline(runs))]
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
        "brackets, peer's time over ours.",
        "Errors are against the float64 reference on the same quantised inputs.",
        "",
    ]
    parts += [f"![{name}](plots/{name}.svg)" for name, _ in plots]
    for op in operations():
        if rows_of(runs, op.name):
            parts += ["", f"## {op.name}", "", section(runs, op.name)]
    (DOCS / "measured.md").write_text("\n".join(parts) + "\n" + model.page())
    (DOCS / "operations.md").write_text(operations_page())


if __name__ == "__main__":
    main()
