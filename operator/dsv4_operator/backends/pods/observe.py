"""Members of a group as observed: pods, reports of their agents, and evidence of an incarnation that died.

Evidence is a ConfigMap of at most 64 KiB. It never contains a prompt, because agents report none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api import KIND, DSV4Deployment
from dsv4_operator.api.values import parse_time
from dsv4_operator.backends.pods.scheduling import condition, node_of
from dsv4_operator.builders import names
from dsv4_operator.builders.member import is_queued, removal_of
from dsv4_operator.builders.names import Manifest
from dsv4_operator.lifecycle.observed import ObservedMember
from dsv4_operator.lifecycle.watch import FRESH_SECONDS
from dsv4_runtime.client import AGENT_ERRORS, SILENCE_SECONDS, AgentClient
from dsv4_runtime.contract import AgentStatus, Cause, GroupReport
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import own_shortage

_log = logging.getLogger("dsv4")

_POLL_SECONDS = 0.2
_CHECK_SECONDS = 1.0
_WITNESS_SECONDS = 0.4
_MARGIN_SECONDS = 0.05
"""The decision that follows at once must see the same silence."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and port of an agent."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """Return the base URL."""
        return f"http://{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Latest report of an agent."""

    status: AgentStatus
    heard: float
    """Unix time of its arrival, by this machine's clock."""


class AgentWatch:
    """Watches the agents of one incarnation until closed. A broken stream only leaves the reports older."""

    def __init__(
        self,
        client: AgentClient,
        incarnation: int,
        token_key: Callable[[], Awaitable[str | None]],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        client: connections.
        incarnation: reports of agents of other incarnations are dropped.
        token_key: returns the deployment's token key; None while there is none.
        changed: called after a new report, and once a member that has reported is silent.
        """
        self._client = client
        self.incarnation = incarnation
        self._token_key = token_key
        self._changed = changed
        self._endpoints: Mapping[int, Endpoint] = {}
        self._reports: dict[int, AgentReport] = {}
        self._shortage: tuple[float, BaseException] | None = None
        """Monotonic time and error of the latest request if this process lacked the resources for it."""
        self._silent: set[int] = set()
        """Ranks whose silence was reported."""
        self._tasks: list[asyncio.Task[None]] = []

    def follow(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Watch the members' agents at `endpoints`, by rank, from now on."""
        moved = endpoints.get(0) != self._endpoints.get(0)
        self._endpoints = dict(endpoints)
        # A task that ended because of a defect is started again.
        if self._tasks and not moved and not any(task.done() for task in self._tasks):
            return
        self.stop()
        self._tasks = [asyncio.create_task(self._poll_stale_agents())]
        if 0 in endpoints:
            self._tasks.append(asyncio.create_task(self._watch_head(endpoints[0])))

    def report(self, rank: int) -> AgentReport | None:
        """Return the latest report of `rank`'s agent; None before the first."""
        return self._reports.get(rank)

    @property
    def shortage(self) -> BaseException | None:
        """Return why this process could not query an agent lately: the silence of agents proves nothing then."""
        if self._shortage is None or time.monotonic() - self._shortage[0] > SILENCE_SECONDS:
            return None
        return self._shortage[1]

    def _failed(self, error: BaseException) -> None:
        self._shortage = (time.monotonic(), error) if own_shortage(error) is not None else None

    def stop(self) -> None:
        """Cancel the watches; connections end in the background."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def close(self) -> None:
        """End all connections."""
        tasks = self._tasks
        self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_head(self, head: Endpoint) -> None:
        """Follow the head's stream, with backoff after failures."""
        failures = 0
        while True:
            try:
                stream = self._client.watch_group(head.url, await self._token_key())
                async with contextlib.aclosing(stream):
                    members: dict[int, AgentStatus] = {}
                    async for report in stream:
                        members = self._take_group(report, members)
                        failures = 0
            except AGENT_ERRORS as error:
                _log.debug("the stream of %s is broken: %s", head.url, str(error) or type(error).__name__)
                self._failed(error)
            failures += 1
            await asyncio.sleep(backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))

    def _take_group(self, report: GroupReport, members: dict[int, AgentStatus]) -> dict[int, AgentStatus]:
        """Store one report of the head; return the statuses that later reports refer to."""
        now = unix_time()
        if report.members is not None:
            members = {status.rank: status for status in report.members}
        changed = False
        for rank, age in report.ages.items():
            if rank in members:
                changed |= self._take(rank, members[rank], now - age)
        if changed:
            self._changed()
        return members

    async def _poll_stale_agents(self) -> None:
        """Poll each agent without a recent report directly: the connection from the head to it may be broken.

        Polls run concurrently: an agent without an answer must not delay the others.
        """
        polls: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                now = unix_time()
                stale = self._stale(now)
                self._report_silence(now)
                polls = {rank: task for rank, task in polls.items() if not task.done()}
                for rank in stale:
                    if rank not in polls:
                        polls[rank] = asyncio.create_task(self._poll(rank))
                await asyncio.sleep(_POLL_SECONDS if stale else _CHECK_SECONDS)
        finally:
            for task in polls.values():
                task.cancel()

    def _stale(self, now: float) -> list[int]:
        """Return the ranks to poll. After the loss of the head, the reports of the others decide the verdict."""
        head = self._reports.get(0)
        headless = head is not None and head.heard < now - SILENCE_SECONDS
        oldest = now - (_WITNESS_SECONDS if headless else SILENCE_SECONDS)
        return [rank for rank in self._endpoints if rank not in self._reports or self._reports[rank].heard < oldest]

    def _report_silence(self, now: float) -> None:
        """Call `changed` if a member has become silent for decisions: no report says so."""
        oldest = now - FRESH_SECONDS - _MARGIN_SECONDS
        silent = {rank for rank in self._endpoints if rank in self._reports and self._reports[rank].heard < oldest}
        fell_silent, self._silent = silent - self._silent, silent
        if fell_silent:
            self._changed()

    async def _poll(self, rank: int) -> None:
        """Store the answer of `rank`'s agent, if there is one."""
        endpoint = self._endpoints.get(rank)
        if endpoint is None:
            return
        try:
            status = await self._client.status(endpoint.url, await self._token_key())
        except ValueError:
            await asyncio.sleep(_CHECK_SECONDS)
            return
        except AGENT_ERRORS as error:
            self._failed(error)
            return
        if (status.rank, status.incarnation) != (rank, self.incarnation):
            # The agent stays stale, so the next poll is delayed.
            await asyncio.sleep(_CHECK_SECONDS)
        elif self._take(rank, status, unix_time()):
            self._changed()

    def _take(self, rank: int, status: AgentStatus, heard: float) -> bool:
        """Store a report unless a later one is known; return whether it differs from the previous one."""
        self._shortage = None
        known = self._reports.get(rank)
        if status.incarnation != self.incarnation or (known is not None and known.heard > heard):
            return False
        self._reports[rank] = AgentReport(status, heard)
        return known is None or _news(known.status) != _news(status)


