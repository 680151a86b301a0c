"""Members of one deployment on this machine: processes of the host service's supervisor.

A member has its own process namespace, whose first process is the agent; the kernel ends all others with it. That makes
fencing exact on machines with and without systemd, also after a `kill -9` of the supervisor. A record beside the
member's files survives the supervisor and the machine: members of an earlier one are reported with the reason of their
end until they are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsv4_operator.backends.hosts.documents import MemberReport
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.backend import describe_end
from dsv4_operator.backends.local.facts import available_memory
from dsv4_operator.backends.local.network import children
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.backends.local.supervisor import Child, Processes
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.base import Report
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import replace_file

_log = logging.getLogger("dsv4")

_START_SECONDS = 10.0
_FENCE_SECONDS = 0.5
"""Time for which a request to end members waits for their end; usually sufficient."""
_PAUSE_SECONDS = 0.02
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")
_FENCED = "fenced.json"


class StartRefused(Exception):
    """A member must not be started; the text contains the reason."""


class _Fenced(Report):
    groups: dict[int, int]


class _Record(Report):
    """File `member.json` in a member's directory."""

    address: str
    agent: int
    started: float
    boot: str
    memory: int
    """Memory of the machine that was available before its members were started."""
    init: tuple[int, int] | None = None
    """Process id and start time (ticks since boot) of the first process of its namespace; None until it is known. It
    becomes a zombie only after all others of the namespace are gone."""
    ended: str | None = None
    ended_time: float | None = None
    restarted: bool = False


Key = tuple[int, int, int]
"""Group, incarnation, rank."""


@dataclass(slots=True)
class _Member:
    key: Key
    directory: Path
    record: _Record
    child: Child | None = None
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)
    kill_time: float | None = None
    """Monotonic time of the first request to end."""

    def save(self, **changes: object) -> None:
        """Change the record. A full disk must neither hide nor delay an end."""
        self.record = self.record.model_copy(update=changes)
        with contextlib.suppress(OSError):
            replace_file(self.directory / "member.json", self.record.to_json())


