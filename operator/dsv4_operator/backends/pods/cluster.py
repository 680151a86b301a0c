"""State that groups of all deployments share: the nodes, the pods as watched, and what is reserved on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, StorageType
from dsv4_operator.api.policy import violations
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.backends.pods.scheduling import Owner, PodRequests, Snapshot, owner_of, pod_requests, readable
from dsv4_operator.builders import member
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import NODES, Client, KubeReader, OwnedCache, PodCache

_DEFAULT_POLICY = ClusterPolicy()

_RESERVED_SECONDS = 15.0
"""For which the nodes of a plan are kept until its pods are being made: a status has to be written before."""
_MADE_SECONDS = 60.0
"""After which a pod that was to be made must have been seen: requests take 30 s at most."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Resources reserved for members of one group whose pods were not seen yet."""

    pods: Mapping[str, PodRequests]
    """By the names of the pods."""
    until: float
    """Monotonic time."""


class Cluster:
    """One cluster, for every deployment of one operator."""

    def __init__(
        self,
        kube: Client,
        pods: PodCache,
        *,
        runtime_image: str,
        policy: ClusterPolicy = _DEFAULT_POLICY,
        owned: OwnedCache | None = None,
        in_cluster: bool = False,
    ) -> None:
        """Args:
        kube: the API server.
        pods: of the namespaces that the operator may look at, kept up to date by somebody else. What runs elsewhere is
            not known, and only the scheduler finds that a node is full.
        runtime_image: of members and gateways of deployments that name none.
        policy: what deployments may have of nodes.
        owned: what deployments own beside their members; None: nobody watches it, and only what changes is written.
        in_cluster: whether this process is a pod of the cluster, so that names of Services resolve.
        """
        self.in_cluster = in_cluster
        self.kube: KubeReader = kube
        self.client = kube
        """For those that make an `OwnedObjects` of their own; nobody else writes."""
        self.objects = OwnedObjects(kube)
        self.owned = owned
        self.pods = pods
        self._host = member.Host(policy, runtime_image)
        self._snapshot = Snapshot((), ())
        self._requests: dict[str, tuple[str, PodRequests | None]] = {}
        """Of pods by uid: resource version, and what it takes. Reading quantities is most of the work of a look."""
        self._reserved: dict[Owner, _Reserved] = {}
        self._looked: float | None = None
        self.scheduling = asyncio.Lock()
        """Held from a look at the nodes until what was found there is reserved: two groups must not take the same."""

    def image(self, deployment: DSV4Deployment) -> str:
        """Return the image of the gateways of `deployment`, and of its members.

        Raises:
            BackendError: neither it nor the operator names one.
        """
        return deployment.spec.engine.image or self.host(deployment).runtime_image

    def host(self, deployment: DSV4Deployment) -> member.Host:
        """Return what the members of `deployment` may have of their nodes.

        Raises:
            BackendError: it may not have what it asks for, or needs an image that the operator does not have.
        """
        if forbidden := self.forbidden(deployment):
            raise BackendError(forbidden)
        if not self._host.runtime_image and deployment.spec.engine.image is None:
            raise BackendError(
                "spec.engine.image: is not set, and the operator was started without --runtime-image; set one of them"
            )
        if not self._host.runtime_image and deployment.spec.storage.type is StorageType.HOST_PATH:
            raise BackendError(
                "spec.storage.type: HostPath needs the operator's own image, which prepares the directory, and the "
                "operator was started without --runtime-image; start it with one, or write EmptyDir"
            )
        return self._host

    def forbidden(self, deployment: DSV4Deployment) -> str:
        """Return what `deployment` may not have here, for people; empty: it may have everything."""
        return "; ".join(map(str, violations(deployment, self._host.policy, self._host.runtime_image)))

    async def snapshot(self, seconds: float) -> Snapshot:
        """Return all nodes and pods as they were at most `seconds` ago. To be called with `scheduling` held.

        Raises:
            KubeError: the nodes cannot be listed.
        """
        if self._looked is None or time.monotonic() - self._looked > seconds:
            begun = time.monotonic()
            nodes = tuple(filter(readable, await self.kube.list(NODES)))
            self._snapshot = Snapshot(nodes, self._requests_of(self.pods.all()))
            self._looked = begun
            self._reserve({})
        return self._snapshot

    def reserve(self, owner: Owner, pods: Iterable[PodRequests]) -> None:
        """Keep what `pods` of a planned group take, which will be made soon: for a while nobody else gets it."""
        self._reserve({owner: _Reserved(_by_name(pods), time.monotonic() + _RESERVED_SECONDS)})

    def reserve_made(self, pods: Iterable[Manifest]) -> None:
        """Count members of one group that are about to be made as if they were there, until they are seen."""
        requests = [found for pod in pods if (found := pod_requests(pod)) is not None]
        if requests:
            until = time.monotonic() + _MADE_SECONDS
            self._reserve({owner_of(requests[0].pod): _Reserved(_by_name(requests), until)})

    def release(self, owner: Owner) -> None:
        """Drop what is reserved for a group, which went or was not made after all: whoever looks next looks anew."""
        self._reserved.pop(owner, None)
        self._looked = None

    def _reserve(self, more: Mapping[Owner, _Reserved]) -> None:
        now = time.monotonic()
        reserved = self._reserved | dict(more)
        self._reserved = {owner: one for owner, one in reserved.items() if one.until > now}
        seen = {(one.owner, one.pod["metadata"]["name"]) for one in self._snapshot.requests if one.owner}
        self._snapshot = self._snapshot.expecting(
            pod for owner, one in self._reserved.items() for name, pod in one.pods.items() if (owner, name) not in seen
        )

    def _requests_of(self, pods: Iterable[Manifest]) -> tuple[PodRequests, ...]:
        """Return what `pods` take, read anew only of those that changed."""
        found: dict[str, tuple[str, PodRequests | None]] = {}
        for pod in pods:
            uid, version = str(pod["metadata"]["uid"]), str(pod["metadata"]["resourceVersion"])
            known = self._requests.get(uid)
            found[uid] = known if known is not None and known[0] == version else (version, pod_requests(pod))
        self._requests = found
        return tuple(requests for _, requests in found.values() if requests is not None)


def _by_name(pods: Iterable[PodRequests]) -> dict[str, PodRequests]:
    return {str(one.pod["metadata"]["name"]): one for one in pods}
