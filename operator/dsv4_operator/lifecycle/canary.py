"""Whether users reach a deployment: a pure state over the results of requests through its public endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dsv4_operator.api import GroupPhase, GroupStatus

PERIOD_SECONDS = 30.0
"""Between requests while they succeed."""
AGAIN_SECONDS = 5.0
"""Between requests after one that failed."""
TEXT_SECONDS = 60.0
"""Between texts of a problem that goes on: a status is not written with every request that fails."""
UNTRIED = "no request through the public endpoint was answered yet"

UNREACHED = "the endpoint does not: "
"""Begins what the condition Ready has of `Canary.problem`."""

Lives = frozenset[tuple[int, int, int]]
"""Group, incarnation and engine generation of every group that serves."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Knowledge about the public endpoint of one deployment."""

    problem: str | None = UNTRIED
    """Why users are not answered, for people; None: a request was answered."""
    lives: Lives = frozenset()
    gateways: frozenset[str] = frozenset()
    """Gateways that are ready, by their uid."""
    suspect: bool = False
    """Whether the latest request failed after one that succeeded, which has to be confirmed."""
    changed: bool = True
    """Whether engines or gateways changed since the latest request: a failure needs no confirmation then."""
    due: float = 0.0
    """Monotonic time of the next request."""
    told: float = 0.0
    """Monotonic time since which `problem` has its text."""


def lives_of(groups: Iterable[GroupStatus]) -> Lives:
    """Return the engines that serve."""
    serving = (group for group in groups if group.phase is GroupPhase.SERVING)
    return frozenset((group.index, group.incarnation, group.engine_generation) for group in serving)


def adopted(problem: str | None, lives: Lives, gateways: frozenset[str], now: float) -> Canary:
    """Return the knowledge of an operator that takes over a deployment, whose last one left `problem` in the status.

    It tries at once, and confirms a failure before it takes anything back.
    """
    return Canary(problem, lives, gateways, changed=False, due=now, told=now)


def seen(known: Canary, lives: Lives, gateways: frozenset[str], now: float) -> Canary:
    """Return what is known after a look at engines and gateways.

    Each new engine has to answer through the endpoint once before it counts. Until it serves the deployment is not
    Ready for that reason alone, so nothing is taken back here that was said before.
    """
    if lives - known.lives:
        return Canary(UNTRIED, lives, gateways, due=now)
    if (lives, gateways) == (known.lives, known.gateways):
        return known
    return replace(known, lives=lives, gateways=gateways, changed=True, due=min(known.due, now))


def answered(known: Canary, asked: Canary, problem: str | None, now: float, spread: float) -> Canary:
    """Return what is known after a request.

    Args:
        known: as it is now.
        asked: as it was when the request began.
        problem: why it failed; None: it was answered.
        now: monotonic time.
        spread: factor of the next period, about 1, so that requests of many deployments do not come together.
    """
    if known.lives - asked.lives:
        # It says nothing about the engine that came meanwhile.
        return replace(known, due=now)
    if problem is None:
        return replace(known, problem=None, suspect=False, changed=False, due=now + PERIOD_SECONDS * spread)
    again = replace(known, changed=False, due=now + AGAIN_SECONDS * spread)
    if known.problem is None and not known.suspect and not known.changed:
        return replace(again, suspect=True)
    if known.problem not in (None, UNTRIED) and now - known.told < TEXT_SECONDS:
        return again
    return replace(again, problem=problem, suspect=False, told=now)
