"""Resumable transfers of single files, over HTTP byte ranges from servers and other members, hashed on arrival."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from pydantic import ValidationError
from yarl import URL

from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.checkpoint import (
    CheckpointManifest,
    Digest,
    ManifestFile,
    NotAsDescribedError,
    TransientError,
    WeightsError,
)
from dsv4_runtime.weights.members import ROUTE, MemberWeights
from dsv4_runtime.weights.store import disk_errors
from dsv4_runtime.weights.writer import ALIGN_BYTES, BLOCK_BYTES, HashingWriter, Limiter, Meter

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0


class Stream(Protocol):
    """Bytes of a file from an offset on."""

    def readinto(self, room: memoryview, /) -> int:
        """Read available bytes into `room`; return their number, 0 at the end, or raise TransientError."""


class Source(Protocol):
    """Source of files: an origin or another member."""

    name: str
    """Name in messages."""

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        """Open `file` from byte `start` on.

        Raises:
            TransientError: a retry may succeed.
            WeightsError: a retry cannot succeed.
        """


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Shared state of all transfers of a staging."""

    limiter: Limiter
    meter: Meter
    stopping: Callable[[], bool]
    """Whether transfers must stop."""


def fetch(
    file: ManifestFile,
    sha256: str | None,
    part: Path,
    source: Source,
    context: TransferContext,
    tries: int,
    *,
    direct: bool = False,
) -> str:
    """Make `part` the whole content of `file` and return its SHA-256.

    Existing bytes of `part` are kept. Interrupted transfers are resumed after an increasing delay.

    Args:
        file: manifest entry.
        sha256: expected digest if the manifest has none.
        part: file to append to.
        source: source of the bytes.
        context: limits and counters.
        tries: consecutive transfers without progress before giving up.
        direct: whether to bypass the page cache.

    Raises:
        NotAsDescribedError: the complete content is wrong; the part was removed.
        TransientError: repeated interruptions.
        WeightsError: the file is unavailable, or cannot be written.
    """
    digest = Digest(file, sha256)
    with disk_errors(part.parent):
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(part, os.O_RDWR | os.O_CREAT)
    try:
        writer = HashingWriter(descriptor, _resume(descriptor, file.size, digest), digest.update, direct=direct)
        try:
            _receive(file, source, writer, context, part.parent, tries)
        finally:
            with disk_errors(part.parent):
                # After a stop, the directory may belong to another process.
                writer.close(keep=not context.stopping())
        if writer.size < file.size:
            raise TransientError("another file failed")
    finally:
        os.close(descriptor)
    if wrong := digest.mismatch():
        part.unlink(missing_ok=True)
        raise NotAsDescribedError(f"{file.name} from {source.name} has {wrong}")
    return digest.sha256


def verify_file(file: ManifestFile, path: Path, context: TransferContext, sha256: str | None = None) -> str | None:
    """Return the SHA-256 of `path` if it matches `file`, else None."""
    digest = Digest(file, sha256)
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != file.size:
            return None
        _hash(descriptor, file.size, digest, context.stopping)
    finally:
        os.close(descriptor)
    return None if digest.mismatch() else digest.sha256


def wait_seconds(error: TransientError, failures: int) -> float:
    """Return the delay in seconds after `failures` consecutive failures, the last of which is `error`.

    A server may request a longer delay, up to the maximum.
    """
    own = backoff(failures, first=_FIRST_WAIT_SECONDS, longest=_LONGEST_WAIT_SECONDS)
    return min(max(error.after, own), _LONGEST_WAIT_SECONDS)


def _resume(descriptor: int, size: int, digest: Digest) -> int:
    """Hash the existing bytes and return their number."""
    have = os.fstat(descriptor).st_size
    if have != size:
        # Direct writes are page-aligned.
        have = have - have % ALIGN_BYTES if have < size else 0
        os.ftruncate(descriptor, have)
    _hash(descriptor, have, digest, lambda: False)
    return have


