"""Byte ranges over HTTP: from web servers, hubs, stores and other members alike."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import requests
import urllib3

from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream, wait_seconds

T = TypeVar("T")

SOURCE_TIMEOUT = (10.0, 60.0)
"""Seconds to connect; seconds without a byte."""

LARGEST_DOCUMENT = 64 << 20
"""Bytes: lists of files and sums, of which the longest have some hundred kilobytes."""

_TRIES = 5
"""Of a question for a small document."""

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_REMEDY = {
    401: "give credentials in secretKeyRef",
    403: "give credentials that may read it, in secretKeyRef",
    404: "check the name, and that the source has this file",
    412: "the file was replaced while it was fetched; start again once the source is complete",
}


class _ResponseBody:
    """A response's bytes; what cuts it off is transient."""

    def __init__(self, raw: urllib3.HTTPResponse, where: str) -> None:
        self._raw = raw
        self._where = where

    def readinto(self, room: memoryview, /) -> int:
        """Return what has arrived, as much as `room` takes."""
        try:
            # Not undone: a content encoding would make offsets and digests those of something else.
            data = self._raw.read1(len(room), decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TransientError(f"{self._where} was cut off: {error}") from error
        room[: len(data)] = data
        return len(data)


class _Session(requests.Session):
    """A session that never reads `.netrc`."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Drop the token where a redirect leads to another host."""
        headers, url = prepared_request.headers, prepared_request.url
        if "Authorization" in headers and self.should_strip_auth(response.request.url, url):  # type: ignore[no-untyped-call]
            del headers["Authorization"]


def check_range(where: str, content_range: str, start: int) -> None:
    """Check the `Content-Range` of a partial answer (RFC 9110, 14.4).

    Raises:
        WeightsError: it does not begin at byte `start`.
    """
    if not content_range.startswith(f"bytes {start}-"):
        raise WeightsError(
            f"{where} sent {content_range[:100] or 'a part without Content-Range'} for bytes={start}-; "
            "serve the files by a web server that keeps to RFC 9110"
        )


Explain = Callable[[str, int, Mapping[str, str]], TransientError | WeightsError]
"""Function of the server's name, the answer's status and headers (names in any case) to the error to be raised."""


def refusal(where: str, status: int, headers: Mapping[str, str]) -> TransientError | WeightsError:
    """Return what an answer other than the one wanted means, as servers in general mean it; see `Explain`."""
    text = f"{where} answered {status} {http.client.responses.get(status, '')}".rstrip()
    if status in _AGAIN:
        after = headers.get("Retry-After", "")
        return TransientError(text, float(after) if after.isdecimal() else 0.0)
    return WeightsError(f"{text}; {_REMEDY.get(status, 'check spec.model.source')}")


@dataclass(slots=True)
class Web:
    """An HTTP client with a session for each thread.

    Proxies and certificates come from the environment unless `direct`: members are never behind a proxy. Credentials
    come from the plan alone: an entry of `.netrc` would replace a token, and break a signed URL.
    """

    direct: bool = False
    timeout: tuple[float, float] = SOURCE_TIMEOUT
    """As `SOURCE_TIMEOUT`."""
    explain: Explain = refusal
    _local: threading.local = field(default_factory=threading.local)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = _Session()
            session.trust_env = not self.direct
            session.headers["Accept-Encoding"] = "identity"
        return session

    def get(self, url: str, headers: Mapping[str, str], *, timeout: tuple[float, float] | None = None) -> bytes:
        """Get a small document, whole, as it was sent: what is compressed unasked stays so, whatever it would become.

        Raises:
            TransientError: trying again may help.
            WeightsError: it will not.
        """
        try:
            response = self._session().get(url, headers=headers, timeout=timeout or self.timeout, stream=True)
        except requests.RequestException as error:
            raise TransientError(f"{_shown(url)}: {_reason(error)}") from error
        with response:
            if response.status_code != 200:
                raise self.explain(_shown(url), response.status_code, response.headers)
            body, data, room = _ResponseBody(response.raw, _shown(url)), bytearray(), memoryview(bytearray(1 << 16))
            while count := body.readinto(room):
                data += room[:count]
                if len(data) > LARGEST_DOCUMENT:
                    raise WeightsError(f"{_shown(url)} has more than {LARGEST_DOCUMENT >> 20} MiB; check the address")
            return bytes(data)

    def size(self, url: str, headers: Mapping[str, str]) -> int:
        """Return the bytes of `url`; raises as `get` does."""
        try:
            response = self._session().head(url, headers=headers, timeout=self.timeout, allow_redirects=True)
        except requests.RequestException as error:
            raise TransientError(f"{_shown(url)}: {_reason(error)}") from error
        length = response.headers.get("Content-Length", "")
        if response.status_code != 200:
            raise self.explain(_shown(url), response.status_code, response.headers)
        if not length.isdecimal():
            raise WeightsError(
                f"{_shown(url)} has no Content-Length; serve the files as they are, by a plain web server"
            )
        return int(length)

    @contextlib.contextmanager
    def range(self, url: str, headers: Mapping[str, str], start: int) -> Iterator[Stream]:
        """Yield the bytes of `url` from `start` on; raises as `get` does."""
        wanted = {**headers, "Range": f"bytes={start}-"}
        try:
            response = self._session().get(url, headers=wanted, timeout=self.timeout, stream=True)
        except requests.RequestException as error:
            raise TransientError(f"{_shown(url)}: {_reason(error)}") from error
        with response:
            if response.status_code not in (200, 206):
                raise self.explain(_shown(url), response.status_code, response.headers)
            if response.status_code == 206:
                check_range(_shown(url), response.headers.get("Content-Range", ""), start)
            body = _ResponseBody(response.raw, _shown(url))
            # A server that knows no ranges sends all of it.
            skip, passing = start if response.status_code == 200 else 0, memoryview(bytearray(1 << 20))
            while skip:
                passed = body.readinto(passing[:skip])
                if not passed:
                    raise TransientError(f"{_shown(url)} ended before byte {start}")
                skip -= passed
            yield body


def _reason(error: requests.RequestException) -> object:
    """Return why there was no answer; the error's own text has the URL with its query."""
    inner = error.args[0] if error.args else None
    return getattr(inner, "reason", None) or type(error).__name__


def _shown(url: str) -> str:
    """Return a URL without its query, where signatures are, and without credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def patiently(ask: Callable[[], T]) -> T:
    """Return what `ask` returns; asked five times at most, while it fails in a way that may pass.

    Raises:
        WeightsError: it did not pass.
    """
    for failures in range(1, _TRIES):
        try:
            return ask()
        except TransientError as error:
            time.sleep(wait_seconds(error, failures))
    try:
        return ask()
    except TransientError as error:
        raise WeightsError(f"{error}; check that this machine reaches it") from error
