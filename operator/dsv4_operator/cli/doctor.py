"""`dsv4 doctor`: checks of this machine's network, performed by the runtime in a separate process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence

from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, print_line, render_document

_MODULE = "dsv4_runtime.fabric.main"
# Reading sysfs takes milliseconds, but hangs together with the firmware of a card.
_CHECK_SECONDS = 30.0


def run(
    peers: Sequence[str], wait: float, *, mtu: int | None, require_rdma: bool, form: DocumentFormat | None
) -> ExitCode:
    """Print the checks, including paths to `peers` that respond within `wait` seconds; `FAILED` if any check failed.

    Raises:
        CommandError: the checks could not be performed, or did not finish.
    """
    if importlib.util.find_spec("psutil") is None:
        raise bad_input("the checks require the runtime, which is not installed; install dsv4[runtime]")
    command = [sys.executable, "-m", _MODULE, "--wait", str(wait)]
    command += ["--require-rdma"] if require_rdma else []
    command += ["--mtu", str(mtu)] if mtu is not None else []
    for peer in peers:
        command += ["--peer", peer]
    command += ["-o", "json"] if form else []
    limit = _CHECK_SECONDS + (2 * wait + 30 if peers else 0)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE if form else None, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"the checks did not end within {limit:.0f} s, probably because a network card hangs; check `dmesg`"
        ) from None
    if done.returncode not in (0, 1):
        raise CommandError(f"the checks failed with exit code {done.returncode}; see the message above")
    if form:
        print_line(render_document(json.loads(done.stdout), form))
    return ExitCode.OK if done.returncode == 0 else ExitCode.FAILED
