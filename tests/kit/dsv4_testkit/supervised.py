"""A supervisor in a thread of the test, whose loop is the test itself."""

from __future__ import annotations

import socket
import threading

from dsv4_operator.backends.local.supervisor import Processes, Supervisor


class Supervised:
    """Starts processes through a real supervisor; `again` connects as the next loop would."""

    def __init__(self) -> None:
        self._calls: list[socket.socket] = []
        self._mine: list[socket.socket] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def again(self) -> Processes:
        """Return a connection; it replaces the one before, as after the end of a loop."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls.append(theirs)
        self._mine.append(mine)
        return Processes(mine)

    def close(self) -> None:
        """End all processes."""
        self._ending = True
        self._thread.join(30)
        for connection in self._mine:
            connection.close()

    def _run(self) -> None:
        # The kernel ends children with the thread that started them, so all happens in this one.
        supervisor = Supervisor()
        while not self._ending:
            if self._calls:
                supervisor.detach()
                supervisor.attach(self._calls.pop())
            supervisor.poll(0.02)
        supervisor.close()
