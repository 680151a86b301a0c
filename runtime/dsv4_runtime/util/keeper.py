"""Keeper of the weights of an ended engine: it holds descriptors of device memory until the next engine maps it.

Memory that a worker allocates through CUDA's virtual memory management and exports as a file descriptor
(`cuMemExportToShareableHandle`) stays allocated as long as any process holds the descriptor or a mapping, also after
the exporting process was killed (NVIDIA, CUDA driver API, "Virtual Memory Management"). The keeper needs neither CUDA
nor a copy: it holds descriptors and one JSON document per set. A set belongs to one loaded model of one worker, with
the name of its slot (`<rank>-<number>`); a later offer for this slot replaces it. When the agent ends, the kernel
closes the descriptors, and the memory is free.

A set that cannot be mapped costs a start: the engine that counted its memory ends, and the next one loads from disk.
After two in a row that failed because of one rank the keeper accepts no more sets: the third would fail too.

Protocol over a Unix stream socket, one request per connection: a line of JSON in each direction. An offer is followed
by its descriptors, an answer with a set too, in messages of at most 200 with one byte each.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_runtime.util.files import raise_file_limit

_log = logging.getLogger(__name__)

VARIABLE = "DSV4_WEIGHTS_KEEPER"
"""Environment variable with the path of the keeper's socket, for workers."""
_BATCH = 200
"""Descriptors per message; Linux allows 253 (`unix(7)`)."""
_MOST = 16_384
"""Descriptors of one set."""
_LINE = 64 << 20
_SECONDS = 20.0
"""Limit of one step of a request in the keeper, which answers one at a time; a client waits twice as long."""
_PAUSE_SECONDS = 0.5
_BACKLOG = 16
_NOT_LOADED = "the engine that mapped them last did not load its model"
_MOST_FAILURES = 2
"""Starts in a row that could not map a set, after which no set is accepted."""
_UCRED = struct.Struct("3i")


class KeeperError(Exception):
    """The keeper cannot be reached, or answered with an error; the text is the reason."""


class KeeperSilentError(KeeperError):
    """The keeper did not answer in time; it may hold memory."""


@dataclass
class Kept:
    """One set: the memory of one loaded model of one worker."""

    about: dict[str, Any]
    """Document of the worker (`dsv4_runtime.vllm_plugin.retained`); `key` identifies the content, `bytes` is the
    size of the memory."""
    descriptors: list[int]
    taken: bool = False
    """Whether a worker mapped it and has not offered it again: that worker's start failed."""

    @property
    def size(self) -> int:
        """Return the bytes of the memory."""
        return int(self.about["bytes"])

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors = []


