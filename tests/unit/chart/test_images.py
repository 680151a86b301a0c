"""Sources of the images and of the GPU environment. tests/cluster builds and runs the images."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from dsv4_operator.builders.member import LOCK_MEMORY, USER

ROOT = Path(__file__).parents[3]
DOCKERFILES = [ROOT / "operator" / "Dockerfile", ROOT / "runtime" / "Dockerfile", ROOT / "runtime" / "Dockerfile.cpu"]


def _loaded(name: str) -> ModuleType:
    """Return the module of a script that runs in images."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "runtime" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


steps = _loaded("image")


def pins(text: str) -> dict[str, str]:
    """Return the version of every package in a requirements file, by normalized name."""
    return {steps.normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)}


REQUIREMENTS = {
    "operator": (ROOT / "operator" / "requirements.txt").read_text(),
    "runtime": (ROOT / "runtime" / "requirements.txt").read_text(),
}
BUILD = (ROOT / "requirements-build.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("image", REQUIREMENTS)
def test_an_image_has_the_tested_versions(image: str) -> None:
    tested = (ROOT / "requirements.txt").read_text().lower()
    # A package may have several versions, for several versions of Python.
    pinned = re.findall(r"^([\w.-]+==[^\s;\\]+)", REQUIREMENTS[image], re.MULTILINE)
    assert [one for one in pinned if not re.search(rf"^{re.escape(one.lower())}(\s|$)", tested, re.MULTILINE)] == [], (
        "make lock"
    )


@pytest.mark.parametrize("image", REQUIREMENTS)
def test_an_image_has_all_that_its_program_needs(image: str) -> None:
    project = PROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"][image]]
    names = {steps.normal(re.match(r"[\w.-]+", line)[0]) for line in needed}  # type: ignore[index]
    assert names - set(pins(REQUIREMENTS[image])) == set(), "make lock"


def test_the_gpu_environment_is_pinned_to_the_tested_versions() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    ours = [*project["dependencies"], *extras["operator"], *extras["runtime"], *extras["test"]]
    names = {steps.normal(re.match(r"[\w.-]+", line)[0]) for line in ours} - {"torch"}  # type: ignore[index]
    pinned, tested = pins((ROOT / "requirements-gpu.txt").read_text()), pins((ROOT / "requirements.txt").read_text())
    assert {name: pinned.get(name) for name in names} == {name: tested[name] for name in names}, "make lock"
    assert {f"{name}=={pinned[name]}" for name in ("ray", "vllm")} <= {
        line.replace("[default]", "") for line in extras["gpu"]
    }
    # Older releases contain files of cuda-bindings too; the result would depend on the order of installation.
    releases = {pinned[f"nvidia-{name}"][:5] for name in ("cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm", "cuda-runtime")}
    assert releases == {"13.0."}, "nvcc refuses headers of another release"
    assert pinned["cuda-python"].split(".")[0] == pinned["cuda-bindings"].split(".")[0]


def test_the_build_of_an_image_uses_the_projects_build_requirements() -> None:
    assert {f"{name}=={version}" for name, version in pins(BUILD).items()} >= set(PROJECT["build-system"]["requires"])


@pytest.mark.parametrize("text", [*REQUIREMENTS.values(), BUILD], ids=[*REQUIREMENTS, "build"])
def test_an_image_verifies_hashes_of_its_packages(text: str) -> None:
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
        done = subprocess.run(["sh", "-c", check], env={"BASE": name}, capture_output=True, timeout=120, check=False)
        assert (done.returncode == 0) is good
    installs = re.findall(r"-m pip (?:install|wheel) ([^&;]*)", text)
    assert installs
    for one in installs:
        fetches_nothing = "--no-index" in one or ("--no-deps" in one and "--no-build-isolation" in one)
        assert "--require-hashes" in one or fetches_nothing, one


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_copied_files_exist_and_are_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    for arguments in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.MULTILINE):
        *sources, _ = arguments.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or source.split("/")[0] in kept


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_image_runs_as_a_numeric_user_other_than_root(file: Path) -> None:
    text = file.read_text()
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == [f"{USER}:{USER}"]
    # No later step runs as root.
    assert "RUN" not in text.partition("\nUSER ")[2]


# Steps of a container runtime for a user other than root: change the identity, keep IPC_LOCK permitted, forbid new
# privileges, start the command.
_AS_A_RUNTIME = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
keep, drop, no_new_privileges = 8, 24, 38
for number in range(64):
    if number != 14:
        libc.prctl(drop, number, 0, 0, 0)
libc.prctl(keep, 1, 0, 0, 0)
os.setgroups([])
os.setresgid(65532, 65532, 65532)
os.setresuid(65532, 65532, 65532)
header, words = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(1 << 14, 1 << 14)
assert libc.capset(header, words) == 0
libc.prctl(no_new_privileges, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root takes another identity")
def test_only_processes_of_the_launcher_may_lock_memory() -> None:
    # Outside pytest's directory, which only root can read.
    with tempfile.TemporaryDirectory(dir="/usr/local") as folder:
        Path(folder).chmod(0o755)
        launcher = Path(folder) / LOCK_MEMORY[0]
        steps.make_launcher(launcher)

        def effective(*begin: str) -> str:
            command = [sys.executable, "-c", _AS_A_RUNTIME, *begin, "/bin/cat", "/proc/self/status"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
            assert re.search(r"^Uid:\s+65532", said, re.MULTILINE)
            found = re.search(r"^CapEff:\s+(\w+)$", said, re.MULTILINE)
            assert found
            return found[1].lstrip("0")

        assert effective() == ""
        assert effective(str(launcher), *LOCK_MEMORY[1:]) == f"{1 << 14:x}"


def test_the_image_of_vllm_keeps_its_packages() -> None:
    requirements = (
        "aiohttp==3.14.5 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
        "Torch==2.13.0 \\\n    --hash=sha256:3\n"
        "ray==2.60.0 ; sys_platform == 'linux' \\\n    --hash=sha256:4\n"
    )
    assert steps.additions({"torch", "numpy"}, requirements) == (
        "aiohttp==3.14.5 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
        "ray==2.60.0 ; sys_platform == 'linux' \\\n    --hash=sha256:4\n"
    )
    assert steps.additions({"torch", "aiohttp", "ray"}, requirements) == ""


def test_names_are_compared_in_one_spelling() -> None:
    assert steps.normal("Huggingface_Hub") == steps.normal("huggingface-hub")
    assert steps.additions({"huggingface-hub"}, "Huggingface_Hub==2.0\n") == ""


def test_the_list_of_an_images_packages_is_cyclonedx_and_the_same_each_time() -> None:
    installed = [
        {"name": "Typing_Extensions", "version": "4.16.0", "license": "PSF-2.0"},
        {"name": "dsv4", "version": "0.1.0", "license": "Apache-2.0"},
        {"name": "Typing_Extensions", "version": "4.16.0", "license": "PSF-2.0"},
        {"name": "ray", "version": "2.60.0", "license": None},
    ]
    found = steps.document("dsv4-runtime", installed)
    assert found == steps.document("dsv4-runtime", reversed(installed))
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
