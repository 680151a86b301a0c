"""HTTP client for measurements, with minimal cost so that the results show the servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_ANSWER_SECONDS = 120.0


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a request."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    first = 0.0
    """Time of the first byte of a response's body; 0: none received."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._done: asyncio.Future[bytes] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._end < 0:
            head, _, body = self._received.partition(b"\r\n\r\n")
            if not body:
                # vLLM sends the head long before the first token; clients wait for the token.
                return
            self.first = time.perf_counter()
            lower = bytes(head).lower()
            length = lower.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._end = len(head) + 4 + int(length) if length.strip() else 0
        whole = len(self._received) >= self._end if self._end else self._received.endswith(b"0\r\n\r\n")
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(bytes(self._received))

    async def ask(self, request: bytes) -> tuple[float, bytes]:
        """Send `request`; return the seconds to the first byte of the response's body, and the whole response."""
        self._received, self._end = bytearray(), -1
        self._done = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self._transport.write(request)
        answer = await asyncio.wait_for(self._done, _ANSWER_SECONDS)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:300].decode(errors="replace"))
        return self.first - begun, answer

    def close(self) -> None:
        self._transport.close()


async def connect(url: str) -> Connection:
    parts = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(Connection, parts.hostname, parts.port)
    return connection


@dataclass(frozen=True)
class Load:
    """Times of one run of requests."""

    first: Sequence[float]
    """Seconds to each first byte."""
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.first) / self.seconds

    def at(self, share: float) -> float:
        """Return a quantile of the seconds to the first byte."""
        return quantile(self.first, share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def order(urls: Sequence[str], turns: int) -> list[str]:
    """Return the sequence of requested URLs in `take_turns`."""
    return [url for turn in range(turns) for url in (urls if turn % 2 else reversed(urls))]


async def take_turns(
    urls: Sequence[str], body: dict[str, Any], *, turns: int, headers: dict[str, str] | None = None
) -> dict[str, list[float]]:
    """Return the seconds to each first byte, with sequential requests.

    Each turn requests every URL once, in alternating order, so that disturbances of the machine affect all URLs
    equally.
    """
    connections = {url: await connect(url) for url in urls}
    data, first = {url: post(url, body, headers) for url in urls}, {url: list[float]() for url in urls}
    for url in order(urls, turns):
        first[url].append((await connections[url].ask(data[url]))[0])
    for connection in connections.values():
        connection.close()
    return first


async def load(
    url: str, body: dict[str, Any], *, requests: int, clients: int, headers: dict[str, str] | None = None
) -> Load:
    """Send `requests` in total by `clients` concurrent clients, each on its own connection."""
    connections = await asyncio.gather(*(connect(url) for _ in range(clients)))
    data, first, left = post(url, body, headers), list[float](), iter(range(requests))

    async def work(connection: Connection) -> None:
        for _ in left:
            first.append((await connection.ask(data))[0])

    begun = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    seconds = time.perf_counter() - begun
    for connection in connections:
        connection.close()
    return Load(first, seconds)