class HostMembers:
    """The members of one deployment on this machine."""

    def __init__(self, host: str, state: DeploymentState, processes: Processes) -> None:
        """Args:
        host: the machine's name in plans.
        state: files of the deployment's members on this machine.
        processes: starts them, and has those of an earlier service.

        Raises:
            StateError: the saved state cannot be read.
        """
        self._host = host
        self._state = state
        self._processes = processes
        self._members: dict[Key, _Member] = {}
        self.boot = boot_id()
        self._fenced = self._read_fenced()
        self._saved = dict(self._fenced)

    @property
    def fenced(self) -> dict[int, int]:
        """Return by group the highest incarnation that cannot be started any more."""
        return dict(self._fenced)

    @property
    def running(self) -> bool:
        """Return whether a process of a member may exist."""
        return any(member.record.ended is None for member in self._members.values())

    @property
    def memory(self) -> int | None:
        """Return the memory that was available before the running members were started; None if none runs."""
        return next((one.record.memory for one in self._members.values() if one.record.ended is None), None)

    def reports(self) -> tuple[MemberReport, ...]:
        """Return all members that are not forgotten."""
        now = unix_time()
        return tuple(
            MemberReport(
                group=key[0],
                incarnation=key[1],
                rank=key[2],
                address=member.record.address,
                agent=member.record.agent,
                age=max(0.0, now - member.record.started),
                ended=member.record.ended,
                ended_age=None if member.record.ended_time is None else max(0.0, now - member.record.ended_time),
                restarted=member.record.restarted,
            )
            for key, member in sorted(self._members.items())
        )

    def adopt(self) -> None:
        """Continue with the members of an earlier service, running or ended. Must be called once, in the event loop."""
        for key, directory in self._directories():
            try:
                record = _Record.model_validate_json((directory / "member.json").read_bytes())
            except (OSError, ValueError):
                # A record is written before the start, so a member without one was never started.
                continue
            child = self._processes.children.get(_name(key))
            self._follow(_Member(key, directory, record, child))
        for name, child in list(self._processes.children.items()):
            if (found := _key(name)) is not None and found not in self._members:
                _log.error("%s is ended: its record cannot be read", name)
                member = _Member(found, self._state.member(found[1], found[2], found[0]), self._unknown(child), child)
                self._follow(member)
                self._kill(member)

    async def start(self, plan: GroupPlan, rank: int, token: str, memory: int) -> None:
        """Start a member unless it exists or existed; `memory` is available without members.

        Raises:
            StartRefused: it was fenced, another incarnation runs here, or the plan is for other directories.
            OSError: files cannot be written, or the process cannot be started.
        """
        key = plan.group, plan.incarnation, rank
        if key in self._members:
            return
        self._check(plan, rank)
        directory = self._state.member(plan.incarnation, rank, plan.group)
        await asyncio.to_thread(self._prepare, plan, directory, token)
        own = plan.members[rank]
        record = _Record(address=own.address, agent=own.ports.agent, started=unix_time(), boot=self.boot, memory=memory)
        member = _Member(key, directory, record)
        # Before the start, so that no process lacks a record.
        await asyncio.to_thread(replace_file, directory / "member.json", member.record.to_json())
        command = [sys.executable, "-m", "dsv4_runtime.agent.main", "--plan", str(directory.parent / "plan.json")]
        command += ["--rank", str(rank), "--directory", str(directory)]
        command += ["--evidence", str(self._state.evidence(plan.group))]
        member.child = await self._processes.start(
            _name(key),
            network.member_command(command, plan.expectations.shm_bytes, own_network=False),
            log=directory / "agent.log",
            death=signal.SIGKILL,
        )
        _log.info("started rank %d of incarnation %d (process %d)", rank, plan.incarnation, member.child.pid)
        self._follow(member)

    async def fence(self, group: int, incarnation: int) -> None:
        """Begin to end all members of an incarnation, and refuse later starts.

        Raises:
            OSError: the refusal of later starts cannot be saved.
        """
        members = [member for key, member in self._members.items() if key[:2] == (group, incarnation)]
        for member in members:
            if member.record.ended is None:
                self._kill(member)
        await self._refuse_starts(group, incarnation)

    async def ended(self, group: int, incarnation: int) -> None:
        """Wait up to 0.5 s for the end of all members of an incarnation."""
        mine = [member.watcher for key, member in self._members.items() if key[:2] == (group, incarnation)]
        if watchers := {watcher for watcher in mine if watcher is not None}:
            await asyncio.wait(watchers, timeout=_FENCE_SECONDS)

    async def forget(self, group: int, incarnation: int) -> None:
        """Remove an incarnation with its files; no effect while one of its members may run.

        Raises:
            OSError: the refusal of later starts cannot be saved.
        """
        members = [member for key, member in self._members.items() if key[:2] == (group, incarnation)]
        if any(member.record.ended is None for member in members):
            return
        await self._refuse_starts(group, incarnation)
        for member in members:
            del self._members[member.key]
            if member.child is not None:
                self._processes.forget(member.child)
        await asyncio.to_thread(self._state.forget_incarnation, incarnation, group)

    async def close(self) -> None:
        """Stop watching; the members stay with the supervisor."""
        watchers = [member.watcher for member in self._members.values() if member.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    def _check(self, plan: GroupPlan, rank: int) -> None:
        if rank >= len(plan.members):
            raise StartRefused(f"rank {rank} is not in the plan, which has {len(plan.members)} members")
        if plan.members[rank].node != self._host:
            raise StartRefused(f"rank {rank} is planned on {plan.members[rank].node}, and this machine is {self._host}")
        fenced = self._fenced.get(plan.group, 0)
        if plan.incarnation <= fenced:
            raise StartRefused(f"incarnation {plan.incarnation} was fenced, as all up to {fenced}")
        others = [key for key, member in self._members.items() if member.record.ended is None]
        if earlier := [key for key in others if key[0] == plan.group and key[1] != plan.incarnation]:
            raise StartRefused(f"incarnation {earlier[0][1]} still runs on this machine; fence it first")
        expected = str(self._state.token(plan.group))
        if plan.ray_token_file != expected:
            raise StartRefused(
                f"the plan names the token file {plan.ray_token_file!r}, and this machine has {expected!r}; use one "
                "stateDir for all machines"
            )

    def _prepare(self, plan: GroupPlan, directory: Path, token: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory.parent / "plan.json", plan.to_json(indent=2) + "\n")
        replace_file(self._state.token(plan.group), token)

    async def _refuse_starts(self, group: int, incarnation: int) -> None:
        highest = max(incarnation, self._fenced.get(group, 0))
        self._fenced[group] = highest
        if self._saved.get(group) != highest:
            text = _Fenced(groups=self._fenced).to_json()
            await asyncio.to_thread(replace_file, self._state.directory / _FENCED, text)
            self._saved[group] = highest

    def _read_fenced(self) -> dict[int, int]:
        file = self._state.directory / _FENCED
        try:
            return dict(_Fenced.model_validate_json(file.read_bytes()).groups)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StateError(f"{file} cannot be read ({error}); end the deployment with `dsv4 down`") from error

    def _directories(self) -> Iterator[tuple[Key, Path]]:
        for group in self._state.groups():
            for incarnation in self._state.incarnations(group):
                for directory in self._state.incarnation(incarnation, group).glob("m*"):
                    if directory.name[1:].isdigit():
                        yield (group, incarnation, int(directory.name[1:])), directory

    def _unknown(self, child: Child) -> _Record:
        """Return the record of a process whose own is damaged."""
        return _Record(address="", agent=0, started=child.started, boot=self.boot, memory=available_memory())

    def _follow(self, member: _Member) -> None:
        self._members[member.key] = member
        if member.record.ended is None:
            member.watcher = asyncio.create_task(self._await_end(member))

    async def _await_end(self, member: _Member) -> None:
        """Record the first process of a member, then its end, after the last of its processes."""
        if member.child is not None:
            await self._record_init(member, member.child)
            code = await member.child.wait()
            log, text = member.directory / "agent.log", ""
            # For example without free descriptors: the end itself must never be missed.
            with contextlib.suppress(OSError):
                text = log.read_text(errors="replace")
            ended = describe_end(code, text)
            restarted = False
        else:
            restarted = member.record.boot != self.boot
            ended = "the machine was restarted" if restarted else "the host service was ended"
        while remaining := [] if restarted else await _found(member):
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_PAUSE_SECONDS)
        ended_time = (member.child.ended_time if member.child is not None else None) or unix_time()
        member.save(ended=ended, ended_time=ended_time, restarted=restarted)
        _log.info("rank %d of incarnation %d ended: %s", member.key[2], member.key[1], ended)

    async def _record_init(self, member: _Member, child: Child) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while member.record.init is None and child.code is None and time.monotonic() < deadline:
            for pid in children(child.pid):
                # It is tried again.
                with contextlib.suppress(OSError):
                    if (start := _start_time(pid)) is not None:
                        member.save(init=(pid, start))
            await asyncio.sleep(_PAUSE_SECONDS)

    def _kill(self, member: _Member) -> None:
        """Kill the first process of the member's namespace. Its parent is killed if there is none, or after 10 s."""
        if member.child is None:
            return
        now = time.monotonic()
        member.kill_time = member.kill_time or now
        init = children(member.child.pid)
        if init and now - member.kill_time < _START_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init[0], signal.SIGKILL)
        else:
            self._processes.signal(member.child, signal.SIGKILL)


