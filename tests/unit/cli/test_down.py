from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import main, processes, up

STAND_IN = str(Path(__file__).with_name("stand_in_loop.py"))


@pytest.fixture
def running(saved: Callable[..., DeploymentState]) -> Iterator[Callable[..., DeploymentState]]:
    """Return a function that starts a loop without waiting for it, as after `up --detach`."""
    states: list[DeploymentState] = []
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str = "nano", mode: str = "fine") -> DeploymentState:
        state = saved(name=name)
        states.append(state)
        started.append(processes.start_loop(state, [sys.executable, STAND_IN, str(state.root), name, mode, "False"]))
        deadline = time.monotonic() + 60
        while not (state.directory / "object.json").exists():
            assert time.monotonic() < deadline
            assert started[-1].poll() is None
            time.sleep(0.02)
        return state

    yield start
    for state in states:
        processes.stop_processes(state)
    for process in started:
        process.wait(60)


def test_down_is_idempotent_and_keeps_logs_evidence_and_weights(
    running: Callable[..., DeploymentState], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = running()
    state.evidence().mkdir()
    assert main.run(["down", "--state-dir", str(root)]) == 0
    assert capsys.readouterr() == ("nano has ended\n", "stopping nano\n")
    assert processes.deployment_processes(state) == []
    left = {path.name for path in state.directory.iterdir()}
    assert left == {"lock", "manifest.json", "object.json", "loop.log", "evidence"}
    assert state.weights.exists()
    assert main.run(["down", "nano", "--state-dir", str(root)]) == 0
    assert capsys.readouterr() == ("nano is not running\n", "")
    assert main.run(["down", "nano", "--purge", "--state-dir", str(root)]) == 0
    assert capsys.readouterr().out == "nano is not running; its files are removed\n"
    assert not state.directory.exists()
    assert state.weights.exists()
    assert main.run(["down", "nano", "--state-dir", str(root)]) == 0
    assert main.run(["down", "--all", "--state-dir", str(root)]) == 0


def test_all(running: Callable[..., DeploymentState], root: Path) -> None:
    states = [running("one"), running("two")]
    assert main.run(["down", "--state-dir", str(root)]) == 2, "which one?"
    assert main.run(["down", "--all", "--state-dir", str(root)]) == 0
    assert [state.holder() for state in states] == [None, None]


def test_a_loop_that_ignores_signals_is_killed_with_its_children(running: Callable[..., DeploymentState]) -> None:
    state = running(mode="stubborn")
    assert len(processes.deployment_processes(state)) == 2
    began = time.monotonic()
    assert up.end_loop(state, grace=0.5)
    assert time.monotonic() - began < 60
    assert state.holder() is None
    assert processes.stop_processes(state) == 1
    assert processes.deployment_processes(state) == []


def test_after_a_loop_that_was_killed(
    running: Callable[..., DeploymentState], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = running(mode="stubborn")
    pid = state.holder()
    assert pid
    os.kill(pid, 9)
    assert main.run(["down", "--state-dir", str(root)]) == 0
    assert capsys.readouterr().out == "nano has ended\n"
    assert processes.deployment_processes(state) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("DSV4_DEPLOYMENT_DIR=/s/nano", True),
        ("DSV4_DEPLOYMENT_DIR=/s/nano2", False),
        ("X=1\0RAY_TMPDIR=/s/nano/i3/m0/ray", True),
        ("X=1\0RAY_TMPDIR=/s/nano/g1/i3/m0/ray", True),
        ("LOG=/s/nano/loop.log", False),
        ("PWD=/s/nano/i1/m0\0OLDPWD=/s/nano/i1", False),
        ("", False),
    ],
)
def test_processes_are_assigned_to_deployments_by_their_environment(environment: str, expected: bool) -> None:
    assert processes.belongs_to_deployment(environment.encode(), Path("/s/nano")) is expected


def test_ancestors_of_the_command_are_not_remaining_processes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeploymentState(root, "nano")
    code = "import sys; from pathlib import Path; from dsv4_operator.cli import processes as l;"
    code += "from dsv4_operator.backends.local.state import DeploymentState as D;"
    code += "print(l.deployment_processes(D(Path(sys.argv[1]), 'nano')))"
    found = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env={**os.environ, processes.DIRECTORY_VARIABLE: str(state.directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("name", ["weights", "secrets"])
def test_names_of_shared_directories_are_refused_for_deployments(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kept = [root / "weights" / "model.safetensors", root / "secrets" / "hub" / "token"]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.write_text("x")
    manifest = root / "file.yaml"
    text = (Path(__file__).parents[3] / "examples" / "nano.yaml").read_text()
    manifest.write_text(text.replace("name: nano", f"name: {name}", 1))
    for command in (["up", str(manifest)], ["plan", str(manifest)], ["down", name, "--purge"]):
        assert main.run([*command, "--state-dir", str(root)]) == 2
        assert f"metadata.name: '{name}' is a directory of {root} that all" in capsys.readouterr().err
    assert main.run(["down", "--all", "--purge", "--state-dir", str(root)]) == 0
    assert [file.read_text() for file in kept] == ["x", "x"]
    assert not (root / name / "lock").exists()
