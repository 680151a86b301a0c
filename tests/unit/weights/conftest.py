"""A small checkpoint, and servers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_testkit.weights_servers import Server, write_checkpoint, write_sums


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "source")
    write_sums(folder)
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[web.Application], Server]]:
    servers: list[Server] = []

    def start(app: web.Application, port: int = 0) -> Server:
        servers.append(Server(app, port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
