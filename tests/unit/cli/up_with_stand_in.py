"""`dsv4` with the stand-in as its loop: `up_with_stand_in.py MODE ARGUMENTS...`."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import main, up

mode = sys.argv.pop(1)
seen = Path(tempfile.mkdtemp(dir=os.environ.get("STAND_IN_SEEN"))) / "seen"
seen.touch()
read = DeploymentState.object_text


def object_text(state: DeploymentState) -> str | None:
    """Read the object, and record for the stand-in that it was read."""
    text = read(state)
    new = seen.with_suffix(".new")
    new.write_text(text or "")
    new.replace(seen)
    return text


def command(state: DeploymentState, *, attached: bool) -> list[str]:
    stand_in = Path(__file__).with_name("stand_in_loop.py")
    return [sys.executable, str(stand_in), str(state.root), state.name, mode, str(attached), str(seen)]


DeploymentState.object_text = object_text  # type: ignore[method-assign]
up.run = functools.partial(up.run, command=command)
main.main()
