"""Membership of pods in the pod group of a scheduler, and the scheduler's object of the group.

With `spec.topology.scheduler`, all members of an incarnation are one group of that scheduler, which places all of them
or none. Sources of the names: Kueue v0.20 (`pkg/controller/jobs/pod/constants`), Volcano
(`apis/scheduling/v1beta1/labels.go`), scheduler-plugins (`apis/scheduling/v1alpha1`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsv4_operator.api import DSV4Deployment, SchedulerType
from dsv4_operator.builders import names
from dsv4_operator.builders.names import Manifest

SCHEDULER = f"{names.DOMAIN}/scheduler"
"""Label of members whose node a scheduler chooses; its value is a `SchedulerType`."""

_KUEUE = "kueue.x-k8s.io"
_REFUSALS = (("Unschedulable", "True"), ("QuotaReserved", "False"), ("Admitted", "False"))
"""Conditions of the objects of all schedulers, by type and status, whose message is the reason of a wait."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Marks of a pod that belongs to a group of some scheduler."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, object]


def membership(deployment: DSV4Deployment, group: int, incarnation: int) -> Membership:
    """Return the marks of the members of one incarnation; empty if dsv4 chooses their nodes."""
    scheduler = deployment.spec.topology.scheduler
    if scheduler is None:
        return Membership({}, {}, {})
    name = names.incarnation_name(deployment.metadata.name, group, incarnation)
    labels = {SCHEDULER: scheduler.type.value}
    match scheduler.type:
        case SchedulerType.KUEUE:
            return Membership(
                labels | {f"{_KUEUE}/queue-name": scheduler.queue or "", f"{_KUEUE}/pod-group-name": name},
                {
                    f"{_KUEUE}/pod-group-total-count": str(deployment.spec.topology.nodes_per_group),
                    # The group ends with its members; its successor is another group, not replacement pods.
                    f"{_KUEUE}/retriable-in-group": "false",
                },
                # Kueue adds this gate itself. A namespace that it does not manage gets no pods past the quota.
                {"schedulingGates": [{"name": f"{_KUEUE}/admission"}]},
            )
        case SchedulerType.VOLCANO:
            return Membership(labels, {"scheduling.k8s.io/group-name": name}, {"schedulerName": "volcano"})
        case SchedulerType.COSCHEDULING:
            marks = labels | {"scheduling.x-k8s.io/pod-group": name}
            return Membership(marks, {}, {"schedulerName": "scheduler-plugins-scheduler"})


API_VERSIONS = {
    SchedulerType.VOLCANO: "scheduling.volcano.sh/v1beta1",
    SchedulerType.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
}
"""Schedulers with a `PodGroup`."""


def pod_group(deployment: DSV4Deployment, group: int, incarnation: int, requests: Mapping[str, int]) -> Manifest | None:
    """Return the `PodGroup` of one incarnation; None if its scheduler needs none.

    Args:
        deployment: the specification; owns the object.
        group: index of the group.
        incarnation: its number.
        requests: requests of one member: processors in thousandths, memory in bytes, devices by count.
    """
    scheduler, size = deployment.spec.topology.scheduler, deployment.spec.topology.nodes_per_group
    if scheduler is None or scheduler.type not in API_VERSIONS:
        return None
    total = {name: f"{size * number}m" if name == "cpu" else str(size * number) for name, number in requests.items()}
    spec: Manifest = {"minMember": size, "minResources": total}
    if scheduler.queue is not None:
        spec["queue"] = scheduler.queue
    name = names.incarnation_name(deployment.metadata.name, group, incarnation)
    about = names.metadata(deployment, name, group=group, incarnation=incarnation)
    return {"apiVersion": API_VERSIONS[scheduler.type], "kind": "PodGroup", "metadata": about, "spec": spec}


def spread(deployment: DSV4Deployment, group: int) -> Manifest:
    """Return the constraint that spreads the members of one group over nodes.

    It is a preference, as in dsv4's own choice of nodes: `exclusiveNodes` requires one member per node by an
    anti-affinity, and the network of the nodes by the ports of the agents.
    """
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.labels(deployment.metadata.name, component=names.MEMBER, group=group)},
    }


def reason_of(live: Manifest | None) -> str:
    """Return the reason why the group of a `PodGroup` or `Workload` waits; empty if its scheduler gives none."""
    conditions = names.parts(live, "status", "conditions")
    for kind, status in _REFUSALS:
        for one in conditions:
            if (one.get("type"), one.get("status")) == (kind, status) and one.get("message"):
                return str(one["message"])[:500]
    return ""


def removal_of(pod: Manifest) -> str | None:
    """Return the reason why a pod that a scheduler placed is being removed; None while it is not."""
    if SCHEDULER not in names.part(pod, "metadata", "labels") or not pod["metadata"].get("deletionTimestamp"):
        return None
    for one in names.parts(pod, "status", "conditions"):
        if one.get("type") in ("TerminationTarget", "DisruptionTarget") and one.get("status") == "True":
            return ": ".join(str(one[key]) for key in ("reason", "message") if one.get(key))[:500]
    return "no reason given"


def is_queued(pod: Manifest) -> bool:
    """Return whether a scheduler is to choose the node of `pod` and has not done so."""
    return SCHEDULER in names.part(pod, "metadata", "labels") and not names.part(pod, "spec").get("nodeName")
