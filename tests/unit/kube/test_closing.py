"""Closing ends connections whose server does not complete the shutdown of TLS, over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsv4_operator.kube import PODS, Access, Client
from dsv4_testkit.certificates import HOST, certificate
from dsv4_testkit.waiting import until

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'{"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}}\n'


class Mute:
    """Sends one event of a watch over TLS, then neither reads nor writes."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: for its certificate.
        """
        trusted = certificate(folder, "mute")
        self.trusted = trusted.read_text()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(trusted, folder / "tls.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._done = threading.Event()
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._listener.settimeout(60)
        with contextlib.suppress(OSError):
            plain, _ = self._listener.accept()
            plain.settimeout(60)
            with self._context.wrap_socket(plain, server_side=True) as one:
                one.recv(65536)
                one.sendall(_HEAD + b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT))
                self._done.wait(30)

    def close(self) -> None:
        self._done.set()
        self._listener.close()
        self._thread.join(60)


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Mute]:
    server = Mute(tmp_path)
    yield server
    server.close()


async def test_a_cancelled_watch_leaves_no_connection(mute: Mute) -> None:
    heard = asyncio.Event()

    async def follow(kube: Client) -> None:
        async with contextlib.aclosing(kube.watch(PODS, "a", resource_version="1")) as events:
            async for _ in events:
                heard.set()

    async with Client(Access(server=mute.url, authority=mute.trusted, server_name=HOST)) as kube:
        task = asyncio.create_task(follow(kube))
        await asyncio.wait_for(heard.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert connections(mute.url) == []


def connections(url: str) -> list[object]:
    port = int(url.rpartition(":")[2])
    return [one for one in psutil.Process().net_connections("tcp4") if one.raddr and one.raddr.port == port]


async def test_a_request_that_is_cancelled_in_the_handshake_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the event loop closes it late, as on a busy machine."""
    close = asyncio.selector_events._SelectorTransport._call_connection_lost  # type: ignore[attr-defined]

    def late(transport: object, error: object) -> None:
        asyncio.get_running_loop().call_later(0.6, close, transport, error)

    monkeypatch.setattr(asyncio.selector_events._SelectorTransport, "_call_connection_lost", late)  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        async with Client(Access(server=url)) as kube:
            task = asyncio.create_task(kube.get(PODS, "a", "b"))
            await until(lambda: connections(url))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert connections(url) == []
