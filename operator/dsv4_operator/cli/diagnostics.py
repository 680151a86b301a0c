"""State and diagnostics: `dsv4 status`, `why` (of a deployment, or of any run's logs), `kernels`, `doctor` (network of
this machine), `evidence` (archive of failures) and `dashboard`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pydantic

from dsv4_operator.api import Finding, Severity
from dsv4_operator.backends.hosts.survey import CABLED, cabled, read_network
from dsv4_operator.cli import render
from dsv4_operator.cli.output import (
    CommandError,
    DocumentFormat,
    ExitCode,
    TableFormat,
    bad_input,
    convert_os_errors,
    live_screen,
    note,
    print_line,
    render_document,
)
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, EvidenceFile, RetryingPoll
from dsv4_runtime.contract import Cause
from dsv4_runtime.contract.gateway import FatalRequests
from dsv4_runtime.engine.logs import diagnose
from dsv4_runtime.util.secrets import has_secret

_GATEWAY_SECONDS = 2.0
_CHECKS = "dsv4_runtime.fabric.main"
# Reading sysfs takes milliseconds, but hangs together with the firmware of a card.
_CHECK_SECONDS = 30.0
_COPIES_SECONDS = 130.0
"""Limit of the test of copies between GPUs, which ends a hung one after 20 s."""
_COPY_SECONDS = 120.0
_NODE_NAME = "[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
"""Names that can be the value of a label."""
_RESPONSE_SECONDS = 10.0
_POLL_SECONDS = 1.0


def show(
    source: DeploymentSource,
    name: str | None,
    form: TableFormat,
    *,
    watch: bool,
    all_namespaces: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> ExitCode:
    """Print one deployment, or all if `name` is None; with `watch` repeatedly, after every change."""

    def read() -> list[DeploymentView]:
        return [source.get(name)] if name is not None else source.get_all(all_namespaces=all_namespaces)

    def text(items: list[DeploymentView]) -> str:
        return _render(items, form, time.time(), namespaces=all_namespaces)

    tables = form in (TableFormat.TABLE, TableFormat.WIDE)
    location = "in any namespace" if all_namespaces else source.location
    items = read()
    if not watch:
        if not items and tables:
            note(f"no deployments {location}")
        else:
            print_line(text(items))
        return ExitCode.OK
    # Documents are for programs, even on a terminal.
    with live_screen() if tables else nullcontext() as screen:
        shown: list[dict[str, Any]] | None = None
        poll = RetryingPoll()
        while True:
            documents = [item.document() for item in items]
            if screen is not None:
                screen(text(items) if items else f"no deployments {location}")
            elif documents != shown:
                # Compare documents, not the text: ages change every second.
                print_line(text(items))
            shown = documents
            wait(source.poll_seconds)
            found = poll(read)
            items = items if found is None else found


def _render(items: list[DeploymentView], form: TableFormat, now: float, *, namespaces: bool) -> str:
    if form in (TableFormat.JSON, TableFormat.YAML):
        documents = [item.document() for item in items]
        # Several objects become a List, like those of kubectl.
        many = {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": documents}
        return render_document(documents[0] if len(documents) == 1 else many, DocumentFormat(form))
    wide = form is TableFormat.WIDE
    if len(items) == 1 and not namespaces:
        return render.deployment_text(items[0], now, wide=wide)
    return render.deployments_table(items, now, wide=wide, namespaces=namespaces)


def show_why(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print the latest failure, its cause and its repair."""
    item = source.get(name)
    now = time.time()
    fatal = fatal_requests(source, item) if item.running else FatalRequests()
    text = render.why_text(item, now, fatal)
    print_line(text if form is None else render_document(render.why_document(item, now, fatal), form))
    return ExitCode.OK


