"""Child processes that log to a file and do not outlive the process that started them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterkit.waiting import ClusterError

COMMAND_SECONDS = 30.0
# The kernel ends the program when the thread that started it ends; this setting survives the exec.
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Process:
    """A running part of the cluster."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise if it has ended: no part ends by itself."""
        if (code := self.popen.poll()) is not None:
            raise ClusterError(f"{self.name} ended with code {code}; its last words: {last_words(self.log)}")

    def stop(self, seconds: float = 5.0) -> None:
        """Terminate it, or kill it after `seconds`."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait(seconds)

    def kill(self, seconds: float = 5.0) -> None:
        """Kill it at once."""
        self.popen.kill()
        self.popen.wait(seconds)


def start(name: str, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Start a program; must be called from the main thread, see `_DIES_WITH_US`. Its output is appended to `log`."""
    with log.open("ab") as out:
        popen = subprocess.Popen(
            [*_DIES_WITH_US, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    return Process(name, popen, log)


def last_words(log: Path, size: int = 600) -> str:
    """Return the end of a log in one line."""
    try:
        return " ".join(log.read_text(errors="replace")[-size:].split()) or f"nothing in {log}"
    except OSError as error:
        return f"nothing, {error}"


def run(*command: str | Path, seconds: float = COMMAND_SECONDS, env: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a command that has to succeed.

    Raises:
        ClusterError: it failed or took longer; with its output.
    """
    line = " ".join(map(str, command))
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{line[:200]}` took longer than {seconds:.0f} s") from None
    except OSError as error:
        raise ClusterError(f"`{line[:200]}` cannot be run ({error})") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout)[-1500:].split())
        raise ClusterError(f"`{line[:200]}` ended with code {done.returncode}: {said}")
    return done.stdout
