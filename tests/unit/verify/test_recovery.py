"""`dsv4 bench recovery`: figures, budget, confirmation, signals to real processes. `tests/engine` has real engines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import (
    DeploymentPhase,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    MemberStatus,
    load,
)
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import recovery
from dsv4_operator.cli.main import run as command_line
from dsv4_operator.cli.output import CommandError, DocumentFormat, ExitCode
from dsv4_operator.cli.processes import signal_member
from dsv4_operator.cli.recovery import FAULTS, RecoveryOptions, Strike, outage
from dsv4_operator.cli.report import setup_report
from dsv4_operator.cli.report_fields import RecoveryRow, RecoveryStrike
from dsv4_operator.cli.sources.base import DeploymentView, ServiceAccess
from dsv4_runtime.contract import Cause, Process
from dsv4_testkit.openai_server import Engine, serving

MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: m}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
  recovery: {maxRestarts: 7, backoff: {base: 0s, max: 0s}}
"""
REPAIR_SECONDS = 1.0


class Scripted:
    """A source of one deployment, whose engine does not respond for a second after a signal."""

    poll_seconds = 0.05

    def __init__(self, engine: Engine, url: str, *, repairs: bool = True, loses: bool = False) -> None:
        self.engine, self.url, self.repairs, self.loses = engine, url, repairs, loses
        self.struck: list[tuple[int, Process, signal.Signals]] = []
        self.history: list[FailureStatus] = []
        self.until = 0.0

    def get(self, name: str | None) -> DeploymentView:
        now = time.time()
        if self.until and now > self.until and self.repairs:
            self.until, self.engine.fail_after = 0.0, None
            last = self.history[-1]
            self.history[-1] = last.model_copy(update={"recover_seconds": now - last.time})
        processes = (Process(name="engine-core", pid=7), Process(name="worker", pid=8), Process(name="api", pid=9))
        group = GroupStatus(
            phase=GroupPhase.RESTARTING if self.until else GroupPhase.SERVING,
            members=tuple(MemberStatus(rank=rank, processes=processes) for rank in (0, 1)),
            restarts=tuple(each.time for each in self.history),
            total_restarts=len(self.history),
            history=tuple(self.history),
        )
        phase = DeploymentPhase.RECOVERING if self.until else DeploymentPhase.SERVING
        status = DeploymentStatus(phase=phase, ready_replicas=1, endpoint=self.url, groups=(group,))
        return DeploymentView(load(MANIFEST).model_copy(update={"status": status}), True, 0.0)

    @contextlib.contextmanager
    def api(self, item: DeploymentView) -> Iterator[ServiceAccess]:
        yield ServiceAccess(lambda: self.url, "", permanent=True)

    def command_line(self, verb: str, name: str = "") -> str:
        return f"dsv4 {verb} {name}"

    def strike(
        self, item: DeploymentView, group: GroupStatus, rank: int, process: Process, number: signal.Signals
    ) -> float:
        now = time.time()
        self.struck.append((rank, process, number))
        if number is not signal.SIGCONT:
            hung = number is signal.SIGSTOP
            cause = Cause.ENGINE_HUNG if hung else Cause.ENGINE_CORE_DIED
            self.history.append(FailureStatus(time=now + 0.25, cause=cause, level=1, culprit_rank=rank))
            self.until = now + REPAIR_SECONDS
            if self.loses:
                self.engine.fail_after = self.engine.requests
        return now


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_SETTLE_SECONDS", (0.0, 0.1))
    monkeypatch.setattr(recovery, "_POLL_SECONDS", 0.02)


def options(**fields: Any) -> RecoveryOptions:
    fields = {"recovery_seconds": 120.0, **fields}
    return RecoveryOptions(yes=True, form=DocumentFormat.JSON, clients=2, **fields)


def measured(source: Any, capsys: pytest.CaptureFixture[str], code: int = 0, **fields: Any) -> dict[str, Any]:
    assert recovery.run(source, "nano", options(**fields)) == code
    return dict(json.loads(capsys.readouterr().out))


