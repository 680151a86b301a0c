"""Agents of many groups and their gateways, with pods on KWOK; a group serves as soon as all its members run.

    python -m dsv4_testkit.scale.agents --kubeconfig FILE --namespace NAME

One process responds on the addresses of all pods, in the format of the agent's contract, and to the operator's requests
through gateways, whatever their token. Unlike the scripted agents of the tests it runs no task per member, because it
shares the processor with the measured operator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from dsv4_operator.builders import names
from dsv4_operator.kube import Client, Manifest, PodCache, find_access
from dsv4_runtime.contract import AgentStatus, EngineStatus, GroupReport, Health, Phase, Verdict
from dsv4_runtime.contract.gateway import CanaryReport
from dsv4_runtime.util.files import raise_file_limit

_TICK_SECONDS = 1.0
_PORTS = {names.MEMBER: names.HEAD_PORTS["agent"][0], names.GATEWAY: names.GATEWAY_PORT}
"""Port by component."""

GroupName = tuple[str, int, int]
"""Deployment, group, incarnation."""


@dataclass(frozen=True, slots=True)
class _Member:
    group: GroupName
    rank: int
    begun: float


class Agents:
    """Responds for the members of one namespace."""

    def __init__(self, pods: PodCache, members: int) -> None:
        self._pods = pods
        self._size = members
        self._news = asyncio.Event()
        self._members: dict[str, _Member] = {}
        """Members by address."""
        self._groups: dict[GroupName, dict[int, _Member]] = {}
        self._whole: dict[GroupName, asyncio.Event] = {}
        self._sites: dict[str, web.TCPSite] = {}
        app = web.Application()
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/watch", self._watch)
        app.router.add_get("/dsv4/canary", _canary)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    def changed(self, _: object) -> None:
        """Handle a created, changed or deleted pod."""
        self._news.set()

    async def follow(self) -> None:
        """Listen on the addresses of all running members and gateways, until cancelled."""
        await self._runner.setup()
        while True:
            await self._news.wait()
            self._news.clear()
            found = ((_component(pod), pod) for pod in self._pods.all() if _runs(pod))
            running = {str(pod["status"]["podIP"]): (kind, pod) for kind, pod in found if kind in _PORTS}
            for address in self._sites.keys() - running.keys():
                await self._sites.pop(address).stop()
                self._forget(address)
            for address in running.keys() - self._sites.keys():
                kind, pod = running[address]
                if kind == names.MEMBER:
                    self._take(address, pod)
                self._sites[address] = web.TCPSite(self._runner, address, _PORTS[kind], reuse_address=True)
                await self._sites[address].start()
            # Pods change in bursts; one pass serves many changes.
            await asyncio.sleep(0.05)

    def _take(self, address: str, pod: Manifest) -> None:
        labels = pod["metadata"]["labels"]
        name = labels[names.DEPLOYMENT], int(labels[names.GROUP]), int(labels[names.INCARNATION])
        member = _Member(name, int(labels[names.RANK]), round(time.time(), 3))
        self._members[address] = member
        group = self._groups.setdefault(name, {})
        group[member.rank] = member
        whole = self._whole.setdefault(name, asyncio.Event())
        if len(group) == self._size:
            whole.set()

    def _forget(self, address: str) -> None:
        member = self._members.pop(address, None)
        if member is None:
            return
        self._groups[member.group].pop(member.rank, None)
        self._whole[member.group].clear()

    def _said(self, member: _Member) -> AgentStatus:
        serves = self._whole[member.group].is_set()
        deployment, group, incarnation = member.group
        ready = member.begun if serves and not member.rank else None
        return AgentStatus(
            deployment=deployment,
            group=group,
            incarnation=incarnation,
            rank=member.rank,
            phase=Phase.SERVING if serves else Phase.JOINING,
            phase_time=member.begun,
            time=time.time(),
            verdict=Verdict(health=Health.HEALTHY if serves else Health.STARTING),
            joined=True,
            engine=None if member.rank else EngineStatus(generation=int(serves), ready_time=ready),
        )

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(text=self._said(self._asked(request)).to_json(), content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Respond to `/v1/watch?group=1` of a head: full reports until the group is complete, then only ages."""
        member = self._asked(request)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        whole = self._whole[member.group]
        with contextlib.suppress(ConnectionResetError):
            while not whole.is_set():
                await response.write(self._line(member, news=True))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await whole.wait()
            await response.write(self._line(member, news=True))
            while whole.is_set():
                await asyncio.sleep(_TICK_SECONDS)
                await response.write(self._line(member, news=False))
        return response

    def _line(self, head: _Member, *, news: bool) -> bytes:
        members = self._groups[head.group]
        said = tuple(self._said(members[rank]) for rank in sorted(members)) if news else None
        return GroupReport(ages=dict.fromkeys(members, 0.0), members=said).to_json().encode() + b"\n"

    def _asked(self, request: web.Request) -> _Member:
        """Return the member with the address of the connection."""
        if request.transport is None:
            raise web.HTTPServiceUnavailable
        address = request.transport.get_extra_info("sockname")[0]
        if address not in self._members:
            raise web.HTTPServiceUnavailable
        return self._members[address]


async def _canary(_: web.Request) -> web.Response:
    return web.Response(text=CanaryReport(ok=True, gateway="scripted").to_json(), content_type="application/json")


def _component(pod: Manifest) -> str:
    """Return the component of dsv4; empty for pods of others, such as KubeRay's."""
    return str(names.part(pod, "metadata", "labels").get(names.COMPONENT, ""))


def _runs(pod: Manifest) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP"))


async def _serve(kubeconfig: Path, namespace: str, members: int) -> None:
    async with Client(find_access(kubeconfig=kubeconfig)) as kube:
        found: list[Agents] = []
        pods = PodCache(kube, namespaces=[namespace], changed=lambda key: found[0].changed(key))
        found.append(Agents(pods, members))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pods.run())
            tasks.create_task(found[0].follow())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--members", type=int, default=2, help="of a group (default: %(default)s)")
    options = parser.parse_args()
    raise_file_limit()
    asyncio.run(_serve(options.kubeconfig, options.namespace, options.members))


if __name__ == "__main__":
    main()