def show_start(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print the duration of each step of the latest start of every group."""
    item = source.get(name)
    print_line(render.start_text(item) if form is None else render_document(render.start_document(item), form))
    return ExitCode.OK


def show_why_of_logs(files: Sequence[str], form: DocumentFormat | None) -> ExitCode:
    """Print the cause that log files of vLLM, Ray or NCCL prove, of any run; in order of the files.

    Raises:
        CommandError: a file cannot be read.
    """
    logs, places = list[list[str]](), list[str]()
    for name in files:
        try:
            text = _log_text(name)
        except OSError as error:
            raise bad_input(f"--log: {name} cannot be read: {error.strerror or error}") from None
        logs.append(text.splitlines())
        places += [f"{name}:{number}" for number in range(1, len(logs[-1]) + 1)]
    found = diagnose(*logs)
    if found is None:
        print_line("no error in the log" if form is None else render_document({"cause": None, "evidence": []}, form))
        return ExitCode.FAILED
    cause = found.cause or (Cause.ENGINE_CORE_DIED if found.core_died else Cause.UNKNOWN)
    document = {
        "cause": str(cause),
        "deterministic": cause.deterministic,
        "message": found.message,
        "evidence": [{"line": places[number - 1], "text": text} for number, text in found.evidence],
        "remedy": found.remedy,
        "page": f"docs/failures/{_kebab(cause)}.md",
    }
    print_line(render.log_cause_text(document) if form is None else render_document(document, form))
    return ExitCode.OK


_MOST_LOG_BYTES = 64 * 2**20
"""About 25 s of analysis."""


def _log_text(name: str) -> str:
    """Return the last 64 MiB of a log."""
    with Path(name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > _MOST_LOG_BYTES:
            note(f"{name}: only the last 64 MiB of {size / 2**20:.0f} MiB are read; line numbers start there")
        file.seek(max(0, size - _MOST_LOG_BYTES))
        return file.read(_MOST_LOG_BYTES).decode(errors="replace")


def _kebab(cause: Cause) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cause).lower()


def fatal_requests(source: DeploymentSource, item: DeploymentView) -> FatalRequests:
    """Return what the gateway refuses because engines died of it; nothing if the gateway does not respond."""
    from dsv4_operator.verify import endpoint as http

    try:
        with source.api(item) as api:
            url = api.url().removesuffix("/v1") + "/dsv4/fatal-requests"
            with http.open_url("GET", url, token=api.token, total_seconds=_GATEWAY_SECONDS) as response:
                if response.status == HTTPStatus.OK:
                    return FatalRequests.model_validate_json(response.read())
    except (CommandError, *http.ERRORS, pydantic.ValidationError):
        pass
    return FatalRequests()


def show_kernels(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print the providers of a layer's operations in each group's engine, and the alternatives."""
    item = source.get(name)
    text = render.kernels_text(item)
    print_line(text if form is None else render_document(render.kernels_document(item), form))
    return ExitCode.OK


def check_machine(
    peers: Sequence[str],
    wait: float,
    *,
    mtu: int | None,
    require_rdma: bool,
    copies: bool,
    form: DocumentFormat | None,
    root: Path,
) -> ExitCode:
    """Print the checks, including paths to `peers` that respond within `wait` seconds; `FAILED` if any check failed.

    Also the findings about the machines of deployments on several ones: with their loops in `root`, or known there.

    Raises:
        CommandError: the checks could not be performed, or did not finish.
    """
    words = ["--wait", str(wait)]
    words += ["--require-rdma"] if require_rdma else []
    words += [] if copies else ["--no-copies"]
    words += ["--mtu", str(mtu)] if mtu is not None else []
    for peer in peers:
        words += ["--peer", peer]
    words += ["-o", "json"] if form else []
    limit = _CHECK_SECONDS + (2 * wait + 30 if peers else 0) + (_COPIES_SECONDS if copies else 0)
    done = _run_checks(words, capture=form is not None, limit=limit)
    findings = about_machines(root)
    if (root / "remote").is_dir():
        from dsv4_operator.cli import hosts

        for record in hosts.elsewhere(root):
            findings += hosts.examine(record)
    if form:
        machines = {"machines": [each.to_dict() for each in findings]} if findings else {}
        print_line(render_document({**json.loads(done.stdout), **machines}, form))
    else:
        for each in findings:
            print_line(f"{'FAIL' if each.severity is Severity.REFUSE else 'WARN'}  {each}")
    failed = done.returncode != 0 or any(each.severity is Severity.REFUSE for each in findings)
    return ExitCode.FAILED if failed else ExitCode.OK


def about_machines(root: Path, name: str = "*") -> list[Finding]:
    """Return the findings about the machines of the deployments with loops in `root`, or of that called `name`."""
    from dsv4_operator.backends.hosts.documents import HOST_KEY, INVENTORY, InvalidInventory, load_inventory
    from dsv4_operator.cli.machine import APPLIED

    found: list[Finding] = []
    for file in sorted(root.glob(f"{name}/{INVENTORY}")):
        from dsv4_operator.backends.hosts.backend import examine

        try:
            inventory, key = load_inventory(file.read_text()), file.with_name(HOST_KEY).read_text().strip()
        except (OSError, UnicodeDecodeError, InvalidInventory) as error:
            remedy = "run `dsv4 doctor` as root, or `dsv4 up` with --hosts again"
            found.append(Finding(file.parent.name, "Unreadable", f"{file} cannot be read: {error}", remedy))
            continue
        if not (inventory.members(file.parent.name).directory / APPLIED).exists():
            # After `dsv4 down` its services do not run.
            continue
        found += asyncio.run(examine(inventory, key))
    return found


def label_nodes(files: Sequence[Path], form: DocumentFormat | None) -> ExitCode:
    """Print the commands that label the nodes of reports with the nodes that they reach.

    Args:
        files: reports of `dsv4 doctor --peer ADDRESS -o json`, each named after its node.
        form: of a document with the labels; None: commands.

    Raises:
        CommandError: a file is no such report, or the reports prove no paths.
    """
    reports: dict[str, dict[str, Any]] = {}
    for file in files:
        if not re.fullmatch(_NODE_NAME, file.stem):
            problem = f"{file}: {file.stem!r} is not the name of a node, of at most 63 characters"
            raise bad_input(f"{problem}; name the report NODE.json")
        try:
            report = json.loads(file.read_text())
            read_network(file.stem, report)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{file} is not a report ({type(error).__name__}: {error})"
            raise bad_input(f"{problem}; write it with `dsv4 doctor --peer ADDRESS -o json`") from None
        if file.stem in reports:
            raise bad_input(f"{file}: another file is named {file.stem} too; name one report for each node")
        reports[file.stem] = report
    try:
        found = cabled(reports)
    except ValueError as error:
        raise bad_input(str(error)) from None
    if form:
        print_line(render_document({"label": CABLED, "nodes": found}, form))
        return ExitCode.OK
    for value in sorted(set(found.values())):
        nodes = " ".join(sorted(name for name in found if found[name] == value))
        print_line(f"kubectl label node --overwrite {nodes} {CABLED}={value}")
    return ExitCode.OK


def check_copy(root: Path) -> dict[str, Any]:
    """Return the document of the checks for a copy of another machine's /sys, /proc and /dev.

    Raises:
        CommandError: the checks could not be performed.
    """
    done = _run_checks(["--root", str(root), "-o", "json"], capture=True, limit=_COPY_SECONDS)
    return dict(json.loads(done.stdout))


def check_here(seconds: float) -> dict[str, Any]:
    """Return the document of the checks of this machine.

    Raises:
        CommandError: the checks could not be performed within `seconds`.
    """
    return dict(json.loads(_run_checks(["--no-copies", "-o", "json"], capture=True, limit=seconds).stdout))


def _run_checks(words: Sequence[str], *, capture: bool, limit: float) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("psutil") is None:
        raise bad_input("the checks require the runtime, which is not installed; install dsv4[runtime]")
    command = [sys.executable, "-m", _CHECKS, *words]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE if capture else None, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"the checks did not end within {limit:.0f} s, probably because a network card hangs; check `dmesg`"
        ) from None
    if done.returncode not in (0, 1):
        raise CommandError(f"the checks failed with exit code {done.returncode}; see the message above")
    return done


