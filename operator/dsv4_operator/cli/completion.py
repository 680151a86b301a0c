"""`kubectl_complete-dsv4`: what kubectl offers after `kubectl dsv4`; shells ask `dsv4` itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys

from dsv4_operator.cli.commands import app

# Cobra's directives, which kubectl expects on the last line: whether the shell may offer files too.
_FILES, _NO_FILES = ":0", ":4"


def main() -> None:
    """Print the words that may take the place of the last argument, one a line, and a directive."""
    words = sys.argv[1:]
    # As bash asks.
    os.environ |= {
        "_DSV4_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join(["dsv4", *words]),
        "COMP_CWORD": str(len(words)),
    }
    with contextlib.suppress(SystemExit):
        app([], prog_name="dsv4", standalone_mode=False)
    print(_FILES if words[:1] == ["plan"] else _NO_FILES)