def test_each_fault_is_measured_and_no_request_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine := Engine()) as url:
        source = Scripted(engine, url)
        found = measured(source, capsys, repeat=2)
    assert [(each["fault"], each["repetitions"], each["lost"]) for each in found["runs"]] == [
        ("kill-engine", 2, 0),
        ("stop-engine", 2, 0),
    ]
    assert [number for _, _, number in source.struck] == [signal.SIGKILL, signal.SIGSTOP] * 2
    kill, stop = found["runs"]
    assert (kill["causes"], stop["causes"]) == ({"EngineCoreDied": 2}, {"EngineHung": 2})
    for each in found["runs"]:
        assert each["detectSeconds"] == pytest.approx(0.25, abs=0.01)
        assert REPAIR_SECONDS - 0.01 < each["recoverSeconds"] < 60
        assert each["requests"] >= 4
        assert each["restarts"] == 2
        assert set(each["spread"]) == {"detectSeconds", "recoverSeconds", "outageSeconds"}
    # Neither prompts nor addresses.
    assert "127.0.0.1" not in json.dumps(found)


def test_lost_requests_are_counted_and_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine := Engine()) as url:
        found = measured(Scripted(engine, url, loses=True), capsys, 1, repeat=1, faults=("kill-worker",))
    [row] = found["runs"]
    assert row["lost"] >= 2
    assert 0.1 < row["outageSeconds"] < 60
    assert row["samples"][0]["rank"] == 1, "of the last rank"


def test_without_a_recovery_the_process_is_continued_and_the_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine := Engine()) as url:
        source = Scripted(engine, url, repairs=False)
        with pytest.raises(CommandError, match="no recovery from stop-engine"):
            recovery.run(source, "nano", options(repeat=1, faults=("stop-engine",), recovery_seconds=0.5))  # type: ignore[arg-type]
    assert [number for _, _, number in source.struck] == [signal.SIGSTOP, signal.SIGCONT]


def test_the_results_before_an_error_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = 0.0
    clock = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() + later)
    monkeypatch.setattr(recovery, "time", clock)
    with serving(engine := Engine()) as url:
        source = Scripted(engine, url)
        strike = source.strike

        def last(*given: Any) -> float:
            nonlocal later
            # The limit is reached under the second fault, however long the first one takes.
            later = 3600.0 if source.struck else 0.0
            return strike(*given)

        source.strike = last  # type: ignore[method-assign]
        found = measured(source, capsys, ExitCode.UNCERTAIN, repeat=2, total_seconds=3600.0)
    assert 1 <= sum(each["repetitions"] for each in found["runs"]) < 4


def test_a_run_leaves_a_restart_of_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine := Engine()) as url:
        source = Scripted(engine, url)
        with pytest.raises(CommandError, match=r"has 7 left .* choose at most 6 faults") as caught:
            recovery.run(source, "nano", options(repeat=4))  # type: ignore[arg-type]
        assert caught.value.code is ExitCode.BAD_INPUT
        assert source.struck == []
        # The deployment's own failures during the run leave less budget than planned.
        strike = source.strike

        def twice(*given: Any) -> float:
            struck = strike(*given)
            source.history.insert(0, source.history[0].model_copy(update={"time": struck - 1, "recover_seconds": 1.0}))
            return struck

        source.strike = twice  # type: ignore[method-assign]
        found = measured(source, capsys, ExitCode.UNCERTAIN, repeat=5, faults=("kill-engine",))
    assert found["runs"][0]["repetitions"] == 3, "with 7 restarts, two for each fault: the last one is not used"


