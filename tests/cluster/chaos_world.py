"""One run of API faults: two operators, each behind a proxy of its own, users, deaths, and an independent checker.

Nodes are KWOK's and agents play their parts; etcd, API server, controllers and operators are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import charts
from clusterkit.client import Cluster as ControlPlane
from operator_process import OperatorProcess
from operator_world import group, manifest, phase

from dsv4_operator.api import parse
from dsv4_operator.api.deployment import RESTART_AT
from dsv4_operator.builders import names
from dsv4_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DSV4_DEPLOYMENTS,
    LEASES,
    PODS,
    SECRETS,
    SERVICES,
    Client,
    Manifest,
    NotFound,
    find_access,
)
from dsv4_operator.planning import revision
from dsv4_runtime.contract import Cause
from dsv4_testkit.chaos.proxy import Faults, Proxy
from dsv4_testkit.chaos.witness import Witness
from dsv4_testkit.scripted_agent import Script, ScriptedAgents

CALM, BUSY, DOOMED = "calm", "busy", "doomed"
"""Deployments of a run: one that nobody touches, one with users and deaths, one whose agents always fail."""
DOOMED_RESTARTS = 2
_QUIET_SECONDS = 2.0
SETTLE_SECONDS = 90.0
"""Time after the last fault in which everything must be as wanted: a lease and the longest backoffs."""


@dataclass
class Result:
    """Result of one run."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests, injected faults and actions, by kind."""
    settled_seconds: float = 0.0
    """From the last fault until everything was as wanted."""


class _Site:
    """One operator with its proxy; it is started again when it ends, as a kubelet does."""

    def __init__(self, number: int, folder: Path, config: Path, namespace: str, proxy: Proxy) -> None:
        self.proxy, self.identity = proxy, f"operator-{number}"
        content = json.loads(config.read_text())
        content["clusters"][0]["cluster"] = {"server": proxy.url}
        file = folder / f"{self.identity}.kubeconfig"
        file.write_text(json.dumps(content))
        self.process = OperatorProcess(file, namespace, folder / f"{self.identity}.log", identity=self.identity)
        self.ends: list[int] = []

    async def live(self) -> None:
        """Start the process again whenever it has ended, until cancelled."""
        while True:
            code = self.process.code
            if code is not None:
                self.ends.append(code)
                self.process.start()
            await asyncio.sleep(0.3)


