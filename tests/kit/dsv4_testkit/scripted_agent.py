"""Agents without an engine, for pods that exist only in KWOK.

The HTTP API and the record of a member are the agent's own code; only the reported values are scripted. One process
responds for any number of pods, because their addresses are routed to this machine (`routed`). All work of the
controller is real except for the engine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from dsv4_operator.backends.pods.scheduling import is_member
from dsv4_operator.builders import names
from dsv4_operator.kube import CONFIG_MAPS, SECRETS, Client, Manifest, PodCache
from dsv4_runtime.agent.decide.events import Peer
from dsv4_runtime.agent.http import application
from dsv4_runtime.agent.record import Changes, MemberRecord
from dsv4_runtime.contract import AgentStatus, Cause, DrainReport, Failure, GroupPlan, Phase, Signals
from dsv4_runtime.contract.recovery import HEARD_SECONDS

_STARTING = (Phase.PREFLIGHT, Phase.STAGING, Phase.JOINING)
_POLL_SECONDS = 0.05

MemberKey = tuple[str, str, int, int]
"""Namespace, deployment, group, rank; a script applies to every incarnation."""


@contextlib.contextmanager
def routed(network: str) -> Iterator[None]:
    """Route all addresses of `network` to this machine. Requires root."""
    command = ["ip", "route", "replace", "local", network, "dev", "lo"]
    subprocess.run(command, check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", "local", network, "dev", "lo"], check=False, timeout=10)


@dataclass
class Script:
    """Behaviour of a member's agent; it can be changed while the agent runs."""

    phase_seconds: float = 0.05
    """Seconds in each phase of a start."""
    last_phase: Phase = Phase.SERVING
    """Last phase that is reached, as in a slow load."""
    silent: bool = False
    """Connections are accepted, but get no response."""
    gone: bool = False
    """Connections are refused."""
    lies: bool = False
    """The status names another incarnation."""
    fails: Cause | None = None
    """Cause of its failure: the agent becomes `Failed`."""
    drain_seconds: float = 0.0
    """Seconds in which its engine completes open requests during a drain."""
    lost_seconds: float = HEARD_SECONDS + 1.5
    """A head without reports of a member for this time becomes `Failed`. As in the agent's policy it is longer than
    `HEARD_SECONDS`, within which the operator takes the member for running."""


