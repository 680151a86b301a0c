"""The static gate's command.

    python -m dsv4_kernels.gate --full         compile everything with every Triton of --tritons and write the table
    python -m dsv4_kernels.gate --update       the same, but rows made from unchanged sources are kept
    python -m dsv4_kernels.gate --check        the table is fresh; one configuration of each kernel and, with --since,
                                               every row that differs from that revision's table compile again to what
                                               the table says. CI runs it for sm_120 and sm_121

--tritons points at a folder with one unpacked Triton each, triton-3.6.0 and so on. --check uses those that are there,
and the installed Triton for promises only, since the table has no rows for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_kernels.arch import Arch
from dsv4_kernels.gate import table

VERSIONS = ("3.6.0", "3.8.0", "3.9.0")
NEAREST = "nearest"
PACKAGE = Path(__file__).resolve().parents[1]
TABLE = Path("docs/kernels/static.json")
PAGE = Path("docs/kernels/static.md")


def child(triton: Path, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the compiling child with the Triton in folder `triton` and yield its rows; its errors end the program."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["PYTHONPATH"] = os.pathsep.join((str(triton), str(PACKAGE.parent)))
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-S", str(PACKAGE / "gate" / "child.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("the compiling child has no pipes")
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"the compiling child with {triton} ended with {process.returncode}")


def installed(folder: Path) -> Path:
    """A folder that holds nothing but links to the installed Triton, so that a child finds it and nothing beside it."""
    import triton

    package = Path(triton.__file__).parent
    (folder / "triton").symlink_to(package)
    for info in package.parent.glob("triton-*.dist-info"):
        (folder / info.name).symlink_to(info)
    return folder


def show(row: dict[str, Any]) -> None:
    """One line per compiled row."""
    verdict = "; ".join(row["broken"]) or "holds"
    facts = ", ".join(f"{k} {row.get(k)}" for k in ("shared", "registers", "stack", "cp_async", "mma"))
    print(f"{row['triton']} {row['key']}: {facts} {row.get('seconds')} s: {verdict}", flush=True)


def full(options: argparse.Namespace) -> int:
    """Compile the whole matrix or, with --update, what changed; write table and page; 1 if a promise is broken."""
    kept = table.read(options.table) if options.update else {}
    rows: list[dict[str, Any]] = []
    for version in VERSIONS:
        folder, keys = options.tritons / f"triton-{version}", []
        for row in child(folder, {"keys": None, "compile": False}):
            old = kept.get((row["key"], row["triton"]))
            if old is not None and old["digest"] == row["digest"]:
                rows.append(dict(old))
            else:
                keys.append(row["key"])
        for row in child(folder, {"keys": keys}) if keys else ():
            rows.append(row)
            show(row)
        table.write(options.table, rows)
    table.write(options.table, rows)
    write_page(options)
    broken = [row for row in rows if row["broken"]]
    print(f"{len(rows)} compilations, {len(broken)} break a promise; {options.table} and {options.page} written")
    return 1 if broken else 0


def write_page(options: argparse.Namespace) -> None:
    """Render the table; the text above it is kept in the page itself, up to the marker."""
    marker = "<!-- generated below -->\n"
    head = options.page.read_text().split(marker)[0] if options.page.exists() else "# What the static gate found\n\n"
    options.page.write_text(head + marker + table.render(table.read(options.table).values()))


def due(tritons: list[Path]) -> dict[table.GateKey, str]:
    """Every row that the table must have, with its digest; compiles nothing."""
    return {
        (row["key"], row["triton"]): row["digest"]
        for folder in tritons
        for row in child(folder, {"keys": None, "compile": False})
    }


def chosen(committed: dict[table.GateKey, table.GateRow], since: str | None, path: Path) -> set[str]:
    """One record of each kernel per architecture family, and every record whose row differs from revision `since`."""
    keys: dict[tuple[str, str], str] = {}
    for key, _ in sorted(committed):
        operation, function, _, arch = key.split("/")
        keys.setdefault((f"{operation}/{function}", arch), key)
    wanted = set(keys.values())
    if since:
        before = subprocess.run(["git", "show", f"{since}:{path}"], capture_output=True, text=True, check=False)
        old = {(r["key"], r["triton"]): r for r in json.loads(before.stdout)} if before.returncode == 0 else {}
        wanted |= {key for (key, version), row in committed.items() if old and old.get((key, version)) != row}
    return wanted


def base() -> str | None:
    """Return what a change is compared with: origin/main or, on it, the commit before; None in a shallow clone."""

    def revision(name: str) -> str | None:
        command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None

    head = revision("HEAD")
    return next((found for name in ("origin/main", "HEAD~1") if (found := revision(name)) and found != head), None)


def check(options: argparse.Namespace) -> int:
    """Freshness without compiling, then the chosen records; 1 with one line per problem."""
    committed = table.read(options.table)
    problems = [
        f"{key} (Triton {version}): {text}" for (key, version), row in committed.items() for text in row["broken"]
    ]
    committed_here = {k: row for k, row in committed.items() if k[0].rsplit("/", 1)[1] in options.arch}
    wanted = chosen(committed_here, base() if options.since == NEAREST else options.since, options.table)
    with tempfile.TemporaryDirectory() as scratch:
        here = installed(Path(scratch))
        there = [options.tritons / f"triton-{v}" for v in VERSIONS if (options.tritons / f"triton-{v}").exists()]
        problems += freshness(committed, here, there)
        for row in child(here, {"keys": sorted(wanted)}):
            show(row)
            problems += [f"{row['key']} (Triton {row['triton']}): {text}" for text in row["broken"]]
        for folder in there:
            for row in child(folder, {"keys": sorted(wanted)}):
                show(row)
                problems += table.differences(committed.get((row["key"], row["triton"]), {}), row)
    for problem in problems:
        print(problem)
    print(f"{len(wanted)} records compiled again, {len(problems)} problems")
    return 1 if problems else 0


def freshness(committed: dict[table.GateKey, table.GateRow], here: Path, there: list[Path]) -> list[str]:
    """Compare the table's digests with the sources. Where a Triton is not unpacked, its rows are compared by the
    installed one.
    """
    if len(there) == len(VERSIONS):
        return table.stale(committed, due(there))
    digests = {key: digest for (key, _), digest in due([here]).items()}
    return [
        f"{key} (Triton {version}): made from other sources"
        for (key, version), row in sorted(committed.items())
        if key in digests and digests[key] != row["digest"]
    ] + [f"{key}: no row" for key in sorted(digests.keys() - {key for key, _ in committed})]


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="dsv4_kernels.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--full", action="store_true", help="compile everything and write the table")
    mode.add_argument("--update", action="store_true", help="compile what changed and write the table")
    mode.add_argument("--check", action="store_true", help="check the committed table")
    mode.add_argument("--render", action="store_true", help="only render the page from the table")
    parser.add_argument(
        "--since",
        nargs="?",
        const=NEAREST,
        help="with --check: also compile rows that differ from this git revision's table; without a value from "
        "origin/main's or, on it, the commit before",
    )
    parser.add_argument("--arch", nargs="+", default=[arch.value for arch in Arch], help="with --check: only these")
    parser.add_argument("--tritons", type=Path, default=Path("third_party"), help="folder of unpacked Tritons")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.render:
        write_page(options)
        return 0
    return check(options) if options.check else full(options)


if __name__ == "__main__":
    raise SystemExit(main())
