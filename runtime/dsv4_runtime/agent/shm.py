"""Shared memory that killed processes left behind.

Python's `multiprocessing` (`psm_…`, vLLM's message queues) and vLLM's CPU communicator (`…-cpushm_…`) name files in
/dev/shm and remove them in good order; a killed engine does not, and a few restarts later the file system is full.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from dsv4_runtime.agent.preflight import SHM

_OURS = re.compile(r"psm_[0-9a-f]+|.+-cpushm(_\d+)?|torch_\d+_.+|dsv4-ledger\.\d+")
# A file this young may belong to a process that has not mapped it yet.
_SETTLED_SECONDS = 2.0


def sweep(since: float) -> list[str]:
    """Remove what nobody uses any more; returns the names.

    Only files of this user, with a name that vLLM or Python gives, made after Unix time `since` and a moment ago at the
    latest, and neither mapped nor open in any process.
    """
    before = time.time() - _SETTLED_SECONDS
    candidates = {}
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if _OURS.fullmatch(path.name) and found.st_uid == os.geteuid() and since <= found.st_ctime <= before:
                candidates[path.name] = path
    if not candidates:
        return []
    used = _used()
    removed = sorted(name for name in candidates if name not in used)
    for name in removed:
        candidates[name].unlink(missing_ok=True)
    return removed


def _used() -> set[str]:
    """Return the names below /dev/shm that some process has mapped or open."""
    found = set()
    prefix = f"{SHM}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if prefix in line:
                    found.add(line.split(prefix, 1)[1])
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(prefix):
                        found.add(target.removeprefix(prefix))
    return found
