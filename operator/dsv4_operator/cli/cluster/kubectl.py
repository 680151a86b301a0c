"""The user's own `kubectl`, so that contexts, ways to log in and proxies are those that the user has already."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.cli.errors import CommandError, bad_input

CALL_SECONDS = 30.0
"""Bound of one `kubectl`. One answer of the API server may take a third: it can need several, and a login."""

# What kubectl says on stderr besides the error: lines of its own log, and warnings.
_NOISE = re.compile(r"[EIWF]\d{4} |Warning: |Defaulted container ")


# What kubectl's own words leave open.
_HINTS = {
    "doesn't have a resource type": "is dsv4 installed in this cluster?",
    "current-context must exist": "there is no present context; give --context, or `kubectl config use-context`",
}


class KubectlError(CommandError):
    """`kubectl` ended with an error; `reason` is its first line."""

    def __init__(self, verb: str, reason: str) -> None:
        hint = next((f"; {hint}" for words, hint in _HINTS.items() if words in reason), "")
        super().__init__(f"kubectl {verb}: {reason}{hint}")
        self.reason = reason


def first_line(text: str) -> str:
    """Return the first line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not _NOISE.match(line)]
    return (telling or lines or ["it said nothing"])[0].removeprefix("error: ")


class Kubectl:
    """Calls `kubectl` for one context and namespace."""

    def __init__(self, context: str | None, kubeconfig: Path | None, namespace: str | None) -> None:
        given = (("--kubeconfig", kubeconfig), ("--context", context), ("--namespace", namespace))
        self._options = [f"{option}={value}" for option, value in given if value]

    @property
    def options(self) -> str:
        """Return the options as the user would type them again, with a space before each."""
        return "".join(f" {shlex.quote(option)}" for option in self._options).replace(" --namespace=", " -n ")

    def run(self, verb: str, *arguments: str, seconds: float = CALL_SECONDS) -> str:
        """Return what `kubectl verb arguments` prints.

        Raises:
            KubectlError: it failed, or took longer than `seconds`.
        """
        command = self._command(verb, f"--request-timeout={math.ceil(seconds / 3)}s", *arguments)
        try:
            done = subprocess.run(
                command,
                # It could only ask for a password there, on a terminal where nobody sees the question.
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(verb, f"no answer within {seconds:.0f} s; is the cluster reachable?") from None
        except OSError as error:
            raise _cannot_start(error) from None
        if done.returncode:
            raise KubectlError(verb, first_line(done.stderr.decode(errors="replace")))
        return done.stdout.decode(errors="replace")

    def document(self, verb: str, *arguments: str) -> Any:
        """Return the JSON value that it prints; None if it prints nothing, as `--ignore-not-found` does."""
        text = self.run(verb, *arguments, "--output=json")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise KubectlError(verb, f"it printed no JSON: {text.strip()[:100]}") from None

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects that `kubectl get arguments` lists."""
        found: list[dict[str, Any]] = self.document("get", *arguments)["items"]
        return found

    def start(
        self, verb: str, *arguments: str, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a `kubectl` that goes on until it is ended. It ends with this process, however that ends.

        A Ctrl-C on the terminal does not reach it: that may only be meant for the answer that is under way.
        """
        # The kernel of Linux alone can end it when this process is killed.
        before: Callable[[], None] | None = partial(die_with_parent, signal.SIGTERM) if _LINUX else None
        try:
            return subprocess.Popen(
                self._command(verb, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                preexec_fn=before,
            )
        except OSError as error:
            raise _cannot_start(error) from None

    def _command(self, verb: str, *arguments: str) -> Sequence[str]:
        return ["kubectl", verb, *self._options, *arguments]


_LINUX = sys.platform == "linux"
END_SECONDS = 5.0


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of `Kubectl.start`, in 5 s at most."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)


def _cannot_start(error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return bad_input("kubectl is not on the PATH; install it, or add its directory to PATH")
    return bad_input(f"kubectl cannot be started: {error.strerror}")
