"""What a Kubernetes client costs: the same work with each, against a real API server.

    python benchmarks/kube_client.py --kubeconfig FILE [--rounds 3] [--clients dsv4,kopf,lightkube]

The figures behind docs/decisions/0005-kubernetes-client.md. The work is what the operator does: LIST of 1000 pods,
200 server-side applies and 200 writes of a status (8 at once), and 2000 events of a watch. Each client runs in a
process of its own; what counts is its processor time, because the wall time is mostly the server's. Rounds alternate
between the clients; the table shows medians. The peers are no dependencies of dsv4: install what you want to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from dsv4_operator.api import crd
from dsv4_operator.kube import (
    CUSTOM_RESOURCE_DEFINITIONS,
    DSV4_DEPLOYMENTS,
    PODS,
    Client,
    Invalid,
    KubeError,
    NotFound,
    find_access,
)

NAMESPACE = "dsv4-client-bench"
PODS_COUNT, WRITES, EVENTS, AT_ONCE = 1000, 200, 2000, 8
LABELS = "bench=pods"
WORK = ("list", "apply", "status", "watch")


def pod(number: int) -> dict[str, Any]:
    """About as large as a member's."""
    settings = [{"name": f"DSV4_SETTING_{i}", "value": f"the value of setting {i}"} for i in range(20)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"p{number}", "namespace": NAMESPACE, "labels": {"bench": "pods", "n": str(number)}},
        "spec": {
            # Nobody's business: neither the scheduler nor the garbage collector of pods may touch it meanwhile.
            "schedulerName": "none",
            "containers": [{"name": "member", "image": "example.invalid/member:1", "env": settings}],
        },
    }


def config_map(number: int, round_: str) -> dict[str, Any]:
    """A plan of the size of a small group's."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"c{number % 50}", "namespace": NAMESPACE},
        "data": {"plan.json": f"{round_}{number}" + "x" * 4000},
    }


def status(number: int) -> dict[str, Any]:
    """What changes at each."""
    groups = [{"index": i, "phase": "Serving", "incarnation": number, "revision": "0" * 12} for i in range(4)]
    return {"phase": "Serving", "readyReplicas": number, "groups": groups}


class Dsv4:
    """The client of `dsv4_operator.kube`."""

    def __init__(self, kubeconfig: str) -> None:
        self.kube = Client(find_access(kubeconfig=Path(kubeconfig)))

    async def __aenter__(self) -> Dsv4:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kube.close()

    async def list(self) -> int:
        return len(await self.kube.list(PODS, NAMESPACE, labels=LABELS))

    async def apply(self, manifest: dict[str, Any]) -> None:
        await self.kube.apply(manifest)

    async def status(self, name: str, value: dict[str, Any]) -> None:
        await self.kube.patch(DSV4_DEPLOYMENTS, NAMESPACE, name, {"status": value}, subresource="status")

    async def watch(self) -> AsyncIterator[str]:
        async for event in self.kube.watch(PODS, NAMESPACE, labels=LABELS, resource_version="0"):
            yield event.object["metadata"]["name"]


class Dsv4Json(Dsv4):
    """The same with the standard library's json."""

    def __init__(self, kubeconfig: str) -> None:
        super().__init__(kubeconfig)
        from dsv4_operator.kube import client

        client.orjson = SimpleNamespace(loads=json.loads, dumps=lambda value: json.dumps(value).encode())  # type: ignore[assignment]


