"""Providers that end, give wrong results or never return, as real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import trial
from dsv4_runtime.vllm_plugin.kernels.evidence import Seen, Trial, standings
from dsv4_testkit.waiting import wait_until

TRIED = (Trial(Op.MOE, "t1", "moe_w4a16", {"tokens": 1}), Trial(Op.MOE, "t8", "moe_w4a16", {"tokens": 8}))
CHILD = """
import json, os, signal, sys, time
from dsv4_runtime.vllm_plugin.kernels import trial

def try_provider(op, name, tried, lock, results):
    for number, trial in enumerate(tried):
        if name == "prints":
            print("{}", "loading", end="")
        if name == "is interrupted" and number:
            results.write('{"op": "moe"}\\n{"op": "mo')
            results.flush()
            os.kill(os.getpid(), 36)
        if name == "segfaults" and number:
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "hangs" and number:
            open(os.environ["HANGS"], "w").write(str(os.getpid()))
            os.fork()
            time.sleep(600)
        if name == "raises":
            raise ValueError("never seen")
        seen = {"op": op, "trial": trial.name, "provider": name, "microseconds": trial.params["tokens"] * 2.0}
        if name == "wrong":
            seen = {"op": op, "trial": trial.name, "provider": name, "fault": "wrong: out: rms above 5e-3"}
        print(json.dumps(seen), file=results, flush=True)

trial.try_provider = try_provider
trial.run_child(trial.Path(sys.argv[1]))
"""


PROVIDERS = ("right", "wrong", "raises", "segfaults", "hangs", "prints", "is interrupted")


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))
    monkeypatch.setattr(trial, "names", lambda op: PROVIDERS)
    return sys.executable, str(script)


def test_a_wrong_a_crashing_and_a_hanging_provider_are_excluded_within_the_bound(
    child: tuple[str, ...], tmp_path: Path
) -> None:
    begun = time.monotonic()
    found = {s.provider: s for s in standings(trial.gather(TRIED, 12.0, child), TRIED)}
    assert time.monotonic() - begun < 60
    assert found["right"].slowness == pytest.approx(1.0)
    assert found["prints"].slowness == pytest.approx(1.0)
    assert found["wrong"].excluded == "t1: wrong: out: rms above 5e-3"
    assert found["raises"].excluded == "t1: its process ended with 1"
    assert found["segfaults"].excluded == "t8: its process was ended by SIGSEGV"
    assert found["is interrupted"].excluded == "t8: its process was ended by signal 36"
    assert found["hangs"].excluded == "t8: not done after 12 s"
    assert ends(int((tmp_path / "hangs").read_text()))
    script = str(tmp_path / "child.py")
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or [])])


def ends(pid: int) -> bool:
    """Return whether the process ends within a minute; init collects it."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_trial_whose_engine_has_ended_does_not_begin(child: tuple[str, ...], tmp_path: Path) -> None:
    """The engine may be killed while the process of the trial imports."""
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout
    one = {"op": "moe", "provider": "hangs", "trials": [{"name": t, "operation": "", "params": {}} for t in "ab"]}
    given = json.dumps({"parent": int(gone), "jobs": [one]})
    done = subprocess.run([*child, str(tmp_path)], input=given, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "hangs").exists()


MOE = tuple((Op.MOE, name) for name in ("bundled", "bundled_w4a8", "marlin"))
OK = {(name, trial.name): Seen(Op.MOE, trial.name, name, microseconds=2.0) for _, name in MOE for trial in TRIED}


