"""Supervisor of a local deployment: parent of its reconcile loop, gateways and members.

The loop decides, and the supervisor keeps what has to outlive the loop: child processes, open files (listening sockets,
GPU claims, the private network) and the latest status. It starts the loop again when that ends without request, or
hangs; the next loop adopts everything. The kernel ends all children with the supervisor. Processes that a killed child
leaves become children of the supervisor, which kills them: without namespaces an engine would outlive its agent. Only
the standard library is imported, so that the supervisor stays small and has no reason to fail.

Loop and supervisor exchange JSON messages over a Unix socket, files as `SCM_RIGHTS`. For `dsv4 status` the supervisor
has a report in a memory file, readable below `/proc` even while every process is stopped and the disk is full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_operator.backends.local import network
from dsv4_runtime.util.files import own_shortage
from dsv4_runtime.util.procfs import become_reaper

_log = logging.getLogger("dsv4")

BEAT_SECONDS = 0.5
RESUME_SECONDS = 2.0
"""Silence of a process that uses no processor time, after which it gets SIGCONT."""
FROZEN_SECONDS = 4.0
"""Silence of a process that uses no processor time, after which it is replaced."""
HUNG_SECONDS = 20.0
"""Silence after which a process is replaced that still uses processor time."""
START_SECONDS = 60.0
"""Silence without use of processor time before its first response, and processor time that it may use until then: on a
busy machine a start takes long."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0
END_TRIES = 5
"""Loops that may fail after a request to end, before the supervisor kills all children and ends itself."""
_KILL_SECONDS = 1.0
_ORPHAN_SECONDS = 0.02
"""Interval in which orphans are killed, until none is left."""
_TRACKER, _TRACKER_SECONDS = b"multiprocessing.resource_tracker", 5.0
"""Python's tracker removes the shared memory of its processes after their end, and has this time for it."""
_STEADY_SECONDS = 60.0
"""A loop that ran this long starts again without backoff."""
_MESSAGE_BYTES, _FILES = 1 << 20, 250
_BUFFER_BYTES = 4 << 20
_REPORT, _REPORT_BYTES, _RESTARTS = "dsv4-report", 16384, 10
_READ_TRIES = 20
_TICKS = os.sysconf("SC_CLK_TCK")
STATUS = "status"
"""Name of the kept memory file with the latest deployment."""
NETWORK, OUTSIDE, LOCK = "network", "outside", "lock"
"""Names of other kept files: the private network, that of the machine, and the deployment's lock."""


class Liveness:
    """Judges whether a process hangs, by its responses and its processor time. Times are monotonic."""

    def __init__(self, pid: int, now: float, *, starts: bool = True) -> None:
        """Count from `now` on; `starts`: the process may still start, and has longer until its first response."""
        self.pid = pid
        self._responded = self._progressed = self._judged = now
        activity = _activity(pid)
        self._begun = self._ticks = activity[1] if activity is not None else None
        self._first = starts
        self.resumed = False

    @property
    def silent_since(self) -> float:
        """Return the time of the latest response."""
        return self._responded

    def respond(self, now: float) -> None:
        """Record a response."""
        self._responded, self._first, self.resumed = now, False, False

    def excuse(self, now: float) -> None:
        """Count the silence from `now` on: until then, this process itself could not receive a response."""
        self._responded = self._progressed = now

    def hangs(self, now: float) -> bool:
        """Return whether the process is to be replaced. Continues it first, in case it was stopped by a signal."""
        if now - self._judged >= RESUME_SECONDS:
            # This process did not run meanwhile, and has not read the latest responses.
            self.excuse(now)
        self._judged = now
        activity = _activity(self.pid)
        if activity is None:
            # It may have worked.
            self._progressed = now
        elif activity[1] != self._ticks:
            self._ticks, self._progressed = activity[1], now
            self._begun = self._ticks if self._begun is None else self._begun
        state = activity[0] if activity is not None else ""
        # A process that starts waits for other programs and for the disk.
        unused = now - max(self._responded, self._progressed)
        idle = unused if state in ("T", "t") or not self._first else 0.0
        if idle >= RESUME_SECONDS and not self.resumed:
            self.resumed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        if self._first:
            used = (self._ticks or 0) - (self._begun or 0)
            return idle >= FROZEN_SECONDS or unused >= START_SECONDS or used >= START_SECONDS * _TICKS
        return idle >= FROZEN_SECONDS or now - self._responded >= HUNG_SECONDS


