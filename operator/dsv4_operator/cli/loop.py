"""The reconcile loop as the command line sees it: a process that is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsv4_operator.backends.local.state import DeploymentState

MARKER = "DSV4_DEPLOYMENT_DIR"
"""Environment variable that the loop and all its descendants inherit, so that none of them can be missed later."""
GRACE_SECONDS = 40.0
"""From SIGTERM to SIGKILL; the loop gives its members less than this."""
KILL_SECONDS = 5.0
"""Time that the kernel may take to end a killed process."""
STEP_SECONDS = 0.5


class LoopCommand(Protocol):
    """Gives the argument list that runs the loop; tests put a stand-in here."""

    def __call__(self, state: DeploymentState, *, attached: bool) -> list[str]:
        """Return the command of a loop; an attached one ends itself when its parent dies."""
        ...


def loop_command(state: DeploymentState, *, attached: bool) -> list[str]:
    """Return the command of the real loop: a process of its own, so the command line never imports the controller."""
    command = [sys.executable, "-m", "dsv4_operator.controller.standalone"]
    command += ["--state-dir", str(state.root), "--name", state.name]
    return [*command, f"--attached={os.getpid()}"] if attached else command


def startup_error_file(state: DeploymentState) -> Path:
    """Return where a loop that cannot start leaves the sentence that says why."""
    return state.directory / "startup-error"


def startup_error(state: DeploymentState) -> str | None:
    """Return that sentence, if there is one."""
    with contextlib.suppress(OSError):
        return startup_error_file(state).read_text().strip() or None
    return None


def spawn(state: DeploymentState, command: list[str]) -> subprocess.Popen[bytes]:
    """Start the loop in its own session: a terminal's Ctrl-C reaches only the command line, which then ends it."""
    with open(state.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # A detached loop must not keep the directory busy in which it happened to be started, and `python -m`
            # puts the working directory first on the module path.
            cwd=state.directory,
            env={**os.environ, MARKER: str(state.directory)},
            # What the deployment's processes write is for whoever started it.
            umask=0o077,
        )


@dataclass(frozen=True, slots=True)
class Handle:
    """A hold on one process that never means another one, also when its process id was given away again."""

    pid: int
    descriptor: int

    def running(self, wait: float = 0.0) -> bool:
        """Tell whether it still runs, after waiting up to `wait` seconds for its end."""
        return not select.select([self.descriptor], [], [], wait)[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)


@contextlib.contextmanager
def handle(pid: int) -> Iterator[Handle | None]:
    """Hold `pid`; None if there is no such process.

    Raises:
        PermissionError: never here, but from `Handle.send` when the process is another user's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield Handle(pid, descriptor)
    finally:
        os.close(descriptor)


def end(
    process: Handle,
    *,
    progress: Callable[[float], None] = lambda _: None,
    impatient: Callable[[], bool] = lambda: False,
    grace: float = GRACE_SECONDS,
) -> bool:
    """End a loop and return when it is gone; whether it had to be killed, which leaves tidying up to the caller.

    `progress` is called with the seconds waited so far; `impatient` becomes true when the user asks again.
    """
    process.send(signal.SIGTERM)
    waited = 0.0
    while process.running(min(STEP_SECONDS, max(grace - waited, 0.0))):
        waited += STEP_SECONDS
        if waited >= grace or impatient():
            process.send(signal.SIGKILL)
            process.running(KILL_SECONDS)
            return True
        progress(waited)
    return False
