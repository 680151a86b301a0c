"""A small checkpoint and real servers for it on loopback, for the benchmark and the tests of weights."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import mmap
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from dsv4_runtime.contract import AgentStatus, Health, Phase, Verdict
from dsv4_testkit.documents import agent_status
from dsv4_testkit.waiting import PATIENCE_SECONDS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "the-group-token"
SHARDS = 3


def write_shard(path: Path, size: int, tensor: str, seed: int) -> None:
    """Write a safetensors file with one tensor of `size` bytes."""
    header = json.dumps({tensor: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(size))


def write_checkpoint(folder: Path, size: int = 3_300_000) -> Path:
    """Write three shards of `size` bytes, their index, a configuration, a file in a folder, and unwanted files."""
    folder.mkdir(parents=True)
    names = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensor = f"model.layers.{number}.weight"
        write_shard(folder / name, size + number, tensor, number)
        names[tensor] = name
    (folder / "config.json").write_text('{"model_type": "deepseek_v4"}\n')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encode.py").write_text("# nothing\n")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    (folder / ".gitattributes").write_text("not wanted")
    return folder


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` of the wanted files."""
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in wanted_files(folder)]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def wanted_files(folder: Path) -> list[str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if not name.startswith(".") and name not in ("pytorch_model.bin", "SHA256SUMS")]


def arrived(folder: Path) -> int:
    """Return the bytes in partial files; another process may complete one meanwhile."""
    total = 0
    for part in folder.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            total += part.stat().st_size
    return total


def same_files(source: Path, copy: Path) -> bool:
    """Return whether `copy` contains exactly the wanted files of `source`, with equal bytes, and no partial files."""
    found = [path.relative_to(copy).as_posix() for path in sorted(copy.rglob("*")) if path.is_file()]
    names = [name for name in found if not name.startswith(".dsv4/")]
    return names == wanted_files(source) and all(
        (source / name).read_bytes() == (copy / name).read_bytes() for name in names
    )


def cached_share(path: Path) -> float:
    """Return the share of a file's pages in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as area:
        pages = (size + 4095) // 4096
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(area)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector) == 0
        share = sum(entry & 1 for entry in vector) / pages
        del start
    return share


class Reporter:
    """State of an agent that reports only its weights."""

    def status(self) -> AgentStatus:
        return agent_status(phase=Phase.STAGING, deployment="b", verdict=Verdict(health=Health.STARTING))

    def evidence(self) -> dict[str, object]:
        return {}


class Server:
    """An aiohttp application on a port of 127.0.0.1, in a separate thread."""

    def __init__(self, app: web.Application, port: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(app, port), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)

    def _run(self, app: web.Application, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

        async def start() -> None:
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", port)
            await site.start()
            self.port = self._runner.addresses[0][1]

        self._loop.run_until_complete(start())
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)


class FileServer:
    """A directory over HTTP with ranges; it counts sent bytes, and tests configure its faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str]] = []
        """File and `Range` of every GET."""
        self.sent = 0
        """Sent bytes of bodies."""
        self.open = self.most_open = 0
        """Current and maximum number of concurrent bodies."""
        self.pace: float | None = None
        """Bytes per second."""
        self.cut_after: int | None = None
        """Bytes after which a connection is cut, once for each request."""
        self.damage: dict[str, int] = {}
        """Remaining number of responses with a changed byte, by file."""
        self.answer: Callable[[web.Request], web.StreamResponse | None] = lambda _: None
        self.app = web.Application()
        self.app.router.add_get("/{name:.+}", self.get)

    async def get(self, request: web.Request) -> web.StreamResponse:
        return await self.send(request, request.match_info["name"])

    async def send(self, request: web.Request, name: str) -> web.StreamResponse:
        path = self.folder / name
        if not path.is_file():
            raise web.HTTPNotFound
        if request.method == "GET":
            self.requests.append((name, request.headers.get("Range", "")))
        if (answer := self.answer(request)) is not None:
            return answer
        data = bytearray(path.read_bytes())
        if self.damage.get(name, 0) and request.method == "GET":
            self.damage[name] -= 1
            data[len(data) // 2] ^= 1
        start = request.http_range.start or 0
        response = web.StreamResponse(
            status=206 if "Range" in request.headers else 200, headers={"Content-Length": str(len(data) - start)}
        )
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        if self.pace and request.transport is not None:
            # Bytes in the buffers count as sent, but not as received; keep the buffers small.
            request.transport.set_write_buffer_limits(0)
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        if request.method == "HEAD":
            return response
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._write(request, response, memoryview(data)[start:])
        finally:
            self.open -= 1
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, view: memoryview) -> None:
        sent = 0
        while sent < len(view):
            if self.cut_after is not None and sent >= self.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return
            block = view[sent : sent + 65536]
            try:
                await response.write(block)
            except ConnectionError:
                return
            sent += len(block)
            self.sent += len(block)
            if self.pace and sent < len(view):
                await asyncio.sleep(len(block) / self.pace)
