"""What the images are made from. That they build and run is for tests/cluster to see."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from dsv4_operator.builders.rights import LOCK_MEMORY, USER

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


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_image_runs_as_root_and_says_so_by_number(file: Path) -> None:
    text = file.read_text()
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == [f"{USER}:{USER}"]
    # Nothing after it is done as root.
    assert "RUN" not in text.partition("\nUSER ")[2]


# What a container runtime does for a user that is not root: it takes the identity, leaves IPC_LOCK permitted, forbids
# to gain privileges, and starts the command.
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
def test_only_what_the_launcher_starts_may_lock_memory() -> None:
    _spec = importlib.util.spec_from_file_location("lock_memory", ROOT / "runtime" / "lock_memory.py")
    assert _spec
    assert _spec.loader
    maker = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(maker)
    # Not below pytest's directory, which is root's alone.
    with tempfile.TemporaryDirectory(dir="/usr/local") as folder:
        Path(folder).chmod(0o755)
        launcher = Path(folder) / LOCK_MEMORY[0]
        maker.make(launcher)

        def effective(*begin: str) -> str:
            command = [sys.executable, "-c", _AS_A_RUNTIME, *begin, "/bin/cat", "/proc/self/status"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            assert re.search(r"^Uid:\s+65532", said, re.MULTILINE)
            found = re.search(r"^CapEff:\s+(\w+)$", said, re.MULTILINE)
            assert found
            return found[1].lstrip("0")

        assert effective() == ""
        assert effective(str(launcher), *LOCK_MEMORY[1:]) == f"{1 << 14:x}"


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
