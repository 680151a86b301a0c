"""Periodic tasks of a member."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_runtime.agent import member
from dsv4_runtime.agent.member import Member
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.waiting import until

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
    await until(lambda: log.stat().st_size == 0, 20)
    assert 0 < log.with_name("agent.log.1").stat().st_size <= 500
    keeping.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_disk_that_does_not_answer_blocks_no_other_task(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), []

    def bound(path: Path, _: int) -> None:
        asked.append(path)
        answers.wait(30)

    monkeypatch.setattr(member, "bound", bound)
    keeping = asyncio.create_task(Member(make_plan(), 1, tmp_path, "token")._keep_logs_small())
    await until(lambda: bool(asked), 20)
    begun = time.monotonic()
    await asyncio.sleep(0.3)
    assert time.monotonic() - begun < 10
    assert len(asked) == 1, "nobody asks again before there is an answer"
    keeping.cancel()
    answers.set()
