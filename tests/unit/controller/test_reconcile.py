"""The loop around the pure decisions: saved status, and consequences of failing actions."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from dsv4_operator.api import ConditionStatus, ConditionType, DeploymentStatus, DSV4Deployment, GroupPhase, Reason, load
from dsv4_operator.controller.reconcile import Reconciler
from dsv4_operator.kube import KubeError
from dsv4_operator.lifecycle.decide import POLL_SECONDS, RESYNC_SECONDS
from dsv4_runtime.contract import GroupPlan
from dsv4_testkit.reconcile_world import ENDPOINTS, NANO, Clock, Members, Saved, until_formed, until_served


async def test_a_number_is_kept_before_its_members_are_made(world: tuple) -> None:
    members, reconciler, saved, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    # The last status saved before `ensure` contains the number.
    assert saved[0].status.groups[0].incarnation == 1
    assert members.calls[-1] == "ensure 1"


async def test_evidence_that_cannot_be_saved_delays_nothing(world: tuple) -> None:
    members, reconciler, _, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.broken = {"evidence"}
    clock.now += 5
    members.end(1, 1, clock.now)
    await until_formed(members, reconciler, deployment, 2)
    assert members.calls.count("evidence 1") == 1
    assert members.calls.index("evidence 1") < members.calls.index("fence 1") < members.calls.index("ensure 2")


async def test_a_fence_that_fails_is_tried_again_and_nothing_is_formed_meanwhile(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.broken = {"fence"}
    clock.now += 5
    members.end(1, 1, clock.now)
    for _ in range(3):
        clock.now += 10
        assert 0 < await reconciler.reconcile(deployment) <= POLL_SECONDS
    assert members.calls.count("fence 1") == 3
    assert "ensure 2" not in members.calls
    progressing = saved[-1].status.condition(ConditionType.PROGRESSING)
    assert (progressing.reason, "fence is broken" in progressing.message) == (Reason.ACTION_FAILED, True)
    # The status is saved nevertheless, with the current phase.
    assert saved[-1].status.groups[0].phase is GroupPhase.RECOVERING
    members.broken = set()
    clock.now += 10
    await until_formed(members, reconciler, deployment, 2)
    assert saved[-1].status.condition(ConditionType.PROGRESSING).reason is not Reason.ACTION_FAILED


async def test_a_new_process_waits_for_reports_before_it_calls_a_member_silent(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    members.speak(clock.now)
    await reconciler.reconcile(deployment)
    served = saved[-1]
    assert served.status.groups[0].phase is GroupPhase.SERVING
    heard = dict(members.members)

    def successor() -> Reconciler:
        members.members = {name: replace(member, status=None, heard=None) for name, member in heard.items()}
        saved.clear()
        return Reconciler(members, ENDPOINTS, save=saved.save, clock=clock)

    # The members respond in time: nothing changes, so nothing is written.
    following = successor()
    assert await following.reconcile(served) < 1
    clock.now += 1
    members.speak(clock.now)
    await following.reconcile(served)
    assert saved == []
    # The members do not respond and count as silent.
    following = successor()
    for _ in range(5):
        await following.reconcile(served)
        clock.now += 1
    assert saved[-1].status.groups[0].members[0].silent_since is not None
    # An ended member is detected without that delay.
    following = successor()
    members.end(1, 1, clock.now)
    await following.reconcile(served)
    assert saved[-1].status.groups[0].phase is GroupPhase.RECOVERING


async def test_a_plan_is_reserved_with_the_version_that_it_was_made_from() -> None:
    members, clock = Members(), Clock()
    told = members.reserved
    reconciler = Reconciler(members, ENDPOINTS, save=Saved().save, clock=clock)
    served = load(NANO)
    await until_served(members, reconciler, served, clock)
    assert told
    assert set(told) == {(served.spec.engine.max_model_len, 1)}
    told.clear()
    engine = served.spec.engine.model_copy(update={"max_model_len": 2048})
    changed = served.model_copy(update={"spec": served.spec.model_copy(update={"engine": engine})})
    for _ in range(6):
        clock.now += 1
        await reconciler.reconcile(changed)
    assert set(told) <= {(served.spec.engine.max_model_len, 2), (2048, 2)}
    assert (2048, 2) in told


async def test_a_plan_is_made_of_the_nodes_that_are_free_now(world: tuple) -> None:
    members, reconciler, _, _ = world
    listed = await members.facts(load(NANO))
    members.refreshed = replace(listed, nodes=tuple(replace(one, name=f"free-{one.name}") for one in listed.nodes))
    planned = []
    ensure = members.ensure

    async def planning(deployment: DSV4Deployment, plan: GroupPlan) -> None:
        planned.extend(member.node for member in plan.members)
        await ensure(deployment, plan)

    members.ensure = planning
    await until_formed(members, reconciler, load(NANO), 1)
    assert planned == ["free-n0", "free-n1"]


async def test_progress_alone_is_saved_now_and_then(world: tuple) -> None:
    members, _, saved, clock = world

    reconciler = Reconciler(members, ENDPOINTS, save=saved.save, progress_interval=5.0, clock=clock)
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    for second in range(20):
        clock.now += 1
        members.speak(clock.now, f"{5 * second} % of the weights")
        await reconciler.reconcile(deployment)
    messages = {member.message for one in saved for member in one.status.groups[0].members if member.rank == 0}
    assert len(messages - {""}) in (3, 4, 5)
    assert reconciler.status.groups[0].members[0].message == "95 % of the weights"
    # Important changes are saved immediately.
    count = len(saved)
    clock.now += 1
    members.end(1, 1, clock.now)
    await reconciler.reconcile(deployment)
    # The death is saved before the action, and the location of its evidence afterwards.
    assert len(saved) == count + 2


async def test_nothing_new_means_nothing_saved(world: tuple) -> None:
    members, reconciler, saved, _ = world
    deployment = load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    count = len(saved)
    for _ in range(5):
        await reconciler.reconcile(deployment)
    assert len(saved) == count


async def test_a_full_disk_forms_nothing_and_does_not_keep_a_deletion_from_its_end(world: tuple) -> None:
    members, _, _, clock = world
    full = False

    async def save(_: DSV4Deployment) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    reconciler, deployment = Reconciler(members, ENDPOINTS, save=save, clock=clock), load(NANO)
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    full = True
    clock.now += 5
    members.end(1, 1, clock.now)
    for _ in range(3):
        clock.now += 1
        await reconciler.reconcile(deployment)
    assert "ensure 2" not in members.calls
    for _ in range(5):
        await reconciler.reconcile(deployment, deleting=True)
    assert reconciler.ended
    assert members.members == {}


async def test_zero_replicas_cause_no_early_reconciliation(world: tuple) -> None:
    _, reconciler, _, _ = world
    deployment = load(NANO)
    none = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"replicas": 0})})
    for _ in range(3):
        assert await reconciler.reconcile(none) == RESYNC_SECONDS


@pytest.mark.parametrize("error", [KubeError("the status was changed"), OSError(errno.EIO, "Input/output error")])
async def test_nothing_is_decided_on_a_status_that_was_not_saved(world: tuple, error: Exception) -> None:
    members, _, saved, clock = world
    broken = False

    async def save(deployment: DSV4Deployment) -> None:
        if broken:
            raise error
        await saved.save(deployment)

    reconciler, deployment = Reconciler(members, ENDPOINTS, save=save, clock=clock), load(NANO)
    broken = True
    for _ in range(3):
        clock.now += 10
        assert 0.9 * POLL_SECONDS <= await reconciler.reconcile(deployment) <= POLL_SECONDS
        # A claim that was not saved is void; the next turn repeats it and forms nothing before.
        assert reconciler.status == deployment.status
    assert members.calls == []
    broken = False
    clock.now += 10
    await until_formed(members, reconciler, deployment, 1)
    clock.now += 5
    members.end(1, 1, clock.now)
    broken = True
    members.calls.clear()
    for _ in range(3):
        clock.now += 1
        await reconciler.reconcile(deployment)
    assert members.calls == [], "what died is told before it is ended"
    # The backoff for writes of the status is short, because recovery from a death waits for it.
    broken = False
    clock.now += 6
    await until_formed(members, reconciler, deployment, 2)


async def test_an_endpoint_that_does_not_answer_is_no_reason_to_touch_members(world: tuple) -> None:
    members, reconciler, saved, clock = world
    deployment = load(NANO)
    members.unreachable = "no gateway is ready"
    await until_served(members, reconciler, deployment, clock)
    calls = list(members.calls)
    for _ in range(20):
        clock.now += 30
        members.speak(clock.now)
        await reconciler.reconcile(deployment)
    assert members.calls == calls
    ready = saved[-1].status.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, Reason.ENDPOINT_NOT_READY)
    assert saved[-1].status.groups[0].phase is GroupPhase.SERVING
    members.unreachable = None
    await reconciler.reconcile(deployment)
    ready = saved[-1].status.condition(ConditionType.READY)
    assert ready is not None
    assert ready.status is ConditionStatus.TRUE


async def test_members_that_appear_are_saved_with_the_next_news_or_after_the_interval(world: tuple) -> None:
    members, _, saved, clock = world
    deployment = load(NANO)
    reconciler = Reconciler(members, ENDPOINTS, save=saved.save, start_interval=2.0, clock=clock)
    await until_formed(members, reconciler, deployment, 1)
    assert [one.status.groups[0].phase for one in saved] == [GroupPhase.FORMING], "the claim is saved at once"
    for _ in range(3):
        clock.now += 0.5
        assert await reconciler.reconcile(deployment) <= POLL_SECONDS
    assert reconciler.status.groups[0].phase is GroupPhase.STARTING
    assert len(saved) == 1
    clock.now += 0.5
    await reconciler.reconcile(deployment)
    assert (len(saved), saved[-1].status.groups[0].phase) == (2, GroupPhase.STARTING)
    assert len(saved[-1].status.groups[0].members) == 2
    members.speak(clock.now)
    await reconciler.reconcile(deployment)
    assert (len(saved), saved[-1].status.groups[0].phase) == (3, GroupPhase.SERVING), "at once"


async def test_a_failure_while_members_start_is_saved_at_once(world: tuple) -> None:
    members, _, saved, clock = world
    deployment = load(NANO)
    reconciler = Reconciler(members, ENDPOINTS, save=saved.save, start_interval=60.0, clock=clock)
    members.broken = {"ensure"}
    for _ in range(3):
        await reconciler.reconcile(deployment)
    progressing = saved[-1].status.condition(ConditionType.PROGRESSING)
    assert (len(saved), progressing.reason) == (2, Reason.ACTION_FAILED)
    assert "ensure is broken" in progressing.message
    members.broken = set()
    clock.now += 5
    await until_formed(members, reconciler, deployment, 1)
    await reconciler.reconcile(deployment)
    before = len(saved)
    members.end(1, 1, clock.now)
    await reconciler.reconcile(deployment)
    assert saved[before].status.groups[0].last_failure is not None
    assert members.calls.index("evidence 1") < members.calls.index("fence 1")


class WithFrontend(Members):
    async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
        self.calls.append("frontend")


@pytest.mark.parametrize("saves", [True, False])
async def test_the_members_of_a_new_deployment_come_before_its_front_end(world: tuple, *, saves: bool) -> None:
    _, _, saved, clock = world
    members = WithFrontend()

    async def save(deployment: DSV4Deployment) -> None:
        if not saves:
            raise KubeError("no")
        await saved.save(deployment)

    reconciler, deployment = Reconciler(members, ENDPOINTS, save=save, clock=clock), load(NANO)
    await reconciler.reconcile(deployment)
    # Without a claim that was saved, nothing is formed soon.
    assert members.calls == ([] if saves else ["frontend"])
    if not saves:
        return
    await reconciler.reconcile(deployment)
    assert members.calls == ["ensure 1", "frontend"]
    members.end(1, 1, clock.now)
    members.calls.clear()
    while "ensure 2" not in members.calls:
        clock.now += 10
        await reconciler.reconcile(deployment)
        assert members.calls[-1] == "frontend", "later at each reconcile"


async def test_the_next_process_keeps_the_problem_of_the_front_end(world: tuple) -> None:
    _, _, saved, clock = world

    class Broken(WithFrontend):
        async def ensure_frontend(self, deployment: DSV4Deployment, status: DeploymentStatus) -> None:
            raise KubeError("Service nano-0 belongs to another owner; remove or rename it")

    members, deployment = Broken(), load(NANO)
    await until_served(members, Reconciler(members, ENDPOINTS, save=saved.save, clock=clock), deployment, clock)
    before = saved[-1]
    progressing = before.status.condition(ConditionType.PROGRESSING)
    assert "remove or rename it" in progressing.message
    count, reconciler = len(saved), Reconciler(members, ENDPOINTS, save=saved.save, clock=clock)
    for _ in range(3):
        clock.now += 1
        await reconciler.reconcile(before)
    for each in saved[count:]:
        assert each.status.condition(ConditionType.PROGRESSING) == progressing
    # Without a problem the status does not wait for the front end.
    healthy = WithFrontend()
    await until_served(healthy, Reconciler(healthy, ENDPOINTS, save=saved.save, clock=clock), deployment, clock)
    healthy.calls.clear()
    await Reconciler(healthy, ENDPOINTS, save=saved.save, clock=clock).reconcile(saved[-1])
    assert healthy.calls == ["frontend"]


async def test_evidence_that_an_earlier_process_did_not_complete_is_collected_once(world: tuple) -> None:
    members, first, saved, clock = world
    deployment = load(NANO)
    await until_served(members, first, deployment, clock)
    members.evidence_there.clear()
    clock.now += 5
    members.end(1, 1, clock.now)
    await first.reconcile(deployment)
    before = saved[-1]
    assert before.status.groups[0].phase is GroupPhase.RECOVERING
    # This process is killed.
    await first.close()
    members.evidence_there.set()
    members.calls.clear()
    for _ in range(2):
        following = Reconciler(members, ENDPOINTS, save=saved.save, clock=clock)
        clock.now += 1
        await until_formed(members, following, saved[-1], 2)
        await following.close()
    assert members.calls.count("evidence 1") == 1
    assert members.calls.index("evidence 1") < members.calls.index("fence 1") < members.calls.index("ensure 2")
    assert saved[-1].status.groups[0].last_failure.evidence
