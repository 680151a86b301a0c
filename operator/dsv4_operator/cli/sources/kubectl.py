"""Calls of the user's `kubectl`, so that its contexts, login methods and proxies apply; port forwarding."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from dsv4_operator.backends.local.network import die_with_parent
from dsv4_operator.cli.output import CommandError, bad_input

CALL_SECONDS = 30.0
"""Limit of one `kubectl`. One response of the API server may take a third: a call can need several, and a login."""
STOP_SECONDS = 5.0
OPEN_SECONDS = 30.0
"""Limit for opening a port forwarding, including the wait for a pod."""
_LOOPBACK = "127.0.0.1"
_POD_SECONDS = 15
_POLL_SECONDS = 0.02
_LISTENING = re.compile(rf"Forwarding from {re.escape(_LOOPBACK)}:(\d+) ->")
# Lines on the stderr of kubectl that are not the error: its own log, that of k3s, and warnings.
_NOISE = re.compile(r'[EIWF]\d{4} |Warning: |Defaulted container |time="[^"]*" level=warning ')
# Causes that the messages of kubectl leave open.
_HINTS = {
    "doesn't have a resource type": "is dsv4 installed in this cluster?",
    "no answer within": "is the cluster reachable?",
    "/etc/rancher/k3s/k3s.yaml": "only root may read that file of k3s; set KUBECONFIG to a copy of yours",
    "current-context must exist": "there is no present context; give --context, or `kubectl config use-context`",
}


class KubectlError(CommandError):
    """`kubectl` failed; `reason` is the first line of its error."""

    def __init__(self, verb: str, reason: str) -> None:
        hint = next((f"; {hint}" for text, hint in _HINTS.items() if text in reason), "")
        super().__init__(f"kubectl {verb}: {reason}{hint}")
        self.reason = reason


def first_error_line(text: str) -> str:
    """Return the first line of `kubectl`'s stderr that describes the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if not _NOISE.match(line)]
    return (errors or lines or ["it printed no message"])[0].removeprefix("error: ")


class Kubectl:
    """Runs `kubectl` for one context and namespace."""

    def __init__(self, context: str | None, kubeconfig: Path | None, namespace: str | None) -> None:
        given = (("--kubeconfig", kubeconfig), ("--context", context), ("--namespace", namespace))
        self._options = [f"{option}={value}" for option, value in given if value]

    @property
    def options(self) -> str:
        """Return the options for a command line of the user, with a space before each."""
        return "".join(f" {shlex.quote(option)}" for option in self._options).replace(" --namespace=", " -n ")

    def run(self, verb: str, *arguments: str, seconds: float = CALL_SECONDS) -> str:
        """Return the output of `kubectl verb arguments`.

        Raises:
            KubectlError: it failed, or took longer than `seconds`.
        """
        command = self._command(verb, f"--request-timeout={math.ceil(seconds / 3)}s", *arguments)
        try:
            done = subprocess.run(
                command,
                # kubectl could only prompt for a password, and its stderr is captured.
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(verb, f"no answer within {seconds:.0f} s") from None
        except OSError as error:
            raise _start_error(error) from None
        if done.returncode:
            raise KubectlError(verb, first_error_line(done.stderr.decode(errors="replace")))
        return done.stdout.decode(errors="replace")

    def document(self, verb: str, *arguments: str) -> Any:
        """Return the JSON value in the output; None if it is empty, as with `--ignore-not-found`."""
        text = self.run(verb, *arguments, "--output=json")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise KubectlError(verb, f"it printed no JSON: {text.strip()[:100]}") from None

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects listed by `kubectl get arguments`."""
        found: list[dict[str, Any]] = self.document("get", *arguments)["items"]
        return found

    def lines(self, verb: str, *arguments: str) -> Iterator[bytes]:
        """Yield the lines of the output of a `kubectl verb arguments` without a time limit; stop it when closed.

        Raises:
            KubectlError: it failed.
        """
        with tempfile.TemporaryFile() as errors:
            process = self.start(verb, *arguments, stdout=subprocess.PIPE, stderr=errors)
            assert process.stdout is not None  # noqa: S101  (a pipe)
            try:
                for line in process.stdout:
                    yield line.removesuffix(b"\n")
                code = process.wait(STOP_SECONDS)
            finally:
                stop(process)
                process.stdout.close()
            if code:
                errors.seek(0)
                raise KubectlError(verb, first_error_line(errors.read().decode(errors="replace")))

    def start(
        self, verb: str, *arguments: str, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a long-running `kubectl`, which ends with this process, even if this process is killed.

        Ctrl-C on the terminal does not reach it: that may be meant for the present answer of the model only.
        """
        try:
            return subprocess.Popen(
                self._command(verb, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                # Only the kernel of Linux can end the child of a killed process.
                preexec_fn=partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise _start_error(error) from None

    def _command(self, verb: str, *arguments: str) -> list[str]:
        return ["kubectl", verb, *self._options, *arguments]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process of `Kubectl.start`; kill it after 5 s."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def _start_error(error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return bad_input("kubectl is not on the PATH; install it, or add its directory to PATH")
    return bad_input(f"kubectl cannot be started: {error.strerror}")


class PortForward:
    """`kubectl port-forward` from a local port to a Service; reopened on the same local port when it has ended."""

    def __init__(self, kubectl: Kubectl, service: str, port: int) -> None:
        self._kubectl = kubectl
        self._service = service
        self._port = port
        self._local_port = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            stop(self._process)

    def url(self) -> str:
        """Return the local address, which never changes; open the port forwarding if necessary.

        Raises:
            KubectlError: it cannot be opened.
        """
        if self._process is None or self._process.poll() is not None:
            self._open()
        return f"http://{_LOOPBACK}:{self._local_port}"

    def _open(self) -> None:
        action = f"port-forward service/{self._service}"
        # A file instead of a pipe: kubectl prints a line per connection, and a pipe would fill up.
        with tempfile.TemporaryFile() as output:
            self._process = self._kubectl.start(
                "port-forward",
                f"--address={_LOOPBACK}",
                f"--pod-running-timeout={_POD_SECONDS}s",
                f"service/{self._service}",
                f"{self._local_port}:{self._port}",
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            deadline = time.monotonic() + OPEN_SECONDS
            while True:
                ended = self._process.poll() is not None
                # pread: the file offset is shared with kubectl.
                text = os.pread(output.fileno(), 1 << 16, 0).decode(errors="replace")
                if found := _LISTENING.search(text):
                    self._local_port = found[1]
                    return
                if ended:
                    raise KubectlError(action, first_error_line(text))
                if time.monotonic() > deadline:
                    stop(self._process)
                    raise KubectlError(action, f"no connection within {OPEN_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
