"""The local backend: members are processes of this machine, children of the loop, and die with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pydantic

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local import evidence, gpus, network
from dsv4_operator.backends.local.facts import available_memory, local_facts
from dsv4_operator.backends.local.gpus import Card
from dsv4_operator.backends.local.processes import children, outside_ids
from dsv4_operator.backends.local.state import DeploymentState, write_atomically
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember, ObservedProcess
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.images import ImageProfile
from dsv4_runtime.contract import AgentStatus, DrainReport, GroupPlan, MemberPlan

_log = logging.getLogger("dsv4")

_START_SECONDS = 10.0
_STATUS_SECONDS = 1.5
# Longer: what is not answered cuts off the engine's open requests.
_DRAIN_SECONDS = 5.0
# Together the 15 s that a recovery waits for its evidence at most: to begin with files, and to end the last of them.
_EVIDENCE_SECONDS = 13.0
_LAST_FILE_SECONDS = 2.0
# Without namespaces a member's processes can only be ended by the member itself.
_SHARED_FENCE_SECONDS = 20.0
_UNSHARE_COMPLAINT = "unshare: sigprocmask unblock failed: Invalid argument"


@dataclass(slots=True)
class _Running:
    """A member that this backend started."""

    plan: GroupPlan
    member: MemberPlan
    process: asyncio.subprocess.Process
    agent: int
    """Process id of the agent, as this machine counts."""
    started: float
    ended: str | None = None
    ended_time: float | None = None
    status: AgentStatus | None = None
    heard: float | None = None
    processes: tuple[ObservedProcess, ...] = ()
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)


class LocalBackend:
    """Members of one deployment as processes of this machine."""

    def __init__(
        self,
        state: DeploymentState,
        *,
        isolated: bool,
        changed: Callable[[], None],
        cards: tuple[Card, ...] = (),
        profile: ImageProfile | None = None,
    ) -> None:
        """Args:
        state: where files go.
        isolated: whether this process is in a private network (`network.enter_private_network`).
        changed: called when a member ends, so that nobody has to wait for the next look.
        cards: the GPUs that the members have; none on CPU.
        profile: of the vLLM that is installed for them.
        """
        self._state = state
        self._isolated = isolated
        self._changed = changed
        self._cards = cards
        self._profile = profile
        self._members: dict[tuple[int, int, int], _Running] = {}
        self._free: int | None = None
        """Memory that was free when last no member ran."""
        self._token = self._make_token()
        self._client = httpx.AsyncClient(
            timeout=_STATUS_SECONDS, headers={"Authorization": f"Bearer {self._token}"}, trust_env=False
        )

    async def close(self) -> None:
        """Let go of connections; members are not touched."""
        await self._client.aclose()

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """See `Backend`."""
        if self._free is None or all(running.ended is not None for running in self._members.values()):
            self._free = available_memory()
            self._cards = await asyncio.to_thread(gpus.look_again, self._cards)
        # What members take now is there for those that follow them: a group is planned again while it runs.
        return local_facts(
            deployment,
            self._state,
            isolated=self._isolated,
            memory=self._free,
            cards=self._cards,
            profile=self._profile,
        )

    async def ensure(self, plan: GroupPlan, deployment: DSV4Deployment | None = None) -> None:
        """See `Backend`."""
        file = self._state.incarnation(plan.incarnation) / "plan.json"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            write_atomically(file, plan.to_json(indent=2) + "\n")
        for member in plan.members:
            key = (plan.group, plan.incarnation, member.rank)
            if key not in self._members:
                await self._start(plan, member)

    async def observe(self, key: GroupKey) -> Observed:
        """See `Backend`."""
        mine = [running for (group, _, _), running in self._members.items() if group == key.group]
        await asyncio.gather(*(self._ask(running) for running in mine if running.ended is None))
        return Observed(key, tuple(self._seen(running) for running in mine))

    async def drain(self, key: GroupKey, incarnation: int, seconds: float) -> bool:
        """See `Backend`."""
        head = self._members.get((key.group, incarnation, 0))
        if head is None or head.ended is not None:
            return False
        url = f"http://{head.member.address}:{head.member.ports.agent}/v1/drain"
        try:
            response = await self._client.post(url, params={"seconds": seconds}, timeout=_DRAIN_SECONDS)
            return not DrainReport.model_validate_json(response.raise_for_status().content).over
        except (httpx.HTTPError, pydantic.ValidationError) as error:
            _log.warning("incarnation %d ends without a drain: %s", incarnation, str(error) or type(error).__name__)
            return False

    async def fence(self, key: GroupKey, incarnation: int) -> None:
        """See `Backend`. In a process namespace of its own a member ends as a whole, with its process 1."""
        members = [
            running
            for (group, number, _), running in self._members.items()
            if (group, number) == (key.group, incarnation)
        ]
        mine = [running for running in members if running.ended is None]
        for running in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.agent, signal.SIGKILL if self._isolated else signal.SIGTERM)
        bound = _START_SECONDS if self._isolated else _SHARED_FENCE_SECONDS
        for running in mine:
            try:
                async with asyncio.timeout(bound):
                    await running.process.wait()
            except TimeoutError:
                running.process.kill()
                await running.process.wait()
            if running.watcher is not None:
                await running.watcher
        if self._isolated:
            for running in members:
                await asyncio.to_thread(network.unplug, incarnation, running.member.rank)

    async def collect_evidence(self, key: GroupKey, incarnation: int) -> str | None:
        """See `Backend`."""
        members = (await self.observe(key)).members
        deadline = time.monotonic() + _EVIDENCE_SECONDS
        work = asyncio.to_thread(evidence.collect, self._state, incarnation, members, deadline=deadline)
        try:
            async with asyncio.timeout(_EVIDENCE_SECONDS + _LAST_FILE_SECONDS):
                found = await work
        except TimeoutError:
            _log.warning("the evidence of incarnation %d is not complete: the disk does not answer", incarnation)
            return None
        return str(found) if found else None

    async def forget(self, key: GroupKey, incarnation: int) -> None:
        """See `Backend`."""
        for name in [name for name in self._members if name[:2] == (key.group, incarnation)]:
            del self._members[name]
        await asyncio.to_thread(self._state.forget_incarnation, incarnation)

    async def _start(self, plan: GroupPlan, member: MemberPlan) -> None:
        directory = self._state.member(plan.incarnation, member.rank)
        directory.mkdir(exist_ok=True)
        plan_file = self._state.incarnation(plan.incarnation) / "plan.json"
        command = [sys.executable, "-m", "dsv4_runtime.agent.main", "--plan", str(plan_file)]
        command += ["--rank", str(member.rank), "--directory", str(directory)]
        command += ["--evidence", str(self._state.evidence)]
        if self._isolated:
            command = network.member_command(command, plan.expectations.shm_bytes)
        # The agent ends the member in good order on SIGTERM; `unshare` passes on nothing, but takes all of it along.
        on_parent_death = signal.SIGKILL if self._isolated else signal.SIGTERM
        with (directory / "agent.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: network.die_with_parent(on_parent_death),
            )
        running = _Running(plan, member, process, process.pid, time.time())
        running.watcher = asyncio.create_task(self._await_end(running))
        # Known before anything else can fail: what runs must be found again, and ended.
        self._members[plan.group, plan.incarnation, member.rank] = running
        if self._isolated:
            await self._plug_in(running)

    async def _plug_in(self, running: _Running) -> None:
        """Give a new member its interface; a member that ended meanwhile is simply observed as ended."""
        deadline = time.monotonic() + _START_SECONDS
        while not (network.in_own_network(running.process.pid) and children(running.process.pid)):
            if running.ended is not None or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)
        running.agent = children(running.process.pid)[0]
        with contextlib.suppress(subprocess.SubprocessError):
            await asyncio.to_thread(network.plug_in, running.process.pid, running.plan.incarnation, running.member.rank)

    async def _await_end(self, running: _Running) -> None:
        code = await running.process.wait()
        log = self._state.member(running.plan.incarnation, running.member.rank) / "agent.log"
        running.ended = describe_end(code, log.read_text(errors="replace") if log.exists() else "")
        running.ended_time = time.time()
        self._changed()

    async def _ask(self, running: _Running) -> None:
        url = f"http://{running.member.address}:{running.member.ports.agent}/v1/status"
        try:
            response = await self._client.get(url)
            status = AgentStatus.model_validate_json(response.raise_for_status().content)
        except (httpx.HTTPError, pydantic.ValidationError):
            return
        if status.incarnation != running.plan.incarnation or status.rank != running.member.rank:
            return
        if running.status is None or status.processes != running.status.processes:
            ids = outside_ids(running.agent)
            running.processes = tuple(
                ObservedProcess(process.name, ids[process.pid]) for process in status.processes if process.pid in ids
            )
        running.status, running.heard = status, time.time()

    def _seen(self, running: _Running) -> ObservedMember:
        return ObservedMember(
            incarnation=running.plan.incarnation,
            rank=running.member.rank,
            node=f"local-{running.member.rank}",
            address=running.member.address,
            started=running.started,
            ended=running.ended,
            ended_time=running.ended_time,
            status=running.status,
            heard=running.heard,
            processes=running.processes,
        )

    def _make_token(self) -> str:
        # Ray asks for nothing but secrecy; 256 bits as text.
        token = secrets.token_hex(32)
        write_atomically(self._state.token, token, mode=0o600)
        return token


def describe_end(code: int, log: str) -> str:
    """How a member ended, for people, from the exit code of `unshare` (or of the agent itself) and the agent's log."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    last = log.rstrip().rpartition("\n")[2]
    # util-linux 2.38 cannot die of its child's SIGKILL; it complains and exits with 1.
    if code == 1 and last == _UNSHARE_COMPLAINT:
        number = signal.SIGKILL
    if number:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}" + (f": {last[:300]}" if code and last else "")
