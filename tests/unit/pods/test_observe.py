"""Pods as members, from real states of pods as API servers and kubelets report them."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.api.values import parse_time
from dsv4_operator.backends.pods import Cluster, PodsBackend
from dsv4_operator.backends.pods.observe import (
    IMAGE_SECONDS,
    SCHEDULE_SECONDS,
    AgentReport,
    Member,
    endpoint_of,
    evidence_config,
    member_of,
    not_ready_since,
    observed,
    superfluous_evidence,
)
from dsv4_operator.builders import names
from dsv4_operator.builders.member import removal_of
from dsv4_operator.lifecycle.observed import ObservedMember
from dsv4_runtime.contract import AgentStatus, Cause, Phase
from dsv4_testkit.documents import agent_status
from dsv4_testkit.pod_objects import Manifest, node, owners

BORN = parse_time("2026-11-21T12:00:00Z")


def pod(status: Manifest, *, on: str | None = "spark-1", deleted: bool = False, rank: int = 1) -> Manifest:
    metadata: Manifest = {
        "name": f"flash-0-i2-r{rank}",
        "namespace": "team",
        "uid": f"uid-{rank}",
        "creationTimestamp": "2026-11-21T12:00:00Z",
        "labels": names.labels("flash", component=names.MEMBER, group=0, incarnation=2, rank=rank),
        "ownerReferences": owners("flash", "uid-of-it"),
    }
    if deleted:
        metadata |= {"deletionTimestamp": "2026-11-21T12:01:00Z", "deletionGracePeriodSeconds": 23}
    spec: Manifest = {"containers": [{"name": "agent", "ports": [{"name": "agent", "containerPort": 8090}]}]}
    if on is not None:
        spec["nodeName"] = on
    return {"metadata": metadata, "spec": spec, "status": status}


def container(**state: Any) -> Manifest:
    return {"phase": "Pending", "containerStatuses": [{"name": "agent", "state": state, "ready": False}]}


def said(phase: Phase = Phase.SERVING) -> AgentStatus:
    return agent_status(1, phase, now=BORN, deployment="flash", incarnation=2)


def member(one: Manifest) -> Member:
    found = member_of(one, "flash", 0, None)
    assert isinstance(found, Member)
    return found


def seen(one: Manifest, age: float, word: AgentReport | None = None, *, formed: bool = True) -> ObservedMember:
    return observed(member(one), word, None, BORN + age, since=BORN, formed=formed)


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node affinity.",
        }
    ],
}


def test_a_running_pod_is_its_member() -> None:
    running = {"phase": "Running", "podIP": "10.244.1.7", **container(running={"startedAt": "2026-11-21T12:00:05Z"})}
    running["phase"] = "Running"
    member = seen(pod(running), 30, AgentReport(said(), BORN + 29))
    assert (member.incarnation, member.rank, member.node, member.address) == (2, 1, "spark-1", "10.244.1.7")
    assert (member.started, member.ended, member.waiting, member.heard) == (BORN, None, None, BORN + 29)
    place = endpoint_of(pod(running))
    assert place is not None
    assert place.url == "http://10.244.1.7:8090"
    assert endpoint_of(pod({"phase": "Pending"})) is None


def test_a_pod_without_a_place_waits_and_then_is_a_failure_with_the_schedulers_words() -> None:
    early = seen(pod(UNSCHEDULABLE, on=None), SCHEDULE_SECONDS - 1)
    assert early.ended is None
    assert early.waiting is not None
    assert "Insufficient memory" in early.waiting
    late = seen(pod(UNSCHEDULABLE, on=None), SCHEDULE_SECONDS + 1)
    assert late.cause is Cause.FORMATION_TIMEOUT
    assert late.ended is not None
    assert "1 Insufficient memory" in late.ended


def test_an_image_may_take_its_time_but_one_that_cannot_be_had_may_not() -> None:
    pulling = seen(pod(container(waiting={"reason": "ContainerCreating"})), 900)
    assert (pulling.ended, pulling.waiting) == (None, "ContainerCreating")
    never = container(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "mine:1"'})
    assert seen(pod(never), IMAGE_SECONDS - 1).ended is None
    assert seen(pod(never), IMAGE_SECONDS + 1).ended == 'ImagePullBackOff: Back-off pulling image "mine:1"'
    assert seen(pod(container(waiting={"reason": "ContainerCreating"})), 3600).cause is Cause.FORMATION_TIMEOUT


def test_an_agent_that_waits_for_the_others_addresses_is_not_silent() -> None:
    running = container(running={"startedAt": "2026-11-21T12:00:05Z"})
    assert seen(pod(running), 100, formed=False).waiting == "its agent waits for the addresses of the other members"
    assert seen(pod(running), 100).waiting is None


def ended(phase: str = "Failed", **how: Any) -> Manifest:
    return {"phase": phase, "containerStatuses": [{"name": "agent", "state": {"terminated": how}}]}


EVICTED = "The node was low on resource: memory."
SHUT_DOWN = "Pod was terminated in response to imminent node shutdown."


@pytest.mark.parametrize(
    ("status", "text", "cause"),
    [
        (ended("Succeeded", exitCode=0), "exit code 0", None),
        (ended(exitCode=2, message="one\ndsv4-agent: no plan\n"), "exit code 2: dsv4-agent: no plan", None),
        (
            ended(exitCode=137, reason="OOMKilled"),
            "the kernel ended it because of a lack of memory",
            Cause.OUT_OF_MEMORY_HOST,
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": EVICTED}, f"Evicted: {EVICTED}", None),
        (
            {"phase": "Failed", "reason": "Terminated", "message": SHUT_DOWN},
            f"Terminated: {SHUT_DOWN}",
            Cause.NODE_LOST,
        ),
    ],
)
def test_how_a_member_ended(status: Manifest, text: str, cause: Cause | None) -> None:
    member = seen(pod(status), 50, AgentReport(said(), BORN + 40))
    assert (member.ended, member.cause, member.ended_time) == (text, cause, BORN + 50)


def test_the_time_of_an_end_is_that_of_the_first_observation() -> None:
    found = observed(member(pod({"phase": "Failed"})), None, BORN + 7, BORN + 50, since=BORN, formed=True)
    assert found.ended_time == BORN + 7


class View:
    """A cache with one pod."""

    def __init__(self, one: Manifest) -> None:
        self._pods = [one]

    def pods(self, *_: object) -> list[Manifest]:
        return self._pods

    def all(self) -> list[Manifest]:
        return self._pods


@pytest.mark.parametrize("offset", [-86_400.0, 0.0, 86_400.0])
async def test_the_wait_of_a_pod_is_measured_independently_of_clock_offsets(
    deployment: DSV4Deployment, monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    """The API server's clock is behind the operator's, equal to it, or ahead of it."""
    nobody: Any = None
    backend = PodsBackend(
        Cluster(nobody, View(pod(UNSCHEDULABLE, on=None)), runtime_image="none"), changed=lambda *_: None
    )
    ended = []
    for seconds in (0.0, SCHEDULE_SECONDS - 1, SCHEDULE_SECONDS + 1):
        monkeypatch.setattr("dsv4_operator.backends.pods.backend.unix_time", lambda now=seconds: BORN - offset + now)
        (member,) = (await backend.observe(deployment, 0)).members
        ended.append(member.ended)
    assert ended[:2] == [None, None]
    assert str(ended[2]).startswith("not scheduled for 61 s: ")
    await backend.close()


def test_a_pod_that_is_being_ended_runs_until_it_is_gone() -> None:
    running = {"phase": "Running", "podIP": "10.244.1.7"}
    assert seen(pod(running, deleted=True), 70, AgentReport(said(Phase.DRAINING), BORN + 69)).ended is None
    assert seen(pod({"phase": "Pending"}, deleted=True), 70).ended == "its pod was deleted before its agent answered"


def test_since_when_a_node_is_lost() -> None:
    assert not_ready_since(node("a")) is None
    assert not_ready_since(node("a", ready="Unknown")) == "2026-11-21T10:00:00Z"
    assert not_ready_since({"status": {}}) == "never ready"


def test_evidence_fits_its_limit_for_any_answers_of_agents(deployment: DSV4Deployment) -> None:
    members = [seen(pod({"phase": "Running"}, rank=rank), 10, AgentReport(said(), BORN)) for rank in range(16)]
    long = (
        b'{"firstFatal": {"vllm": "died"}, "lastLines": {"vllm": ['
        + b",".join([b'"' + b"x" * 900 + b'"'] * 300)
        + b"]}}"
    )
    told: dict[int, bytes | None] = {0: None, 1: b"not json", **dict.fromkeys(range(2, 16), long)}
    data: dict[str, str] = evidence_config(deployment, 0, 2, members, told)["data"]
    assert sum(len(text.encode()) for text in data.values()) <= 60 * 1024
    assert '"agent": "did not answer"' in data["m0.json"]
    assert '"died"' in data["m5.json"]


def test_only_the_newest_evidence_is_kept() -> None:
    kept = [{"metadata": {"name": f"e-{n}", "labels": {names.INCARNATION: str(n)}}} for n in (10, 9, 2, 30, 4, 5, 6)]
    assert [one["metadata"]["name"] for one in superfluous_evidence(kept)] == ["e-2", "e-4"]


@pytest.mark.parametrize(
    ("reason", "deleted", "removal"),
    [
        ("EvictionByEvictionAPI", True, "EvictionByEvictionAPI: drained"),
        ("PreemptionByScheduler", True, "PreemptionByScheduler: drained"),
        ("DeletionByTaintManager", True, None),
        ("EvictionByEvictionAPI", False, None),
    ],
)
def test_an_eviction_is_no_failure_and_a_lost_node_is(reason: str, deleted: bool, removal: str | None) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "drained"}
    metadata = {"name": "chat-0-i1-r1"} | ({"deletionTimestamp": "2026-11-26T20:00:00Z"} if deleted else {})
    assert removal_of({"metadata": metadata, "status": {"conditions": [condition]}}) == removal
