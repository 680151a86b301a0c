"""State shared by the groups of all deployments: nodes, pods and reservations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, Finding, StorageType
from dsv4_operator.api.findings import joined
from dsv4_operator.api.policy import violations
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.backends.pods.podgroups import POD_GROUPS
from dsv4_operator.backends.pods.scheduling import Owner, PodRequests, Snapshot, owner_of, pod_requests, readable
from dsv4_operator.builders import member
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import NODES, Client, KubeReader, NodeCache, OwnedCache, PodCache, Resource

_DEFAULT_POLICY = ClusterPolicy()

_RESERVED_SECONDS = 15.0
"""Duration of the reservation of a plan's nodes until its pods are created; a status is written before."""
_KNOWN = 4096
"""Deployments whose policy violations are remembered."""
_MADE_SECONDS = 60.0
"""Time after which a pod that was to be created must have been observed: requests take 30 s at most."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Resources reserved for members of one group whose pods were not observed yet."""

    pods: Mapping[str, PodRequests]
    """By name of the pod."""
    until: float
    """Monotonic time."""
    held_for: int = 0
    """Incarnation for which the nodes are held while the one before it ends; 0: none."""


class Cluster:
    """One cluster, shared by all deployments of an operator."""

    def __init__(
        self,
        kube: Client,
        pods: PodCache,
        *,
        runtime_image: str,
        policy: ClusterPolicy = _DEFAULT_POLICY,
        owned: OwnedCache | None = None,
        nodes: NodeCache | None = None,
        in_cluster: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        kube: the API server.
        pods: cache of the pods in the watched namespaces. Pods elsewhere are unknown, and only the scheduler detects
            that a node is full.
        runtime_image: image of members and gateways of deployments that name none.
        policy: limits on the use of nodes by deployments.
        owned: cache of the other owned objects; None: only changes of the wanted objects are written.
        nodes: cache of the cordoned nodes; None: no group moves away from them.
        in_cluster: whether this process is a pod of the cluster, so that names of Services resolve.
        variables: see `Host.variables`.
        """
        self.in_cluster = in_cluster
        self.variables = variables or {}
        self.kube: KubeReader = kube
        self.client = kube
        """Only for the construction of `OwnedObjects`; no other code writes."""
        self.objects = OwnedObjects(kube, owned)
        self.owned = owned
        self.pods = pods
        self._nodes = nodes
        self._host = member.Host(policy, runtime_image, self.variables)
        self._snapshot = Snapshot((), ())
        self._requests: dict[str, tuple[str, PodRequests | None]] = {}
        """By uid of the pod: resource version and requests, because parsing quantities is expensive."""
        self._reserved: dict[Owner, _Reserved] = {}
        self.reservations = 0
        """Number of reservations so far: nodes that were chosen before the latest one may be taken."""
        self._snapshot_time: float | None = None
        self._forbidden: dict[str, tuple[DSV4Deployment, tuple[Finding, ...]]] = {}
        """Latest object and violations of each deployment, by its uid."""
        self.scheduling = asyncio.Lock()
        """Held from a snapshot until its result is reserved: two groups must not take the same nodes."""

    @property
    def pod_groups(self) -> tuple[Resource, ...]:
        """Return the pod groups that the administrator allows, and the operator may delete."""
        return tuple(POD_GROUPS[one] for one in self._host.policy.schedulers if one in POD_GROUPS)

    def image(self, deployment: DSV4Deployment) -> str:
        """Return the image of the gateways and members of `deployment`.

        Raises:
            BackendError: neither it nor the operator names one.
        """
        return deployment.spec.engine.image or self.host(deployment).runtime_image

    def host(self, deployment: DSV4Deployment) -> member.Host:
        """Return the limits of the members of `deployment` on their nodes.

        Raises:
            BackendError: the policy forbids the deployment, or it needs an image that the operator does not have.
        """
        if forbidden := self.forbidden(deployment):
            raise BackendError(joined(forbidden))
        if not self._host.runtime_image and deployment.spec.engine.image is None:
            raise BackendError(
                "spec.engine.image: is required, because the operator runs without --runtime-image; set one of them"
            )
        if not self._host.runtime_image and deployment.spec.storage.type is StorageType.HOST_PATH:
            raise BackendError(
                "spec.storage.type: HostPath requires the image of the operator, which prepares the directory, and the "
                "operator runs without --runtime-image; set it, or write EmptyDir"
            )
        return self._host

    def forbidden(self, deployment: DSV4Deployment) -> tuple[Finding, ...]:
        """Return the policy violations of `deployment`."""
        uid = deployment.metadata.uid or ""
        known = self._forbidden.get(uid)
        # Each reconcile asks several times about the same object.
        if known is None or known[0] is not deployment:
            if len(self._forbidden) >= _KNOWN:
                self._forbidden.clear()
            known = deployment, violations(deployment, self._host.policy, self._host.runtime_image)
            self._forbidden[uid] = known
        return known[1]

    async def snapshot(self, seconds: float, asked: float | None = None) -> Snapshot:
        """Return all nodes and pods, at most `seconds` older than the request. Must be called with `scheduling` held.

        Args:
            seconds: largest age.
            asked: monotonic time of the request, before `scheduling` was waited for: one list answers all requests that
                waited for it, however long it took; None: now.

        Raises:
            KubeError: the nodes cannot be listed.
        """
        asked = asked if asked is not None else time.monotonic()
        if self._snapshot_time is None or asked - self._snapshot_time > seconds:
            begun = time.monotonic()
            nodes = tuple(filter(readable, await self.kube.list(NODES)))
            self._snapshot = Snapshot(nodes, self._requests_of(self.pods.all()))
            self._snapshot_time = begun
            self._reserve({})
        return self._snapshot

    @property
    def latest(self) -> Snapshot:
        """Return the latest snapshot with all reservations since."""
        return self._snapshot

    def reserve(self, owner: Owner, pods: Iterable[PodRequests]) -> None:
        """Reserve the resources of a planned group's `pods`, which will be created soon."""
        self._reserve({owner: _Reserved(_by_name(pods), time.monotonic() + _RESERVED_SECONDS)})

    def hold(self, owner: Owner, pods: Iterable[PodRequests], incarnation: int, seconds: float) -> None:
        """Reserve the resources of `pods`, members of `incarnation`, while the incarnation before it ends."""
        self._reserve({owner: _Reserved(_by_name(pods), time.monotonic() + seconds, incarnation)})

    def is_cordoned(self, node: str | None) -> bool:
        """Return whether `node` accepts no new pods (`kubectl cordon`)."""
        return self._nodes is not None and bool(node) and bool(self._nodes.objects(str(node)))

    def reserve_made(self, pods: Iterable[Manifest]) -> None:
        """Count members of one group that are being created as existing, until they are observed."""
        requests = [found for pod in pods if (found := pod_requests(pod)) is not None]
        if requests:
            until = time.monotonic() + _MADE_SECONDS
            self._reserve({owner_of(requests[0].pod): _Reserved(_by_name(requests), until)})

    def release(self, owner: Owner, *, ended: int = 0) -> None:
        """Drop the reservation of a group that was not created, or whose incarnation `ended`; the next snapshot is read
        anew. Nodes that are held for a later incarnation stay reserved."""
        reserved = self._reserved.get(owner)
        if reserved is not None and not 0 < ended < reserved.held_for:
            del self._reserved[owner]
        self._snapshot_time = None

    def _reserve(self, more: Mapping[Owner, _Reserved]) -> None:
        now = time.monotonic()
        self.reservations += len(more)
        reserved = self._reserved | dict(more)
        self._reserved = {owner: one for owner, one in reserved.items() if one.until > now}
        self._snapshot = self._snapshot.expecting(
            pod for owner, one in self._reserved.items() for pod in self._unseen(owner, one)
        )

    def _unseen(self, owner: Owner, reserved: _Reserved) -> Iterator[PodRequests]:
        """Yield the pods of a reservation that need room beside the existing pods."""
        seen = self._snapshot.names_of(owner)
        # A node that a group keeps is not needed twice: its next member follows the present one there.
        kept = self._snapshot.nodes_of(owner) if reserved.held_for else frozenset()
        for name, pod in reserved.pods.items():
            if name not in seen and pod.node not in kept:
                yield pod

    def _requests_of(self, pods: Iterable[Manifest]) -> tuple[PodRequests, ...]:
        """Return the requests of `pods`, parsed again only for changed ones."""
        found: dict[str, tuple[str, PodRequests | None]] = {}
        for pod in pods:
            uid, version = str(pod["metadata"]["uid"]), str(pod["metadata"]["resourceVersion"])
            known = self._requests.get(uid)
            found[uid] = known if known is not None and known[0] == version else (version, pod_requests(pod))
        self._requests = found
        return tuple(requests for _, requests in found.values() if requests is not None)


def _by_name(pods: Iterable[PodRequests]) -> dict[str, PodRequests]:
    return {str(one.pod["metadata"]["name"]): one for one in pods}
