"""A request that needs the engine alone runs without other requests, across all gateways of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from dsv4_runtime.engine import token_auth
from dsv4_runtime.engine.token_auth import Kind, Refused, Ticket, Turns


def test_no_request_of_another_gateway_is_beside_one_that_is_alone() -> None:
    found = Turns()
    alone = found.enter("a", Kind.ALONE)
    assert isinstance(alone, Ticket)
    assert [found.enter(owner, Kind.SHARED) for owner in ("b", "")] == [Refused.TAKEN] * 2
    assert [found.enter(owner, Kind.ALONE) for owner in ("a", "b")] == [Refused.TAKEN] * 2
    own = found.enter("a", Kind.SHARED)
    assert isinstance(own, Ticket)
    found.leave(own, complete=True)
    found.leave(alone, complete=True)
    assert isinstance(found.enter("b", Kind.SHARED), Ticket)


def test_an_exclusive_request_that_waits_blocks_new_requests_for_a_limited_time() -> None:
    now = 0.0
    found = Turns(lambda: now)
    open_before = found.enter("b", Kind.SHARED)
    assert isinstance(open_before, Ticket)
    assert found.enter("a", Kind.ALONE) is Refused.BUSY
    assert found.enter("b", Kind.SHARED) is Refused.TAKEN
    now = 10.0
    later = found.enter("b", Kind.SHARED)
    assert isinstance(later, Ticket)
    for ticket in (open_before, later):
        found.leave(ticket, complete=True)
    assert isinstance(found.enter("a", Kind.ALONE), Ticket)


def test_an_aborted_request_counts_as_open_until_a_probe_is_answered() -> None:
    found = Turns()
    early = found.enter("b", Kind.PROBE)
    aborted = found.enter("b", Kind.SHARED)
    assert isinstance(early, Ticket)
    assert isinstance(aborted, Ticket)
    found.leave(aborted, complete=False)
    found.leave(early, complete=True, proof=True)
    assert found.enter("a", Kind.ALONE) is Refused.UNSETTLED
    probe = found.enter("a", Kind.PROBE)
    assert isinstance(probe, Ticket)
    found.leave(probe, complete=True, proof=True)
    assert isinstance(found.enter("a", Kind.ALONE), Ticket)


def test_only_the_owner_releases() -> None:
    found = Turns()
    found.enter("a", Kind.ALONE)
    found.enter("b", Kind.RELEASE)
    assert found.enter("b", Kind.SHARED) is Refused.TAKEN
    found.enter("a", Kind.RELEASE)
    assert isinstance(found.enter("b", Kind.SHARED), Ticket)


@given(lists(tuples(sampled_from(["a", "b", ""]), sampled_from(list(Kind)), integers(0, 5))))
def test_an_exclusive_request_is_open_alone_in_any_order_of_events(steps: list[tuple[str, Kind, int]]) -> None:
    found, tickets = Turns(lambda: 0.0), list[Ticket]()
    alone: Ticket | None = None
    for owner, kind, leave in steps:
        ticket = found.enter(owner, kind)
        if isinstance(ticket, Ticket) and kind is not Kind.RELEASE:
            tickets.append(ticket)
            alone = ticket if kind is Kind.ALONE else alone
        elif kind is Kind.RELEASE and alone is not None and alone.owner == owner:
            alone = None
        if alone is not None:
            others = [other for other in tickets if other.owner != alone.owner and other.kind is not Kind.PROBE]
            assert not others
        if leave < len(tickets):
            gone = tickets.pop(leave)
            found.leave(gone, complete=True)
            alone = None if alone is gone else alone


def scope(*headers: tuple[str, str]) -> dict[str, Any]:
    given_headers = [(token_auth.HEADER, "c0ffee"), *headers]
    pairs = [(name.lower().encode(), value.encode()) for name, value in given_headers]
    return {"type": "http", "path": "/v1/completions", "headers": pairs}


async def test_vllms_port_keeps_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("c0ffee")
    monkeypatch.setenv(token_auth.TOKEN_VARIABLE, str(tmp_path / "token"))
    going, leaves = asyncio.Event(), asyncio.Event()

    async def app(_: object, receive: token_auth.Receive, send: token_auth.Send) -> None:
        await going.wait()
        if leaves.is_set():
            await receive()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    port = token_auth.TokenAuth(app)

    async def ask(*headers: tuple[str, str]) -> tuple[int, str]:
        said: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            said.append(message)

        await port(scope(*headers), receive, send)
        if not said:
            return 0, ""
        return said[0]["status"], dict(said[0]["headers"]).get(token_auth.TURN_HEADER.lower().encode(), b"").decode()

    def turn(owner: str, kind: Kind) -> tuple[str, str]:
        return token_auth.TURN_HEADER, token_auth.turn_header(owner, kind)

    alone = asyncio.ensure_future(ask(turn("a", Kind.ALONE)))
    await asyncio.sleep(0)
    assert await ask((token_auth.REQUEST_ID_HEADER, "id")) == (503, "taken")
    assert await ask(turn("b", Kind.ALONE)) == (503, "taken")
    assert await ask(turn("a", Kind.RELEASE)) == (200, "")
    going.set()
    assert await ask((token_auth.REQUEST_ID_HEADER, "id")) == (200, "")
    assert (await alone)[0] == 200
    leaves.set()
    assert await ask((token_auth.REQUEST_ID_HEADER, "id")) == (0, "")
    assert await ask(turn("a", Kind.ALONE)) == (503, "unsettled")
    # Requests of agents have no ID and are always accepted.
    leaves.clear()
    assert await ask() == (200, "")
    assert await ask(turn("b", Kind.PROBE)) == (200, "")
    assert await ask(turn("a", Kind.ALONE)) == (200, "")
