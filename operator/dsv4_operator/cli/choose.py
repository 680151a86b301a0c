"""Choice of the deployment that a command means when its name may be left out."""

from __future__ import annotations

from pathlib import Path

from dsv4_operator.backends.local.state import RESERVED, DeploymentState, StateError, default_root, deployments
from dsv4_operator.cli.errors import bad_input


def root_directory(given: Path | None) -> Path:
    """Return the state directory, absolute, so that it means the same to the loop in its own working directory."""
    return Path((given or default_root()).expanduser()).absolute()


def state_of(root: Path, name: str) -> DeploymentState:
    """Return the files of the deployment `name`, which need not exist.

    Raises:
        CommandError: no deployment of this machine may have that name.
    """
    try:
        return DeploymentState(root, name)
    except StateError as error:
        raise bad_input(str(error)) from None


def named(root: Path, name: str) -> DeploymentState | None:
    """Return the deployment of that name; None if nothing was ever started under it, or it is no name at all.

    Raises:
        CommandError: the name is reserved.
    """
    if name in RESERVED:
        state_of(root, name)
    known = {state.name: state for state in deployments(root)}
    return known.get(name)


def the_one(root: Path, name: str | None) -> DeploymentState:
    """Return the deployment called `name`; without a name the only one that runs, else the only one there is."""
    known = deployments(root)
    if name is not None:
        for state in known:
            if state.name == name:
                return state
        raise bad_input(f"there is no deployment {name!r} under {root}{_known(known)}")
    running = [state for state in known if state.holder() is not None]
    for candidates in (running, known):
        if len(candidates) == 1:
            return candidates[0]
    if not known:
        raise bad_input(f"there is no deployment under {root}; start one with `dsv4 up FILE`")
    raise bad_input(f"which deployment? Give its name{_known(running or known)}")


def _known(states: list[DeploymentState]) -> str:
    return f"; there is {', '.join(state.name for state in states)}" if states else ""
