"""The committed table of the static gate: reading, writing, comparing, rendering."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Compared between the committed row and a fresh compilation by the same Triton; the rest is for the reader.
COMPARED = ("digest", "shared", "registers", "stack", "local", "mma", "cp_async", "foreign", "broken")

GateRow = Mapping[str, Any]
GateKey = tuple[str, str]


def read(path: Path) -> dict[GateKey, GateRow]:
    """Rows by (record, Triton)."""
    if not path.exists():
        return {}
    return {(row["key"], row["triton"]): row for row in json.loads(path.read_text())}


def write(path: Path, rows: Iterable[GateRow]) -> None:
    """One row per line, sorted, without times: a change of one configuration is a diff of its lines."""
    lines = [
        json.dumps({k: v for k, v in row.items() if k != "seconds"}, sort_keys=True) for row in sorted(rows, key=_order)
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _order(row: GateRow) -> GateKey:
    return row["key"], row["triton"]


def differences(committed: GateRow, fresh: GateRow) -> list[str]:
    """Return what a fresh compilation shows otherwise than the table says."""
    return [
        f"{fresh['key']} (Triton {fresh['triton']}): {name} is {fresh.get(name)}, the table says {committed.get(name)}"
        for name in COMPARED
        if committed.get(name) != fresh.get(name)
    ]


def stale(table: Mapping[GateKey, GateRow], current: Mapping[GateKey, str]) -> list[str]:
    """Rows that are missing, superfluous or made from other sources; `current` maps every due row to its digest."""
    problems = [f"{key} (Triton {version}): no row" for key, version in current.keys() - table.keys()]
    problems += [
        f"{key} (Triton {version}): row of a configuration that is gone"
        for key, version in table.keys() - current.keys()
    ]
    problems += [
        f"{key} (Triton {version}): made from other sources"
        for (key, version), digest in current.items()
        if (key, version) in table and table[key, version]["digest"] != digest
    ]
    return sorted(problems)


def render(rows: Iterable[GateRow]) -> str:
    """The table as Markdown: one line per configuration and architecture, the worst over the Tritons, with what
    breaks.
    """
    merged: dict[str, list[GateRow]] = {}
    for row in rows:
        merged.setdefault(row["key"], []).append(row)
    lines = [
        "| operation | kernel and configuration | arch | Triton | shared B | registers | stack B | matrix instruction "
        "| cp.async | verdict |",
        "|---|---|---|---|---:|---:|---:|---|---:|---|",
    ]
    for key, group in sorted(merged.items()):
        operation, function, label, arch = key.split("/")
        done = [row for row in group if "shared" in row]
        versions = ", ".join(sorted(row["triton"] for row in group))
        broken = sorted({f"{row['triton']}: {text}" for row in group for text in row["broken"]})
        if not done:
            lines.append(f"| {operation} | {function} {label} | {arch} | {versions} | | | | | | {'; '.join(broken)} |")
            continue
        mma = sorted({name for row in done for name in row["mma"]})
        lines.append(
            f"| {operation} | {function} {label} | {arch} | {versions} | {max(r['shared'] for r in done)} "
            f"| {max(r['registers'] for r in done)} | {max(r['stack'] + r['local'] for r in done)} "
            f"| {', '.join(mma) or '–'} "
            f"| {min(r['cp_async'] for r in done)} | {'; '.join(broken) or 'holds'} |"
        )
    return "\n".join(lines) + "\n"
