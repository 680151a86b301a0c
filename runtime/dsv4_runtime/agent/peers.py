"""The other members of the group: their status, polled once a second, and their heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import aiohttp

from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.util.clock import tick, unix_time
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger(__name__)

# Incarnation, sender, receiver, 1 for the answer, monotonic time of the request by the sender's clock.
_BODY = struct.Struct("!IHHBd")
_SEAL_BYTES = 16
# Number of latest requests to one peer whose answers still count: those of a quarter of a minute.
_UNANSWERED = 32


class Heartbeats(asyncio.DatagramProtocol):
    """Sends heartbeats to every peer and answers those of every peer.

    Datagrams without the incarnation's token are dropped, and each request counts for one answer: a replayed datagram
    proves nothing about the peer.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        token: str,
        peers: Mapping[int, tuple[str, int]],
        heard: Callable[[int, float], None],
    ) -> None:
        """Take the addresses and ports of the peers. `heard` is called with a peer's rank and the seconds of the round
        trip for every answer; datagrams of other incarnations are dropped."""
        self._rank = rank
        self._incarnation = incarnation
        self._key = hashlib.sha256(f"heartbeat {token}".encode()).digest()
        self._peers = peers
        self._heard = heard
        self._unanswered = {peer: deque[float](maxlen=_UNANSWERED) for peer in peers}
        self._transport: asyncio.DatagramTransport | None = None

    async def open(self, address: str, port: int) -> None:
        """Open the UDP socket at `address` and `port`.

        If the port cannot be used there are no heartbeats, and only the answers over TCP count.
        """
        try:
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=(address, port))
        except OSError as error:
            _log.warning("no heartbeats, UDP port %s of %s cannot be used: %s", port, address, error)

    @property
    def opened(self) -> bool:
        """Return whether there are heartbeats."""
        return self._transport is not None

    def ask(self) -> None:
        """Send one beat to every peer."""
        if self._transport is not None:
            for rank, address in self._peers.items():
                asked = time.monotonic()
                self._unanswered[rank].append(asked)
                self._transport.sendto(self._sealed(self._rank, rank, 0, asked), address)

    def close(self) -> None:
        """Close the socket."""
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
        """Ignore the error: a missing peer shows as silence."""

    def _sealed(self, asker: int, answerer: int, answer: int, asked: float) -> bytes:
        return self._seal(_BODY.pack(self._incarnation, asker, answerer, answer, asked))

    def _seal(self, body: bytes) -> bytes:
        return body + hmac.digest(self._key, body, "sha256")[:_SEAL_BYTES]


POLL_SECONDS = 1.0
BEAT_SECONDS = 0.4
_TIMEOUT_SECONDS = 2.0
# A silent peer is polled more often, so that the first answer after a loss does not wait for TCP.
_SILENT_POLL_SECONDS = 0.2
_SILENT_TIMEOUT_SECONDS = 0.7
_SILENT_SECONDS = 1.5
# After two missing heartbeats. A connection is accepted within a round trip; a lost packet is sent again too late.
_CONNECT_AFTER_SECONDS = 1.0
_CONNECT_SECONDS = 0.7
# After such a gap between two readings of the clock this agent was stopped, so missing answers prove nothing.
_STOOD_STILL_SECONDS = 2.5


