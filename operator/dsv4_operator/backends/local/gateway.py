"""The gateways of a local deployment: children of the loop that are started again within a second if they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.planning.rendering import gateway_settings
from dsv4_runtime.contract.gateway import ENVIRONMENT, GatewayRoute, GatewaySettings, GroupRoute, api_keys
from dsv4_runtime.util.files import replace_file
from dsv4_runtime.util.secrets import is_secret_name

_log = logging.getLogger("dsv4")

MAX_DRAIN_SECONDS = 15.0
"""`dsv4 down` waits 40 s for the loop, which has its members to end as well."""
_LAST_SECONDS = 5.0
"""From the end of the drain until the process is killed."""
_RESTART_SECONDS = 0.5


def settings(deployment: DSV4Deployment, state: DeploymentState) -> GatewaySettings:
    """Return what the gateway of a group of this deployment is told."""
    spec = deployment.spec.gateway
    drain = min(spec.drain, MAX_DRAIN_SECONDS)
    # The socket stays open in the loop: connections wait in it for the next process.
    return gateway_settings(deployment, drain_seconds=drain, secrets_root=str(state.secrets), lame_duck_seconds=0.0)


def check_secrets(deployment: DSV4Deployment, state: DeploymentState) -> None:
    """Refuse secrets that the members or the gateway could not use.

    Raises:
        StateError: one cannot be read, others may read it, or it has no key.
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
    """Refuse keys where there is no private network for `reason`, and so no gateway to ask for them.

    Raises:
        StateError: there are keys.
    """
    if deployment.spec.gateway.api_keys is not None:
        raise StateError(
            "spec.gateway.apiKeys: cannot be kept to, because keys are asked for by the gateway, which "
            f"needs a private network, and {reason}; run it where there can be one, or remove the field"
        )


class LocalGateways:
    """The gateways of one deployment: one for each group, all on one socket, and each serves every group.

    The head of a group has the same address and ports in every incarnation.
    """

    def __init__(self, deployment: DSV4Deployment, state: DeploymentState, heads: Sequence[GroupRoute]) -> None:
        """Args:
        deployment: of whose specification the limits are.
        state: where their files go.
        heads: of each group, in their order.
        """
        self._heads, self._token_key_file = tuple(heads), str(state.token_key)
        limits = settings(deployment, state)
        self._all = [
            _GatewayProcess(limits, state.directory, self._route(group, self._heads), alone=len(heads) == 1)
            for group in range(len(heads))
        ]

    async def start(self, listener: socket.socket) -> None:
        """Begin to accept on `listener`, which stays open here: connections wait in it while there is no process."""
        for gateway in self._all:
            await gateway.start(listener)

    def tell(self, given_up: Callable[[int], str | None]) -> None:
        """Have every gateway know why each group will not come back by itself; None: it may.

        Args:
            given_up: asked of each group.

        Raises:
            OSError: a route cannot be written.
        """
        heads = [head.model_copy(update={"given_up": given_up(head.group)}) for head in self._heads]
        for group, gateway in enumerate(self._all):
            gateway.follow(self._route(group, heads))

    async def stop(self) -> None:
        """Let them finish what they have begun, and end them."""
        await asyncio.gather(*(gateway.stop() for gateway in self._all))

    def _route(self, group: int, heads: Sequence[GroupRoute]) -> GatewayRoute:
        return GatewayRoute.of(group, heads, self._token_key_file)


class _GatewayProcess:
    """One gateway: its files and its process."""

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
        """Go by another route from now on."""
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
