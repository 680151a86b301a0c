"""Children of this process by fork: whether they could use a GPU, and a function that is called in one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import IO, NoReturn, TypeVar

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.01

T = TypeVar("T")


class ForkError(Exception):
    """A function was called in a child, which did not return a result."""


def has_cuda() -> bool:
    """Tell whether torch, or any other library, has initialised CUDA's driver: forked children cannot use it then.

    `torch.cuda.is_initialized` does not tell of a count of devices, which initialises the driver too.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_INITIALIZED)


def end_with_parent() -> None:
    """Have this process killed when its parent ends: it must not outlive an engine that is killed while it waits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_child(function: Callable[[], object]) -> int:
    """Start `function` in a forked child, which ends with this process; return its pid. What it writes is not shown.

    Raises:
        OSError: there can be no child.
    """
    if (child := os.fork()) == 0:
        end_with_parent()
        with open(os.devnull, "wb") as nowhere:
            _call(function, nowhere)
    return child


def wait_for(children: Iterable[int], seconds: float) -> int:
    """Wait until `children` have ended, at most `seconds`; kill the others. Return how many came to a good end."""
    until, good = time.monotonic() + seconds, 0
    for child in children:
        # Others in this process may have waited for all of its children.
        with contextlib.suppress(ChildProcessError):
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(_LOOK_SECONDS)
            good += ended[0] != 0 and ended[1] == 0
    return good


def call_in_child(function: Callable[[], T], seconds: float) -> T:
    """Return what `function` returns in a forked child, which can be pickled. What it writes is not shown.

    Raises:
        ForkError: it raised, or was not done after `seconds` and has been killed.
        OSError: there can be no child.
    """
    with tempfile.TemporaryFile() as result:
        if (child := os.fork()) == 0:
            _call(function, result)
        until = time.monotonic() + seconds
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise ForkError(f"not done after {seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)
        if ended[1] != 0:
            raise ForkError(f"exit code {os.waitstatus_to_exitcode(ended[1])}")
        result.seek(0)
        found: T = pickle.load(result)  # noqa: S301 -- written by the child above
        return found


def _call(function: Callable[[], object], result: IO[bytes]) -> NoReturn:
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        pickle.dump(function(), result)
        result.flush()
        code = 0
    finally:
        # Neither the parent's buffers are written twice nor its exit handlers run here.
        os._exit(code)
