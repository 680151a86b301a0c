"""What the backends of all deployments share: the API server, the pods as watched, and who sits where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.rooms import Manifest, Owner, Share, Snapshot, owner_of, share_of
from dsv4_operator.kube import NODES, PODS, Kube

_RUNS = "status.phase!=Succeeded,status.phase!=Failed"
_CONNECTIONS = 1024
_HELD_SECONDS = 15.0
"""For which the seats of a plan are kept until its pods are being made: a status has to be written before."""
_MADE_SECONDS = 60.0
"""After which a pod that was to be made must have been listed: requests take 30 s at most."""


class PodView(Protocol):
    """Pods in memory (`dsv4_operator.kube.cache.PodCache`); may lag behind the API server."""

    def pods(self, namespace: str, deployment: str, group: int) -> list[Manifest]:
        """The members of one group, of every incarnation; not to be changed."""
        ...


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Seats of one group whose pods no listing has shown yet."""

    shares: Mapping[str, Share]
    """By the names of the pods."""
    until: float
    """Monotonic time."""


class Cluster:
    """One cluster, for every `PodsBackend` of one operator."""

    def __init__(self, kube: Kube, pods: PodView, *, runtime_image: str, namespaces: Sequence[str] = ()) -> None:
        """Args:
        kube: the API server.
        pods: kept up to date by somebody else.
        runtime_image: of members and gateways of deployments that name none.
        namespaces: where the operator may look at pods; none means everywhere. What runs elsewhere is then not known,
            and only the scheduler finds that a node is full.
        """
        self.kube = kube
        self.pods = pods
        self._runtime_image = runtime_image
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._snapshot = Snapshot((), ())
        self._reserved: dict[Owner, _Reserved] = {}
        self._looked: float | None = None
        self.seating = asyncio.Lock()
        """Held from a look at the nodes until what was found there is taken: two groups must not take the same."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to agents. No proxy, and no limit on how long a stream may last."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    def image(self, deployment: DSV4Deployment) -> str:
        """The image of the members and gateways of `deployment`.

        Raises:
            BackendError: neither it nor the operator names one.
        """
        found = deployment.spec.engine.image or self._runtime_image
        if not found:
            raise BackendError(
                "spec.engine.image: is not set, and the operator was started without --runtime-image; set one of them"
            )
        return found

    async def close(self) -> None:
        """Let go of the connections to agents."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def snapshot(self, seconds: float) -> Snapshot:
        """All nodes and pods as they were at most `seconds` ago. To be called with `seating` held.

        Raises:
            KubeError: they cannot be listed.
        """
        if self._looked is None or time.monotonic() - self._looked > seconds:
            begun = time.monotonic()
            nodes, *pods = await asyncio.gather(
                self.kube.list(NODES), *(self.kube.list(PODS, place, fields=_RUNS) for place in self._namespaces)
            )
            self._snapshot = Snapshot(tuple(nodes), tuple(pod for listed in pods for pod in listed))
            self._looked = begun
            self._reserve({})
        return self._snapshot

    def hold(self, owner: Owner, seats: Iterable[Share]) -> None:
        """A group was planned on these seats, and will be made soon: for a while nobody else gets them."""
        self._reserve({owner: _Reserved(_by_name(seats), time.monotonic() + _HELD_SECONDS)})

    def took(self, pods: Iterable[Manifest]) -> None:
        """These members of one group are about to be made: until they are listed they count as if they were there."""
        shares = [share for pod in pods if (share := share_of(pod)) is not None]
        if shares:
            until = time.monotonic() + _MADE_SECONDS
            self._reserve({owner_of(shares[0].pod): _Reserved(_by_name(shares), until)})

    def let_go(self, owner: Owner) -> None:
        """The members of a group went, or were not made after all: whoever looks next looks anew."""
        self._reserved.pop(owner, None)
        self._looked = None

    def _reserve(self, more: Mapping[Owner, _Reserved]) -> None:
        now = time.monotonic()
        reserved = self._reserved | dict(more)
        self._reserved = {owner: one for owner, one in reserved.items() if one.until > now}
        listed = {(share.owner, share.pod["metadata"]["name"]) for share in self._snapshot.shares if share.owner}
        self._snapshot = self._snapshot.expecting(
            share
            for owner, one in self._reserved.items()
            for name, share in one.shares.items()
            if (owner, name) not in listed
        )


def _by_name(shares: Iterable[Share]) -> dict[str, Share]:
    return {str(share.pod["metadata"]["name"]): share for share in shares}
