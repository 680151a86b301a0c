"""The keeper with real sockets and descriptors: memory outlives the process that offered it."""

from __future__ import annotations

import os
import resource
import select
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
time.sleep(600)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    # Longer than the maximum length of a socket address.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    kept = Keeper(folder / "weights.sock")
    yield kept
    kept.close()


AGENT = """
import subprocess, sys, time
from pathlib import Path
from dsv4_runtime.util.keeper import Keeper
kept = Keeper(Path(sys.argv[1]))
print("listens", flush=True)
sys.stdin.readline()
print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
time.sleep(60)
"""


def test_a_killed_agent_frees_the_memory_although_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    held, memory = os.pipe()  # an end of file follows the last reference to `memory`
    command = [sys.executable, "-c", AGENT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "listens\n"
        Client(path).offer("0.0-0", {"bytes": 7}, [memory] * 3)
        os.close(memory)
        agent.stdin.write("\n")
        agent.stdin.flush()
        child = int(agent.stdout.readline())
        try:
            assert select.select([held], [], [], 0.5)[0] == [], "it is kept"
            agent.kill()
            agent.wait(10)
            assert select.select([held], [], [], 10)[0] == [held]
            assert os.read(held, 1) == b""
        finally:
            agent.kill()
            os.kill(child, signal.SIGKILL)
            os.close(held)
    with pytest.raises(KeeperError, match=r"weights\.sock"):
        Client(path).sizes("0.0")
    # The next agent finds the file of the socket there.
    again = Keeper(path)
    assert Client(path).sizes("0.0") == {}
    again.close()


def contents(descriptors: list[int]) -> list[str]:
    found = []
    for one in descriptors:
        found.append(os.pread(one, 100, 0).decode())
        os.close(one)
    return found


@pytest.mark.parametrize("count", [1, 200, 201, 450])
def test_memory_offered_by_a_killed_process_is_kept(keeper: Keeper, count: int) -> None:
    command = [sys.executable, "-c", OFFER, str(keeper.path), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert keeper.held() == 7
    kept = Client(keeper.path).take("0.0-0")
    assert kept is not None
    assert kept.about == {"key": "k", "bytes": 7}
    # A child that inherits one would keep the memory.
    held = keeper._sets["0.0-0"].descriptors
    assert not any(map(os.get_inheritable, [*kept.descriptors, *held]))
    assert contents(kept.descriptors) == [f"content {number}" for number in range(count)]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def until_open(count: int) -> None:
    """Wait until this many files are open: the keeper closes a connection after its response."""
    deadline = time.monotonic() + 60
    while open_files() != count:
        assert time.monotonic() < deadline, f"{open_files()} open files, expected {count}"
        time.sleep(0.01)


def test_replaced_dropped_and_closed_sets_leave_no_descriptor(keeper: Keeper) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    before = open_files()
    for number in range(3):
        client.offer("a-0", {"bytes": number}, [file] * 5)
        client.offer(f"b-{number}", {"bytes": 10}, [file])
    assert client.sizes("a") == {"a-0": 2}
    assert client.sizes("b") == {"b-0": 10, "b-1": 10, "b-2": 10}
    client.drop("a test", "a-0")
    assert client.sizes("a") == client.sizes("b") == {}
    assert client.take("a-0") is None
    until_open(before)
    client.offer("a-0", {"bytes": 1}, [file])
    keeper.close()
    until_open(before - 1)  # the listener is closed too
    os.close(file)
    with pytest.raises(KeeperError, match=r"weights\.sock"):
        client.sizes("a")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_socket_is_made_again_and_the_weights_are_kept(keeper: Keeper, replaced: bool) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    before = open_files() + 1  # the keeper's
    client.offer("a-0", {"bytes": 5}, [file])
    for _ in range(3):
        keeper.path.unlink()
        if replaced:
            keeper.path.write_text("")
        with pytest.raises(KeeperError):
            client.sizes("a")
        keeper.renew()
        assert client.sizes("a") == {"a-0": 5}
        until_open(before)
    made = keeper.path.stat().st_ino
    keeper.renew()
    assert keeper.path.stat().st_ino == made
    assert keeper.path.stat().st_mode & 0o777 == 0o600
    os.close(file)


def test_without_a_place_for_the_socket_the_weights_are_released(keeper: Keeper) -> None:
    """A worker that does not reach the keeper loads its own copy."""
    client = Client(keeper.path)
    file = os.memfd_create("part")
    client.offer("a-0", {"bytes": 5}, [file])
    folder = keeper.path.parent
    folder.rename(folder.with_name("moved"))
    keeper.renew()
    assert keeper.held() == 0
    folder.with_name("moved").rename(folder)
    keeper.renew()
    client.offer("a-0", {"bytes": 5}, [file])
    assert client.sizes("a") == {"a-0": 5}
    os.close(file)


def mapped(client: Client, slot: str) -> bool:
    kept = client.take(slot)
    if kept is not None:
        kept.close()
    return kept is not None


def test_a_set_is_not_mapped_twice_by_engines_that_do_not_load(keeper: Keeper) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    client.offer("a-0", {"bytes": 1}, [file])
    assert [mapped(client, "a-0") for _ in range(3)] == [True, False, False]
    client.offer("a-0", {"bytes": 1}, [file])
    first = client.take("a-0")
    assert first is not None
    client.offer("a-0", {"bytes": 1}, first.descriptors)
    first.close()
    assert mapped(client, "a-0")
    os.close(file)


def test_sets_of_a_worker_that_did_not_load_are_released_before_they_are_counted(keeper: Keeper) -> None:
    """vLLM reduces the KV cache by the counted bytes, so a set that is counted must not be released later."""
    client = Client(keeper.path)
    file = os.memfd_create("part")
    for slot in ("0.0-0", "0.0-1", "0.1-0", "0.10-0"):
        client.offer(slot, {"bytes": 5}, [file])
    assert mapped(client, "0.0-0")
    client.offer("0.0-0", {"bytes": 5}, [file])
    assert mapped(client, "0.0-1")  # and this worker ends here
    # Workers of the next engine, of which another one is faster.
    assert client.sizes("0.1") == {"0.1-0": 5}
    assert mapped(client, "0.1-0")
    assert client.sizes("0.0") == {}
    assert client.sizes("0.10") == {"0.10-0": 5}
    client.offer("0.1-0", {"bytes": 5}, [file])
    assert mapped(client, "0.1-0")
    os.close(file)


def test_nothing_is_retained_after_two_starts_in_a_row_that_could_not_map_it(keeper: Keeper) -> None:
    """Such a start takes a restart of the budget. Ranks of one engine are not equally fast."""
    client = Client(keeper.path)
    file = os.memfd_create("part")
    before = open_files()

    def load() -> None:
        for rank in ("0.0", "0.1"):
            client.offer(f"{rank}-0", {"bytes": 1}, [file] * 3)

    def maps(rank: str) -> None:
        assert mapped(client, f"{rank}-0")
        client.offer(f"{rank}-0", {"bytes": 1}, [file] * 3)

    def fails(rank: str) -> None:
        assert mapped(client, f"{rank}-0")
        client.drop("layer.port is 1, after the load it was 2", f"{rank}-0")
        client.drop("of the same start", f"{rank}-1")
        assert keeper.held() == 0

    load()
    for _ in range(3):
        maps("0.0")
        maps("0.1")
        maps("0.0")
        fails("0.1")
        load()
    keeper.drop("after XIDError")
    load()
    maps("0.1")
    maps("0.0")
    fails("0.1")
    load()
    maps("0.0")
    fails("0.1")
    with pytest.raises(KeeperError, match=r"2 starts in a row could not map them, the last one: layer\.port"):
        load()
    assert keeper.held() == 0
    until_open(before)
    os.close(file)


def test_a_process_that_may_not_open_more_files_retains_nothing_and_answers_later(keeper: Keeper) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    used = set(map(int, os.listdir("/proc/self/fd")))
    # Fewer than the descriptors of one message.
    limit = [number for number in range(1000) if number not in used][100]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = os.open(keeper.path.parent, os.O_RDONLY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        connection.connect(f"/proc/self/fd/{folder}/{keeper.path.name}")
        connection.close()
        time.sleep(0.2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        begun = time.monotonic()
        with pytest.raises(KeeperError):
            client.offer("a-0", {"bytes": 1}, [file] * 200)
        assert time.monotonic() - begun < 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.close()
        os.close(folder)
    assert client.sizes("a") == {}
    client.offer("a-0", {"bytes": 1}, [file])
    assert client.sizes("a") == {"a-0": 1}
    os.close(file)


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b"{", b"[]\n", b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n"),
        b'{"do":"offer","slot":"a-0","about":{"bytes":1},"descriptors":2}\n',
        b'{"do":"offer","slot":"a-0","about":{"bytes":1},"descriptors":1e999}\n',
        b'{"do":"offer","slot":"a-0","about":{"bytes":"many"},"descriptors":1}\n',
        b'{"do":"offer","slot":"a-0","about":{},"descriptors":1}\n',
    ],
    ids=lambda sent: sent[:60].decode(errors="replace") or "nothing",
)
def test_a_broken_request_changes_nothing(keeper: Keeper, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(keeper.path)
    file = os.memfd_create("part")
    client.offer("a-0", {"bytes": 1}, [file])
    time.sleep(0.2)
    before = open_files()
    folder = os.open(keeper.path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{folder}/{keeper.path.name}")
        os.close(folder)
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        assert connection.recv(1) == b""
    assert client.sizes("a") == {"a-0": 1}
    until_open(before)
    assert "a request failed" in caplog.text
    os.close(file)
