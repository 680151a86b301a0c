"""Requests through the public Service of every deployment, and the balance of gateways over nodes.

The scheduler spreads gateways when they are created, but nothing in Kubernetes moves them when a node returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from dsv4_operator.api import ConditionStatus, ConditionType, DeploymentStatus, DSV4Deployment, GroupStatus, Reason
from dsv4_operator.api.values import quantity
from dsv4_operator.backends.pods.cluster import Cluster
from dsv4_operator.backends.pods.scheduling import NodeCapacity, condition, has_ended
from dsv4_operator.builders import names
from dsv4_operator.builders.frontend import GATEWAY_REQUESTS, gateways_of
from dsv4_operator.builders.names import GROUP, Manifest, gateway_name
from dsv4_operator.kube import KubeError
from dsv4_operator.lifecycle.observed import UNREACHED, Canary, Lives, adopted, answered, lives_of, seen
from dsv4_runtime.contract.gateway import CanaryReport
from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger("dsv4")

CANARY_PATH = "/dsv4/canary"
_SECONDS = 12.0
"""Limit for an answer: the gateway's own limit is 10 s."""
_AT_ONCE = 32
_LARGEST_BYTES = 16 * 1024
_REASON_CHARS = 300
_SAME = {"ErrImagePull": "ImagePullBackOff"}
"""Equivalent reasons, between which kubelets alternate."""

TokenKey = Callable[[DSV4Deployment], Awaitable[str | None]]
Ask = Callable[[str, str], Awaitable[tuple[str | None, CanaryReport | None]]]
"""Sends the request to a base URL with a token; returns the failure, and the gateway's report if there is one."""
Reported = Callable[[str, str, CanaryReport], None]
"""Called with namespace and name of a deployment and each report of a gateway."""


@dataclass(slots=True)
class _Watched:
    deployment: DSV4Deployment
    canary: Canary
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    """Start of the next request."""


class Canaries:
    """Reachability of all deployments for users, tested by requests in the background."""

    def __init__(
        self,
        token_key: TokenKey,
        gateways: Callable[[str, str], Sequence[Manifest]],
        *,
        through_service: bool,
        changed: Callable[[str, str], None],
        ask: Ask | None = None,
        reported: Reported = lambda namespace, name, report: None,
    ) -> None:
        """Args:
        token_key: returns the token key of a deployment.
        gateways: returns the cached pods of a deployment's gateways.
        through_service: whether names of Services resolve, as in a pod; otherwise requests go to the gateways directly.
        changed: called with namespace and name of a deployment after a change of its result.
        ask: sends the request.
        reported: called with each report of a gateway.
        """
        self._token_key = token_key
        self._gateways = gateways
        self._through_service = through_service
        self._changed = changed
        self._send, self._reported = ask or self._get, reported
        self._known: dict[tuple[str, str], _Watched] = {}
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def problem(self, deployment: DSV4Deployment, groups: Iterable[GroupStatus]) -> str | None:
        """Return the reason why users cannot reach `deployment`; None: they can. Requests are sent while it serves."""
        name, now = (deployment.metadata.namespace, deployment.metadata.name), time.monotonic()
        lives, pods = lives_of(groups), self._gateways(*name)
        ready = frozenset(str(pod["metadata"]["uid"]) for pod in pods if is_ready(pod))
        known = self._known.get(name)
        if known is None or known.deployment.metadata.uid != deployment.metadata.uid:
            self.release(*name)
            known = self._known[name] = _Watched(deployment, _first(deployment, lives, ready, now))
        known.deployment, known.canary = deployment, seen(known.canary, lives, ready, now)
        self._send_when_due(known)
        return known.canary.problem

    def release(self, namespace: str, name: str) -> None:
        """Drop the data of one deployment."""
        known = self._known.pop((namespace, name), None)
        if known is None:
            return
        if known.timer is not None:
            known.timer.cancel()
        if known.task is not None:
            known.task.cancel()

    async def close(self) -> None:
        """Cancel all requests."""
        tasks = [known.task for known in self._known.values() if known.task is not None]
        for name in list(self._known):
            self.release(*name)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _send_when_due(self, known: _Watched) -> None:
        """Send the next request when it is due, without a reconcile; none while one is sent or no group serves."""
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        if known.task is not None or not known.canary.lives:
            return
        wait = known.canary.due - time.monotonic()
        if wait > 0:
            known.timer = asyncio.get_running_loop().call_later(wait, self._send_when_due, known)
        else:
            known.task = asyncio.create_task(self._try(known))

    async def _try(self, known: _Watched) -> None:
        deployment, at_start = known.deployment, known.canary
        metadata = deployment.metadata
        try:
            pods = list(self._gateways(metadata.namespace, metadata.name))
            async with self._slots:
                problem = await self._request(deployment, pods)
        except Exception as error:
            # No failure of a request may end the task.
            _log.exception("%s/%s: the request through its endpoint failed", metadata.namespace, metadata.name)
            problem = f"{type(error).__name__}: {error}"
            if own_shortage(error) is not None:
                # Nothing is known about the endpoint.
                problem = known.canary.problem
        finally:
            known.task = None
        before = known.canary.problem
        spread = random.uniform(0.8, 1.2)  # noqa: S311
        known.canary = answered(known.canary, at_start, problem, time.monotonic(), spread)
        if known.canary.problem != before:
            _log.info("%s/%s: through its endpoint: %s", metadata.namespace, metadata.name, problem or "answered")
            self._changed(metadata.namespace, metadata.name)
        self._send_when_due(known)

    async def _request(self, deployment: DSV4Deployment, pods: Sequence[Manifest]) -> str | None:
        key = await self._token_key(deployment)
        if key is None:
            return "the operator has no token key of the deployment"
        token = canary_token(key)
        name, namespace = deployment.metadata.name, deployment.metadata.namespace

        async def ask(url: str) -> str | None:
            problem, report = await self._send(url, token)
            if report is not None:
                self._reported(namespace, name, report)
            return problem

        ready = [pod for pod in pods if is_ready(pod)]
        if ready and self._through_service:
            return await ask(f"http://{name}.{namespace}.svc:{names.GATEWAY_PORT}")
        if ready:
            return await ask(_url(random.choice(ready)))  # noqa: S311
        running = [pod for pod in pods if _address(pod)]
        said = await ask(_url(running[0])) if running else None
        detail = f"{running[0]['metadata']['name']}: {said or 'not ready'}" if running else _waiting(pods)
        return f"no gateway is ready: {detail}"

    async def _get(self, url: str, token: str) -> tuple[str | None, CanaryReport | None]:
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=_SECONDS)
            # A new connection per request, so that the Service selects a gateway each time.
            connector = aiohttp.TCPConnector(limit=_AT_ONCE, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=limits, auto_decompress=False)
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with self._session.get(url + CANARY_PATH, headers=headers, allow_redirects=False) as answer:
                data = await answer.content.read(_LARGEST_BYTES)
                while not answer.content.at_eof() and len(data) < _LARGEST_BYTES:
                    data += await answer.content.read(_LARGEST_BYTES - len(data))
                status = answer.status
        except TimeoutError:
            return f"{url}: no answer within {_SECONDS:.0f} s", None
        except (aiohttp.ClientError, OSError) as error:
            if own_shortage(error) is not None:
                raise
            return f"{url}: {str(error) or type(error).__name__}"[:_REASON_CHARS], None
        report = None
        with contextlib.suppress(ValueError):
            report = CanaryReport.model_validate_json(data)
        return problem_of(status, data), report


