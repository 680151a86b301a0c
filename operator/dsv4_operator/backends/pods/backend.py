"""The Pods backend: the members of every deployment as pods.

Nothing in memory is needed that could not be observed again: a restarted operator continues from the API server.
Operations that create or end pods read the API server, not the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, Finding, GroupStatus, Reason
from dsv4_operator.api.spec import MOST_REPLICAS
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import scheduling
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.fencing import Fencer, RayClusterFencer, is_held
from dsv4_operator.backends.pods.frontend import (
    Frontends,
    TokenKeys,
    last_removed,
    move_head,
    require_secrets,
    routed_groups,
)
from dsv4_operator.backends.pods.gateways import Balance, Canaries, Reported
from dsv4_operator.backends.pods.observe import (
    AgentWatch,
    Member,
    endpoint_of,
    evidence_config,
    member_of,
    observed,
    superfluous_evidence,
    time_of,
    wrong_labels,
)
from dsv4_operator.backends.pods.ownership import gather_all
from dsv4_operator.backends.pods.podgroups import PodGroups
from dsv4_operator.backends.pods.scheduling import Owner, Snapshot
from dsv4_operator.builders import member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import CONFIG_MAPS, Conflict, Forbidden, Invalid, KubeError, NotFound, Unavailable
from dsv4_operator.kube.cache import GATEWAYS, PodKey, RayClusterCache
from dsv4_operator.lifecycle.decide import REFUSED_SECONDS
from dsv4_operator.lifecycle.observed import GroupKey, Observed
from dsv4_operator.planning import revision
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.util.clock import unix_time

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 2.0
"""Maximum age of the node data for a group that is being formed."""
_COMPLETE_SECONDS = 300.0
"""Maximum age for groups with all their members: only a changed specification needs new nodes."""
_CORDONED_SECONDS = 5.0
"""Maximum age for groups with members on cordoned nodes, which wait for free ones."""
_SHORT_SECONDS = REFUSED_SECONDS
"""Maximum age where too few nodes fit: a changed specification waits for more of them."""
_ENDING_SECONDS = 120.0
"""Time from the end of a drain until the next incarnation is claimed, at most."""
_SHOW_SECONDS = 2.0
"""Time until the cache contains new members; within it they are not created again."""
_MADE_BY_KUBERAY_SECONDS = 15.0
"""Time in which KubeRay makes the pods of a RayCluster, normally less than a second."""
_UNKNOWN_FIELD = "unknown field"
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_EVIDENCE_PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to save evidence."""


class KubeRayUnavailable(BackendError):
    """KubeRay is not in the cluster, is too old, or makes no pods; the text contains the remedy."""

    reason = Reason.KUBERAY_UNAVAILABLE


class NodesTaken(BackendError):
    """The nodes of a plan have no free resources any more. A new plan finds others, or contains the reason."""


@dataclass(slots=True)
class _GroupCache:
    """Cached data of one group. Its loss costs a few requests, and resets the times of ends."""

    agents: AgentWatch | None = None
    seen: dict[str, float] = field(default_factory=dict)
    """Unix time of the first observation of each pod, by uid."""
    ended: dict[str, float] = field(default_factory=dict)
    """Unix time at which the end of each pod was first observed, by uid."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Node of the latest member of each rank."""
    made: tuple[int, float] = (0, -math.inf)
    """Incarnation whose members were created last, and the monotonic time."""


@dataclass(frozen=True, slots=True)
class _KnownFacts:
    generation: int
    time: float
    """Monotonic time."""
    cordoned: frozenset[str]
    """Cordoned nodes of the members."""
    facts: Facts
    reservations: int | None
    """`Cluster.reservations` at that time; None: the nodes could not be listed."""