def _news(status: AgentStatus) -> tuple[object, ...]:
    # Temperatures and rates in warnings change with each report.
    warnings = tuple(_NUMBER.sub("", one) for one in status.warnings)
    return status.phase, status.verdict, status.joined, status.engine, status.progress, status.broken, warnings


SCHEDULE_SECONDS = 60.0
"""Time after which an unschedulable pod is a failure: dsv4 chose its node because it had free resources."""
IMAGE_SECONDS = 180.0
"""Time for retries of an image pull or of the creation of a container."""
WAIT_SECONDS = 1800.0
"""Upper bound for the start of a container, for any size of its image."""

_AGENT = "agent"
_HOPELESS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)


@dataclass(frozen=True, slots=True)
class Member:
    """A pod that is a member of a group."""

    incarnation: int
    rank: int
    uid: str
    pod: Manifest


def member_of(pod: Manifest, deployment: str, group: int, owner: str | None) -> Member | str:
    """Return `pod` as a member, or the reason why it is none.

    Incarnation and rank are read from its name, which is immutable; labels can be changed by any client with permission
    to write pods.

    Args:
        pod: as the API server has it.
        deployment: name of the deployment.
        group: index of the group.
        owner: uid of the deployment; None: it has none.
    """
    metadata = names.part(pod, "metadata")
    name = str(metadata.get("name"))
    found = names.parse_member_name(name)
    if found is None or found[:2] != (deployment, group):
        return f"pod {name} is ignored: its name is not that of a member of group {group}"
    if owner is not None and owner not in owners_of(pod):
        return f"pod {name} is ignored: it does not belong to this deployment (metadata.ownerReferences)"
    return Member(found[2], found[3], str(metadata.get("uid") or name), pod)


def owners_of(pod: Manifest) -> frozenset[str]:
    """Return the uids of the deployments that own `pod`."""
    owners = names.parts(pod, "metadata", "ownerReferences")
    direct = (str(one.get("uid")) for one in owners if one.get("kind") == KIND)
    return frozenset(filter(None, (*direct, names.owner_uid(pod))))


