"""Exclusive use of one engine by one request, over all gateways that send to it.

An engine that dies while exactly one request can be in it died of that request. One gateway cannot know what others
have sent, so the exclusion is enforced where all requests pass: in vLLM's API process (`engine.token_auth`). The
exclusion is tied to an open HTTP request and ends with it, so no failure of a gateway leaves an engine reserved.

Every request of a gateway has an `X-Request-Id`; those of agents (metrics, health, canary) have none and are never
excluded. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

HEADER = "X-DSV4-Turn"
"""In a request: `OWNER KIND`. In an answer with status 503: the `Refused` reason; the engine did not get it."""
OWN_HEADER = "X-Request-Id"
"""Header of every request of a gateway."""

_CLAIM_SECONDS = 2.0
"""Time for which a refused exclusive request keeps new requests of others out; each attempt renews it."""


class Kind(StrEnum):
    """Kinds of requests."""

    SHARED = "shared"
    """May be open beside any other; also a request of a gateway without the header."""
    ALONE = "alone"
    """No request of another owner is admitted while it is open."""
    PROBE = "probe"
    """One harmless completion of a gateway, admitted always. Its answer proves that what was aborted before is gone."""
    RELEASE = "release"
    """Ends the exclusion of the owner's open request. It has no other effect."""


_KINDS = frozenset(kind.value for kind in Kind)


class Refused(StrEnum):
    """Reasons for which a request is not admitted."""

    TAKEN = "taken"
    """A request of another owner is alone, or waits to be."""
    BUSY = "busy"
    """Requests of others are open."""
    UNSETTLED = "unsettled"
    """Requests were aborted, and the engine has not shown since that it dropped them: send a probe."""


_REASONS = frozenset(reason.value for reason in Refused)


def reason(value: str) -> Refused:
    """Return the reason in the header of an answer; an unknown one reads as `TAKEN`."""
    return Refused(value) if value in _REASONS else Refused.TAKEN


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request."""

    owner: str
    """Empty: not known."""
    kind: Kind
    order: int


def header(owner: str, kind: Kind) -> str:
    """Return the value of the header. `owner`: a random word of one gateway process, without blanks."""
    return f"{owner} {kind}"


def wanted(value: str | None, *, gateway: bool) -> tuple[str, Kind] | None:
    """Return owner and kind of a request by its header; None: the request is not subject to turns.

    Args:
        value: the header; None: the request has none.
        gateway: whether the request is one of a gateway's (`OWN_HEADER`).
    """
    owner, _, kind = (value or "").partition(" ")
    if owner and kind in _KINDS:
        return owner, Kind(kind)
    return ("", Kind.SHARED) if gateway else None


class Turns:
    """Requests that are open in one API process, and which of them is alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._order = 0
        self._open: dict[Ticket, None] = {}
        self._aborted: dict[str, int] = {}
        """Owner to the order of its latest aborted request that may still be in the engine."""
        self._alone: Ticket | None = None
        self._claim = "", 0.0
        """Owner that waits to be alone, and until when."""

    def enter(self, owner: str, kind: Kind) -> Ticket | Refused:
        """Admit a request, or return why it is not admitted."""
        self._order += 1
        ticket = Ticket(owner, kind, self._order)
        if kind is Kind.RELEASE:
            if self._alone is not None and self._alone.owner == owner:
                self._alone = None
            return ticket
        if kind is not Kind.PROBE:
            refused = self._refused(owner, kind)
            if refused is not None:
                return refused
        if kind is Kind.ALONE:
            self._alone, self._claim = ticket, ("", 0.0)
        self._open[ticket] = None
        return ticket

    def _refused(self, owner: str, kind: Kind) -> Refused | None:
        claimed, until = self._claim
        if self._alone is not None and (self._alone.owner != owner or kind is Kind.ALONE):
            return Refused.TAKEN
        if claimed not in ("", owner) and self._clock() < until:
            return Refused.TAKEN
        if kind is not Kind.ALONE:
            return None
        busy = any(other.owner != owner and other.kind is not Kind.PROBE for other in self._open)
        if not busy and not self._aborted:
            return None
        self._claim = owner, self._clock() + _CLAIM_SECONDS
        return Refused.BUSY if busy else Refused.UNSETTLED

    def leave(self, ticket: Ticket, *, complete: bool, proof: bool = False) -> None:
        """Note that a request is over.

        Args:
            ticket: what `enter` returned.
            complete: whether its whole answer was sent; if not, the engine may still have it.
            proof: whether the engine computed the answer: a probe with status 200.
        """
        self._open.pop(ticket, None)
        if self._alone is ticket:
            self._alone = None
        if ticket.kind in (Kind.PROBE, Kind.RELEASE):
            if proof and ticket.kind is Kind.PROBE:
                self._aborted = {owner: last for owner, last in self._aborted.items() if last > ticket.order}
        elif not complete:
            self._order += 1
            self._aborted[ticket.owner] = self._order
