"""Cluster contents for the stand-in for kubectl, with fixtures of its tests."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dsv4_operator.builders import names
from dsv4_runtime.util.procfs import entry

STAND_IN = Path(__file__).with_name("kubectl_stand_in.py")
RESOURCE = "dsv4deployments.dsv4.dev"
SECONDS = 60.0


class World:
    """Cluster contents for the stand-in for kubectl; changes take effect immediately."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "world.json"
        self.known: dict[str, Any] = {"objects": {}, "logs": {}, "files": {}, "forwards": {}}
        self.write()

    def write(self) -> None:
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps(self.known))
        partial.replace(self.file)

    def set(self, key: str, **values: Any) -> None:
        self.known.setdefault(key, {}).update(values)
        self.write()

    def drop(self, key: str, *gone: str) -> None:
        for each in gone:
            del self.known[key][each]
        self.write()

    def calls(self, verb: str) -> list[tuple[int, list[str]]]:
        """Return process ID and words of every call so far."""
        calls = self.file.parent / "calls"
        lines = (line.split() for line in (calls.read_text().splitlines() if calls.exists() else ()))
        return [(int(number), words) for number, *words in lines if words[0] == verb]


class Server:
    """HTTP server that sends the same bytes in response to every request."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.answer = b"fine"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append(dict(self.headers))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(outer.answer)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


def pod(rank: int, incarnation: int = 1, state: str = "running") -> dict[str, Any]:
    labels = names.labels("nano", component=names.MEMBER, group=0, incarnation=incarnation, rank=rank)
    container = {"name": "agent", "args": [f"--rank={rank}", f"--directory=/run/dsv4/i{incarnation}/m{rank}"]}
    return {
        "metadata": {"name": names.member_name("nano", 0, incarnation, rank), "labels": labels},
        "spec": {"containers": [container]},
        "status": {"containerStatuses": [{"name": "agent", "state": {state: {}}}]},
    }


def gone(pid: int) -> bool:
    """Return whether a process has ended with all of its threads, as a zombie has."""
    found = entry(pid)
    return found is None or found.ended


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def get(url: str) -> bytes:
    import httpx

    return httpx.get(url, timeout=60, trust_env=False).content


def secret(name: str, key: str, text: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": {key: base64.b64encode(text.encode()).decode()}}
