"""Settings for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from dsv4_testkit.waiting import free_port

# Examples are the same in every run, so that differences come from changes of the code; `--hypothesis-profile=default`
# searches for others. Tests limit durations themselves: on a busy machine any example may take longer than 200 ms.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# A runner that starts the tests in the background makes them ignore Ctrl-C, and child processes inherit that; some
# tests need Ctrl-C. A handler of Python's own becomes the default action in child processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many distributions have /tmp in memory. Tests of the page cache and of disks need files on a disk.
_STAT = ["stat", "-f", "-c", "%T", tempfile.gettempdir()]
if subprocess.run(_STAT, capture_output=True, timeout=60, check=False).stdout.strip() == b"tmpfs":
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")


# In place of those of pytest-asyncio, whose ports may be taken by any connection before a test uses them.
@pytest.fixture(scope="session")
def unused_tcp_port_factory() -> Callable[[], int]:
    return free_port


@pytest.fixture
def unused_tcp_port() -> int:
    return free_port()