def test_the_measurement_requires_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine := Engine()) as url:
        source = Scripted(engine, url)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
        with pytest.raises(CommandError, match="add --yes"):
            recovery.run(source, "nano", replace(options(), yes=False))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
        with pytest.raises(CommandError, match="nothing was done"):
            recovery.run(source, "nano", replace(options(), yes=False))  # type: ignore[arg-type]
        assert source.struck == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--fault", "unplug"], "--fault 'unplug' is unknown; use one of kill-engine"),
        (["--repeat", "0"], "Invalid value for '--repeat'"),
        (["absent", "--yes"], "there is no deployment 'absent'"),
    ],
)
def test_wrong_options(words: Sequence[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "recovery", *words, "--state-dir", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


def test_a_deployment_called_recovery_can_be_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--quick", "recovery", "--state-dir", str(tmp_path)]) == 2
    assert "there is no deployment 'recovery'" in capsys.readouterr().err


@given(st.lists(st.floats(0, 1000), max_size=20), st.floats(0, 1000))
def test_the_outage_is_the_longest_time_without_an_answer(answers: list[float], struck: float) -> None:
    found = outage(answers, struck)
    later = sorted(each for each in answers if each > struck)
    if not later:
        assert found is None
        return
    assert found is not None
    end = struck + found
    number = min(range(len(later)), key=lambda each: abs(later[each] - end))
    assert math.isclose(later[number], end)
    gaps = [each - before for before, each in pairwise([struck, *later])]
    assert max(gaps) <= gaps[number] + 1e-9


def test_fields_of_a_report() -> None:
    """A renamed field would be missing without an error."""
    sample = Strike(
        cause="EngineHung",
        level=1,
        rank=0,
        detect_seconds=2,
        recover_seconds=20,
        outage_seconds=21,
        restarts=1,
        requests=40,
        lost=1,
    )
    row = recovery.row("stop-engine", [sample, sample])
    written = row.model_dump(by_alias=True)
    assert {field.alias or name for name, field in RecoveryRow.model_fields.items()} <= set(written)
    assert {field.alias or name for name, field in RecoveryStrike.model_fields.items()} <= set(written["samples"][0])
    with serving(engine := Engine()) as url:
        item = Scripted(engine, url).get(None)
    document = setup_report(item, time.time(), recovery={"clients": 4, "runs": [written]}).to_dict()
    [found] = document["recovery"]["runs"]
    assert (found["fault"], found["lost"], found["samples"][0]["cause"]) == ("stop-engine", 2, "EngineHung")
    assert [fault.name for fault in FAULTS if fault.last] == ["kill-worker", "stop-worker"]


SLEEP = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"])
"""


@contextlib.contextmanager
def member(state: DeploymentState, *prefix: str, incarnation: int = 3, rank: int = 0) -> Iterator[psutil.Process]:
    """Run a stand-in for an agent; yield the process below it."""
    words = [*prefix, sys.executable, "-c", SLEEP, "--directory", str(state.member(incarnation, rank))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout
            assert agent.stdout.readline() == "1\n"
            yield psutil.Process(agent.pid).children(recursive=True)[-1]
        finally:
            for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                process.kill()


def test_only_processes_of_the_member_get_a_signal(tmp_path: Path) -> None:
    state, group = DeploymentState(tmp_path, "nano"), GroupStatus(incarnation=3)
    others = ((state, 30, 0), (state, 3, 1), (DeploymentState(tmp_path, "nan"), 3, 0))
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(member(state))
        strangers = [stack.enter_context(member(one, incarnation=i, rank=rank)) for one, i, rank in others]
        for stranger in (*(each.pid for each in strangers), os.getpid(), 2**22 + 1):
            assert signal_member(state, group, 0, stranger, signal.SIGKILL) is None
        before = time.time()
        struck = signal_member(state, group, 0, own.pid, signal.SIGKILL)
        assert struck is not None
        assert before <= struck <= time.time()
        psutil.wait_procs([own], 60)
        assert not own.is_running()
        assert all(each.is_running() for each in strangers)


def test_a_process_by_its_number_in_the_namespace_of_its_member(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process namespaces")
    state, group = DeploymentState(tmp_path, "nano"), GroupStatus(incarnation=3)
    with member(state, *unshare) as inner:
        assert signal_member(state, group, 0, 2, signal.SIGKILL) is not None
        psutil.wait_procs([inner], 5)
        assert not inner.is_running()
