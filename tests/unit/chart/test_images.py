"""What the images are made from. That they build and run is for tests/cluster to see."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILES = [ROOT / "operator" / "Dockerfile", ROOT / "runtime" / "Dockerfile", ROOT / "runtime" / "Dockerfile.cpu"]


def _loaded(name: str) -> ModuleType:
    """A script that runs in images."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "runtime" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made, sbom = _loaded("additions"), _loaded("sbom")


def pins(text: str) -> dict[str, str]:
    """Version of every package in a requirements file, by its one spelling."""
    return {made.normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)}


REQUIREMENTS = {
    "operator": (ROOT / "operator" / "requirements.txt").read_text(),
    "runtime": (ROOT / "runtime" / "requirements.txt").read_text(),
}
BUILD = (ROOT / "requirements-build.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("image", REQUIREMENTS)
def test_an_image_has_what_the_tests_ran_with(image: str) -> None:
    tested = (ROOT / "requirements.txt").read_text().lower()
    # One package may have several versions, for several versions of Python.
    pinned = re.findall(r"^([\w.-]+==[^\s;\\]+)", REQUIREMENTS[image], re.MULTILINE)
    assert [one for one in pinned if not re.search(rf"^{re.escape(one.lower())}(\s|$)", tested, re.MULTILINE)] == [], (
        "make lock"
    )


@pytest.mark.parametrize("image", REQUIREMENTS)
def test_an_image_has_all_that_its_program_needs(image: str) -> None:
    project = PROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"][image]]
    names = {made.normal(re.match(r"[\w.-]+", line)[0]) for line in needed}  # type: ignore[index]
    assert names - set(pins(REQUIREMENTS[image])) == set(), "make lock"


def test_the_build_of_an_image_uses_what_the_project_asks_for() -> None:
    assert {f"{name}=={version}" for name, version in pins(BUILD).items()} >= set(PROJECT["build-system"]["requires"])


@pytest.mark.parametrize("text", [*REQUIREMENTS.values(), BUILD], ids=[*REQUIREMENTS, "build"])
def test_an_image_checks_what_it_fetches(text: str) -> None:
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) > 4
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_an_image_is_made_of_a_base_by_its_digest_and_of_hashed_packages_alone(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}"] * text.count("\nFROM ")
    assert re.findall(r"^ARG BASE=", text, re.MULTILINE) == []
    check = next(line for line in text.splitlines() if line.startswith("RUN case")).removeprefix("RUN ")
    for name, good in (("python@sha256:0", True), ("python:3.13-slim", False), ("", False)):
        done = subprocess.run(["sh", "-c", check], env={"BASE": name}, capture_output=True, timeout=10, check=False)
        assert (done.returncode == 0) is good
    installs = re.findall(r"-m pip (?:install|wheel) ([^&;]*)", text)
    assert installs
    for one in installs:
        fetches_nothing = "--no-index" in one or ("--no-deps" in one and "--no-build-isolation" in one)
        assert "--require-hashes" in one or fetches_nothing, one


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
    requirements = (
        "aiohttp==3.14.5 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
        "Torch==2.13.0 \\\n    --hash=sha256:3\n"
        "ray==2.60.0 ; sys_platform == 'linux' \\\n    --hash=sha256:4\n"
    )
    assert made.additions({"torch", "numpy"}, requirements) == (
        "aiohttp==3.14.5 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
        "ray==2.60.0 ; sys_platform == 'linux' \\\n    --hash=sha256:4\n"
    )
    assert made.additions({"torch", "aiohttp", "ray"}, requirements) == ""


def test_names_are_compared_in_one_spelling() -> None:
    assert made.normal("Huggingface_Hub") == made.normal("huggingface-hub")
    assert made.additions({"huggingface-hub"}, "Huggingface_Hub==2.0\n") == ""


def test_the_list_of_an_images_packages_is_cyclonedx_and_the_same_each_time() -> None:
    packages = [
        {"name": "Typing_Extensions", "version": "4.16.0", "license": "PSF-2.0"},
        {"name": "dsv4", "version": "0.1.0", "license": "Apache-2.0"},
        {"name": "Typing_Extensions", "version": "4.16.0", "license": "PSF-2.0"},
        {"name": "ray", "version": "2.60.0", "license": None},
    ]
    found = sbom.document("dsv4-runtime", packages)
    assert found == sbom.document("dsv4-runtime", reversed(packages))
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    assert found["metadata"]["component"] == {
        **{"type": "container", "bom-ref": "dsv4-runtime"},
        **{"name": "dsv4-runtime", "version": "0.1.0"},
    }
    assert [one["purl"] for one in found["components"]] == [
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:pypi/dsv4@0.1.0",
        "pkg:pypi/ray@2.60.0",
    ]
    assert found["components"][0]["licenses"] == [{"expression": "PSF-2.0"}]
    assert "licenses" not in found["components"][2]
