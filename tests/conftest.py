"""What holds for every test."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile

from hypothesis import settings

# The same examples every time: a change is judged by what it changed. `--hypothesis-profile=default` looks for others.
# Tests that limit a duration do so themselves: on a busy machine any example may take longer than 200 ms.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A runner that starts the tests in the background has them ignore Ctrl-C, and children inherit that; some tests are
# about Ctrl-C. A handler of Python's own becomes the default action in children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many distributions have /tmp in memory. Tests of the page cache and of disks need files on a disk.
_STAT = ["stat", "-f", "-c", "%T", tempfile.gettempdir()]
if subprocess.run(_STAT, capture_output=True, timeout=10, check=False).stdout.strip() == b"tmpfs":
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")