def boot_id() -> str:
    """Return the id of the kernel's present run."""
    return _BOOT.read_text().strip()


def machine_id() -> str:
    """Return an identity of this machine that survives restarts: systemd's, else the host name."""
    with contextlib.suppress(OSError):
        if found := _MACHINE.read_text().strip():
            return found
    return socket.gethostname()


def _name(key: Key) -> str:
    return "g{}/i{}/m{}".format(*key)


def _key(name: str) -> Key | None:
    match = re.fullmatch(r"g(\d+)/i(\d+)/m(\d+)", name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot; None if it does not exist or is a zombie.

    Raises:
        OSError: it cannot be read, for example without a free file descriptor.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


async def _found(member: _Member) -> list[int]:
    """Return `_remaining`; wait while the processes cannot be read: some may be left."""
    while True:
        try:
            return await asyncio.to_thread(_remaining, member)
        except OSError as error:
            _log.warning("the processes of rank %d cannot be found, which is tried again: %s", member.key[2], error)
        await asyncio.sleep(_FENCE_SECONDS)


def _remaining(member: _Member) -> list[int]:
    """Return the processes whose end ends the member: the first one of its namespace; if that is unknown, those whose
    arguments name the member's directory, because the start was interrupted before the agent had children."""
    if member.record.init is not None:
        pid, start = member.record.init
        return [pid] if _start_time(pid) == start else []
    argument = str(member.directory).encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if argument in Path(entry.path, "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
