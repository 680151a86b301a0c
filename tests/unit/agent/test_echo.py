"""Copies of Ray's and vLLM's logs on stdout, through real pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_runtime.agent import echo
from dsv4_runtime.agent.echo import LogEcho, exit_message
from dsv4_runtime.contract import Phase
from dsv4_testkit.waiting import free_port

AT = "(APIServer pid=1) INFO 11-23 07:23:32"
BEGINS = f"{AT} [api_server.py:1512] vLLM API server version 0.32.0"
READY = "(APIServer pid=1) INFO:     Application startup complete."
KNOWN = f"{AT} [loggers.py:12] Engine 000: Avg prompt throughput: 1 tokens/s"
CLIENT = 'a prompt that vLLM quotes: "my secret"'


class Output:
    """Read end of a pipe that serves a `LogEcho` as stdout."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._rest = b""

    def lines(self, count: int, seconds: float = 60.0) -> list[str]:
        """Return the next `count` lines."""
        deadline = time.monotonic() + seconds
        while self._rest.count(b"\n") < count:
            assert select.select([self.read_end], [], [], deadline - time.monotonic())[0], self._rest
            self._rest += os.read(self.read_end, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n", count)
        return [line.decode() for line in lines]

    def quiet(self, seconds: float = 0.6) -> bool:
        """Return whether nothing arrives."""
        return not self._rest and not select.select([self.read_end], [], [], seconds)[0]


@pytest.fixture
def output() -> Iterator[Output]:
    found = Output()
    yield found
    os.close(found.read_end)
    os.close(found.write_end)


class Engine:
    """Logs and phase of a member."""

    def __init__(self, folder: Path, output: Output) -> None:
        self.folder, self.phase = folder, Phase.LOADING
        self.echo = LogEcho(folder, 0, lambda: self.phase, output.write_end)

    def write(self, *lines: str, log: str = "vllm", end: str = "\n") -> None:
        with (self.folder / f"{log}.log").open("a", newline="") as file:
            file.write("".join(f"{line}{end}" for line in lines))


@pytest.fixture
def engine(tmp_path: Path, output: Output) -> Engine:
    return Engine(tmp_path, output)


def test_lines_have_the_name_of_their_log(engine: Engine, output: Output) -> None:
    engine.write("Ray runtime started.", log="ray")
    with engine.echo:
        assert output.lines(1) == ["[ray rank 0] Ray runtime started."]
        engine.write(BEGINS, "\x1b[32mgreen\x1b[0m \x1b]0;title\x07", "")
        assert output.lines(2) == [f"[vllm rank 0] {BEGINS}", "[vllm rank 0] green \ufffd]0;title\ufffd"]
        engine.write("x" * 9000)
        assert output.lines(1) == [f"[vllm rank 0] {'x' * 4096}"]
        engine.write("load 1 %", "load 2 %", end="\r")
        assert output.quiet()
        engine.write("load 100 %")
        assert output.lines(1) == ["[vllm rank 0] load 100 %"]
        engine.write(*["y" * 5] * 2000, end="\r")
        engine.write("done")
        assert output.lines(1) == ["[vllm rank 0] done"]


def test_the_last_lines_of_a_member_are_copied(engine: Engine, output: Output) -> None:
    with engine.echo:
        engine.write("last")
    assert output.lines(1) == ["[vllm rank 0] last"]


def test_text_of_clients_and_secrets_are_left_out(engine: Engine, output: Output) -> None:
    key = "hf_" + "a" * 30
    with engine.echo:
        engine.write(BEGINS, "any text", f"the token {key} of the environment", READY)
        assert output.lines(3) == [f"[vllm rank 0] {line}" for line in (BEGINS, "any text", READY)]
        engine.write(CLIENT, KNOWN, BEGINS, CLIENT)
        # Until the phase changes, a client's imitation of a server's start exposes the lines after it.
        assert output.lines(1) == [f"[vllm rank 0] {KNOWN}"]
        assert output.lines(2) == [f"[vllm rank 0] {line}" for line in (BEGINS, CLIENT)]
        engine.phase = Phase.SERVING
        engine.write(KNOWN, BEGINS, CLIENT, f"known\r{CLIENT}", KNOWN)
        withheld = f"{BEGINS.partition(']')[0]}] [text withheld]"
        assert output.lines(3) == [f"[vllm rank 0] {line}" for line in (KNOWN, withheld, KNOWN)]
        # The end of the previous engine's log is read after the change of the phase.
        engine.phase = Phase.RESTARTING
        engine.write(CLIENT, KNOWN, BEGINS, "any text")
        assert output.lines(3) == [f"[vllm rank 0] {line}" for line in (KNOWN, BEGINS, "any text")]
        assert output.quiet()


def test_a_slow_reader_costs_lines_and_they_are_counted(
    engine: Engine, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "_BEHIND_BYTES", 1 << 20)
    total = 60_000
    with engine.echo:
        for _ in range(0, total, 1000):
            engine.write(*[KNOWN] * 1000)
        time.sleep(0.5)
        engine.write(f"{KNOWN} end")
        printed, skipped = 0, 0
        while True:
            (line,) = output.lines(1)
            text = line.removeprefix("[vllm rank 0] ")
            if text == f"{KNOWN} end":
                break
            if text.endswith("lines are skipped, because they were written faster than stdout is read"):
                skipped += int(text.split()[0])
            else:
                printed += 1
    # The line that contained the read position at the skip is in neither count.
    assert total - 3 <= printed + skipped <= total
    assert skipped > total / 2


def test_after_skipped_lines_text_counts_as_that_of_clients(
    engine: Engine, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "_BEHIND_BYTES", 1000)
    monkeypatch.setattr(echo, "_READ_BYTES", 300)
    engine.write(READY, *["x" * 50] * 100, CLIENT, KNOWN)
    with engine.echo:
        skipped, line = output.lines(2)
        assert "lines are skipped" in skipped
        assert line == f"[vllm rank 0] {KNOWN}"


def test_a_blocked_stdout_does_not_delay_the_end(engine: Engine, output: Output) -> None:
    engine.write(*["x" * 100] * 5000)
    engine.echo.__enter__()
    time.sleep(0.5)
    begun = time.monotonic()
    engine.echo.__exit__()
    assert time.monotonic() - begun < 60
    output.lines(5000)


def test_a_truncated_log_goes_on(engine: Engine, output: Output) -> None:
    engine.write("one", "unfinished", end="\nx")
    with engine.echo:
        assert output.lines(2) == ["[vllm rank 0] one", "[vllm rank 0] xunfinished"]
        os.truncate(engine.folder / "vllm.log", 0)
        assert output.quiet()
        engine.write("two")
        assert output.lines(1) == ["[vllm rank 0] two"]


CHUNKS = st.lists(
    st.binary(max_size=200)
    | st.sampled_from([BEGINS, READY, KNOWN, CLIENT, "hf_" + "a" * 30, "\r", "\n", "x" * 5000]).map(str.encode),
    max_size=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(chunks=CHUNKS, phases=st.lists(st.sampled_from(Phase), min_size=1, max_size=8))
def test_any_content_gives_bounded_printable_lines(tmp_path: Path, chunks: list[bytes], phases: list[Phase]) -> None:
    path = tmp_path / "vllm.log"
    path.unlink(missing_ok=True)
    states = iter(phases * 8)
    log = echo._Log(path, "[vllm rank 0] ", lambda: next(states) not in echo._STARTING)
    lines = []
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        lines += log.read()
    log.close()
    for line in lines:
        assert line.startswith("[vllm rank 0] ")
        assert len(line) <= 4096 + len("[vllm rank 0] ")
        assert not any((ord(letter) < 32 and letter != "\t") or 127 <= ord(letter) < 160 for letter in line)
        assert "hf_aaa" not in line


def test_an_agent_copies_its_logs(make_plan: Any, tmp_path: Path) -> None:
    token, directory = tmp_path / "token", tmp_path / "m0"
    token.write_text("secret")
    directory.mkdir()
    plan = make_plan(ray_token_file=str(token))
    # The usual ports may be those of another agent on this machine.
    ports = plan.members[0].ports.model_copy(update={"agent": free_port()})
    local = [member.model_copy(update={"address": "127.0.0.1", "ports": ports}) for member in plan.members]
    (tmp_path / "plan.json").write_text(plan.model_copy(update={"members": tuple(local)}).to_json())
    (directory / "ray.log").write_text("Ray says this\n")
    command = [
        sys.executable,
        "-m",
        "dsv4_runtime.agent.main",
        f"--plan={tmp_path / 'plan.json'}",
        "--rank=0",
        "--echo",
    ]
    command += [f"--directory={directory}", f"--exit-message={tmp_path / 'message'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        assert agent.stdout
        assert agent.stdout.readline() == "[ray rank 0] Ray says this\n"
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0
    assert (tmp_path / "message").read_text() == "\n"


def test_the_reason_of_an_exit_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "message"
    command = [sys.executable, "-m", "dsv4_runtime.agent.main", f"--plan={tmp_path}/none", "--rank=0", "--echo"]
    command += [f"--directory={tmp_path}", f"--exit-message={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert file.read_text() == done.stderr
    assert "--plan" in done.stderr
    with pytest.raises(ZeroDivisionError), exit_message(file):
        print(1 / 0)
    assert file.read_text() == "ZeroDivisionError: division by zero\n"
    with exit_message(file):
        pass
    # Not empty: Kubernetes would take the end of the log, which has lines of vLLM.
    assert file.read_text() == "\n"
    with exit_message(tmp_path / "no" / "folder"), exit_message(None):
        pass


def test_a_killed_agent_leaves_no_reason(tmp_path: Path) -> None:
    file = tmp_path / "message"
    program = (
        "import pathlib, sys, time\nfrom dsv4_runtime.agent.echo import exit_message\n"
        "with exit_message(pathlib.Path(sys.argv[1])):\n    print('ready', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert file.read_text() == "\n"
