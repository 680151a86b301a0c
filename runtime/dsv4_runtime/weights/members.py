"""The other members as places to fetch from."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlsplit

from pydantic import ValidationError

from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import CheckpointManifest, ManifestFile
from dsv4_runtime.weights.offer import Offer
from dsv4_runtime.weights.transfer import Web, check_range, refusal

ROUTE = "/v1/weights"
_ASK_SECONDS = 1.0
_ASK_TIMEOUT = (2.0, 5.0)
TIMEOUT = (2.0, 10.0)
"""Seconds to connect, and without a byte. Over a group's own network an answer takes milliseconds, and a busy disk
seconds; whoever is silent for longer is left for another place that has the file."""
# Linux wakes the receiver for so many bytes, or at the end: fewer wakes, and fewer turns of Python's lock.
_WAKE_BYTES = 1 << 18


class _MemberBody:
    """A file's bytes, which the kernel puts where they are written from: `requests` would copy them once more."""

    def __init__(self, response: http.client.HTTPResponse, where: str) -> None:
        self._response = response
        self._where = where

    def readinto(self, room: memoryview, /) -> int:
        """Read as much as `room` takes; less at the end."""
        try:
            return self._response.readinto(room)
        except (http.client.HTTPException, OSError) as error:
            raise TransientError(f"{self._where} was cut off: {error}") from error


class MemberPlace:
    """One member's finished files."""

    def __init__(self, rank: int, url: str, headers: Mapping[str, str], web: Web) -> None:
        self.rank = rank
        self._url = f"{url}{ROUTE}"
        self._headers = headers
        self._web = web

    @property
    def name(self) -> str:
        """Return its name for people."""
        return f"rank {self.rank}"

    def offer(self, identity: str) -> Offer | None:
        """Return what it has; None if it does not answer, or has another checkpoint."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            url = f"{self._url}?identity={quote(identity, safe='')}"
            return Offer.model_validate_json(self._web.get(url, self._headers, timeout=_ASK_TIMEOUT))
        return None

    def manifest(self) -> CheckpointManifest | None:
        """Return the manifest that it works from; None if it has none yet."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            return CheckpointManifest.model_validate_json(self._web.get(f"{self._url}/manifest", self._headers))
        return None

    @contextlib.contextmanager
    def open(self, file: ManifestFile, start: int) -> Iterator[Stream]:
        """Open `file` from byte `start` on."""
        url = urlsplit(f"{self._url}/files/{quote(file.name)}")
        where, (connecting, silent) = f"{file.name} from {self.name}", TIMEOUT
        with contextlib.closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=connecting)) as peer:
            try:
                peer.connect()
                peer.sock.settimeout(silent)
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
                # Closed by the member, so that an answer of fewer bytes has an end that wakes.
                headers = {**self._headers, "Range": f"bytes={start}-", "Connection": "close"}
                peer.request("GET", url.path, headers=headers)
                response = peer.getresponse()
            except (http.client.HTTPException, OSError) as error:
                raise TransientError(f"{where}: {error}") from error
            with response:
                if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise refusal(where, response.status, dict(response.headers.items()))
                check_range(where, response.headers.get("Content-Range", ""), start)
                yield _MemberBody(response, where)


class Members:
    """All other members, asked at most once a second."""

    def __init__(self, urls: Mapping[int, str], token: str, identity: str) -> None:
        web = Web(direct=True, timeout=TIMEOUT)
        headers = {"Authorization": f"Bearer {token}"}
        self.places = {rank: MemberPlace(rank, url, headers, web) for rank, url in urls.items()}
        self._identity = identity
        self._pool = ThreadPoolExecutor(max(1, len(self.places)), "ask")
        self._asked = 0.0
        self._offers: dict[int, Offer] = {}

    def offers(self) -> dict[int, Offer]:
        """Map rank to offer, of those that answer."""
        if self.places and time.monotonic() - self._asked >= _ASK_SECONDS:
            answers = self._pool.map(lambda place: (place.rank, place.offer(self._identity)), self.places.values())
            self._offers = {rank: offer for rank, offer in answers if offer is not None}
            self._asked = time.monotonic()
        return self._offers