def wrong_labels(member: Member, deployment: str, group: int) -> str | None:
    """Return the removed or changed labels of a member as text; None if there are none."""
    wanted = names.labels(
        deployment, component=names.MEMBER, group=group, incarnation=member.incarnation, rank=member.rank
    )
    labels = names.part(member.pod, "metadata", "labels")
    wrong = [name for name, value in wanted.items() if labels.get(name) != value]
    if not wrong:
        return None
    pod = member.pod["metadata"]["name"]
    commands = " ".join(f"{name}={wanted[name]}" for name in wrong)
    return (
        f"labels of pod {pod} were changed, so Services do not find it; kubectl label --overwrite pod {pod} {commands}"
    )


def endpoint_of(pod: Manifest) -> Endpoint | None:
    """Return the endpoint of its agent; None while it has no address."""
    # Injected containers are ignored.
    agent = next((one for one in names.parts(pod, "spec", "containers") if one.get("name") == _AGENT), {})
    address = names.part(pod, "status").get("podIP")
    number = next((one.get("containerPort") for one in names.parts(agent, "ports") if one.get("name") == "agent"), None)
    return Endpoint(address, number) if address and isinstance(address, str) and isinstance(number, int) else None


def observed(
    member: Member,
    report: AgentReport | None,
    noticed: float | None,
    now: float,
    *,
    since: float,
    formed: bool,
    queue_reason: str = "",
) -> ObservedMember:
    """Return the observation of `member`.

    Args:
        member: its pod.
        report: the latest report of its agent.
        noticed: Unix time at which its end was first observed; None: now.
        now: Unix time.
        since: Unix time of the first observation of the pod, on its node if a scheduler chooses that: waits are not
            measured from its creation, which is a time of the API server's clock.
        formed: whether all members of its incarnation have addresses; until then its agent waits for them.
        queue_reason: reason why its scheduler has not placed its group; empty: it gives none.
    """
    pod = member.pod
    queued = is_queued(pod)
    ended, cause = _end(pod, report, now - since)
    waiting = None if ended is not None or report is not None else _waiting(pod, formed=formed)
    if queued and ended is None:
        waiting = queue_reason or _unschedulable(pod) or ""
    return ObservedMember(
        incarnation=member.incarnation,
        rank=member.rank,
        node=node_of(pod) or "",
        address=str(names.part(pod, "status").get("podIP") or ""),
        started=time_of(pod["metadata"].get("creationTimestamp"), since),
        ended=ended,
        ended_time=None if ended is None else noticed or now,
        cause=cause,
        waiting=waiting,
        queued=queued and ended is None,
        removal=removal_of(pod),
        status=report.status if report is not None else None,
        heard=report.heard if report is not None else None,
    )


def is_finalizing(pod: Manifest) -> bool:
    """Return whether `pod` has ended for good and only finalizers keep its object.

    The kubelet deletes with a grace period of 0 once all containers have ended, and so do forced deletions.
    """
    metadata = names.part(pod, "metadata")
    return bool(metadata.get("finalizers")) and metadata.get("deletionGracePeriodSeconds") == 0


def not_ready_since(node: Manifest) -> str | None:
    """Return the time since which Kubernetes reports `node` as not ready, as text; None if it is ready."""
    ready = condition(node, "Ready")
    return None if ready.get("status") == "True" else str(ready.get("lastTransitionTime") or "never ready")


def _end(pod: Manifest, report: AgentReport | None, age: float) -> tuple[str | None, Cause | None]:
    """Return how the member ended, and the cause if known."""
    status = names.part(pod, "status")
    # The phase of a pod includes injected containers, but at these values all containers have ended.
    if status.get("phase") in ("Succeeded", "Failed"):
        return _last_words(status)
    terminated = next((one for one in _states(status, "terminated")), None)
    if terminated is not None:
        return _last_words(status)
    if is_finalizing(pod):
        return f"its pod has ended and waits for {', '.join(pod['metadata']['finalizers'])}", None
    if report is not None:
        return None, None
    if pod["metadata"].get("deletionTimestamp"):
        return "its pod was deleted before its agent answered", None
    unschedulable = _unschedulable(pod)
    if unschedulable is not None and age > SCHEDULE_SECONDS:
        return f"not scheduled for {age:.0f} s: {unschedulable}", Cause.FORMATION_TIMEOUT
    hopeless = next((one for one in _states(status, "waiting") if one.get("reason") in _HOPELESS), None)
    if hopeless is not None and age > IMAGE_SECONDS:
        return f"{hopeless['reason']}: {str(hopeless.get('message', ''))[:300]}", Cause.FORMATION_TIMEOUT
    if _started(status) is False and age > WAIT_SECONDS:
        return f"its container did not start within {WAIT_SECONDS / 60:.0f} min", Cause.FORMATION_TIMEOUT
    return None, None


