"""Diagnostics: `dsv4 doctor` (network of this machine), `dsv4 evidence` (archive of failures), `dsv4 dashboard`."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input, convert_os_errors
from dsv4_operator.cli.output import DocumentFormat, note, print_line, render_document
from dsv4_operator.cli.sources.base import DeploymentSource, RetryingPoll

_CHECKS = "dsv4_runtime.fabric.main"
# Reading sysfs takes milliseconds, but hangs together with the firmware of a card.
_CHECK_SECONDS = 30.0
_RESPONSE_SECONDS = 10.0
_POLL_SECONDS = 1.0


def check_machine(
    peers: Sequence[str], wait: float, *, mtu: int | None, require_rdma: bool, form: DocumentFormat | None
) -> ExitCode:
    """Print the checks, including paths to `peers` that respond within `wait` seconds; `FAILED` if any check failed.

    Raises:
        CommandError: the checks could not be performed, or did not finish.
    """
    if importlib.util.find_spec("psutil") is None:
        raise bad_input("the checks require the runtime, which is not installed; install dsv4[runtime]")
    command = [sys.executable, "-m", _CHECKS, "--wait", str(wait)]
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


def pack_evidence(source: DeploymentSource, name: str | None, output: Path | None) -> ExitCode:
    """Write the archive and print its path."""
    name, files = source.evidence(name)
    target = output or Path(f"{name}-evidence-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
    if target.is_dir():
        raise bad_input(f"--output {str(target)!r} is a directory; name a file in it, such as {name}.tar.gz")
    partial = target.with_name(f".{target.name}.part")
    count = 0
    with convert_os_errors("cannot write"):
        try:
            with (
                open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
                tarfile.open(fileobj=file, mode="w:gz") as archive,
            ):
                for count, each in enumerate(files, start=1):  # noqa: B007
                    entry = tarfile.TarInfo(f"{name}/{each.path}")
                    entry.size, entry.mtime, entry.mode = len(each.data), int(each.modified), 0o600
                    archive.addfile(entry, io.BytesIO(each.data))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    note(f"{target}: {count} files, {target.stat().st_size / 1024:.0f} KiB; no prompts, no token")
    return ExitCode.OK


def show_dashboard(
    source: DeploymentSource, name: str | None, group: int, *, wait: Callable[[float], None] = time.sleep
) -> ExitCode:
    """Print address and token. If the connection ends with the command, keep it open until Ctrl-C.

    Raises:
        CommandError: there is no dashboard, or it does not respond.
    """
    item = source.get(name)
    with source.dashboard(item, group) as access:
        url = access.url()
        _check_dashboard(url, access.token)
        print_line(f"dashboard   {url}")
        if access.token:
            print_line(f"token       {access.token}")
        if access.permanent:
            return ExitCode.OK
        note("The page requires the token once; a new incarnation has another one. Ctrl-C ends the connection.")
        poll = RetryingPoll()
        while True:
            wait(_POLL_SECONDS)
            # The head of a new incarnation replaces the previous one, which can take some time.
            poll(access.url)


def _check_dashboard(url: str, token: str) -> None:
    from dsv4_operator.cli import http

    try:
        with http.open_url("GET", url, token=token, total_seconds=_RESPONSE_SECONDS):
            return
    except http.ERRORS as error:
        raise CommandError(f"the dashboard at {url} does not answer ({http.reason(error)})") from None
