"""Staging by the agent: separate processes, progress reports, causes, and bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from dsv4_runtime.agent import staging
from dsv4_runtime.agent.decide.events import Staged, Task, TaskFailed, WeightsRead
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.staging import StagingError, prepare_page_cache, read_again, stage
from dsv4_runtime.contract import (
    Cause,
    GroupPlan,
    PageCache,
    WeightsPlan,
    WeightsSource,
)
from dsv4_runtime.contract.plan import OUTSIDE_NETWORK
from dsv4_runtime.util.procfs import ChildLine
from dsv4_runtime.weights import writer
from dsv4_runtime.weights.members import StagingReport
from dsv4_testkit.documents import group_plan
from dsv4_testkit.waiting import until
from dsv4_testkit.weights_servers import FileServer, Server, cached_share, same_files, write_shard

Serve = Callable[[web.Application], Server]


def group(weights: WeightsPlan) -> GroupPlan:
    return group_plan(["127.0.0.1"], weights=weights)


@pytest.fixture
def files(checkpoint: Path) -> FileServer:
    return FileServer(checkpoint)


@pytest.fixture
def plan(files: FileServer, serve: Serve, tmp_path: Path) -> GroupPlan:
    return group_plan(
        ["127.0.0.1"],
        weights=WeightsPlan(source=WeightsSource.HTTP, path=str(tmp_path / "weights"), origin=serve(files.app).url),
    )


async def test_a_stopped_process_is_replaced_within_seconds_and_goes_on(plan: GroupPlan, files: FileServer) -> None:
    files.pace = 4e6
    known: set[int] = set()
    stopped = 0.0
    news: list[StagingReport] = []

    def staging_process() -> int | None:
        for child in psutil.Process().children():
            # A killed one is a zombie for a moment.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "dsv4_runtime.weights.main" in child.cmdline() and child.pid not in known:
                    return child.pid
        return None

    work = asyncio.create_task(stage(plan, 0, "t", news.append))
    async with asyncio.timeout(60):
        while not any(entry.fetched for entry in news) or (first := staging_process()) is None:
            await asyncio.sleep(0.05)
        known.add(first)
        os.kill(first, signal.SIGSTOP)
        stopped = time.monotonic()
        while staging_process() is None:
            await asyncio.sleep(0.05)
    assert time.monotonic() - stopped <= 45
    files.pace = 1e9
    await work
    assert same_files(files.folder, Path(plan.weights.path))
    assert not psutil.pid_exists(first)


async def test_progress_reaches_the_agent_and_a_restart_is_fast(
    plan: GroupPlan, files: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    # Slow enough for several reports, until the first one with a rate.
    files.pace = 1e6
    news: list[StagingReport] = []

    def keep(entry: StagingReport) -> None:
        news.append(entry)
        if "MB/s from 127.0.0.1" in (entry.stage or ""):
            files.pace = 1e9

    await stage(plan, 0, "t", keep)
    assert same_files(files.folder, Path(plan.weights.path))
    percents = [entry.percent for entry in news if entry.percent is not None]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert any("MB/s from 127.0.0.1" in (entry.stage or "") for entry in news)
    asked, begun = len(files.requests), time.monotonic()
    await stage(plan, 0, "t", news.append)
    assert time.monotonic() - begun < 60
    assert (news[-1].stage, news[-1].fetched, len(files.requests)) == ("complete, nothing to fetch", 0, asked)
    caplog.set_level("INFO")
    await prepare_page_cache(plan, 0, lambda _: None)
    assert "read ahead 9.9 MB of 9.9 MB" in caplog.text


_STAGE = """
import asyncio, sys
from dsv4_runtime.agent.staging import StagingError, stage
from dsv4_runtime.contract import GroupPlan
try:
    asyncio.run(stage(GroupPlan.model_validate_json(sys.stdin.read()), 0, "t", lambda _: None))
except StagingError as error:
    sys.exit(str(error))
