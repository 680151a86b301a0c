"""`dsv4 down`: end deployments; asking for what is so already is success."""

from __future__ import annotations

from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState, StateError, deployments
from dsv4_operator.cli import leftovers, loop
from dsv4_operator.cli.choose import named, the_one
from dsv4_operator.cli.errors import CommandError, ExitCode, explained
from dsv4_operator.cli.interrupts import Interrupts
from dsv4_operator.cli.output import countdown, say


def run(root: Path, name: str | None, *, every: bool, purge: bool) -> ExitCode:
    """End one deployment, or all of them."""
    if every:
        states = deployments(root)
    elif name is not None:
        found = named(root, name)
        states = [found] if found else []
    else:
        states = [the_one(root, None)] if deployments(root) else []
    if not states:
        say(f"{name or 'nothing'} is not running" if name else "nothing is running")
    failed = [error for state in states if (error := _end(state, purge=purge))]
    if failed:
        raise CommandError(*failed)
    return ExitCode.OK


def _end(state: DeploymentState, *, purge: bool) -> str | None:
    """End one deployment; returns the sentence that says why it could not."""
    try:
        ran = end_loop(state)
        with explained(f"{state.name}: cannot tidy up"), state.lock():
            ran = bool(leftovers.end_processes(state)) or ran
            leftovers.remove_files(state)
            if purge:
                state.purge()
    except PermissionError:
        return f"{state.name} is run by another user, who has to end it"
    except StateError as error:
        # Someone started it anew, its loop could not even be killed, or its directory is not its own.
        return str(error)
    except CommandError as error:
        return str(error)
    say(f"{state.name} {'has ended' if ran else 'is not running'}{'; its files are removed' if purge else ''}")
    return None


def end_loop(state: DeploymentState, *, grace: float = loop.GRACE_SECONDS) -> bool:
    """End the running loop, and return when it is gone; False if there is none.

    Raises:
        PermissionError: it is another user's.
    """
    pid = state.holder()
    if pid is None:
        return False
    with loop.handle(pid) as held, Interrupts() as interrupts:
        # Between reading its number and holding on to it the loop may have ended.
        if held is None or state.holder() != pid:
            return False
        with countdown(f"stopping {state.name}") as tick:
            loop.end(held, progress=tick, impatient=lambda: interrupts.count > 0, grace=grace)
    return True
