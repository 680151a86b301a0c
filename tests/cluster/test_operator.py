"""The operator as a process on a real API server: nodes and agents are stand-ins, everything else is real."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path

import pytest
from clusterkit.client import Cluster as ControlPlane
from clusterkit.waiting import unchanged
from operator_process import OperatorProcess, until
from operator_world import (
    NAME,
    World,
    addresses,
    agents,
    condition,
    group,
    kube,
    manifest,
    phase,
    world,
)

from dsv4_operator.api import InvalidDeployment, parse
from dsv4_operator.api.deployment import PAUSED, RESTART_AT
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    EVENTS,
    LEASES,
    PODS,
    Client,
    KubeError,
    Manifest,
)
from dsv4_testkit.scripted_gateway import ScriptedGateway
from dsv4_testkit.waiting import Pauses

__all__ = ["addresses", "agents", "kube", "world"]

pytestmark = pytest.mark.usefixtures("definition")

KILLS = 50


async def test_a_deployment_serves_and_leaves_nothing(world: World) -> None:
    await world.kube.create(manifest(world.namespace))
    found = await world.serving(1)
    assert condition(found, "Accepted")["status"] == "True"
    assert found["status"]["endpoint"] == f"http://{NAME}.{world.namespace}.svc:8000/v1"
    assert found["metadata"].get("finalizers") is None
    assert await world.pods()
    for reason in ("PlanAccepted", "GroupForming", "GroupStarting", "EngineReady"):
        told = await world.event(reason)
        assert told["regarding"]["uid"] == found["metadata"]["uid"]
    await world.kube.delete(DSV4_DEPLOYMENTS, world.namespace, NAME)
    deadline = time.monotonic() + 60
    while left := await world.owned():
        assert time.monotonic() < deadline, f"still there: {left}"
        await asyncio.sleep(0.2)
    await until("it is forgotten", lambda: world.operator.metrics()["dsv4_operator_queue"] == 0, seconds=60)


async def test_ready_follows_the_responses_through_the_endpoint(world: World) -> None:
    await world.kube.create(manifest(world.namespace))
    found = await world.serving(1)
    assert (condition(found, "Ready")["status"], condition(found, "Ready")["reason"]) == ("False", "EndpointNotReady")
    pods = await world.pods()
    async with ScriptedGateway(world.kube, world.namespace, NAME).running() as gateway:
        await world.until("it is reached", lambda found: condition(found, "Ready").get("status") == "True")
        gateway.problem = "agent credentials rejected by group 0 (401)"
        # Nothing changed, so it takes until the next request, and a second one confirms it.
        found = await world.until("it is noticed", lambda found: condition(found, "Ready")["status"] == "False")
        assert gateway.problem in condition(found, "Ready")["message"]
        assert condition(found, "Ready")["reason"] == "EndpointNotReady"
        assert phase(found) == "Serving"
        deadline = time.monotonic() + 60
        while not [one for one in await world.kube.list(EVENTS, world.namespace) if gateway.problem in one["note"]]:
            assert time.monotonic() < deadline, "there is no event"
            await asyncio.sleep(0.2)
        gateway.problem = ""
        await world.until("it is reached again", lambda found: condition(found, "Ready")["status"] == "True")
        # Another operator does not revert it.
        world.operator.kill()
        world.operator.start()
        await world.operator.until_leading()
        asked = gateway.asked
        await world.until("it is tried anew", lambda _: gateway.asked > asked)
        assert condition(await world.live(), "Ready")["status"] == "True"
    await world.until("the gateway is missed", lambda found: condition(found, "Ready")["status"] == "False")
    assert await world.pods() == pods, "no member ends for it"


async def test_a_deployment_that_fits_nowhere_has_no_gateways(world: World) -> None:
    nowhere = {"topology": {**manifest("")["spec"]["topology"], "nodeSelector": {"no": "where"}}}
    await world.kube.create(manifest(world.namespace, **nowhere))
    await world.until("it is refused", lambda found: condition(found, "Accepted").get("status") == "False")
    await asyncio.sleep(3)
    assert not [one for one in await world.owned() if one[0] == "Deployment"]


async def test_scaling_leaves_the_gateways_that_are_there(world: World) -> None:
    await world.kube.create(manifest(world.namespace))
    await world.serving(1)

    async def gateways() -> dict[str, tuple[str, int]]:
        chosen = names.selector(names.labels(NAME, component=names.GATEWAY))
        found = await world.kube.list(DEPLOYMENTS, world.namespace, labels=chosen)
        return {one["metadata"]["name"]: (one["metadata"]["uid"], one["metadata"]["generation"]) for one in found}

    before = await gateways()
    assert set(before) == {f"{NAME}-0-gateway"}
    await world.change(replicas=2)
    await world.until("both serve", lambda found: group(found, 1).get("phase") == "Serving")
    scaled = await gateways()
    assert scaled.items() >= before.items()
    assert set(scaled) == {f"{NAME}-0-gateway", f"{NAME}-1-gateway"}
    await world.change(replicas=1)
    deadline = time.monotonic() + 60
    while await gateways() != before:
        assert time.monotonic() < deadline, await gateways()
        await asyncio.sleep(0.2)


async def test_a_quiet_cluster_is_not_written_to(world: World) -> None:
    quiet, seconds = {f"quiet{number}" for number in range(5)}, 12.0
    for name in quiet:
        await world.kube.create(manifest(world.namespace, name))
    for name in quiet:
        await world.serving(1, name)
    # No gateway runs, which is reported after a second attempt.
    deadline = time.monotonic() + 60
    while missing := quiet - await with_event(world, "EndpointNotReady"):
        assert time.monotonic() < deadline, missing
        await asyncio.sleep(0.2)
    for _ in range(5):
        # Progress of members alone is written up to 5 s late.
        objects = await unchanged(world.versions, seconds=7)
        with Pauses() as pauses:
            begun, before = time.monotonic(), world.operator.requests()
            await asyncio.sleep(seconds)
            after, elapsed = world.operator.requests(), time.monotonic() - begun
        # Agents that do not run are silent, so the operator has reason to write.
        if elapsed - pauses.ran < 2:
            break
    made = {method: after[method] - before.get(method, 0) for method in after}
    renewals = made.pop("PUT")
    assert sum(made.values()) == 0, f"{made} although nothing happened"
    assert renewals <= elapsed / 2 + 1, "more than the lease was written"
    assert await world.versions() == objects
    print(
        f"\n{len(quiet)} deployments at rest: {renewals / elapsed:.2f} requests/s, {world.operator.rss_bytes >> 20} MiB"
    )
    # Another process finds the right state, and changes nothing.
    world.operator.end()
    world.operator.start()
    await world.operator.until_leading()
    await asyncio.sleep(4)
    assert await world.versions() == objects


async def with_event(world: World, reason: str) -> set[str]:
    """Return the names of the deployments with an event of that reason."""
    found = await world.kube.list(EVENTS, world.namespace)
    return {one["regarding"]["name"] for one in found if one["reason"] == reason}


async def test_restart_pause_and_suspend(world: World) -> None:
    await world.kube.create(manifest(world.namespace))
    await world.serving(1)
    await world.change(annotations={RESTART_AT: "2026-11-21T10:00:00Z"})
    found = await world.serving(2)
    assert group(found).get("totalRestarts", 0) == 0, "a restart that was asked for is free"

    await world.change(annotations={PAUSED: "true"})
    await world.until("it is paused", lambda found: condition(found, "Progressing").get("reason") == "Paused")
    await world.kube.delete(PODS, world.namespace, f"{NAME}-0-i2-r1", grace_seconds=0)
    await asyncio.sleep(5)
    assert set(await world.pods()) == {f"{NAME}-0-i2-r0"}, "while paused nothing is mended and nothing is ended"
    await world.change(annotations={PAUSED: None})
    found = await world.serving(3)
    assert group(found)["totalRestarts"] == 1

    await world.change(suspend=True)
    await world.until("it is suspended", lambda found: phase(found) == "Suspended")
    assert not await world.pods()
    await world.change(suspend=False)
    await world.serving(4)


async def test_a_specification_that_only_the_models_refuse_is_refused_in_their_words(
    cluster: ControlPlane, kube: Client, tmp_path: Path
) -> None:
    namespace = f"0-begins-with-a-digit-{random.randrange(10**6)}"
    cluster.kubectl("create", "namespace", namespace)
    # The definition leaves the form of this variable to the models.
    env = [{"name": "HF_ENDPOINT", "value": "http://0xA9FEA9FE/"}]
    operator = OperatorProcess(cluster.kubeconfig, namespace, tmp_path / "operator.log")
    try:
        created = await kube.create(manifest(namespace, engine={"env": env}))
        with pytest.raises(InvalidDeployment) as refusal:
            parse(created)
        operator.start()
        world = World(kube, namespace, operator)
        await operator.until_leading()
        found = await world.until("it is refused", lambda found: bool(condition(found, "Accepted")))
        accepted = condition(found, "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "SpecInvalid")
        assert accepted["message"] == str(refusal.value)
        assert condition(found, "Ready")["status"] == "False"
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
        told = await world.event("SpecInvalid")
        assert told["type"] == "Warning"
        assert not await world.pods()
    finally:
        operator.kill()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


async def test_disallowed_specifications_are_refused_with_a_remedy_and_form_nothing(world: World) -> None:
    """Only the operator refuses: the chart is not installed here."""
    await world.kube.create(manifest(world.namespace, storage={"path": "/etc"}))
    found = await world.until("it is refused", lambda found: bool(condition(found, "Accepted")))
    accepted = condition(found, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NotAllowed")
    assert accepted["message"].startswith('spec.storage.path: "/etc" is not allowed on this cluster; use /var/lib/dsv4')
    assert (await world.event("NotAllowed"))["type"] == "Warning"
    assert await world.owned() == set()
    # An allowed specification is formed.
    await world.change(storage={"path": "/var/lib/dsv4"})
    await world.serving(1)


async def test_a_failed_action_is_reported_in_one_event(world: World) -> None:
    keys = {"secretKeyRef": {"name": "callers", "key": "keys"}}
    await world.kube.create(manifest(world.namespace, gateway={"apiKeys": keys}))
    event = await world.event("ActionFailed")
    await asyncio.sleep(5)
    assert event["type"] == "Warning"
    assert f"spec.gateway.apiKeys.secretKeyRef: the Secret {world.namespace}/callers is not there" in event["note"]
    after = await world.event("ActionFailed")
    assert after["metadata"]["resourceVersion"] == event["metadata"]["resourceVersion"]


async def test_the_operator_continues_from_a_status_written_by_others(world: World) -> None:
    await world.kube.create(manifest(world.namespace))
    found = await world.serving(1)
    groups = [dict(group(found), totalRestarts=7)]
    await world.kube.patch(
        DSV4_DEPLOYMENTS, world.namespace, NAME, {"status": {"groups": groups}}, subresource="status"
    )
    before = await world.pods()
    await world.change(recovery={"maxRestarts": 99})
    found = await world.until(
        "the new generation is seen",
        lambda found: found["status"]["observedGeneration"] == found["metadata"]["generation"],
    )
    assert group(found)["totalRestarts"] == 7
    assert await world.pods() == before


@pytest.mark.long
async def test_the_lease_is_handed_over_and_only_its_holder_acts(
    cluster: ControlPlane, kube: Client, namespace: str, tmp_path: Path
) -> None:
    one, two = (OperatorProcess(cluster.kubeconfig, namespace, tmp_path / f"{name}.log") for name in ("one", "two"))
    try:
        one.start()
        await one.until_leading()
        two.start()
        await asyncio.sleep(5)
        assert not two.leads
        # After a regular end: at once.
        assert one.end() == 0
        handed = await two.until_leading(10)
        one.start()
        await asyncio.sleep(5)
        assert one.code is None
        assert not one.leads
        # The holder is stopped: after the lease has expired.
        two.send(signal.SIGSTOP)
        taken = await one.until_leading(90)
        lease = await kube.get(LEASES, namespace, "dsv4-operator")
        assert lease is not None
        # It continues, finds that it has lost the lease, and ends before it writes anything.
        two.send(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while two.code is None:
            assert time.monotonic() < deadline, "it went on without the lease"
            await asyncio.sleep(0.1)
        assert two.code == 1
        again = await kube.get(LEASES, namespace, "dsv4-operator")
        assert again is not None
        assert again["spec"]["holderIdentity"] == lease["spec"]["holderIdentity"]
        print(f"\nreleased: {handed:.1f} s; holder stopped: {taken:.1f} s")
        assert taken <= 20
    finally:
        one.kill()
        two.kill()


class Witness:
    """Watches the members of a namespace, and records forbidden states."""

    def __init__(self, kube: Client, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._present: dict[str, tuple[int, bool]] = {}
        """Incarnation by name, and whether it is being deleted."""
        self.uids: dict[str, set[str]] = {}
        self.wrong: list[str] = []
        self.ended: set[str] = set()

    async def run(self) -> None:
        chosen = names.selector(names.labels(NAME, component=names.MEMBER))
        version = (await self._kube.listing(PODS, self._namespace, labels=chosen)).resource_version
        while True:
            with contextlib.suppress(KubeError):
                watching = self._kube.watch(PODS, self._namespace, labels=chosen, resource_version=version)
                async for event in watching:
                    version = event.resource_version
                    if event.type != "BOOKMARK":
                        self._note(event.type, event.object)

    def _note(self, kind: str, pod: Manifest) -> None:
        about = pod["metadata"]
        name, incarnation = about["name"], int(about["labels"][names.INCARNATION])
        self.uids.setdefault(name, set()).add(about["uid"])
        ending = "deletionTimestamp" in about
        if ending or kind == "DELETED":
            self.ended.add(name)
        if kind == "DELETED":
            self._present.pop(name, None)
        else:
            self._present[name] = incarnation, ending
        alive = {number for number, going in self._present.values() if not going}
        if len(alive) > 1:
            self.wrong.append(f"incarnations {sorted(alive)} at once")
        if any(number < incarnation for number, _ in self._present.values()) and kind == "ADDED":
            self.wrong.append(f"{name} was made before {sorted(self._present)} had ended")

    @property
    def incarnations(self) -> set[int]:
        return {int(name.rsplit("-i")[1].split("-")[0]) for name in self.uids}


async def orphans(world: World, incarnation: int) -> set[tuple[str, str]]:
    """Return the deployment's objects that neither it nor `incarnation` needs, by kind and name, without evidence."""
    stem = f"{NAME}-0-i{incarnation}"
    uid = (await world.live())["metadata"]["uid"]
    mounted = names.mounted_name(NAME, uid, 0, incarnation)
    gateway = ("Deployment", f"{NAME}-0-gateway"), ("ConfigMap", f"{NAME}-0-gateway")
    front = ("Service", NAME), ("Service", f"{NAME}-0-head"), ("Secret", names.token_key_name(NAME, uid))
    own = ("Pod", f"{stem}-r0"), ("Pod", f"{stem}-r1"), ("Service", stem), ("ConfigMap", mounted), ("Secret", mounted)
    extra = {one for one in await world.owned() if "-evidence-" not in one[1]} - {*gateway, *front, *own}
    return {one for one in extra if not one[1].startswith(f"{NAME}-0-gateway-")}


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_an_operator_killed_at_any_moment_repeats_and_loses_nothing(world: World) -> None:
    """User actions continue: restart, suspend and resume, and deletion of pods."""
    dice = random.Random(50)
    witness = Witness(world.kube, world.namespace)
    following = asyncio.create_task(witness.run())
    await asyncio.sleep(0.5)
    await world.kube.create(manifest(world.namespace))
    wanted = 1
    suspended = False
    calm: dict[str, str] | None = None
    deleted: set[str] = set()
    for kill in range(KILLS):
        await asyncio.sleep(dice.uniform(0.0, 1.5))
        world.operator.kill()
        world.operator.start()
        await world.operator.until_leading()
        action = dice.choice(("nothing", "nothing", "restart", "suspend", "delete"))
        if kill % 10 == 9:
            # Every tenth time everything comes to rest; then a kill must not affect a pod.
            action = "nothing"
            if suspended:
                await world.change(suspend=False)
                suspended, wanted = False, wanted + 1
            calm = await world.at_rest()
        elif kill % 10 < 3 and calm is not None:
            assert await world.pods() == calm, "a kill alone touched pods"
            action = "nothing"
        match action:
            case "restart":
                await world.change(annotations={RESTART_AT: str(kill)})
                wanted += 1
            case "suspend":
                suspended = not suspended
                await world.change(suspend=suspended)
                wanted += not suspended
            case "delete":
                for name in dice.sample(sorted(found := await world.pods()), k=min(1, len(found))):
                    await world.kube.delete(PODS, world.namespace, name)
                    deleted.add(name)
                    wanted += 1
    await world.change(suspend=False)
    wanted += suspended
    await world.at_rest()
    await asyncio.sleep(2)
    following.cancel()
    last = group(await world.live())["incarnation"]
    assert witness.wrong == []
    # While a group is being formed, a foreign deletion of a pod before its observation makes it a missing pod.
    twice = {name for name, uids in witness.uids.items() if len(uids) > 1}
    assert twice <= deleted, f"made twice: {twice}"
    assert max(witness.incarnations) == last
    assert len(witness.incarnations) <= wanted, "more incarnations than anybody asked for"
    assert await orphans(world, last) == set()
    print(f"\n{KILLS} kills, {wanted} reasons for an incarnation, {last} incarnations, 0 pods of two at once")
