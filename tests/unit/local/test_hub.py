"""Sizes of a checkpoint on a hub, read with range requests from a server of real files, without the weights."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsv4_operator.api import load
from dsv4_operator.backends.local import facts
from dsv4_operator.backends.local.facts import read_checkpoint
from dsv4_operator.cli import main
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint
from dsv4_runtime.nano.checkpoint import make

REVISION = "0123456789" * 4
SPEC = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: pruned}
spec:
  model:
    variant: Flash
    source: {huggingFace: {repo: owner/DeepSeek-Pruned, revision: %s, endpoint: "%s"}}
    servedNames: [m]
  topology: {hardware: RTXPRO6000, nodesPerGroup: 1, devicesPerNode: 2, tensorParallelSize: 2}
"""


@dataclass
class Files:
    """A hub with the files of one directory, which redirects to a store on another port."""

    folder: Path
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and token of each request to the hub."""
    tokens_at_store: list[str | None] = field(default_factory=list)
    sent: int = 0
    ranges: bool = True
    status: int = 200
    change: Callable[[str, bytes], bytes] = lambda _, data: data
    url: str = ""
    store: str = ""


@contextmanager
def serving(files: Files) -> Iterator[Files]:
    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files.tokens_at_store.append(self.headers["Authorization"])
            name = self.path.rpartition("/")[2]
            data = files.change(name, (files.folder / name).read_bytes())
            asked = re.fullmatch(r"bytes=0-(\d+)", self.headers["Range"] or "") if files.ranges else None
            part = data[: int(asked[1]) + 1] if asked else data
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes 0-{len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            with suppress(ConnectionError):  # without range support, the reader closes after the header
                self.wfile.write(part)
            files.sent += len(part)

        def log_message(self, *_: object) -> None: ...

    class Hub(Store):
        def do_GET(self) -> None:
            files.requests.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if files.status == 200 else files.status)
            self.send_header("Location", f"{files.store}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Hub, Store)]
    files.url, files.store = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield files
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hub") / "nano")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # Client and servers share a process and, on a busy machine, little processor time.
    monkeypatch.setattr(facts, "_REQUEST_SECONDS", 120.0)
    monkeypatch.setattr(facts, "_ALL_SECONDS", 600.0)


@pytest.mark.parametrize(("ranges", "first"), [(True, facts._FIRST), (True, 64), (True, 1), (False, 64)])
def test_the_same_model_as_from_the_files(
    nano: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool, first: int
) -> None:
    monkeypatch.setattr(facts, "_FIRST", max(first, 8))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    known = read_checkpoint(nano, "Flash")
    assert known is not None
    with serving(Files(nano, ranges=ranges)) as files:
        found = facts.hub_model(load(SPEC % (REVISION, files.url)).spec.model)
    assert (found.weight_bytes, found.checkpoint_bytes) == (known.weight_bytes, known.checkpoint_bytes)
    assert (found.layers, found.shards, found.speculative) == (known.layers, known.shards, known.speculative)
    assert {path.rpartition("/")[0] for path, _ in files.requests} == {f"/owner/DeepSeek-Pruned/resolve/{REVISION}"}
    assert {token for _, token in files.requests} == {"Bearer hf_secret"}
    assert set(files.tokens_at_store) == {None}, "the token is for the hub alone"
    if ranges and first == 64:
        assert files.sent < known.checkpoint_bytes / 4, "no weights are read"


def test_damaged_files_are_named(nano: Path) -> None:
    changes: dict[str, Callable[[str, bytes], bytes]] = {
        "its header says": lambda name, data: data[:-1] if name.endswith(".safetensors") else data,
        "is not a safetensors file": lambda name, data: b"short" if name.endswith(".safetensors") else data,
        "has no weight_map": lambda name, data: b"{}" if name.endswith("index.json") else data,
        "names '../a', which is not in": lambda name, data: (
            b'{"weight_map": {"a": "../a"}}' if name.endswith("index.json") else data
        ),
        "cannot be read": lambda name, data: b"<html>" if name == "config.json" else data,
    }
    for message, change in changes.items():
        with serving(Files(nano, change=change)) as files, pytest.raises(BadCheckpoint, match=message):
            facts.hub_model(load(SPEC % (REVISION, files.url)).spec.model)


def test_a_hub_that_cannot_be_read(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def errors(url: str) -> str:
        (tmp_path / "m.yaml").write_text(SPEC % (REVISION, url))
        assert main.run(["plan", str(tmp_path / "m.yaml"), "--state-dir", str(tmp_path), "--hub"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, "one error"
        assert "write spec.model.checkpoint and spec.model.size" in err
        return err

    for status, reason in ((401, "HTTP 401; a gated repository needs HF_TOKEN"), (404, "HTTP 404"), (500, "HTTP 500")):
        with serving(Files(nano, status=status)) as files:
            assert reason in errors(files.url)
    assert "Connection refused" in errors(files.url), "it has ended"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids it" in errors(files.url)


def test_a_silent_hub_is_an_error_after_the_timeout(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ALL_SECONDS", 0.0)
    with serving(Files(nano)) as files, pytest.raises(BadCheckpoint, match="no complete answer within 0 s"):
        facts.hub_model(load(SPEC % (REVISION, files.url)).spec.model)


def test_a_plan_with_the_sizes_of_the_hub(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Files(nano)) as files:
        (tmp_path / "m.yaml").write_text(SPEC % (REVISION, files.url))
        code = main.run(["plan", str(tmp_path / "m.yaml"), "--state-dir", str(tmp_path), "--hub"])
    out, err = capsys.readouterr()
    assert code == 0, err
    known = read_checkpoint(nano, "Flash")
    assert known is not None
    assert f"write size: {known.checkpoint_bytes} in spec.model" in err
    assert f"{REVISION[:12]} on 2 × RTX PRO 6000" in out
