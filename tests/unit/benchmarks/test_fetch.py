"""Implementations that the kernels are compared with: a failed download affects only its own comparisons."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "kernels" / "fetch.py"
_SPEC = importlib.util.spec_from_file_location("kernel_fetch", FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
fetch = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fetch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fetch, "FOLDER", tmp_path)
    monkeypatch.setattr(fetch, "PEERS", tmp_path / "peers")
    return tmp_path


def commands(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Replace `subprocess.run` by a function that creates the requested files; commands with `failing` fail."""

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        words = list(command)
        target = Path(words[words.index("--target") + 1] if "--target" in words else words[-1])
        if "checkout" in words:
            for name in words[words.index("--") + 1 :]:
                path = Path(words[words.index("-C") + 1]) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        else:
            target.mkdir(parents=True)
        if fetch.VLLM in words:
            for name in fetch.VLLM_KEPT:
                (target / name).mkdir(parents=True)
        failed = any(failing in word for word in words)
        return subprocess.CompletedProcess(words, 128 * failed, stderr="warning: so\nfatal: not found\n" * failed)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("failing", "named", "rest"),
    [
        (fetch.FLAGGEMS, "FlagGems", {"vllm", "humming"}),
        (fetch.HUMMING, "Humming", {"vllm", "FlagGems"}),
        (fetch.VLLM, "FlashMLA, DeepGEMM, CUTLASS, Marlin, vLLM's Triton", {"humming", "FlagGems"}),
    ],
)
def test_a_peer_that_cannot_be_fetched_is_one_line_and_the_others_come(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
    named: str,
    rest: set[str],
) -> None:
    commands(monkeypatch, failing)
    fetch.peers()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{named}: could not be fetched (")
    assert lines[0].endswith(": fatal: not found); its comparisons are left out")
    assert {path.name for path in (folder / "peers").iterdir()} == rest
    commands(monkeypatch, "nothing")
    fetch.peers()
    assert {path.name for path in (folder / "peers").iterdir()} == {"vllm", "humming", "FlagGems"}


def test_a_program_that_is_not_there_is_a_peer_that_cannot_be_fetched() -> None:
    with pytest.raises(fetch.FetchError, match="No such file"):
        fetch.run("no-such-program", "clone")


def test_the_last_line_of_a_command_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(fetch.FetchError, match=r"-c: it is so$"):
        fetch.run(sys.executable, "-c", "import sys; sys.exit('first\\nit is so')")
    assert capfd.readouterr().err == ""
