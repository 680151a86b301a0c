"""Exit codes of commands, and the one error that `main` turns into text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code that a shell sees; documented in `dsv4 --help`."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


class CommandError(Exception):
    """An expected condition that ends a command: each message becomes one `error: ...` line, never a traceback."""

    def __init__(self, *messages: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages
        self.code = code


def bad_input(*messages: str) -> CommandError:
    """Make the error for a user who gave something wrong, or a machine that is not in the right state for it."""
    return CommandError(*messages, code=ExitCode.BAD_INPUT)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an operating system's error (disk full, no permission) into one sentence that says what was being done."""
    try:
        yield
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        raise bad_input(f"{doing}{where}: {error.strerror or error}") from error
