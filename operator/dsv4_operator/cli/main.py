"""The `dsv4` command: how everything ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import typer

from dsv4_operator.cli.commands import app
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.output import note
from dsv4_operator.cli.where import program


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        # A closed pipe, as with `| head`, is typer's business: it ends quietly with 1.
        result = app(arguments or ["--help"], prog_name=program(), standalone_mode=False)
    except CommandError as error:
        for message in error.messages:
            note(f"error: {message}")
        return error.code
    except typer.TyperException as error:
        note(f"error: {error.format_message().rstrip('.')}; see `{program()} --help`")
        return ExitCode.BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        note("")
        return ExitCode.INTERRUPTED
    return int(result or 0)


def main() -> None:
    """Run `dsv4` or `kubectl-dsv4`: their entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal's character set lacks is no reason to say nothing.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()


if __name__ == "__main__":
    main()