class Keeper:
    """Server that holds sets of one member's workers, in a thread of the agent."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`.

        Raises:
            OSError: the socket cannot be created.
        """
        self.path = path
        self._sets: dict[str, Kept] = {}
        self._failures: dict[str, list[str]] = {}
        """Rank to the reasons of its latest failures in a row."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        raise_file_limit()
        self._listener, self._file = self._listen()
        threading.Thread(target=self._serve, name="weights-keeper", daemon=True).start()

    def _listen(self) -> tuple[socket.socket, tuple[int, int, int]]:
        """Return a socket that listens at the path, and the identity of its file."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _short(self.path) as name:
                listener.bind(name)
            self.path.chmod(0o600)
            listener.listen(_BACKLOG)
            file = self._identity()
        except OSError:
            listener.close()
            raise
        return listener, file

    def _identity(self) -> tuple[int, int, int]:
        # With the type: another file may have the inode of a removed one.
        found = self.path.stat()
        return found.st_dev, found.st_ino, found.st_mode

    def renew(self) -> None:
        """Make the socket's file again if it was removed, for example by a cleaner of old files.

        If that fails, everything is released: a worker that does not reach the keeper loads a second copy.
        """
        try:
            if self._file == self._identity():
                return
        except OSError:
            pass
        try:
            former, (self._listener, self._file) = self._listener, self._listen()
        except OSError as error:
            self.drop(f"{self.path} was removed and cannot be made again: {error}")
            return
        _log.warning("%s was removed, and is made again", self.path)
        _end(former)

    def held(self) -> int:
        """Return the bytes of all sets."""
        with self._lock:
            return sum(kept.size for kept in self._sets.values())

    def drop(self, reason: str, rank: str | None = None, *, failed: str | None = None) -> None:
        """Release all sets, or those of one rank.

        Args:
            reason: for the log.
            rank: whose; None: of all ranks.
            failed: rank that could not map one of them.
        """
        with self._lock:
            dropped = [self._sets.pop(slot) for slot in list(self._sets) if rank in (None, _rank_of(slot))]
            if dropped and failed is not None:
                self._failures.setdefault(failed, []).append(reason)
        for kept in dropped:
            kept.close()
        if dropped:
            size = sum(kept.size for kept in dropped)
            _log.info("released %.1f GiB of retained weights: %s", size / 2**30, reason)

    def close(self) -> None:
        """Stop listening and release everything."""
        self._ended.set()
        _end(self._listener)
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.drop("the agent ends")

    def _serve(self) -> None:
        while True:
            listener = self._listener
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                if listener is not self._listener:
                    continue
                _log.warning("retained weights: no request can be accepted: %s", error)
                self._ended.wait(_PAUSE_SECONDS)
                continue
            with connection:
                connection.settimeout(_SECONDS)
                try:
                    self._answer(connection)
                except Exception as error:  # the next request may be a good one
                    _log.warning("retained weights: a request failed: %s: %s", type(error).__name__, error)

    def _answer(self, connection: socket.socket) -> None:
        _, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if user != os.getuid():
            raise ValueError(f"a process of user {user} asked")
        request = _receive_line(connection)
        slot = str(request["slot"])
        rank = _rank_of(slot)
        match request["do"]:
            case "offer":
                count = int(request["descriptors"])
                if not 0 < count <= _MOST:
                    raise ValueError(f"{count} descriptors")
                about = dict(request["about"])
                size = int(about["bytes"])
                kept = Kept(about, _receive(connection, count))
                with self._lock:
                    before = self._sets.pop(slot, None)
                    if before is not None and before.taken:
                        self._failures.pop(rank, None)
                    failed = next((said for said in self._failures.values() if len(said) >= _MOST_FAILURES), None)
                    if failed is None:
                        self._sets[slot] = kept
                if before is not None:
                    before.close()
                if failed is not None:
                    kept.close()
                    why = f"{len(failed)} starts in a row could not map them, the last one: {failed[-1]}"
                    _send_line(connection, {"refused": why})
                    return
                _send_line(connection, {"ok": True})
                _log.info("retains %.1f GiB of weights (%s)", size / 2**30, slot)
            case "take":
                if slot in self._taken(rank):
                    self.drop(_NOT_LOADED, rank, failed=rank)
                copies: list[int] = []
                try:
                    with self._lock:
                        found = self._sets.get(slot)
                        if found is not None:
                            found.taken = True
                            # Copies: a drop in another thread closes the originals.
                            copies.extend(map(os.dup, found.descriptors))
                    _send_line(connection, {"about": found.about if found else None, "descriptors": len(copies)})
                    _send(connection, copies)
                finally:
                    for one in copies:
                        os.close(one)
            case "sizes":
                if self._taken(rank):
                    self.drop(_NOT_LOADED, rank, failed=rank)
                with self._lock:
                    sizes = {name: one.size for name, one in self._sets.items() if _rank_of(name) == rank}
                _send_line(connection, {"sizes": sizes})
            case "drop":
                self.drop(str(request.get("reason", "")), failed=rank)
                _send_line(connection, {"ok": True})
            case other:
                raise ValueError(f"unknown request {other!r}")

    def _taken(self, rank: str) -> set[str]:
        with self._lock:
            return {slot for slot, kept in self._sets.items() if kept.taken and _rank_of(slot) == rank}


