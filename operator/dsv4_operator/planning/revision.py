"""Which changes of a specification need a new incarnation."""

from __future__ import annotations

import hashlib
import json

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.api.annotations import RESTART_AT, restart_at

_APPLIED_WITHOUT_RESTART = {"suspend", "replicas", "recovery", "gateway"}


def revision(deployment: DSV4Deployment) -> str:
    """A fingerprint of what members are formed from: another one means that they must be formed again.

    Fields at their default do not count, so a later version that adds fields restarts nobody.
    """
    spec = deployment.spec.model_dump(
        mode="json", by_alias=True, exclude=_APPLIED_WITHOUT_RESTART, exclude_defaults=True, exclude_none=True
    )
    if restart_at(deployment) is not None:
        spec[RESTART_AT] = restart_at(deployment)
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
