"""`python -m dsv4_runtime.weights.main stage|prefetch|scrub|verify`: work outside the agent's process and memory.

Reads a `StagingJob` as the first line of stdin, answers the agent's probes there, writes `StagingReport` lines, and
exits at the end of stdin, so that it never outlives the agent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dsv4_runtime.contract import Cause, PageCache
from dsv4_runtime.contract.plan import OUTSIDE_NETWORK
from dsv4_runtime.util.procfs import input_lines
from dsv4_runtime.weights import checkpoint, writer
from dsv4_runtime.weights.checkpoint import WeightsError
from dsv4_runtime.weights.members import StagingJob, StagingReport, StagingState
from dsv4_runtime.weights.writer import human

_REPORT_SECONDS = 0.25
# Scrubbing has the lowest priority, and restarts an hour after each pass.
_NICE = 19
_SCRUB_PAUSE_SECONDS = 3600.0
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def main() -> None:
    """Run the job and exit without waiting for threads that are blocked on the network."""
    if outside := os.environ.get(OUTSIDE_NETWORK):
        # Before any thread: a thread keeps the network in which it was started.
        _enter_network(int(outside))
    given = input_lines(0)
    job = StagingJob.model_validate_json(next(given, b""))
    threading.Thread(target=_exit_with_parent, args=(given,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    code = {"prefetch": prefetch, "scrub": scrub, "verify": verify}.get(sys.argv[1], stage)(job)
    sys.stdout.flush()
    os._exit(code)


def stage(job: StagingJob) -> int:
    """Stage the checkpoint; return 0, or 1 with the reason in the last report."""
    from dsv4_runtime.weights import staging

    begun, last = time.monotonic(), _ThrottledReports()
    try:
        done = staging.stage(job, last.report)
    except WeightsError as error:
        _write(StagingReport(error=str(error), cause=error.cause))
        return 1
    except Exception as error:
        logging.exception("staging made a mistake")
        _write(
            StagingReport(error=f"staging made a mistake: {type(error).__name__}: {error}", cause=Cause.STAGING_FAILED)
        )
        return 1
    took = time.monotonic() - begun
    text = f"fetched {human(done.fetched)} in {took:.2f} s" if done.fetched else "complete, nothing to fetch"
    found = {"fetched": done.fetched, "verified": done.verified, "wrong": done.wrong}
    _write(StagingReport(stage=text, percent=100, stance=StagingState.COMPLETE, **found))
    return 0


def prefetch(job: StagingJob) -> int:
    """Prepare the page cache for loading."""
    plan = job.weights
    files = checkpoint.shards(Path(plan.path), job.stages)
    if plan.page_cache is PageCache.UNIFIED:
        writer.drop(files)
    size = sum(file.stat().st_size for file in files)
    limit = writer.read_ahead_limit(plan.page_cache, writer.available_bytes(), job.resident_bytes)

    before = writer.storage_bytes()

    def write_rate(stage: str, read: int, seconds: float) -> None:
        rate = writer.disk_rate(writer.storage_bytes() - before, read, seconds)
        _write(StagingReport(stage=stage, disk_bytes_per_second=rate))

    def report(read: int, seconds: float) -> None:
        write_rate(f"read ahead {human(read)} of {human(size)}, {human(read / max(seconds, 1e-6))}/s", read, seconds)

    begun = time.monotonic()
    read = writer.read_ahead(files, limit, report)
    took = max(time.monotonic() - begun, 1e-6)
    why = "" if read == size else f", all that memory has room for beside the engine ({human(limit)})"
    write_rate(f"read ahead {human(read)} of {human(size)} in {took:.1f} s, {human(read / took)}/s{why}", read, took)
    return 0


def scrub(job: StagingJob) -> int:
    """Verify the checkpoint repeatedly until a file is wrong; the last report names it."""
    from dsv4_runtime.weights import store

    os.nice(_NICE)
    wrong = store.scrub(job.weights, _SCRUB_PAUSE_SECONDS, lambda: _write(StagingReport(verified=True)))
    _write(StagingReport(wrong=() if wrong is None else (wrong,)))
    return 0


def verify(job: StagingJob) -> int:
    """Verify the checkpoint once; the last report contains the result."""
    from dsv4_runtime.weights import store

    comparable, wrong = store.verify(job.weights)
    _write(StagingReport(verified=comparable and wrong is None, wrong=() if wrong is None else (wrong,)))
    return 0


class _ThrottledReports:
    """Writes reports at a limited rate."""

    def __init__(self) -> None:
        self._latest: StagingReport | None = None
        self._time = 0.0

    def report(self, report: StagingReport) -> None:
        now = time.monotonic()
        before = self._latest
        changed = before is None or (before.stance, before.claimed) != (report.stance, report.claimed)
        if changed or now - self._time >= _REPORT_SECONDS:
            self._latest, self._time = report, now
            _write(report)


def _write(report: StagingReport) -> None:
    sys.stdout.write(f"{report.to_json()}\n")
    sys.stdout.flush()


def _enter_network(descriptor: int) -> None:
    """Enter the network namespace of an inherited descriptor, and close it.

    Raises:
        OSError: not permitted.
    """
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"{OUTSIDE_NETWORK}: the network of the machine cannot be entered")
    os.close(descriptor)


def _exit_with_parent(given: Iterator[bytes]) -> None:
    """Answer the agent's probes until the end of stdin, then exit."""
    for _ in given:
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
