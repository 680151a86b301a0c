"""Errors that can occur with weights."""

from __future__ import annotations

from dsv4_runtime.contract import Cause


class WeightsError(Exception):
    """The weights are not there and cannot be had; the text says why and what to do."""

    def __init__(self, message: str, cause: Cause = Cause.STAGING_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class TransientError(Exception):
    """A transfer was cut off; trying again may help."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after
        """Seconds that the other side asked to wait."""


class NotAsDescribedError(Exception):
    """A whole file came, and it is not the one that the manifest describes."""
