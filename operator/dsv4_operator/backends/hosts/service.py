"""`dsv4-host`: the host service of one deployment on one machine.

It starts and ends members on request of the loop that has the lease, and reports them; it decides nothing. It is the
loop of a supervisor (`backends.local.supervisor --loop`), which is the parent of the members and starts it again after
a crash or hang. All requests need the host key of the deployment: `Authorization: Bearer <key>`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hmac
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from dsv4_operator.backends.hosts.documents import (
    EVIDENCE_BYTES,
    REQUEST_BYTES,
    Claim,
    EndRequest,
    GpuReport,
    HostReport,
    Lease,
    LeaseRefused,
    LeaseRequest,
    Refusal,
    StartRequest,
)
from dsv4_operator.backends.hosts.members import HostMembers, StartRefused
from dsv4_operator.backends.local import gpus, network
from dsv4_operator.backends.local.facts import available_memory, unowned_memory
from dsv4_operator.backends.local.state import PEER_COPIES, DeploymentState, StateError, read_logs
from dsv4_operator.backends.local.supervisor import LOCK, Processes
from dsv4_runtime.contract.base import Report
from dsv4_runtime.util.files import format_logs, log_to, replace_file
from dsv4_runtime.util.peer_copies import unsafe_copies

_log = logging.getLogger("dsv4")

KEY_BYTES = 32
"""Least length of a host key."""
STARTUP_ERROR = "startup-error"
"""File in the state directory with the reason of a failed start."""
_LISTENER = "listener"
_LEASE = "lease.json"
_UNOWNED = "unowned-memory.json"
_DRIVER = "driver"
"""File with the version of the driver that members ran with."""
_PROVEN_SECONDS = 600.0
"""Age of a member from which its driver counts as the one that members ran with."""
_EVIDENCE_SECONDS = 8.0
_REFRESH_SECONDS = 5.0
_GRACE_SECONDS = 2.0
_IP_FREEBIND = 15

R = TypeVar("R", bound=LeaseRequest)


class _UnownedFile(Report):
    """The least `unowned_memory` since the start of the machine."""

    boot: str
    bytes: int


class _LeaseFile(Report):
    holder: str
    epoch: int


class HostService:
    """Members, lease and facts of one machine, with the HTTP API."""

    def __init__(self, name: str, key: str, state: DeploymentState, processes: Processes) -> None:
        """Args:
        name: the machine's name in the inventory.
        key: the host key.
        state: files of the deployment's members on this machine.
        processes: the connection to the supervisor.

        Raises:
            StateError: the saved lease cannot be read.
        """
        self._name = name
        self._expected = f"Bearer {key}".encode()
        self._state = state
        self._members = HostMembers(name, state, processes)
        self._acting = asyncio.Lock()
        """Held by a request that changes something: they are executed one after the other."""
        self._lease = self._read_lease()
        self._memory = available_memory()
        self._gpus: tuple[GpuReport, ...] = ()
        self._unsafe_copies = ""
        self._lost = 0
        self._drivers = Drivers()

    async def start(self) -> None:
        """Continue with existing members, and measure memory and GPUs."""
        self._members.adopt()
        self._memory = self._members.memory or available_memory()
        found = await asyncio.to_thread(gpus.find)
        self._gpus = _reports(found)
        self._drivers = Drivers(before=_read_driver(self._state.directory / _DRIVER)).found(found)
        uuids, record = [gpu.uuid for gpu in self._gpus], self._state.directory / PEER_COPIES
        self._unsafe_copies = await asyncio.to_thread(unsafe_copies, uuids, record)
        if self._members.running:
            # The members hold memory that is free for their successors.
            self._gpus = tuple(gpu.model_copy(update={"free_bytes": None, "taken_by": ""}) for gpu in self._gpus)
        else:
            self._measure_lost()

    async def close(self) -> None:
        """Stop watching the members, which run on."""
        await self._members.close()

    async def refresh(self) -> None:
        """Measure memory and GPUs again every 5 s while no member runs."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            if self._members.running:
                self._prove_driver()
                continue
            memory, found = available_memory(), await asyncio.to_thread(gpus.find)
            # A member may have started meanwhile.
            if not self._members.running:
                self._memory, self._gpus, self._drivers = memory, _reports(found), self._drivers.found(found)
                self._measure_lost()

    def _prove_driver(self) -> None:
        """Save the driver once a member has run with it for ten minutes."""
        oldest = max((member.age for member in self._members.reports() if member.ended is None), default=0.0)
        drivers = self._drivers.proven(oldest)
        if drivers.before != self._drivers.before:
            # Without the file, the next service has no version to compare with.
            with contextlib.suppress(OSError):
                replace_file(self._state.directory / _DRIVER, drivers.before)
        self._drivers = drivers

    def _measure_lost(self) -> None:
        """Compare the memory of drivers with its least since the start of the machine. Not while programs use a GPU."""
        if any(gpu.taken_by for gpu in self._gpus):
            return
        now, file = unowned_memory(), self._state.directory / _UNOWNED
        least = None
        with contextlib.suppress(OSError, ValueError):
            least = _UnownedFile.model_validate_json(file.read_bytes())
        if least is None or least.boot != self._members.boot or now < least.bytes:
            least = _UnownedFile(boot=self._members.boot, bytes=now)
            # Without the file, the next service begins anew.
            with contextlib.suppress(OSError):
                replace_file(file, least.to_json())
        self._lost = now - least.bytes

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=REQUEST_BYTES)
        app.router.add_get("/v1/report", self._report)
        app.router.add_post("/v1/lease", self._take)
        app.router.add_post("/v1/start", self._start)
        app.router.add_post("/v1/fence", self._fence)
        app.router.add_post("/v1/forget", self._forget)
        app.router.add_get("/v1/evidence", self._evidence)
        return app

    def report(self) -> HostReport:
        """Return the machine's present state."""
        return HostReport(
            host=self._name,
            boot=self._members.boot,
            lease=self._lease.report(time.monotonic()),
            members=self._members.reports(),
            fenced=self._members.fenced,
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=self._memory,
            gpus=self._gpus,
            unsafe_copies=self._unsafe_copies,
            lost_bytes=self._lost,
            driver=self._drivers.version,
            driver_before=self._drivers.changed,
            driver_problem=self._drivers.problem,
        )

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        # Invalid UTF-8 arrives as surrogates.
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._expected):
            return _refuse(401, "send the deployment's host key: Authorization: Bearer <key>")
        try:
            return await handler(request)
        except LeaseRefused as error:
            return _answer(Refusal(message=str(error), lease=self._lease.report(time.monotonic())), status=409)
        except StartRefused as error:
            return _refuse(422, str(error))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            return _refuse(400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
        except OSError as error:
            _log.exception("%s failed", request.path)
            return _refuse(507 if error.errno == errno.ENOSPC else 500, f"{error.strerror or error} ({error.filename})")

    async def _admit(self, claim: Claim) -> None:
        """Renew the lease, or pass it to another loop. A new holder is saved before it acts.

        Raises:
            LeaseRefused: another loop has it.
            OSError: it cannot be saved.
        """
        admitted = self._lease.admit(claim, time.monotonic())
        if (admitted.holder, admitted.epoch) != (self._lease.holder, self._lease.epoch):
            text = _LeaseFile(holder=admitted.holder, epoch=admitted.epoch).to_json()
            await asyncio.to_thread(replace_file, self._state.directory / _LEASE, text)
            _log.info("the lease has %s with epoch %d", admitted.holder, admitted.epoch)
        self._lease = admitted

    def _read_lease(self) -> Lease:
        file = self._state.directory / _LEASE
        try:
            saved = _LeaseFile.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return Lease()
        except (OSError, ValueError) as error:
            # Without its epoch, a request of an earlier loop could not be recognised.
            raise StateError(f"{file} cannot be read ({error}); end the deployment with `dsv4 down`") from error
        return Lease.restored(saved.holder, saved.epoch, time.monotonic())

    async def _report(self, _: web.Request) -> web.Response:
        return _answer(self.report())

    @contextlib.asynccontextmanager
    async def _admitted(self, kind: type[R], request: web.Request) -> AsyncIterator[R]:
        """Yield the body of a request with the lease, while no other one acts."""
        asked = kind.model_validate_json(await request.read())
        async with self._acting:
            await self._admit(asked.claim)
            yield asked

    async def _take(self, request: web.Request) -> web.Response:
        async with self._admitted(LeaseRequest, request):
            return _answer(self.report())

    async def _start(self, request: web.Request) -> web.Response:
        async with self._admitted(StartRequest, request) as asked:
            await self._members.start(asked.plan, asked.rank, asked.token, self._memory)
        return _answer(self.report())

    async def _fence(self, request: web.Request) -> web.Response:
        async with self._admitted(EndRequest, request) as asked:
            await self._members.fence(asked.group, asked.incarnation)
        # Other requests do not wait for that.
        await self._members.ended(asked.group, asked.incarnation)
        return _answer(self.report())

    async def _forget(self, request: web.Request) -> web.Response:
        async with self._admitted(EndRequest, request) as asked:
            await self._members.forget(asked.group, asked.incarnation)
        return _answer(self.report())

    async def _evidence(self, request: web.Request) -> web.Response:
        try:
            group, incarnation = (int(request.query.get(name, "")) for name in ("group", "incarnation"))
        except ValueError:
            return _refuse(400, "group and incarnation: write numbers, as in /v1/evidence?group=0&incarnation=1")
        source = self._state.incarnation(incarnation, group)
        text = await asyncio.to_thread(_logs, source, time.monotonic() + _EVIDENCE_SECONDS)
        return web.Response(text=text, content_type="application/json")


@dataclass(frozen=True, slots=True)
class Drivers:
    """Versions of the driver of this machine's GPUs."""

    before: str = ""
    """The latest one with which members ran; empty: unknown."""
    version: str = ""
    """The present one."""
    problem: str = ""

    def found(self, inventory: gpus.GpuInventory) -> Drivers:
        """Return the versions after an answer of the driver. Without a driver, GPUs are no problem of a machine."""
        problem = "" if inventory.cards or not (inventory.driver or gpus.has_device()) else inventory.problem
        return replace(self, version=inventory.driver, problem=problem)

    def proven(self, seconds: float) -> Drivers:
        """Return the versions after a member has run for `seconds`."""
        return replace(self, before=self.version) if self.version and seconds >= _PROVEN_SECONDS else self

    @property
    def changed(self) -> str:
        """Return the version before, if it is another one."""
        return self.before if self.version and self.before != self.version else ""


def _read_driver(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()[:100]
    return ""


def _reports(found: gpus.GpuInventory) -> tuple[GpuReport, ...]:
    return tuple(
        GpuReport(
            uuid=card.uuid,
            title=card.title,
            machine=card.machine,
            memory_bytes=card.memory_bytes,
            free_bytes=card.free_bytes,
            taken_by=gpus.describe_holders(card),
        )
        for card in found.cards
    )


def _logs(source: Path, deadline: float) -> str:
    """Return the tails of all logs as a JSON object of at most `EVIDENCE_BYTES`."""
    items, size = [], 2
    for name, tail in read_logs(source, deadline=deadline):
        item = f"{json.dumps(name)}: {json.dumps(tail.decode(errors='replace'))}"
        # The encoding is ASCII.
        size += len(item) + 2
        if size > EVIDENCE_BYTES:
            break
        items.append(item)
    return "{" + ", ".join(items) + "}"


def _answer(document: Report, status: int = 200) -> web.Response:
    return web.Response(text=document.to_json(), status=status, content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return _answer(Refusal(message=message), status)


def main() -> None:
    """Run the host service until SIGTERM. Exit codes: 0 ended on request, 2 cannot start."""
    parser = argparse.ArgumentParser(prog="dsv4-host", description=main.__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="directory of the members' files")
    parser.add_argument("--name", required=True, help="name of the deployment")
    parser.add_argument("--host", required=True, help="name of this machine in the inventory")
    parser.add_argument("--listen", required=True, metavar="ADDRESS:PORT", help="IPv4 address and port of the service")
    parser.add_argument("--key-file", type=Path, required=True, help="file with the deployment's host key, mode 0600")
    parser.add_argument("--supervisor", type=int, metavar="FD", required=True, help="connection to the supervisor")
    options = parser.parse_args()
    try:
        state = DeploymentState(options.state_dir, options.name)
        state.prepare()
    except StateError as error:
        parser.error(str(error))
    log_to(state.log)
    format_logs(None, lambda: {"deployment": state.name})
    try:
        _serve(options, state)
    except (StateError, network.NoNamespacesError) as error:
        _log.error("%s", error)
        replace_file(state.directory / STARTUP_ERROR, f"{error}\n")
        sys.exit(2)


def _serve(options: argparse.Namespace, state: DeploymentState) -> None:
    key = read_key(options.key_file)
    network.check_namespaces(own_network=False)
    processes = Processes(socket.socket(fileno=options.supervisor))
    with contextlib.ExitStack() as stack:
        if LOCK not in processes.kept:
            processes.keep(LOCK, stack.enter_context(state.lock(owner=os.getppid())))
        if _LISTENER not in processes.kept:
            # The supervisor keeps it: connections wait in its queue while the service is started again.
            with _bind(options.listen) as listener:
                processes.keep(_LISTENER, listener.fileno())
        asyncio.run(_run(options.host, key, state, processes))


def read_key(file: Path) -> str:
    """Return the host key in `file`.

    Raises:
        StateError: it cannot be read, is too short, or is readable by others.
    """
    try:
        mode, key = file.stat().st_mode, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise StateError(f"the host key {file} cannot be read ({reason}); run `dsv4 up` again") from error
    if mode & 0o077:
        raise StateError(f"others may read the host key {file}; run `chmod 600 {file}`")
    if len(key) < KEY_BYTES or not key.isascii() or not key.isprintable():
        raise StateError(f"the host key {file} has fewer than {KEY_BYTES} printable characters; run `dsv4 up` again")
    return key


def _bind(place: str) -> socket.socket:
    """Return a listening socket, also if the machine has the address only later, when its link is up.

    Raises:
        StateError: the port is in use, or `place` is invalid.
    """
    address, _, port = place.rpartition(":")
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listener.bind((address, int(port)))
        listener.listen(128)
    except (OSError, ValueError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StateError(f"--listen {place!r} cannot be used ({reason}); choose another port in hosts.yaml") from error
    return listener


async def _run(name: str, key: str, state: DeploymentState, processes: Processes) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    processes.listen()
    if processes.ending:
        stop.set()
    service = HostService(name, key, state, processes)
    await service.start()
    runner = web.AppRunner(service.application(), access_log=None, shutdown_timeout=_GRACE_SECONDS)
    await runner.setup()
    await web.SockSite(runner, processes.socket(_LISTENER)).start()
    refresh = asyncio.create_task(service.refresh())
    _log.info("serving %s as %s", state.name, name)
    try:
        await stop.wait()
    finally:
        refresh.cancel()
        await asyncio.gather(refresh, return_exceptions=True)
        await runner.cleanup()
        await service.close()
        await processes.close()
        _log.info("ended")


if __name__ == "__main__":
    main()
