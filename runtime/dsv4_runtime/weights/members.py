"""The other members as places to fetch from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from urllib.parse import quote

from pydantic import ValidationError

from dsv4_runtime.weights.errors import TransientError, WeightsError
from dsv4_runtime.weights.fetch import Stream
from dsv4_runtime.weights.manifest import Manifest
from dsv4_runtime.weights.offer import Offer
from dsv4_runtime.weights.transfer import Web

ROUTE = "/v1/weights"
_ASK_SECONDS = 1.0
_ASK_TIMEOUT = (2.0, 5.0)
TIMEOUT = (2.0, 10.0)
"""Seconds to connect, and without a byte. Over a group's own network an answer takes milliseconds, and a busy disk
seconds; whoever is silent for longer is left for another place that has the file."""


class MemberPlace:
    """One member's finished files."""

    def __init__(self, rank: int, url: str, headers: Mapping[str, str], web: Web) -> None:
        self.rank = rank
        self._url = f"{url}{ROUTE}"
        self._headers = headers
        self._web = web

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank}"

    def offer(self, identity: str) -> Offer | None:
        """What it has; None if it does not answer, or has another checkpoint."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            url = f"{self._url}?identity={quote(identity, safe='')}"
            return Offer.model_validate_json(self._web.get(url, self._headers, timeout=_ASK_TIMEOUT))
        return None

    def manifest(self) -> Manifest | None:
        """The manifest that it works from; None if it has none yet."""
        with contextlib.suppress(TransientError, WeightsError, ValidationError):
            return Manifest.model_validate_json(self._web.get(f"{self._url}/manifest", self._headers))
        return None

    def open(self, name: str, start: int) -> AbstractContextManager[Stream]:
        """File `name` from byte `start` on."""
        return self._web.range(f"{self._url}/files/{quote(name)}", self._headers, start)


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
        """Rank to offer, of those that answer."""
        if self.places and time.monotonic() - self._asked >= _ASK_SECONDS:
            answers = self._pool.map(lambda place: (place.rank, place.offer(self._identity)), self.places.values())
            self._offers = {rank: offer for rank, offer in answers if offer is not None}
            self._asked = time.monotonic()
        return self._offers
