"""Front end of a local deployment: gateway processes, replaced if they end or hang, and published ports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupPhase, GroupStatus, PortsSpec
from dsv4_operator.api.spec import LOOPBACK
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.backends.local.supervisor import START_SECONDS, Child, Liveness, Processes
from dsv4_operator.lifecycle import given_up
from dsv4_operator.lifecycle.status import page_failures
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.rendering import gateway_settings
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.gateway import ENVIRONMENT, GatewayRoute, GatewaySettings, GroupRoute, api_keys
from dsv4_runtime.util import LOG_DEPLOYMENT
from dsv4_runtime.util.files import LOOP_DUE, own_shortage, replace_file
from dsv4_runtime.util.secrets import is_secret_name

_log = logging.getLogger("dsv4")

_ALL = "0.0.0.0"  # noqa: S104
_CHUNK = 65536
_CONNECT_SECONDS = 5.0

HANDOVER = "handover"
"""Unix socket in the state directory of a process that holds the listening socket of the API between two loops."""
_GIVE, _TAKE = b"give", b"take"
_HANDOVER_SECONDS = 2.0
_WAITING = 4096
"""Most connections that wait between two loops; the kernel may have a lower limit (`net.core.somaxconn`)."""

Listeners = dict[str, socket.socket]
"""Listening sockets by the name of their field below `spec.network.ports`."""


def bind_ports(deployment: DSV4Deployment, api: socket.socket | None = None) -> Listeners:
    """Return the listening sockets of the API, at `spec.gateway.listen`, and of the dashboard, on loopback.

    `api` is that of an earlier loop.

    Raises:
        StateError: a port is in use, or the machine does not have the address; no socket stays open.
    """
    ports, listen = deployment.spec.network.ports, deployment.spec.gateway.listen
    listeners = bind_loopback({"dashboard": ports.dashboard})
    try:
        return ({"api": api} if api else bind_loopback({"api": ports.api}, address=listen)) | listeners
    except StateError:
        listeners["dashboard"].close()
        raise


def endpoint(deployment: DSV4Deployment) -> str:
    """Return the URL of the API."""
    listen = deployment.spec.gateway.listen
    return f"http://{LOOPBACK if listen == _ALL else listen}:{deployment.spec.network.ports.api}/v1"


def bind_loopback(ports: Mapping[str, int], *, address: str = LOOPBACK) -> Listeners:
    """Return listening sockets on loopback, or at another address.

    Sockets stay in the network namespace of their creation, so these listen on the machine's addresses after the
    process has moved to another one.

    Raises:
        StateError: a port is in use; no socket stays open.
    """
    sockets: Listeners = {}
    try:
        for name, port in ports.items():
            listener = socket.socket()
            sockets[name] = listener
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(128)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise StateError(
                        f"spec.gateway.listen: {address} is not an address of this machine; write one of "
                        "`ip -br -4 addr`, or 0.0.0.0"
                    ) from error
                where = f"spec.network.ports.{name}: " if name in PortsSpec.model_fields else ""
                remedy = "end the process that has it" + (" or choose another port" if where else "")
                raise StateError(
                    f"{where}port {port} of {address}, which the {name} needs, cannot be used "
                    f"({error.strerror}); {remedy}"
                ) from error
    except StateError:
        for listener in sockets.values():
            listener.close()
        raise
    return sockets


def hold_listener(state: DeploymentState, until: IO[bytes], ready: Callable[[], None]) -> None:
    """Hold the listening socket of the API from the end of a loop to the start of the next one, until `until` ends:
    connections wait in its queue. `ready` is called when loops can give and take it.

    Nothing is held if the first loop that asks gets none: then the loop before it gave none because its version does
    not know this, and could not take one either if it starts again.

    Raises:
        OSError: the socket of this process cannot be created.
    """
    path, held, known = state.directory / HANDOVER, list[socket.socket](), True
    path.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(str(path))
            server.listen()
            ready()
            while until.fileno() not in select.select([server.fileno(), until.fileno()], [], [])[0]:
                with contextlib.suppress(OSError), server.accept()[0] as peer:
                    peer.settimeout(_HANDOVER_SECONDS)
                    data, files, _, _ = socket.recv_fds(peer, len(_GIVE), 1)
                    unused = [socket.socket(fileno=each) for each in files]
                    if data == _TAKE:
                        known = known and bool(held)
                        socket.send_fds(peer, [_GIVE], [each.fileno() for each in held])
                    elif unused and known:
                        held, unused = unused, held
                        held[0].listen(_WAITING)
                    for each in unused:
                        each.close()
    finally:
        path.unlink(missing_ok=True)
        for each in held:
            each.close()


def give_listener(state: DeploymentState, listener: socket.socket) -> None:
    """Give the listening socket of the API to the process that holds it for the next loop, if there is one."""
    with contextlib.suppress(OSError), _handover(state) as peer:
        socket.send_fds(peer, [_GIVE], [listener.fileno()])


def take_listener(state: DeploymentState, deployment: DSV4Deployment) -> socket.socket | None:
    """Return the listening socket of the API that an earlier loop gave; None if there is none for this address."""
    address = deployment.spec.gateway.listen, deployment.spec.network.ports.api
    with contextlib.suppress(OSError), _handover(state) as peer:
        peer.send(_TAKE)
        for descriptor in socket.recv_fds(peer, len(_GIVE), 1)[1]:
            found = socket.socket(fileno=descriptor)
            if found.getsockname() == address:
                return found
            found.close()
    return None


def is_held(state: DeploymentState) -> bool:
    """Return whether a process holds the listening socket of the API for the next loop."""
    with contextlib.suppress(OSError), _handover(state):
        return True
    return False


@contextlib.contextmanager
def _handover(state: DeploymentState) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(_HANDOVER_SECONDS)
        peer.connect(str(state.directory / HANDOVER))
        yield peer


class Publisher:
    """Forwards connections of a listening socket to a target."""

    def __init__(self, address: str, port: int) -> None:
        self._target = address, port
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Start to accept connections."""
        self._server = await asyncio.start_server(self._serve, sock=listener)

    def close(self) -> None:
        """Stop listening; open connections end with the process or with their target."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
            except (OSError, TimeoutError):
                return
            with contextlib.closing(upstream_writer):
                await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the stream, then close the write side of the peer, which may still be sending."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


MAX_DRAIN_SECONDS = 15.0
"""Upper bound of the drain: `dsv4 down` waits 40 s for the loop, which has to end its members too."""
_LAST_SECONDS = 5.0
"""Time from the end of the drain to SIGKILL."""
_RESTART_SECONDS = 0.5
"""Shortest time between two starts of a gateway."""
_LEAST = 2
"""Gateways of a deployment with one group: while one is replaced, the other one accepts connections."""
_PROBE_INTERVAL, _PROBE_SECONDS = 0.5, 1.0
_LOOP = "loop"
"""Name of the kept memory file of `LOOP_DUE`: it outlives loops and gateways, and needs no disk."""


def settings(deployment: DSV4Deployment, state: DeploymentState) -> GatewaySettings:
    """Return the settings of a gateway of this deployment."""
    spec = deployment.spec.gateway
    drain = min(spec.drain, MAX_DRAIN_SECONDS)
    # The supervisor keeps the socket open: connections wait in its queue for the next process.
    return gateway_settings(deployment, drain_seconds=drain, secrets_root=str(state.secrets), lame_duck_seconds=0.0)


def check_secrets(deployment: DSV4Deployment, state: DeploymentState) -> None:
    """Check the secrets of members and gateway.

    Raises:
        StateError: a secret cannot be read, is readable by others, or contains no key.
    """
    source, keys = deployment.spec.model.source.secret_key_ref, deployment.spec.gateway.api_keys
    if source is not None:
        state.secret(source, "spec.model.source")
    if keys is not None:
        name = f"{state.secrets}/{keys.secret_key_ref.name}/{keys.secret_key_ref.key}"
        try:
            found = api_keys(state.secret(keys.secret_key_ref, "spec.gateway.apiKeys"))
        except ValueError as error:
            raise StateError(f"spec.gateway.apiKeys.secretKeyRef: {name}, {error}") from None
        if not found:
            raise StateError(f"spec.gateway.apiKeys.secretKeyRef: {name} has no key; write one a line")


def check_keyless(deployment: DSV4Deployment, reason: str) -> None:
    """Refuse API keys without a private network, because then there is no gateway to check them.

    Raises:
        StateError: API keys are set.
    """
    if deployment.spec.gateway.api_keys is not None:
        raise StateError(
            "spec.gateway.apiKeys: only the gateway checks keys, and there is none without a private network: "
            f"{reason}; run it as root, or remove the field"
        )


class LocalGateways:
    """The gateways of one deployment: one per group, two at least, all on one socket; each serves every group.

    The head of a group has the same address and ports in every incarnation.
    """

    def __init__(
        self, deployment: DSV4Deployment, state: DeploymentState, heads: Sequence[GroupRoute], processes: Processes
    ) -> None:
        # Groups on several machines may serve from an earlier specification.
        names = {group.index: group.served_names for group in deployment.status.groups}
        known = (head.model_copy(update={"served_names": names.get(head.group, ())}) for head in heads)
        self._heads, self._token_key_file = tuple(known), str(state.token_key)
        self._dashboard = f"http://{LOOPBACK}:{deployment.spec.network.ports.dashboard}"
        self._processes = processes
        self.serving = asyncio.Event()
        """Set once a group serves."""
        limits = settings(deployment, state)
        count = max(len(heads), _LEAST)
        self._all = [
            _GatewayProcess(limits, state.directory, number, self._route(number, self._heads), processes)
            for number in range(count)
        ]

    def keep_sockets(self) -> None:
        """Open each process' own sockets, for probes and for the other processes, and the file of the loop's due time;
        before `Processes.listen`.
        """
        if _LOOP not in self._processes.kept:
            descriptor = os.memfd_create(_LOOP)
            try:
                os.pwrite(descriptor, LOOP_DUE.pack(time.monotonic()), 0)
                self._processes.keep(_LOOP, descriptor)
            finally:
                os.close(descriptor)
        for gateway in self._all:
            if gateway.inherit_name not in self._processes.kept:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as inheritance:
                    # An abstract address that the kernel chooses.
                    inheritance.bind("")
                    inheritance.listen()
                    self._processes.keep(gateway.inherit_name, inheritance.fileno())
                    gateway.inherit_address = inheritance.getsockname()
            else:
                with self._processes.socket(gateway.inherit_name) as inheritance:
                    gateway.inherit_address = inheritance.getsockname()
            if gateway.own_name not in self._processes.kept:
                with bind_loopback({gateway.own_name: 0})[gateway.own_name] as own:
                    self._processes.keep(gateway.own_name, own.fileno())
                    gateway.own_port = own.getsockname()[1]
            else:
                with self._processes.socket(gateway.own_name) as own:
                    gateway.own_port = own.getsockname()[1]

    async def start(self, listener: str) -> None:
        """Start the processes, or adopt those that run, on the kept socket `listener`: connections wait in its queue
        without a process. One that cannot be started, for example on a full disk, is tried again until `stop`.
        """
        for gateway, heir in zip(self._all, [*self._all[1:], self._all[0]], strict=True):
            peers = [other.own_port for other in self._all if other is not gateway]
            await gateway.start(listener, peers, heir.inherit_address)

    def update_routes(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Update the routes with the reasons why groups will not recover, their latest deaths, and their names.

        Raises:
            OSError: a route cannot be written.
        """
        if any(group.phase is GroupPhase.SERVING for group in status.groups):
            self.serving.set()
        deaths = {group.index: page_failures(group) for group in status.groups}
        names = {group.index: group.served_names for group in status.groups}
        heads = [
            head.model_copy(
                update={
                    "given_up": given_up(deployment, status, head.group),
                    "failures": deaths.get(head.group, ()),
                    "served_names": names.get(head.group, ()),
                }
            )
            for head in self._heads
        ]
        for number, gateway in enumerate(self._all):
            gateway.follow(self._route(number, heads))

    def expect(self, due: float) -> None:
        """Tell the gateways the monotonic time from which on a successful reconcile is overdue."""
        if _LOOP in self._processes.kept:
            os.pwrite(self._processes.kept[_LOOP], LOOP_DUE.pack(due), 0)

    def due(self) -> float:
        """Return the latest time of `expect`, of an earlier loop too; infinity without the file."""
        if _LOOP not in self._processes.kept:
            return math.inf
        found: tuple[float] = LOOP_DUE.unpack(os.pread(self._processes.kept[_LOOP], LOOP_DUE.size, 0))
        return found[0]

    async def stop(self) -> None:
        """Drain and end the gateways."""
        await asyncio.gather(*(gateway.stop() for gateway in self._all))

    def _route(self, number: int, heads: Sequence[GroupRoute]) -> GatewayRoute:
        return GatewayRoute.of(number % len(heads), heads, self._token_key_file, self._dashboard)


