"""Processor cost of a byte between two members: `python benchmarks/weights_costs.py`.

One transfer over loopback at a time, sent by a process that only calls `sendfile`. Each kind of receiver adds one task:
discard the bytes, hash them, write them through the page cache, write them past it. Prints the processor seconds per
GB, which depend less on other programs on the machine than the time does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from dsv4_runtime.weights.writer import HashingWriter
from dsv4_testkit.faults.store import machine

GIB = 1 << 30
_PIECE = 1 << 18
_DEADLINE = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="disk to write to")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of each transfer (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each kind (default: %(default)s)")
    options = parser.parse_args()
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.0f} before\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="d4-costs-", dir=options.directory) as root:
        size = int(options.size * GIB)
        source = Path(root) / "source"
        block = os.urandom(1 << 24)
        with source.open("wb") as file:
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
            os.fsync(file.fileno())
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        for _ in range(options.runs):
            for name in KINDS:
                found[name].append(transfer(source, Path(root) / "copy", name))
    print("| receiver | its processor seconds for a GB, median (range) | the sender's |\n|---|---|---|")
    for name, rows in found.items():
        received, sent = ([row[side] for row in rows] for side in (0, 1))
        shown = f"{statistics.median(received):.2f} ({min(received):.2f} to {max(received):.2f})"
        print(f"| {name} | {shown} | {statistics.median(sent):.2f} |")


def transfer(source: Path, target: Path, kind: str) -> tuple[float, float]:
    """Return the processor seconds per GB of the receiver and the sender."""
    context = get_context("spawn")
    ends: list[tuple[Connection, Connection]] = [context.Pipe(), context.Pipe()]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = context.Process(target=send, args=(source, listener.getsockname()[1], ends[0][1]), daemon=True)
        receiver = context.Process(target=receive, args=(listener, target, kind, ends[1][1]), daemon=True)
        receiver.start()
        sender.start()
        seconds = []
        for ours, _ in reversed(ends):
            assert ours.poll(_DEADLINE), f"{kind}: not done after {_DEADLINE:.0f} s"
            seconds.append(ours.recv() / (source.stat().st_size / 1e9))
        for process in (sender, receiver):
            process.join()
    target.unlink(missing_ok=True)
    return seconds[0], seconds[1]


def used() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def send(source: Path, port: int, told: Connection) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer, source.open("rb") as file:
        before = used()
        peer.sendfile(file)
        told.send(used() - before)


def receive(listener: socket.socket, target: Path, kind: str, told: Connection) -> None:
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    peer, _ = listener.accept()
    with peer:
        before = used()
        end = KINDS[kind](descriptor)
        while count := peer.recv_into(end.room):
            end.add(count)
        end.close()
        told.send(used() - before)
    os.close(descriptor)


def nothing(_: memoryview) -> None:
    return


class Piece:
    """A buffer for successive pieces of received data."""

    def __init__(self, hashed: Callable[[memoryview], object]) -> None:
        self.room = memoryview(bytearray(_PIECE))
        self._hashed = hashed

    def add(self, count: int) -> None:
        self._hashed(self.room[:count])

    def close(self) -> None:
        return


KINDS: dict[str, Callable[[int], Piece | HashingWriter]] = {
    "throws the bytes away": lambda _: Piece(nothing),
    "SHA-256": lambda _: Piece(hashlib.sha256().update),
    "writes through the page cache": lambda descriptor: HashingWriter(descriptor, 0, nothing),
    "writes past the page cache": lambda descriptor: HashingWriter(descriptor, 0, nothing, direct=True),
    "SHA-256, and writes past the page cache": lambda descriptor: HashingWriter(
        descriptor, 0, hashlib.sha256().update, direct=True
    ),
}


if __name__ == "__main__":
    main()
