"""The Pods backend: one deployment's members as pods.

Nothing is remembered here that could not be seen again: an operator that was killed at any point goes on from the API
server. Whoever makes or ends pods looks there first, not into the cache.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from dsv4_operator.api import DeploymentStatus, DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import evidence, seats
from dsv4_operator.backends.pods.agents import Agents, drain, fetch
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.ends import Ends
from dsv4_operator.backends.pods.front import Front
from dsv4_operator.backends.pods.observe import (
    incarnation_of,
    members_of,
    observed,
    place_of,
    rank_of,
)
from dsv4_operator.backends.pods.rooms import Manifest, Owner, Snapshot
from dsv4_operator.backends.pods.token import token_of
from dsv4_operator.builders import group as objects
from dsv4_operator.builders import member, names, places
from dsv4_operator.kube import (
    CONFIG_MAPS,
    AlreadyExists,
    Forbidden,
    KubeError,
)
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning import revision
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.contract import GroupPlan

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 2.0
"""How old a look at the nodes may be for a group that is formed."""
_STANDING_SECONDS = 300.0
"""And for groups whose members all stand: only a changed specification will ask."""
_EVIDENCE_SECONDS = 10.0
_SHOW_SECONDS = 2.0
"""Until the cache shows members that were made; before, there is no need to make them again."""
_TOKEN_SECONDS = 60.0
"""For which a token is believed to be there that was."""


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
        self._facts: dict[str, tuple[int, float, Facts]] = {}
        """By revision: generation, monotonic time and facts of the latest look."""
        self._token: str | None = None
        self._token_time = -math.inf
        """Monotonic time at which the API server had it."""
        self._agents: dict[int, Agents] = {}
        self._ends: dict[int, dict[str, float]] = {}
        """By group, of pods by uid: Unix time at which their end was first seen."""
        self._made: dict[int, tuple[int, float]] = {}
        """By group, the incarnation whose members were made last, and monotonic time."""
        self._front = Front(cluster, self._tokened)
        self._ending = Ends(cluster)

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
        version = revision(deployment)
        known = self._facts.get(version)
        if known is not None and known[0] == generation and now - known[1] < patience:
            return known[2]
        if deployment.spec.suspend or not deployment.spec.replicas:
            # Nothing will be planned.
            return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", seated={})
        try:
            async with self._cluster.seating:
                snapshot = await self._cluster.snapshot(_FRESH_SECONDS)
                found = seats.facts(deployment, snapshot)
        except Forbidden as error:
            found = replace(seats.facts(deployment, Snapshot((), ())), unfit=f"the operator may not look: {error}")
        # Of other versions as long as they are asked for: two while groups go from one to the other.
        recent = {name: one for name, one in self._facts.items() if now - one[1] < _STANDING_SECONDS}
        self._facts = {**recent, version: (generation, now, found)}
        return found

    def hold(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """Keep the seats of `plan`, made from `deployment`, which is to be formed soon: no other group gets them."""
        owner = plan.namespace, plan.deployment, str(plan.group)
        self._cluster.hold(owner, seats.stand_ins(deployment, plan))

    async def ensure(self, plan: GroupPlan, deployment: DSV4Deployment | None = None) -> None:
        """See `Backend`.

        Raises:
            SeatTaken: the plan's nodes are taken meanwhile.
            BackendError: nobody names an image.
            KubeError: the API server refused an object.
        """
        deployment = deployment or self._known()
        image = self._cluster.image(deployment)
        key = GroupKey(plan.namespace, plan.deployment, plan.group)
        shown = any(incarnation_of(pod) == plan.incarnation for pod in self._pods(key, key.group))
        incarnation, when = self._made.get(plan.group, (0, -math.inf))
        if not shown and incarnation == plan.incarnation and time.monotonic() - when < _SHOW_SECONDS:
            # The cache is late.
            return
        present = await self._ranks(key, plan.incarnation) if shown else frozenset()
        if len(present) == len(plan.members):
            return
        if not present:
            await self._take_seats(deployment, plan, image)
        if not await _create(self._kube.create(objects.plan_config(deployment, plan))):
            # An earlier try came so far. Where it was the first to write the plan, nobody could have made members.
            present = await self._ranks(key, plan.incarnation)
            plan = await self._kept(deployment, plan, read=bool(present))
        missing = [rank for rank in range(len(plan.members)) if rank not in present]
        pods = [member.member_pod(deployment, plan, rank, image=image) for rank in missing]
        self._cluster.took(pods)
        try:
            await asyncio.gather(
                self._tokened(),
                _create(self._kube.create(objects.incarnation_service(deployment, plan))),
                # Before the pods: who comes late must not reach the head that was.
                self._kube.apply(objects.head_service(deployment, plan)),
            )
            await asyncio.gather(*(_create(self._kube.create(pod)) for pod in pods))
        except KubeError:
            self._cluster.let_go(_owner(key))
            raise
        self._made[plan.group] = plan.incarnation, time.monotonic()
        if plan.incarnation > 1:
            await self._ending.sweep(key, plan.incarnation)

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

    async def drain(self, key: GroupKey, incarnation: int, seconds: float) -> bool:
        """See `Backend`."""
        pods = [pod for pod in self._pods(key, key.group) if (incarnation_of(pod), rank_of(pod)) == (incarnation, 0)]
        head = place_of(pods[0]) if pods else None
        return head is not None and await drain(self._cluster.session, head, await self._secret(), seconds)

    async def fence(self, key: GroupKey, incarnation: int) -> None:
        """See `Backend` and `Ends.fence`."""
        await self._ending.fence(key, incarnation, self._known().spec.recovery.node_loss)
        self._cluster.let_go(_owner(key))

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
        await self._ending.forget(key, incarnation)

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

    async def _ranks(self, key: GroupKey, incarnation: int) -> frozenset[int]:
        """Of the members that the API server has."""
        return frozenset(rank_of(pod) for pod in await self._ending.live(key, incarnation))

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

    async def _tokened(self) -> str:
        """The token, which the API server has as far as was just seen: who needs it makes it if it is gone."""
        if self._token is None or time.monotonic() - self._token_time > _TOKEN_SECONDS:
            self._token = await token_of(self._kube, self._known())
            self._token_time = time.monotonic()
        return self._token

    async def _secret(self) -> str | None:
        """The token for agents; None while it cannot be had."""
        try:
            return self._token if self._token is not None else await self._tokened()
        except KubeError as error:
            _log.warning("the token of the agents cannot be had: %s", error)
            return None

    async def _told(self, pod: Manifest) -> bytes | None:
        place = place_of(pod)
        if place is None:
            return None
        return await fetch(self._cluster.session, f"{place.url}/v1/evidence", await self._secret(), _EVIDENCE_SECONDS)

    # Making.

    async def _take_seats(self, deployment: DSV4Deployment, plan: GroupPlan, image: str) -> None:
        """Keep the nodes of `plan` for its members, if they have room for all of them.

        Raises:
            SeatTaken: they have not.
        """
        owner = plan.namespace, plan.deployment, str(plan.group)
        async with self._cluster.seating:
            problem = seats.shortage(deployment, plan, await self._cluster.snapshot(_FRESH_SECONDS))
            if problem is not None:
                self._cluster.let_go(owner)
                self._facts = {}
                raise SeatTaken(f"group {plan.group} is not formed yet: {problem}")
            ranks = range(len(plan.members))
            self._cluster.took(member.member_pod(deployment, plan, rank, image=image) for rank in ranks)

    async def _kept(self, deployment: DSV4Deployment, plan: GroupPlan, *, read: bool) -> GroupPlan:
        """The plan as the members will have it, where one was written before.

        Args:
            deployment: owns it.
            plan: as it is now.
            read: whether a member may have read it, so that what was written first holds for the others too.
        """
        name = names.incarnation_name(plan.deployment, plan.group, plan.incarnation)
        kept = await self._kube.get(CONFIG_MAPS, plan.namespace, name)
        if kept is not None and read:
            return GroupPlan.model_validate_json(kept["data"][places.PLAN_FILE])
        if kept is not None:
            await self._kube.delete(CONFIG_MAPS, plan.namespace, name, uid=kept["metadata"]["uid"])
        await self._kube.create(objects.plan_config(deployment, plan))
        return plan


async def _create(request: Coroutine[Any, Any, Manifest]) -> bool:
    """Whether the object was made; one of its name that is there already is the same by its name."""
    try:
        await request
    except AlreadyExists:
        return False
    return True


def _by_rank(members: Iterable[ObservedMember]) -> list[ObservedMember]:
    return sorted(members, key=lambda one: one.rank)


def _owner(key: GroupKey) -> Owner:
    return key.namespace, key.deployment, str(key.group)
