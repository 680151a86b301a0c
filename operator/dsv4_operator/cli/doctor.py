"""`dsv4 doctor`: checks of this machine, made by the runtime in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, render_document, say

_PROGRAM = "dsv4_runtime.fabric.main"
# Reading sysfs takes milliseconds; it hangs where a card's firmware does.
_LOOK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `dsv4 doctor` that the user asked for."""

    require_rdma: bool
    mtu: int | None
    peers: tuple[str, ...]
    wait: float
    """Seconds for the peers to appear."""
    output: DocumentFormat | None


def run(request: DoctorOptions) -> int:
    """Print the checks; 0 if none failed, else 1.

    Raises:
        CommandError: the checks could not be made, or did not end.
    """
    if importlib.util.find_spec("psutil") is None:
        raise bad_input("the checks need the runtime, which is not installed here; install dsv4[runtime]")
    command = [sys.executable, "-m", _PROGRAM, "--wait", str(request.wait)]
    command += ["--require-rdma"] if request.require_rdma else []
    command += ["--mtu", str(request.mtu)] if request.mtu is not None else []
    for peer in request.peers:
        command += ["--peer", peer]
    command += ["-o", "json"] if request.output else []
    bound = _LOOK_SECONDS + (2 * request.wait + 30 if request.peers else 0)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE if request.output else None, text=True, timeout=bound, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"the checks did not end within {bound:.0f} s; a card that does not answer can cause that: see `dmesg`"
        ) from None
    if done.returncode not in (0, 1):
        raise CommandError(f"the checks ended with exit code {done.returncode}; their message is above")
    if request.output:
        say(render_document(json.loads(done.stdout), request.output))
    return ExitCode.OK if done.returncode == 0 else ExitCode.FAILED
