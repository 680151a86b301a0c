"""Failed parts of a reconcile, as the status shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4_operator.api import Reason

_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """A failure that lasts; it is tried again."""

    message: str
    group: int | None = None
    """Index of the group that it concerns; None: the whole deployment."""
    reason: Reason = Reason.ACTION_FAILED

    def __str__(self) -> str:
        return self.message if self.group is None else f"group {self.group}: {self.message}"


def joined(problems: Iterable[object]) -> str:
    """Return all of them as one text of at most 1,000 characters."""
    text = "; ".join(map(str, problems))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
