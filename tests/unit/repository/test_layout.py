"""The repository's directory `operator` must not shadow the module of the standard library."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_standard_operator_wins_in_the_repository_root() -> None:
    code = "import collections, operator; print(operator.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
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
