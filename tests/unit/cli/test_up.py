"""`dsv4 up` as a separate process with a stand-in for the loop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import parse
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import hosts, main, processes
from dsv4_operator.cli import up as command
from dsv4_operator.planning import catalog_facts
from dsv4_operator.planning.catalog import machine_named
from dsv4_operator.planning.setup import setup, timeouts

# Upper bound for slow machines.
SECONDS = 60.0
DRIVER = str(Path(__file__).with_name("up_with_stand_in.py"))


class Dsv4:
    """Runs `dsv4 up` with the stand-in, and ends the processes that a failed test leaves."""

    def __init__(self, root: Path, manifest: Path, seen: Path) -> None:
        self.seen = seen
        self.root, self.manifest = root, manifest
        self.state = DeploymentState(root, "nano")
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, mode: str, *options: str, file: str | None = None, **more: Any) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            DRIVER,
            mode,
            "up",
            file or str(self.manifest),
            "--state-dir",
            str(self.root),
            *options,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **more}
        pipes.setdefault("env", {**os.environ, "STAND_IN_SEEN": str(self.seen)})
        process = subprocess.Popen(command, text=True, **pipes)
        self.processes.append(process)
        return process

    def up(self, mode: str, *options: str, file: str | None = None) -> tuple[int, list[str], list[str]]:
        process = self.start(mode, *options, file=file)
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out.splitlines(), err.splitlines()

    def left(self) -> list[int]:
        return processes.deployment_processes(self.state)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        processes.stop_processes(self.state)


@pytest.fixture
def dsv4(root: Path, manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dsv4]:
    found = Dsv4(root, manifest, tmp_path_factory.mktemp("seen"))
    yield found
    found.close()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came: {lines}, {process.stderr and process.stderr.read()}")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_detached_it_returns_when_ready_and_goes_on_running(dsv4: Dsv4) -> None:
    code, out, err = dsv4.up("fine", "--detach")
    assert (code, err) == (0, [])
    texts = [line.partition("  ")[2].strip() for line in out[: out.index("")]]
    assert texts == [
        "starting the engine in incarnation 1",
        "rank 0 is the head at 10.88.0.10",
        "rank 0 Staging",
        "rank 1 is the worker at 10.88.0.11",
        "rank 1 Preflight",
        "rank 0 Loading: loading shards 1/2",
        "rank 1 Joining",
        "serving",
        "rank 0 Serving",
        "rank 1 Serving",
    ]
    assert "endpoint    http://127.0.0.1:8000/v1" in out
    assert out[-1] == f"dsv4 down nano --state-dir {dsv4.root} ends it."
    assert dsv4.state.holder() in dsv4.left()

    code, out, err = dsv4.up("fine", "--detach")
    assert (code, out) == (2, [])
    assert err == [
        f"error: 'nano' is already running (process {dsv4.state.holder()}); "
        "see `dsv4 status nano`, or end it with `dsv4 down nano`"
    ]
    assert dsv4.state.holder() is not None, "the one that was there is untouched"

    changed = dsv4.root / "changed.yaml"
    changed.write_text(dsv4.manifest.read_text() + "  gateway: {holdTimeout: 7s}\n")
    code, _, err = dsv4.up("fine", "--detach", file=str(changed))
    assert code == 2
    assert "; it runs with other values than this file: spec.gateway" in err[0]
    assert err[0].endswith("to apply the file, run `dsv4 down nano` and then the same `dsv4 up`")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_a_signal_ends_everything(dsv4: Dsv4, number: signal.Signals) -> None:
    process = dsv4.start("fine")
    read_until(process, "Ctrl-C ends it.")
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert err == "stopping nano\nnano has ended\n"
    assert dsv4.left() == []
    assert dsv4.state.holder() is None


def test_an_end_during_the_start_is_no_failure_of_the_loop(dsv4: Dsv4) -> None:
    process = dsv4.start("slow", "--detach")
    read_until(process, "rank 1")
    assert main.run(["down", "nano", "--state-dir", str(dsv4.root)]) == 0
    _, err = process.communicate(timeout=SECONDS)
    assert err == "error: nano was stopped by `dsv4 down` or SIGTERM before it was ready\n"
    assert process.returncode == 1


def test_ctrl_c_during_the_start(dsv4: Dsv4) -> None:
    process = dsv4.start("slow", "--detach")
    read_until(process, "rank 1")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert dsv4.left() == []


def test_a_second_ctrl_c_does_not_wait(dsv4: Dsv4) -> None:
    process = dsv4.start("stubborn")
    read_until(process, "Ctrl-C ends it.")
    assert len(dsv4.left()) == 2, "the loop and its child"
    process.send_signal(signal.SIGINT)
    assert process.stderr
    assert process.stderr.readline() == "stopping nano\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert dsv4.left() == []


def test_later_transitions(dsv4: Dsv4) -> None:
    process = dsv4.start("dies")
    read_until(process, "Ctrl-C ends it.")
    lines = read_until(process, "serving again")
    assert [line.partition("  ")[2] for line in lines] == [
        "died: EngineCoreDied on rank 0: SIGKILL",
        "restarting the engine in place",
        "serving again after 12 s",
    ]


def test_a_failure_while_serving_ends_up_with_the_cause(dsv4: Dsv4) -> None:
    code, out, err = dsv4.up("gives-up")
    assert code == 1
    assert any("given up" in line for line in out)
    assert err[-1] == f"error: nano: 5 of 5 spent; EngineCoreDied on rank 0: SIGKILL; log: {dsv4.state.log}"
    assert dsv4.left() == []


@pytest.mark.parametrize(
    ("mode", "options", "code", "message"),
    [
        ("busy-port", [], 2, "spec.network.ports.api: port 8000 of 127.0.0.1 is taken"),
        ("refused", ["--detach"], 2, "nano: needs 8Gi, 2Gi are free; log: {log}"),
        (
            "slow",
            ["--detach", "--timeout", "1s"],
            1,
            "nano was not ready within 1s: ",
        ),
        (
            "traceback",
            ["--detach"],
            1,
            "the loop of 'nano' ended with exit code 1 before it was ready (RuntimeError: it went wrong); log: {log}",
        ),
    ],
)
def test_failures(
    dsv4: Dsv4,
    saved: Callable[..., DeploymentState],
    make: Any,
    mode: str,
    options: list[str],
    code: int,
    message: str,
) -> None:
    # The status of an earlier run, which is ready, must not count.
    saved(make.status())
    found, _, err = dsv4.up(mode, *options)
    assert err[-1].startswith("error: " + message.format(log=dsv4.state.log))
    assert found == code
    assert dsv4.left() == []
    assert dsv4.state.holder() is None


EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_default_timeout_leaves_time_for_every_step_of_a_start() -> None:
    manifest = yaml.safe_load((EXAMPLES / "pro-8x-spark.yaml").read_text())
    hub = {"repo": "deepseek-ai/DeepSeek-V4-Pro", "revision": "0" * 40}
    manifest["spec"]["model"]["source"] = {"huggingFace": hub}
    del manifest["spec"]["engine"]["timeouts"]
    pro = parse(manifest)
    chosen = setup(pro, catalog_facts(pro, machine_named("gb10"), state_root="/s", weights_root="/w"))
    steps = timeouts(chosen)
    assert steps.staging > 3600, "it is downloaded"
    assert command.start_limit(pro, None) > steps.preflight + steps.staging + steps.formation + steps.load_at(None)
    assert command.start_limit(pro, 5.0) == 5.0
    nano = parse(yaml.safe_load((EXAMPLES / "nano.yaml").read_text()))
    assert command.start_limit(nano, None) == 600.0


def test_a_start_without_a_timeout_has_the_default_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def run(*arguments: object, timeout: float | None, **options: object) -> int:
        given.append(timeout)
        return 0

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(hosts, "up", run)
    for words in (["up", "f"], ["up", "f", "--hosts", "a,b"], ["up", "f", "--timeout", "90s"]):
        assert main.run(words) == 0
    assert given == [None, None, 90.0]


def test_the_loop_is_killed(dsv4: Dsv4) -> None:
    process = dsv4.start("stubborn")
    read_until(process, "Ctrl-C ends it.")
    holder = dsv4.state.holder()
    assert holder
    os.kill(holder, signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err == f"error: the loop of 'nano' was killed (signal 9); log: {dsv4.state.log}\n"
    assert dsv4.left() == [], "its child outlived it and was found"


def test_up_ends_with_a_loop_that_another_process_ended(dsv4: Dsv4) -> None:
    process = dsv4.start("fine")
    read_until(process, "Ctrl-C ends it.")
    holder = dsv4.state.holder()
    assert holder
    os.kill(holder, signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "nano was ended\n", "")


def test_a_closed_pipe_leaves_nothing(dsv4: Dsv4) -> None:
    process = dsv4.start("dies")
    read_until(process, "Ctrl-C ends it.")
    assert process.stdout
    process.stdout.close()
    process.wait(timeout=SECONDS)
    assert process.stderr
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert dsv4.left() == []


def test_on_a_terminal(dsv4: Dsv4) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = dsv4.start("fine", "--detach", stdout=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += os.read(leader, 65536)
        except OSError:
            break
    os.close(leader)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert b"of about 0:40" in shown
    assert b"loading shards 1/2" in shown
    assert b"nano is serving after" in shown


def bad_files(root: Path) -> list[tuple[str, str]]:
    broken = root / "broken.yaml"
    broken.write_text("kind: DSV4Deployment\napiVersion: dsv4.dev/v1alpha1\nmetadata: {name: X}\nspec: {foo: 1}\n")
    binary = root / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    return [
        (str(root / "missing.yaml"), "there is no such file"),
        (str(binary), "save the file as UTF-8"),
        (str(broken), "X"),
    ]


def test_bad_files(dsv4: Dsv4, capsys: pytest.CaptureFixture[str]) -> None:
    for file, message in bad_files(dsv4.root):
        assert main.run(["up", file, "--state-dir", str(dsv4.root)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert all(line.startswith(f"error: {file}: ") for line in err.splitlines())
        assert message in err
    assert len(err.splitlines()) >= 3, "every finding"
    assert not dsv4.state.directory.exists()


def test_a_state_directory_that_cannot_be(dsv4: Dsv4, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["up", str(dsv4.manifest), "--state-dir", str(tmp_path / ("x" * 60))]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "too long for sockets of Ray and vLLM" in err[0]


def test_a_full_disk_is_one_sentence(
    dsv4: Dsv4, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "manifest.json")

    monkeypatch.setattr(DeploymentState, "save_manifest", full)
    assert main.run(["up", str(dsv4.manifest), "--state-dir", str(dsv4.root)]) == 2
    assert capsys.readouterr().err == (
        "error: the state directory cannot be used 'manifest.json': No space left on device\n"
    )


def test_the_supervisor_is_a_module_of_its_own(root: Path) -> None:
    state = DeploymentState(root, "nano")
    assert processes.loop_command(state, attached=True)[1:] == [
        "-m",
        "dsv4_operator.backends.local.supervisor",
        "--state-dir",
        str(root),
        "--name",
        "nano",
        f"--attached={os.getpid()}",
    ]
    assert not any("attached" in word for word in processes.loop_command(state, attached=False))
