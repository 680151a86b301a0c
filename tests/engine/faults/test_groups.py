"""The control groups of the suite have the intended effect and leave no remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsv4_testkit.faults import groups

_LACKS = groups.lacks()
pytestmark = [pytest.mark.engine, pytest.mark.skipif(_LACKS is not None, reason=_LACKS or "")]

MIB = 2**20
# Waits for a line, then allocates memory and writes to it.
GROW = "import sys; sys.stdin.readline(); kept = [b'x' * 2**20 for _ in range(int(sys.argv[1]))]; print(len(kept))"


# Writes a line every 10 ms.
TICK = "import time\nwhile True: print(flush=True); time.sleep(0.01)"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(Path("/sys/fs/cgroup").glob("**/dsv4-*"))
    yield
    assert set(Path("/sys/fs/cgroup").glob("**/dsv4-*")) == before


def grow(mebibytes: int) -> tuple[int, str]:
    """Return exit code and output of a process that is limited to 64 MiB and allocates `mebibytes`."""
    process = subprocess.Popen(
        [sys.executable, "-c", GROW, str(mebibytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            limit = groups.confine([process.pid], 64 * MIB)
            try:
                output, _ = process.communicate("go\n", timeout=60)
                if process.returncode:
                    limit.wait()
            finally:
                process.kill()
                limit.end()
        finally:
            process.kill()
    return process.returncode, output


def test_the_kernel_kills_a_process_beyond_the_memory_limit():
    assert grow(256) == (-signal.SIGKILL, "")


def test_a_process_below_the_memory_limit_continues():
    assert grow(16) == (0, "16\n")


def test_a_frozen_process_does_not_run_is_not_in_state_stopped_and_can_be_killed():
    with subprocess.Popen([sys.executable, "-c", TICK], stdout=subprocess.PIPE) as process:
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)

        def ticks() -> bool:
            """Return whether the process writes."""
            process.stdout.read()
            time.sleep(0.5)
            return bool(process.stdout.read())

        frozen = groups.freeze(process.pid)
        try:
            assert not ticks()
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
            frozen.end()
            assert ticks()
            frozen = groups.freeze(process.pid)
            process.kill()
            assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()
            frozen.end()
