"""The planner's no."""

from __future__ import annotations

from dsv4_operator.api import Reason


class PlanRefused(Exception):
    """The specification cannot be planned on these machines; the text names field, value and remedy."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