def _hash(descriptor: int, count: int, digest: Digest, stopping: Callable[[], bool]) -> None:
    os.posix_fadvise(descriptor, 0, count, os.POSIX_FADV_SEQUENTIAL)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    left = count
    while left and not stopping():
        got = os.readv(descriptor, [buffer[: min(left, BLOCK_BYTES)]])
        if not got:
            raise TransientError("the file became shorter while it was read")
        digest.update(buffer[:got])
        left -= got


def _receive(
    file: ManifestFile, source: Source, writer: HashingWriter, context: TransferContext, folder: Path, tries: int
) -> None:
    """Append the missing bytes of `file`, in several transfers if necessary."""
    failed = 0
    while writer.size < file.size:
        before = writer.size
        try:
            with source.open(file, before) as stream:
                _copy(stream, file.size, writer, context, folder)
            if writer.size < file.size:
                raise TransientError(f"{source.name} ended {file.name} at byte {writer.size} of {file.size}")  # noqa: TRY301
        except TransientError as error:
            failed = 1 if writer.size > before else failed + 1
            if failed >= tries or context.stopping():
                raise
            time.sleep(wait_seconds(error, failed))


def _copy(stream: Stream, size: int, writer: HashingWriter, context: TransferContext, folder: Path) -> None:
    """Append bytes of `stream` until the file has `size` bytes."""
    while writer.size < size:
        count = stream.readinto(writer.room[: size - writer.size])
        if not count:
            break
        # After a possibly long read the directory may belong to another process.
        if context.stopping():
            raise TransientError("another file failed")
        context.meter.add(count)
        with disk_errors(folder):
            writer.add(count)
        context.limiter.take(count)


T = TypeVar("T")

SOURCE_TIMEOUT = (10.0, 60.0)
"""Seconds to connect; seconds without a byte."""

LARGEST_DOCUMENT = 64 << 20
"""Maximum bytes of file and checksum lists; the longest have some hundred kilobytes."""

_TRIES = 5
"""For a small document."""

_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_REMEDIES = {
    401: "give credentials in secretKeyRef",
    403: "give credentials that may read it, in secretKeyRef",
    404: "check the name, and that the source has this file",
    412: "the file was replaced while it was fetched; start again once the source is complete",
}