"""


def test_an_agent_in_a_private_network_fetches_over_that_of_the_machine(plan: GroupPlan, files: FileServer) -> None:
    """As a member of `dsv4 up`, whose network leads to the other members alone."""
    if (tried := subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(tried.stderr)
    with open("/proc/self/ns/net", "rb") as outside:
        done = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", _STAGE],
            input=plan.to_json(),
            pass_fds=[outside.fileno()],
            env={**os.environ, OUTSIDE_NETWORK: str(outside.fileno())},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert same_files(files.folder, Path(plan.weights.path))


async def test_causes_reach_the_agent(plan: GroupPlan, files: FileServer, tmp_path: Path) -> None:
    files.damage["model-00001-of-00003.safetensors"] = 99
    with pytest.raises(StagingError, match="model-00001-of-00003") as caught:
        await stage(plan, 0, "t", lambda _: None)
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT
    with pytest.raises(StagingError, match=r"has no config\.json") as caught:
        await stage(
            group(WeightsPlan(source=WeightsSource.PATH, path=str(tmp_path))),
            0,
            "t",
            lambda _: None,
        )
    assert caught.value.cause is Cause.STAGING_FAILED


async def test_the_token_of_a_source_is_nowhere_but_in_its_file_and_in_requests(
    plan: GroupPlan,
    files: FileServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A marked token is sent to the source, which accepts it, cuts transfers and refuses it; outputs are searched."""
    canary = "hf_canaryOfTheSource7f3acanaryOfTheSource"
    secret = tmp_path / "secret" / "token"
    secret.parent.mkdir()
    secret.write_text(canary)
    given = group(plan.weights.model_copy(update={"credentials_file": str(secret)}))
    caplog.set_level("DEBUG")
    seen: set[str | None] = set()
    commands: set[str] = set()

    def answer(request: web.Request) -> web.Response | None:
        seen.add(request.headers.get("Authorization"))
        own = psutil.Process()
        for one in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.add(" ".join(one.cmdline()))
        refuses = "00003" in request.path
        return web.Response(status=403, text=f"{canary} may not") if refuses else None

    files.answer, files.cut_after = answer, 1_500_000
    news: list[StagingReport] = []
    with pytest.raises(StagingError) as refusal:
        await stage(given, 0, "t", news.append)
    assert seen == {f"Bearer {canary}"}
    assert any("dsv4_runtime.weights.main" in command for command in commands)
    out, err = capfd.readouterr()
    told = [given.to_json(), str(refusal.value), caplog.text, out, err, *commands, *(one.to_json() for one in news)]
    assert [text for text in told if canary in text] == []
    there = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    assert there
    assert [path for path in there if canary.encode() in path.read_bytes()] == []


async def test_a_staging_that_takes_too_long_ends_with_its_process(plan: GroupPlan, files: FileServer) -> None:
    files.pace = 0.5e6
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stage(plan, 0, "t", lambda _: None), 2)
    left = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            left += [word for word in child.cmdline() if word == "dsv4_runtime.weights.main"]
    assert left == []


