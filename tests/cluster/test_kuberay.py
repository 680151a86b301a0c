"""The KubeRay backend with KubeRay's operator on a real control plane; nodes and agents are stand-ins."""

from __future__ import annotations

import asyncio
import base64
import copy
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import charts
import pytest
from clusterkit.client import Cluster as ControlPlane
from kuberay_parts import DEFINITION, NEEDED, RIGHTS, define, defined, definitions, operating
from operator_process import OperatorProcess
from pods_world import NAME, PodsWorld, manifest

from dsv4_operator.api import parse
from dsv4_operator.api.spec import KUBERAY_BACKEND
from dsv4_operator.backends.pods import backend as backends
from dsv4_operator.backends.pods.backend import KubeRayUnavailable
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DSV4_DEPLOYMENTS,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICES,
    Client,
    PodCache,
    find_access,
)
from dsv4_operator.kube.resources import CUSTOM_RESOURCE_DEFINITIONS
from dsv4_testkit.conformance import Conformance, fenced, formed, live, of, planned, until
from dsv4_testkit.scripted_agent import ScriptedAgents, routed

pytestmark = [pytest.mark.usefixtures("definition"), NEEDED]


@pytest.fixture(scope="module", autouse=True)
def addresses(cluster: ControlPlane) -> Iterator[None]:
    """Make the addresses of KWOK's pods local to this machine."""
    with routed(cluster.state.addresses.fake_pods):
        yield


@pytest.fixture(scope="module")
def served(cluster: ControlPlane) -> Iterator[None]:
    """Serve KubeRay's definitions, without its operator."""
    with defined(cluster):
        yield


@pytest.fixture(scope="module")
def kuberay(cluster: ControlPlane, served: None) -> Iterator[None]:
    """Run KubeRay's operator."""
    with operating(cluster):
        yield


def of_kuberay(namespace: str) -> dict[str, Any]:
    wanted = manifest(namespace)
    wanted["spec"]["backend"] = KUBERAY_BACKEND
    return wanted