def pack_evidence(source: DeploymentSource, name: str | None, output: Path | None) -> ExitCode:
    """Write the archive and print its path."""
    name, files = source.evidence(name)
    target = output or Path(f"{name}-evidence-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
    if target.is_dir():
        raise bad_input(f"--output {str(target)!r} is a directory; name a file in it, such as {name}.tar.gz")
    write_archive(target, name, files)
    return ExitCode.OK


def write_archive(target: Path, name: str, files: Iterable[EvidenceFile]) -> None:
    """Write files into a .tar.gz file below a directory `name`, without secrets, and print its path."""
    partial = target.with_name(f".{target.name}.part")
    count = 0
    with convert_os_errors("cannot write"):
        try:
            with (
                open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
                tarfile.open(fileobj=file, mode="w:gz") as archive,
            ):
                for count, each in enumerate(files, start=1):  # noqa: B007
                    data = without_secrets(each)
                    entry = tarfile.TarInfo(f"{name}/{each.path}")
                    entry.size, entry.mtime, entry.mode = len(data), int(each.modified), 0o600
                    archive.addfile(entry, io.BytesIO(data))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    note(f"{target}: {count} files, {target.stat().st_size / 1024:.0f} KiB; no prompts, no token")


_HIDDEN = "[hidden: it has the form of a secret]"


def without_secrets(file: EvidenceFile) -> bytes:
    """Return the content of a file, without values of JSON and lines of text that have the form of a secret."""
    text = file.data.decode(errors="surrogateescape")
    if not has_secret(text):
        return file.data
    if file.path.endswith(".json"):
        try:
            return (json.dumps(_hidden(json.loads(text)), indent=2) + "\n").encode()
        except (ValueError, RecursionError):
            # The end of a longer file.
            pass
    lines = (_HIDDEN if has_secret(line) else line for line in text.split("\n"))
    return "\n".join(lines).encode(errors="surrogateescape")


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return _HIDDEN if has_secret(value) else value
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    if isinstance(value, dict):
        return {_hidden(key): _hidden(each) for key, each in value.items()}
    return value


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
    from dsv4_operator.verify import endpoint as http

    try:
        with http.open_url("GET", url, token=token, total_seconds=_RESPONSE_SECONDS):
            return
    except http.ERRORS as error:
        raise CommandError(f"the dashboard at {url} does not answer ({http.reason(error)})") from None