class PodsBackend:
    """Members as pods; see `Backend`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        changed: Callable[[str, str], None],
        reported: Reported = lambda namespace, name, report: None,
    ) -> None:
        """Args:
        cluster: shared state of the cluster.
        changed: called with namespace and name of a deployment after a new report of its agents.
        reported: called with each report of a gateway.
        """
        self._cluster = cluster
        self._kube = cluster.kube
        self._objects = cluster.objects
        self._changed = changed
        self._agents = AgentClient()
        self._keys = TokenKeys(cluster.client)
        self._fencer = Fencer(cluster.client, pod_groups=cluster.pod_groups)
        self._pod_groups = PodGroups(cluster.client, changed)
        self._groups: dict[GroupKey, _GroupCache] = {}
        self._facts: dict[tuple[str, str], dict[str, _KnownFacts]] = {}
        """By deployment and revision."""
        self._frontends = Frontends(cluster, self._keys, lambda *about: self._fencer.sweep_ended(*about))
        self._canaries = Canaries(
            self._keys.of,
            self._gateway_pods,
            through_service=cluster.in_cluster,
            changed=changed,
            reported=reported,
        )
        self._balance = Balance(cluster, self._gateway_pods)

    async def close(self) -> None:
        """See `Backend`."""
        for key in list(self._groups):
            await self._drop(key)
        await self._fencer.close()
        await self._pod_groups.close()
        await self._canaries.close()
        await self._agents.close()

    async def release(self, namespace: str, name: str) -> None:
        """See `Backend`."""
        for key in [key for key in self._groups if (key.namespace, key.deployment) == (namespace, name)]:
            self._cluster.release(_owner(key))
            await self._drop(key)
        self._facts.pop((namespace, name), None)
        self._frontends.release(namespace, name)
        self._canaries.release(namespace, name)
        self._balance.release(namespace, name)
        self._keys.release(namespace, name)
        self._fencer.release(namespace, name)

    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """See `Backend`.

        Raises:
            KubeError: the API server refused it.
        """
        if self._cluster.forbidden(deployment):
            # The plan is refused with the reason; existing objects are not changed.
            return
        await self._frontends.ensure(deployment, status)
        await self._end_late(deployment, status)
        await self._balance.rebalance(deployment, status)

    async def _end_late(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """End members of removed groups: the API server may create one long after the request, which got no answer."""
        first = routed_groups(deployment, status)
        removed = last_removed(status, first)
        for group in range(first, MOST_REPLICAS) if removed else ():
            for incarnation in {one.incarnation for one in self._members(deployment, group)}:
                if incarnation <= removed:
                    await self.fence(deployment, group, incarnation)

    def endpoint_problem(self, deployment: DSV4Deployment, groups: Sequence[GroupStatus]) -> str | None:
        """See `Backend` and `Canaries.problem`."""
        return self._canaries.problem(deployment, groups)

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """See `Backend`."""
        generation, now = deployment.metadata.generation, time.monotonic()
        cordoned = self._cordoned(deployment)
        max_age = _CORDONED_SECONDS if cordoned else _COMPLETE_SECONDS
        if not self._is_complete(deployment):
            max_age = _FRESH_SECONDS
        version, name = revision(deployment), (deployment.metadata.namespace, deployment.metadata.name)
        known = self._facts.get(name, {})
        latest = known.get(version)
        size = deployment.spec.topology.nodes_per_group
        if latest is not None and any(len(nodes) < size for nodes in (latest.facts.placed or {}).values()):
            max_age = min(max_age, _SHORT_SECONDS)
        is_new = latest is None or latest.cordoned != cordoned
        if latest is not None and latest.generation == generation and now - latest.time < max_age and not is_new:
            return latest.facts
        if deployment.spec.suspend or not deployment.spec.replicas:
            # Nothing will be planned.
            return _no_machines()
        if forbidden := self._cluster.forbidden(deployment):
            return _no_machines(forbidden)
        if deployment.spec.topology.scheduler is not None:
            return scheduling.unplaced_facts(deployment)
        try:
            async with self._cluster.scheduling:
                # A node that was cordoned just now is listed as such.
                snapshot = await self._cluster.snapshot(0.0 if cordoned and is_new else _FRESH_SECONDS, now)
                found = scheduling.facts(deployment, snapshot, self._former_nodes(deployment))
                reservations: int | None = self._cluster.reservations
        except Forbidden as error:
            found = replace(
                scheduling.facts(deployment, Snapshot((), ())),
                unfit=f"grant the operator permission to list nodes and pods: {error}",
            )
            reservations = None
        # Other versions while they are in use: two during a rollout.
        recent = {other: one for other, one in known.items() if now - one.time < _COMPLETE_SECONDS}
        self._facts[name] = {**recent, version: _KnownFacts(generation, now, cordoned, found, reservations)}
        return found

    def refresh(self, deployment: DSV4Deployment, facts: Facts) -> Facts:
        """See `Backend`. Between `facts` and the plan, all other groups that choose nodes may have done so: without
        this, many groups that are formed at once choose the same nodes."""
        name, version = (deployment.metadata.namespace, deployment.metadata.name), revision(deployment)
        known = self._facts.get(name, {}).get(version)
        if known is None or known.reservations is None or deployment.spec.topology.scheduler is not None:
            return facts
        if not facts.placed or known.reservations == self._cluster.reservations:
            return facts
        found = scheduling.facts(deployment, self._cluster.latest, self._former_nodes(deployment))
        self._facts[name][version] = replace(known, facts=found, reservations=self._cluster.reservations)
        return found

    def reserve(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `Backend`. A scheduler reserves nodes itself."""
        if deployment.spec.topology.scheduler is not None:
            return
        self._cluster.reserve(_owner(GroupKey.of(deployment, plan.group)), scheduling.stand_ins(deployment, plan))

    async def hold(self, deployment: DSV4Deployment, plan: GroupPlan) -> bool:
        """See `Backend`.

        Raises:
            KubeError: the nodes cannot be listed.
        """
        key, asked = GroupKey.of(deployment, plan.group), time.monotonic()
        async with self._cluster.scheduling:
            snapshot = await self._cluster.snapshot(_FRESH_SECONDS, asked)
            if scheduling.shortage(deployment, plan, snapshot) is not None:
                self._cluster.release(_owner(key))
                self._facts.pop((key.namespace, key.deployment), None)
                return False
            seconds = deployment.spec.engine.timeouts.drain + _ENDING_SECONDS
            self._cluster.hold(_owner(key), scheduling.stand_ins(deployment, plan), plan.incarnation, seconds)
        return True

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `Backend`.

        Raises:
            NodesTaken: the plan's nodes were taken meanwhile.
            Superseded: a later incarnation was formed meanwhile.
            ForeignObject: an object with a needed name belongs to another owner.
            ObjectTerminating: an object with a needed name is still being removed.
            SchedulerMissing: the scheduler of the specification, or its queue, is not in the cluster.
            BackendError: the policy forbids the deployment, no image is set, or a Secret is missing.
            KubeError: the API server refused an object.
        """
        host = self._cluster.host(deployment)
        key = GroupKey.of(deployment, plan.group)
        shown = any(one.incarnation == plan.incarnation for one in self._members(deployment, plan.group))
        incarnation, when = self._group(key).made
        if not shown and incarnation == plan.incarnation and time.monotonic() - when < _SHOW_SECONDS:
            # The cache lags behind.
            return
        present = await self._ranks(deployment, plan.group, plan.incarnation) if shown else frozenset()
        if len(present) == len(plan.members):
            return
        if not present:
            await require_secrets(self._kube, deployment)
            if deployment.spec.topology.scheduler is None:
                await self._reserve_nodes(deployment, plan, host)
        with self._frontends.writing(key.namespace, key.deployment):
            try:
                pods = await self._prepare(deployment, plan, host, present)
            except BaseException:
                # No member exists, so the nodes are not needed.
                self._cluster.release(_owner(key))
                raise
            self._cluster.reserve_made(pods)
            made = await self._create(deployment, plan, pods)
            problems = [one for one in made if isinstance(one, BaseException)]
            if problems:
                self._cluster.release(_owner(key))
                # The other members exist; one whose request got no answer may exist.
                there = (bool, Unavailable)
                self._cluster.reserve_made(pod for pod, one in zip(pods, made, strict=True) if isinstance(one, there))
                raise problems[0]
        self._group(key).made = plan.incarnation, time.monotonic()
        if plan.incarnation > 1:
            await self._fencer.sweep(key, plan.incarnation)

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        """See `Backend`. Without a request: pods from the cache, the latest reports of agents."""
        key = GroupKey.of(deployment, group)
        found, now = self._members(deployment, group), unix_time()
        known = self._group(key)
        self._follow(deployment, known, found)
        # Waits begin once a scheduler has chosen a node.
        known.nodes |= _nodes_of_latest(found)
        queued = {one.uid for one in found if member.is_queued(one.pod)}
        known.seen = {one.uid: now if one.uid in queued else known.seen.get(one.uid, now) for one in found}
        if known.agents is not None and (shortage := known.agents.shortage) is not None:
            raise BackendError(f"its agents cannot be queried: {shortage}")
        latest = max((one.incarnation for one in found), default=0)
        reason = self._pod_groups.reason(deployment, group, latest) if queued else ""
        if not queued:
            self._pod_groups.release(key)
        members, ended = [], {}
        for one in found:
            formed = all(endpoint_of(other.pod) is not None for other in found if other.incarnation == one.incarnation)
            heard = known.agents is not None and known.agents.incarnation == one.incarnation
            report = known.agents.report(one.rank) if known.agents is not None and heard else None
            seen = observed(
                one,
                report,
                known.ended.get(one.uid),
                now,
                since=known.seen[one.uid],
                formed=formed,
                queue_reason=reason if one.incarnation == latest else "",
            )
            if seen.ended_time is not None:
                ended[one.uid] = seen.ended_time
            members.append(replace(seen, cordoned=self._cluster.is_cordoned(seen.node)))
        known.ended = ended
        anomalies = self._anomalies(deployment, group, found)
        used = self._used_incarnation(key)
        return Observed(key, tuple(members), used_incarnation=used, anomalies=anomalies, silence_is_event=True)

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        """See `Backend`."""
        members = self._members(deployment, group)
        head = next((one for one in members if (one.incarnation, one.rank) == (incarnation, 0)), None)
        endpoint = endpoint_of(head.pod) if head is not None else None
        if endpoint is None:
            return True
        return await self._agents.drain(endpoint.url, await self._keys.of(deployment), seconds)

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        """See `Backend` and `Fencer.fence`."""
        key = GroupKey.of(deployment, group)
        seen = self._seen(deployment, group, incarnation)
        over = await self._fencer.fence(key, incarnation, deployment.spec.recovery.node_loss, seen)
        if over:
            goes = deployment.spec.suspend or group >= deployment.spec.replicas
            self._cluster.release(_owner(key), ended=0 if goes else incarnation)
        return over

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        """See `Backend`. A ConfigMap; the evidence of engines that were restarted in place is on the head's node."""
        key = GroupKey.of(deployment, group)
        members = [one for one in (await self.observe(deployment, group)).members if one.incarnation == incarnation]
        if not members:
            return None
        found = self._members(deployment, group)
        pods = {one.rank: one.pod for one in found if one.incarnation == incarnation}
        token_key = await self._keys.of(deployment)
        answers = await asyncio.gather(*(self._evidence(pod, token_key) for pod in pods.values()))
        answers_by_rank = dict(zip(pods, answers, strict=True))
        ordered = sorted(members, key=lambda one: one.rank)
        config = evidence_config(deployment, group, incarnation, ordered, answers_by_rank)
        await self._save_evidence(config)
        try:
            await self._trim_evidence(key)
        except KubeError as error:
            # The next collection repeats it.
            _log.warning("old evidence was not removed: %s", error)
        return f"configmap {key.namespace}/{config['metadata']['name']}"

    async def _save_evidence(self, config: Manifest) -> None:
        """Save the evidence, also if some requests fail: the members are ended next, and nothing can be asked again."""
        for pause in _EVIDENCE_PAUSES:
            try:
                await self._objects.apply(config)
            except (Unavailable, Conflict) as error:
                _log.warning("evidence is not saved yet: %s", error)
                await asyncio.sleep(pause)
            else:
                return
        await self._objects.apply(config)

    async def _trim_evidence(self, key: GroupKey) -> None:
        chosen = names.labels(key.deployment, component=names.EVIDENCE, group=key.group)
        kept = await self._kube.list(CONFIG_MAPS, key.namespace, labels=names.selector(chosen))
        for one in superfluous_evidence([one for one in kept if names.belongs(one, key.uid)]):
            await self._objects.delete(CONFIG_MAPS, one, key.uid)

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        """See `Backend`."""
        seen = self._seen(deployment, group, incarnation)
        await self._fencer.forget(GroupKey.of(deployment, group), incarnation, seen)

    # Observation.

    def _group(self, key: GroupKey) -> _GroupCache:
        return self._groups.setdefault(key, _GroupCache())

    async def _drop(self, key: GroupKey) -> None:
        known = self._groups.pop(key)
        self._pod_groups.release(key)
        if known.agents is not None:
            await known.agents.close()

    def _members(self, deployment: DSV4Deployment, group: int) -> list[Member]:
        """Return the members of one group, of every incarnation, from the cache."""
        metadata = deployment.metadata
        pods = self._cluster.pods.pods(metadata.namespace, metadata.name, group)
        found = (member_of(pod, metadata.name, group, metadata.uid) for pod in pods)
        return [one for one in found if isinstance(one, Member)]

    def _anomalies(self, deployment: DSV4Deployment, group: int, members: Iterable[Member]) -> tuple[str, ...]:
        """Return the problems of pods with the group's labels or names."""
        metadata = deployment.metadata
        # Pods of an earlier deployment of this name are expected while they terminate.
        pods = [
            pod
            for pod in self._cluster.pods.pods(metadata.namespace, metadata.name, group)
            if names.belongs(pod, metadata.uid) or (names.controller_of(pod) or {}).get("name") != metadata.name
        ]
        ignored = [one for pod in pods if isinstance(one := member_of(pod, metadata.name, group, metadata.uid), str)]
        labels = [text for one in members if (text := wrong_labels(one, metadata.name, group)) is not None]
        return tuple(sorted((*ignored, *labels)))

    def _seen(self, deployment: DSV4Deployment, group: int, incarnation: int) -> list[str]:
        members = self._members(deployment, group)
        return [str(one.pod["metadata"]["name"]) for one in members if one.incarnation == incarnation]

    def _used_incarnation(self, key: GroupKey) -> int:
        """Return `Observed.used_incarnation`; pods keep their names until kubelets end them, on a lost node forever."""
        pods = self._cluster.pods.pods(key.namespace, key.deployment, key.group)
        others = (names.parse_member_name(pod["metadata"]["name"]) for pod in pods if not names.belongs(pod, key.uid))
        return max((one[2] for one in others if one is not None and one[:2] == (key.deployment, key.group)), default=0)

    def _gateway_pods(self, namespace: str, name: str) -> list[Manifest]:
        return self._cluster.pods.pods(namespace, name, GATEWAYS)

    def _is_complete(self, deployment: DSV4Deployment) -> bool:
        """Return whether every group has all its members, so that no new node is needed."""
        size = deployment.spec.topology.nodes_per_group
        for group in range(deployment.spec.replicas):
            members = self._members(deployment, group)
            alive = [one for one in members if not scheduling.has_ended(one.pod) and not _is_deleted(one.pod)]
            if len(alive) != size or len({one.incarnation for one in members}) != 1:
                return False
        return True

    def _cordoned(self, deployment: DSV4Deployment) -> frozenset[str]:
        """Return the cordoned nodes of the members."""
        groups = range(deployment.spec.replicas)
        nodes = {scheduling.node_of(one.pod) for group in groups for one in self._members(deployment, group)}
        return frozenset(node for node in nodes if node is not None and self._cluster.is_cordoned(node))

    def _former_nodes(self, deployment: DSV4Deployment) -> scheduling.Places:
        """Return the nodes of the latest members of each group; ended pods are not among those of a snapshot."""
        groups = range(deployment.spec.replicas)
        known = {group: self._groups.get(GroupKey.of(deployment, group)) for group in groups}
        return {group: one.nodes for group, one in known.items() if one is not None}

    async def _ranks(self, deployment: DSV4Deployment, group: int, incarnation: int) -> frozenset[int]:
        metadata = deployment.metadata
        pods = await self._fencer.live(GroupKey.of(deployment, group), incarnation)
        found = (member_of(pod, metadata.name, group, metadata.uid) for pod in pods)
        return frozenset(one.rank for one in found if isinstance(one, Member))

    def _follow(self, deployment: DSV4Deployment, known: _GroupCache, members: Iterable[Member]) -> None:
        """Watch the agents of the latest incarnation only."""
        latest = max((one.incarnation for one in members), default=None)
        if known.agents is not None and known.agents.incarnation != latest:
            known.agents.stop()
            known.agents = None
        if latest is None:
            return
        if known.agents is None:
            name = deployment.metadata.namespace, deployment.metadata.name
            token_key = functools.partial(self._keys.of, deployment)
            known.agents = AgentWatch(self._agents, latest, token_key, functools.partial(self._changed, *name))
        present = [one for one in members if one.incarnation == latest]
        known.agents.follow({one.rank: found for one in present if (found := endpoint_of(one.pod)) is not None})

    async def _evidence(self, pod: Manifest, token_key: str | None) -> bytes | None:
        endpoint = endpoint_of(pod)
        with contextlib.suppress(*AGENT_ERRORS):
            return await self._agents.evidence(endpoint.url, token_key) if endpoint is not None else None
        return None

    # Creation.

    async def _create(
        self, deployment: DSV4Deployment, plan: GroupPlan, pods: Sequence[Manifest]
    ) -> list[bool | BaseException]:
        """Create `pods`, the missing ones of the plan; return the result or the error for each."""
        return await asyncio.gather(*(self._objects.create(pod) for pod in pods), return_exceptions=True)

    async def _prepare(
        self, deployment: DSV4Deployment, plan: GroupPlan, host: member.Host, present: frozenset[int]
    ) -> list[Manifest]:
        """Create the objects that members mount or are found by; return the pods of the missing members."""
        # First: a late operator must neither reach the present head nor form members itself.
        await move_head(self._objects, deployment, plan.group, plan.incarnation)
        if not await self._objects.create(member.plan_config(deployment, plan)):
            # An earlier attempt wrote the plan. Without members of that attempt, the new plan may replace it.
            present = await self._ranks(deployment, plan.group, plan.incarnation)
            plan = await self._existing_plan(deployment, plan, read=bool(present))
        await gather_all(
            self._keys.make_token(deployment, plan.group, plan.incarnation),
            self._objects.apply(member.incarnation_service(deployment, plan.group, plan.incarnation)),
            self._pod_groups.create(deployment, plan),
        )
        missing = [rank for rank in range(len(plan.members)) if rank not in present]
        return [member.member_pod(deployment, plan, rank, host=host) for rank in missing]

    async def _reserve_nodes(self, deployment: DSV4Deployment, plan: GroupPlan, host: member.Host) -> None:
        """Reserve the nodes of `plan` for its members, if they have enough free resources for all of them.

        Raises:
            NodesTaken: they have not.
        """
        key, asked = GroupKey.of(deployment, plan.group), time.monotonic()
        async with self._cluster.scheduling:
            problem = scheduling.shortage(deployment, plan, await self._cluster.snapshot(_FRESH_SECONDS, asked))
            if problem is not None:
                self._cluster.release(_owner(key))
                self._facts.pop((key.namespace, key.deployment), None)
                raise NodesTaken(f"group {plan.group} is not formed yet: {problem}")
            ranks = range(len(plan.members))
            self._cluster.reserve_made(member.member_pod(deployment, plan, rank, host=host) for rank in ranks)

    async def _existing_plan(self, deployment: DSV4Deployment, plan: GroupPlan, *, read: bool) -> GroupPlan:
        """Return the plan for the members, if one was written before.

        With `read`, a member may have read the earlier plan, which then stays valid for the others too.
        """
        wanted = member.plan_config(deployment, plan)
        kept = await self._objects.find(wanted)
        if kept is not None and read:
            return GroupPlan.model_validate_json(kept["data"][names.PLAN_FILE])
        if kept is not None:
            await self._objects.delete(CONFIG_MAPS, kept, deployment.metadata.uid or "")
        await self._objects.create(wanted)
        return plan