@pytest.fixture
def rights(cluster: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """Yield a kubeconfig with the rights that the chart gives an operator with this backend."""
    with charts.account(cluster, namespace, tmp_path / "operator.kubeconfig", RIGHTS) as file:
        yield file


@asynccontextmanager
async def deployed(cluster: ControlPlane, namespace: str, rights: Path) -> AsyncIterator[PodsWorld]:
    kube, operator = (Client(find_access(kubeconfig=file)) for file in (cluster.kubeconfig, rights))
    pods = PodCache(operator, namespaces=[namespace])
    deployment = parse(await kube.create(of_kuberay(namespace)))
    task = asyncio.create_task(pods.run())
    await asyncio.wait_for(pods.synced(), 60)
    async with ScriptedAgents(kube) as agents:
        world = PodsWorld(kube, pods, deployment, agents=agents, operator=operator)
        yield world
        await kube.delete(DSV4_DEPLOYMENTS, namespace, NAME)
        await cleared(kube, namespace, lambda: world.backend.orphaned((namespace, NAME, 0), None))
        await world.backend.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await operator.close()
    await kube.close()


async def cleared(kube: Client, namespace: str, nudge: Callable[[], None] = lambda: None, seconds: float = 45) -> None:
    """Wait until no object of a deleted deployment remains."""
    deadline = time.monotonic() + seconds
    while True:
        nudge()
        kinds = (PODS, SERVICES, CONFIG_MAPS, SECRETS, RAY_CLUSTERS)
        if await kube.get(DSV4_DEPLOYMENTS, namespace, NAME) is None:
            left = {
                one["metadata"]["name"]
                for kind in kinds
                for one in await _listed(kube, kind, namespace)
                if one["metadata"]["name"].startswith(NAME)
            }
            if not left:
                return
            assert time.monotonic() < deadline, left
        await asyncio.sleep(0.2)


async def _listed(kube: Client, kind: Any, namespace: str) -> list[dict[str, Any]]:
    # Some tests run without its definition.
    served = kind is not RAY_CLUSTERS or await kube.get(CUSTOM_RESOURCE_DEFINITIONS, None, DEFINITION) is not None
    return await kube.list(kind, namespace) if served else []


@pytest.fixture
async def bare(cluster: ControlPlane, namespace: str, rights: Path) -> AsyncIterator[PodsWorld]:
    """Yield a deployment without KubeRay."""
    async with deployed(cluster, namespace, rights) as made:
        yield made


@pytest.fixture
async def world(cluster: ControlPlane, namespace: str, rights: Path, kuberay: None) -> AsyncIterator[PodsWorld]:
    async with deployed(cluster, namespace, rights) as made:
        yield made


async def test_without_its_definition_kuberay_is_named_and_nothing_is_made(bare: PodsWorld) -> None:
    with pytest.raises(KubeRayUnavailable, match=r"no RayCluster \(ray.io/v1\); install KubeRay 1.5 or later"):
        await bare.backend.ensure(bare.deployment, await planned(bare, 1))
    assert await bare.all(PODS) == set()
    await fenced(bare, 1)
    assert await bare.all(SECRETS) == {names.token_key_name(NAME, bare.deployment.metadata.uid)}


async def test_a_definition_without_tokens_is_too_old(cluster: ControlPlane, bare: PodsWorld) -> None:
    old = copy.deepcopy(definitions()[DEFINITION])
    for version in old["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].pop("authOptions", None)
    define(cluster, old)
    try:
        with pytest.raises(KubeRayUnavailable, match=r"too old; install KubeRay 1.5 .*authOptions"):
            await bare.backend.ensure(bare.deployment, await planned(bare, 1))
        assert await bare.all(RAY_CLUSTERS) == set()
        await fenced(bare, 1)
    finally:
        cluster.kubectl("delete", "crd", DEFINITION, "--timeout=60s")


async def test_without_its_operator_the_command_that_shows_more_is_named(
    bare: PodsWorld, served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_MADE_BY_KUBERAY_SECONDS", 1.0)
    plan = await planned(bare, 1)
    await bare.backend.ensure(bare.deployment, plan)
    await asyncio.sleep(1.1)
    with pytest.raises(KubeRayUnavailable, match=rf"ranks 0, 1 .*raycluster -n {bare.namespace} {NAME}-0-i1"):
        await bare.backend.ensure(bare.deployment, plan)
    await fenced(bare, 1)
    assert await bare.all(RAY_CLUSTERS) == set()


class TestKubeRay(Conformance):
    """See `Conformance`."""


async def test_an_incarnation_is_a_raycluster_and_nothing_of_it_outlives_it(world: PodsWorld) -> None:
    await formed(world, 1)
    (cluster,) = await world.objects(RAY_CLUSTERS)
    assert cluster["metadata"]["name"] == f"{NAME}-0-i1"
    pods = {names.parse_member_name(pod["metadata"]["name"]): pod for pod in await world.objects(PODS)}
    assert pods.keys() == {(NAME, 0, 1, 0), (NAME, 0, 1, 1)}
    for (_, _, _, rank), pod in pods.items():
        agent = pod["spec"]["containers"][0]
        environment = {one["name"]: one for one in agent["env"]}
        command = environment["KUBERAY_GEN_RAY_START_CMD"]["value"]
        assert command.startswith("ray start --head" if rank == 0 else "ray start")
        assert "--include-log-monitor=no" in command
        assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == f"{NAME}-0-i1"
        assert agent["command"] == ["dsv4-agent"]
        assert agent["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert pod["spec"]["hostname"] == f"{NAME}-0-i1-r{rank}"
        waits = [one for one in pod["spec"].get("initContainers", []) if one["name"] == "wait-gcs-ready"]
        assert len(waits) == (rank > 0)
        for one in waits:
            assert {"name": "BASH_ENV", "value": "/etc/dsv4/plan/no-wait.sh"} in one["env"]
    # Read in the same way as by `kubectl ray get token`.
    secret = await world.kube.get(SECRETS, world.namespace, f"{NAME}-0-i1")
    assert secret is not None
    assert len(base64.b64decode(secret["data"]["auth_token"])) == 96
    await fenced(world, 1)
    await formed(world, 2)
    assert await world.all(RAY_CLUSTERS) == {f"{NAME}-0-i2"}
    assert await world.all(SERVICES) == {f"{NAME}-0-i2", f"{NAME}-0-head"}
    assert f"{NAME}-0-i1" not in await world.all(SECRETS)
    assert {name for name in await world.all(PODS) if "-i1-" in name} == set()


async def test_kuberay_replaces_no_ended_pod(world: PodsWorld) -> None:
    """Neither a failed pod nor a deleted one is replaced; KubeRay reconciles every 2 s."""
    await formed(world, 1)
    before = {pod["metadata"]["uid"] for pod in await world.objects(PODS)}
    await world.end(1, 1)
    (head,) = (name for name in await world.all(PODS) if "-head" in name)
    await world.kube.delete(PODS, world.namespace, head)
    seen = await until(world, "both ends are seen", lambda seen: not live(seen))
    assert of(seen, 1).keys() == {0, 1}
    await asyncio.sleep(6.5)
    assert {pod["metadata"]["uid"] for pod in await world.objects(PODS)} == before
    await fenced(world, 1)
    assert await world.all(PODS) == set()


async def test_an_operator_forms_fences_and_leaves_nothing(
    cluster: ControlPlane, namespace: str, rights: Path, kuberay: None, tmp_path: Path
) -> None:
    """The complete operator with the rights of the chart."""
    kube = Client(find_access(kubeconfig=cluster.kubeconfig))
    operator = OperatorProcess(rights, namespace, tmp_path / "operator.log", backends=[KUBERAY_BACKEND])

    async def serving(incarnation: int, seconds: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            found = await kube.get(DSV4_DEPLOYMENTS, namespace, NAME)
            groups = ((found or {}).get("status") or {}).get("groups") or [{}]
            if (groups[0].get("phase"), groups[0].get("incarnation")) == ("Serving", incarnation):
                return dict(groups[0])
            assert time.monotonic() < deadline, (groups, operator.log.read_text()[-2000:])
            await asyncio.sleep(0.1)

    async with ScriptedAgents(kube):
        try:
            operator.start()
            await kube.create(of_kuberay(namespace))
            await serving(1)
            (lost,) = (one for one in await kube.list(PODS, namespace) if "-r1-worker-" in one["metadata"]["name"])
            await kube.delete(PODS, namespace, lost["metadata"]["name"], grace_seconds=0)
            begun = time.monotonic()
            group = await serving(2)
            print(f"the second incarnation serves {time.monotonic() - begun:.1f} s after the end of a member")
            assert group["history"][0]["incarnation"] == 1
            assert [one["metadata"]["name"] for one in await kube.list(RAY_CLUSTERS, namespace)] == [f"{NAME}-0-i2"]
            # A user deletes the RayCluster.
            await kube.delete(RAY_CLUSTERS, namespace, f"{NAME}-0-i2")
            await serving(3)
            await kube.delete(DSV4_DEPLOYMENTS, namespace, NAME)
            await cleared(kube, namespace)
        finally:
            operator.kill()
    await kube.close()
