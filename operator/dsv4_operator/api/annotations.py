"""Annotations of the object: what people may ask of a deployment that is no part of its specification."""

from __future__ import annotations

from dsv4_operator.api.deployment import DSV4Deployment

RESTART_AT = "dsv4.dev/restart-at"
"""A new value, by custom the present time: every group is ended and formed again, as `kubectl rollout restart` does."""

PAUSED = "dsv4.dev/paused"
"""`true`: nothing is formed, ended or recovered until it is removed; the status goes on saying what is there."""


def restart_at(deployment: DSV4Deployment) -> str | None:
    """Return when a restart was last asked for; None if never."""
    return deployment.metadata.annotations.get(RESTART_AT)


def is_paused(deployment: DSV4Deployment) -> bool:
    """Tell whether dsv4 is asked to keep its hands off."""
    return deployment.metadata.annotations.get(PAUSED, "").lower() == "true"
