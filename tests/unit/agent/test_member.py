"""Periodic tasks of a member."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent import context, member
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.waiting import free_ports, until

MakePlan = Callable[..., GroupPlan]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(member, "_LOG_BYTES", 1000)


@pytest.mark.usefixtures("quick")
async def test_logs_are_kept_small(make_plan: MakePlan, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("line\n" * 1000)
    keeping = asyncio.create_task(Member(make_plan(), 1, tmp_path, "token")._keep_logs_small())
    await until(lambda: log.stat().st_size == 0)
    assert 0 < log.with_name("agent.log.1").stat().st_size <= 500
    keeping.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_disk_that_does_not_answer_blocks_no_other_task(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), []

    def bound(path: Path, _: int) -> None:
        asked.append(path)
        answers.wait(300)

    monkeypatch.setattr(member, "bound", bound)
    keeping = asyncio.create_task(Member(make_plan(), 1, tmp_path, "token")._keep_logs_small())
    await until(lambda: bool(asked))
    begun = time.monotonic()
    await asyncio.sleep(0.3)
    assert time.monotonic() - begun < 60
    assert len(asked) == 1, "nobody asks again before there is an answer"
    keeping.cancel()
    answers.set()


async def test_the_search_for_remains_of_an_engine_is_bounded(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not answer for the maps of a process that waits for a device while it changes them."""
    answers = threading.Event()
    monkeypatch.setattr(context, "sweep", lambda since: answers.wait(300) and [])
    monkeypatch.setattr(context, "_SWEEP_SECONDS", 0.1)
    begun = time.monotonic()
    await Member(make_plan(), 1, tmp_path, "token").context.sweep()
    assert time.monotonic() - begun < 60
    answers.set()


async def test_a_search_for_remains_that_fails_ends_no_recovery(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Member(make_plan(), 1, tmp_path, "token").context
    monkeypatch.setattr("dsv4_runtime.agent.cleanup.SHM", tmp_path / "missing")
    await mine.sweep()
    assert "unused files of the engine may remain" in caplog.text


# A task that ends with its second cancellation only, as one that waits for a killed process in the kernel.
STUCK = """
import asyncio, sys
from pathlib import Path
from dsv4_runtime.agent.decide.events import Task
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan

async def stuck():
    try:
        await asyncio.sleep(300)
    finally:
        await asyncio.sleep(300)

async def main():
    plan = GroupPlan.model_validate_json(Path(sys.argv[1]).read_text())
    member, stop = Member(plan, 0, Path(sys.argv[2]), "token"), asyncio.Event()
    running = asyncio.create_task(member.run(stop))
    await asyncio.sleep(0.5)
    member.context.tasks.start(Task.SCRUB, stuck())
    await asyncio.sleep(0.2)
    stop.set()
    await running

asyncio.run(main())
"""


def test_a_task_that_cannot_end_does_not_keep_the_agent(make_plan: MakePlan, tmp_path: Path) -> None:
    # The usual ports may be those of another agent on this machine.
    members = []
    for member_plan in make_plan().members:
        names = [name for name, port in member_plan.ports if port is not None]
        ports = member_plan.ports.model_copy(update=dict(zip(names, free_ports(len(names)), strict=True)))
        members.append(member_plan.model_copy(update={"ports": ports}))
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan(members=tuple(members)).to_json())
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, plan, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


async def test_a_removed_socket_of_retained_weights_is_made_again(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would collect the exit codes of this process's other children.
    monkeypatch.setattr(member, "reap_orphans", lambda own: None)
    plan = make_plan()
    plan = plan.model_copy(update={"engine": plan.engine.model_copy(update={"retain_weights": True})})
    made = Member(plan, 1, tmp_path, "token")
    keeper = made.context.keeper
    assert keeper is not None
    assert made.context.env["DSV4_WEIGHTS_KEEPER"] == str(keeper.path)
    keeper.path.unlink()
    keeping = asyncio.create_task(made._maintain_processes())
    await until(keeper.path.exists, 20)
    keeping.cancel()
    keeper.close()


@pytest.mark.usefixtures("quick")
async def test_an_error_of_the_system_does_not_stop_the_maintenance_of_processes_and_logs(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def fail(what: str) -> None:
        calls[what] += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(member, "reap_orphans", lambda own: fail("processes"))
    monkeypatch.setattr(member, "bound", lambda path, most: fail("logs"))
    made = Member(make_plan(), 1, tmp_path, "token")
    tasks = [asyncio.create_task(made._maintain_processes()), asyncio.create_task(made._keep_logs_small())]
    try:
        await until(lambda: min(calls["processes"], calls["logs"]) >= 2, 60)
    finally:
        for task in tasks:
            task.cancel()
