"""Responses of a healthy engine at byte level: identical with and without the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from yarl import URL

from dsv4_runtime.contract.token import token_of
from dsv4_runtime.engine import token_auth

JSON = b'{"id" : "1",  "text": "\xc3\xa9"}\n'
# These headers describe origin and framing of a response, which may differ between two connections.
FRAMING = {b"date", b"server", b"connection", b"content-length", b"transfer-encoding", b"x-request-id"}
LENGTH = b"Content-Length: %d\r\n"


def plain(head: bytes, body: bytes) -> bytes:
    return head + LENGTH % len(body) + b"\r\n" + body


def chunked(head: bytes, *parts: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\n"
TYPE = b"content-type: application/json\r\n"
EVENTS = b"content-type: text/event-stream; charset=utf-8\r\n"
ZIPPED = TYPE + b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n"
ANSWERS = {
    "json": plain(OK + TYPE, JSON),
    "json in chunks": chunked(OK + TYPE, JSON[:5], JSON[5:]),
    "empty": plain(OK + TYPE, b""),
    "gzip": plain(OK + ZIPPED, gzip.compress(JSON, mtime=0)),
    "gzip in chunks": chunked(OK + ZIPPED, gzip.compress(JSON, mtime=0)[:9], gzip.compress(JSON, mtime=0)[9:]),
    "many headers": plain(OK + TYPE + b"Set-Cookie: a=1\r\nx-MiXed: Case\r\nSet-Cookie: b=2\r\nX-Empty: \r\n", JSON),
    "bytes": plain(OK + b"content-type: audio/wav\r\n", bytes(range(256)) * 400),
    "until the end": OK + b"Connection: close\r\n" + TYPE + b"\r\n" + JSON,
    "no content": b"HTTP/1.1 204 No Content\r\nX-Own: 1\r\n\r\n",
    "redirect": plain(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere?a=b%20c\r\n", b""),
    "not found": plain(b"HTTP/1.1 404 Not Found\r\n" + TYPE, b'{"detail":"Not Found"}'),
    "validation": plain(b"HTTP/1.1 422 Unprocessable Entity\r\n" + TYPE, b'{"detail":[]}'),
    "events": chunked(OK + EVENTS, b"data: {}\n", b"\n: ping\r\n\r\nid: 1\ndata: a\ndata: b\n\n", b"data: [DONE]\n\n"),
}


TOKEN = token_of("the key", "0" * 32).encode()
TOKEN_HEADER = (token_auth.HEADER.encode(), TOKEN)
"""Header that vLLM's port requires, with the token of `kit.Lab`."""


class Canned:
    """An engine that sends the same bytes to every request and records the requests."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked: list[tuple[bytes, set[tuple[bytes, bytes]], bytes]] = []
        """First line, headers, body as it was sent (without its framing)."""

    async def __aenter__(self) -> Canned:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        given = {name.lower(): value for name, value in headers}
        if b"transfer-encoding" in given:
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
        else:
            body = await reader.readexactly(int(given.get(b"content-length", 0)))
        self.asked.append((first, {pair for pair in headers if pair[0].lower() not in FRAMING | {b"host"}}, body))
        writer.write(self._answer)
        writer.close()


def without_key(asked: tuple[bytes, set[tuple[bytes, bytes]], bytes]) -> tuple[bytes, set[tuple[bytes, bytes]], bytes]:
    """Return a request without the header that the gateway adds for vLLM's port."""
    first, headers, body = asked
    assert TOKEN_HEADER in headers
    return first, headers - {TOKEN_HEADER}, body


async def ask(url: str, method: str, **more: Any) -> Any:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.request(method, URL(url, encoded=True), allow_redirects=False, **more) as answer,
    ):
        kept = [(name, value) for name, value in answer.raw_headers if name.lower() not in FRAMING]
        return answer.status, kept, await answer.read()


@contextlib.asynccontextmanager
async def ways(kit: Any, canned: Canned) -> AsyncIterator[list[str]]:
    """Yield the base URLs without and with a gateway."""
    async with kit.Lab(max_body_bytes=2**20) as lab:
        lab.point(lab.upstream, canned.url)
        async with asyncio.timeout(60):
            while lab.gateway._groups.all[0].api != canned.url:
                await lab.engine.change()
                await asyncio.sleep(0.01)
        yield [canned.url, lab.url]


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_through_the_gateway(kit, name):
    async with Canned(ANSWERS[name]) as canned, ways(kit, canned) as bases:
        direct, through = [await ask(base + "/v1/completions", "POST", data=b"{}") for base in bases]
    assert through == direct


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "POST"])
async def test_every_method_is_passed_on(kit, method):
    head = OK + TYPE + LENGTH % len(JSON) + b"\r\n"
    async with Canned(head + JSON * (method != "HEAD")) as canned, ways(kit, canned) as bases:
        direct, through = [await ask(base + "/v1/files/a%2Fb%41?x=%20&y=%7e+", method) for base in bases]
    assert through == direct
    assert canned.asked[0] == without_key(canned.asked[1])


async def test_the_key_to_vllms_port_is_the_gateways_own(kit):
    """The gateway discards a header of this name from a client."""
    async with Canned(ANSWERS["json"]) as canned, ways(kit, canned) as bases:
        await ask(bases[1] + "/v1/completions", "POST", data=b"{}", headers={token_auth.HEADER.lower(): "guessed"})
    ((_, headers, _),) = canned.asked
    assert [value for name, value in headers if name.lower() == token_auth.HEADER.lower().encode()] == [TOKEN]


ZIPPED_BODY = gzip.compress(b'{"prompt": "Once", "stream": true}', mtime=0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b'{"b":  [1, 2.50 ,"\\u00e9"]}', {"Content-Type": "application/json"}),
        (ZIPPED_BODY, {"Content-Type": "application/json", "Content-Encoding": "gzip"}),
        (bytes(range(256)) * 300, {"Content-Type": "multipart/form-data; boundary=x", "Cookie": "a=1; b=2"}),
    ],
)
async def test_a_request_arrives_as_it_was_sent(kit, data, headers, streamed):
    async def parts() -> AsyncIterator[bytes]:
        yield data[:3]
        yield data[3:]

    async with Canned(ANSWERS["json"]) as canned, ways(kit, canned) as bases:
        for base in bases:
            await ask(base + "/v1/completions", "POST", data=parts() if streamed else data, headers=headers)
    assert canned.asked[0] == without_key(canned.asked[1])
    assert canned.asked[0][2] == data
