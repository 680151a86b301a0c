"""Revision of a specification: the changes that need a new incarnation, and the return to an earlier specification."""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.api.deployment import RESTART_AT, restart_at

APPLIED_WITHOUT_RESTART = {"suspend", "replicas", "recovery", "rollout", "gateway"}
"""Fields of the specification that change without a new incarnation."""
_formed: dict[int, tuple[weakref.ref[DSV4Deployment], str]] = {}
"""By the id of a deployment, as long as it is there: what `formed_from` said of it."""


def formed_from(deployment: DSV4Deployment) -> str:
    """Return the part of `deployment` that members are formed from, as JSON text.

    Fields at their default do not count, so a later version that adds fields restarts nobody.
    """
    # Asked for ten times in a turn, about an object that does not change.
    known = _formed.get(id(deployment))
    if known is not None and known[0]() is deployment:
        return known[1]
    spec = deployment.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude=APPLIED_WITHOUT_RESTART,
        exclude_defaults=True,
        exclude_none=True,
        warnings=False,
    )
    if restart_at(deployment) is not None:
        spec[RESTART_AT] = restart_at(deployment)
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    key = id(deployment)
    _formed[key] = weakref.ref(deployment, lambda _: _formed.pop(key, None)), text
    return text


@lru_cache(maxsize=1024)
def revision_of(formed: str) -> str:
    """Return the fingerprint of what `formed_from` returned."""
    return hashlib.sha256(formed.encode()).hexdigest()[:12]


def revision(deployment: DSV4Deployment) -> str:
    """Return a fingerprint of what members are formed from: another one means that they must be formed again."""
    return revision_of(formed_from(deployment))


def same_specification(one: str, other: str) -> bool:
    """Tell whether two texts of `formed_from` differ at most in when a restart was asked for."""
    return parts(one)[0] == parts(other)[0]


def as_formed_from(deployment: DSV4Deployment, formed: str) -> DSV4Deployment | None:
    """Return `deployment` with members as an earlier `formed_from` had them, and everything else as it is now.

    None if this version of dsv4 reads `formed` differently from the one that wrote it: what it would form then is not
    what once served.
    """
    spec, restart = parts(formed)
    now = deployment.spec.model_dump(mode="json", by_alias=True, include=APPLIED_WITHOUT_RESTART, exclude_none=True)
    annotations = {name: value for name, value in deployment.metadata.annotations.items() if name != RESTART_AT}
    if restart is not None:
        annotations[RESTART_AT] = restart
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    try:
        made = DSV4Deployment.model_validate({"metadata": metadata, "spec": {**spec, **now}})
    except ValidationError:
        return None
    return made if formed_from(made) == formed else None


def parts(formed: str) -> tuple[dict[str, Any], str | None]:
    """Return the specification in the text, and when a restart was last asked for; empty if it is no such text."""
    try:
        spec = json.loads(formed)
    except ValueError:
        return {}, None
    if not isinstance(spec, dict):
        return {}, None
    restart = spec.pop(RESTART_AT, None)
    return spec, restart if isinstance(restart, str) else None