def problem_of(status: int, body: bytes) -> str | None:
    """Return the problem in a gateway's answer; None: users get answers."""
    try:
        report = CanaryReport.model_validate_json(body)
    except ValueError:
        return (
            f"HTTP {status} without a report from {CANARY_PATH}: the version of the gateways differs from "
            "that of the operator, or another server answers at the Service"
        )
    if report.ok and status == 200:
        return None
    reason = " ".join(report.reason.split())[:_REASON_CHARS] or f"HTTP {status}"
    return f"gateway {report.gateway}: {reason}" if report.gateway else reason


def is_ready(pod: Manifest) -> bool:
    """Return whether `pod` is among the endpoints of its Service."""
    if pod["metadata"].get("deletionTimestamp") or not _address(pod):
        return False
    return condition(pod, "Ready").get("status") == "True"


def _first(deployment: DSV4Deployment, lives: Lives, gateways: frozenset[str], now: float) -> Canary:
    ready = deployment.status.condition(ConditionType.READY)
    if ready is not None and lives == lives_of(deployment.status.groups):
        if ready.status is ConditionStatus.TRUE:
            return adopted(None, lives, gateways, now)
        if ready.reason is Reason.ENDPOINT_NOT_READY:
            return adopted(ready.message.partition(UNREACHED)[2], lives, gateways, now)
    return Canary(due=now)


def _address(pod: Manifest) -> str:
    status = pod.get("status") or {}
    return str(status.get("podIP") or "") if status.get("phase") == "Running" else ""


def _url(pod: Manifest) -> str:
    address = _address(pod)
    return f"http://{f'[{address}]' if ':' in address else address}:{names.GATEWAY_PORT}"


def _waiting(pods: Sequence[Manifest]) -> str:
    """Return the reason why the first of `pods` does not run, in the terms of Kubernetes."""
    if not pods:
        return "there is none yet"
    pod = min(pods, key=lambda one: str(one["metadata"]["name"]))
    status = pod.get("status") or {}
    # Without messages: kubelets vary the text of one failure.
    waiting = [
        f"{_SAME.get(reason, reason)} of {container.get('image')}"
        for container in status.get("containerStatuses") or []
        if (reason := str(((container.get("state") or {}).get("waiting") or {}).get("reason") or ""))
    ]
    unschedulable = [one for one in status.get("conditions") or [] if one.get("reason") == "Unschedulable"]
    why = next(iter([*waiting, *(f"Unschedulable: {one.get('message', '')}" for one in unschedulable)]), "")
    return f"{pod['metadata']['name']} is {status.get('phase', 'Pending')}; {why}".rstrip("; ")[:_REASON_CHARS]


