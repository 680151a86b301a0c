"""Mutants of the safety-critical lines of dsv4: each is applied to a copy of this checkout, and its tests must fail.

Part of `make release-check`, not of CI:

    .venv/bin/python tests/mutants.py              # all of them; exit code 1 if one survives
    .venv/bin/python tests/mutants.py lease fence  # those with one of these words in their name

`dsv4_testkit/mutants` has their tables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "kit"))

from dsv4_testkit.mutants import MUTANTS, Mutant  # noqa: E402  (pytest's `pythonpath` is not set here)

_TEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one mutant."""

    mutant: Mutant
    outcome: str
    """`killed`, `ALIVE`, or the reason why the mutant was not tested."""
    seconds: float


def attempt(mutant: Mutant, copy: Path) -> Result:
    """Apply `mutant` in `copy`, run its tests, and undo it."""
    file, begun = copy / mutant.file, time.monotonic()
    original = file.read_text()
    if original.count(mutant.text) != 1:
        return Result(mutant, f"STALE: its text is there {original.count(mutant.text)} times", 0.0)
    file.write_text(original.replace(mutant.text, mutant.replacement))
    try:
        code = run(mutant.tests, copy)
    finally:
        file.write_text(original)
    # Exit code 1: tests failed. Other codes are no verdict: pytest collected no tests or failed itself.
    outcome = {0: "ALIVE", 1: "killed"}.get(code, f"NO VERDICT: pytest ended with {code}")
    return Result(mutant, outcome, time.monotonic() - begun)


def run(tests: tuple[str, ...], copy: Path) -> int:
    """Return the exit code of pytest for `tests` in `copy`; 1 if it exceeds its time limit."""
    paths = os.pathsep.join(str(copy / folder) for folder in ("operator", "runtime", "kernels"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=_TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1
    return ended.returncode


def copied(folder: Path) -> Path:
    """Return a copy of the checkout with all files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    return folder


def by_area(results: list[Result]) -> str:
    """Return the table of `docs/development.md`: the numbers of mutants and of killed mutants per package."""
    lines = ["| area | rows | killed |", "| --- | --- | --- |"]
    areas = [(Path(one.mutant.file).with_suffix("").parts[2], one.outcome == "killed") for one in results]
    for area in sorted({area for area, _ in areas}):
        killed = [dead for found, dead in areas if found == area]
        lines.append(f"| {area} | {len(killed)} | {sum(killed)} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Test the mutants with one of `words` in their name, or all; return the exit code."""
    chosen = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    stale = [one.name for one in chosen if (REPOSITORY / one.file).read_text().count(one.text) != 1]
    if stale:
        print(f"the text of these rows is not in their file exactly once; correct the rows: {'; '.join(stale)}")
        return 2
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = copied(Path(folder))
        for tests in sorted({one.tests for one in chosen}):
            if run(tests, copy) != 0:
                print(f"{' '.join(tests)} fails without any mutant; correct that first")
                return 2
        for mutant in chosen:
            result = attempt(mutant, copy)
            results.append(result)
            print(f"{result.outcome:8} {result.seconds:5.1f} s  {mutant.name}", flush=True)
    living = [one for one in results if one.outcome != "killed"]
    print(by_area(results))
    print(f"{len(results) - len(living)} of {len(results)} killed")
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
