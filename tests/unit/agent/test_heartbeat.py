from __future__ import annotations

import asyncio
import socket
from itertools import count

import pytest

from dsv4_runtime.agent.peers import Heartbeats
from dsv4_testkit.waiting import free_ports


async def exchange(*, replies: int = 0, token: str = "t", incarnation: int = 1) -> list[tuple[int, float]]:
    """Return the replies of rank 1 to at least ten heartbeats of rank 0, and to more until there are `replies`."""
    heard: list[tuple[int, float]] = []
    ports = free_ports(2)
    one = Heartbeats(0, 1, "t", {1: ("127.0.0.1", ports[1])}, lambda rank, trip: heard.append((rank, trip)))
    other = Heartbeats(1, incarnation, token, {0: ("127.0.0.1", ports[0])}, lambda rank, trip: None)
    for beats, port in zip((one, other), ports, strict=True):
        await beats.open("127.0.0.1", port)
    async with asyncio.timeout(60):
        for number in count():
            one.ask()
            await asyncio.sleep(0.05)
            if number >= 9 and len(heard) >= replies:
                break
    one.close()
    other.close()
    return heard


async def test_members_receive_heartbeats_and_measure_the_round_trip() -> None:
    heard = await exchange(replies=5)
    assert all(rank == 1 and 0 <= trip < 60 for rank, trip in heard)


async def test_heartbeats_with_another_token_or_incarnation_are_ignored() -> None:
    assert await exchange(token="other") == []
    assert await exchange(incarnation=2) == []


class Wire:
    """Transport that records the data sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def sendto(self, data: bytes, addr: tuple[str, int]) -> None:
        self.sent.append(data)


def wired(rank: int, heard: list[int]) -> tuple[Heartbeats, Wire]:
    beats, wire = Heartbeats(rank, 1, "t", {1 - rank: ("127.0.0.1", 1)}, lambda peer, trip: heard.append(peer)), Wire()
    beats.connection_made(wire)  # type: ignore[arg-type]
    return beats, wire


def test_replayed_heartbeat_answers_are_ignored() -> None:
    heard: list[int] = []
    (one, asks), (other, answers) = wired(0, heard), wired(1, [])
    one.ask()
    other.datagram_received(asks.sent[0], ("127.0.0.1", 1))
    for _ in range(3):
        one.datagram_received(answers.sent[0], ("127.0.0.1", 1))
    assert heard == [1]


def test_answers_to_heartbeats_of_an_earlier_process_are_ignored() -> None:
    heard: list[int] = []
    (earlier, asks), (other, answers), (one, _) = wired(0, []), wired(1, []), wired(0, heard)
    earlier.ask()
    other.datagram_received(asks.sent[0], ("127.0.0.1", 1))
    one.ask()
    one.datagram_received(answers.sent[0], ("127.0.0.1", 1))
    assert heard == []


def test_heartbeat_answers_are_accepted_in_any_order_within_a_bound() -> None:
    heard: list[int] = []
    (one, asks), (other, answers) = wired(0, heard), wired(1, [])
    for _ in range(40):
        one.ask()
    for question in reversed(asks.sent):
        other.datagram_received(question, ("127.0.0.1", 1))
    for answer in answers.sent:
        one.datagram_received(answer, ("127.0.0.1", 1))
    assert len(heard) == 32


async def test_invalid_heartbeats_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Heartbeats(0, 1, "t", {1: ("127.0.0.1", 1)}, lambda rank, trip: pytest.fail("heard rubbish"))
    for data in (b"", b"x" * 33, b"\0" * 200):
        beats.datagram_received(data, ("127.0.0.1", 9))


async def test_a_port_that_is_taken_costs_the_heartbeats_alone() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        beats = Heartbeats(0, 1, "t", {1: ("127.0.0.1", 1)}, lambda rank, trip: None)
        await asyncio.wait_for(beats.open("127.0.0.1", taken.getsockname()[1]), 60)
        beats.ask()
        beats.close()
