"""Processes below the agent, including grandchildren: start, search, watch and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from dsv4_runtime.util.procfs import STOPPED, ChildLine, Entry, below, command_of, is_frozen, read_file

_log = logging.getLogger(__name__)

_KILL_SECONDS = 5.0
_waited_for: set[int] = set()

# How the processes that matter call themselves, as the start of their command line. Ray: `ray/_private/services.py`;
# vLLM: `utils/system_utils.py:set_process_title`; actors are titled `ray::<class>.<method>`.
_TITLES = (
    ("VLLM::EngineCore", "engine-core"),
    ("ray::RayWorkerProc", "worker"),
    ("VLLM::Worker", "worker"),
)
_IDLE_WORKER = "ray::IDLE"
_PROGRAMS = {"raylet": "raylet", "gcs_server": "gcs"}


def role_of(command: Sequence[str]) -> str | None:
    """Return the role of a command line among the watched processes; None for all others."""
    if not command:
        return None
    for title, role in _TITLES:
        if command[0].startswith(title):
            return role
    return _PROGRAMS.get(Path(command[0]).name)


def descendants() -> list[psutil.Process]:
    """Return the processes below this one of which any thread runs."""
    found = []
    for pid, entry in below(os.getpid()).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not entry.ended:
                found.append(psutil.Process(pid))
    return found


def find_roles(table: Mapping[int, Entry] | None = None) -> dict[int, str]:
    """Map process id to role of the watched processes below this one, or of those in `table`.

    A forked child has its parent's title until it executes a program, so a process with the role of its parent does not
    count.
    """
    table = below(os.getpid()) if table is None else table
    found = {pid: role for pid in table if (role := role_of(command_of(pid)))}
    return {pid: role for pid, role in found.items() if found.get(table[pid].parent) != role}


def ended_roles(table: Mapping[int, Entry]) -> dict[int, str]:
    """Map process id to role of Ray's ended processes in `table` for which their parent has not waited."""
    found = {}
    for pid, process in table.items():
        if process.ended:
            with contextlib.suppress(OSError):
                # An ended process has no command line.
                found[pid] = _PROGRAMS.get(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip(), "")
    return {pid: role for pid, role in found.items() if role}


def standby_workers() -> set[int]:
    """Return the process ids of the waiting processes of Ray below this one that import vLLM, or have done so.

    Ray has idle processes of its own, which import neither vLLM nor torch.
    """
    return {
        pid for pid in below(os.getpid()) if _is_idle_worker(pid) and b"/libtorch" in (read_file(pid, "maps") or b"")
    }


def kill_stopped_workers() -> list[int]:
    """Kill the stopped and frozen ones of Ray's waiting processes, which would get the next engine's actors; return
    their ids.
    """
    table = below(os.getpid())
    stopped = [pid for pid in table if _is_idle_worker(pid) and (table[pid].state in STOPPED or is_frozen(pid))]
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return stopped


def _is_idle_worker(pid: int) -> bool:
    return command_of(pid)[0:1] == [_IDLE_WORKER]


@contextlib.contextmanager
def waited_for(pid: int) -> Iterator[None]:
    """Exclude a child from `reap_orphans` within this context: its exit code is awaited elsewhere."""
    _waited_for.add(pid)
    try:
        yield
    finally:
        _waited_for.discard(pid)


def reap_orphans(own: frozenset[int]) -> None:
    """Collect the exit codes of ended children; those in `own` are awaited elsewhere."""
    own = own | _waited_for
    # One system call instead of a scan of all processes: this runs every second.
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _output(log: Path) -> BinaryIO:
    try:
        return log.open("ab")
    except OSError as error:
        _log.warning("%s cannot be written: %s", log, error)
        return Path(os.devnull).open("ab")


class Child:
    """A child process in a session of its own, writing to a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, line: ChildLine | None = None) -> None:
        self.name = name
        self._process = process
        self._line = line

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, *, fed: bool = False
    ) -> Child:
        """Start `command` with exactly `env`; both outputs are appended to `log`. If `fed`, its input is a line.

        If the log cannot be written, the child runs without one.
        """
        line = ChildLine() if fed else None
        try:
            with _output(log) as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env=dict(env),
                    stdin=line.stdin.fileno() if line is not None else asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            if line is not None:
                line.close()
            raise
        finally:
            if line is not None:
                line.opened()
        return cls(name, process, line)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether its end was not yet observed."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the exit code; negative signal number if a signal ended it."""
        return await self._process.wait()

    def send(self, line: bytes) -> bool:
        """Write to the input of a process that was started `fed`, and end that; return whether it could be written."""
        assert self._line is not None  # noqa: S101  (see `start`)
        sent = self._line.send(line)
        self._line.close()
        return sent

    async def alive(self) -> bool:
        """Return whether a process that was started `fed` runs, and answers or works."""
        assert self._line is not None  # noqa: S101  (see `start`)
        return self.running and await self._line.alive(self.pid)

    def tree(self) -> list[psutil.Process]:
        """Return the child and everything below it that still runs; nothing after its end, when its id may be
        another's."""
        if not self.running:
            return []
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def end(self, grace: float) -> None:
        """Send SIGTERM, after `grace` seconds SIGKILL to the process and its descendants; return after its end.

        A process that waits for a device in the kernel may not end; after five seconds it is left to the end of the
        member.
        """
        tree = self.tree()
        if self.running and grace > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._process.wait()
        kill(tree)
        kill(self.tree())
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self._process.wait()
        except TimeoutError:
            _log.error("%s (process %s) outlives SIGKILL: it waits for a device", self.name, self.pid)
        if self._line is not None:
            self._line.close()


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL; psutil excludes a process that reuses a process id."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is the resource tracker of Python's multiprocessing."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


async def end_everything(deadline: float) -> bool:
    """Send SIGKILL to all descendants until none is left; False if some outlived the monotonic `deadline`."""
    while left := descendants():
        kill(left)
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
        reap_orphans(frozenset())
    return True


class ProcessWatch:
    """Reports the end of processes immediately, children or not, through one pidfd each (Linux 5.3)."""

    def __init__(self, ended: Callable[[str, int], None]) -> None:
        self._ended = ended
        self._watched: dict[int, tuple[str, int]] = {}
        self._known: set[str] = set()
        """Roles of which a process was watched, or had ended before."""

    @property
    def roles(self) -> dict[int, str]:
        """Map process id to role of the running processes."""
        return {pid: role for pid, (role, _) in self._watched.items()}

    def refresh(self) -> None:
        """Watch processes that started since the last call, and report Ray's that have ended already.

        Without a free descriptor, some are found by a later call.
        """
        try:
            self._refresh()
        except OSError as error:
            _log.warning("not all processes are watched, which is tried again: %s", error)

    def _refresh(self) -> None:
        table = below(os.getpid())
        for pid, role in find_roles(table).items():
            if pid not in self._watched:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    self._watched[pid] = (role, descriptor)
                    self._known.add(role)
                    asyncio.get_running_loop().add_reader(descriptor, self._gone, pid)
        # The raylet forks processes that end at once, under its own name; so only the first one of a role counts.
        for pid, role in ended_roles(table).items():
            if role not in self._known:
                self._known.add(role)
                self._ended(role, pid)

    def _gone(self, pid: int) -> None:
        role, descriptor = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._ended(role, pid)

    def kill(self, roles: Container[str]) -> None:
        """Send SIGKILL to the watched processes of these roles; a process that reuses an id is excluded."""
        for role, descriptor in self._watched.values():
            if role in roles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching."""
        for _, descriptor in self._watched.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._watched.clear()
