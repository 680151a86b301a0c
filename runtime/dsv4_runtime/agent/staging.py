"""Weights of this member: generated, fetched, or found; and the page cache before the load.

The work runs in processes of its own: torch and the client libraries of hubs and stores would cost the agent memory,
and a transfer that hangs can be killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from dsv4_runtime.agent.context import run_in_daemon_thread
from dsv4_runtime.agent.processes import waited_for
from dsv4_runtime.contract import Cause, GroupPlan, PageCache, WeightsPlan, WeightsSource
from dsv4_runtime.contract.plan import OUTSIDE_NETWORK
from dsv4_runtime.nano.checkpoint import DAMAGED
from dsv4_runtime.util.procfs import ANSWER_SECONDS, PROBE_SECONDS, ChildLine
from dsv4_runtime.weights import store, writer
from dsv4_runtime.weights.members import StagingJob, StagingReport

_log = logging.getLogger(__name__)
_GUARD_SECONDS = 2.0
# Of a process that reads or fetches the weights, replacements of a hung one included.
_ATTEMPTS = 3
_REPLACE_SECONDS = 5.0
_AGAIN_SECONDS = 10.0
_MISSING_ANSWERS = 2
_LINE_BYTES = 16 << 20
# Dropped files return to the cache as they are read: dropping them again at once would only slow the load down.
_GUARD_PAUSE_SECONDS = 10.0


class StagingError(Exception):
    """The weights are missing and cannot be fetched; the text contains the reason and the remedy."""

    def __init__(self, message: str, cause: Cause = Cause.STAGING_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


async def stage(plan: GroupPlan, rank: int, token: str, report: Callable[[StagingReport], None]) -> StagingReport:
    """Make sure that `weights.path` contains a complete checkpoint, and return the last report.

    `token` opens the files of the other members; `report` is called with every progress report.

    Raises:
        StagingError: the checkpoint is missing and cannot be fetched.
    """
    if plan.weights.source is WeightsSource.NANO:
        return await _make_nano(plan.weights)
    last = StagingReport()

    def keep(news: StagingReport) -> None:
        nonlocal last
        last = news
        report(news)

    code = await _run("stage", _job(plan, rank, token), keep)
    if last.error is not None:
        raise StagingError(last.error, last.cause or Cause.STAGING_FAILED)
    if code != 0:
        raise StagingError(f"the process that stages the weights ended with exit code {code}; its log is the agent's")
    _log.info("weights in %s: %s", plan.weights.path, last.stage)
    return last


async def prepare_page_cache(plan: GroupPlan, rank: int, report: Callable[[StagingReport], None]) -> None:
    """Read the weights of this member's ranks into the page cache; with unified memory, keep enough of it free.

    Runs during the formation of the group and never fails a start. `report` is called with every progress report.
    """
    weights = plan.weights

    def keep(news: StagingReport) -> None:
        _log.info("weights: %s", news.stage)
        report(news)

    try:
        if weights.prefetch:
            await _run("prefetch", _job(plan, rank, ""), keep)
        if weights.page_cache is PageCache.UNIFIED:
            await _keep_free(Path(weights.path))
    except Exception:
        _log.exception("the page cache stays as it is")


async def read_again(how: str, plan: GroupPlan, rank: int, report: Callable[[StagingReport], None]) -> StagingReport:
    """Read the checkpoint again: `scrub` slowly until a file is wrong, `verify` once at full speed. Return the last
    report.

    `report` is called after every complete pass without a wrong file. A process that cannot be started, for example for
    lack of descriptors, is no result about the files: it is tried again.
    """
    last = StagingReport()

    def keep(news: StagingReport) -> None:
        nonlocal last
        last = news
        report(news)

    while True:
        try:
            code = await _run(how, _job(plan, rank, ""), keep)
            break
        except OSError as error:
            _log.warning("the %s of the weights cannot be started, which is tried again: %s", how, error)
        await asyncio.sleep(_AGAIN_SECONDS)
    if code != 0:
        _log.warning("the %s of the weights ended with exit code %s: its log is the agent's", how, code)
    return last


async def _keep_free(folder: Path) -> None:
    while True:
        await asyncio.sleep(_GUARD_SECONDS)
        # A file server that does not answer must not keep the agent from its end.
        if await run_in_daemon_thread(writer.keep_free, folder):
            await asyncio.sleep(_GUARD_PAUSE_SECONDS)


def _job(plan: GroupPlan, rank: int, token: str) -> StagingJob:
    first = sum(member.devices for member in plan.members[:rank])
    last = first + plan.members[rank].devices - 1
    count = plan.weights.pipeline_stages
    per_stage = max(1, plan.expectations.world_size // count)
    return StagingJob(
        weights=plan.weights,
        rank=rank,
        # Not reachable from the machine's network; their files are in the same directory.
        members={}
        if OUTSIDE_NETWORK in os.environ
        else {
            member.rank: f"http://{member.address}:{member.ports.agent}"
            for member in plan.members
            if member.rank != rank
        },
        token=token,
        resident_bytes=plan.expectations.memory_bytes,
        stages=(first // per_stage, last // per_stage, count),
    )


async def _run(what: str, job: StagingJob, report: Callable[[StagingReport], None]) -> int:
    """Run one job to its end and return its exit code; replace a process that hangs, without loss of finished files."""
    for attempt in range(_ATTEMPTS):
        code, hung = await _run_once(what, job, report)
        if not hung or attempt + 1 == _ATTEMPTS:
            break
        _log.warning("the %s process of the weights neither answers nor works; it is replaced", what)
        await asyncio.sleep(_REPLACE_SECONDS * attempt)
    return code


async def _run_once(what: str, job: StagingJob, report: Callable[[StagingReport], None]) -> tuple[int, bool]:
    """Run a process for the job; return its exit code, and whether it was killed because it hung.

    Its input stays open meanwhile, because the process ends at the end of its input.
    """
    line = ChildLine()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "dsv4_runtime.weights.main", what),
            stdin=line.stdin.fileno(),
            stdout=asyncio.subprocess.PIPE,
            # A library may write a long line of its own.
            limit=_LINE_BYTES,
            # With cached bytecode the process starts in half the time.
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            pass_fds=[int(outside)] if (outside := os.environ.get(OUTSIDE_NETWORK)) else [],
        )
    except BaseException:
        line.close()
        raise
    finally:
        line.opened()
    assert process.stdout is not None  # noqa: S101  (a pipe, see above)
    probing = asyncio.create_task(_kill_if_hung(process, line))
    with waited_for(process.pid):
        try:
            line.send(f"{job.to_json()}\n".encode())
            async for text in process.stdout:
                try:
                    report(StagingReport.model_validate_json(text))
                except ValidationError:
                    _log.warning("weights: %s", text.decode(errors="replace").strip())
            code = await process.wait()
            return code, code == -signal.SIGKILL and probing.done()
        finally:
            probing.cancel()
            line.close()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _kill_if_hung(process: asyncio.subprocess.Process, line: ChildLine) -> None:
    """Probe the process; kill it and return after two missing answers in a row."""
    missing = 0
    while missing < _MISSING_ANSWERS:
        await asyncio.sleep(PROBE_SECONDS / 2)
        missing = 0 if await line.alive(process.pid, ANSWER_SECONDS / 2) else missing + 1
    if process.returncode is None:
        process.kill()


async def _make_nano(weights: WeightsPlan) -> StagingReport:
    """Generate the nano checkpoint, once for members that share a disk, because its generator takes a lock."""
    command = [sys.executable, "-m", "dsv4_runtime.nano.checkpoint", weights.path]
    command += ["--seed", str(weights.seed or 0), "--precision", weights.precision or "bf16"]
    command += ["--drafts", weights.drafts or "none"]
    folder = Path(weights.path)
    doubted = store.recheck_reason(folder) is not None
    if doubted:
        command.append("--verify")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    with waited_for(process.pid):
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        raise StagingError(
            f"the nano checkpoint could not be made in {weights.path!r}: {lines[-1] if lines else 'no output'}"
        )
    store.clear_recheck(folder)
    wrong = tuple(line.removeprefix(DAMAGED) for line in lines if line.startswith(DAMAGED))
    return StagingReport(stage="made" if wrong else "complete", verified=doubted, wrong=wrong)
