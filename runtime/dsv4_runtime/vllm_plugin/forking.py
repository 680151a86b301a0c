"""Processes by fork: whether they can use a GPU, calls in a child, and the patches of vLLM for forked processes.

A fork of a process that has imported vLLM saves a second import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, NoReturn, TypeVar

from dsv4_runtime.vllm_plugin.kernels.v033 import MODEL_REGISTRY, SYSTEM_UTILS
from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters, refuse

_LOGGER = logging.getLogger("vllm.dsv4")
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01
_INSPECTION_SECONDS = 60.0

T = TypeVar("T")


class ForkError(Exception):
    """A function called in a child returned no result."""


def has_cuda() -> bool:
    """Return whether torch or another library has initialized the CUDA driver: forked children cannot use it then.

    `torch.cuda.is_initialized` does not cover a device count, which initializes the driver too.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_INITIALIZED)


def end_with_parent(parent: int) -> None:
    """Request SIGKILL for this process when its parent ends, so that it cannot outlive a killed engine.

    A process whose parent is no longer `parent` exits: there is no signal for an end before the request.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start_child(function: Callable[[], object]) -> int:
    """Start `function` in a forked child that ends with this process; return its pid. Its output is discarded.

    Raises:
        OSError: the fork failed.
    """
    parent = os.getpid()
    if (child := os.fork()) == 0:
        end_with_parent(parent)
        with open(os.devnull, "wb") as nowhere:
            _call(function, nowhere)
    return child


def wait_for(children: Iterable[int], seconds: float) -> int:
    """Wait at most `seconds` for `children` to end, kill the others, and return the number with exit code 0."""
    until, good = time.monotonic() + seconds, 0
    for child in children:
        # Other code in this process may have waited for all children.
        with contextlib.suppress(ChildProcessError):
            status = _reap(child, until)
            good += status == 0
    return good


def call_in_child(function: Callable[[], T], seconds: float) -> T:
    """Return the picklable result of `function` called in a forked child. The child's output is discarded.

    Raises:
        ForkError: the function raised, or did not return within `seconds` and the child was killed.
        OSError: the fork failed.
    """
    with tempfile.TemporaryFile() as result:
        if (child := os.fork()) == 0:
            _call(function, result)
        status = _reap(child, time.monotonic() + seconds)
        if status is None:
            raise ForkError(f"not done after {seconds:.0f} s")
        if status != 0:
            raise ForkError(f"exit code {os.waitstatus_to_exitcode(status)}")
        result.seek(0)
        found: T = pickle.load(result)  # noqa: S301 -- written by the child above
        return found


def _reap(child: int, until: float) -> int | None:
    """Return the wait status of `child`; kill it and return None if it runs at the monotonic time `until`."""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_SECONDS)
    return ended[1]


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
        # Without flushing the parent's buffers a second time or running its exit handlers.
        os._exit(code)


def in_fork(original: Callable[[Callable[[], Any]], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Return a replacement of vLLM's `_run_in_subprocess` that forks and falls back to `original`.

    The call has a timeout: a child can hang if another thread held a lock during the fork.
    """

    @functools.wraps(original)
    def run(fn: Callable[[], Any]) -> Any:
        if has_cuda():
            return original(fn)
        begun = time.monotonic()
        try:
            found = call_in_child(fn, _INSPECTION_SECONDS)
        except Exception as error:
            # vLLM's own error names the problem if the model causes it.
            _LOGGER.warning("dsv4 inspection: again in a process of its own (%s: %s)", type(error).__name__, error)
            return original(fn)
        _LOGGER.info("dsv4 inspection: the model's class was inspected in %.1f s", time.monotonic() - begun)
        return found

    return run


def inspect_in_fork() -> PatchOutcome:
    """Patch `_run_in_subprocess` of vLLM's model registry; a second call, as in the standby server, has no effect.

    Raises:
        PatchRefusedError: the function differs from the expected one.
    """
    registry: Any = sys.modules[MODEL_REGISTRY]
    original: Any = getattr(registry, "_run_in_subprocess", None)
    expect_parameters(f"{MODEL_REGISTRY}._run_in_subprocess", original, ["fn"])
    if not hasattr(original, "__wrapped__"):
        registry._run_in_subprocess = in_fork(original)
    return PatchOutcome.APPLIED


def or_by_others(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return `original`, which queries torch, extended by a query of the driver."""

    @functools.wraps(original)
    def cuda_is_initialized() -> bool:
        return original() or has_cuda()

    return cuda_is_initialized


def _spawn_where_cuda_is_used() -> PatchOutcome:
    from dsv4_runtime.vllm_plugin.kernels.vllm_api import system_utils

    symbol = f"{SYSTEM_UTILS}.cuda_is_initialized"
    original: Callable[[], bool] | None = getattr(system_utils, "cuda_is_initialized", None)
    expect_parameters(symbol, original, [])
    reader = getattr(system_utils, "_maybe_force_spawn", None)
    if original is None or reader is None or "cuda_is_initialized" not in reader.__code__.co_names:
        raise refuse(symbol, "_maybe_force_spawn does not call it")
    system_utils.cuda_is_initialized = or_by_others(original)
    return PatchOutcome.APPLIED


MODEL_INSPECTION = Patch(
    module=MODEL_REGISTRY,
    symbol="_run_in_subprocess",
    why=(
        "without a cached result of an earlier start vLLM inspects the model's class in a new process, which imports"
        " vLLM again: 14 to 21 s of a start; a fork has it imported. Not where CUDA is in use; after 60 s or an error"
        " vLLM's own process is used"
    ),
    upstream="none: a separate process is required where CUDA is in use",
    versions="vLLM 0.32.0 and 0.33.0",
    obsolete_when="the package of vLLM contains the results for its own models",
    apply=inspect_in_fork,
)
FORKED_ENGINE = Patch(
    module=SYSTEM_UTILS,
    symbol="cuda_is_initialized",
    why=(
        "dsv4 configures fork for EngineCore and the workers of the MP executor, since a spawned process imports vLLM"
        " again; vLLM spawns if torch uses CUDA, but not if another library has initialized the driver"
    ),
    upstream="none",
    versions="vLLM 0.32.0 and 0.33.0",
    obsolete_when="vLLM queries the driver",
    apply=_spawn_where_cuda_is_used,
)