class ScriptedAgent:
    """One member, as read by the agent's HTTP API."""

    def __init__(
        self, plan: GroupPlan, rank: int, script: Script, group: Callable[[], Mapping[int, ScriptedAgent]]
    ) -> None:
        self.plan, self.rank, self.script = plan, rank, script
        self.state = MemberRecord(plan, rank)
        self._group = group
        self._heard: dict[int, float] = {}
        self._drain = (0.0, 0.0)
        """Begin of the drain and its limit in seconds."""

    @property
    def changes(self) -> Changes:
        return self.state.changes

    def status(self) -> AgentStatus:
        if self.script.silent:
            raise web.HTTPServiceUnavailable
        now = time.monotonic()
        self.state.signals = Signals(time=now, silent={rank: now - when for rank, when in self._heard.items()})
        status = self.state.status()
        return status.model_copy(update={"incarnation": status.incarnation + 1}) if self.script.lies else status

    def evidence(self) -> dict[str, object]:
        return {
            "firstFatal": {"vllm": "EngineCore died"},
            "lastLines": {"vllm": [f"line {number}" for number in range(500)]},
            "memory": {},
            "status": self.state.status().to_dict(),
        }

    def others(self) -> Mapping[int, Peer]:
        now = time.monotonic()
        found = {}
        for rank, other in self._group().items():
            if rank == self.rank:
                continue
            if other.script.lies:
                found[rank] = Peer(asked=now, error="it belongs to another incarnation")
                continue
            if other.answers:
                self._heard[rank] = now
            found[rank] = Peer(status=other.state.status(), heard=self._heard.get(rank), asked=now)
        return found

    def drain(self, seconds: float) -> DrainReport:
        """Complete the open requests of a serving engine after `drain_seconds` of the script."""
        state, now = self.state, time.monotonic()
        if state.phase is Phase.SERVING and self.rank == 0:
            state.finish("waiting for 1 open request")
            self._drain = (now, seconds)
        begun, limit = self._drain
        return DrainReport(over=not state.finishing or now >= begun + min(limit, self.script.drain_seconds))

    @property
    def answers(self) -> bool:
        return not (self.script.silent or self.script.gone)

    async def live(self) -> None:
        """Advance from Preflight to the last phase of the script."""
        while True:
            await self._step()
            await asyncio.sleep(min(_POLL_SECONDS, self.script.phase_seconds))

    async def _step(self) -> None:
        state, script = self.state, self.script
        if script.fails is not None and state.phase is not Phase.FAILED:
            self.fail(script.fails, self.rank, "as its script says")
        if state.phase in (Phase.FAILED, Phase.DRAINING, Phase.STOPPED):
            return
        lost = self._lost()
        if lost is not None:
            self.fail(Cause.NODE_LOST, lost, f"rank {lost} was not heard for {script.lost_seconds} s")
        elif state.phase is not script.last_phase:
            await asyncio.sleep(script.phase_seconds)
            self._advance()

    def _advance(self) -> None:
        state = self.state
        if state.phase is Phase.PREFLIGHT:
            state.enter(Phase.STAGING)
        elif state.phase is Phase.STAGING:
            state.joined = True
            state.enter(Phase.JOINING)
        elif self.rank:
            head = self._group().get(0)
            if head is not None and head.state.phase not in _STARTING:
                state.enter(head.state.phase)
        elif state.phase is Phase.JOINING:
            members = self._group()
            if len(members) == len(self.plan.members) and all(one.state.joined for one in members.values()):
                state.begin_generation()
                state.enter(Phase.LOADING)
        elif state.phase is Phase.RESTARTING:
            state.restarts.append(time.time())
            state.begin_generation()
            state.enter(Phase.LOADING)
        elif state.phase is Phase.LOADING:
            state.enter(Phase.WARMING)
        elif state.phase is Phase.WARMING:
            state.served()
            state.enter(Phase.SERVING)

    def engine_dies(self, cause: Cause = Cause.ENGINE_CORE_DIED) -> None:
        """Fail the engine of rank 0 and restart it in place."""
        self.state.record_failure(self._failure(cause, 0, "the engine died").model_copy(update={"level": 1}))
        self.state.enter(Phase.RESTARTING)

    def fail(self, cause: Cause, culprit: int, message: str) -> None:
        """Fail in a way that only a new incarnation repairs."""
        self.state.record_failure(self._failure(cause, culprit, message))
        self.state.enter(Phase.FAILED, message)

    def _lost(self) -> int | None:
        if self.rank or self.state.phase in _STARTING:
            return None
        self.others()
        limit = time.monotonic() - self.script.lost_seconds
        return next((rank for rank, heard in self._heard.items() if heard < limit), None)

    def _failure(self, cause: Cause, culprit: int, message: str) -> Failure:
        generation = self.state.generation or None
        return Failure(
            time=time.time(),
            cause=cause,
            culprit_rank=culprit,
            message=message,
            detected_by="process",
            generation=generation,
        )


@dataclass
class _Running:
    agent: ScriptedAgent
    runner: web.AppRunner
    listener: socket.socket | None
    life: asyncio.Task[None]
    address: str
    port: int


