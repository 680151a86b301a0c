"""Interface of the sources of deployments, with the types and helpers shared by its implementations."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, Finding, GroupStatus, Hardware, InvalidDeployment, load
from dsv4_operator.api.deployment import read_document
from dsv4_operator.api.values import ValueReason
from dsv4_operator.cli.output import CommandError, ExitCode, LogOptions, bad_input, invalid, note
from dsv4_operator.planning import Facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_operator.planning.planner import checked_divisions
from dsv4_runtime.contract import Process
from dsv4_runtime.contract.gateway import api_keys

if TYPE_CHECKING:
    from dsv4_operator.backends.local.supervisor import LoopReport

_T = TypeVar("_T")

STOPPED = "Stopped"
"""Phase of a deployment without a running reconcile loop; never written to a status."""
LOOP_SILENCE_SECONDS = 10.0
"""Silence of the loop of `dsv4 up` after which its status is not taken for the present state."""
EVIDENCE_TAIL_BYTES = 1024 * 1024
"""Limit of each log in the evidence archive; evidence of earlier failures has a limit of its own."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment with the status shown to users."""

    object: DSV4Deployment
    running: bool
    created: float | None
    """Unix time of the last `dsv4 up` with its file, or of the creation of the cluster's object."""
    stored: Mapping[str, Any] | None = None
    """Object of the API server, including fields that only the server sets; None on this machine."""
    loop: LoopReport | None = None
    """Report about the loop of `dsv4 up`; None if it does not run, and for a cluster."""
    queried: bool = False
    """Whether the status of the members is from them, because the loop does not respond."""
    lost: str = ""
    """How the processes of a deployment ended that was not stopped by `dsv4 down`."""

    @property
    def name(self) -> str:
        return self.object.metadata.name

    @property
    def status(self) -> DeploymentStatus:
        return self.object.status

    @property
    def phase(self) -> str:
        """Return its phase, including `Stopped`."""
        return str(self.status.phase) if self.running else STOPPED

    def document(self) -> dict[str, Any]:
        """Return the object in the form of `kubectl get -o json`."""
        if self.stored is not None:
            return dict(self.stored)
        document: dict[str, Any] = self.object.to_dict()
        document.setdefault("status", {})["phase"] = self.phase
        return document


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """Access to the OpenAI-compatible API or to Ray's dashboard from this machine."""

    url: Callable[[], str]
    """Return the present address; that of the API ends in `/v1`."""
    token: str
    """API key, or token of the dashboard; empty if none is required, or if it cannot be read."""
    permanent: bool
    """False if the address is valid only while the command runs."""


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """A file of the evidence archive."""

    path: str
    """Relative to the directory of the deployment in the archive."""
    data: bytes
    modified: float = field(default_factory=time.time)
    """Unix time."""


class DeploymentSource(Protocol):
    """Reads and changes deployments. Every method raises `CommandError` on failure."""

    poll_seconds: float
    """Interval of `--watch`."""

    @property
    def location(self) -> str:
        """Return the location of the deployments as part of a message: `under /home/you/.dsv4`."""

    def command_line(self, verb: str, name: str = "") -> str:
        """Return the command line of `verb` for the same location."""

    def names(self, *, seconds: float = 30.0) -> list[str]:
        """Return the names of all deployments; fail after `seconds`."""

    def get(self, name: str | None) -> DeploymentView:
        """Return the deployment called `name`, or without a name the only candidate."""

    def get_all(self, *, all_namespaces: bool = False) -> list[DeploymentView]:
        """Return all deployments, with a warning for each that cannot be read."""

    def load(self, file_or_name: str) -> DSV4Deployment:
        """Return the deployment to plan: the content of a file, or an existing deployment."""

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return the machines for a plan of `deployment`; with `chosen` machines of `kind`, as the user requires."""

    def measured(self, name: str) -> tuple[Measured, ...]:
        """Return the memory measured by earlier starts of the deployment; empty if there are none."""

    def api(self, item: DeploymentView) -> AbstractContextManager[ServiceAccess]:
        """Return access to the API for the duration of the context."""

    def dashboard(self, item: DeploymentView, group: int) -> AbstractContextManager[ServiceAccess]:
        """Return access to the dashboard of a group for the duration of the context."""

    def logs(self, name: str | None, options: LogOptions) -> ExitCode:
        """Print the members' logs."""

    def evidence(self, name: str | None, *, complete: bool = False) -> tuple[str, Iterator[EvidenceFile]]:
        """Return the deployment's name and the files that explain its failures.

        With `complete` also all other objects of the deployment, its nodes, and the present status of its agents.
        """

    def strike(
        self, item: DeploymentView, group: GroupStatus, rank: int, process: Process, number: signal.Signals
    ) -> float:
        """Send a signal to a process of a member, and return the Unix time of its machine just before."""

    def restart(self, item: DeploymentView) -> str:
        """Start a new incarnation of every group and return the message for the user."""

    def suspend(self, item: DeploymentView, suspended: bool) -> str:
        """Stop all groups, or start them again, and return the message for the user."""


