"""Heartbeats between members: small datagrams, there and back.

Questions over TCP come every second and, once packets were lost, late: TCP waits longer after each loss. A datagram
shows within half a second that a link is back, and how long its round trip takes, for a hundredth of the price.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

_log = logging.getLogger(__name__)

# Incarnation, who asked, who shall answer, 1 for the answer, monotonic time of the question by the asker's clock.
_BODY = struct.Struct("!IHHBd")
_SEAL_BYTES = 16
# Questions to one peer whose answers are still taken, the latest ones: a quarter of a minute of them.
_UNANSWERED = 32


class Heartbeats(asyncio.DatagramProtocol):
    """Asks every peer when it is told to, answers every peer.

    Who does not know the incarnation's token is not heard, and of each question one answer is: a datagram that somebody
    recorded and sends again shows nothing about the peer.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        token: str,
        peers: Mapping[int, tuple[str, int]],
        heard: Callable[[int, float], None],
    ) -> None:
        """Args:
        rank: this member.
        incarnation: others are not heard.
        token: seals every datagram.
        peers: rank to address and port.
        heard: called with a peer's rank and the round trip's seconds whenever it answers.
        """
        self._rank = rank
        self._incarnation = incarnation
        self._key = hashlib.sha256(f"heartbeat {token}".encode()).digest()
        self._peers = peers
        self._heard = heard
        self._unanswered = {peer: deque[float](maxlen=_UNANSWERED) for peer in peers}
        self._transport: asyncio.DatagramTransport | None = None

    async def open(self, address: str, port: int) -> None:
        """Answer at `address` and `port`, and ask from there.

        If the port cannot be had there are no heartbeats, and answers over TCP are all that is heard.
        """
        try:
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=(address, port))
        except OSError as error:
            _log.warning("no heartbeats, UDP port %s of %s cannot be used: %s", port, address, error)

    def ask(self) -> None:
        """Send one beat to every peer."""
        if self._transport is not None:
            for rank, place in self._peers.items():
                asked = time.monotonic()
                self._unanswered[rank].append(asked)
                self._transport.sendto(self._sealed(self._rank, rank, 0, asked), place)

    def close(self) -> None:
        """Stop asking and answering."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.DatagramProtocol`."""
        # Python 3.11's own datagram transport does not derive from the class.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """See `asyncio.DatagramProtocol`."""
        if len(data) != _BODY.size + _SEAL_BYTES or not hmac.compare_digest(data, self._seal(data[: _BODY.size])):
            return
        incarnation, asker, answerer, answer, asked = _BODY.unpack_from(data)
        if incarnation != self._incarnation:
            return
        if answer and asker == self._rank and asked in self._unanswered.get(answerer, ()):
            self._unanswered[answerer].remove(asked)
            self._heard(answerer, max(0.0, time.monotonic() - asked))
        elif not answer and answerer == self._rank and asker in self._peers and self._transport is not None:
            self._transport.sendto(self._sealed(asker, self._rank, 1, asked), addr)

    def error_received(self, exc: Exception) -> None:
        """Ignore a peer that is not there; silence says so too."""

    def _sealed(self, asker: int, answerer: int, answer: int, asked: float) -> bytes:
        return self._seal(_BODY.pack(self._incarnation, asker, answerer, answer, asked))

    def _seal(self, body: bytes) -> bytes:
        return body + hmac.digest(self._key, body, "sha256")[:_SEAL_BYTES]
