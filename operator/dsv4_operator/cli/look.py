"""View of a deployment as the state directory has it, corrected by whether its loop runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dsv4_operator.api import Condition, ConditionStatus, ConditionType, DeploymentStatus, DSV4Deployment, Reason
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.errors import bad_input

STOPPED = "Stopped"
"""The phase of a deployment that nobody runs; the loop itself can never write it."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment as a reader should see it."""

    object: DSV4Deployment
    running: bool
    created: float | None
    """Unix time at which its file was last given to `dsv4 up`, or at which the cluster's object was made."""
    kept: Mapping[str, Any] | None = None
    """The document that the cluster keeps, with what only it knows; None: there is no cluster."""

    @property
    def name(self) -> str:
        """Return its name."""
        return self.object.metadata.name

    @property
    def status(self) -> DeploymentStatus:
        """Return its status."""
        return self.object.status

    @property
    def phase(self) -> str:
        """Return its phase, `Stopped` included."""
        return str(self.status.phase) if self.running else STOPPED

    def document(self) -> dict[str, Any]:
        """Return the object as `kubectl get -o json` would print it."""
        if self.kept is not None:
            return dict(self.kept)
        document: dict[str, Any] = self.object.to_dict()
        document.setdefault("status", {})["phase"] = self.phase
        return document


def look(state: DeploymentState) -> DeploymentView:
    """Read a deployment.

    Raises:
        CommandError: nothing was ever started under this name, or its files are unreadable.
    """
    try:
        # Before the files: a loop that ends in between has written its last word by then.
        running = state.holder() is not None
        found = state.object() or state.manifest()
    except OSError as error:
        raise bad_input(
            f"the files of {state.name!r} in {state.directory} cannot be read: {error.strerror or error}"
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise bad_input(
            f"the files of {state.name!r} in {state.directory} cannot be read (written by another version of dsv4?); "
            f"`dsv4 down {state.name} --purge` removes them"
        ) from error
    if found is None:
        raise bad_input(f"there is no deployment {state.name!r} under {state.root}")
    created = None
    with contextlib.suppress(OSError):
        created = (state.directory / "manifest.json").stat().st_mtime
    return DeploymentView(found if running else _stopped(found), running, created)


def _stopped(found: DSV4Deployment) -> DSV4Deployment:
    """Return it without what only a running loop can promise, however it ended: readiness, addresses, processes."""
    status = found.status
    groups = tuple(group.model_copy(update={"members": ()}) for group in status.groups)
    message = "the loop is not running"
    ready = status.condition(ConditionType.READY)
    conditions = tuple(
        condition
        if condition.type not in (ConditionType.READY, ConditionType.PROGRESSING)
        else _false(condition, message)
        for condition in status.conditions
    )
    update = {"endpoint": None, "ray_dashboard": None, "ready_replicas": 0, "groups": groups, "conditions": conditions}
    return (
        found if ready is None and not groups else found.model_copy(update={"status": status.model_copy(update=update)})
    )


def _false(condition: Condition, message: str) -> Condition:
    if condition.status is ConditionStatus.FALSE:
        return condition
    return condition.model_copy(
        update={"status": ConditionStatus.FALSE, "reason": Reason.GROUP_STOPPED, "message": message}
    )