def _last_words(status: Mapping[str, Any]) -> tuple[str, Cause | None]:
    if status.get("reason"):
        # The kubelet ended the pod: eviction, resource shortage, shutdown of the node.
        lost = Cause.NODE_LOST if status["reason"] in ("NodeLost", "NodeShutdown", "Terminated") else None
        return f"{status['reason']}: {str(status.get('message', ''))[:300]}".rstrip(": "), lost
    terminated = next((one for one in _states(status, "terminated")), None)
    if terminated is None:
        return f"its pod is {status.get('phase')}", None
    code = terminated.get("exitCode", 0)
    last = str(terminated.get("message", "")).rstrip().rpartition("\n")[2][:300]
    memory = terminated.get("reason") == "OOMKilled"
    what = "the kernel ended it because of a lack of memory" if memory else f"exit code {code}"
    return what + (f": {last}" if code and last else ""), Cause.OUT_OF_MEMORY_HOST if memory else None


def _waiting(pod: Manifest, *, formed: bool) -> str | None:
    status = names.part(pod, "status")
    unschedulable = _unschedulable(pod)
    if unschedulable is not None:
        return f"not scheduled: {unschedulable}"
    state = next((one for one in _states(status, "waiting")), None)
    if state is not None:
        return f"{state.get('reason', 'waiting')}: {str(state.get('message', ''))[:200]}".rstrip(": ")
    if not _started(status):
        return "its pod is starting"
    return None if formed else "its agent waits for the addresses of the other members"


def _unschedulable(pod: Manifest) -> str | None:
    found = condition(pod, "PodScheduled")
    if found.get("status") != "False":
        return None
    return str(found.get("message") or found.get("reason") or "no reason given")[:300]


def _started(status: Mapping[str, Any]) -> bool:
    return any(True for _ in _states(status, "running")) or any(True for _ in _states(status, "terminated"))


def _states(status: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return the states of that kind of the container `agent`: none or one."""
    containers = [one for one in names.parts(status, "containerStatuses") if one.get("name") == _AGENT]
    return [names.part(one, "state", kind) for one in containers if kind in names.part(one, "state")]


def time_of(text: object, default: float) -> float:
    """Return a time of the API server as Unix time; `default` if it is missing."""
    try:
        return parse_time(text)
    except ValueError:
        return default


KEPT_EVIDENCE = 5
_BYTES = 60 * 1024
"""Limit of all entries; the rest of 64 KiB is for the object itself."""
_LINES = (200, 100, 50, 20, 5, 0)
"""Numbers of last lines of each log, tried until the entry fits."""


def evidence_config(
    deployment: DSV4Deployment,
    group: int,
    incarnation: int,
    members: Sequence[ObservedMember],
    answers: Mapping[int, bytes | None],
) -> Manifest:
    """Return the ConfigMap; `answers` maps ranks to the answers of agents to `/v1/evidence`, None without one."""
    limit = _BYTES // max(1, len(members))
    data = {f"m{member.rank}.json": _entry(member, answers.get(member.rank), limit) for member in members}
    name = names.evidence_name(deployment.metadata.name, group, incarnation)
    about = names.metadata(deployment, name, component=names.EVIDENCE, group=group, incarnation=incarnation)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def superfluous_evidence(kept: Sequence[Manifest]) -> list[Manifest]:
    """Return all but the newest ConfigMaps."""
    return sorted(kept, key=lambda one: names.number(one, names.INCARNATION) or 0)[:-KEPT_EVIDENCE]


def _entry(member: ObservedMember, answer: bytes | None, limit: int) -> str:
    seen = {**member.summary(), "agent": "did not answer" if answer is None else None}
    agent = _parsed(answer)
    for lines in _LINES:
        text = json.dumps({**seen, **_shortened(agent, lines)}, indent=1, ensure_ascii=False)
        if len(text.encode()) <= limit:
            return text
    return json.dumps({**seen, "status": None, "agent": "left out because of the size limit"})


def _parsed(answer: bytes | None) -> dict[str, Any]:
    try:
        answer = json.loads(answer or b"{}")
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _shortened(agent: Mapping[str, Any], lines: int) -> dict[str, Any]:
    logs = agent.get("lastLines") or {}
    found: dict[str, Any] = {name: agent[name] for name in ("firstFatal", "memory") if name in agent}
    if lines:
        found["lastLines"] = {name: log[-lines:] for name, log in logs.items()}
        found["window"] = (agent.get("window") or [])[-lines:]
    return found
