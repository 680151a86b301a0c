"""An operator's view of one deployment on the test cluster, and the operator's loop for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, GroupPhase, GroupStatus, SchedulerType, parse
from dsv4_operator.api.spec import KUBERAY_BACKEND
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods import Cluster, KubeRayBackend, PodsBackend
from dsv4_operator.builders import names
from dsv4_operator.controller.reconcile import Endpoints, Reconciler
from dsv4_operator.kube import DSV4_DEPLOYMENTS, PODS, Client, PodCache, Resource
from dsv4_testkit.conformance import Bounded
from dsv4_testkit.scripted_agent import Script, ScriptedAgents

NAME = "conform"
POLICY = ClusterPolicy(
    toleration_keys=("kwok.x-k8s.io/node",),
    claim_templates=("gpus",),
    backends=(KUBERAY_BACKEND,),
    schedulers=(SchedulerType.VOLCANO,),
)


def manifest(namespace: str, **topology: object) -> dict[str, Any]:
    return {
        "apiVersion": "dsv4.dev/v1alpha1",
        "kind": "DSV4Deployment",
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": {
            "model": {"variant": "Nano", "source": {"nano": {"seed": 0}}},
            "topology": {
                "hardware": "CPU",
                "nodesPerGroup": 2,
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
                "exclusiveNodes": True,
                **topology,
            },
            "engine": {"timeouts": {"drain": "2s"}},
            "recovery": {"backoff": {"base": "1s"}, "nodeLoss": {"after": "1s"}},
        },
    }


class PodsWorld:
    """An operator's view of one deployment in a separate namespace."""

    def __init__(
        self,
        kube: Client,
        pods: PodCache,
        deployment: DSV4Deployment,
        *,
        agents: ScriptedAgents | None = None,
        image: str = "dsv4.test/none:1",
        writes: list[float] | None = None,
        operator: Client | None = None,
    ) -> None:
        """Args:
        kube: client of the control plane.
        pods: a cache that the caller fills.
        deployment: as it was created.
        agents: respond for its members; None: there are no agents.
        image: of members and gateways.
        writes: grows by one with every write of `kube`.
        operator: client of the backend; None: `kube`.
        """
        self.kube, self.pods, self.deployment = kube, pods, deployment
        self._agents, self._image = agents, image
        self.writes = writes if writes is not None else []
        self._operator = operator or kube
        self.news = asyncio.Event()
        self.backend = self._new_backend()

    @property
    def agents(self) -> ScriptedAgents:
        assert self._agents is not None
        return self._agents

    @property
    def namespace(self) -> str:
        return self.deployment.metadata.namespace

    def script(self, rank: int) -> Script:
        return self.agents.script(self.namespace, NAME, rank)

    async def end(self, incarnation: int, rank: int) -> None:
        wanted = (NAME, 0, incarnation, rank)
        (name,) = (name for name in await self.all(PODS) if names.parse_member_name(name) == wanted)
        dead = {"terminated": {"exitCode": 137, "reason": "Error", "message": "it was told so"}}
        status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": dead, **_STATUS}]}
        await self.kube.patch(PODS, self.namespace, name, {"status": status}, subresource="status")

    async def all(self, resource: Resource) -> set[str]:
        """Return the names of the deployment's objects of one kind; of pods those of the members."""
        return {one["metadata"]["name"] for one in await self.objects(resource)}

    async def objects(self, resource: Resource) -> list[dict[str, Any]]:
        """Return the same objects as stored in the API server."""
        members = {"component": names.MEMBER} if resource is PODS else {}
        chosen = names.selector(names.labels(NAME, **members))
        return await self.kube.list(resource, self.namespace, labels=chosen)

    async def change(self, **spec: object) -> None:
        """Change the specification."""
        live = await self.kube.patch(DSV4_DEPLOYMENTS, self.namespace, NAME, {"spec": spec})
        self.deployment = parse(live)

    async def restart_operator(self) -> None:
        """Replace the backend by a new one without state, as a new process has."""
        await self.backend.close()
        self.backend = self._new_backend()

    def _new_backend(self) -> Any:
        cluster = Cluster(self._operator, self.pods, runtime_image=self._image, policy=POLICY)
        if self.deployment.spec.backend == KUBERAY_BACKEND:
            return Bounded(KubeRayBackend(cluster, changed=lambda *_: self.news.set(), ray_clusters=None))
        return Bounded(PodsBackend(cluster, changed=lambda *_: self.news.set()))


_STATUS = {"image": "none", "imageID": "none", "ready": False, "restartCount": 0}


class Loop:
    """Reconciles one deployment until closed."""

    def __init__(self, world: PodsWorld) -> None:
        self.world = world
        self.reconciler = Reconciler(world.backend, Endpoints("http://api", "http://dashboard"), save=self._save)
        self._task = asyncio.create_task(self._run())

    async def _save(self, _: DSV4Deployment) -> None:
        return

    async def _run(self) -> None:
        while True:
            self.world.news.clear()
            pause = 0.5
            with contextlib.suppress(BackendError):
                pause = await self.reconciler.reconcile(self.world.deployment)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, 0.5)):
                    await self.world.news.wait()

    async def until(self, what: str, true: Callable[[GroupStatus], bool], seconds: float = 60.0) -> GroupStatus:
        deadline = time.monotonic() + seconds
        while True:
            if self._task.done():
                self._task.result()
            groups = self.reconciler.status.groups if self.reconciler.status else ()
            if groups and true(groups[0]):
                return groups[0]
            assert time.monotonic() < deadline, f"{what} did not come true in {seconds:.0f} s: {groups}"
            await asyncio.sleep(0.02)

    async def serving(self, incarnation: int, seconds: float = 60.0) -> GroupStatus:
        return await self.until(
            f"incarnation {incarnation} serves",
            lambda group: group.phase is GroupPhase.SERVING and group.incarnation == incarnation,
            seconds,
        )

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.reconciler.close()
