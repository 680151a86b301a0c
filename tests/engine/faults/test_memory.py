"""That the suite's memory limit is real: the kernel ends what grows beyond it, and nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faultlab import memory

pytestmark = pytest.mark.engine

MIB = 2**20
# Waits for a word, then takes memory that is really written.
GROW = "import sys; sys.stdin.readline(); kept = [b'x' * 2**20 for _ in range(int(sys.argv[1]))]; print(len(kept))"


def grow(mebibytes: int) -> tuple[int, str]:
    """Exit code and output of a process that is limited to 64 MiB and takes `mebibytes`."""
    process = subprocess.Popen(
        [sys.executable, "-c", GROW, str(mebibytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    limit = memory.confine([process.pid], 64 * MIB)
    try:
        output, _ = process.communicate("go\n", timeout=60)
        if process.returncode:
            limit.wait()
    finally:
        process.kill()
        limit.end()
    return process.returncode, output


def test_the_kernel_ends_what_grows_beyond_the_limit():
    before = set(Path("/sys/fs/cgroup").glob("**/dsv4-faults-*"))
    assert grow(256) == (-signal.SIGKILL, "")
    assert set(Path("/sys/fs/cgroup").glob("**/dsv4-faults-*")) == before


def test_what_stays_below_it_lives():
    assert grow(16) == (0, "16\n")
