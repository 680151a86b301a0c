"""A supervisor in a thread of the test, with the test as its loop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator

from dsv4_operator.backends.local.supervisor import Processes, Supervisor
from dsv4_testkit.waiting import PATIENCE_SECONDS


class Supervised:
    """Starts processes through a real supervisor; `again` connects like the next loop."""

    def __init__(self) -> None:
        self._calls: list[socket.socket] = []
        self._mine: list[socket.socket] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def again(self) -> Processes:
        """Return a connection; it replaces the previous one, as after the end of a loop."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls.append(theirs)
        self._mine.append(mine)
        return Processes(mine)

    def close(self) -> None:
        """End all processes."""
        self._ending = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        for connection in self._mine:
            connection.close()

    def _run(self) -> None:
        # The kernel ends children with the thread that started them, so this thread does all the work.
        supervisor = Supervisor()
        while not self._ending:
            if self._calls:
                supervisor.detach()
                supervisor.attach(self._calls.pop())
            supervisor.poll(0.02)
        supervisor.close()


_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Prevent a process from running, also after SIGCONT, like a frozen control group.

    It is traced: SIGKILL ends it, and its parent can reap it after the block.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT):
        if libc.ptrace(request, pid, None, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(pid, _WALL)
    try:
        yield
    finally:
        if libc.ptrace(_PTRACE_DETACH, pid, None, None) != 0:
            # The process was killed; its end is first reported to the tracer.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, _WALL)
