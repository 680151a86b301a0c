"""Requirements of the GPU ring on the machine; imports neither torch nor vLLM."""

from __future__ import annotations

from dsv4_operator.backends.local import gpus
from dsv4_operator.backends.local.software import cuda_profile
from dsv4_operator.backends.local.state import StateError


def gpu() -> str | None:
    """Return the reason why no test of the ring can run here; None if they can."""
    found = gpus.find()
    if not found.cards:
        return found.problem
    if not any(card.hardware for card in found.cards):
        return f"there is {found.kinds()}, which the catalog does not have"
    return None


def engine() -> str | None:
    """Return the reason why no engine can run on the GPUs here; None if one can."""
    try:
        cuda_profile()
    except StateError as error:
        return str(error)
    return None
