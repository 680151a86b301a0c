"""A pod as a member of a group: pure functions over what the API server says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api import KIND
from dsv4_operator.api.values import parse_time
from dsv4_operator.backends.pods.agents import AgentReport, Endpoint
from dsv4_operator.backends.pods.capacity import node_of
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.lifecycle.observed import ObservedMember
from dsv4_runtime.contract import Cause

SCHEDULE_SECONDS = 60.0
"""A pod for which the scheduler finds no place for so long is a failure: dsv4 chose its node because it had room."""
IMAGE_SECONDS = 180.0
"""An image that cannot be fetched, or a container that cannot be made, is tried again for so long."""
WAIT_SECONDS = 1800.0
"""Until a container must run, however large its image is."""

_AGENT = "agent"
"""Name of the container that is the member."""
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

    Its incarnation and its rank are read from its name, which nobody can change; a label can be changed by anyone who
    may write pods.

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
    return frozenset(str(one.get("uid")) for one in owners if one.get("kind") == KIND)


def wrong_labels(member: Member, deployment: str, group: int) -> str | None:
    """Return which labels of a member somebody removed or changed; None if none."""
    wanted = names.labels(
        deployment, component=names.MEMBER, group=group, incarnation=member.incarnation, rank=member.rank
    )
    labels = names.part(member.pod, "metadata", "labels")
    wrong = [name for name, value in wanted.items() if labels.get(name) != value]
    if not wrong:
        return None
    pod = member.pod["metadata"]["name"]
    told = " ".join(f"{name}={wanted[name]}" for name in wrong)
    return f"labels of pod {pod} were changed, so Services do not find it; kubectl label --overwrite pod {pod} {told}"


def incarnation_of(one: Manifest) -> int | None:
    """Return the incarnation in the labels of an object; None if there is none that can be read."""
    text = names.part(one, "metadata", "labels").get(names.INCARNATION)
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else None


def endpoint_of(pod: Manifest) -> Endpoint | None:
    """Return where its agent listens; None while it has no address."""
    # Containers of others say nothing about the member.
    agent = next((one for one in names.parts(pod, "spec", "containers") if one.get("name") == _AGENT), {})
    address = names.part(pod, "status").get("podIP")
    number = next((one.get("containerPort") for one in names.parts(agent, "ports") if one.get("name") == "agent"), None)
    return Endpoint(address, number) if address and isinstance(address, str) and isinstance(number, int) else None


def observed(
    member: Member, report: AgentReport | None, noticed: float | None, now: float, *, since: float, formed: bool
) -> ObservedMember:
    """Return `member` with everything that is known of it.

    Args:
        member: its pod.
        report: what its agent said last.
        noticed: Unix time at which its end was first seen; None: now.
        now: Unix time.
        since: Unix time at which the pod was first seen: how long it has waited is not counted from the API server's
            time of its creation, which is of another clock.
        formed: whether all members of its incarnation have addresses: until then its agent waits for them.
    """
    pod = member.pod
    ended, cause = _end(pod, report, now - since)
    waiting = None if ended is not None or report is not None else _waiting(pod, formed=formed)
    return ObservedMember(
        incarnation=member.incarnation,
        rank=member.rank,
        node=node_of(pod) or "",
        address=str(names.part(pod, "status").get("podIP") or ""),
        started=_time(pod["metadata"].get("creationTimestamp"), since),
        ended=ended,
        ended_time=None if ended is None else noticed or now,
        cause=cause,
        waiting=waiting,
        status=report.status if report is not None else None,
        heard=report.heard if report is not None else None,
    )


def not_ready_since(node: Manifest) -> str | None:
    """Return since when `node` is not there for Kubernetes, in the API server's words; None if it is there."""
    conditions = names.parts(node, "status", "conditions")
    ready: Mapping[str, Any] = next((one for one in conditions if one.get("type") == "Ready"), {})
    return None if ready.get("status") == "True" else str(ready.get("lastTransitionTime") or "never ready")


def _end(pod: Manifest, report: AgentReport | None, age: float) -> tuple[str | None, Cause | None]:
    """Return how the member ended, for people, and why if that is known."""
    status = names.part(pod, "status")
    # With containers of others in the pod its phase is theirs too, but then all of them have ended.
    if status.get("phase") in ("Succeeded", "Failed"):
        return _last_words(status)
    terminated = next((one for one in _states(status, "terminated")), None)
    if terminated is not None:
        return _last_words(status)
    if report is not None:
        return None, None
    if pod["metadata"].get("deletionTimestamp"):
        return "its pod was deleted before its agent answered", None
    unschedulable = _unschedulable(status)
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
        # The kubelet ended the pod itself: evicted, out of a resource, its node shut down.
        lost = Cause.NODE_LOST if status["reason"] in ("NodeLost", "NodeShutdown", "Terminated") else None
        return f"{status['reason']}: {str(status.get('message', ''))[:300]}".rstrip(": "), lost
    terminated = next((one for one in _states(status, "terminated")), None)
    if terminated is None:
        return f"its pod is {status.get('phase')}", None
    code = terminated.get("exitCode", 0)
    last = str(terminated.get("message", "")).rstrip().rpartition("\n")[2][:300]
    memory = terminated.get("reason") == "OOMKilled"
    what = "the kernel ended it for want of memory" if memory else f"exit code {code}"
    return what + (f": {last}" if code and last else ""), Cause.OUT_OF_MEMORY_HOST if memory else None


def _waiting(pod: Manifest, *, formed: bool) -> str | None:
    status = names.part(pod, "status")
    unschedulable = _unschedulable(status)
    if unschedulable is not None:
        return f"not scheduled: {unschedulable}"
    state = next((one for one in _states(status, "waiting")), None)
    if state is not None:
        return f"{state.get('reason', 'waiting')}: {str(state.get('message', ''))[:200]}".rstrip(": ")
    if not _started(status):
        return "its pod is starting"
    return None if formed else "its agent waits for the addresses of the other members"


def _unschedulable(status: Mapping[str, Any]) -> str | None:
    for condition in names.parts(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "no reason given")[:300]
    return None


def _started(status: Mapping[str, Any]) -> bool:
    return any(True for _ in _states(status, "running")) or any(True for _ in _states(status, "terminated"))


def _states(status: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return the states of that kind of the container `agent`: none or one."""
    containers = [one for one in names.parts(status, "containerStatuses") if one.get("name") == _AGENT]
    return [names.part(one, "state", kind) for one in containers if kind in names.part(one, "state")]


def _time(text: object, default: float) -> float:
    try:
        return parse_time(text)
    except ValueError:
        return default
