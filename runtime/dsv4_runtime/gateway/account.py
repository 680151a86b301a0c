"""The bytes that the gateway keeps for its clients, in one account with one limit.

Everything that a client can make the gateway keep is charged: connections, heads, bodies (arriving, waiting, sent),
answers that are gathered, and what a stream's continuation needs. Who finds no room is refused, so the memory of the
process is the account and what the program itself takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CONNECTION_BYTES = 2**14
"""Charged for a connection: its objects, and what was received and not parsed yet."""
REQUEST_BYTES = 2**14
"""Charged for a request beside its head and body: its objects, and the buffers of its answer."""
SLOW_CLIENT_BYTES = 2**19
"""Charged for an answer whose client does not read: both sides' buffers, full."""
GRACE_SECONDS = 5.0
"""Time that a body may take to arrive before it makes room for others."""


class Charge:
    """One owner's share of an account."""

    def __init__(self, account: Account) -> None:
        self.size = 0
        """Bytes."""
        self.account = account

    def take(self, size: int) -> bool:
        """Add `size` bytes; False, with nothing added, if there is no room for them."""
        account = self.account
        if account.used + size > account.limit and not account.make_room(size, self):
            return False
        account.used += size
        self.size += size
        return True

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self.account.used -= self.size - size
            self.size = size

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self.arrived()
        self.shrink(0)

    def arriving(self, evict: Callable[[], None]) -> None:
        """Note that this is of a body that arrives; `evict` has to release it when others need the room."""
        if self not in self.account.arriving:
            self.account.arriving[self] = time.monotonic(), evict

    def arrived(self) -> None:
        """Note that the body is complete, or will never be."""
        self.account.arriving.pop(self, None)


class Account:
    """Bytes in use, with a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.arriving: dict[Charge, tuple[float, Callable[[], None]]] = {}
        """Bodies that are not complete, the oldest first: when they began, and how to end them."""

    def make_room(self, size: int, charge: Charge) -> bool:
        """Return whether there is room for `size` bytes; ends bodies that have been arriving for long to make it.

        Who sends slowly holds room that others need: with every body at its own pace, a few clients that send nothing
        more could fill the account and keep all others out.
        """
        while self.used + size > self.limit:
            oldest, (since, evict) = next(iter(self.arriving.items()), (charge, (0.0, None)))
            if evict is None or oldest is charge or time.monotonic() - since < GRACE_SECONDS:
                return False
            oldest.arrived()
            evict()
        return True
