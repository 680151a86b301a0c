"""What the images are made from. That they build and run is for tests/cluster to see."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = [ROOT / "operator" / "Dockerfile", ROOT / "runtime" / "Dockerfile", ROOT / "runtime" / "Dockerfile.cpu"]

_spec = importlib.util.spec_from_file_location("constraints", ROOT / "runtime" / "constraints.py")
assert _spec
assert _spec.loader
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


def pins(text: str) -> dict[str, str]:
    """Version of every package in a requirements file, by its one spelling."""
    return {made.normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)}


OPERATOR = (ROOT / "operator" / "requirements.txt").read_text()


def test_the_operator_image_has_what_the_tests_ran_with() -> None:
    tested = pins((ROOT / "requirements.txt").read_text())
    wrong = {name: version for name, version in pins(OPERATOR).items() if tested.get(name) != version}
    assert wrong == {}, "make lock"


def test_the_operator_image_has_all_that_the_operator_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["operator"]]
    names = {made.normal(re.match(r"[\w.-]+", line)[0]) for line in needed}  # type: ignore[index]
    assert names - set(pins(OPERATOR)) == set(), "make lock"


def test_the_operator_image_checks_what_it_fetches() -> None:
    entries = re.split(r"\n(?=\S)", OPERATOR.strip())
    assert len(entries) == len(pins(OPERATOR))
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in OPERATOR


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_copied_is_there_and_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    for arguments in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.MULTILINE):
        *sources, _ = arguments.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or source.split("/")[0] in kept


def test_the_operator_is_not_root_by_number() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILES[0].read_text(), re.MULTILINE)
    assert users == ["65532:65532"]


def test_the_image_of_vllm_keeps_its_packages() -> None:
    requirements = "aiohttp==3.14.5\nTorch==2.13.0\nray==2.60.0 ; sys_platform == 'linux'\n# a comment\n--hash=x\n"
    found = made.constraints({"torch": "2.14.0+cu130", "numpy": "2.2.6"}, requirements)
    assert found == [
        "numpy==2.2.6",
        "torch==2.14.0+cu130",
        "aiohttp==3.14.5",
        "ray==2.60.0 ; sys_platform == 'linux'",
    ]


def test_names_are_compared_in_one_spelling() -> None:
    assert made.normal("Huggingface_Hub") == made.normal("huggingface-hub")
    assert made.constraints({"huggingface-hub": "1.0"}, "Huggingface_Hub==2.0\n") == ["huggingface-hub==1.0"]