class RetryingPoll:
    """Repeats a read of a source. Reports the first failure of a series, and the next success.

    The first read of a command should not be retried.
    """

    def __init__(self) -> None:
        self._failing = False

    def __call__(self, read: Callable[[], _T]) -> _T | None:
        """Return the result of `read`, or None if it failed.

        Raises:
            CommandError: a permanent error, for example because the deployment was deleted.
        """
        try:
            found = read()
        except CommandError as error:
            if error.code is not ExitCode.FAILED:
                raise
            if not self._failing:
                note(f"trying again until it works: {error}")
            self._failing = True
            return None
        if self._failing:
            note("it works again")
        self._failing = False
        return found


def read_all(items: Iterable[_T], read: Callable[[_T], DeploymentView]) -> list[DeploymentView]:
    """Return the result of `read` for each item; print a warning for each that cannot be read."""
    found = []
    for item in items:
        try:
            found.append(read(item))
        except CommandError as error:
            for message in error.messages:
                note(f"warning: {message}")
    return found


def names_hint(names: Iterable[str]) -> str:
    """Return the end of a message that lists the existing deployments; empty if there are none."""
    listed = ", ".join(names)
    return f"; there is {listed}" if listed else ""


def first_key(text: str) -> str:
    """Return the first key of an API key file; empty if there is none."""
    try:
        return next(iter(api_keys(text)), "")
    except ValueError:
        # The gateway rejects such a file as a whole.
        return ""


def not_serving(item: DeploymentView, reason: str) -> CommandError:
    """Return the error for a request to a deployment that does not serve."""
    return CommandError(f"{item.name} is not serving: it is {item.phase}{f': {reason}' if reason else ''}")


def read_file(file: str, *, detect_hardware: bool = False) -> DSV4Deployment:
    """Return the deployment in `file`; `-` is stdin.

    Args:
        file: path of the file.
        detect_hardware: whether an omitted `spec.topology.hardware` becomes the hardware of this machine.

    Raises:
        CommandError: the file is invalid (one message per finding), or the query of the GPUs failed.
    """
    name = "stdin" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        # In some locales stdin has invalid bytes as surrogates.
        text.encode("utf-8")
    except FileNotFoundError:
        raise bad_input(f"{name}: there is no such file") from None
    except UnicodeError:
        raise bad_input(f"{name}: is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise bad_input(f"{name}: {error.strerror}") from None
    missing: list[str] = []

    def hardware() -> str:
        # Imports the library of the driver.
        from dsv4_operator.backends.local.gpus import hardware_here

        try:
            found, reason = hardware_here()
        except LookupError as error:
            raise bad_input(
                f"{name}: spec.topology.hardware: is left out, and the GPUs of this machine cannot be read: {error}; "
                f"correct that, or write hardware: {Hardware.CPU}"
            ) from None
        missing.append(reason)
        return found

    try:
        return load(text, hardware if detect_hardware else None)
    except InvalidDeployment as error:
        findings = checked_divisions(lambda: read_document(text), error.findings)
        if any(missing):
            message = f"is not set and defaults to {Hardware.CPU}, because on this machine {missing[0]}"
            findings.insert(0, Finding("spec.topology.hardware", ValueReason.REQUIRED, message))
        raise invalid(name, findings) from None