class _ResponseBody:
    """Response body; interruptions are transient errors.

    A plain connection is read directly into the caller's buffer, because aiohttp's stream copies every byte twice more
    (docs/decisions/0008). Encrypted and chunked bodies come through that stream.
    """

    def __init__(self, runner: asyncio.Runner, response: aiohttp.ClientResponse, where: str, silent: float) -> None:
        self._runner = runner
        self._content = response.content
        self._where = where
        self._rest = memoryview(b"")
        """Received by aiohttp."""
        self._socket: socket.socket | None = None
        self._left = 0
        """Bytes to read from the socket."""
        length, connection = response.content_length, response.connection
        transport = connection.transport if connection is not None else None
        if transport is None or length is None or response.headers.get("Transfer-Encoding"):
            return
        if self._content.exception() is not None:
            # The connection was closed before all of the body.
            return
        if transport.get_extra_info("ssl_object") is None:
            self._rest = memoryview(self._content.read_nowait(-1))
            # The event loop does not run between these calls, so that it reads nothing from the socket.
            transport.pause_reading()
            self._left = length - len(self._rest)
            self._socket = transport.get_extra_info("socket").dup()
            self._socket.settimeout(silent)

    def readinto(self, room: memoryview, /) -> int:
        """Return available bytes, at most the size of `room`."""
        try:
            if self._socket is not None and not self._rest:
                return self._receive(self._socket, room)
            if not self._rest:
                self._rest = memoryview(self._runner.run(self._content.readany()))
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{self._where} was cut off: {_reason(error)}") from error
        count = min(len(self._rest), len(room))
        room[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _receive(self, connection: socket.socket, room: memoryview) -> int:
        if not self._left:
            return 0
        count = connection.recv_into(room[: self._left])
        if not count:
            raise TransientError(f"{self._where} was cut off {self._left} bytes before its end")
        self._left -= count
        return count

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def check_range(where: str, content_range: str, start: int) -> None:
    """Check that `Content-Range` (RFC 9110, 14.4) begins at byte `start`; raise WeightsError if not."""
    if not content_range.startswith(f"bytes {start}-"):
        raise WeightsError(
            f"{where} sent {content_range[:100] or 'a part without Content-Range'} for bytes={start}-; "
            "serve the files by a web server that keeps to RFC 9110"
        )


ErrorMapper = Callable[[str, int, Mapping[str, str]], TransientError | WeightsError]
"""Maps server name, status and headers (case-insensitive) of a response to an error."""


def http_error(where: str, status: int, headers: Mapping[str, str]) -> TransientError | WeightsError:
    """Return the error for an unexpected response by general HTTP semantics; see `ErrorMapper`."""
    text = f"{where} answered {status} {_PHRASES.get(status, '')}".rstrip()
    if status in _TRANSIENT_STATUSES:
        after = headers.get("Retry-After", "")
        return TransientError(text, float(after) if after.isdecimal() else 0.0)
    return WeightsError(f"{text}; {_REMEDIES.get(status, 'check spec.model.source')}")


@dataclass(frozen=True, slots=True)
class HttpClient:
    """HTTP client for threads: each request has a connection and an event loop of its own.

    Proxies and certificates come from the environment unless `direct` (members are never behind a proxy). Credentials
    come from the plan only: a `.netrc` entry would replace a token and break signed URLs.
    """

    direct: bool = False
    timeout: tuple[float, float] = SOURCE_TIMEOUT
    """As `SOURCE_TIMEOUT`."""
    explain: ErrorMapper = http_error

    def get(self, url: str, headers: Mapping[str, str], *, timeout: tuple[float, float] | None = None) -> bytes:
        """Return a small document without content decoding.

        Raises:
            TransientError: a retry may succeed.
            WeightsError: a retry cannot succeed.
        """
        where = _redact(url)
        with self._request("GET", url, headers, where, timeout or self.timeout) as (response, body):
            if response.status != HTTPStatus.OK:
                raise self.explain(where, response.status, response.headers)
            data, room = bytearray(), memoryview(bytearray(1 << 16))
            while count := body.readinto(room):
                data += room[:count]
                if len(data) > LARGEST_DOCUMENT:
                    raise WeightsError(f"{where} has more than {LARGEST_DOCUMENT >> 20} MiB; check the address")
            return bytes(data)

    def size(self, url: str, headers: Mapping[str, str]) -> int:
        """Return the size of `url` in bytes; raises like `get`."""
        where = _redact(url)
        with self._request("HEAD", url, headers, where, self.timeout) as (response, _):
            if response.status != HTTPStatus.OK:
                raise self.explain(where, response.status, response.headers)
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise WeightsError(f"{where} has no Content-Length; serve the files as they are, by a plain web server")
            return int(length)

    @contextlib.contextmanager
    def range(self, url: str, headers: Mapping[str, str], start: int, where: str | None = None) -> Iterator[Stream]:
        """Yield the bytes of `url` from `start` on; raises like `get`, with the name `where` if it is given."""
        where = where or _redact(url)
        with self._request("GET", url, {**headers, "Range": f"bytes={start}-"}, where, self.timeout) as (
            response,
            body,
        ):
            if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise self.explain(where, response.status, response.headers)
            if response.status == HTTPStatus.PARTIAL_CONTENT:
                check_range(where, response.headers.get("Content-Range", ""), start)
            # A server without range support sends the whole file.
            skip, passing = start if response.status == HTTPStatus.OK else 0, memoryview(bytearray(1 << 20))
            while skip:
                passed = body.readinto(passing[:skip])
                if not passed:
                    raise TransientError(f"{where} ended before byte {start}")
                skip -= passed
            yield body

    @contextlib.contextmanager
    def _request(
        self, method: str, url: str, headers: Mapping[str, str], where: str, timeout: tuple[float, float]
    ) -> Iterator[tuple[aiohttp.ClientResponse, _ResponseBody]]:
        """Yield response and body of a request, after redirects."""
        with asyncio.Runner() as runner:
            try:
                session, response = runner.run(self._open(method, url, headers, where, timeout))
            except (aiohttp.ClientError, OSError, ValueError, OverflowError) as error:
                # Errors of certificates are value errors too.
                if isinstance(error, aiohttp.InvalidURL) or not isinstance(error, aiohttp.ClientError | OSError):
                    raise WeightsError(f"{where}: the address of it, its redirect or proxy is invalid") from error
                raise TransientError(f"{where}: {_reason(error)}") from error
            try:
                body = _ResponseBody(runner, response, where, timeout[1])
                try:
                    yield response, body
                finally:
                    body.close()
            finally:
                runner.run(_close(session))
                response.close()

    async def _open(
        self, method: str, url: str, headers: Mapping[str, str], where: str, limits: tuple[float, float]
    ) -> tuple[aiohttp.ClientSession, aiohttp.ClientResponse]:
        connecting, silent = limits
        session = aiohttp.ClientSession(
            # The server closes the connection, so that a short response also wakes the receiver of a member's bytes.
            connector=aiohttp.TCPConnector(force_close=True, socket_factory=_member_socket if self.direct else None),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=connecting + silent, sock_connect=connecting, sock_read=silent
            ),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            read_bufsize=_STREAM_BYTES,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        try:
            return session, await self._follow(session, method, url, headers, where)
        except BaseException:
            await _close(session)
            raise

    async def _follow(
        self, session: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], where: str
    ) -> aiohttp.ClientResponse:
        """Return the response after redirects. aiohttp itself would use one proxy for all, and `.netrc`."""
        for _ in range(_REDIRECTS + 1):
            address = _parse(url)
            encrypted = address.scheme == "https"
            response = await session.request(
                method,
                address,
                headers=headers,
                allow_redirects=False,
                proxy=None if self.direct else find_proxy(address),
                ssl=_tls_context("" if self.direct else _ca_bundle()) if encrypted else True,
            )
            if response.status not in _REDIRECT_STATUSES or not (location := response.headers.get("Location")):
                return response
            response.close()
            url = urljoin(url, location)
            if not _same_server(address, _parse(url)):
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        raise WeightsError(f"{where} redirects more than {_REDIRECTS} times; check the address")


