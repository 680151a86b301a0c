"""The HTTP client of sources and members: kinds of bodies, proxies, certificates, redirects."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from dsv4_runtime.weights import transfer
from dsv4_runtime.weights.checkpoint import TransientError, WeightsError
from dsv4_runtime.weights.transfer import HttpClient, find_proxy
from dsv4_testkit.certificates import certificate
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.weights_servers import Server

Serve = Callable[[web.Application], Server]
CONTENT = random.Random(7).randbytes(3_000_001)
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def read(client: HttpClient, url: str, start: int = 0, room: int = 300_001) -> bytes:
    data, buffer = bytearray(), memoryview(bytearray(room))
    with client.range(url, {}, start) as stream:
        while count := stream.readinto(buffer):
            data += buffer[:count]
    return bytes(data)


class Raw:
    """A server of plain sockets that responds to every request with `parts` and then closes the connection."""

    def __init__(self, parts: list[bytes], context: ssl.SSLContext | None = None, silent: float = 0.0) -> None:
        self._parts, self._context, self._silent = parts, context, silent
        self.heads: list[bytes] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), peer, self._secured(peer) as stream:
                head = b""
                while b"\r\n\r\n" not in head and (more := stream.recv(65536)):
                    head += more
                self.heads.append(head)
                for part in self._parts:
                    stream.sendall(part)
                self._over.wait(self._silent)

    def _secured(self, peer: socket.socket) -> socket.socket:
        return peer if self._context is None else self._context.wrap_socket(peer, server_side=True)

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    servers: list[Raw] = []

    def start(*args: object, **more: object) -> Raw:
        servers.append(Raw(*args, **more))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def secure(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server, and the file of its certificate authority."""
    authority = certificate(tmp_path, "files", loopback=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, tmp_path / "tls.key")
    return context, str(authority)


def whole(length: int = len(CONTENT)) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length


