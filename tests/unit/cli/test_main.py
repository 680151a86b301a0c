from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4_operator.cli import main

HEAVY = ("httpx", "yaml", "pydantic", "rich", "asyncio", "dsv4_operator.api")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'; see `dsv4 --help`"),
        (["up"], "Missing argument"),
        (["down", "x", "--all"], "--all and the name 'x' exclude each other; give one of them"),
        (["up", "f", "--timeout", "soon"], '--timeout: "soon" is not a duration'),
        (["up", "f", "--timeout", "0s"], "--timeout: '0s' is no time at all"),
        (["logs", "-c", "x"], "--component 'x' is unknown; use one of agent, ray, vllm, loop, all"),
        (["why", "-o", "xml"], "'xml' is not one of"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_help_names_the_exit_codes_and_loads_little() -> None:
    code = "import sys; from dsv4_operator.cli import main; main.run(['--help']); "
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exit codes: 0 all went well; 1 it failed; 2" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["version"]) == 0
    assert capsys.readouterr().out.startswith("dsv4 ")
    assert main.run(["version", "-o", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["version"]


def test_why_as_json(root: Path, saved: object, make: object, capsys: pytest.CaptureFixture[str]) -> None:
    saved(make.status())  # type: ignore[operator,attr-defined]
    assert main.run(["why", "-o", "json", "--state-dir", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "Stopped"
