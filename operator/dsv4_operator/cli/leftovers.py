"""Tidying up after a loop that could not do it itself, because it was killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.loop import MARKER, startup_error_file

TERM_SECONDS = 5.0
KILL_SECONDS = 5.0
# Of a shell whose user looks at the logs, not of a process of ours.
_SHELL_VARIABLES = frozenset({b"PWD", b"OLDPWD", b"_"})


def belongs(environment: bytes, directory: Path) -> bool:
    """Tell whether a process with this environment is the deployment's: marked, or using an incarnation's files."""
    below = re.compile(re.escape(os.fsencode(directory)) + rb"(/g\d+)?/i\d+(/|$)")
    for entry in environment.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == MARKER.encode() and value == os.fsencode(directory):
            return True
        if key not in _SHELL_VARIABLES and below.match(value):
            return True
    return False


def processes(state: DeploymentState, proc: Path = Path("/proc")) -> list[int]:
    """Return every process of the deployment that still runs, except this one and those that started it."""
    found = []
    mine = _ancestors(proc)
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) in mine:
            continue
        # It ended meanwhile, or belongs to someone else.
        with contextlib.suppress(OSError):
            if belongs((entry / "environ").read_bytes(), state.directory):
                found.append(int(entry.name))
    return sorted(found)


def _ancestors(proc: Path) -> set[int]:
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            # The command's name, in parentheses, may hold spaces and parentheses itself.
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def end_processes(state: DeploymentState) -> int:
    """End every process of the deployment, in 10 seconds at most; how many there were."""
    ended: set[int] = set()
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        while (running := processes(state)) and time.monotonic() < deadline:
            # Again in each round: a process that was ended may have started another one.
            _signal_and_wait(state, running, number, min(1.0, deadline - time.monotonic()))
            ended.update(running)
    return len(ended)


def _signal_and_wait(state: DeploymentState, pids: list[int], number: signal.Signals, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        descriptors = set()
        for pid in pids:
            # ProcessLookupError: gone by itself. PermissionError: not ours to end.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                # Now that the descriptor holds on to it: is the number still the process that was found?
                if not belongs(Path(f"/proc/{pid}/environ").read_bytes(), state.directory):
                    continue
                signal.pidfd_send_signal(descriptor, number)
                descriptors.add(descriptor)
        deadline = time.monotonic() + seconds
        while descriptors and (left := deadline - time.monotonic()) > 0:
            descriptors.difference_update(select.select(descriptors, [], [], left)[0])


def remove_files(state: DeploymentState) -> None:
    """Remove what only a running deployment needs; weights, evidence, logs of the loop and the last status stay."""
    state.forget_incarnations()
    tokens = (state.token(group) for group in state.groups())
    for path in (*tokens, state.token_key, startup_error_file(state)):
        path.unlink(missing_ok=True)
