"""Exit codes, the error type that `main` prints, and the program's name in messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4_operator.api import Finding  # slow to load: `dsv4 --help` needs none of it

KUBECTL_PLUGIN = "kubectl-dsv4"
"""Program that kubectl runs for `kubectl dsv4`."""
KUBECTL_COMPLETION = "kubectl_complete-dsv4"
"""Program that kubectl runs for shell completion after `kubectl dsv4`."""


def program_name() -> str:
    """Return the command as typed by the user: `dsv4` or `kubectl dsv4`."""
    return "kubectl dsv4" if Path(sys.argv[0]).name in (KUBECTL_PLUGIN, KUBECTL_COMPLETION) else "dsv4"


class ExitCode(IntEnum):
    """Exit code of a command; documented in `dsv4 --help`."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    UNCERTAIN = 3
    """`dsv4 plan`: the plan expects too little memory by less than its uncertainty. `dsv4 verify` and
    `dsv4 bench`: the endpoint does not answer, or checks or rows are missing."""
    INTERRUPTED = 130


class CommandError(Exception):
    """An expected error that ends a command: each message becomes one `error: ...` line, never a traceback."""

    def __init__(self, *messages: str, code: ExitCode = ExitCode.FAILED, findings: Sequence[Finding] = ()) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages
        self.code = code
        self.findings = tuple(findings)
        """The same as data, for documents."""


def bad_input(*messages: str, findings: Sequence[Finding] = ()) -> CommandError:
    """Return the error for invalid input, or for a machine in an unsuitable state."""
    return CommandError(*messages, code=ExitCode.BAD_INPUT, findings=findings)


def invalid(source: str, findings: Sequence[Finding]) -> CommandError:
    """Return the error for findings about `source`, a file or an option."""
    return bad_input(*(f"{source}: {finding}" for finding in findings), findings=findings)


@contextmanager
def convert_os_errors(action: str) -> Iterator[None]:
    """Convert an operating system error (disk full, no permission) into a `CommandError` that names the action."""
    try:
        yield
    except OSError as error:
        file = f" {str(error.filename)!r}" if error.filename else ""
        raise bad_input(f"{action}{file}: {error.strerror or error}") from error