class OwnGateways:
    """Part of a `Backend` whose gateways are children of this process; no other deployment uses its machines."""

    def __init__(self, state: DeploymentState, token_key: str, gateways: LocalGateways | None) -> None:
        self._state, self._token_key, self._gateways = state, token_key, gateways

    async def release(self, namespace: str, name: str) -> None:
        """See `Backend`. The deployment is reconciled until `close`."""

    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `Backend`.

        Raises:
            OSError: the token key or a route of the gateways cannot be written.
        """
        self._state.save_token_key(self._token_key)
        if self._gateways is not None:
            self._gateways.update_routes(deployment, status)

    def endpoint_problem(self, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> str | None:
        """See `Backend`. Users connect to the gateways directly."""
        return None

    def refresh(self, deployment: DSV4Deployment, facts: Facts) -> Facts:
        """See `Backend`. Only this deployment has members on its machines."""
        return facts

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `Backend`."""

    async def hold(self, deployment: DSV4Deployment, plan: GroupPlan) -> bool:
        """See `Backend`. Only this deployment has members on its machines."""
        return True


class _GatewayProcess:
    """One of the gateways: its process is replaced when it ends or hangs."""

    def __init__(
        self, limits: GatewaySettings, directory: Path, number: int, route: GatewayRoute, processes: Processes
    ) -> None:
        self._settings, self._number, self._route, self._processes = limits, number, route, processes
        suffix = f"-{number}" if number else ""
        self._files = directory / f"gateway{suffix}.json", directory / f"route{suffix}.json"
        self._log_file = directory / f"gateway{suffix}.log"
        self.own_name = f"gateway-{number}"
        self.own_port = 0
        self.inherit_name = f"{self.own_name}-inherit"
        self.inherit_address = b""
        """Of the Unix socket for the client connections of another gateway, which this one continues after its end."""
        self._command: list[str] = []
        self._inherited: tuple[str, ...] = ()
        self._process: Child | None = None
        self._serial = 0
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self, listener: str, peers: Sequence[int], heir: bytes) -> None:
        limits, route = map(str, self._files)
        self._inherited = listener, self.own_name, self.inherit_name, _LOOP
        self._command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--settings", limits, "--route", route]
        self._command += [f"--number={self._number}", f"--fd={self._processes.number(listener)}"]
        self._command += [f"--own-fd={self._processes.number(self.own_name)}", f"--log={self._log_file}"]
        self._command += [f"--loop-fd={self._processes.number(_LOOP)}"]
        self._command += [f"--inherit-fd={self._processes.number(self.inherit_name)}", f"--heir={heir[1:].decode()}"]
        self._command += [f"--peer=http://{LOOPBACK}:{port}" for port in peers]
        running = [child for child in self._mine() if child.code is None]
        if running:
            # The route that an earlier loop has written may be another one.
            with contextlib.suppress(OSError, ValueError):
                self._route = GatewayRoute.model_validate_json(self._files[1].read_bytes())
        self._process = running[-1] if running else await self._try_spawn()
        self._supervisor = asyncio.create_task(self._supervise())

    def _write_files(self) -> None:
        """Write the files that a process reads at its start, unless they are there."""
        for file, document in zip(self._files, (self._settings, self._route), strict=True):
            text = document.to_json(indent=2) + "\n"
            try:
                # On a full disk, no space is needed.
                same = file.exists() and file.read_bytes() == text.encode()
            except OSError as error:
                if own_shortage(error) is None:
                    raise
                # The supervisor can start a gateway also while this process has no free descriptor.
                same = True
            if not same:
                replace_file(file, text)

    def _mine(self) -> list[Child]:
        """Return the processes of this gateway, oldest first."""
        prefix = f"{self.own_name}."
        mine = {
            int(name.removeprefix(prefix)): child
            for name, child in self._processes.children.items()
            if name.startswith(prefix)
        }
        self._serial = max(self._serial, *mine, 0)
        return [mine[serial] for serial in sorted(mine)]

    def follow(self, route: GatewayRoute) -> None:
        """Replace the route; before `start`, the one that the process starts with."""
        if route != self._route:
            if self._supervisor is not None:
                replace_file(self._files[1], route.to_json(indent=2) + "\n")
            self._route = route

    async def stop(self) -> None:
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        self._supervisor = None
        running = [child for child in self._mine() if child.code is None]
        for child in running:
            self._processes.signal(child, signal.SIGTERM)
            self._processes.signal(child, signal.SIGCONT)
        for child in running:
            try:
                async with asyncio.timeout(self._settings.drain_seconds + _LAST_SECONDS):
                    await child.wait()
            except TimeoutError:
                self._processes.signal(child, signal.SIGKILL)
                await child.wait()
        for file in self._files:
            file.unlink(missing_ok=True)

    async def _supervise(self) -> None:
        while True:
            try:
                await self._replace()
            except OSError as error:
                # The supervisor takes no messages while it is stopped.
                _log.error("gateway %d cannot be replaced, which is tried again: %s", self._number, error)
            await asyncio.sleep(_RESTART_SECONDS)

    async def _replace(self) -> None:
        """Wait until the process ends or hangs, and start the next one."""
        if self._process is not None:
            reason = await self._fails(self._process)
            _log.warning("gateway %d %s; starting it again (see %s)", self._number, reason, self._log_file)
            # A frozen process ends only when it thaws; the next one does not wait for that.
            self._processes.signal(self._process, signal.SIGKILL)
        for ended in self._mine():
            self._processes.forget(ended)
        self._process = await self._try_spawn()

    async def _fails(self, process: Child) -> str:
        """Wait until `process` ends or hangs; return how."""
        # An adopted process has usually started long ago.
        starts = time.time() - process.started < START_SECONDS
        liveness = Liveness(process.pid, time.monotonic(), starts=starts)
        end, blind = asyncio.create_task(process.wait()), False
        try:
            while not end.done():
                probe = asyncio.create_task(self._probe())
                await asyncio.wait({probe, end}, return_when=asyncio.FIRST_COMPLETED, timeout=_PROBE_SECONDS)
                now = time.monotonic()
                shortage = probe.exception() if probe.done() else None
                if shortage is not None:
                    if not blind:
                        _log.warning("gateway %d cannot be probed, which does not count: %s", self._number, shortage)
                    liveness.excuse(now)
                elif probe.done() and probe.result():
                    liveness.respond(now)
                blind = shortage is not None
                probe.cancel()
                resumed = liveness.resumed
                if liveness.hangs(now):
                    return f"did not respond for {now - liveness.silent_since:.1f} s"
                if liveness.resumed and not resumed:
                    _log.warning("gateway %d does not respond; continued it with SIGCONT", self._number)
                await asyncio.wait({end}, timeout=_PROBE_INTERVAL)
            return f"ended with code {end.result()}"
        finally:
            end.cancel()

    async def _probe(self) -> bool:
        """Return whether the process responds at its own socket.

        Raises:
            OSError: this process lacks the resources for a connection.
        """
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, self.own_port)
            with contextlib.closing(writer):
                writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
        except (OSError, ValueError) as error:
            if own_shortage(error) is not None:
                raise
            return False

    async def _try_spawn(self) -> Child | None:
        try:
            return await self._spawn()
        except OSError as error:
            _log.error("gateway %d cannot be started: %s", self._number, error)
            return None

    async def _spawn(self) -> Child:
        # They may have been removed.
        self._write_files()
        self._mine()
        self._serial += 1
        return await self._processes.start(
            f"{self.own_name}.{self._serial}",
            self._command,
            log=self._log_file,
            death=signal.SIGKILL,
            files=self._inherited,
            unset=[name for name in os.environ if is_secret_name(name)],
            variables={**ENVIRONMENT, LOG_DEPLOYMENT: self._log_file.parent.name},
        )
