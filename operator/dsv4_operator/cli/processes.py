"""Processes of a deployment of this machine: the reconcile loop, its descendants, and signals to the command itself."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dsv4_operator.api import GroupStatus
from dsv4_operator.backends.local.network import id_inside
from dsv4_operator.backends.local.state import DeploymentState

DIRECTORY_VARIABLE = "DSV4_DEPLOYMENT_DIR"
"""Environment variable that the reconcile loop and all its descendants inherit, for the search for leftovers."""
GRACE_SECONDS = 40.0
"""Time between SIGTERM and SIGKILL; the loop gives its members less."""
LOOP_KILL_SECONDS = 5.0
"""Limit for the end of a loop after SIGKILL."""
STEP_SECONDS = 0.5
TERM_SECONDS = 5.0
KILL_SECONDS = 5.0
# A user's shell in a directory of the deployment has the directory in these variables.
_SHELL_VARIABLES = frozenset({b"PWD", b"OLDPWD", b"_"})


def loop_command(state: DeploymentState, *, attached: bool) -> list[str]:
    """Return the command of the supervisor, which starts the reconcile loop: the CLI does not import the controller.

    An attached one ends when its parent process ends.
    """
    command = [sys.executable, "-m", "dsv4_operator.backends.local.supervisor"]
    command += ["--state-dir", str(state.root), "--name", state.name]
    return [*command, f"--attached={os.getpid()}"] if attached else command


def startup_error_file(state: DeploymentState) -> Path:
    """Return the file in which a loop that cannot start writes its error message."""
    return state.directory / "startup-error"


def startup_error(state: DeploymentState) -> str | None:
    """Return the error message of a loop that could not start."""
    with contextlib.suppress(OSError):
        return startup_error_file(state).read_text().strip() or None
    return None


def start_loop(state: DeploymentState, command: list[str]) -> subprocess.Popen[bytes]:
    """Start the loop in its own session, so that Ctrl-C on the terminal reaches only the CLI, which stops the loop."""
    with open(state.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # A detached loop must not keep the user's working directory busy, and `python -m` prepends the working
            # directory to the module path.
            cwd=state.directory,
            env={**os.environ, DIRECTORY_VARIABLE: str(state.directory)},
            # Files of the deployment are private to the user.
            umask=0o077,
        )


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """A pidfd of a process: it never refers to another process, even if the PID is reused."""

    descriptor: int

    def running(self, wait: float = 0.0) -> bool:
        """Return whether the process still runs after waiting up to `wait` seconds for its end."""
        return not select.select([self.descriptor], [], [], wait)[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended is ignored.

        Raises:
            PermissionError: the process belongs to another user.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)


@contextlib.contextmanager
def open_process(pid: int) -> Iterator[ProcessHandle | None]:
    """Open a handle of process `pid`; None if there is no such process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield ProcessHandle(descriptor)
    finally:
        os.close(descriptor)


def stop_loop(
    process: ProcessHandle,
    *,
    progress: Callable[[float], None],
    interrupted: Callable[[], bool],
    grace: float = GRACE_SECONDS,
) -> None:
    """Stop a loop and wait for its end; kill it after `grace` seconds, or when the user interrupts the wait.

    A killed loop leaves its members running; the caller stops them. `progress` receives the seconds waited so far.
    """
    process.send(signal.SIGTERM)
    waited = 0.0
    while process.running(min(STEP_SECONDS, max(grace - waited, 0.0))):
        waited += STEP_SECONDS
        if waited >= grace or interrupted():
            process.send(signal.SIGKILL)
            process.running(LOOP_KILL_SECONDS)
            return
        progress(waited)


def belongs_to_deployment(environment: bytes, directory: Path) -> bool:
    """Return whether a process with this environment is the deployment's: marked, or with files of an incarnation."""
    below = re.compile(re.escape(os.fsencode(directory)) + rb"(/g\d+)?/i\d+(/|$)")
    for entry in environment.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == DIRECTORY_VARIABLE.encode() and value == os.fsencode(directory):
            return True
        if key not in _SHELL_VARIABLES and below.match(value):
            return True
    return False


def deployment_processes(state: DeploymentState, proc: Path = Path("/proc")) -> list[int]:
    """Return the PIDs of the deployment's processes, without this process and its ancestors."""
    found = []
    ancestors = _ancestors(proc, os.getpid())
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) in ancestors:
            continue
        # The process has ended meanwhile, or belongs to another user.
        with contextlib.suppress(OSError):
            if belongs_to_deployment((entry / "environ").read_bytes(), state.directory):
                found.append(int(entry.name))
    return sorted(found)


def signal_member(
    state: DeploymentState,
    group: GroupStatus,
    rank: int,
    pid: int,
    number: signal.Signals,
    proc: Path = Path("/proc"),
) -> float | None:
    """Send a signal to a process of a member; return the Unix time before it, None if there is no such process.

    The process is below the agent of the member. `pid` is its number here, or in the member's process namespace.
    """
    directory = os.fsencode(state.member(group.incarnation, rank, group.index))
    for entry in sorted(proc.iterdir(), key=lambda each: each.name != str(pid)):
        # The process has ended meanwhile, or belongs to another user.
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or pid not in (int(entry.name), id_inside(entry)):
                continue
            with open_process(int(entry.name)) as handle:
                # Checked after the handle was opened, so that both are of the same process.
                if handle is not None and any(
                    directory in (proc / str(each) / "cmdline").read_bytes().split(b"\0")
                    for each in _ancestors(proc, int(entry.name))
                ):
                    struck = time.time()
                    handle.send(number)
                    return struck
    return None


def _ancestors(proc: Path, pid: int) -> set[int]:
    """Return `pid` and the processes above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            # The command name, in parentheses, may itself contain spaces and parentheses.
            pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def stop_processes(state: DeploymentState) -> int:
    """Stop all processes of the deployment within 10 seconds and return their number.

    Needed after a loop was killed and could not stop its members.
    """
    stopped: set[int] = set()
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        while (running := deployment_processes(state)) and time.monotonic() < deadline:
            # Repeated in each round: a stopped process may have started another one.
            _signal_and_wait(state, running, number, min(1.0, deadline - time.monotonic()))
            stopped.update(running)
    return len(stopped)


def _signal_and_wait(state: DeploymentState, pids: list[int], number: signal.Signals, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        descriptors = set()
        for pid in pids:
            # ProcessLookupError: already ended. PermissionError: the process of another user.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                # The descriptor is bound to the process now; check that the PID was not reused before.
                if not belongs_to_deployment(Path(f"/proc/{pid}/environ").read_bytes(), state.directory):
                    continue
                signal.pidfd_send_signal(descriptor, number)
                descriptors.add(descriptor)
        deadline = time.monotonic() + seconds
        while descriptors and (left := deadline - time.monotonic()) > 0:
            descriptors.difference_update(select.select(descriptors, [], [], left)[0])


def remove_runtime_files(state: DeploymentState) -> None:
    """Remove files that only a running deployment needs; weights, evidence, the loop's log and the status remain."""
    state.forget_incarnations()
    tokens = (state.token(group) for group in state.groups())
    for path in (*tokens, state.token_key, startup_error_file(state)):
        path.unlink(missing_ok=True)


class SignalCounter:
    """Counts SIGINT, SIGTERM and SIGHUP in its context, so that a command can shut down in its own order."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup dsv4 up` ignores SIGHUP on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
