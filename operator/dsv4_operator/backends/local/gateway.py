"""Front end of a local deployment: gateway processes, restarted within a second if they end, and published ports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsv4_operator.api import DSV4Deployment, PortsSpec
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.planning.rendering import gateway_settings
from dsv4_runtime.contract.gateway import ENVIRONMENT, GatewayRoute, GatewaySettings, GroupRoute, api_keys
from dsv4_runtime.util.files import replace_file
from dsv4_runtime.util.secrets import is_secret_name

_log = logging.getLogger("dsv4")

_CHUNK = 65536
_CONNECT_SECONDS = 5.0
LOOPBACK = "127.0.0.1"

Listeners = dict[str, socket.socket]
"""Listening sockets by the name of their field below `spec.network.ports`."""


def bind_loopback(ports: Mapping[str, int]) -> Listeners:
    """Return listening sockets on loopback.

    Sockets stay in the network namespace of their creation, so these listen on the machine's loopback after the process
    has moved to another one.

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
                listener.bind((LOOPBACK, port))
                listener.listen(128)
            except OSError as error:
                where = f"spec.network.ports.{name}: " if name in PortsSpec.model_fields else ""
                remedy = "end the process that has it" + (" or choose another port" if where else "")
                raise StateError(
                    f"{where}port {port} of {LOOPBACK}, which the {name} needs, cannot be used "
                    f"({error.strerror}); {remedy}"
                ) from error
    except StateError:
        for listener in sockets.values():
            listener.close()
        raise
    return sockets


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


def settings(deployment: DSV4Deployment, state: DeploymentState) -> GatewaySettings:
    """Return the settings of a gateway of this deployment."""
    spec = deployment.spec.gateway
    drain = min(spec.drain, MAX_DRAIN_SECONDS)
    # The loop keeps the socket open: connections wait in its queue for the next process.
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
            "spec.gateway.apiKeys: cannot be kept to, because keys are asked for by the gateway, which "
            f"needs a private network, and {reason}; run it where there can be one, or remove the field"
        )


class LocalGateways:
    """The gateways of one deployment: one per group, all on one socket; each serves every group.

    The head of a group has the same address and ports in every incarnation.
    """

    def __init__(self, deployment: DSV4Deployment, state: DeploymentState, heads: Sequence[GroupRoute]) -> None:
        self._heads, self._token_key_file = tuple(heads), str(state.token_key)
        limits = settings(deployment, state)
        self._all = [
            _GatewayProcess(limits, state.directory, self._route(group, self._heads), alone=len(heads) == 1)
            for group in range(len(heads))
        ]

    async def start(self, listener: socket.socket) -> None:
        """Start the processes on `listener`, which stays open here: connections wait in its queue without a process."""
        for gateway in self._all:
            await gateway.start(listener)

    def update_routes(self, given_up: Callable[[int], str | None]) -> None:
        """Update the routes with the reason from `given_up` why each group will not recover; None: it may.

        Raises:
            OSError: a route cannot be written.
        """
        heads = [head.model_copy(update={"given_up": given_up(head.group)}) for head in self._heads]
        for group, gateway in enumerate(self._all):
            gateway.follow(self._route(group, heads))

    async def stop(self) -> None:
        """Drain and end the gateways."""
        await asyncio.gather(*(gateway.stop() for gateway in self._all))

    def _route(self, group: int, heads: Sequence[GroupRoute]) -> GatewayRoute:
        return GatewayRoute.of(group, heads, self._token_key_file)


class _GatewayProcess:
    def __init__(self, limits: GatewaySettings, directory: Path, route: GatewayRoute, *, alone: bool) -> None:
        self._settings, self._route, self._alone = limits, route, alone
        number = f"-{route.group}" if route.group else ""
        self._files = directory / f"gateway{number}.json", directory / f"route{number}.json"
        self._log_file = directory / f"gateway{number}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        for file, document in zip(self._files, (self._settings, self._route), strict=True):
            replace_file(file, document.to_json(indent=2) + "\n")
        self._process = await self._spawn(listener)
        self._supervisor = asyncio.create_task(self._supervise(listener))

    def follow(self, route: GatewayRoute) -> None:
        """Replace the route."""
        if self._supervisor is not None and route != self._route:
            replace_file(self._files[1], route.to_json(indent=2) + "\n")
            self._route = route

    async def stop(self) -> None:
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        self._supervisor = None
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._settings.drain_seconds + _LAST_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for file in self._files:
            file.unlink(missing_ok=True)

    async def _supervise(self, listener: socket.socket) -> None:
        while True:
            if self._process is not None:
                code = await self._process.wait()
                _log.warning("the gateway ended with code %d; starting it again (see %s)", code, self._log_file)
            await asyncio.sleep(_RESTART_SECONDS)
            try:
                self._process = await self._spawn(listener)
            except OSError:
                _log.exception("the gateway cannot be started")
                self._process = None

    async def _spawn(self, listener: socket.socket) -> asyncio.subprocess.Process:
        limits, route = map(str, self._files)
        command = [sys.executable, "-m", "dsv4_runtime.gateway.main", "--settings", limits, "--route", route]
        if not self._alone:
            command.append(f"--number={self._route.group}")
        with self._log_file.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                f"--fd={listener.fileno()}",
                f"--log={self._log_file}",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**{name: os.environ[name] for name in os.environ if not is_secret_name(name)}, **ENVIRONMENT},
                start_new_session=True,
                pass_fds=(listener.fileno(),),
                preexec_fn=lambda: network.die_with_parent(signal.SIGKILL),
            )
