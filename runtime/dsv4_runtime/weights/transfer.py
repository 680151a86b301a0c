"""Resumable transfers of single files, over HTTP byte ranges from servers and other members, hashed on arrival."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import requests
import urllib3
from pydantic import ValidationError

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
from dsv4_runtime.weights.messages import ROUTE, MemberWeights
from dsv4_runtime.weights.store import disk_errors
from dsv4_runtime.weights.writer import ALIGN_BYTES, BLOCK_BYTES, HashingWriter, Limiter, Meter

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0


class Stream(Protocol):
    """Bytes of a file from an offset on."""

    def readinto(self, room: memoryview, /) -> int:
        """Read available bytes into `room`; return their number, 0 at the end, or raise TransientError."""
        ...


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
        ...


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
_REMEDIES = {
    401: "give credentials in secretKeyRef",
    403: "give credentials that may read it, in secretKeyRef",
    404: "check the name, and that the source has this file",
    412: "the file was replaced while it was fetched; start again once the source is complete",
}


class _ResponseBody:
    """Response body; interruptions are transient errors."""

    def __init__(self, raw: urllib3.HTTPResponse, where: str) -> None:
        self._raw = raw
        self._where = where

    def readinto(self, room: memoryview, /) -> int:
        """Return available bytes, at most the size of `room`."""
        try:
            # No content decoding: it would invalidate offsets and digests.
            data = self._raw.read1(len(room), decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TransientError(f"{self._where} was cut off: {error}") from error
        room[: len(data)] = data
        return len(data)


class _Session(requests.Session):
    """Session that ignores `.netrc`."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Drop the token when a redirect leads to another host."""
        headers, url = prepared_request.headers, prepared_request.url
        if "Authorization" in headers and self.should_strip_auth(response.request.url, url):  # type: ignore[no-untyped-call]
            del headers["Authorization"]


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
    text = f"{where} answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in _TRANSIENT_STATUSES:
        after = headers.get("Retry-After", "")
        return TransientError(text, float(after) if after.isdecimal() else 0.0)
    return WeightsError(f"{text}; {_REMEDIES.get(status, 'check spec.model.source')}")


@dataclass(slots=True)
class HttpClient:
    """HTTP client with one session per thread.

    Proxies and certificates come from the environment unless `direct` (members are never behind a proxy). Credentials
    come from the plan only: a `.netrc` entry would replace a token and break signed URLs.
    """

    direct: bool = False
    timeout: tuple[float, float] = SOURCE_TIMEOUT
    """As `SOURCE_TIMEOUT`."""
    explain: ErrorMapper = http_error
    _local: threading.local = field(default_factory=threading.local)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = _Session()
            session.trust_env = not self.direct
            session.headers["Accept-Encoding"] = "identity"
        return session

    def _request(self, method: str, url: str, headers: Mapping[str, str], **options: Any) -> requests.Response:
        try:
            return self._session().request(method, url, headers=headers, **options)
        except requests.RequestException as error:
            # The error's own text contains the URL with its query.
            inner = error.args[0] if error.args else None
            reason = getattr(inner, "reason", None) or type(error).__name__
            raise TransientError(f"{_redact(url)}: {reason}") from error

    def get(self, url: str, headers: Mapping[str, str], *, timeout: tuple[float, float] | None = None) -> bytes:
        """Return a small document without content decoding.

        Raises:
            TransientError: a retry may succeed.
            WeightsError: a retry cannot succeed.
        """
        response = self._request("GET", url, headers, timeout=timeout or self.timeout, stream=True)
        with response:
            if response.status_code != 200:
                raise self.explain(_redact(url), response.status_code, response.headers)
            body, data, room = _ResponseBody(response.raw, _redact(url)), bytearray(), memoryview(bytearray(1 << 16))
            while count := body.readinto(room):
                data += room[:count]
                if len(data) > LARGEST_DOCUMENT:
                    raise WeightsError(f"{_redact(url)} has more than {LARGEST_DOCUMENT >> 20} MiB; check the address")
            return bytes(data)

    def size(self, url: str, headers: Mapping[str, str]) -> int:
        """Return the size of `url` in bytes; raises like `get`."""
        response = self._request("HEAD", url, headers, timeout=self.timeout, allow_redirects=True)
        length = response.headers.get("Content-Length", "")
        if response.status_code != 200:
            raise self.explain(_redact(url), response.status_code, response.headers)
        if not length.isdecimal():
            raise WeightsError(
                f"{_redact(url)} has no Content-Length; serve the files as they are, by a plain web server"
            )
        return int(length)

    @contextlib.contextmanager
    def range(self, url: str, headers: Mapping[str, str], start: int) -> Iterator[Stream]:
        """Yield the bytes of `url` from `start` on; raises like `get`."""
        wanted = {**headers, "Range": f"bytes={start}-"}
        response = self._request("GET", url, wanted, timeout=self.timeout, stream=True)
        with response:
            if response.status_code not in (200, 206):
                raise self.explain(_redact(url), response.status_code, response.headers)
            if response.status_code == 206:
                check_range(_redact(url), response.headers.get("Content-Range", ""), start)
            body = _ResponseBody(response.raw, _redact(url))
            # A server without range support sends the whole file.
            skip, passing = start if response.status_code == 200 else 0, memoryview(bytearray(1 << 20))
            while skip:
                passed = body.readinto(passing[:skip])
                if not passed:
                    raise TransientError(f"{_redact(url)} ended before byte {start}")
                skip -= passed
            yield body


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
# Receive low-water mark: fewer wake-ups and GIL acquisitions.
_WAKE_BYTES = 1 << 18


class _MemberBody:
    """Body read directly into the write buffer: `requests` would copy it again."""

    def __init__(self, response: http.client.HTTPResponse, where: str) -> None:
        self._response = response
        self._where = where

    def readinto(self, room: memoryview, /) -> int:
        """Fill `room`; less at the end."""
        try:
            return self._response.readinto(room)
        except (http.client.HTTPException, OSError) as error:
            raise TransientError(f"{self._where} was cut off: {error}") from error


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

    @contextlib.contextmanager
    def open(self, file: ManifestFile, start: int) -> Iterator[Stream]:
        """Open `file` from byte `start` on."""
        url = urlsplit(f"{self._url}/files/{quote(file.name)}")
        where, (connecting, silent) = f"{file.name} from {self.name}", MEMBER_TIMEOUT
        with contextlib.closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=connecting)) as peer:
            try:
                peer.connect()
                peer.sock.settimeout(silent)
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
                # Closed by the member, so that a short response also wakes the receiver.
                headers = {**self._headers, "Range": f"bytes={start}-", "Connection": "close"}
                peer.request("GET", url.path, headers=headers)
                response = peer.getresponse()
            except (http.client.HTTPException, OSError) as error:
                raise TransientError(f"{where}: {error}") from error
            with response:
                if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise http_error(where, response.status, dict(response.headers.items()))
                check_range(where, response.headers.get("Content-Range", ""), start)
                yield _MemberBody(response, where)


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