class Run:
    """One seed in a namespace that is empty before and afterwards."""

    def __init__(self, kube: Client, agents: ScriptedAgents, namespace: str, seed: int) -> None:
        self._kube, self._agents, self._namespace = kube, agents, namespace
        self._dice = random.Random(f"{seed}/actions")
        self.result = Result(seed)
        self._deaths = Counter[str]()
        """Ends of members that this run caused, by deployment."""
        self._planned = Counter[str]()
        """Other reasons for an incarnation."""
        self._sites: list[_Site] = []

    async def run(self, config: Path, server: str, tls: ssl.SSLContext | None, folder: Path, seconds: float) -> Result:
        """Args:
        config: kubeconfig with the rights of the chart.
        server: URL of the API server.
        tls: accepts its certificate.
        folder: for logs.
        seconds: of faults.
        """
        seed = self.result.seed
        async with contextlib.AsyncExitStack() as stack:
            for number in range(2):
                proxy = Proxy(server, tls, random.Random(f"{seed}/{number}"))
                await stack.enter_async_context(proxy)
                site = _Site(number, folder, config, self._namespace, proxy)
                stack.callback(site.process.kill)
                self._sites.append(site)
            # A lease of the run before would be waited for.
            await self._kube.delete(LEASES, self._namespace, "dsv4-operator")
            witness = Witness(self._kube, self._namespace)
            await stack.enter_async_context(witness.watching())
            for site in self._sites:
                site.process.start()
            keeping = [asyncio.create_task(site.live()) for site in self._sites]
            try:
                await self._chaos(seconds)
                before = time.monotonic()
                await self._settle(witness)
                self.result.settled_seconds = time.monotonic() - before
                await self._check(witness)
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)
                await self._remove()
            witness.check_events()
            for site in self._sites:
                witness.check_writes(site.identity, site.proxy.writes)
                self.result.counts.update(site.proxy.counts)
                self.result.wrong += site.proxy.defects
                self._check_process(site)
            self.result.wrong += witness.wrong
        return self.result

    def _check_process(self, site: _Site) -> None:
        unexpected = [code for code in site.ends if code not in (1, -signal.SIGKILL)]
        log = site.process.log.read_text()
        if unexpected:
            self.result.wrong.append(f"{site.identity} ended with {unexpected}: {log[-2000:]}")
        if "Traceback" in log:
            at = log.index("Traceback")
            self.result.wrong.append(f"{site.identity} met a defect: {log[max(0, at - 300) : at + 3000]}")

    # Faults.

    async def _chaos(self, seconds: float) -> None:
        faults = Faults.drawn(random.Random(f"{self.result.seed}/faults"))
        for site in self._sites:
            site.proxy.faults = faults
        await self._create()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._users(seconds))
            tasks.create_task(self._outages(seconds))
            tasks.create_task(self._operators(seconds))
        for site in self._sites:
            site.process.send(signal.SIGCONT)
            site.proxy.calm()
        for site in self._sites:
            await site.proxy.settle()

    async def _create(self) -> None:
        for rank in range(2):
            self._agents.script(self._namespace, DOOMED, rank).fails = Cause.ENGINE_CORE_DIED if rank else None
        fails = {"maxRestarts": DOOMED_RESTARTS, "backoff": {"base": "1s", "max": "1s"}}
        await self._kube.create(manifest(self._namespace, CALM))
        await self._kube.create(manifest(self._namespace, BUSY))
        await self._kube.create(manifest(self._namespace, DOOMED, recovery=fails))

    async def _users(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        actions = (self._restart, self._suspend, self._respecify, self._scale, self._lose, self._die, self._recreate)
        while time.monotonic() < end:
            await asyncio.sleep(self._dice.uniform(0.5, 4.0))
            action = self._dice.choice(actions)
            await action()
            self.result.counts[action.__name__] += 1

    async def _outages(self, seconds: float) -> None:
        dice = random.Random(f"{self.result.seed}/outages")
        end = time.monotonic() + seconds
        wanted = dice.choice((False, True, True))
        while wanted and time.monotonic() < end:
            await asyncio.sleep(dice.uniform(1.0, seconds / 2))
            hit = dice.choice((self._sites, self._sites[:1], self._sites[1:]))
            refused, lasts = dice.random() < 0.5, dice.choice((1.0, 4.0, 12.0, 30.0))
            for site in hit:
                site.proxy.cut(refused=refused)
            await asyncio.sleep(min(lasts, max(1.0, end - time.monotonic())))
            for site in hit:
                site.proxy.restore()

    async def _operators(self, seconds: float) -> None:
        dice = random.Random(f"{self.result.seed}/operators")
        end = time.monotonic() + seconds
        wanted = dice.choice((False, True, True))
        while wanted and time.monotonic() < end:
            await asyncio.sleep(dice.uniform(2.0, seconds / 2))
            site = dice.choice(self._sites)
            if dice.random() < 0.5:
                self.result.counts["killed"] += 1
                site.process.kill()
            else:
                self.result.counts["frozen"] += 1
                site.process.send(signal.SIGSTOP)
                await asyncio.sleep(min(dice.choice((1.0, 5.0, 12.0, 20.0)), max(1.0, end - time.monotonic())))
                site.process.send(signal.SIGCONT)

    # Users and deaths, all of them of the busy deployment.

    async def _change(self, **changes: Any) -> None:
        with contextlib.suppress(NotFound):
            await self._kube.patch(DSV4_DEPLOYMENTS, self._namespace, BUSY, changes)

    async def _restart(self) -> None:
        self._planned[BUSY] += 1
        await self._change(metadata={"annotations": {RESTART_AT: str(time.time())}})

    async def _suspend(self) -> None:
        self._planned[BUSY] += 1
        await self._change(spec={"suspend": self._dice.random() < 0.5})

    async def _respecify(self) -> None:
        self._planned[BUSY] += 1
        await self._change(spec={"engine": {"maxNumSeqs": self._dice.choice((4, 6, 8))}})

    async def _scale(self) -> None:
        self._planned[BUSY] += 1
        await self._change(spec={"replicas": self._dice.choice((0, 1, 2))})

    async def _lose(self) -> None:
        """Delete a member, as an administrator or an eviction does."""
        chosen = names.selector(names.labels(BUSY, component=names.MEMBER))
        pods = await self._kube.list(PODS, self._namespace, labels=chosen)
        if pods:
            self._deaths[BUSY] += 1
            await self._kube.delete(PODS, self._namespace, self._dice.choice(pods)["metadata"]["name"])

    async def _die(self) -> None:
        """Have an engine die, so that it restarts in place, or so that only a new incarnation helps."""
        with contextlib.suppress(ValueError):
            agent = self._agents.agent(self._namespace, BUSY, 0, group=self._dice.choice((0, 1)))
            self._deaths[BUSY] += 1
            if self._dice.random() < 0.5:
                agent.engine_dies()
            else:
                agent.fail(Cause.RAY_WORKER_DIED, 1, "as the run wants it")

    async def _recreate(self) -> None:
        """Delete the deployment, and create another one of its name."""
        if self._dice.random() < 0.7:
            return
        await self._kube.delete(DSV4_DEPLOYMENTS, self._namespace, BUSY)
        async with asyncio.timeout(60):
            while await self._kube.get(DSV4_DEPLOYMENTS, self._namespace, BUSY) is not None:
                await asyncio.sleep(0.1)
        await self._kube.create(manifest(self._namespace, BUSY))

    # What must be so afterwards.

    async def _settle(self, witness: Witness) -> None:
        """Wait until everything is as wanted, and stays so."""
        deadline = time.monotonic() + SETTLE_SECONDS
        since: float | None = None
        while True:
            problem = await self._problem()
            if problem is None:
                since = since if since is not None else time.monotonic()
                if time.monotonic() - since > _QUIET_SECONDS:
                    return
            else:
                since = None
                if time.monotonic() > deadline:
                    logs = "\n".join(f"{one.identity}:\n{one.process.log.read_text()[-1500:]}" for one in self._sites)
                    self.result.wrong.append(f"not at rest after {SETTLE_SECONDS:.0f} s: {problem}\n{logs}")
                    return
            await asyncio.sleep(1.0)

    async def _problem(self) -> str | None:
        live = {one["metadata"]["name"]: one for one in await self._kube.list(DSV4_DEPLOYMENTS, self._namespace)}
        owned = await self._owned()
        wanted: set[tuple[str, str]] = set()
        for name in (CALM, BUSY, DOOMED):
            found = live[name]
            if (found.get("status") or {}).get("observedGeneration") != found["metadata"]["generation"]:
                return f"{name}: generation {found['metadata']['generation']} was not observed"
            problem = await self._problem_of(name, found, owned, wanted)
            if problem is not None:
                return problem
        # Of a group that was given up, the objects of its last incarnation are kept for inspection.
        kept = f"{DOOMED}-0-i{1 + DOOMED_RESTARTS}"
        optional = {one for one in owned if "-evidence-" in one[1]}
        optional |= {one for one in owned if one[0] != "Pod" and (one[1] == kept or one[1].startswith(f"{kept}-"))}
        left, missing = owned - optional - wanted, wanted - owned
        return f"left: {sorted(left)}; missing: {sorted(missing)}" if left or missing else None

    async def _problem_of(
        self, name: str, found: Manifest, owned: set[tuple[str, str]], wanted: set[tuple[str, str]]
    ) -> str | None:
        """Return what is not as wanted; add the objects that it should own to `wanted`."""
        spec, uid = found["spec"], found["metadata"]["uid"]
        if spec.get("suspend") or spec.get("replicas") == 0:
            incarnations = {one for one in owned if one[1].startswith(f"{name}-") and "-i" in one[1]}
            if incarnations or (spec.get("suspend") and phase(found) != "Suspended"):
                return f"{name}: {phase(found)} with {sorted(incarnations)}"
            wanted |= {one for one in owned if one[1].startswith(name)}
            return None
        current = revision(parse(found))
        wanted |= {("Service", name), ("Secret", names.token_key_name(name, uid))}
        for index in range(spec.get("replicas", 1)):
            one = group(found, index)
            expected = "Failed" if name == DOOMED else "Serving"
            if one.get("phase") != expected or one.get("revision") != current:
                return f"{name}: group {index}: {one.get('phase')}, {one.get('incarnation')}, {one.get('message')}"
            stem = f"{name}-{index}-i{one['incarnation']}"
            mounted = names.mounted_name(name, uid, index, one["incarnation"])
            if expected == "Serving":
                wanted |= {("Pod", f"{stem}-r{rank}") for rank in range(2)}
                wanted |= {("Service", stem), ("ConfigMap", mounted), ("Secret", mounted)}
            wanted |= {("Service", f"{name}-{index}-head")}
            wanted |= {one for one in owned if _is_gateways(one, names.gateway_name(name, index))}
            head = await self._kube.get(SERVICES, self._namespace, f"{name}-{index}-head")
            points = ((head or {}).get("spec") or {}).get("selector", {}).get(names.INCARNATION)
            if points != str(one["incarnation"]):
                return f"{name}: the head's Service selects incarnation {points}, not {one['incarnation']}"
        return None

    async def _owned(self) -> set[tuple[str, str]]:
        chosen = f"{names.MANAGED_BY}={names.MANAGER}"
        kinds = (PODS, SERVICES, CONFIG_MAPS, SECRETS, DEPLOYMENTS)
        listed = [(kind, await self._kube.list(kind, self._namespace, labels=chosen)) for kind in kinds]
        return {(kind.kind, one["metadata"]["name"]) for kind, found in listed for one in found}

    async def _check(self, witness: Witness) -> None:
        live = {one["metadata"]["name"]: one for one in await self._kube.list(DSV4_DEPLOYMENTS, self._namespace)}
        wrong = self.result.wrong
        calm = group(live[CALM])
        if calm.get("incarnation") != 1 or calm.get("totalRestarts"):
            wrong.append(f"{CALM} was restarted: {calm}")
        doomed = group(live[DOOMED])
        if (doomed.get("incarnation"), doomed.get("totalRestarts")) != (1 + DOOMED_RESTARTS, DOOMED_RESTARTS):
            wrong.append(f"{DOOMED}: {doomed.get('incarnation')} incarnations, {doomed.get('totalRestarts')} restarts")
        busy = witness.histories[live[BUSY]["metadata"]["uid"]]
        restarts = sum(one.total_restarts for one in busy.status.groups) if busy.status else 0
        if restarts > self._deaths[BUSY]:
            wrong.append(f"{BUSY}: {restarts} restarts after {self._deaths[BUSY]} deaths: {busy.status}")
        reasons = self._deaths[BUSY] + self._planned[BUSY]
        for index, numbers in busy.incarnations.items():
            if len(numbers) > 1 + reasons:
                wrong.append(f"{BUSY}: group {index}: {len(numbers)} incarnations for {reasons} reasons")

    async def _remove(self) -> None:
        """Delete the deployments; the operators still run, and nothing may be left."""
        for one in await self._kube.list(DSV4_DEPLOYMENTS, self._namespace):
            await self._kube.delete(DSV4_DEPLOYMENTS, self._namespace, one["metadata"]["name"])
        deadline = time.monotonic() + 60
        while left := await self._owned():
            if time.monotonic() > deadline:
                self.result.wrong.append(f"left after the deletion: {sorted(left)}")
                for pod in await self._kube.list(PODS, self._namespace):
                    await self._kube.delete(PODS, self._namespace, pod["metadata"]["name"], grace_seconds=0)
                return
            await asyncio.sleep(0.3)


def _is_gateways(one: tuple[str, str], stem: str) -> bool:
    """Return whether an object is part of the gateway of this name, or its pod."""
    kind, name = one
    return name == stem if kind in ("Deployment", "ConfigMap") else kind == "Pod" and name.startswith(f"{stem}-")


@contextlib.asynccontextmanager
async def connected(
    kubeconfig: Path, namespaces: Sequence[str]
) -> AsyncIterator[tuple[Client, ScriptedAgents, str, ssl.SSLContext | None]]:
    """The administrator's client, the agents of every member, and the way to the API server for proxies."""
    access = find_access(kubeconfig=kubeconfig)
    usual = Script(phase_seconds=0.1)
    async with Client(access) as kube, ScriptedAgents(kube, settled=usual, namespaces=namespaces) as agents:
        yield kube, agents, access.server, access.tls(access.credential)


async def run_seeds(
    cluster: ControlPlane,
    seeds: Iterable[int],
    configs: Mapping[str, Path],
    seconds: float,
    logs: Path,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run seeds, as many at once as there are namespaces.

    Args:
        cluster: where they run.
        seeds: seeds of the runs.
        configs: kubeconfig with the rights of the chart of each namespace, by its name.
        seconds: of faults in a run.
        logs: gets a folder for each run.
        done: called with each result.
    """
    waiting = list(reversed(list(seeds)))
    results: list[Result] = []
    async with connected(cluster.kubeconfig, list(configs)) as (kube, agents, server, tls):

        async def slot(namespace: str, config: Path) -> None:
            while waiting:
                seed = waiting.pop()
                folder = logs / f"seed-{seed}"
                folder.mkdir(parents=True)
                try:
                    result = await Run(kube, agents, namespace, seed).run(config, server, tls, folder, seconds)
                except Exception as error:
                    result = Result(seed, [f"the run itself failed: {type(error).__name__}: {error}"])
                results.append(result)
                done(result)

        await asyncio.gather(*(slot(*one) for one in configs.items()))
    return results


@contextlib.contextmanager
def namespaces(cluster: ControlPlane, count: int, folder: Path) -> Iterator[dict[str, Path]]:
    """Make empty namespaces, and yield a kubeconfig with the rights of the chart for each."""
    with contextlib.ExitStack() as stack:
        configs = {}
        for number in range(count):
            name = f"chaos-{time.time_ns() // 10**6}-{number}"
            cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
            stack.callback(cluster.kubectl, "delete", "namespace", name, "--wait=false")
            configs[name] = stack.enter_context(charts.account(cluster, name, folder / f"{name}.kubeconfig"))
        yield configs