class Kopf:
    """kopf's own session, which is private to kopf."""

    def __init__(self, kubeconfig: str) -> None:
        import logging

        import kopf
        from kopf._cogs.clients import api, auth

        access = find_access(kubeconfig=Path(kubeconfig))
        info = kopf.ConnectionInfo(server=access.server, ca_data=access.authority, token=access.credential.token)
        self.api, self.context = api, auth.APIContext(info)
        self.more: dict[str, Any] = {"settings": kopf.OperatorSettings(), "logger": logging.getLogger("kopf")}

    async def __aenter__(self) -> Kopf:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.context.close()

    async def _ask(self, method: str, url: str, payload: object = None, kind: str = "application/json") -> Any:
        headers = {"Content-Type": kind}
        response = await self.api.request(
            method, url, payload=payload, headers=headers, context=self.context, **self.more
        )
        async with response:
            return await response.json()

    async def list(self) -> int:
        count, following = 0, ""
        while True:
            page = await self._ask(
                "get", f"{PODS.path(NAMESPACE)}?labelSelector={LABELS}&limit=500&continue={following}"
            )
            count, following = count + len(page["items"]), page["metadata"].get("continue")
            if not following:
                return count

    async def apply(self, manifest: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{manifest['metadata']['name']}?fieldManager=dsv4&force=true"
        await self._ask("patch", path, manifest, "application/apply-patch+yaml")

    async def status(self, name: str, value: dict[str, Any]) -> None:
        path = DSV4_DEPLOYMENTS.path(NAMESPACE, name, "status")
        await self._ask("patch", path, {"status": value}, "application/merge-patch+json")

    async def watch(self) -> AsyncIterator[str]:
        url = f"{PODS.path(NAMESPACE)}?labelSelector={LABELS}&watch=1&resourceVersion=0"
        response = await self.api.request("get", url, context=self.context, **self.more)
        async with response:
            async for line in self.api.iter_jsonlines(response.content):
                yield json.loads(line)["object"]["metadata"]["name"]


class Official:
    """`kubernetes.aio` with its models."""

    def __init__(self, kubeconfig: str) -> None:
        from kubernetes.aio import client, config, watch

        self.client, self.config, self.watching, self.kubeconfig = client, config, watch, kubeconfig

    async def __aenter__(self) -> Official:
        await self.config.load_kube_config(config_file=self.kubeconfig)
        self.session = self.client.ApiClient()
        self.core, self.custom = self.client.CoreV1Api(self.session), self.client.CustomObjectsApi(self.session)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def list(self) -> int:
        count, following = 0, None
        while True:
            page = await self.core.list_namespaced_pod(NAMESPACE, label_selector=LABELS, limit=500, _continue=following)
            count, following = count + len(page.items), page.metadata._continue
            if not following:
                return count

    async def apply(self, manifest: dict[str, Any]) -> None:
        await self.core.patch_namespaced_config_map(
            manifest["metadata"]["name"], NAMESPACE, manifest, field_manager="dsv4", force=True,
            _content_type="application/apply-patch+yaml",
        )  # fmt: skip

    async def status(self, name: str, value: dict[str, Any]) -> None:
        group, version = DSV4_DEPLOYMENTS.api_version.split("/")
        await self.custom.patch_namespaced_custom_object_status(
            group, version, NAMESPACE, DSV4_DEPLOYMENTS.plural, name, {"status": value},
            _content_type="application/merge-patch+json",
        )  # fmt: skip

    async def watch(self) -> AsyncIterator[str]:
        stream = self.watching.Watch().stream(
            self.core.list_namespaced_pod, NAMESPACE, label_selector=LABELS, resource_version="0"
        )
        async for event in stream:
            yield event["object"].metadata.name


class Lightkube:
    """lightkube's asynchronous client, with its models."""

    def __init__(self, kubeconfig: str) -> None:
        import lightkube
        from lightkube.core import resource as kinds
        from lightkube.generic_resource import create_namespaced_resource
        from lightkube.resources.core_v1 import ConfigMap, Pod

        group, version = DSV4_DEPLOYMENTS.api_version.split("/")
        self.pod, self.config_map, self.kinds = Pod, ConfigMap, kinds
        self.deployment = create_namespaced_resource(group, version, DSV4_DEPLOYMENTS.kind, DSV4_DEPLOYMENTS.plural)
        config = lightkube.KubeConfig.from_file(kubeconfig)
        self.client = lightkube.AsyncClient(config=config, field_manager="dsv4")

    async def __aenter__(self) -> Lightkube:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def list(self) -> int:
        found = self.client.list(self.pod, namespace=NAMESPACE, labels={"bench": "pods"}, chunk_size=500)
        return len([item async for item in found])

    async def apply(self, manifest: dict[str, Any]) -> None:
        await self.client.apply(self.config_map.from_dict(manifest), force=True)

    async def status(self, name: str, value: dict[str, Any]) -> None:
        from lightkube.types import PatchType

        await self.client.patch(
            self.deployment.Status, name, {"status": value}, namespace=NAMESPACE, patch_type=PatchType.MERGE
        )

    async def watch(self) -> AsyncIterator[str]:
        async for _, item in self.client.watch(
            self.pod, namespace=NAMESPACE, labels={"bench": "pods"}, resource_version="0"
        ):
            yield item.metadata.name


CLIENTS: dict[str, tuple[type[Any], str]] = {
    "dsv4": (Dsv4, "dsv4_operator.kube: aiohttp, orjson, dicts"),
    "dsv4-json": (Dsv4Json, "the same with the standard library's json"),
    "kopf": (Kopf, "kopf's own session: aiohttp, json, dicts"),
    "official": (Official, "kubernetes.aio: aiohttp, models"),
    "lightkube": (Lightkube, "lightkube: httpx, models"),
}


async def _at_once(jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    waiting = list(jobs)

    async def worker() -> None:
        while waiting:
            await waiting.pop()()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())


async def _work(client: Any, what: str, round_: str) -> None:
    if what == "list":
        count = await client.list()
        assert count == PODS_COUNT, count
    elif what == "apply":
        await _at_once([lambda n=n: client.apply(config_map(n, round_)) for n in range(WRITES)])
    elif what == "status":
        await _at_once([lambda n=n: client.status(f"d{n % AT_ONCE}", status(n)) for n in range(WRITES)])
    else:
        for _ in range(EVENTS // PODS_COUNT):
            seen = 0
            async for _name in client.watch():
                seen += 1
                if seen == PODS_COUNT:
                    break


async def _measure(name: str, kubeconfig: str) -> dict[str, Any]:
    begun = time.process_time()
    async with CLIENTS[name][0](kubeconfig) as client:
        # The connection, and what is only imported at the first use.
        await client.apply(config_map(0, f"{begun}"))
        found: dict[str, Any] = {"start": (time.process_time() - begun, 0.0)}
        for what in WORK:
            wall, cpu = time.perf_counter(), time.process_time()
            await _work(client, what, f"{begun}")
            found[what] = (time.process_time() - cpu, time.perf_counter() - wall)
    found["mebibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


@asynccontextmanager
async def _prepared(kubeconfig: str) -> AsyncIterator[None]:
    async with Client(find_access(kubeconfig=Path(kubeconfig))) as kube:
        await kube.apply(crd.definition())
        name = f"{DSV4_DEPLOYMENTS.plural}.{crd.GROUP}"
        for _ in range(150):
            if "Established" in json.dumps(await kube.get(CUSTOM_RESOURCE_DEFINITIONS, None, name) or {}):
                break
            await asyncio.sleep(0.2)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await kube.apply(namespace)
        nano = yaml.safe_load((Path(__file__).parents[1] / "examples" / "nano.yaml").read_text())
        for number in range(AT_ONCE):
            nano["metadata"] = {"name": f"d{number}", "namespace": NAMESPACE}
            for _ in range(50):
                try:
                    await kube.apply(nano)
                    break
                except NotFound:
                    await asyncio.sleep(0.2)

        async def make(number: int) -> None:
            try:
                await kube.apply(pod(number))
            except Invalid:
                # It is there from an earlier run, and its fields cannot change.
                return

        await _at_once([lambda n=n: make(n) for n in range(PODS_COUNT)])
        try:
            yield
        finally:
            for item in await kube.list(PODS, NAMESPACE):
                await kube.delete(PODS, NAMESPACE, item["metadata"]["name"], grace_seconds=0)
            for number in range(AT_ONCE):
                await kube.delete(DSV4_DEPLOYMENTS, NAMESPACE, f"d{number}")


async def _main(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.clients}
    async with _prepared(options.kubeconfig):
        for _ in range(options.rounds):
            for name in options.clients:
                command = [sys.executable, __file__, "--kubeconfig", options.kubeconfig, "--one", name]
                done = await asyncio.to_thread(
                    subprocess.run, command, capture_output=True, text=True, timeout=600, check=False
                )
                if done.returncode:
                    print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                found[name].append(json.loads(done.stdout))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{platform.machine()}, {os.cpu_count()} processors, load {load}, Python {platform.python_version()}\n")
    titles = ("client", "start", *(f"{what} s" for what in WORK), "sum s", "wall s", "MiB")
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for name, rounds in found.items():
        if not rounds:
            continue
        cpu = {what: statistics.median(one[what][0] for one in rounds) for what in ("start", *WORK)}
        wall = statistics.median(sum(one[what][1] for what in WORK) for one in rounds)
        row = [name, *(f"{cpu[what]:.2f}" for what in cpu), f"{sum(cpu[what] for what in WORK):.2f}", f"{wall:.1f}"]
        row.append(f"{statistics.median(one['mebibytes'] for one in rounds):.0f}")
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG"), required="KUBECONFIG" not in os.environ)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=lambda text: text.split(","), default=list(CLIENTS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asyncio.run(_measure(options.one, options.kubeconfig))))
    else:
        try:
            asyncio.run(_main(options))
        except KubeError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