class Starts:
    """Engine starts with one cache; each gathers the results that the test provides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.machine = {"gpu": "card", "capability": "9.0"}
        self.asked: list[tuple[tuple[Op, str], ...]] = []
        monkeypatch.setenv(trial.DIRECTORY, str(folder))
        monkeypatch.setattr(trial, "machine", lambda: dict(self.machine))
        monkeypatch.setattr(trial, "trials", lambda config, tensor_parallel, **cut: TRIED)
        monkeypatch.setattr(trial, "names", lambda op: tuple(name for _, name in MOE))
        monkeypatch.setattr(trial, "gather", self._gather)
        # Treat every start as a day after the previous one.
        monkeypatch.setattr(trial, "_AGAIN_SECONDS", 0.0)
        self.faults: dict[str, str] = {}

    def _gather(self, tried: object, seconds: float, only: Any = None) -> tuple[Seen, ...]:
        jobs = tuple(only or MOE)
        self.asked.append(jobs)
        return tuple(
            Seen(Op.MOE, one.name, name, fault=self.faults[name]) if name in self.faults else OK[name, one.name]
            for _, name in jobs
            for one in TRIED
        )

    def start(self, **faults: str) -> dict[str, str | None]:
        """Return why each provider is excluded, None if it is not."""
        self.faults = faults
        return {one.provider: one.excluded for one in trial.evidence({}, 1, 0.2).standings}


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    return Starts(monkeypatch, tmp_path / "cache")


ENDED = {"ended": 0.0, "process": 1}


def test_conclusive_outcomes_are_kept_and_not_tried_again(starts: Starts, tmp_path: Path) -> None:
    first = starts.start(marlin="wrong: rms above 5e-3")
    assert first == {"bundled": None, "bundled_w4a8": None, "marlin": "t1: wrong: rms above 5e-3"}
    assert starts.start() == first
    assert len(starts.asked) == 1
    starts.machine["driver"] = "581"
    assert starts.start()["marlin"] is None
    assert len(starts.asked) == 2
    *_, kept = sorted((tmp_path / "cache").glob("*.json"), key=lambda file: file.stat().st_mtime)
    for text in (
        "",
        "[]",
        "[1]",
        "{",
        "null",
        '{"seen": 1}',
        '{"seen": [{}], "failed": []}',
        '{"seen": [], "failed": [1]}',
        "[" * 100_000,
        *(
            json.dumps({"seen": [{"op": "moe", "trial": "t1", "provider": "marlin"} | wrong], "failed": []} | ENDED)
            for wrong in (
                {"microseconds": 0},
                {"microseconds": -2.0},
                {"microseconds": "2.0"},
                {"microseconds": math.nan},
                {"fault": ["wrong: x"]},
                {"trial": [], "fault": "wrong: x"},
                {"provider": 1, "fault": "wrong: x"},
                {"op": "none", "fault": "wrong: x"},
                {"more": 1, "fault": "wrong: x"},
            )
        ),
    ):
        kept.write_text(text)
        asked = len(starts.asked)
        assert set(starts.start().values()) == {None}, text
        assert len(starts.asked) == asked + 1


TRANSIENT = (
    "not done after 20 s", "its process was ended by SIGKILL", "its process ended with 1",
    "OutOfMemoryError: CUDA out of memory", "ImportError: no such library", "AssertionError: too small",
)  # fmt: skip


@pytest.mark.parametrize("fault", TRANSIENT)
def test_transient_faults_are_retried_at_the_next_start(starts: Starts, fault: str) -> None:
    """It is tried together with the others of its operation, so that all are timed under the same conditions."""
    found = starts.start(marlin=fault)["marlin"]
    assert found == f"t1: {fault} (attempt 1 of 3, at most one a day)"
    assert starts.start() == {"bundled": None, "bundled_w4a8": None, "marlin": None}
    assert starts.asked == [MOE, MOE]
    starts.start()
    assert len(starts.asked) == 2


@pytest.mark.parametrize(("hours", "again"), [(0.0, False), (23.9, False), (24.1, True), (-1.0, True)])
def test_a_restart_on_the_same_day_does_not_wait_for_trials(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, hours: float, again: bool
) -> None:
    """A negative time: the clock was set back."""
    monkeypatch.setattr(trial, "_AGAIN_SECONDS", 86400.0)
    reason = starts.start(marlin=TRANSIENT[0])["marlin"]
    now = time.time()
    monkeypatch.setattr(trial, "time", SimpleNamespace(time=lambda: now + hours * 3600.0, monotonic=time.monotonic))
    monkeypatch.setattr(trial, "_same_start", lambda *_: False)
    assert starts.start()["marlin"] == (None if again else reason)
    assert len(starts.asked) == (2 if again else 1)


@pytest.mark.parametrize("fault", [TRANSIENT[0], "not here: no package"])
def test_a_provider_that_failed_in_three_starts_is_excluded_for_good(starts: Starts, fault: str) -> None:
    reasons = [starts.start(marlin=fault)["marlin"] for _ in range(5)]
    assert [reason and reason.rpartition(" (")[2] for reason in reasons] == [
        "attempt 1 of 3, at most one a day)",
        "attempt 2 of 3, at most one a day)",
        *["3 attempts, for good)"] * 3,
    ]
    assert len(starts.asked) == 3
    absent = fault.startswith("not here")
    assert starts.asked[1:] == [((Op.MOE, "marlin"),) if absent else MOE] * 2, (
        "what is not there costs nobody else time"
    )


def test_nothing_is_kept_of_a_start_in_which_every_provider_failed(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = {name: "OutOfMemoryError: the card is full" for _, name in MOE}
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        for _ in range(5):
            assert set(starts.start(**full).values()) == {
                "t1: OutOfMemoryError: the card is full (attempt 1 of 3, at most one a day)"
            }
    assert list((tmp_path / "cache").glob("*.json")) == []
    assert len(caplog.records) == 5
    assert set(starts.start().values()) == {None}


def test_a_right_provider_stays_right_when_it_fails_later(starts: Starts) -> None:
    starts.start(marlin="not done after 20 s")
    found = starts.start(marlin="not done after 20 s", bundled="OutOfMemoryError: full")
    assert found["bundled"] is None
    assert found["marlin"] is not None


def test_another_rank_of_the_same_start_does_not_try_again(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rank that waited for the first one nor a later one; a process made after the trial tries again."""
    starts.start(marlin="not done after 20 s")
    (asked,) = starts.asked
    monkeypatch.setattr(trial.os, "getpid", lambda: 1)
    starts.start()
    assert starts.asked == [asked], "this process was there before the trial ended"
    monkeypatch.setattr(trial.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: time.time() + 1))
    assert starts.start()["marlin"] is None
    assert len(starts.asked) == 2


