"""Watch of the deployments with kopf, which makes no decisions.

kopf runs in its own thread with its own event loop, because it takes over all tasks of its loop and the signals of its
process, and ends both when it stops. It stops at a page of a list that has expired, at a watch that begins with status
410, and at an error event of another code than 410; then it is started again and lists all deployments.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import kopf

from dsv4_operator.kube import DSV4_DEPLOYMENTS, Access, Manifest
from dsv4_operator.kube.access import Credential
from dsv4_runtime.contract.recovery import backoff

_log = logging.getLogger("dsv4")

_STOP_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 8.0
_STABLE_SECONDS = 30.0
"""Duration after which a watch that ended is started again with the shortest pause."""


class DeploymentWatch:
    """Reports every deployment at the start, and every later change."""

    def __init__(
        self,
        access: Access,
        namespace: str | None,
        on_change: Callable[[Manifest, bool], None],
    ) -> None:
        """Args:
        access: API server and account.
        namespace: the watched one; None: all.
        on_change: called in the caller's loop with the object, and whether it was deleted.
        """
        self._access, self._namespace = access, namespace
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    def _run(self) -> None:
        failures = 0
        while not self._stop.done():
            problem, begun = "it ended", time.monotonic()
            try:
                asyncio.run(self._watch())
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if self._stop.done():
                return
            failures = 1 if time.monotonic() - begun > _STABLE_SECONDS else failures + 1
            pause = backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE) * random.uniform(0.8, 1.2)  # noqa: S311
            where = "" if self._namespace is None else f" of {self._namespace}"
            _log.warning("watching the deployments%s is broken, again in %.1f s: %s", where, pause, problem)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._stop.result(pause)

    async def _watch(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

        self._stop.add_done_callback(end)
        # kopf's default contains the user's name, and the user of a container may have none. Its type is private.
        identity: Any = "dsv4-operator"
        await kopf.operator(
            identity=identity,
            registry=_registry(self._access, self._forward),
            settings=watch_settings(),
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
            stop_flag=stop,
        )

    def _forward(self, manifest: Manifest, gone: bool) -> None:
        # The caller's loop may be closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_change, manifest, gone)


class _Backoffs:
    """Pauses of kopf before it repeats a request, without an end, after which it would stop."""

    def __iter__(self) -> Iterator[float]:
        failures = itertools.count(1)
        return (backoff(failure, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE) for failure in failures)


def watch_settings() -> kopf.OperatorSettings:
    """Return settings without writes (finalizers, annotations, events, peers) and with limits for requests."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    # Needs no permission to list namespaces and definitions; the operator has checked that the definition exists.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _Backoffs()
    # A worker is kept for a time after an event, so a limit would bound the number of active objects; workers only
    # forward events.
    settings.queueing.worker_limit = None
    settings.process.ultimate_exiting_timeout = None
    return settings


@dataclass(frozen=True, kw_only=True)
class _Connection(kopf.ConnectionInfo):
    """Connection with the TLS context of `kube`, because kopf's own has no server name."""

    access: Access
    credential: Credential

    def as_ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context; an unused one for plain HTTP."""
        return self.access.tls(self.credential) or ssl.create_default_context()

    def as_http_headers(self) -> dict[str, str]:
        """Return the header with the credential; none without a token, for which kopf would send only the scheme."""
        return super().as_http_headers() if self.token else {}


def _registry(access: Access, forward: Callable[[Manifest, bool], None]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        credential = await asyncio.to_thread(access.credentials)
        expires = credential.expires
        return _Connection(
            server=access.server,
            scheme=credential.scheme,
            token=credential.token,
            proxy_url=access.proxy,
            expiration=datetime.fromtimestamp(expires, UTC) if expires is not None else None,
            access=access,
            credential=credential,
        )

    async def on_event(event: Any, **_: Any) -> None:
        forward(dict(event["object"]), event["type"] == "DELETED")

    group, version = DSV4_DEPLOYMENTS.api_version.split("/")
    kopf.on.login(registry=registry)(login)
    kopf.on.event(group, version, DSV4_DEPLOYMENTS.plural, registry=registry)(on_event)
    return registry
