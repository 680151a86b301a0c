"""For commands that look again and again: what fails for a while does not end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.output import note

_T = TypeVar("_T")


class Patience:
    """Says once that a look failed, and once that it works again. The first look of a command should not have any."""

    def __init__(self) -> None:
        self._lost = False

    def __call__(self, look: Callable[[], _T]) -> _T | None:
        """Return what `look` finds; None if it failed.

        Raises:
            CommandError: what trying again cannot mend, such as a deployment that is gone.
        """
        try:
            found = look()
        except CommandError as error:
            if error.code is not ExitCode.FAILED:
                raise
            if not self._lost:
                note(f"trying again until it works: {error}")
            self._lost = True
            return None
        if self._lost:
            note("it works again")
        self._lost = False
        return found
