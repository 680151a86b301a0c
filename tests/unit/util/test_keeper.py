"""The keeper with real sockets and descriptors: memory outlives the process that offered it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.util.keeper import Client, Keeper, KeeperError

OFFER = """
import os, sys, time
from pathlib import Path
from dsv4_runtime.util.keeper import Client
files = []
for number in range(int(sys.argv[2])):
    file = os.memfd_create(f"part {number}")
    os.write(file, f"content {number}".encode())
    files.append(file)
Client(Path(sys.argv[1])).offer("0.0-0", {"key": "k", "bytes": 7}, files)
print("offered", flush=True)
time.sleep(60)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    # Longer than the maximum length of a socket address.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    kept = Keeper(folder / "weights.sock")
    yield kept
    kept.close()


def contents(descriptors: list[int]) -> list[str]:
    found = []
    for one in descriptors:
        found.append(os.pread(one, 100, 0).decode())
        os.close(one)
    return found


@pytest.mark.parametrize("count", [1, 200, 201, 450])
def test_what_a_killed_process_offered_is_there(keeper: Keeper, count: int) -> None:
    command = [sys.executable, "-c", OFFER, str(keeper.path), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered\n"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert keeper.held() == 7
    kept = Client(keeper.path).take("0.0-0")
    assert kept is not None
    assert kept.about == {"key": "k", "bytes": 7}
    assert contents(kept.descriptors) == [f"content {number}" for number in range(count)]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def until_open(count: int) -> None:
    """Wait until this many files are open: the keeper closes a connection after its response."""
    deadline = time.monotonic() + 10
    while open_files() != count:
        assert time.monotonic() < deadline, f"{open_files()} open files, expected {count}"
        time.sleep(0.01)


def test_replaced_dropped_and_closed_sets_leave_no_descriptor(keeper: Keeper) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    before = open_files()
    for number in range(3):
        client.offer("a", {"bytes": number}, [file] * 5)
        client.offer(f"b{number}", {"bytes": 10}, [file])
    assert client.sizes() == {"a": 2, "b0": 10, "b1": 10, "b2": 10}
    client.drop("a test")
    assert client.sizes() == {}
    assert client.take("a") is None
    until_open(before)
    client.offer("a", {"bytes": 1}, [file])
    keeper.close()
    until_open(before - 1)  # the listener is closed too
    os.close(file)
    with pytest.raises(KeeperError, match=r"weights\.sock"):
        client.sizes()


def test_a_set_is_not_mapped_twice_by_engines_that_do_not_load(keeper: Keeper) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    client.offer("a", {"bytes": 1}, [file])
    for expected in (True, False, False):
        kept = client.take("a")
        assert (kept is not None) is expected
        if kept is not None:
            kept.close()
    client.offer("a", {"bytes": 1}, [file])
    first = client.take("a")
    assert first is not None
    client.offer("a", {"bytes": 1}, first.descriptors)
    second = client.take("a")
    assert second is not None
    for one in (first, second):
        one.close()
    os.close(file)


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"[]\n", b"{}\n", b'{"do":"offer","slot":"a","about":{},"descriptors":2}\n', b"\xff\n"]
)
def test_a_broken_request_changes_nothing(keeper: Keeper, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    client.offer("a", {"bytes": 1}, [file])
    time.sleep(0.2)
    before = open_files()
    folder = os.open(keeper.path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{folder}/{keeper.path.name}")
        os.close(folder)
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        assert connection.recv(1) == b""
    assert client.sizes() == {"a": 1}
    until_open(before)
    assert "a request failed" in caplog.text
    os.close(file)
