"""Slow imports in processes that wait: while an engine serves, importing vLLM must leave the processor to it.

A low priority would be the usual means, but without privileges no process returns from one (`sched(7)`: it takes
CAP_SYS_NICE or RLIMIT_NICE), and a worker that is put to use needs its full share. So an import pauses after each
module in proportion to the processor time that it took, for as long as the file in the environment variable `FILE`
exists. The agent makes that file, and removes it as soon as the processes are needed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

FILE = "DSV4_IMPORT_BRAKE"
"""Environment variable with the path of the file."""
_PAUSE = 4.0
"""Seconds of pause for each second of processor time: a process takes a fifth of one processor."""
_SLICE_SECONDS = 0.05
_LONGEST_SECONDS = 600.0
"""Of all pauses together: whoever should remove the file may be gone."""


class _Brake(MetaPathFinder):
    """Finds no module; it pauses whenever one is looked for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._used = time.thread_time()
        self._left = _LONGEST_SECONDS

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del fullname, path, target
        used = time.thread_time()
        pause, self._used = _PAUSE * (used - self._used), used
        while pause > 0 and self._left > 0 and self._file.exists():
            step = min(pause, _SLICE_SECONDS)
            time.sleep(step)
            pause -= step
            self._left -= step
        return None


@contextlib.contextmanager
def slow_imports() -> Iterator[None]:
    """Pause between imports within this context, while the file that `FILE` names exists."""
    name = os.environ.get(FILE)
    if not name or not Path(name).exists():
        yield
        return
    brake = _Brake(Path(name))
    sys.meta_path.insert(0, brake)
    try:
        yield
    finally:
        sys.meta_path.remove(brake)
