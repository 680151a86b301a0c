"""Runs of the benchmark as tables: the machine in lines with `#`, then a row for each case and provider.

Times are in µs, errors the largest over all outputs of a case. `note` is the reason for missing times, or for timing a
provider outside the tolerance ("rough: …").
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TIMES = ("cold_us", "iqr_us", "hot_us")
ERRORS = ("max", "diff")
COLUMNS = ("op", "case", "params", "bytes", "flops", "provider", *TIMES, *ERRORS, "note")


def write(path: Path, machine: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of `run.bench_case`, which were measured on `machine`."""
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in machine.items())
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for row in rows:
        params = " ".join(f"{name}={int(value)}" for name, value in row["params"].items())
        for provider, facts in row["providers"].items():
            errors = facts.get("errors", {}).values()
            table.writerow(
                {
                    **{name: row[name] for name in ("op", "case", "bytes", "flops")},
                    **{"params": params, "provider": provider},
                    **{name: f"{facts[name]:.7g}" for name in TIMES if name in facts},
                    **({name: f"{max(error[name] for error in errors):.5g}" for name in ERRORS} if errors else {}),
                    "note": next(
                        (f"{k}: {facts[k]}" for k in ("skipped", "failed", "wrong", "rough") if k in facts), ""
                    ),
                }
            )
    path.write_text(text.getvalue())


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the machine, and the cases with their providers' times, errors and notes."""
    lines = path.read_text().splitlines()
    stamp = [line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# ")]
    machine = {name: _number(value) for name, _, value in stamp}
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("# ")):
        params = {name: int(value) for name, _, value in (one.partition("=") for one in row["params"].split())}
        whole = {"op": row["op"], "case": row["case"], "params": params, "providers": {}}
        case = cases.setdefault((row["op"], row["case"]), whole)
        case |= {name: int(row[name]) for name in ("bytes", "flops")}
        facts = {name: float(row[name]) for name in (*TIMES, *ERRORS) if row[name]}
        case["providers"][row["provider"]] = facts | {"note": row["note"]}
    return machine, list(cases.values())


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
