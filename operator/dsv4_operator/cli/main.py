"""Entry points of the programs `dsv4`, `kubectl-dsv4` and `kubectl_complete-dsv4`."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence

import typer

from dsv4_operator.cli.commands import app
from dsv4_operator.cli.output import CommandError, ExitCode, note, program_name

# Directives of Cobra, which kubectl expects on the last line: whether the shell may also complete file names.
_COMPLETE_FILES, _NO_FILES = ":0", ":4"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        # typer handles a closed pipe, as with `| head`: it ends silently with exit code 1.
        result = app(arguments or ["--help"], prog_name=program_name(), standalone_mode=False)
    except CommandError as error:
        for message in error.messages:
            note(f"error: {message}")
        return error.code
    except typer.TyperException as error:
        note(f"error: {error.format_message().rstrip('.')}; see `{program_name()} --help`")
        return ExitCode.BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        note("")
        return ExitCode.INTERRUPTED
    return int(result or 0)


def main() -> None:
    """Run `dsv4` or `kubectl-dsv4`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters outside the terminal's character set must not prevent output.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def complete() -> None:
    """Run `kubectl_complete-dsv4`: print the candidates for the last argument, one per line, and a Cobra directive."""
    arguments = sys.argv[1:]
    # The variables of bash completion.
    os.environ |= {
        "_DSV4_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join(["dsv4", *arguments]),
        "COMP_CWORD": str(len(arguments)),
    }
    with contextlib.suppress(SystemExit):
        app([], prog_name="dsv4", standalone_mode=False)
    print(_COMPLETE_FILES if arguments[:1] == ["plan"] else _NO_FILES)


if __name__ == "__main__":
    main()
