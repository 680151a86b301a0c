"""`dsv4` with the stand-in as its loop: `up_with_stand_in.py MODE ARGUMENTS...`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import main, up

mode = sys.argv.pop(1)


def command(state: DeploymentState, *, attached: bool) -> list[str]:
    stand_in = Path(__file__).with_name("stand_in_loop.py")
    return [sys.executable, str(stand_in), str(state.root), state.name, mode, str(attached)]


up.run = functools.partial(up.run, command=command)
main.main()