def test_a_trial_that_ended_in_the_future_is_of_another_start(starts: Starts, tmp_path: Path) -> None:
    """The clock was set back: no start until then would try the provider again."""
    starts.start(marlin="not done after 20 s")
    (kept,) = (tmp_path / "cache").glob("*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"ended": time.time() + 86400.0}))
    assert starts.start()["marlin"] is None


def test_a_lock_that_is_held_for_too_long_is_no_obstacle(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.start()
    (kept,) = (tmp_path / "cache").glob("*.json")
    kept.unlink()
    monkeypatch.setattr(trial, "_WAIT_SECONDS", 0.1)
    with kept.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING, "vllm.dsv4"):
            assert set(starts.start().values()) == {None}
    assert "cannot be locked" in caplog.text


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


OPERATIONS = (
    "pathlib.Path.mkdir", "pathlib.Path.open", "pathlib.Path.read_text", "pathlib.Path.write_text",
    "pathlib.Path.rename", "pathlib.Path.unlink", "pathlib.Path.home", "pathlib.Path.rglob", "pathlib.Path.glob",
    "pathlib.Path.read_bytes", "fcntl.flock",
)  # fmt: skip
ERRORS = (
    OSError(errno.ENOSPC, "no space left"), PermissionError(errno.EACCES, "denied"), OSError(errno.EROFS, "read-only"),
    NotADirectoryError(errno.ENOTDIR, "a file"), OSError(errno.ENOLCK, "no locks"), OSError(errno.EIO, "input/output"),
    ValueError("embedded null byte"),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_file_operation_ends_an_engine(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operation: str, error: Exception
) -> None:
    """At the first and second start there is at most one warning, and the evidence is the same as with files."""
    trial.sources.cache_clear()
    if operation == "pathlib.Path.home":
        monkeypatch.delenv(trial.DIRECTORY)
    for _ in range(2):
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "vllm.dsv4"):
            patched.setattr(operation, failing(error))
            assert starts.start(marlin="wrong: x") == {
                "bundled": None, "bundled_w4a8": None, "marlin": "t1: wrong: x",
            }  # fmt: skip
            assert isinstance(trial.sources(), str)
        assert len(caplog.records) <= 1
        caplog.clear()
    trial.sources.cache_clear()


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/version/kernels", "\0", "x" * 5000])
def test_no_place_for_evidence_ends_an_engine(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "a file").write_text("x")
    # os.environ rejects values that a variable of the environment cannot hold.
    environment = {**os.environ, trial.DIRECTORY: place if place.startswith("/") else f"{tmp_path}/{place}"}
    monkeypatch.setattr(trial.os, "environ", environment)
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        assert set(starts.start().values()) == {None}
    (record,) = caplog.records
    assert "evidence cannot be kept" in record.getMessage()


@pytest.mark.parametrize("operation", ["tempfile.mkdtemp", "subprocess.Popen", "pathlib.Path.write_text"])
def test_a_trial_that_cannot_be_run_is_a_fault_of_every_provider(
    monkeypatch: pytest.MonkeyPatch, child: tuple[str, ...], operation: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trial, "CHILD", child)
        patched.setattr(operation, failing(OSError(errno.ENOSPC, "no space left")))
        seen = trial._gathered(TRIED, 1.0, trial._jobs(TRIED))
    assert len(seen) == len(PROVIDERS) * len(TRIED)
    assert {one.fault for one in seen} == {"OSError: [Errno 28] no space left"}


GPU, MIG = "GPU-6a2b", "MIG-77aa"


@pytest.mark.parametrize(("index", "name", "uuid", "given", "expected"), [
    (0, "H100", "6a2b", None, GPU), (3, "H100", "6a2b", None, GPU), (3, "H100", GPU, "0,1,2,3", GPU),
    (0, "H100", "6a2b", "2", GPU), (0, "H100", "", "2", "2"), (1, "H100", "", "5,7", "7"), (3, "H100", "", None, "3"),
    (3, "H100", "6a2b", "0", GPU), (0, "H100", "", "", "0"),
    (0, "A100 MIG 1g.5gb", "6a2b", MIG, MIG), (0, "A100", "6a2b", f"{MIG},x", MIG),
    (0, "A100 MIG 1g", "6a2b", "1", "1"), (0, "A100 MIG 1g.5gb", "6a2b", None, None),
])  # fmt: skip
def test_a_trial_sees_the_device_of_its_rank(
    index: int, name: str, uuid: str, given: str | None, expected: str | None
) -> None:
    """Selected by UUID, also under Ray, whose workers see one card as number 0, and for partitions of a card."""
    assert trial.visible(index, name, uuid, given) == expected


def test_the_process_of_a_trial_is_started_on_that_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = SimpleNamespace(name="RTX PRO 6000", uuid="11-22")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card if index == 3 else None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script, told = tmp_path / "told.py", tmp_path / "told"
    script.write_text(f"import os\nopen({str(told)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    trial.gather(TRIED, 30.0, (sys.executable, str(script)))
    assert told.read_text() == "GPU-11-22"


def test_the_key_of_evidence_has_the_card_the_sources_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        name="RTX PRO 6000", uuid="11-22", major=12, minor=0, multi_processor_count=188, total_memory=96
    )
    limits = {"GPU-11-22": 600_000}
    nvml = ModuleType("pynvml")
    vars(nvml).update(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str, nvmlDeviceGetPowerManagementLimit=limits.__getitem__
    )
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.third_party", SimpleNamespace(pynvml=nvml))  # type: ignore[arg-type]
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("VLLM_PORT", "1234")
    found = trial.machine()
    assert found["power limit"] == "600 W"
    assert found["VLLM_USE_DEEP_GEMM"] == "0"
    assert "VLLM_PORT" not in found, "it differs at every start"
    assert len(found["sources"]) == 64
    card.uuid = "33-44"
    assert trial.machine().get("power limit") is None, "a card that NVML does not know"


def test_the_hash_of_the_sources_changes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trial.sources.cache_clear()
    before = trial.sources()
    trial.sources.cache_clear()
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda self: b"another kernel")
    assert trial.sources() != before
    trial.sources.cache_clear()