CHECK_SECONDS = 60.0
"""Interval between checks of the nodes, and minimum presence of a node before a gateway moves to it."""
_LONGEST_SECONDS = 3600.0
"""Longest interval between moves, if the scheduler places gateways on the same node each time."""


@dataclass(slots=True)
class _Imbalance:
    """A deployment with several gateways on one node."""

    next_check: float
    """Monotonic time."""
    free: frozenset[str] = frozenset()
    """Nodes with room for a gateway at the latest check."""
    moves: int = 0


class Balance:
    """Evicts at most one gateway a minute of each deployment, and only while the deployment is ready."""

    def __init__(self, cluster: Cluster, gateways: Callable[[str, str], Sequence[Manifest]]) -> None:
        self._cluster = cluster
        self._gateways = gateways
        self._imbalanced: dict[tuple[str, str], _Imbalance] = {}

    def release(self, namespace: str, name: str) -> None:
        """Drop the data of one deployment."""
        self._imbalanced.pop((namespace, name), None)

    async def rebalance(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        """Move one gateway if due. Failures are logged, and the move is repeated later."""
        name, now = (deployment.metadata.namespace, deployment.metadata.name), time.monotonic()
        pods = [pod for pod in self._gateways(*name) if not has_ended(pod) and is_own(pod, name[1])]
        if not _settled(deployment, status, pods):
            return
        surplus = surplus_gateway(pods)
        if surplus is None:
            self._imbalanced.pop(name, None)
            return
        known = self._imbalanced.setdefault(name, _Imbalance(now))
        if now < known.next_check:
            return
        known.next_check = now + CHECK_SECONDS
        try:
            async with self._cluster.scheduling:
                nodes = (await self._cluster.snapshot(CHECK_SECONDS / 2)).capacity_for((*name, "", ""))
            free = free_nodes(nodes, pods)
            if free & known.free:
                await self._cluster.client.evict(name[0], surplus["metadata"]["name"], uid=surplus["metadata"]["uid"])
                known.moves += 1
                known.next_check = now + min(CHECK_SECONDS * 2 ** (known.moves - 1), _LONGEST_SECONDS)
                where = surplus["spec"]["nodeName"], ", ".join(sorted(free))
                _log.info("%s/%s: moving the gateway %s from %s; free: %s", *name, surplus["metadata"]["name"], *where)
            known.free = free
        except KubeError as error:
            _log.warning("%s/%s: no gateway is moved to another node: %s", *name, error)


def is_own(pod: Manifest, deployment: str) -> bool:
    """Return whether a ReplicaSet of `deployment`'s gateways owns `pod`; labels are no proof."""
    owners = pod["metadata"].get("ownerReferences") or []
    group = str((pod["metadata"].get("labels") or {}).get(GROUP, ""))
    stem = f"{gateway_name(deployment, int(group))}-" if group.isdigit() else ""
    sets = [str(one.get("name", "")) for one in owners if one.get("controller") and one.get("kind") == "ReplicaSet"]
    return bool(stem) and any(name.startswith(stem) for name in sets)


def surplus_gateway(pods: Iterable[Manifest]) -> Manifest | None:
    """Return the youngest gateway of the node with the most gateways; None if no node has several."""
    placed = [pod for pod in pods if pod["spec"].get("nodeName")]
    count = Counter(pod["spec"]["nodeName"] for pod in placed)
    crowded = [pod for pod in placed if count[pod["spec"]["nodeName"]] > 1]
    return max(
        crowded,
        key=lambda pod: (
            count[pod["spec"]["nodeName"]],
            str(pod["metadata"].get("creationTimestamp")),
            pod["metadata"]["name"],
        ),
        default=None,
    )


def free_nodes(nodes: Iterable[NodeCapacity], pods: Iterable[Manifest]) -> frozenset[str]:
    """Return the nodes without a gateway of `pods` that can take one."""
    taken = {pod["spec"].get("nodeName") for pod in pods}
    wanted = {"cpu": quantity(GATEWAY_REQUESTS["cpu"]) * 1000, "memory": quantity(GATEWAY_REQUESTS["memory"])}
    return frozenset(
        node.name
        for node in nodes
        if node.name not in taken
        and _open(node.manifest)
        and all(node.free.get(resource, 0) >= number for resource, number in wanted.items())
    )


def _settled(deployment: DSV4Deployment, status: DeploymentStatus, pods: Sequence[Manifest]) -> bool:
    """Return whether `deployment` is Ready with exactly the wanted gateways, all of them ready."""
    ready = status.condition(ConditionType.READY)
    if ready is None or ready.status is not ConditionStatus.TRUE:
        return False
    return len(pods) == sum(map(gateways_of, range(deployment.spec.replicas))) and all(map(is_ready, pods))


def _open(node: Manifest) -> bool:
    """Return whether `node` accepts pods without tolerations."""
    spec = node.get("spec") or {}
    if spec.get("unschedulable") or any(one.get("effect") != "PreferNoSchedule" for one in spec.get("taints") or []):
        return False
    return condition(node, "Ready").get("status") == "True"