class ScriptedAgents:
    """Responds for every running member pod of a cluster with an address, until closed."""

    def __init__(self, kube: Client, *, settled: Script | None = None, namespaces: Sequence[str] = ()) -> None:
        """Create the agents without starting them.

        Args:
            kube: the API server.
            settled: behaviour of agents without a script.
            namespaces: namespaces of the pods; empty: all.
        """
        self._kube = kube
        self._default = settled or Script()
        self._scripts: dict[MemberKey, Script] = {}
        self._running: dict[str, _Running] = {}
        self._news = asyncio.Event()
        self._pods = PodCache(kube, namespaces=namespaces, changed=lambda _: self._news.set())
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ScriptedAgents:
        self._tasks = [asyncio.create_task(self._pods.run()), asyncio.create_task(self._follow())]
        await asyncio.wait_for(self._pods.synced(), 30)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for uid in list(self._running):
            await self._end(uid)

    def script(self, namespace: str, deployment: str, rank: int, group: int = 0) -> Script:
        """Return the behaviour of a member in the present and all later incarnations."""
        key = (namespace, deployment, group, rank)
        return self._scripts.setdefault(key, Script(**vars(self._default)))

    def agent(self, namespace: str, deployment: str, rank: int, group: int = 0) -> ScriptedAgent:
        """Return the member's agent in the latest incarnation."""
        found = [
            one.agent
            for one in self._running.values()
            if (one.agent.plan.namespace, one.agent.plan.deployment, one.agent.plan.group, one.agent.rank)
            == (namespace, deployment, group, rank)
        ]
        return max(found, key=lambda agent: agent.plan.incarnation)

    @property
    def running(self) -> int:
        """Number of running agents."""
        return len(self._running)

    async def _follow(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._catch_up()
            except Exception as error:
                # Without this task no agent responds, and no error is visible.
                print(f"scripted agents: {type(error).__name__}: {error}; tried again", file=sys.stderr, flush=True)
            # Not `wait_for`: before Python 3.12 it can swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._news.wait()

    async def _catch_up(self) -> None:
        """Start, stop and open agents so that they match the present pods."""
        members = {pod["metadata"]["uid"]: pod for pod in self._pods.all() if is_member(pod) and _runs(pod)}
        for uid in self._running.keys() - members.keys():
            await self._end(uid)
        for uid in members.keys() - self._running.keys():
            await self._start(uid, members[uid])
        for one in list(self._running.values()):
            await self._listen(one)

    async def _start(self, uid: str, pod: Manifest) -> None:
        labels, namespace = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        deployment, group = labels[names.DEPLOYMENT], int(labels[names.GROUP])
        rank = int(labels[names.RANK])
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        config = await self._kube.get(CONFIG_MAPS, namespace, volumes["plan"]["configMap"]["name"])
        secret = await self._kube.get(SECRETS, namespace, volumes["token"]["secret"]["secretName"])
        if config is None or secret is None:
            return
        (entry,) = volumes["token"]["secret"]["items"]
        token = base64.b64decode(secret["data"][entry["key"]]).decode()
        plan = GroupPlan.model_validate_json(config["data"][names.PLAN_FILE])
        script = self.script(namespace, deployment, rank, group)
        agent = ScriptedAgent(plan, rank, script, lambda: self._siblings(plan))

        @web.middleware
        async def hold(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            while script.silent:
                await asyncio.sleep(_POLL_SECONDS)
            return await handler(request)

        app = application(agent, token)
        app.middlewares.insert(0, hold)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        port = plan.members[rank].ports.agent
        life = asyncio.create_task(agent.live())
        self._running[uid] = _Running(agent, runner, None, life, pod["status"]["podIP"], port)

    async def _listen(self, one: _Running) -> None:
        """Open or close the agent's port according to its script."""
        if one.listener is None and not one.agent.script.gone:
            try:
                listener = socket.create_server((one.address, one.port))
            except OSError as error:
                # A recently deleted pod may have had the same address.
                print(f"{one.address}:{one.port} is not free yet: {error}")
                return
            await web.SockSite(one.runner, listener).start()
            one.listener = listener
        elif one.listener is not None and one.agent.script.gone:
            await self._deafen(one)
            # A vanished machine answers on no open connection either.
            server = one.runner.server
            for connection in server.connections if server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()

    async def _deafen(self, one: _Running) -> None:
        """Close the agent's port."""
        if one.listener is None:
            return
        # An accepted socket becomes a connection in the next iteration of the event loop. CPython leaks it if the
        # server is closed by then (github.com/python/cpython/issues/109564), and clients here reconnect continuously.
        asyncio.get_running_loop().remove_reader(one.listener)
        await asyncio.sleep(0)
        for site in tuple(one.runner.sites):
            await site.stop()
        one.listener = None

    async def _end(self, uid: str) -> None:
        one = self._running[uid]
        one.life.cancel()
        await asyncio.gather(one.life, return_exceptions=True)
        await self._deafen(one)
        await one.runner.cleanup()
        # Deleted last: a cancellation before would leave its port open permanently.
        del self._running[uid]

    def _siblings(self, plan: GroupPlan) -> dict[int, ScriptedAgent]:
        key = (plan.namespace, plan.deployment, plan.group, plan.incarnation)
        return {
            one.agent.rank: one.agent
            for one in self._running.values()
            if (one.agent.plan.namespace, one.agent.plan.deployment, one.agent.plan.group, one.agent.plan.incarnation)
            == key
        }


def _runs(pod: Manifest) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP"))
