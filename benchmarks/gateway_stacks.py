"""What an HTTP stack costs: the smallest pass-through proxy on each, in front of the same stand-in.

    python benchmarks/gateway_stacks.py [--rounds 5]

The figures behind docs/decisions/0004-gateway-http-stack.md. Rounds alternate between the stacks, so that a disturbance
of the machine meets all of them; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from dsv4_testkit import standin
from dsv4_testkit.harness import free_port
from dsv4_testkit.http_load import connect, load, post

STACKS = ("bytes", "aiohttp", "aiohttp+uvloop", "uvicorn+aiohttp", "uvicorn+httpx")
ONE = {"prompt": "x", "stream": True, "tokens": 1}
# As an engine answers: whoever waits for it finds a processor that sleeps and caches that others have filled.
THINKING = {**ONE, "think": 0.1}
MANY = {"prompt": "x", "stream": True, "tokens": 64}
IDLE = {"prompt": "x", "stream": True, "tokens": 3, "pause": 20.0}


async def _aiohttp(port: int, upstream: str) -> None:
    import aiohttp
    from aiohttp import web

    session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.request(request.method, upstream + request.raw_path, data=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


async def _bytes(port: int, upstream: str) -> None:
    """Copies bytes and reads none of them: what no proxy can do without."""
    place = urlsplit(upstream)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(place.hostname, place.port)
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    await (await asyncio.start_server(handle, "127.0.0.1", port, backlog=4096)).serve_forever()


Send = Callable[[dict[str, Any]], Awaitable[None]]


def _asgi(forward: Callable[[str, str, bytes, Send], Awaitable[None]]) -> Any:
    async def application(scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await forward(scope["method"], scope["path"], body, send)

    return application


async def _uvicorn(port: int, application: Any) -> None:
    import uvicorn

    settings = {"http": "httptools", "lifespan": "off", "access_log": False, "log_level": "warning"}
    await uvicorn.Server(uvicorn.Config(application, port=port, backlog=4096, **settings)).serve()


async def _uvicorn_aiohttp(port: int, upstream: str) -> None:
    import aiohttp

    session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))

    async def forward(method: str, path: str, body: bytes, send: Send) -> None:
        async with session.request(method, upstream + path, data=body) as answer:
            headers = [(b"content-type", answer.content_type.encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    await _uvicorn(port, _asgi(forward))


async def _uvicorn_httpx(port: int, upstream: str) -> None:
    import httpx

    client = httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None))

    async def forward(method: str, path: str, body: bytes, send: Send) -> None:
        async with client.stream(method, upstream + path, content=body) as answer:
            headers = [(b"content-type", answer.headers["content-type"].encode())]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for data in answer.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    await _uvicorn(port, _asgi(forward))


def serve(stack: str, port: int, upstream: str) -> None:
    match stack:
        case "bytes":
            uvloop.run(_bytes(port, upstream))
        case "aiohttp":
            asyncio.run(_aiohttp(port, upstream))
        case "aiohttp+uvloop":
            uvloop.run(_aiohttp(port, upstream))
        case "uvicorn+aiohttp":
            uvloop.run(_uvicorn_aiohttp(port, upstream))
        case "uvicorn+httpx":
            uvloop.run(_uvicorn_httpx(port, upstream))


def wait_for(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


async def idle_memory(url: str, pid: int, streams: int = 1000) -> float:
    """MiB of resident memory with that many streams that have begun and say nothing."""
    connections = [await connect(url) for _ in range(streams)]
    data = post(url, IDLE)
    tasks = [asyncio.ensure_future(connection.ask(data)) for connection in connections]
    try:
        async with asyncio.timeout(IDLE["pause"]):
            while not all(connection.first for connection in connections):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return psutil.Process(pid).memory_info().rss / 2**20
    finally:
        for task, connection in zip(tasks, connections, strict=True):
            task.cancel()
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str) -> dict[str, float]:
    alone = await load(url, ONE, requests=400, clients=1)
    thinking = await load(url, THINKING, requests=20, clients=1)
    busy = await load(url, ONE, requests=2000, clients=16)
    streams = await load(url, MANY, requests=100, clients=16)
    return {
        "p50 ms": alone.at(0.5) * 1e3,
        "p99 ms": alone.at(0.99) * 1e3,
        "100 ms apart: p50 ms": thinking.at(0.5) * 1e3,
        "requests/s": busy.rate,
        "chunks/s": streams.rate * 64,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=3, metavar=("STACK", "PORT", "UPSTREAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), options.serve[2])
        return
    upstream = free_port()
    children = [subprocess.Popen([sys.executable, standin.__file__, str(upstream)])]
    urls = {"direct": f"http://127.0.0.1:{upstream}/v1/completions"}
    found: dict[str, list[dict[str, float]]] = {"direct": []}
    processes: dict[str, int] = {}
    try:
        for stack in STACKS:
            port = free_port()
            command = [sys.executable, __file__, "--serve", stack, str(port), f"http://127.0.0.1:{upstream}"]
            # Their complaints about clients that leave 1000 streams in the middle are expected.
            children.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            urls[stack], found[stack], processes[stack] = (
                f"http://127.0.0.1:{port}/v1/completions",
                [],
                children[-1].pid,
            )
            wait_for(port)
        for _ in range(options.rounds):
            for stack, url in urls.items():
                found[stack].append(uvloop.run(measure(url)))
        memory = {stack: uvloop.run(idle_memory(urls[stack], pid)) for stack, pid in processes.items()}
    finally:
        for child in children:
            child.terminate()
            child.wait(10)
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, medians of {options.rounds} rounds")
    for stack, rounds in found.items():
        row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        text = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
        print(f"{stack:16} {text}  " + (f"1000 idle streams {memory[stack]:.0f} MiB" if stack in memory else ""))


if __name__ == "__main__":
    main()
