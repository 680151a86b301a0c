"""Source of deployments, as commands see it: one interface to this machine and to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.log_lines import LogOptions
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.planning import Facts
from dsv4_operator.planning.catalog import Machine
from dsv4_operator.planning.memory import Measured
from dsv4_runtime.contract.gateway import api_keys


@dataclass(frozen=True, slots=True)
class Api:
    """Access of this machine to the API."""

    url: Callable[[], str]
    """Its base URL now, which ends in `/v1`."""
    key: str
    """Key that requests have to show; empty if none."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Access of a browser on this machine to Ray's dashboard."""

    url: Callable[[], str]
    """Its address now."""
    token: str
    """Token that the page asks for; empty if it cannot be read."""
    lasts: bool
    """False: only as long as the command runs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of the evidence."""

    path: str
    """Below the deployment's name."""
    data: bytes
    modified: float
    """Unix time."""


class DeploymentSource(Protocol):
    """Reads and changes deployments. Every method raises `CommandError` with one sentence if it cannot."""

    pause: float
    """Seconds between two looks of somebody who watches."""

    @property
    def place(self) -> str:
        """Return where the source looks, as a sentence says it: `under /home/you/.dsv4`."""
        ...

    def command(self, verb: str, name: str = "") -> str:
        """Return what to type for `verb`, so that it means the same place."""
        ...

    def names(self, *, seconds: float = 30.0) -> list[str]:
        """Return the name of every deployment; within `seconds`, or it is an error."""
        ...

    def one(self, name: str | None) -> DeploymentView:
        """Return the deployment called `name`; without a name the one that is meant if only one can be."""
        ...

    def every(self, *, everywhere: bool = False) -> list[DeploymentView]:
        """Return every deployment; `everywhere`: of all namespaces."""
        ...

    def given(self, what: str) -> DSV4Deployment:
        """Return the deployment that `dsv4 plan` was given: a file, or the name of one that is there."""
        ...

    def facts(self, deployment: DSV4Deployment, kind: Machine, *, chosen: bool) -> Facts:
        """Return the machines that a plan of `deployment` is made for; those of `kind` if the user has `chosen` it."""
        ...

    def measured(self, name: str) -> tuple[Measured, ...]:
        """Return what starts of the deployment called `name` logged about their memory; nothing if there is none."""
        ...

    def api(self, item: DeploymentView) -> AbstractContextManager[Api]:
        """Return a way to the API, open while it is entered."""
        ...

    def dashboard(self, item: DeploymentView, group: int) -> AbstractContextManager[Dashboard]:
        """Return a way to the dashboard of a group, open while it is entered."""
        ...

    def logs(self, name: str | None, request: LogOptions) -> ExitCode:
        """Print what the members wrote."""
        ...

    def evidence(self, name: str | None) -> tuple[str, Iterator[Piece]]:
        """Return the deployment's name, and everything that tells why it died."""
        ...

    def restart(self, item: DeploymentView) -> str:
        """Have every group formed anew; returns the sentence that says so."""
        ...

    def suspend(self, item: DeploymentView, wanted: bool) -> str:
        """Stop everything, or start it again; returns the sentence that says so."""
        ...


def first_key(text: str) -> str:
    """Return the first of a file of keys, as the gateway reads it; empty if there is none."""
    try:
        return next(iter(api_keys(text)), "")
    except ValueError:
        # The gateway refuses the whole file.
        return ""


def not_serving(item: DeploymentView, reason: str) -> CommandError:
    """Make the error that refuses to talk to a deployment that cannot answer."""
    return CommandError(f"{item.name} is not serving: it is {item.phase}{f': {reason}' if reason else ''}")
