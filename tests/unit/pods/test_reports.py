"""Reports of members with the user's image: parsing is cheap for reports of any size and shape."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dsv4_runtime import client as module
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    DrainReport,
    EngineStatus,
    FabricStatus,
    Failure,
    GroupReport,
    Phase,
    Process,
    Progress,
    Signals,
    StartStep,
    WeightsProgress,
)
from dsv4_testkit.documents import agent_status

MOST_CPU_SECONDS = 1.0
"""For one response, on a busy machine; 12 MiB took 1.7 s."""

WHOLE = agent_status(
    processes=(Process(name="agent", pid=1),),
    start=(StartStep(phase=Phase.LOADING, step="loading weights", seconds=1.0),),
    weights_repaired=("a.safetensors",),
    signals=Signals(time=1.0, silent={1: 0.5}),
    progress=Progress(stage="loading", percent=5.0, weights=WeightsProgress(shards=1)),
    engine=EngineStatus(
        generation=1,
        restarts=(1.0,),
        failures=(Failure(time=1.0, cause=Cause.UNKNOWN, message="x", detected_by="exit"),),
        memory={"graphs": 1},
    ),
    fabric=FabricStatus(notes=("x",)),
).to_dict()


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values of a document that can be replaced."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def largest(value: Any) -> tuple[int, int, float]:
    """Return the longest text, the most items and the largest number of a report."""
    if isinstance(value, str):
        return len(value), 0, 0
    if isinstance(value, dict):
        found = [largest(item) for pair in value.items() for item in pair]
    elif isinstance(value, list | tuple):
        found = [largest(item) for item in value]
    else:
        return 0, 0, abs(value) if isinstance(value, int | float) else 0
    texts, items, numbers = zip(*found, strict=True) if found else ((0,), (0,), (0.0,))
    return max(texts), max(len(value), *items), max(numbers)


def repeated(old: Any) -> list[Any]:
    items = old if isinstance(old, list) and old else [1.0]
    return items * (900_000 // len(json.dumps(items)))


HUGE: dict[str, Callable[[Any], Any]] = {
    "text": lambda _: "x" * 200_000,
    "list": lambda old: (
        (items := old if isinstance(old, list) and old else [1.0]) * (900_000 // len(json.dumps(items)))
    ),
    "object": lambda _: {str(number): 1 for number in range(20_000)},
    "integer": lambda _: 10**30,
    "infinity": lambda _: float("inf"),
    "not a number": lambda _: float("nan"),
    "nesting": lambda _: json.loads("[" * 180 + "]" * 180),
    "null": lambda _: None,
}


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("kind", [AgentStatus, GroupReport, DrainReport])
def test_a_report_with_one_field_of_any_size_is_bounded(kind: type[BaseModel], size: str) -> None:
    """Replaces each value of a report in turn."""
    document: dict[str, Any] = {
        AgentStatus: WHOLE,
        GroupReport: {"ages": {"0": 0.0, "1": 1.0}, "members": [WHOLE]},
        DrainReport: {"over": True, "open": 1},
    }[kind]
    for path in places(document):
        old: Any = document
        for key in path:
            old = old[key]
        data = json.dumps(replaced(document, path, HUGE[size](old))).encode()
        begun = time.process_time()
        with contextlib.suppress(*AGENT_ERRORS):
            report = module._report(kind, data)
            text, items, number = largest(report.model_dump(mode="json"))
            assert (text <= 1024, items <= 256, number <= 2**63) == (True, True, True), path
        assert time.process_time() - begun < MOST_CPU_SECONDS, path


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_report_or_a_value_error(data: bytes) -> None:
    for kind in (AgentStatus, GroupReport, DrainReport):
        with contextlib.suppress(ValueError):
            module._report(kind, data)


@contextlib.asynccontextmanager
async def agent(answer: bytes, pieces: int = 1) -> AsyncIterator[str]:
    async def handler(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(pieces):
                await stream.write(answer)
        return stream

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def first_report(client: AgentClient, url: str) -> GroupReport:
    async with contextlib.aclosing(client.watch_group(url, None)) as reports:
        return await anext(reports)


READERS: dict[str, Callable[[AgentClient, str], Awaitable[Any]]] = {
    "status": lambda client, url: client.status(url, seconds=20),
    "evidence": lambda client, url: client.evidence(url, None),
    "watch": first_report,
    "drain": lambda client, url: client.drain(url, None, 1.0),
}


@pytest.mark.parametrize("reader", READERS)
async def test_an_answer_without_an_end_is_rejected(reader: str) -> None:
    client = AgentClient()
    # 64 MiB, more than any of the bounds.
    async with agent(b" " * 2**20, 64) as url:
        try:
            if reader == "drain":
                assert await READERS[reader](client, url), "an agent without a right answer has nothing to drain"
            else:
                with pytest.raises(ValueError, match="more than"):
                    await READERS[reader](client, url)
        finally:
            await client.close()


@pytest.mark.parametrize("reader", ["status", "watch"])
async def test_the_longest_answer_is_parsed_quickly(reader: str) -> None:
    status = {**WHOLE, "processes": [{"name": "a", "pid": 1}] * 8000}
    text = json.dumps(status if reader == "status" else {"ages": {"0": 0.0}, "members": [status] * 4})
    assert 0.7 < len(text) / (module._LARGEST_BYTES if reader == "status" else module._LINE_BYTES) < 0.99
    client, costs = AgentClient(), []
    async with agent(text.encode() + b"\n") as url:
        try:
            # The minimum of three runs: a garbage collection of objects from other tests counts too.
            for _ in range(3):
                begun = time.process_time()
                report = await READERS[reader](client, url)
                costs.append(time.process_time() - begun)
        finally:
            await client.close()
    assert min(costs) < MOST_CPU_SECONDS / 2, costs
    read = report if reader == "status" else report.members[0]
    assert read.phase is Phase.SERVING
    assert len(read.processes) == 256