def _activity(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and its processor time in clock ticks; an empty state if it has ended, None if this
    process lacks the resources to read them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError) as error:
        return None if own_shortage(error) is not None else ("", 0)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float
    """Unix time."""
    code: int | None = None
    ended: float | None = None

    def document(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "pid": self.process.pid,
            "started": self.started,
            "code": self.code,
            "ended": self.ended,
        }


class Supervisor:
    """Keeps children and files for the loop at the other end of `attach`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, _Child] = {}
        self._reaper = False
        """Whether processes of ended children become children of this one."""
        self._orphans: dict[int, float] = {}
        """Process id -> monotonic time since when."""
        self._ended: dict[str, tuple[float, frozenset[int]]] = {}
        """Ended children that may have left processes: Unix time, and orphans before."""
        self._frozen: list[subprocess.Popen[bytes]] = []
        """Killed loops that have not ended."""
        self._kept: dict[str, int] = {}
        self._connection: socket.socket | None = None
        self._beat: float | None = None
        """Unix time of the loop's latest beat."""
        self._responded = 0.0
        self._restarts: list[dict[str, Any]] = []
        self._count = 0
        self._ending = False
        self._report = os.memfd_create(_REPORT)
        self._loop: int | None = None

    def attach(self, connection: socket.socket) -> None:
        """Serve the loop at the other end of `connection`, from its first message, the state, on."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._selector.register(connection, selectors.EVENT_READ, "loop")
        state = {
            "children": [child.document(name) for name, child in self._children.items()],
            "kept": self._kept,
            "restarts": self._restarts,
            "ending": self._ending,
        }
        self._send(state, list(self._kept.values()))

    def detach(self) -> None:
        """Drop the connection of a loop that has ended."""
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Kill all children and close all files."""
        for name, child in self._children.items():
            if child.code is None:
                child.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_KILL_SECONDS)
                if name not in self._ended:
                    os.close(child.pidfd)
        deadline = time.monotonic() + _KILL_SECONDS
        while not self._end_orphans() and time.monotonic() < deadline:
            time.sleep(_ORPHAN_SECONDS)
        self.detach()
        for descriptor in (*self._kept.values(), self._report):
            os.close(descriptor)
        self._selector.close()

    def poll(self, seconds: float) -> None:
        """Process the messages and ends of children of the next `seconds`; return after the first."""
        waits = self._orphans or self._ended
        for key, _ in self._selector.select(min(seconds, _ORPHAN_SECONDS) if waits else seconds):
            if key.data == "loop":
                self._receive()
            elif isinstance(key.data, str):
                self._reap(key.data)
        self._end_orphans()

    def run(self, command: Sequence[str]) -> int:
        """Run the loop with the options `--supervisor=FD`, again after every unrequested end; return its exit code.

        An end before the first beat of the first loop is a failed start. After a request to end, `END_TRIES` loops may
        fail.
        """
        self._reaper = become_reaper()
        wake, signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signals)
        self._selector.register(wake, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        pause, proven, tries = FIRST_PAUSE, False, 0
        while True:
            begun = time.monotonic()
            try:
                code, reason = self._run_once(command, wake)
            except OSError as error:
                self.detach()
                code, reason = 1, f"could not be started ({error.strerror or error})"
            proven = proven or self._beat is not None
            tries += self._ending
            if code == 0 or not proven or tries >= END_TRIES:
                return code
            if time.monotonic() - begun >= _STEADY_SECONDS or self._ending:
                pause = FIRST_PAUSE
            self._count += 1
            self._restarts = [*self._restarts, {"time": time.time(), "reason": reason}][-_RESTARTS:]
            self._publish()
            until = time.monotonic() + pause
            pause, ending = min(pause * 2, LONGEST_PAUSE), self._ending
            while (left := until - time.monotonic()) > 0 and self._ending == ending:
                self._drain(wake)
                self.poll(left)

    def _end(self, number: int, frame: object) -> None:
        self._ending = True

    def _run_once(self, command: Sequence[str], wake: int) -> tuple[int, str]:
        """Run one loop until it ends; return its exit code and the reason of its end."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            process = subprocess.Popen(
                [*command, f"--supervisor={theirs.fileno()}"],
                pass_fds=(theirs.fileno(),),
                preexec_fn=lambda: network.die_with_parent(signal.SIGKILL),
            )
        self.attach(mine)
        self._loop = process.pid
        liveness = Liveness(process.pid, time.monotonic())
        told, reason, seen = self._ending, "", self._responded
        self._publish()
        while process.poll() is None:
            self.poll(BEAT_SECONDS / 2)
            self._drain(wake)
            now = time.monotonic()
            if self._responded != seen:
                seen = self._responded
                liveness.respond(now)
            if self._ending and not told:
                told = True
                process.send_signal(signal.SIGTERM)
            if liveness.hangs(now):
                reason = f"did not respond for {now - liveness.silent_since:.1f} s"
                process.kill()
                # A frozen process ends when it thaws, before it runs again; the next loop does not wait for that.
                try:
                    process.wait(_KILL_SECONDS)
                except subprocess.TimeoutExpired:
                    self._frozen.append(process)
                break
        # The last messages may contain the final status.
        self.poll(0)
        self.detach()
        self._loop = None
        code = process.returncode if process.returncode is not None else -signal.SIGKILL
        return code, reason or (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    @staticmethod
    def _drain(wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 512)

    def _receive(self) -> None:
        connection = self._connection
        while connection is not None:
            try:
                data, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, files = b"", []
            if not data:
                self.detach()
                return
            try:
                self._handle(json.loads(data), files)
            except Exception:
                # For example without free descriptors. Everything else depends on this process.
                traceback.print_exc()

    def _handle(self, message: Mapping[str, Any], files: list[int]) -> None:
        name = message.get("name", "")
        match message["do"]:
            case "beat":
                self._beat, self._responded = time.time(), time.monotonic()
                self._publish()
            case "start":
                self._send(self._start(name, message))
            case "signal":
                if (child := self._children.get(name)) and child.code is None:
                    child.process.send_signal(message["number"])
            case "forget":
                if (child := self._children.get(name)) and child.code is not None:
                    del self._children[name]
            case "keep":
                earlier = self._kept.get(name)
                self._kept[name] = files.pop()
                if name == NETWORK:
                    network.enter(self._kept[name])
                self._publish()
                if earlier is not None:
                    # Only now: the report names a file that can be read, even if this process is stopped here.
                    os.close(earlier)
                if message["reply"]:
                    self._send({"reply": "keep", "name": name, "number": self._kept[name]})
        for descriptor in files:
            os.close(descriptor)

    def _start(self, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        if name in self._children and self._children[name].code is None:
            return {"reply": "start", **self._children[name].document(name)}
        death = signal.Signals(message["death"])
        hidden = set(message["unset"])
        environment = {key: value for key, value in os.environ.items() if key not in hidden} | message["set"]
        try:
            with open(message["log"], "ab") as log:
                process = subprocess.Popen(
                    message["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment,
                    pass_fds=message["files"],
                    preexec_fn=lambda: network.die_with_parent(death),
                )
            try:
                child = _Child(process, os.pidfd_open(process.pid), time.time())
            except OSError:
                process.kill()
                process.wait()
                raise
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            return {"reply": "start", "name": name, "error": number, "text": str(error)}
        self._children[name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, name)
        return {"reply": "start", **child.document(name)}

    def _reap(self, name: str) -> None:
        child = self._children[name]
        child.process.wait()
        self._ended[name] = time.time(), frozenset(self._orphans)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)

    def _end_orphans(self) -> bool:
        """Kill processes that ended children left, and report the end of each child that has left none, or none any
        more; return whether there are none.

        Those below the killed ones become orphans in turn.
        """
        if self._reaper:
            try:
                found = self._find_orphans()
            except OSError as error:
                if own_shortage(error) is not None:
                    # Unknown.
                    return False
                # Some kernels have no lists of children.
                found = set()
            now = time.monotonic()
            self._orphans = {pid: self._orphans.get(pid, now) for pid in found}
            for pid, since in self._orphans.items():
                if now - since >= _TRACKER_SECONDS or not _is_tracker(pid):
                    # Not reaped, so the number is not in use by another process. PermissionError: of another user.
                    with contextlib.suppress(PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        for name, (ended, before) in list(self._ended.items()):
            if self._orphans.keys() <= before:
                child = self._children[name]
                child.code, child.ended = child.process.returncode, ended
                del self._ended[name]
                self._send({"reply": "end", **child.document(name)})
        return not self._orphans

    def _find_orphans(self) -> set[int]:
        """Return the children of this process that it did not start.

        Raises:
            OSError: they cannot be listed.
        """
        self._frozen = [process for process in self._frozen if process.poll() is None]
        own = {process.pid for process in self._frozen} | {self._loop}
        own |= {child.process.pid for child in self._children.values() if child.process.returncode is None}
        return set(network.list_children(os.getpid())) - own

    def _send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        if self._connection is not None:
            # A loop that reads nothing is replaced; the next one gets the whole state.
            with contextlib.suppress(OSError):
                socket.send_fds(self._connection, [json.dumps(message).encode()], files[:_FILES])

    def _publish(self) -> None:
        report = {
            "loop": self._loop,
            "beat": self._beat,
            "restarts": self._restarts[-3:],
            "count": self._count,
            "kept": {name: number for name, number in self._kept.items() if name in (STATUS, NETWORK)},
        }
        os.pwrite(self._report, json.dumps(report).encode().ljust(_REPORT_BYTES), 0)


@dataclass(frozen=True, slots=True)
class LoopReport:
    """State of the loop, as its supervisor reported it."""

    supervisor: int
    loop: int | None
    """Process of the loop; None between two."""
    beat: float | None
    """Unix time of its latest beat."""
    restarts: tuple[tuple[float, str], ...] = ()
    """Times and reasons of the latest restarts, oldest first."""
    count: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)

    def read_status(self) -> str | None:
        """Return the latest status as JSON; None if there is none."""
        text = _read_memory(self.supervisor, self.kept.get(STATUS), STATUS)
        return text or None


def read_report(supervisor: int) -> LoopReport | None:
    """Return the report of the supervisor with this process id; None if there is none."""
    for _ in range(_READ_TRIES):
        text = _read_memory(supervisor, _find_memory(supervisor, _REPORT), _REPORT)
        if text is None:
            return None
        # A report that is being replaced may be read in part.
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            restarts = tuple((one["time"], one["reason"]) for one in found["restarts"])
            return LoopReport(supervisor, found["loop"], found["beat"], restarts, found["count"], found["kept"])
        time.sleep(0.005)
    return None


def read_kept_status(supervisor: int) -> str | None:
    """Return the latest status that the loop gave its supervisor, as JSON; None if there is none."""
    for _ in range(_READ_TRIES):
        report = read_report(supervisor)
        if report is None or STATUS not in report.kept:
            return None
        # The file is replaced at every change of the status.
        if (text := report.read_status()) is not None:
            return text
    return None


def _find_memory(pid: int, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{name} "):
                    return number
    return None


def _read_memory(pid: int, number: int | None, name: str) -> str | None:
    if number is None:
        return None
    path = f"/proc/{pid}/fd/{number}"
    try:
        with open(path, "rb") as file:
            if not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(f"/memfd:{name} "):
                return None
            return file.read().decode()
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class Child:
    """A process that the supervisor started."""

    name: str
    pid: int
    started: float
    """Unix time."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_time: float | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def wait(self) -> int:
        """Return the exit code after the end."""
        while self.code is None:
            await self._ended.wait()
        return self.code

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the supervisor's knowledge."""
        self.code, self.ended_time = document["code"], document["ended"]
        if self.code is not None:
            self._ended.set()


class SupervisorLost(Exception):
    """The connection to the supervisor has ended; this process ends too."""


class Processes:
    """The loop's connection to its supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        """Read the state. Must be closed with `close`."""
        connection.setblocking(True)
        connection.settimeout(START_SECONDS)
        self._connection = connection
        data, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _FILES)
        if not data:
            raise SupervisorLost
        state = json.loads(data)
        self.kept: dict[str, int] = dict(zip(state["kept"], files, strict=True))
        """Own descriptors of the kept files."""
        self._numbers: dict[str, int] = state["kept"]
        self.children = {one["name"]: Child(one["name"], one["pid"], one["started"]) for one in state["children"]}
        self._starting: dict[str, asyncio.Future[Child]] = {}
        for one in state["children"]:
            self.children[one["name"]].update(one)
        self.restarts: list[tuple[float, str]] = [(one["time"], one["reason"]) for one in state["restarts"]]
        self.ending: bool = state["ending"]
        """Whether the loop was asked to end before this one started."""
        self._beating: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Start to receive messages, and to beat."""
        self._connection.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connection, self._receive)
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Stop receiving; children and kept files stay with the supervisor."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
            asyncio.get_running_loop().remove_reader(self._connection)
        for descriptor in self.kept.values():
            os.close(descriptor)
        self._connection.close()

    def keep(self, name: str, descriptor: int) -> None:
        """Give a file to the supervisor, before `listen`; it replaces one of the same name."""
        self._send({"do": "keep", "name": name, "reply": True}, descriptor)
        while True:
            reply = json.loads(self._connection.recv(_MESSAGE_BYTES))
            if (reply["reply"], reply["name"]) == ("keep", name):
                self._numbers[name] = reply["number"]
                self.kept[name] = os.dup(descriptor)
                return
            self._handle(reply)

    def keep_text(self, name: str, text: str) -> None:
        """Give a text to the supervisor, in a new memory file."""
        descriptor = os.memfd_create(name)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(text.encode())
            self._send({"do": "keep", "name": name, "reply": False}, descriptor)
        finally:
            os.close(descriptor)

    def kept_text(self, name: str) -> str | None:
        """Return the text that an earlier loop gave; None if there is none."""
        if name not in self.kept:
            return None
        with open(os.dup(self.kept[name]), "rb") as file:
            file.seek(0)
            return file.read().decode()

    def socket(self, name: str) -> socket.socket:
        """Return a kept socket, with a descriptor of its own."""
        return socket.socket(fileno=os.dup(self.kept[name]))

    def number(self, name: str) -> int:
        """Return the number that a kept file has in children (`files` of `start`)."""
        return self._numbers[name]

    async def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        death: signal.Signals,
        files: Sequence[str] = (),
        unset: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process; `death` is its signal when the supervisor ends.

        Raises:
            OSError: it cannot be started.
        """
        self._starting[name] = asyncio.get_running_loop().create_future()
        message = {
            "do": "start",
            "name": name,
            "command": list(command),
            "log": str(log),
            "death": int(death),
            "files": [self._numbers[file] for file in files],
            "unset": list(unset),
            "set": dict(variables or {}),
        }
        try:
            self._send(message)
            return await self._starting[name]
        finally:
            del self._starting[name]

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal; no effect after the end."""
        self._send({"do": "signal", "name": child.name, "number": int(number)})

    def forget(self, child: Child) -> None:
        """Drop a child that has ended."""
        if child.code is not None:
            self.children.pop(child.name, None)
            self._send({"do": "forget", "name": child.name})

    async def _beat(self) -> None:
        latest = time.monotonic()
        while True:
            self._send({"do": "beat"})
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            if now - latest >= RESUME_SECONDS:
                _log.warning("the loop did not run for %.1f s", now - latest)
            latest = now

    def _send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        files = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], files)
        except BlockingIOError:
            if message["do"] != "beat":
                raise
        except ConnectionError:
            # The kernel ends this process with the supervisor.
            pass

    def _receive(self) -> None:
        while True:
            try:
                data = self._connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._connection)
                return
            self._handle(json.loads(data))

    def _handle(self, message: Mapping[str, Any]) -> None:
        name = message["name"]
        if message["reply"] == "end":
            if name in self.children:
                self.children[name].update(message)
            return
        waiting = self._starting.get(name)
        waits = waiting is not None and not waiting.done()
        if "error" in message:
            if waiting is not None and waits:
                waiting.set_exception(OSError(message["error"], message["text"]))
            return
        self.children[name] = Child(name, message["pid"], message["started"])
        if waiting is not None and waits:
            waiting.set_result(self.children[name])


def main() -> None:
    """Run the reconcile loop with these arguments until it ends on request. Exit code: the loop's."""
    parser = argparse.ArgumentParser(prog="dsv4-supervisor", description=main.__doc__)
    parser.add_argument("--attached", type=int, metavar="PID", help="end when this parent process ends")
    parser.add_argument(
        "--loop", default="dsv4_operator.controller.standalone", metavar="MODULE", help="module of the loop"
    )
    options, arguments = parser.parse_known_args()
    if options.attached is not None:
        network.die_with_parent(signal.SIGTERM)
        if os.getppid() != options.attached:
            # The parent ended before the signal was registered.
            return
    command = [sys.executable, "-m", options.loop, *arguments]
    supervisor = Supervisor()
    code = supervisor.run(command)
    supervisor.close()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