async def test_where_memory_is_shared_files_leave_the_page_cache_during_the_load(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4_runtime.agent.staging._GUARD_SECONDS", 0.05)
    monkeypatch.setattr("dsv4_runtime.weights.writer.FLOOR_BYTES", 1 << 60)
    os.sync()
    shard = checkpoint / "model-00001-of-00003.safetensors"
    shard.read_bytes()
    assert cached_share(shard) > 0.99
    weights = WeightsPlan(source=WeightsSource.PATH, path=str(checkpoint), page_cache=PageCache.UNIFIED, prefetch=False)
    guarding = asyncio.create_task(prepare_page_cache(group(weights), 0, lambda _: None))
    await until(lambda: cached_share(shard) < 0.05)
    assert not guarding.done()
    guarding.cancel()
    await asyncio.gather(guarding, return_exceptions=True)


async def test_a_disk_is_measured_while_the_files_come_from_it(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", 80_000_000, "t", 0)
    os.sync()
    plan = group_plan(
        ["127.0.0.1"], weights=WeightsPlan(source=WeightsSource.PATH, path=str(tmp_path), page_cache=PageCache.WARM)
    )
    writer.drop([tmp_path / "a.safetensors"])
    cold: list[StagingReport] = []
    begun = time.monotonic()
    await prepare_page_cache(plan, 0, cold.append)
    rate = cold[-1].disk_bytes_per_second
    assert rate is not None
    assert rate > 80_000_000 / (time.monotonic() - begun)
    cached: list[StagingReport] = []
    await prepare_page_cache(plan, 0, cached.append)
    assert {news.disk_bytes_per_second for news in cached} == {None}


async def test_the_page_cache_never_fails_a_start(tmp_path: Path) -> None:
    weights = WeightsPlan(source=WeightsSource.PATH, path=str(tmp_path / "none"), page_cache=PageCache.WARM)
    await prepare_page_cache(group(weights), 0, lambda _: None)


def test_the_agent_loads_no_client_library_and_stays_small() -> None:
    code = (
        "import sys, psutil, dsv4_runtime.agent.main, dsv4_runtime.weights.members\n"
        "heavy = {'boto3', 'botocore', 'huggingface_hub', 'requests', 'torch', 'numpy', 'ray', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)), psutil.Process().memory_info().rss >> 20)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    loaded, size = output.rsplit(" ", 1)
    assert loaded == "[]"
    assert int(size) <= 80
    print(f"agent: {size.strip()} MiB after its imports")


async def test_a_member_shows_how_far_it_is_and_why_it_cannot(
    plan: GroupPlan, files: FileServer, tmp_path: Path
) -> None:
    plan = plan.model_copy(update={"timeouts": plan.timeouts.model_copy(update={"staging": 60.0})})
    (tmp_path / "member").mkdir()
    member = Member(plan, 0, tmp_path / "member", "token")
    files.damage["model-00003-of-00003.safetensors"] = 99
    found = await member.start.stage()
    assert isinstance(found, TaskFailed)
    assert "model-00003" in found.message
    assert (found.cause, found.detected_by) == (Cause.WEIGHTS_CORRUPT, "staging")
    files.damage.clear()
    assert await member.start.stage() == Staged()
    assert member.status().progress is not None
    assert member.status().progress.percent == 100  # type: ignore[union-attr]
    app = web.Application()
    member.share.add_to(app)
    assert {"/v1/weights", "/v1/weights/manifest"} <= {
        route.resource.canonical for route in app.router.routes() if route.resource
    }
    for child in member.context.children:
        await child.end(0.0)


async def test_a_wrong_file_is_reported_by_a_separate_process(plan: GroupPlan, tmp_path: Path) -> None:
    await stage(plan, 0, "t", lambda _: None)
    (tmp_path / "member").mkdir()
    member = Member(plan, 0, tmp_path / "member", "token")
    reading = asyncio.create_task(member.start.scrub())
    await asyncio.sleep(2)
    assert not reading.done(), "all files are right"
    assert await member.start.verify() == WeightsRead(Task.VERIFY)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    shard = Path(plan.weights.path) / "model-00001-of-00003.safetensors"
    with shard.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    async with asyncio.timeout(60):
        found = await member.start.scrub()
    assert isinstance(found, TaskFailed)
    assert (found.cause, found.detected_by) == (Cause.WEIGHTS_CORRUPT, "staging")
    assert f"{shard.name} in {plan.weights.path} of rank 0" in found.message
    assert await member.start.verify() == replace(found, task=Task.VERIFY)


async def test_a_long_line_of_a_library_does_not_end_the_staging(
    plan: GroupPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('print("x" * 200_000)\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))
    done = await stage(plan, 0, "token", lambda _: None)
    assert done.percent == 100


async def test_the_end_of_a_killed_scrub_is_logged(plan: GroupPlan, caplog: pytest.LogCaptureFixture) -> None:
    await stage(plan, 0, "token", lambda _: None)

    def kill(news: StagingReport) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "scrub" in child.cmdline():
                    child.kill()

    done = await read_again("scrub", plan, 0, kill)
    assert not done.wrong
    assert "the scrub of the weights ended with exit code -9" in caplog.text


async def test_a_scrub_without_a_free_descriptor_is_tried_again(
    plan: GroupPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await stage(plan, 0, "token", lambda _: None)
    begun: list[None] = []

    def without_descriptors() -> ChildLine:
        begun.append(None)
        if len(begun) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ChildLine()

    monkeypatch.setattr(staging, "ChildLine", without_descriptors)
    monkeypatch.setattr(staging, "_AGAIN_SECONDS", 0.01)
    done = await read_again("verify", plan, 0, lambda _: None)
    assert done.verified
    assert caplog.text.count("cannot be started, which is tried again: [Errno 24]") == 2