@pytest.mark.parametrize("room", [1000, 300_001, 4_000_000])
@pytest.mark.parametrize(("direct", "encrypted"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["at once", "in parts", "chunked", "until it closes"])
def test_every_kind_of_body(
    raw: Callable[..., Raw], secure: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch,
    kind: str, room: int, direct: bool, encrypted: bool,
) -> None:  # fmt: skip
    cuts = sorted(random.Random(room).sample(range(len(CONTENT)), 9))
    pieces = [CONTENT[low:high] for low, high in zip([0, *cuts], [*cuts, len(CONTENT)], strict=True)]
    parts = {
        "at once": [whole() + CONTENT],
        "in parts": [whole(), *pieces],
        "chunked": [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces),
            b"0\r\n\r\n",
        ],
        "until it closes": [b"HTTP/1.1 200 OK\r\n\r\n", *pieces],
    }[kind]
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", secure[1])
    server = raw(parts, secure[0] if encrypted else None)
    url = f"{'https' if encrypted else 'http'}://127.0.0.1:{server.port}/x"
    for start in (0, 1_234_567):
        assert read(HttpClient(direct=direct), url, start, room) == CONTENT[start:]


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("have", [0, 1000, 2_000_000])
def test_a_cut_body_is_transient_and_silence_is_bounded(
    raw: Callable[..., Raw], secure: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch,
    have: int, encrypted: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", secure[1])
    scheme, context = ("https", secure[0]) if encrypted else ("http", None)
    cut = raw([whole(), CONTENT[:have]], context)
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:\d+/x was cut off"):
        read(HttpClient(), f"{scheme}://127.0.0.1:{cut.port}/x?signature=secret")
    silent = raw([whole(), CONTENT[:have]], context, silent=60.0)
    with pytest.raises(TransientError, match="was cut off: no data in time"):
        read(HttpClient(timeout=(60.0, 1.5)), f"{scheme}://127.0.0.1:{silent.port}/x")


def test_a_server_without_an_answer_is_transient(raw: Callable[..., Raw]) -> None:
    silent = raw([], silent=60.0)
    with pytest.raises(TransientError, match="/x: no data in time") as caught:
        HttpClient(timeout=(0.5, 0.5)).get(f"http://127.0.0.1:{silent.port}/x?signature=secret", {})
    assert "secret" not in str(caught.value)


def test_an_unknown_authority_is_refused(
    raw: Callable[..., Raw], secure: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = raw([whole(1) + b"x"], secure[0])
    url = f"https://127.0.0.1:{server.port}/x"
    with pytest.raises(TransientError, match=r"(?i)certificate"):
        HttpClient().get(url, {})
    monkeypatch.setenv("CURL_CA_BUNDLE", secure[1])
    assert HttpClient().get(url, {}) == b"x"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(WeightsError, match=r"REQUESTS_CA_BUNDLE: .*none cannot be used: No such file"):
        HttpClient().get(url, {})


class Proxy:
    """An HTTP proxy: forwards tunnels, and responds to plain requests itself."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[arg-type]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.decode().split(" ", 2)
        self.asked.append(f"{method} {target} {'with' if b'Proxy-Authorization' in head else 'without'} credentials")
        if method == "CONNECT":
            host, port = target.rsplit(":", 1)
            there, out = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(self._pass(reader, out), self._pass(there, writer))
        else:
            writer.write(whole(5) + b"proxy")
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    found = Proxy()
    yield found
    found.close()


def test_requests_pass_the_proxy_of_the_environment(
    raw: Callable[..., Raw], secure: tuple[ssl.SSLContext, str], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", secure[1])
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:word@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{proxy.port}")
    server = raw([whole() + CONTENT], secure[0])
    url = f"https://127.0.0.1:{server.port}/x"
    assert read(HttpClient(), url) == CONTENT
    assert HttpClient().get("http://nowhere.invalid/x?a=%2F", {}) == b"proxy"
    assert proxy.asked == [
        f"CONNECT 127.0.0.1:{server.port} with credentials",
        "GET http://nowhere.invalid/x?a=%2F without credentials",
    ]
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    assert read(HttpClient(), url) == CONTENT
    assert len(proxy.asked) == 2
    with pytest.raises(TransientError):
        HttpClient(direct=True).get("http://nowhere.invalid/x", {})


def test_the_way_of_a_redirect_is_chosen_anew(
    raw: Callable[..., Raw], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = "http://nowhere.invalid/y?X-Amz-Signature=a%2Bb%2F%3D"
    first = raw([b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % there.encode()])
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert HttpClient().get(f"http://127.0.0.1:{first.port}/x", {"Authorization": "Bearer mine"}) == b"proxy"
    assert b"Bearer mine" in first.heads[0]
    assert proxy.asked == [f"GET {there} without credentials"]


def test_redirects_without_end_are_refused(serve: Serve) -> None:
    async def again(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"{request.path}x")

    app = web.Application()
    app.router.add_get("/{path:.*}", again)
    with raises_naming(WeightsError, "redirects more than 10 times", "check the address"):
        HttpClient().get(f"{serve(app).url}/a", {})


@pytest.mark.parametrize("location", ["ftp://elsewhere/x", "http://[::1/x", "http://host:99999999/x", "//host:x/"])
def test_an_invalid_redirect_is_refused(raw: Callable[..., Raw], location: str) -> None:
    server = raw([b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % location.encode()])
    with pytest.raises(WeightsError, match="invalid"):
        HttpClient().get(f"http://127.0.0.1:{server.port}/x", {})


networks = st.ip_addresses(v=4).flatmap(
    lambda address: st.integers(8, 32).map(lambda bits: ipaddress.ip_network(f"{address}/{bits}", strict=False))
)


@given(st.ip_addresses(v=4), st.lists(networks, max_size=3), st.sampled_from(["http", "https"]))
def test_no_proxy_may_have_networks(
    address: ipaddress.IPv4Address, listed: list[ipaddress.IPv4Network], scheme: str
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ALL_PROXY", "proxy.example:3128")
        environment.setenv("NO_PROXY", ", ".join(map(str, listed)))
        expected = None if any(address in network for network in listed) else URL("http://proxy.example:3128")
        assert find_proxy(URL(f"{scheme}://{address}/x")) == expected


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxied"),
    [
        ("http://files.example.com/x", "", True),
        ("http://files.example.com/x", "*", False),
        ("http://files.example.com/x", "example.com", False),
        ("http://files.example.com/x", ".example.com,other", False),
        ("http://files.example.com/x", "files.example.com:80", False),
        ("http://files.example.com/x", "files.example.com:81", True),
        ("http://notexample.com/x", "example.com", True),
        ("http://[fd00::1]/x", "fd00::/8", False),
        ("http://[fd00::1]/x", "10.0.0.0/8", True),
    ],
)
def test_names_without_a_proxy(monkeypatch: pytest.MonkeyPatch, url: str, no_proxy: str, proxied: bool) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (find_proxy(URL(url)) is not None) == proxied


def test_a_socks_proxy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(WeightsError, match="speaks socks5; set an HTTP proxy"):
        HttpClient().get("http://127.0.0.1:9/x", {})


def test_a_pause_of_the_receiver_is_no_silence_of_the_server(
    raw: Callable[..., Raw], secure: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate limit causes such pauses."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", secure[1])
    server = raw([whole() + CONTENT], secure[0])
    client, room, data = HttpClient(timeout=(5.0, 0.3)), memoryview(bytearray(1 << 20)), bytearray()
    with client.range(f"https://127.0.0.1:{server.port}/x", {}, 0) as stream:
        while count := stream.readinto(room):
            data += room[:count]
            if len(data) < 1_000_000:
                threading.Event().wait(0.5)
    assert data == CONTENT


def test_the_error_of_a_status_has_its_phrase() -> None:
    assert "answered 503 Service Unavailable" in str(transfer.http_error("x", 503, {}))
    assert str(transfer.http_error("x", 599, {})).startswith("x answered 599;")
