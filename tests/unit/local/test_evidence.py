from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, Metadata
from dsv4_operator.backends.local import backend
from dsv4_operator.backends.local.backend import LocalBackend, describe_end
from dsv4_operator.backends.local.state import DeploymentState, collect_evidence, read_logs
from dsv4_operator.lifecycle.observed import ObservedMember
from dsv4_testkit.supervised import Supervised


@pytest.fixture
def state() -> Iterator[DeploymentState]:
    with tempfile.TemporaryDirectory(prefix="d4-") as path:
        found = DeploymentState(Path(path), "nano")
        logs = found.member(3, 0) / "ray" / "session_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("why\n")
        (logs / "empty.out").write_text("")
        (found.member(3, 0) / "vllm.log").write_bytes(b"x" * 300_000 + b"the end\n")
        (found.incarnation(3) / "plan.json").write_text("{}")
        yield found


def test_the_ends_of_all_logs_are_kept(state: DeploymentState) -> None:
    member = ObservedMember(3, 0, "local-0", "10.0.0.1", started=1.0, ended="killed by SIGKILL", ended_time=2.0)
    stranger = ObservedMember(2, 1, "local-1", "10.0.0.2", started=1.0)
    found = collect_evidence(state, 0, 3, [member, stranger], deadline=time.monotonic() + 60)
    assert found is not None
    names = sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())
    assert names == ["m0-ray/raylet.out", "m0-status.json", "m0-vllm.log", "plan.json"]
    kept = (found / "m0-vllm.log").read_bytes()
    assert len(kept) == 256 * 1024
    assert kept.endswith(b"the end\n")
    assert json.loads((found / "m0-status.json").read_text())["ended"] == "killed by SIGKILL"


def test_text_of_clients_is_not_kept(state: DeploymentState) -> None:
    api, at = "(APIServer pid=8)", "11-25 16:39:47"
    lines = [
        f"{api} INFO {at} [api_utils.py:339] version 0.32.0",
        "Traceback (most recent call last):",
        "ValueError: of the start",
        "INFO:     Application startup complete.",
        'INFO:     10.0.0.9:4242 - "GET /v1/models?api_key=Jane-Roe HTTP/1.1" 200 OK',
        f"{api} ERROR {at} [serving.py:274] Error with model Jane-Roe",
        "ValueError: Jane-Roe",
        f"(EngineCore pid=9) ERROR {at} [dump_input.py:79] Dumping scheduler output: stop=['Jane-Roe']",
        f"(EngineCore pid=9) ERROR {at} [core.py:1512] EngineCore encountered a fatal error.",
        f"{api} INFO {at} [api_utils.py:339] version 0.32.0",
        "ValueError: of the next start",
    ]
    (state.member(3, 0) / "vllm.log").write_text("\n".join(lines) + "\n")
    worker = state.member(3, 0) / "ray" / "session_1" / "logs" / "worker-1.err"
    worker.write_text(f"{lines[7]}\nNCCL WARN x\n")
    found = collect_evidence(state, 0, 3, [], deadline=time.monotonic() + 60)
    assert found is not None
    kept = (found / "m0-vllm.log").read_text().splitlines()
    assert [line for line in kept if "[text withheld]" not in line] == [*lines[:4], *lines[8:]]
    worker_kept = (found / "m0-ray" / "worker-1.err").read_text()
    assert worker_kept.endswith("NCCL WARN x\n")
    assert "Jane" not in "".join(kept) + worker_kept


def test_the_latest_logs_of_ray_are_kept_once_also_while_files_go(state: DeploymentState) -> None:
    ray = state.member(3, 0) / "ray"
    logs = ray / "session_1" / "logs"
    for number in range(70):
        (logs / f"worker-{number}.out").write_text("x")
        os.utime(logs / f"worker-{number}.out", (number, number))
    (ray / "session_latest").symlink_to("session_1")
    (logs / "gone.out").symlink_to("nowhere")
    names = []
    for name, _ in read_logs(state.incarnation(3), deadline=time.monotonic() + 60):
        names.append(name)
        (logs / "worker-30.out").unlink(missing_ok=True)
    kept = [name for name in names if name.startswith("m0-ray/worker-") and name.endswith(".out")]
    assert len(names) == len(set(names))
    assert "m0-ray/worker-69.out" in kept
    assert "m0-ray/worker-30.out" not in kept
    assert len(kept) >= 57


def test_no_file_is_begun_after_the_deadline(state: DeploymentState) -> None:
    found = collect_evidence(state, 0, 3, [], deadline=time.monotonic() - 1)
    assert found is not None
    assert [path.name for path in found.iterdir()] == ["plan.json"]


def test_an_incarnation_that_left_nothing(state: DeploymentState) -> None:
    assert collect_evidence(state, 0, 9, [], deadline=time.monotonic() + 60) is None


async def test_a_disk_that_does_not_answer_is_not_waited_for(
    state: DeploymentState, monkeypatch: pytest.MonkeyPatch, supervised: Supervised
) -> None:
    # A pipe without a writer: opening it for reading blocks forever, like a file on a dead server.
    pipe = state.member(3, 0) / "agent.log"
    os.mkfifo(pipe)
    # It waits for 0.5 s in all, and a thread that starts late opens the pipe too.
    monkeypatch.setattr(backend, "_EVIDENCE_SECONDS", 60.0)
    monkeypatch.setattr(backend, "_LAST_FILE_SECONDS", -59.5)
    local = LocalBackend(state, supervised.again(), isolated=False, changed=lambda: None)
    begun = time.monotonic()
    assert await local.collect_evidence(DSV4Deployment.model_construct(metadata=Metadata(name="nano")), 0, 3) is None
    assert time.monotonic() - begun < 60
    os.close(os.open(pipe, os.O_WRONLY))
    await local.close()


def test_only_the_newest_ten_stay(state: DeploymentState) -> None:
    for number in range(12):
        (state.evidence() / f"{number}-old").mkdir(parents=True)
    newest = collect_evidence(state, 0, 3, [], deadline=time.monotonic() + 60)
    assert newest is not None
    assert newest.is_dir()
    assert len(list(state.evidence().iterdir())) == 10


def test_the_time_in_the_name_decides_which_evidence_stays(state: DeploymentState) -> None:
    kept = [f"{number}-2026010{number}T000000Z" for number in range(1, 10)]
    # Evidence of an agent, and of a clock that was ahead, which would stay forever.
    old = ["7-g2-20251231T000000Z", "8-20991231T000000Z"]
    for age, name in enumerate((*kept, *old)):
        (state.evidence() / name).mkdir(parents=True)
        # Modification times as after the restore of a backup: the oldest files were written last.
        os.utime(state.evidence() / name, (1e9 - age if name in kept else 2e9,) * 2)
    newest = collect_evidence(state, 0, 3, [], deadline=time.monotonic() + 60)
    assert newest is not None
    assert {path.name for path in state.evidence().iterdir()} == {*kept, newest.name}


@pytest.mark.parametrize(
    ("code", "log", "text"),
    [
        (0, "", "exit code 0"),
        (1, "Traceback\nValueError: x\n", "exit code 1: ValueError: x"),
        (1, "fine\nunshare: sigprocmask unblock failed: Invalid argument\n", "killed by SIGKILL"),
        (-9, "", "killed by SIGKILL"),
        (143, "", "killed by SIGTERM"),
    ],
)
def test_how_a_member_ended(code: int, log: str, text: str) -> None:
    assert describe_end(code, log) == text