async def _close(session: aiohttp.ClientSession) -> None:
    await session.close()
    # Transports release their sockets in the next turns of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


_REDIRECTS = 10
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_STREAM_BYTES = 1 << 20
_HEADER_BYTES = 1 << 16
"""Limit of a header line; signed redirects have some kilobytes."""
# Receive low-water mark: fewer wake-ups and GIL acquisitions.
_WAKE_BYTES = 1 << 18


def find_proxy(url: URL) -> URL | None:
    """Return the environment's proxy for `url`; None if there is none, or if `NO_PROXY` has the host.

    `ALL_PROXY` serves schemes without a variable. `NO_PROXY` has names, their ends, addresses or networks.

    Raises:
        WeightsError: the proxy is not an HTTP proxy.
    """
    proxies, host = getproxies(), url.host or ""
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if (
        not proxy
        or proxy_bypass(host if ":" in host else f"{host}:{url.port}")
        or _in_network(host, proxies.get("no", ""))
    ):
        return None
    found = URL(proxy if "://" in proxy else f"http://{proxy}")
    if found.scheme not in ("http", "https"):
        raise WeightsError(f"the proxy for {url.host} in the environment speaks {found.scheme}; set an HTTP proxy")
    return found


def _in_network(host: str, networks: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in networks.split(","):
        with contextlib.suppress(ValueError):
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


def _ca_bundle() -> str:
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""


@cache
def _tls_context(bundle: str) -> ssl.SSLContext:
    """Return a context with the authorities of `bundle`, a file or a directory; if it is empty, the system's."""
    try:
        if not bundle or not Path(bundle).is_dir():
            return ssl.create_default_context(cafile=bundle or None)
        return ssl.create_default_context(capath=bundle)
    except OSError as error:
        raise WeightsError(f"REQUESTS_CA_BUNDLE: {bundle} cannot be used: {error.strerror or error}") from error


def _parse(url: str) -> URL:
    """Return a URL without credentials, with its escapes: signatures cover them; raise ValueError if it is invalid."""
    plain = url.isascii() and url.isprintable() and " " not in url
    found = URL(url, encoded=plain)
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError(f"{found.scheme}://{found.host} is no address of a web server")
    return found.with_user(None)


def _same_server(first: URL, second: URL) -> bool:
    """Return whether credentials for `first` may be sent to `second`."""
    upgrade = (first.scheme, first.port, second.scheme, second.port) == ("http", 80, "https", 443)
    return first.host == second.host and (upgrade or (first.scheme, first.port) == (second.scheme, second.port))


def _member_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
    return found


def _reason(error: Exception) -> str:
    """Return the cause of a failed request; texts of aiohttp may contain the URL with its query."""
    if isinstance(error, TimeoutError):
        return "no data in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status} {error.message}"
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, OSError) and inner.errno and not isinstance(inner, ssl.SSLError | socket.gaierror):
        # asyncio's text has the address only.
        return os.strerror(inner.errno)
    return (inner.strerror if isinstance(inner, OSError) else "") or str(inner) or type(inner).__name__