class Peers:
    """Polls the status of the other ranks until closed.

    An answer from another incarnation counts as none: that member is not of this group.
    """

    def __init__(self, plan: GroupPlan, own: int, token: str) -> None:
        self._plan = plan
        self._me = plan.members[own]
        self._client = AgentClient(token)
        self._peers: dict[int, Peer] = {member.rank: Peer() for member in plan.members if member.rank != own}
        self._changed = asyncio.Event()
        self._awake = self._looked = time.monotonic()
        addresses = {rank: (plan.members[rank].address, plan.members[rank].ports.agent) for rank in self._peers}
        self._addresses = addresses
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._heartbeats = Heartbeats(own, plan.incarnation, token, addresses, self._beat)

    @property
    def all(self) -> Mapping[int, Peer]:
        """Map each rank to its latest answer."""
        return self._peers

    def silence(self, rank: int, now: float) -> float | None:
        """Return the seconds since the last sign of life of `rank`, without the pauses of this agent; None: there was
        none."""
        return self._peers[rank].silence(now, self.awake(now))

    def awake(self, now: float) -> float:
        """Return the end of this agent's latest pause, in monotonic time.

        The first reading of the clock after a pause detects it.
        """
        if now - self._looked > _STOOD_STILL_SECONDS:
            self._awake = now
        self._looked = max(self._looked, now)
        return self._awake

    async def changed(self, seconds: float) -> None:
        """Wait for an answer or a failed request of any peer, `seconds` at most."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            await asyncio.gather(self._beats(), *(self._follow(rank) for rank in self._peers))
        finally:
            await self._client.close()

    def _beat(self, rank: int, round_trip: float) -> None:
        self._peers[rank] = replace(self._peers[rank], beat=time.monotonic(), round_trip=round_trip, accepting=None)

    async def _beats(self) -> None:
        await self._heartbeats.open(self._me.address, self._me.ports.agent)
        try:
            while True:
                self._try_silent_peers(time.monotonic())
                self._heartbeats.ask()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._heartbeats.close()

    def _try_silent_peers(self, now: float) -> None:
        """Connect to silent agents: the machine's kernel accepts connections even if the agent hangs."""
        for rank, address in self._addresses.items():
            silence = self.silence(rank, now)
            running = self._connecting.get(rank)
            if silence is not None and silence > _CONNECT_AFTER_SECONDS and (running is None or running.done()):
                self._connecting[rank] = asyncio.create_task(self._connect(rank, address))

    async def _connect(self, rank: int, address: tuple[str, int]) -> None:
        began = time.monotonic()
        accepted = False
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(*address)
                accepted = True
                writer.close()
        except (OSError, TimeoutError) as error:
            if own_shortage(error) is not None:
                # Nothing is known about the machine.
                return
        peer = self._peers[rank]
        if peer.alive is not None and peer.alive < began:
            since = (peer.accepting or began) if accepted else None
            self._peers[rank] = replace(peer, accepting=since)

    async def _follow(self, rank: int) -> None:
        member = self._plan.members[rank]
        url = f"http://{member.address}:{member.ports.agent}"
        while True:
            asked, began = time.monotonic(), unix_time()
            silence = self.silence(rank, asked)
            silent = silence is not None and silence > _SILENT_SECONDS
            try:
                timeout = _SILENT_TIMEOUT_SECONDS if silent else _TIMEOUT_SECONDS
                status = await self._client.status(url, seconds=timeout)
                if status.incarnation != self._plan.incarnation:
                    raise ValueError(f"it belongs to incarnation {status.incarnation}")
                known = self._peers[rank]
                heard, behind = time.monotonic(), _behind(status.time, began, unix_time())
                self._peers[rank] = replace(
                    known,
                    asked=asked,
                    status=status,
                    heard=heard,
                    error=None,
                    refused=False,
                    behind=behind,
                    accepting=None,
                )
            except AGENT_ERRORS as error:
                if own_shortage(error) is not None and not self._heartbeats.opened:
                    # Nothing can arrive, as in a pause.
                    self._awake = time.monotonic()
                refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                    error.os_error, ConnectionRefusedError
                )
                reason = str(error) or type(error).__name__
                self._peers[rank] = replace(self._peers[rank], asked=asked, error=reason, refused=refused)
            self._changed.set()
            await tick(_SILENT_POLL_SECONDS if silent else POLL_SECONDS)


def _behind(written: float, before: float, after: float) -> float:
    """Return the seconds by which a clock that showed `written` between `before` and `after` lags; 0 unless surely
    wrong."""
    return 0.0 if before <= written <= after else (before + after) / 2 - written