class Client:
    """The keeper as a worker sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def here(cls) -> Client | None:
        """Return the client for this process' keeper; None if there is none."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path)) if path else None

    def offer(self, slot: str, about: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Hand over memory for the next engine.

        Raises:
            KeeperError: it was not accepted.
        """
        request = {"do": "offer", "slot": slot, "about": about, "descriptors": len(descriptors)}
        answer, _ = self._ask(request, give=descriptors)
        if refused := answer.get("refused"):
            raise KeeperError(str(refused))

    def take(self, slot: str) -> Kept | None:
        """Return the set of a slot with descriptors of this process, None if there is none; the keeper retains its own.

        Raises:
            KeeperError: the keeper did not answer.
        """
        answer, descriptors = self._ask({"do": "take", "slot": slot})
        return None if answer.get("about") is None else Kept(dict(answer["about"]), descriptors)

    def sizes(self, rank: str) -> dict[str, int]:
        """Return slot to bytes of every set of a rank, before its worker loads.

        The rank's sets are released first if the last worker that mapped one did not load it: after this call they
        count as memory outside of the engine.

        Raises:
            KeeperSilentError: the keeper did not answer in time, for example because the agent is stopped.
            KeeperError: it cannot be reached: the agent has ended.
        """
        answer, _ = self._ask({"do": "sizes", "slot": f"{rank}-"})
        return {str(slot): int(size) for slot, size in answer["sizes"].items()}

    def drop(self, reason: str, slot: str) -> None:
        """Have all sets released, because that of a slot cannot be mapped.

        Raises:
            KeeperError: the keeper did not answer.
        """
        self._ask({"do": "drop", "slot": slot, "reason": reason})

    def _ask(self, request: dict[str, Any], give: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(2 * _SECONDS)
                with _short(self._path) as name:
                    connection.connect(name)
                _send_line(connection, request)
                _send(connection, give)
                answer = _receive_line(connection)
                return answer, _receive(connection, int(answer.get("descriptors", 0)))
        except (OSError, ValueError) as error:
            # The second one: its queue of connections is full.
            silent = isinstance(error, (TimeoutError, BlockingIOError))
            kind = KeeperSilentError if silent else KeeperError
            raise kind(f"{self._path}: {type(error).__name__}: {error}") from error


def _end(listener: socket.socket) -> None:
    """Close a socket on which another thread waits."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _rank_of(slot: str) -> str:
    return slot.rpartition("-")[0]


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of `path` within the 107 bytes of a Unix socket's address."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _send_line(connection: socket.socket, document: dict[str, Any]) -> None:
    connection.sendall(json.dumps(document).encode() + b"\n")


def _receive_line(connection: socket.socket) -> dict[str, Any]:
    """Read up to the end of a line; descriptors follow in messages of their own, so nothing after it is read."""
    found = bytearray()
    while not found.endswith(b"\n"):
        # `MSG_PEEK` first: a message with descriptors may follow at once.
        waiting = connection.recv(1 << 16, socket.MSG_PEEK)
        if not waiting or len(found) > _LINE:
            raise ValueError("no complete line arrived")
        end = waiting.find(b"\n")
        found += connection.recv(len(waiting) if end < 0 else end + 1)
    return dict(json.loads(found))


def _send(connection: socket.socket, descriptors: Sequence[int]) -> None:
    for start in range(0, len(descriptors), _BATCH):
        socket.send_fds(connection, [b"."], descriptors[start : start + _BATCH])


def _receive(connection: socket.socket, count: int) -> list[int]:
    found: list[int] = []
    try:
        while len(found) < count:
            # `socket.recv_fds` of Python 3.11 ignores flags, and a child that inherits a descriptor keeps the memory.
            size = socket.CMSG_LEN(_BATCH * array.array("i").itemsize)
            data, control, flags, _ = connection.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
            received = array.array("i")
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            found += received
            if not data or not received or flags & socket.MSG_CTRUNC:
                # Truncated: this process may not open more files.
                raise ValueError(f"{len(found)} of {count} descriptors arrived")  # noqa: TRY301  (they are closed)
    except BaseException:
        for one in found:
            os.close(one)
        raise
    return found