def _redact(url: str) -> str:
    """Return a URL without query (signatures) and credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def with_retries(request: Callable[[], T]) -> T:
    """Call `request` up to five times while it fails transiently; raise WeightsError after that."""
    for failures in range(1, _TRIES):
        try:
            return request()
        except TransientError as error:
            time.sleep(wait_seconds(error, failures))
    try:
        return request()
    except TransientError as error:
        raise WeightsError(f"{error}; check that this machine reaches it") from error


_REFRESH_SECONDS = 1.0
_REFRESH_TIMEOUT = (2.0, 5.0)
MEMBER_TIMEOUT = (2.0, 10.0)
"""Seconds to connect, and without a byte. In the group's network responses take milliseconds, on a busy disk seconds;
silent members are replaced by another source."""


class MemberSource:
    """Finished files of one member."""

    def __init__(self, rank: int, url: str, headers: Mapping[str, str], web: HttpClient) -> None:
        self.rank, self.name = rank, f"rank {rank}"
        self._url = f"{url}{ROUTE}"
        self._headers = headers
        self._web = web

    def offer(self, identity: str) -> MemberWeights | None:
        """Return the member's files; None if it does not respond or has another checkpoint."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            url = f"{self._url}?identity={quote(identity, safe='')}"
            return MemberWeights.model_validate_json(self._web.get(url, self._headers, timeout=_REFRESH_TIMEOUT))
        return None

    def manifest(self) -> CheckpointManifest | None:
        """Return the member's manifest; None if it has none."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            return CheckpointManifest.model_validate_json(self._web.get(f"{self._url}/manifest", self._headers))
        return None

    def open(self, file: ManifestFile, start: int) -> AbstractContextManager[Stream]:
        url, where = f"{self._url}/files/{quote(file.name)}", f"{file.name} from {self.name}"
        return self._web.range(url, self._headers, start, where)


class Members:
    """All other members, queried at most once per second."""

    def __init__(self, urls: Mapping[int, str], token: str, identity: str) -> None:
        web = HttpClient(direct=True, timeout=MEMBER_TIMEOUT)
        headers = {"Authorization": f"Bearer {token}"}
        self.sources = {rank: MemberSource(rank, url, headers, web) for rank, url in urls.items()}
        self._identity = identity
        self._pool = ThreadPoolExecutor(max(1, len(self.sources)), "ask")
        self._asked = 0.0
        self._offers: dict[int, MemberWeights] = {}

    def offers(self) -> dict[int, MemberWeights]:
        """Return the files of the responding members by rank."""
        if self.sources and time.monotonic() - self._asked >= _REFRESH_SECONDS:
            answers = self._pool.map(lambda source: (source.rank, source.offer(self._identity)), self.sources.values())
            self._offers = {rank: offer for rank, offer in answers if offer is not None}
            self._asked = time.monotonic()
        return self._offers
