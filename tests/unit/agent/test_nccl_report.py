"""Responses of NCCL's RAS service, recorded with NCCL 2.28.9 on two H200; one rank had begun three operations more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dsv4_runtime.agent import evidence

ANSWER = """OK
NCCL version 2.28.9 compiled with CUDA 13.0

#0-0 (717c6c56e98b0d90) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 53 -- GPU 0 managed by process 565 on node 192.0.2.2
  Rank 1 has launched up to operation 50 -- GPU 1 managed by process 566 on node 192.0.2.2

"""


@asynccontextmanager
async def thread(answer: str, *, ends: bool = True) -> AsyncIterator[tuple[int, list[str]]]:
    """Serve `answer` as NCCL's RAS thread does; yield the port and the list of received commands."""
    asked: list[str] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        while not asked or asked[-1] != "verbose status":
            asked.append((await reader.readline()).decode().rstrip("\n"))
        writer.write(answer.encode())
        await writer.drain()
        if not ends:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked
        await asyncio.gather(*filter(None, serving))


async def test_the_report_names_the_rank_that_is_behind() -> None:
    async with thread(ANSWER) as (port, asked):
        said = await evidence.nccl_report(port=port)
    assert asked == ["timeout 3", "verbose status"]
    assert said.startswith("NCCL version 2.28.9")
    assert "Rank 1 has launched up to operation 50" in said


@pytest.mark.parametrize("answer", ["", "OK\n"])
async def test_a_stopped_process_is_not_waited_for(answer: str) -> None:
    async with thread(answer, ends=False) as (port, _):
        with pytest.raises(TimeoutError, match=r"sent nothing within 0\.3 s"):
            await evidence.nccl_report(port=port, seconds=0.3)


async def test_a_closed_port_is_an_error() -> None:
    async with thread(ANSWER) as (port, _):
        pass
    with pytest.raises(ConnectionRefusedError):
        await evidence.nccl_report(port=port)


async def test_a_partial_report_is_kept_at_the_timeout() -> None:
    async with thread("OK\nNCCL version", ends=False) as (port, _):
        assert await evidence.nccl_report(port=port, seconds=3.0) == "NCCL version"
