"""The Pods backend: one deployment's members as pods.

Nothing is remembered here that could not be seen again: an operator that was killed at any point goes on from the API
server. Whoever makes or ends pods looks there first, not into the cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, NodeLossPolicy
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import evidence, seats
from dsv4_operator.backends.pods.agents import Agents, fetch
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.front import Front
from dsv4_operator.backends.pods.observe import (
    incarnation_of,
    lost_since,
    members_of,
    observed,
    place_of,
    rank_of,
)
from dsv4_operator.backends.pods.rooms import Manifest, Snapshot, node_of
from dsv4_operator.backends.pods.token import token_of
from dsv4_operator.builders import group as objects
from dsv4_operator.builders import member, names, places
from dsv4_operator.kube import (
    CONFIG_MAPS,
    NODES,
    PODS,
    SERVICES,
    AlreadyExists,
    Conflict,
    Forbidden,
    KubeError,
    Resource,
)
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 2.0
"""How old a look at the nodes may be for a group that is formed."""
_STANDING_SECONDS = 300.0
"""And for groups whose members all stand: only a changed specification will ask."""
_FENCE_SLACK_SECONDS = 15.0
"""Beyond its grace period, until the kubelet has removed a pod and said so."""
_POLL_SECONDS = 0.25
_LIVE_SECONDS = 3.0
"""Between live looks while the cache still shows a pod that is being ended."""
_EVIDENCE_SECONDS = 10.0


class FenceError(BackendError):
    """Members could not be ended in time; the text says which, where, and what helps."""


class SeatTaken(BackendError):
    """The nodes of a plan have no room any more. Planning again finds others, or says why there are none."""


class PodsBackend:
    """Members of one deployment as pods."""

    def __init__(self, cluster: Cluster, *, changed: Callable[[], None]) -> None:
        """Args:
        cluster: shared by the backends of all deployments.
        changed: called when agents say something new, so that nobody has to wait for the next look.
        """
        self._cluster = cluster
        self._kube = cluster.kube
        self._changed = changed
        self._deployment: DSV4Deployment | None = None
        self._facts: tuple[int, float, Facts] | None = None
        """Generation, monotonic time and facts of the latest look."""
        self._token: str | None = None
        self._agents: dict[int, Agents] = {}
        self._ends: dict[int, dict[str, float]] = {}
        """By group, of pods by uid: Unix time at which their end was first seen."""
        self._front = Front(cluster)

    async def close(self) -> None:
        """Let go of connections; members are not touched."""
        await asyncio.gather(*(agents.close() for agents in self._agents.values()))
        self._agents.clear()

    async def ensure_front(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Make what users reach, Service and gateways, as `deployment` and `status` ask for; writes only what changed.

        Raises:
            KubeError: the API server refused it.
            FrontError: the specification cannot be kept to on a cluster.
        """
        await self._front.ensure(deployment, status)

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """See `Backend`."""
        self._deployment = deployment
        generation, now = deployment.metadata.generation, time.monotonic()
        patience = _STANDING_SECONDS if self._stands(deployment) else _FRESH_SECONDS
        if self._facts is not None and self._facts[0] == generation and now - self._facts[1] < patience:
            return self._facts[2]
        if deployment.spec.suspend or not deployment.spec.replicas:
            # Nothing will be planned.
            return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", seated={})
        try:
            async with self._cluster.seating:
                snapshot = await self._cluster.snapshot(_FRESH_SECONDS)
            found = seats.facts(deployment, snapshot)
        except Forbidden as error:
            found = replace(seats.facts(deployment, Snapshot((), ())), unfit=f"the operator may not look: {error}")
        self._facts = generation, now, found
        return found

    async def ensure(self, plan: GroupPlan) -> None:
        """See `Backend`.

        Raises:
            SeatTaken: the plan's nodes are taken meanwhile.
            BackendError: nobody names an image.
            KubeError: the API server refused an object.
        """
        deployment = self._known()
        image = self._cluster.image(deployment)
        key = GroupKey(plan.namespace, plan.deployment, plan.group)
        present = {rank_of(pod) for pod in await self._live(key, plan.incarnation)}
        missing = [rank for rank in range(len(plan.members)) if rank not in present]
        if not missing:
            return
        async with self._cluster.seating:
            if not present:
                problem = seats.shortage(deployment, plan, await self._cluster.snapshot(_FRESH_SECONDS))
                if problem is not None:
                    self._cluster.forget_look()
                    self._facts = None
                    raise SeatTaken(f"group {plan.group} is not formed yet: {problem}")
            plan = await self._written(deployment, plan, read=bool(present))
            pods = [member.member_pod(deployment, plan, rank, image=image) for rank in missing]
            self._cluster.took(pods)
        await token_of(self._kube, deployment)
        await _create(self._kube.create(objects.incarnation_service(deployment, plan)))
        # Before the pods: who comes late must not reach the head that was.
        await self._kube.apply(objects.head_service(deployment, plan))
        try:
            await asyncio.gather(*(_create(self._kube.create(pod)) for pod in pods))
        except KubeError:
            self._cluster.forget_look()
            raise
        await self._sweep(key, plan.incarnation)

    async def observe(self, key: GroupKey) -> Observed:
        """See `Backend`. Without a request: pods from the cache, agents as they were last heard."""
        pods = members_of(self._cluster.pods.pods(key.namespace, key.deployment, key.group))
        now = time.time()
        self._listen(key.group, pods)
        agents = self._agents.get(key.group)
        members, before, ends = [], self._ends.get(key.group, {}), {}
        for pod in pods:
            incarnation, uid = incarnation_of(pod), str(pod["metadata"]["uid"])
            formed = all(place_of(one) is not None for one in pods if incarnation_of(one) == incarnation)
            word = agents.word(rank_of(pod)) if agents is not None and agents.incarnation == incarnation else None
            seen = observed(pod, word, before.get(uid), now, formed=formed)
            if seen.ended_time is not None:
                ends[uid] = seen.ended_time
            members.append(seen)
        self._ends[key.group] = ends
        return Observed(key, tuple(members))

    async def fence(self, key: GroupKey, incarnation: int) -> None:
        """See `Backend`.

        A pod is gone when its kubelet has ended its processes and said so. A node that is lost says nothing, so its
        pods are removed by force once Kubernetes has called it not ready for `spec.recovery.nodeLoss.after`. Their
        processes may still run there, but they cannot join what comes next: its names, its plan and its Ray cluster
        are others than theirs, agents answer to their own incarnation only, a worker that is cut off from its head
        gives up after `HealthPolicy.link_lost`, and a kubelet that returns ends pods that the API server no longer has.

        Raises:
            FenceError: a pod is still there after its grace period.
            KubeError: the API server could not be asked.
        """
        began = time.monotonic()
        pods = await self._live(key, incarnation)
        grace = max((float(pod["spec"].get("terminationGracePeriodSeconds") or 0) for pod in pods), default=0.0)
        bound = grace + _FENCE_SLACK_SECONDS
        await asyncio.gather(*map(self._delete, pods))
        while left := await self._live(key, incarnation):
            lost = [pod for pod in left if await self._on_lost_node(pod)]
            for pod in lost:
                _log.warning("%s: its node %s is lost, so it is removed by force", _name(pod), node_of(pod))
                await self._delete(pod, grace_seconds=0)
            if time.monotonic() - began > bound:
                where = ", ".join(f"{_name(pod)} on {node_of(pod) or 'no node'}" for pod in left)
                raise FenceError(
                    f"incarnation {incarnation} of group {key.group} did not end within {bound:.0f} s: {where}; "
                    "if a node is gone, remove it from the cluster (kubectl delete node), or let "
                    "spec.recovery.nodeLoss replace it"
                )
            await self._until_changed(key, incarnation, len(left), time.monotonic() + _LIVE_SECONDS)
        self._cluster.forget_look()
        await self._remove(key, incarnation)

    async def collect_evidence(self, key: GroupKey, incarnation: int) -> str | None:
        """See `Backend`. A ConfigMap; the evidence of engines that were restarted in place is on the head's node."""
        deployment = self._known()
        members = [one for one in (await self.observe(key)).members if one.incarnation == incarnation]
        if not members:
            return None
        pods = {rank_of(pod): pod for pod in self._pods(key, key.group) if incarnation_of(pod) == incarnation}
        told = dict(zip(pods, await asyncio.gather(*map(self._told, pods.values())), strict=True))
        config = evidence.config(deployment, key.group, incarnation, _by_rank(members), told)
        await self._kube.apply(config)
        chosen = names.labels(key.deployment, component=names.EVIDENCE, group=key.group)
        kept = await self._kube.list(CONFIG_MAPS, key.namespace, labels=names.selector(chosen))
        for name in evidence.superfluous(kept):
            await self._kube.delete(CONFIG_MAPS, key.namespace, name)
        return f"configmap {key.namespace}/{config['metadata']['name']}"

    async def forget(self, key: GroupKey, incarnation: int) -> None:
        """See `Backend`."""
        for pod in await self._live(key, incarnation):
            await self._delete(pod)
        await self._remove(key, incarnation)

    # Looking.

    def _known(self) -> DSV4Deployment:
        if self._deployment is None:
            raise RuntimeError("facts() is called first in every turn")
        return self._deployment

    def _pods(self, key: GroupKey, group: int) -> list[Manifest]:
        return members_of(self._cluster.pods.pods(key.namespace, key.deployment, group))

    def _stands(self, deployment: DSV4Deployment) -> bool:
        """Whether every group has all its members, so that no node has to be found for any."""
        metadata = deployment.metadata
        size = deployment.spec.topology.nodes_per_group
        for group in range(deployment.spec.replicas):
            pods = self._pods(GroupKey(metadata.namespace, metadata.name, group), group)
            running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
            if len(running) != size or len({incarnation_of(pod) for pod in pods}) != 1:
                return False
        return True

    async def _live(self, key: GroupKey, incarnation: int) -> list[Manifest]:
        chosen = names.labels(key.deployment, component=names.MEMBER, group=key.group, incarnation=incarnation)
        return await self._kube.list(PODS, key.namespace, labels=names.selector(chosen))

    def _listen(self, group: int, pods: Iterable[Manifest]) -> None:
        """Follow the agents of the latest incarnation, and those of no other."""
        latest = max(map(incarnation_of, pods), default=None)
        agents = self._agents.get(group)
        if agents is not None and agents.incarnation != latest:
            del self._agents[group]
            agents.stop()
            agents = None
        if latest is None:
            return
        present = [pod for pod in pods if incarnation_of(pod) == latest]
        found = {rank_of(pod): place for pod in present if (place := place_of(pod)) is not None}
        if agents is None:
            agents = Agents(self._cluster.session, latest, self._secret, self._changed)
            self._agents[group] = agents
        agents.follow(found)

    async def _secret(self) -> str | None:
        """The token for agents; None while it cannot be had."""
        if self._token is None:
            try:
                self._token = await token_of(self._kube, self._known())
            except KubeError as error:
                _log.warning("the token of the agents cannot be had: %s", error)
        return self._token

    async def _told(self, pod: Manifest) -> bytes | None:
        place = place_of(pod)
        if place is None:
            return None
        return await fetch(self._cluster.session, f"{place.url}/v1/evidence", await self._secret(), _EVIDENCE_SECONDS)

    async def _on_lost_node(self, pod: Manifest) -> bool:
        """Whether the policy allows to remove `pod` without its kubelet's word."""
        policy = self._known().spec.recovery.node_loss
        name = pod["spec"].get("nodeName")
        if policy.policy is not NodeLossPolicy.REPLACE or name is None:
            return False
        now = time.time()
        since = lost_since(await self._kube.get(NODES, None, str(name)), now)
        return since is not None and now - since >= policy.after

    async def _until_changed(self, key: GroupKey, incarnation: int, count: int, deadline: float) -> None:
        """Wait until the cache shows fewer pods than `count`, or for the next live look."""
        while time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            if sum(incarnation_of(pod) == incarnation for pod in self._pods(key, key.group)) < count:
                return

    # Making and ending.

    async def _written(self, deployment: DSV4Deployment, plan: GroupPlan, *, read: bool) -> GroupPlan:
        """The plan as the members will have it.

        Args:
            deployment: owns it.
            plan: as it is now.
            read: whether a member may have read it, so that what was written first holds for the others too.
        """
        config = objects.plan_config(deployment, plan)
        if await _create(self._kube.create(config)):
            return plan
        name = names.incarnation_name(plan.deployment, plan.group, plan.incarnation)
        kept = await self._kube.get(CONFIG_MAPS, plan.namespace, name)
        if kept is not None and read:
            return GroupPlan.model_validate_json(kept["data"][places.PLAN_FILE])
        if kept is not None:
            await self._kube.delete(CONFIG_MAPS, plan.namespace, name, uid=kept["metadata"]["uid"])
        await self._kube.create(config)
        return plan

    async def _delete(self, pod: Manifest, *, grace_seconds: int | None = None) -> None:
        metadata = pod["metadata"]
        try:
            await self._kube.delete(
                PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace_seconds=grace_seconds
            )
        except Conflict:
            # Another pod of that name: this one is gone.
            return

    async def _remove(self, key: GroupKey, incarnation: int) -> None:
        """Remove the names and the plan of an incarnation that has ended."""
        name = names.incarnation_name(key.deployment, key.group, incarnation)
        await asyncio.gather(
            self._kube.delete(SERVICES, key.namespace, name), self._kube.delete(CONFIG_MAPS, key.namespace, name)
        )

    async def _sweep(self, key: GroupKey, incarnation: int) -> None:
        """Remove what earlier incarnations left, whose ends were cut short by the end of an operator."""
        chosen = names.labels(key.deployment, group=key.group)
        query = f"{names.selector(chosen)},{names.INCARNATION},{names.COMPONENT}!={names.EVIDENCE}"
        for resource in (SERVICES, CONFIG_MAPS):
            await self._sweep_of(resource, key, query, incarnation)

    async def _sweep_of(self, resource: Resource, key: GroupKey, query: str, incarnation: int) -> None:
        for one in await self._kube.list(resource, key.namespace, labels=query):
            if incarnation_of(one) < incarnation:
                metadata = one["metadata"]
                await self._kube.delete(resource, key.namespace, metadata["name"], uid=metadata["uid"])


async def _create(request: Coroutine[Any, Any, Manifest]) -> bool:
    """Whether the object was made; one of its name that is there already is the same by its name."""
    try:
        await request
    except AlreadyExists:
        return False
    return True


def _by_rank(members: Iterable[ObservedMember]) -> list[ObservedMember]:
    return sorted(members, key=lambda one: one.rank)


def _name(pod: Manifest) -> str:
    return f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
