"""The repository's folder `operator` must never be taken for the standard library's module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_testkit.mutants import MUTANTS

ROOT = Path(__file__).parents[3]


def test_standard_operator_wins_in_the_repository_root() -> None:
    code = "import collections, operator; print(operator.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()
    assert Path(found).parent != ROOT
    assert not found.startswith(str(ROOT / "operator"))


@pytest.mark.parametrize("folder", ["operator", "runtime", "kernels"])
def test_top_level_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_test_folder_is_a_package_or_called_operator() -> None:
    kit = ROOT / "tests" / "kit"
    found = [path for path in (ROOT / "tests").rglob("__init__.py") if not path.is_relative_to(kit)]
    found += [path for path in (ROOT / "tests").rglob("operator") if path.is_dir()]
    assert found == []


def test_the_kernels_are_a_distribution_of_their_own() -> None:
    whole, kernels = (tomllib.loads((ROOT / name / "pyproject.toml").read_text()) for name in (".", "kernels"))
    project = kernels["project"]
    assert whole["project"]["optional-dependencies"]["kernels"] == [f"{project['name']}=={project['version']}"]
    assert whole["project"]["version"] == project["version"]
    assert (ROOT / "kernels" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    built = [part["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] for part in (whole, kernels)]
    assert built == [["operator/dsv4_operator", "runtime/dsv4_runtime"], ["dsv4_kernels"]]


def test_modules_and_functions_are_read_at_one_look() -> None:
    long = []
    for folder in ("operator", "runtime", "kernels", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = str(path.relative_to(ROOT)), path.read_text()
            if (count := text.count("\n")) > 400:
                long.append(f"{name}: {count} lines")
            if folder == "kernels":
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    size = (node.end_lineno or 0) - node.lineno + 1
                    long += [f"{name}: {node.name}, {size} lines"] if size > 60 else []
    assert long == [], "split them by what they do"


def test_every_mutant_still_has_its_line() -> None:
    assert [mutant.name for mutant in MUTANTS if (ROOT / mutant.file).read_text().count(mutant.text) != 1] == []


SAME = {"Precision"}
"""Names of one meaning in two places: the field of a specification, and what the nano model's maker is given."""


def named(folders: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Classes and type aliases, without the underscore of private ones, and public functions that are imported alone.

    A function that is called through its module, as `fetch.check()` is, has its module's name besides its own.
    """
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in files}
    nodes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {(node.module, alias.name) for node in nodes for alias in node.names}
    for path, tree in trees.items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield node.name.lstrip("_"), path
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (module, node.name) in imported:
                yield node.name, path
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.lstrip("_")
                if re.fullmatch("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
                    yield name, path


def test_a_name_means_one_thing() -> None:
    homes: dict[str, set[str]] = {}
    # Each family of kernels has the same functions: `select`, `is_supported`, ….
    found = [*named(("operator", "runtime")), *(one for one in named(("kernels",)) if one[0][0].isupper())]
    for name, path in found:
        homes.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert twice.keys() == SAME, f"say in the name which one it is: {twice}"
