"""Client of the API server: one method per verb, a time limit for every request, typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from dsv4_operator.builders.names import MANAGER, Manifest
from dsv4_operator.kube.access import Access, Credential
from dsv4_operator.kube.resources import PODS, KubeError, NotFound, Resource, Unavailable, error_of, resource_of

Manifests = list[Manifest]


@dataclass(frozen=True, slots=True)
class Listing:
    """Result of a list request."""

    items: Manifests
    """Objects without `apiVersion` and `kind`, as the server lists them."""
    resource_version: str
    """Version to start a watch from."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Event of a watch."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`; a bookmark contains only the resource version."""
    object: Manifest

    @property
    def resource_version(self) -> str:
        """Return the resource version to continue the watch from."""
        return str(self.object["metadata"]["resourceVersion"])


REQUEST_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_WATCH_SECONDS = 300
# The server sends a bookmark about once a minute, so a longer silence means a broken stream.
_SILENCE_SECONDS = 90.0
_LOST_SECONDS = 15.0
_CLOSING_CHECKS, _CLOSING_PAUSE = 500, 0.01
_CONNECTIONS = 64
"""Limit for requests. Watches use separate connections, because each holds one for minutes."""
_LINE_BYTES = 32 * 2**20
"""Limit of one watch event; etcd accepts objects of 1.5 MiB."""
# A pod's token is replaced when most of its hour has passed.
_CREDENTIAL_SECONDS = 60.0
# One with a time of expiry is replaced this long before; at most every ten seconds, for plugins with a wrong clock.
_EXPIRY_SECONDS = 60.0
_CREDENTIAL_MIN_SECONDS = 10.0
_PAGE = 500


class KubeReader:
    """Read access to the API server over HTTP. Every method has a time limit and raises only `KubeError`."""

    def __init__(
        self,
        access: Access,
        *,
        guard: Callable[[], None] | None = None,
        on_answer: Callable[[str, int], None] | None = None,
    ) -> None:
        """Args:
        access: API server and account.
        guard: called before every write; raises if this process may not write any more.
        on_answer: called with method and status of every answer; 0: there was none.
        """
        self.access = access
        self._guard = guard
        self._on_answer = on_answer or (lambda _method, _status: None)
        self._sessions: _Sessions | None = None
        self._credential = Credential()
        self._credential_time = -math.inf
        """Time of the latest credential."""
        self._opening = asyncio.Lock()
        self._sockets = weakref.WeakSet[socket.socket]()
        """Those of the sessions that may be open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._sessions is not None:
            sessions, self._sessions = self._sessions, None
            await sessions.requests.close()
            await sessions.watches.close()
            # asyncio closes a connection after an incomplete TLS handshake later than it reports.
            for _ in range(_CLOSING_CHECKS):
                if all(one.fileno() < 0 for one in self._sockets):
                    break
                await asyncio.sleep(_CLOSING_PAUSE)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """Return the live object; None if there is none."""
        try:
            return await self._request("GET", resource.path(namespace, name))
        except NotFound:
            return None

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Manifests:
        """Return all live objects; `namespace` None: of all namespaces. `labels` and `fields` are selectors."""
        return (await self.listing(resource, namespace, labels=labels, fields=fields)).items

    async def listing(
        self, resource: Resource, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Listing:
        """Return the result of `list` with the resource version from which to watch."""
        query = _selectors(labels, fields) | {"limit": str(_PAGE)}
        items: Manifests = []
        while True:
            path = resource.path(namespace)
            page = await self._request("GET", path, query=query)
            with _expected(f"list {path}"):
                items += [_named(item) for item in page["items"] or []]
                following = page["metadata"].get("continue")
                version = str(page["metadata"]["resourceVersion"])
            if not following:
                return Listing(items, version)
            query["continue"] = following

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        resource_version: str,
    ) -> AsyncGenerator[WatchEvent]:
        """Yield changes since `resource_version`, until the server ends the stream (5 min); `Gone`: list again."""
        path = resource.path(namespace)
        query = _selectors(labels, fields) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
            "resourceVersion": resource_version,
        }
        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        request = f"watch {path}"
        async with self._answer("GET", path, None, query, "", limits) as response:
            async for line in _lines(request, response.content):
                yield _watch_event(request, line)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        guard = self._guard if method != "GET" and self._guard is not None else (lambda: None)
        guard()
        limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
        data = None if body is None else _GuardedBody(orjson.dumps(body), guard)
        try:
            async with self._answer(method, path, data, query or {}, content_type, limits) as response:
                content = await response.read()
                with _expected(f"{method} {path}"):
                    return _mapping(orjson.loads(content))
        except Unavailable:
            # A write that the guard stopped appears as a broken connection.
            guard()
            raise

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        data: _GuardedBody | None,
        query: Mapping[str, str],
        content_type: str,
        limits: aiohttp.ClientTimeout,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield the answer if its status is no error."""
        request = f"{method} {path}"
        try:
            for max_age in (_CREDENTIAL_SECONDS, 0.0):
                sessions, headers = await self._connected(max_age)
                session = sessions.watches if "watch" in query else sessions.requests
                if data is not None:
                    headers["Content-Type"] = content_type
                url, proxy = self.access.server + path, self.access.proxy
                async with (
                    session.request(
                        method, url, data=data, params=query, headers=headers, timeout=limits, proxy=proxy
                    ) as response,
                    _aborted_unless_read(response),
                ):
                    self._on_answer(method, response.status)
                    if response.status == 401 and max_age:
                        # The credential has expired: repeat with a new one.
                        continue
                    if response.status >= 400:
                        raise _error(request, response.status, await response.read())
                    yield response
                    return
        except TimeoutError:
            self._on_answer(method, 0)
            raise Unavailable(f"{request}: no answer in time from {self.access.server}") from None
        except (aiohttp.ClientError, OSError) as error:
            self._on_answer(method, 0)
            raise Unavailable(f"{request}: {self.access.server} cannot be reached: {error}") from error

    async def _connected(self, max_age: float) -> tuple[_Sessions, dict[str, str]]:
        """Return the connections and the headers with the credential; `max_age` 0: a new one if it can change."""
        async with self._opening:
            now = asyncio.get_running_loop().time()
            if self._sessions is None or (self.access.changing and self._stale(now, max_age)):
                credential = await asyncio.to_thread(self.access.credentials)
                if self._sessions is None or credential.certificate != self._credential.certificate:
                    tls = await asyncio.to_thread(self.access.tls, credential)
                    await self.close()
                    self._sessions = _Sessions(self._session(tls, limit=_CONNECTIONS), self._session(tls, limit=0))
                self._credential, self._credential_time = credential, now
            token = self._credential.token
            return self._sessions, {"Authorization": f"{self._credential.scheme} {token}"} if token else {}

    def _session(self, tls: ssl.SSLContext | None, *, limit: int) -> aiohttp.ClientSession:
        def opened(address: aiohttp.AddrInfoType) -> socket.socket:
            made = _socket(address)
            self._sockets.add(made)
            return made

        connector = aiohttp.TCPConnector(limit=limit, ssl=tls if tls is not None else True, socket_factory=opened)
        return aiohttp.ClientSession(connector=connector, headers={"Accept": "application/json"})

    def _stale(self, now: float, max_age: float) -> bool:
        age, expires = now - self._credential_time, self._credential.expires
        if not max_age or expires is None:
            return age > max_age
        return age > _CREDENTIAL_MIN_SECONDS and time.time() > expires - _EXPIRY_SECONDS


class Client(KubeReader):
    """Read and write access to the API server; errors and time limits as in `KubeReader`."""

    async def apply(self, manifest: Manifest, *, manager: str = MANAGER) -> Manifest:
        """Apply on the server as field manager `manager`, also over fields of other managers; create a missing object.

        With `metadata.uid`: only the object with that uid; `Invalid` if another object has its name, `Conflict` if none
        has. With `metadata.resourceVersion`: only that version; `Conflict` if the object has another one.
        """
        return await self._request(
            "PATCH",
            _path(manifest),
            manifest,
            {"fieldManager": manager, "force": "true"},
            "application/apply-patch+yaml",
        )

    async def create(self, manifest: Manifest, *, strict: bool = False) -> Manifest:
        """Create the object; `AlreadyExists` if there is one, with `strict` `Invalid` if it has an unknown field."""
        path = resource_of(manifest).path(manifest["metadata"].get("namespace"))
        query = {"fieldManager": MANAGER} | ({"fieldValidation": "Strict"} if strict else {})
        return await self._request("POST", path, manifest, query)

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        changes: Mapping[str, Any],
        *,
        subresource: str | None = None,
    ) -> Manifest:
        """Apply a JSON merge patch: None removes a field, lists are replaced.

        With `metadata.uid` in it: only the object with that uid; `Conflict` or `Invalid` if another one has its name.
        """
        path = resource.path(namespace, name, subresource)
        return await self._request("PATCH", path, changes, {"fieldManager": MANAGER}, "application/merge-patch+json")

    async def replace(self, manifest: Manifest, *, subresource: str | None = None) -> Manifest:
        """Replace with PUT; `Conflict` if `metadata.resourceVersion` is not the present one.

        For the subresource `status` the server uses only the status, so the rest may be omitted.
        """
        return await self._request("PUT", _path(manifest, subresource), manifest, {"fieldManager": MANAGER})

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Delete the object, and in the background its dependents; a missing object is no error.

        With `uid`: only the object with that uid; `Conflict` if another object has its name.
        """
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        with contextlib.suppress(NotFound):
            await self._request("DELETE", resource.path(namespace, name), options)

    async def evict(self, namespace: str, name: str, *, uid: str) -> None:
        """Evict the pod with that uid; `Unavailable` if a PodDisruptionBudget does not allow it now."""
        eviction: Manifest = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._request("POST", PODS.path(namespace, name, "eviction"), eviction)
        except NotFound:
            return


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Connections to the API server with one credential."""

    requests: aiohttp.ClientSession
    watches: aiohttp.ClientSession
    """Without a limit: with a shared one, watches of many namespaces would leave no connection for requests."""


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection breaks `_LOST_SECONDS` after the other machine or the way to it is lost.

    Otherwise each kept connection delays a request by its time limit, and a watch is silent for `_SILENCE_SECONDS`.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Linux: also for unacknowledged data. The operator runs there; `dsv4` may run elsewhere.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(_LOST_SECONDS / 3)))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(_LOST_SECONDS / 6)))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_LOST_SECONDS * 1000))
    return made


class _GuardedBody(aiohttp.BytesPayload):
    """A body that checks the guard again when it is sent, because a request may wait for a connection until then.

    Without its body the server treats the request as incomplete, and does nothing.
    """

    def __init__(self, data: bytes, guard: Callable[[], None]) -> None:
        super().__init__(data)
        self._guard = guard

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._guard()
        await super().write_with_length(writer, content_length)


def _path(manifest: Manifest, subresource: str | None = None) -> str:
    metadata = manifest["metadata"]
    return resource_of(manifest).path(metadata.get("namespace"), metadata["name"], subresource)


def _selectors(labels: str | None, fields: str | None) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


@contextlib.contextmanager
def _expected(request: str) -> Iterator[None]:
    """Raise `Unavailable` for content that is not the JSON of the API, such as the login page of a proxy."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(f"{request}: the answer is not an object of the Kubernetes API: {error!r}") from error


def _mapping(content: object) -> Manifest:
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__} instead of an object")
    return content


def _named(item: object) -> Manifest:
    """Return an API object with a name.

    Raises:
        KeyError, TypeError: it is no such object.
    """
    manifest = _mapping(item)
    if not isinstance(manifest["metadata"]["name"], str):
        raise TypeError("an object without a name")
    return manifest


def _watch_event(request: str, line: bytes) -> WatchEvent:
    """Return the event in a line of a watch.

    Raises:
        KubeError: the line is an error, or not an event.
    """
    with _expected(request):
        content = _mapping(orjson.loads(line))
        event = WatchEvent(str(content["type"]), _mapping(content["object"]))
        if event.type == "ERROR":
            reason, message = str(event.object.get("reason", "")), str(event.object.get("message", ""))
            # `Expired` is the reason of status 410, whatever the code.
            code = 410 if reason in ("Expired", "Gone") else int(event.object.get("code") or 500)
        elif event.resource_version and (event.type == "BOOKMARK" or _named(event.object)):
            return event
        else:
            raise ValueError("an object without a resource version")
    raise error_of(request, code, reason, message)


def _error(request: str, status: int, body: bytes) -> KubeError:
    try:
        answer = orjson.loads(body)
        return error_of(request, status, answer.get("reason", ""), answer.get("message", ""))
    except (ValueError, AttributeError):
        # Text of a proxy, or of the server before its API is served.
        return error_of(request, status, "", body[:500].decode(errors="replace").strip())


@contextlib.asynccontextmanager
async def _aborted_unless_read(response: aiohttp.ClientResponse) -> AsyncGenerator[None]:
    """Close the connection of an answer that is not read to its end, such as a watch's.

    It cannot be reused, and asyncio would keep it up to 30 s for the server's part of the TLS shutdown, even after
    `ClientSession.close`.
    """
    try:
        yield
    finally:
        if response.connection is not None and response.connection.transport is not None:
            response.connection.transport.abort()


async def _lines(request: str, stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of up to 32 MiB; the reader itself has a lower limit."""
    pieces: list[bytes] = []
    size = 0
    async for chunk in stream.iter_any():
        first, *following = chunk.split(b"\n")
        pieces.append(first)
        size += len(first)
        if size > _LINE_BYTES:
            raise Unavailable(f"{request}: an event has more than {_LINE_BYTES} bytes")
        for line in following:
            yield b"".join(pieces)
            pieces, size = [line], len(line)
