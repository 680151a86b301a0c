"""Specifications that are refused while groups run, and requests that the API server refuses."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_operator.api import InvalidDeployment, Reason, security
from dsv4_operator.api.deployment import PAUSED
from dsv4_operator.api.values import parse_time
from dsv4_operator.builders import names
from dsv4_operator.controller import reconcile
from dsv4_operator.controller.queue import Backoffs, Part, text_of
from dsv4_operator.kube.resources import error_of
from dsv4_operator.lifecycle import rollout
from dsv4_operator.lifecycle.status import FORMING_SECONDS
from dsv4_testkit.pods_world import NAME, UID, World

BAD = {"nodeSelector": {"bad key!": "x"}, "hardware": "CPU", "nodesPerGroup": 2, "devicesPerNode": 1}
REFUSED = error_of(
    "POST /api/v1/namespaces/team/pods",
    403,
    "Forbidden",
    'pods "nano-0-i1-r0" is forbidden: violates PodSecurity "baseline:latest"',
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    logging.disable(logging.CRITICAL)
    yield World(monkeypatch)
    logging.disable(logging.NOTSET)


def told(world: World, reason: Reason) -> list[str]:
    return [event.message for event in world.events if event.reason is reason]


@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart of the operator"])
async def test_groups_are_supervised_by_the_last_valid_specification(world: World, restarted: bool) -> None:
    await world.serve()
    world.change(topology=BAD)
    await world.step()
    if restarted:
        await world.deployments.close()
        world.deployments = world.operator()
        await world.step()
    assert world.condition("Accepted")[:2] == ("False", "SpecInvalid")
    assert world.condition("Ready")[:2] == ("True", "AllGroupsReady"), "it is observed"
    assert world.status["observedGeneration"] == 2
    assert world.status["updatedReplicas"] == 0
    world.end(1, 1)
    await world.step()
    await world.step()
    assert world.condition("Ready")[0] == "False"
    await world.until(lambda: world.formed(2), 6.0)
    assert len(told(world, Reason.SPEC_INVALID)) == 1
    # The specification is valid again.
    world.change(topology={**BAD, "nodeSelector": {}})
    await world.step()
    assert world.condition("Accepted")[:2] == ("True", "PlanAccepted")
    await world.close()


@pytest.mark.parametrize("kept", [True, False], ids=["", "without the stored specification"])
async def test_a_stricter_rule_does_not_end_the_supervision_of_groups(
    world: World, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    world.change(engine={"maxModelLen": 1024, "extraArgs": ["--seed=4"]})
    await world.serve()
    await world.deployments.close()
    if not kept:
        # As written by an operator that did not store the specification.
        live = world.live()
        del live["status"]["rollout"]["accepted"]
        world.put(live)
    monkeypatch.setitem(security._OWNED_FLAGS, "--seed", "remove it")
    world.deployments = world.operator()
    for _ in range(5):
        await world.step()
    assert world.condition("Accepted")[:2] == ("False", "SpecInvalid")
    assert world.formed(1), "nothing is restarted"
    world.end(1, 0)
    await world.until(lambda: world.formed(2), 8.0)
    plan = json.loads(
        world.kube.objects["ConfigMap", "team", names.mounted_name("nano", UID, 0, 2)]["data"]["plan.json"]
    )
    assert "--seed=4" in json.dumps(plan), "formed from what it was"
    await world.close()


async def test_a_change_that_cannot_be_planned_leaves_a_starting_group_as_it_was(world: World) -> None:
    await world.until(lambda: world.formed(1), 5.0)
    for address in world.reports:
        world.reports.pop(address)
        break
    await world.step()
    assert world.status["groups"][0]["phase"] != "Serving"
    world.change(topology={**BAD, "nodeSelector": {"is/nowhere": "x"}})
    for _ in range(3):
        await world.step()
    assert world.condition("Accepted")[:2] == ("False", "NodesMissing")
    assert world.formed(1)
    world.end(1, 1)
    await world.until(lambda: world.formed(2), 6.0)
    await world.close()


@pytest.mark.parametrize("stop", [{"suspend": True}, {"replicas": 0}], ids=lambda stop: next(iter(stop)))
async def test_to_stop_needs_no_valid_specification(world: World, stop: dict[str, Any]) -> None:
    await world.serve()
    world.change(topology=BAD, **stop)
    await world.until(lambda: not world.pods(), 20.0)
    assert world.condition("Accepted")[0] == "False"
    await world.close()


async def test_a_failed_group_is_not_tried_again_for_a_refused_change(world: World) -> None:
    world.change(recovery={"maxRestarts": 0})
    await world.serve()
    world.end(1, 0)
    await world.until(lambda: world.status["phase"] == "Failed", 10.0)
    world.change(topology=BAD)
    for _ in range(5):
        await world.step()
    assert world.status["groups"][0]["phase"] == "Failed"
    assert world.status["groups"][0]["incarnation"] == 1
    await world.close()


async def test_groups_of_an_unknown_backend_are_not_called_ready(world: World) -> None:
    await world.serve()
    await world.deployments.close()

    def unknown(_: object) -> Any:
        raise InvalidDeployment([])

    world.deployments = world.operator()
    object.__setattr__(world.deployments._dependencies, "backend", unknown)
    await world.step()
    assert world.condition("Accepted")[:2] == ("False", "SpecInvalid")
    assert world.condition("Ready")[0] == "Unknown"
    assert world.status["readyReplicas"] == 0
    await world.close()


async def test_members_that_are_missing_during_a_pause_are_no_failure(world: World) -> None:
    def annotate(**annotations: str) -> None:
        live = world.live()
        live["metadata"]["annotations"] = annotations
        world.put(live)

    world.kube.failing["create", "Pod"] = REFUSED
    for _ in range(5):
        await world.step()
    annotate(**{PAUSED: "true"})
    await world.step()
    world.now += 2 * FORMING_SECONDS
    await world.step()
    assert world.condition("Degraded")[0] == "False"
    annotate()
    for _ in range(5):
        await world.step()
    assert world.condition("Degraded")[0] == "False"
    world.now += FORMING_SECONDS
    await world.step()
    assert world.condition("Degraded")[:2] == ("True", "FormingFailed")


async def test_refused_members_are_reported_and_use_no_restart(world: World) -> None:
    world.kube.failing["create", "Pod"] = REFUSED
    for _ in range(10):
        await world.step()
    (message,) = told(world, Reason.ACTION_FAILED)
    assert str(REFUSED) in message
    for kind, status, reason in (("Progressing", "True", "ActionFailed"), ("Ready", "False", "GroupsNotReady")):
        assert world.condition(kind)[:2] == (status, reason)
        assert str(REFUSED) in world.condition(kind)[2]
    assert world.condition("Degraded")[0] == "False"
    world.kube.requests.clear()
    begun = world.now
    while world.now < begun + 2 * FORMING_SECONDS:
        await world.step()
    attempts = world.kube.writes().count("create Pod nano-0-i1-r0")
    assert 5 <= attempts <= 15, "the backoff grows to a minute"
    assert world.condition("Degraded")[:2] == ("True", "FormingFailed")
    assert str(REFUSED) in world.condition("Degraded")[2]
    assert world.status["phase"] == "Failed"
    group = world.status["groups"][0]
    assert (group["phase"], group["incarnation"], group["totalRestarts"]) == ("Forming", 1, 0)
    assert list(world.deployments.failing()) == ["act"], "also between two attempts"
    assert len(told(world, Reason.ACTION_FAILED)) == 1
    world.now += 3600.0
    await world.step()
    assert len(told(world, Reason.ACTION_FAILED)) == 2, "the API server drops events after an hour"
    world.kube.failing.clear()
    await world.until(lambda: world.status["phase"] == "Serving", 90.0)
    assert world.condition("Degraded")[0] == "False"
    assert world.condition("Progressing")[1] == "Steady"
    assert list(world.deployments.failing()) == []
    await world.close()


async def test_one_group_that_cannot_be_formed_delays_no_other(world: World) -> None:
    world.change(replicas=2)
    await world.until(lambda: world.formed(1) and world.formed(1, 1), 10.0)
    real = world.kube.create

    async def create(manifest: Any, **options: Any) -> Any:
        if manifest["kind"] == "Pod" and manifest["metadata"]["name"].startswith("nano-1-"):
            raise REFUSED
        return await real(manifest, **options)

    world.kube.create = create  # type: ignore[method-assign]
    world.end(1, 0, group=1)
    for _ in range(120):
        assert await world.step() <= 1.01
    assert world.condition("Progressing")[2].count("group 1") == 1
    world.end(1, 1)
    await world.until(lambda: world.formed(2), 6.0)
    await world.close()


async def test_the_labels_of_a_member_are_not_its_life(world: World) -> None:
    await world.serve()
    pod = copy.deepcopy(world.kube.objects["Pod", "team", "nano-0-i1-r1"])
    for label in list(pod["metadata"]["labels"]):
        changed = copy.deepcopy(pod)
        del changed["metadata"]["labels"][label]
        world.kube._put(("Pod", "team", "nano-0-i1-r1"), changed)
        for _ in range(8):
            await world.step()
        assert world.formed(1), label
        assert any(label in message for message in told(world, Reason.OBJECT_IGNORED)), label
    # The member is ended nevertheless, although no selector matches it.
    pod["metadata"]["labels"] = {}
    world.kube._put(("Pod", "team", "nano-0-i1-r1"), pod)
    world.end(1, 0)
    await world.until(lambda: world.formed(2), 6.0)
    await world.close()


@pytest.mark.parametrize(
    "state", [{"terminated": {"exitCode": 0}}, {"waiting": {"reason": "CrashLoopBackOff"}}, {"running": {}}]
)
async def test_injected_containers_are_not_taken_for_the_member(world: World, state: dict[str, Any]) -> None:
    await world.serve()
    for rank in (0, 1):
        name = "Pod", "team", f"nano-0-i1-r{rank}"
        pod = copy.deepcopy(world.kube.objects[name])
        pod["spec"]["containers"].insert(0, {"name": "proxy", "ports": [{"containerPort": 15001}, {"name": "agent"}]})
        pod["status"]["containerStatuses"].insert(0, {"name": "proxy", "state": state, "restartCount": 9})
        world.kube._put(name, pod)
    for _ in range(10):
        await world.step()
    assert world.condition("Ready")[0] == "True"
    assert world.formed(1)
    world.end(1, 1)
    await world.until(lambda: world.formed(2), 6.0)
    await world.close()


async def test_pods_of_others_with_a_members_name_are_ignored_and_reported(world: World) -> None:
    await world.serve()
    pod = copy.deepcopy(world.kube.objects["Pod", "team", "nano-0-i1-r1"])
    pod["metadata"] |= {"name": "nano-0-i1-r5", "ownerReferences": []}
    pod["status"]["phase"] = "Failed"
    world.kube._put(("Pod", "team", "nano-0-i1-r5"), pod)
    for _ in range(5):
        await world.step()
    assert world.condition("Ready")[0] == "True"
    (message,) = told(world, Reason.OBJECT_IGNORED)
    assert "nano-0-i1-r5 is ignored" in message
    await world.close()


async def test_removed_groups_leave_the_status_and_their_incarnations_are_not_reused(
    world: World,
) -> None:
    world.change(replicas=2)
    await world.until(lambda: world.formed(1) and world.formed(1, 1), 10.0)
    world.end(1, 0, group=1)
    await world.until(lambda: world.formed(2, 1) and world.status["readyReplicas"] == 2, 10.0)
    world.change(replicas=1)
    await world.until(lambda: len(world.status["groups"]) == 1, 20.0)
    assert world.formed(1)
    assert not [one for one in world.pods() if "nano-1-" in one["metadata"]["name"]]
    assert "the group is stopped" in told(world, Reason.GROUP_STOPPED)
    world.change(replicas=2)
    await world.until(lambda: world.formed(3, 1), 10.0)
    await world.close()


async def test_a_status_that_another_writer_changed_is_read_again(world: World) -> None:
    await world.serve()
    live = world.live()
    live["status"]["groups"][0]["incarnation"] = 7
    world.put(live)
    await world.until(lambda: world.formed(8), 10.0)
    await world.close()


def test_messages_are_short_and_without_secrets() -> None:
    secret = "hf_" + "a" * 34
    message = text_of(error_of("PUT /x", 422, "Invalid", f'spec.env[0].value: Invalid value: "{secret}": no'))
    assert secret not in message
    assert "spec.env[0].value" in message
    assert len(text_of(error_of("PUT /x", 422, "Invalid", "word " * 1000))) <= 500
    assert text_of(KeyError(secret)) == "internal error (KeyError); see the operator's log"
    key = "-----BEGIN PRIVATE KEY----- MIIabc"
    assert "MIIabc" not in text_of(error_of("PUT /x", 422, "Invalid", key))


def test_the_backoff_of_a_part_is_its_own_and_of_one_attempt() -> None:
    backoffs, part, other = Backoffs(jitter=lambda: 1.0), Part("act", 8.0, 0), Part("frontend", 300.0)
    waits = [backoffs.failed(part, "no", now, "form")[0].until - now for now in (0.0, 1.0, 3.0, 7.0, 15.0)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert backoffs.waits(part, 22.0, "form")
    assert not backoffs.waits(part, 23.0, "form")
    assert not backoffs.waits(part, 16.0, "fence"), "another attempt waits for nothing"
    backoffs.failed(other, "no", 20.0)
    assert not backoffs.waits(other, 21.0)
    assert backoffs.due(20.5) == 21.0
    assert [str(one) for one in backoffs.problems()] == ["group 0: no", "no"]
    backoffs.succeeded(part)
    backoffs.succeeded(other)
    assert backoffs.problems() == ()
    assert backoffs.due(0.0) == float("inf")


async def test_an_unexpected_error_of_the_whole_reconcile_is_an_event(world: World) -> None:
    await world.serve()

    def broken(*_: object) -> Any:
        raise RuntimeError("a defect")

    world.deployments._states[NAME[1], NAME[2]].update = broken  # type: ignore[method-assign]
    for _ in range(3):
        await world.step()
    assert told(world, Reason.ACTION_FAILED) == ["internal error (RuntimeError); see the operator's log"]
    await asyncio.sleep(0)
    await world.close()


async def test_a_defect_that_one_group_shows_leaves_the_others_supervised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.change(replicas=2)
    await world.until(lambda: world.status.get("readyReplicas") == 2, 10.0)
    real = rollout.decide

    def decide(deployment: Any, observed: Any, *arguments: Any, **options: Any) -> Any:
        if observed.key.group == 1:
            raise RuntimeError
        return real(deployment, observed, *arguments, **options)

    monkeypatch.setattr(rollout, "decide", decide)
    await world.step()
    assert told(world, Reason.ACTION_FAILED) == [
        "it cannot be decided: internal error (RuntimeError); see the operator's log"
    ]
    world.end(1, 1)
    await world.until(lambda: world.formed(2), 6.0)
    await world.close()


@pytest.mark.parametrize("group", [0, 1])
async def test_a_group_that_cannot_be_observed_is_not_called_ready_and_leaves_the_other_supervised(
    world: World, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    world.change(replicas=2)
    await world.until(lambda: world.status.get("readyReplicas") == 2, 10.0)
    real = world.backend.observe

    async def observe(deployment: Any, index: int) -> Any:
        if index == group:
            raise OSError("not now")
        return await real(deployment, index)

    monkeypatch.setattr(world.backend, "observe", observe)
    for _ in range(20):
        assert await world.step() <= 1.01
    assert world.condition("Ready")[0] == "Unknown"
    assert "not now" in world.condition("Ready")[2]
    assert world.status["readyReplicas"] == 1
    assert world.formed(1, group), "nothing is concluded from what is not seen"
    world.end(1, 1, group=1 - group)
    await world.until(lambda: world.formed(2, 1 - group), 6.0)
    monkeypatch.undo()
    await world.close()


async def test_a_planner_with_a_defect_leaves_supervision(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.serve()
    real = reconcile.plan_group

    def plan(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(reconcile, "plan_group", plan)
    world.end(1, 1)
    await world.until(lambda: not world.pods(1), 6.0)
    await world.step()
    assert world.condition("Progressing")[1] == "ActionFailed"
    assert world.condition("Accepted")[:2] == ("True", "PlanAccepted"), "nothing was found out about the specification"
    monkeypatch.setattr(reconcile, "plan_group", real)
    await world.until(lambda: world.formed(2), 16.0)
    await world.until(lambda: world.condition("Progressing")[1] == "Steady", 5.0)
    await world.close()


async def test_a_group_whose_requests_hang_delays_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_ACT_SECONDS", 0.05)
    world.change(replicas=2)
    await world.until(lambda: world.status.get("readyReplicas") == 2, 10.0)
    real, answered = world.kube.create, asyncio.Event()

    async def create(manifest: Any, **options: Any) -> Any:
        if manifest["kind"] == "Pod" and manifest["metadata"]["name"].startswith("nano-1-"):
            await answered.wait()
        return await real(manifest, **options)

    monkeypatch.setattr(world.kube, "create", create)
    world.end(1, 0, group=1)
    for _ in range(20):
        begun = asyncio.get_running_loop().time()
        assert await world.step() <= 1.01
        assert asyncio.get_running_loop().time() - begun < 15
    assert world.status["groups"][1]["phase"] == "Forming"
    world.end(1, 1)
    await world.until(lambda: world.formed(2), 6.0)
    answered.set()
    await world.until(lambda: world.status["readyReplicas"] == 2, 6.0)
    assert world.formed(2, 1)
    assert world.kube.writes().count("create Pod nano-1-i2-r0") == 1
    await world.close()


async def test_the_times_of_conditions_include_a_refusal_before_any_group_was_formed(world: World) -> None:
    world.change(suspend=True)
    await world.step()
    await world.step()
    assert world.condition("Accepted")[0] == "True"
    good = world.live()["spec"]["topology"]
    world.change(topology=BAD)
    world.now += 100.0
    await world.step()
    assert world.condition("Accepted")[:2] == ("False", "SpecInvalid")
    world.now += 100.0
    corrected = world.now
    world.change(topology=good)
    await world.step()
    accepted = next(one for one in world.status["conditions"] if one["type"] == "Accepted")
    assert (accepted["status"], accepted["observedGeneration"]) == ("True", 4)
    assert parse_time(accepted["lastTransitionTime"]) >= corrected - 1.0
    assert [event.reason for event in world.events if event.reason in (Reason.PLAN_ACCEPTED, Reason.SPEC_INVALID)] == [
        Reason.PLAN_ACCEPTED,
        Reason.SPEC_INVALID,
        Reason.PLAN_ACCEPTED,
    ]
    await world.close()
