"""Members as real pods of real kubelets: the project's own image, real agents, real names and addresses.

Their weights are missing, so they stop at that step: later ones need Ray and vLLM.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from clusterkit.client import Cluster as ControlPlane
from pods_world import NAME, Loop, PodsWorld, manifest

from dsv4_operator.api import GroupPhase, GroupStatus, parse
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS, DSV4_DEPLOYMENTS, PODS, Client, PodCache, find_access
from dsv4_runtime.contract import Cause
from dsv4_testkit.conformance import fenced

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("definition")]

_NODES = ["spark1", "spark2"]


def on_nodes(namespace: str) -> dict[str, Any]:
    wanted = manifest(namespace, nodes=_NODES, nodeSelector={}, tolerations=[])
    wanted["spec"]["model"]["source"] = {"path": "/var/lib/dsv4/models/none"}
    wanted["spec"]["engine"]["imagePullPolicy"] = "Never"
    wanted["spec"]["gateway"] = {"holdTimeout": "1s"}
    return wanted


@pytest.fixture
async def world(cluster: ControlPlane, namespace: str, runtime_image: str) -> AsyncIterator[PodsWorld]:
    kube = Client(find_access(kubeconfig=cluster.kubeconfig))
    pods = PodCache(kube)
    deployment = parse(await kube.create(on_nodes(namespace)))
    task = asyncio.create_task(pods.run())
    await asyncio.wait_for(pods.synced(), 60)
    world = PodsWorld(kube, pods, deployment, image=runtime_image)
    yield world
    await fenced(world, 1)
    await world.backend.close()
    await kube.delete(DSV4_DEPLOYMENTS, namespace, NAME)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await kube.close()


@pytest.fixture
async def loop(world: PodsWorld) -> AsyncIterator[Loop]:
    loop = Loop(world)
    yield loop
    await loop.close()


async def test_real_agents_connect_by_name_and_report_missing_weights(
    world: PodsWorld, loop: Loop, cluster: ControlPlane
) -> None:
    begun = time.monotonic()

    def heard(group: GroupStatus) -> bool:
        return len(group.members) == 2 and all(one.phase is not None for one in group.members)

    group = await loop.until("both agents are heard", heard, 180)
    print(f"two pods made to both agents heard: {time.monotonic() - begun:.1f} s")
    assert [one.node for one in group.members] == _NODES
    pods = {pod["metadata"]["name"]: pod for pod in await world.kube.list(PODS, world.namespace)}
    for rank in range(2):
        pod = pods[names.member_name(NAME, 0, group.incarnation, rank)]
        assert pod["status"]["podIP"] == group.members[rank].address
        assert pod["spec"]["nodeName"] == _NODES[rank]
    dead = await loop.until("it is given up", lambda group: group.phase is GroupPhase.FAILED, 240)
    assert {one.cause for one in dead.history} == {Cause.STAGING_FAILED}
    assert "/var/lib/dsv4/models/none" in dead.history[-1].message
    deadline = time.monotonic() + 60
    while await world.all(PODS):
        assert time.monotonic() < deadline, "what died is still there"
        await asyncio.sleep(0.5)
    kept = await world.kube.get(CONFIG_MAPS, world.namespace, names.evidence_name(NAME, 0, dead.incarnation))
    assert kept is not None
    # The member that fails first ends the group; the other one may not have failed yet, or not have been observed.
    statuses = [json.loads(one)["status"] for one in kept["data"].values()]
    assert "Failed" in {status["phase"] for status in statuses if status is not None}


async def test_the_gateway_is_reachable_through_the_service(
    world: PodsWorld, cluster: ControlPlane, runtime_image: str
) -> None:
    await world.backend.ensure_frontend(world.deployment, world.deployment.status)
    wait = ("wait", "--for=condition=Available", f"deployment/{NAME}-0-gateway", "-n", world.namespace)
    cluster.kubectl(*wait, "--timeout=150s", seconds=160)
    # From another pod, through the Service's name: there is no engine, and requests are only held briefly. (A gateway
    # that must not hold requests is not ready without an engine.) Nodes receive a new Service's pods slightly later
    # than the Deployment's status changes.
    url = f"http://{NAME}.{world.namespace}.svc:8000/v1/completions"
    code = (
        "import time, urllib.error, urllib.request as asking\n"
        f"question = asking.Request({url!r}, b'{{}}', method='POST')\n"
        "for _ in range(30):\n"
        "    try:\n        print(asking.urlopen(question, timeout=20).status)\n"
        "    except urllib.error.HTTPError as error:\n        print(error.code, error.read().decode())\n"
        "    except urllib.error.URLError:\n        time.sleep(1)\n        continue\n"
        "    break\n"
    )
    image = ("--image-pull-policy=Never", f"--image={runtime_image}")
    pod = ("run", "asker", "-n", world.namespace, "--restart=Never", *image)
    cluster.kubectl(*pod, "--command", "--", "python", "-c", code)
    done = ("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/asker", "-n", world.namespace)
    cluster.kubectl(*done, "--timeout=80s", seconds=90)
    said = cluster.kubectl("logs", "asker", "-n", world.namespace)
    assert said.startswith("503"), said
