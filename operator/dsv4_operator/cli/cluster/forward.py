"""`kubectl port-forward` to a Service, opened again whenever it has ended."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from typing import Self

from dsv4_operator.cli.cluster.kubectl import Kubectl, KubectlError, end, first_line

LOOPBACK = "127.0.0.1"
OPEN_SECONDS = 30.0
"""Bound of opening, in which `kubectl` waits for a pod."""
_POD_SECONDS = 15
_POLL_SECONDS = 0.02
_LISTENS = re.compile(rf"Forwarding from {re.escape(LOOPBACK)}:(\d+) ->")


class Forward:
    """A port of this machine that leads to one of a Service, while it is entered."""

    def __init__(self, kubectl: Kubectl, service: str, port: int) -> None:
        self._kubectl = kubectl
        self._service = service
        self._port = port
        self._local = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end(self._process)

    def url(self) -> str:
        """Return the address now, always the same one; open the way if it is not open.

        Raises:
            KubectlError: it cannot be opened.
        """
        if self._process is None or self._process.poll() is not None:
            self._open()
        return f"http://{LOOPBACK}:{self._local}"

    def _open(self) -> None:
        # A file and no pipe: kubectl says a line about every connection, and nobody needs to read them.
        with tempfile.TemporaryFile() as output:
            self._process = self._kubectl.start(
                "port-forward",
                f"--address={LOOPBACK}",
                f"--pod-running-timeout={_POD_SECONDS}s",
                f"service/{self._service}",
                f"{self._local}:{self._port}",
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            deadline = time.monotonic() + OPEN_SECONDS
            while True:
                ended = self._process.poll() is not None
                # Without moving the place in the file, which is also kubectl's.
                text = os.pread(output.fileno(), 1 << 16, 0).decode(errors="replace")
                if found := _LISTENS.search(text):
                    self._local = found[1]
                    return
                if ended:
                    raise KubectlError(f"port-forward service/{self._service}", first_line(text))
                if time.monotonic() > deadline:
                    end(self._process)
                    raise KubectlError(
                        f"port-forward service/{self._service}", f"no connection within {OPEN_SECONDS:.0f} s"
                    )
                time.sleep(_POLL_SECONDS)
