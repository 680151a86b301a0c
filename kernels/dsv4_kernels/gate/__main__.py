"""The static gate's command.

    python -m dsv4_kernels.gate --full         record every launch, compile it with every Triton of --tritons and write
                                               the table
    python -m dsv4_kernels.gate --update       the same, but results of unchanged sources are kept
    python -m dsv4_kernels.gate --check        the table is fresh; one configuration of each kernel and, with --since,
                                               every row that differs from that revision's table compile again to the
                                               results in the table. CI runs it for sm_120 and sm_121
    python -m dsv4_kernels.gate --render       print the table as Markdown

--tritons points at a folder with one unpacked Triton each, triton-3.6.0 and so on. --check uses those that are there,
and the installed Triton for promises only, since the table has no results of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsv4_kernels.arch import Arch
from dsv4_kernels.gate import table
from dsv4_kernels.gate.table import PACKAGE, Row, StaticKernel

VERSIONS = {version.rpartition(".")[0]: version for version in ("3.6.0", "3.8.0", "3.9.0")}
NEAREST = "nearest"
TABLE = Path("docs/kernels/static.json")


def compiled(triton: Path, records: Iterable[StaticKernel]) -> Iterator[dict[str, Any]]:
    """Compile records with the Triton in folder `triton` and yield a row each; errors of the child end the program."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["PYTHONPATH"] = os.pathsep.join((str(triton), str(PACKAGE.parent)))
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-S", str(PACKAGE / "gate" / "child.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("the compiling child has no pipes")
        process.stdin.write(json.dumps([record.as_json() for record in records]))
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"the compiling child with {triton} ended with {process.returncode}")


def recorded() -> list[StaticKernel]:
    """Record the launches, in a process of its own that has no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "dsv4_kernels.gate.plans"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return [StaticKernel.from_json(row) for row in json.loads(done.stdout)]


def installed(folder: Path) -> Path:
    """Return a folder that holds only links to the installed Triton, so that a child finds no other package."""
    import triton

    package = Path(triton.__file__).parent
    (folder / "triton").symlink_to(package)
    for info in package.parent.glob("triton-*.dist-info"):
        (folder / info.name).symlink_to(info)
    return folder


def show(version: str, row: dict[str, Any]) -> None:
    """Print one line for a compiled row."""
    verdict = "; ".join(row["broken"]) or "holds"
    facts = ", ".join(f"{k} {row.get(k)}" for k in ("shared", "registers", "stack", "cp_async", "mma"))
    print(f"{version} {row['key']}: {facts} {row.get('seconds')} s: {verdict}", flush=True)


def full(options: argparse.Namespace) -> int:
    """Compile all records or, with --update, those that changed; write the table; 1 if a promise is broken."""
    kept = {row.digest: row.results for row in table.read(options.table)} if options.update else {}
    records = {record.key: record for record in recorded()}
    digests = {key: record.digest() for key, record in records.items()}
    results = {key: dict(kept.get(digests[key], {})) for key in records}
    for version, release in VERSIONS.items():
        due = [one for key, one in records.items() if one.applies_to(version) and version not in results[key]]
        # Written in between: an interrupted --update goes on from there.
        for start in range(0, len(due), 50):
            for row in compiled(options.tritons / f"triton-{release}", due[start : start + 50]):
                results[row["key"]][version] = table.result_of(row)
                show(version, row)
            table.write(options.table, (Row(one, digests[key], results[key]) for key, one in records.items()))
    table.write(options.table, (Row(one, digests[key], results[key]) for key, one in records.items()))
    broken = [key for key in records if any("broken" in result for result in results[key].values())]
    print(f"{len(records)} records, {len(broken)} break a promise; {options.table} written")
    return 1 if broken else 0


def chosen(committed: list[Row], since: str | None, path: Path) -> list[Row]:
    """Return one row of each kernel per architecture, and every row that differs from revision `since`."""
    first: dict[tuple[str, Arch], Row] = {}
    for row in committed:
        first.setdefault((row.record.kernel, row.record.arch), row)
    found = {row.record.key: row for row in first.values()}
    if since:
        before = subprocess.run(["git", "show", f"{since}:{path}"], capture_output=True, text=True, check=False)
        old = {row["digest"] for row in json.loads(before.stdout)} if before.returncode == 0 else set()
        found.update((row.record.key, row) for row in committed if old and row.digest not in old)
    return list(found.values())


def base() -> str | None:
    """Return the revision that a change is compared with: origin/main or, on it, the commit before.

    None in a shallow clone.
    """

    def revision(name: str) -> str | None:
        command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None

    head = revision("HEAD")
    return next((found for name in ("origin/main", "HEAD~1") if (found := revision(name)) and found != head), None)


def check(options: argparse.Namespace) -> int:
    """Check freshness without compiling, then compile the chosen records; 1 with one line per problem."""
    committed = table.read(options.table)
    problems = [
        f"{row.record.key} (Triton {version}): {text}"
        for row in committed
        for version, result in row.results.items()
        for text in result.get("broken", ())
    ]
    problems += table.stale(committed, recorded(), VERSIONS)
    of_arch = [row for row in committed if row.record.arch.value in options.arch]
    wanted = {
        row.record.key: row
        for row in chosen(of_arch, base() if options.since == NEAREST else options.since, options.table)
    }
    with tempfile.TemporaryDirectory() as scratch:
        here = installed(Path(scratch))
        version = table.triton_version(here)
        for row in compiled(here, [one.record for one in wanted.values() if one.record.applies_to(version)]):
            show(version, row)
            problems += [f"{row['key']} (Triton {version}): {text}" for text in row["broken"]]
    for version, release in VERSIONS.items():
        if (folder := options.tritons / f"triton-{release}").exists():
            for row in compiled(folder, [one.record for one in wanted.values() if one.record.applies_to(version)]):
                show(version, row)
                result = wanted[row["key"]].results.get(version, {})
                problems += table.differences(row["key"], version, result, row)
    for problem in problems:
        print(problem)
    print(f"{len(wanted)} records compiled again, {len(problems)} problems")
    return 1 if problems else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="dsv4_kernels.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--full", action="store_true", help="compile everything and write the table")
    mode.add_argument("--update", action="store_true", help="compile changed records and write the table")
    mode.add_argument("--check", action="store_true", help="check the committed table")
    mode.add_argument("--render", action="store_true", help="print the table as Markdown")
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
    options = parser.parse_args()
    if options.render:
        print(table.render(table.read(options.table)), end="")
        return 0
    return check(options) if options.check else full(options)


if __name__ == "__main__":
    raise SystemExit(main())
