"""What the backends of all deployments share: the API server, the pods as watched, and who sits where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import aiohttp

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.rooms import Manifest, Snapshot
from dsv4_operator.kube import NODES, PODS, Kube

_RUNS = "status.phase!=Succeeded,status.phase!=Failed"
_CONNECTIONS = 1024


class PodView(Protocol):
    """Pods in memory (`dsv4_operator.kube.cache.PodCache`); may lag behind the API server."""

    def pods(self, namespace: str, deployment: str, group: int) -> list[Manifest]:
        """The pods of one group, of every incarnation, its gateway's included; not to be changed."""
        ...


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
        return self._snapshot

    def took(self, pods: Iterable[Manifest]) -> None:
        """These pods are about to be made: until the next look they count as if they were there."""
        self._snapshot = Snapshot(self._snapshot.nodes, (*self._snapshot.pods, *pods))

    def forget_look(self) -> None:
        """Pods went, or were not made after all: whoever looks next looks anew."""
        self._looked = None