class KubeRayBackend(PodsBackend):
    """Members as the pods of a RayCluster; see `Backend`.

    Only the objects that are created and the order of their end differ from those of pods.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        changed: Callable[[str, str], None],
        reported: Reported = lambda namespace, name, report: None,
        ray_clusters: RayClusterCache | None,
    ) -> None:
        """Args:
        cluster: shared state of the cluster.
        changed: called with namespace and name of a deployment after a new report of its agents.
        reported: called with each report of a gateway.
        ray_clusters: cache of the RayClusters, for messages; None: the administrator allows none.
        """
        super().__init__(cluster, changed=changed, reported=reported)
        self._ray_fencer = RayClusterFencer(cluster.client)
        self._fencer = self._ray_fencer
        self._ray_clusters = ray_clusters
        self._orphans: dict[PodKey, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """See `Backend`."""
        tasks = list(self._orphans.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `PodsBackend.ensure`.

        Raises:
            KubeRayUnavailable: KubeRay is not in the cluster, is too old, or has not made the pods in time.
            BackendError: as `PodsBackend.ensure`.
        """
        group, incarnation = plan.group, plan.incarnation
        name, namespace = member.ray_cluster_name(plan), deployment.metadata.namespace
        ranks = {one.rank for one in self._members(deployment, group) if one.incarnation == incarnation}
        if len(ranks) == len(plan.members):
            return
        live = await self._objects.find(member.ray_cluster_identity(deployment, plan))
        if live is None:
            # With members, another client has deleted it: they end, and the next incarnation replaces them.
            if not ranks:
                await super().ensure(deployment, plan)
            return
        known, now = self._group(GroupKey.of(deployment, group)), time.monotonic()
        if known.made[0] != incarnation:
            # An earlier process created it, and may have reported the same.
            created = time_of(live["metadata"].get("creationTimestamp"), unix_time())
            known.made = incarnation, now - max(0.0, unix_time() - created)
        if now - known.made[1] > _MADE_BY_KUBERAY_SECONDS:
            missing = ", ".join(str(rank) for rank in range(len(plan.members)) if rank not in ranks)
            raise KubeRayUnavailable(
                f"KubeRay has not made the pods of ranks {missing} of RayCluster {namespace}/{name} within "
                f"{_MADE_BY_KUBERAY_SECONDS:.0f} s: {_kuberay_problem(live)}"
            )

    def orphaned(self, key: PodKey, uid: str | None) -> None:
        """Remove the finalizers of deleted pods of other deployments than `uid`, in the background.

        Args:
            key: the pods.
            uid: of the present deployment of that name; None: there is none.
        """
        if key not in self._orphans and self._orphans_of(key, uid):
            self._orphans[key] = asyncio.create_task(self._let_go_orphans(key, uid))

    def _orphans_of(self, key: PodKey, uid: str | None) -> list[Manifest]:
        pods = self._cluster.pods.pods(*key)
        return [pod for pod in pods if is_held(pod) and (uid is None or names.owner_uid(pod) != uid)]

    async def _let_go_orphans(self, key: PodKey, uid: str | None) -> None:
        pause = _FIRST_PAUSE
        try:
            while held := self._orphans_of(key, uid):
                for pod in held:
                    try:
                        await self._ray_fencer.let_go_orphan(pod)
                    except KubeError as error:
                        _log.warning("%s/%s: %s", key[0], key[1], error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            del self._orphans[key]

    async def _create(
        self, deployment: DSV4Deployment, plan: GroupPlan, pods: Sequence[Manifest]
    ) -> list[bool | BaseException]:
        try:
            made: bool | BaseException = await self._objects.create(
                member.ray_cluster(deployment, plan, pods), strict=True
            )
        except NotFound as error:
            made = KubeRayUnavailable(
                f"spec.backend: the cluster has no RayCluster ({member.KUBERAY_API}); install KubeRay "
                f"{member.LEAST_KUBERAY} or later with its definitions, or use the backend Pods: {error}"
            )
        except Invalid as error:
            made = error
            if _UNKNOWN_FIELD in str(error):
                made = KubeRayUnavailable(
                    f"spec.backend: the definition of RayCluster in the cluster is too old; install KubeRay "
                    f"{member.LEAST_KUBERAY} or later with its definitions, or use the backend Pods: {error}"
                )
        except (KubeError, BackendError) as error:
            made = error
        return [made] * len(pods)

    def _anomalies(self, deployment: DSV4Deployment, group: int, members: Iterable[Member]) -> tuple[str, ...]:
        found = super()._anomalies(deployment, group, members)
        metadata = deployment.metadata
        if self._ray_clusters is None:
            return found
        clusters = self._ray_clusters.objects((metadata.namespace, metadata.name))
        problems = (
            f"RayCluster {one['metadata']['name']}: {problem}"
            for one in clusters
            if names.number(one, names.GROUP) == group and (problem := _failed_condition(one))
        )
        return tuple(sorted((*found, *problems)))


def _is_deleted(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _nodes_of_latest(members: Sequence[Member]) -> dict[int, str]:
    """Return the nodes of the latest incarnation by rank."""
    latest = max((one.incarnation for one in members), default=0)
    nodes = {one.rank: scheduling.node_of(one.pod) for one in members if one.incarnation == latest}
    return {rank: node for rank, node in nodes.items() if node is not None}


def _failed_condition(cluster: Manifest) -> str:
    """Return the message of a failure that KubeRay reports; empty: none."""
    for one in names.parts(cluster, "status", "conditions"):
        if (one.get("type"), one.get("status")) == ("ReplicaFailure", "True"):
            return f"{one.get('reason')}: {one.get('message')}"[:500]
    return ""


def _kuberay_problem(cluster: Manifest) -> str:
    if found := _failed_condition(cluster):
        return found
    command = f"kubectl describe raycluster -n {cluster['metadata']['namespace']} {cluster['metadata']['name']}"
    silent = "" if names.part(cluster, "status") else "check that its operator runs and watches this namespace, and "
    return f"{silent}see `{command}`"


def _no_machines(forbidden: tuple[Finding, ...] = ()) -> Facts:
    return Facts((), isolated=True, state_root="", weights_root="", ray_token_file="", placed={}, forbidden=forbidden)


def _owner(key: GroupKey) -> Owner:
    return key.namespace, key.deployment, str(key.group), key.uid
