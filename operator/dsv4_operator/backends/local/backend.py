"""The local backend: members are child processes of the supervisor, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local import gpus, network
from dsv4_operator.backends.local.facts import CheckpointFiles, available_memory, local_facts
from dsv4_operator.backends.local.gateway import LocalGateways, OwnGateways
from dsv4_operator.backends.local.gpus import Card
from dsv4_operator.backends.local.network import children, outside_ids
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import PEER_COPIES, DeploymentState, collect_evidence
from dsv4_operator.backends.local.supervisor import NETWORK, OUTSIDE, Child, LoopReport, Processes
from dsv4_operator.lifecycle import update_status
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember, ObservedProcess
from dsv4_operator.lifecycle.watch import watch
from dsv4_operator.planning.facts import Facts
from dsv4_runtime.client import AGENT_ERRORS, AgentClient
from dsv4_runtime.contract import AgentStatus, GroupPlan, MemberPlan, WeightsSource
from dsv4_runtime.contract.plan import OUTSIDE_NETWORK
from dsv4_runtime.contract.token import new_key, new_token
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import own_shortage, replace_file
from dsv4_runtime.util.peer_copies import unsafe_copies

_log = logging.getLogger("dsv4")

_START_SECONDS = 10.0
# Together less than the 15 s that a recovery waits for evidence: to start the last file, and to finish it.
_EVIDENCE_SECONDS = 12.0
_LAST_FILE_SECONDS = 2.0
# Without namespaces only the member itself can end its processes.
_SHARED_FENCE_SECONDS = 20.0
_WAIT_SECONDS = 1.0
"""Time for which a reconcile waits; usually sufficient."""
# An agent answers within milliseconds.
_ANSWER_SECONDS = 0.4
_QUERY_SECONDS, _MOST_ANSWER_BYTES = 2.0, 1 << 20
"""Limits of a request of `query_members`."""
_MEMBER = re.compile(r"g(\d+)/i(\d+)/m(\d+)")
"""Names of the members' processes: group, incarnation, rank."""
_FREE = "free-memory"
"""Name of the kept file with the bytes that were free when last no member ran."""
_END_BYTES = 4096
"""Bytes of a member's log that are read after its end: the last line counts."""
_DOWNLOADED = frozenset({WeightsSource.HUGGING_FACE, WeightsSource.S3, WeightsSource.HTTP})
_UNSHARE_COMPLAINT = "unshare: sigprocmask unblock failed: Invalid argument"


@dataclass(slots=True)
class _RunningMember:
    plan: GroupPlan
    member: MemberPlan
    process: Child
    agent: int
    """Process id of the agent on this machine."""
    started: float
    ended: str | None = None
    ended_time: float | None = None
    status: AgentStatus | None = None
    heard: float | None = None
    processes: tuple[ObservedProcess, ...] = ()
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)
    plugging: asyncio.Task[None] | None = field(default=None, repr=False)
    """Creates its interface, if it has its own network."""
    request: asyncio.Task[None] | None = field(default=None, repr=False)
    fenced_time: float | None = None
    """Monotonic time of the first request to end."""

    @property
    def place(self) -> int:
        """Return its position on the bridge (`network.address`)."""
        return self.plan.group * len(self.plan.members) + self.member.rank

    @property
    def url(self) -> str:
        """Return the base URL of its agent."""
        return f"http://{self.member.address}:{self.member.ports.agent}"


class LocalBackend(OwnGateways):
    """Members of one deployment as processes of this machine."""

    def __init__(
        self,
        state: DeploymentState,
        processes: Processes,
        *,
        isolated: bool,
        changed: Callable[[], None],
        cards: tuple[Card, ...] = (),
        software: Software | None = None,
        gateways: LocalGateways | None = None,
    ) -> None:
        """Args:
        state: files of the deployment.
        processes: starts the members, and knows those of an earlier loop (`adopt`).
        isolated: whether this process is in a private network (`network.enter_private_network`).
        changed: called when a member ends, to reconcile at once.
        cards: the GPUs of the members; none on CPU.
        software: installed software for engines on them; none on CPU.
        gateways: the front end; None if members share the machine's network and users connect to them directly.
        """
        self._processes = processes
        super().__init__(state, self._earlier_token_key(state) or new_key(), gateways)
        self._isolated = isolated
        self._changed = changed
        self._cards = cards
        self._software = software or Software()
        self._members: dict[tuple[int, int, int], _RunningMember] = {}
        self._free: int | None = None
        """Free memory when last no member ran."""
        self._unsafe_copies: str | None = None
        self._checkpoint = CheckpointFiles()
        self._agents = AgentClient()

    def _earlier_token_key(self, state: DeploymentState) -> str | None:
        """Return the key with which members of an earlier loop got their tokens; None without such members."""
        if not any(_MEMBER.fullmatch(name) for name in self._processes.children):
            return None
        with contextlib.suppress(OSError, ValueError):
            return state.token_key.read_text()
        return None

    def adopt(self) -> None:
        """Continue with the members that an earlier loop started, running or ended."""
        for name, child in list(self._processes.children.items()):
            if (match := _MEMBER.fullmatch(name)) is None:
                continue
            group, incarnation, rank = map(int, match.groups())
            try:
                file = self._state.incarnation(incarnation, group) / "plan.json"
                plan = GroupPlan.model_validate_json(file.read_bytes())
                member = plan.members[rank]
            except (OSError, ValueError, IndexError):
                _log.exception("%s is ended: its plan cannot be read", name)
                self._processes.signal(child, signal.SIGKILL)
                continue
            self._follow(plan, member, child)
            _log.info("adopted rank %d of incarnation %d (process %d)", rank, incarnation, child.pid)

    @property
    def _running(self) -> bool:
        return any(running.ended is None for running in self._members.values())

    async def close(self) -> None:
        """See `Backend`."""
        requests = [running.request for running in self._members.values() if running.request is not None]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._agents.close()

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """See `Backend`."""
        if not self._running:
            self._free = available_memory()
            self._cards = await asyncio.to_thread(gpus.refresh, self._cards)
        elif self._free is None:
            # Adopted members hold memory that an earlier loop measured.
            self._free = int(self._processes.kept_text(_FREE) or available_memory())
            self._cards = tuple(replace(card, free_bytes=None, holders=()) for card in self._cards)
        if self._unsafe_copies is None:
            # At most once after a start of the machine it takes longer than 2 s.
            record = self._state.directory / PEER_COPIES
            self._unsafe_copies = await asyncio.to_thread(unsafe_copies, [card.uuid for card in self._cards], record)
        # Memory of running members is free for their successors: a group is planned again while it runs.
        return local_facts(
            deployment,
            self._state,
            isolated=self._isolated,
            memory=self._free,
            cards=self._cards,
            software=self._software,
            unsafe_copies=self._unsafe_copies,
            model=await asyncio.to_thread(self._checkpoint.model, deployment.spec.model),
        )

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `Backend`."""
        if self._free is not None and not self._running:
            self._processes.keep_text(_FREE, str(self._free))
        self._state.save_token_key(self._token_key)
        file = self._state.incarnation(plan.incarnation, plan.group) / "plan.json"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            replace_file(file, plan.to_json(indent=2) + "\n")
        if not any(known[:2] == (plan.group, plan.incarnation) for known in self._members):
            # The members with the previous token were fenced; new ones read the token at their start.
            replace_file(self._state.token(plan.group), new_token(self._token_key))
        for member in plan.members:
            key = (plan.group, plan.incarnation, member.rank)
            if key not in self._members:
                await self._start(plan, member)
        # Usually complete by then; otherwise it continues in the background.
        mine = [one for name, one in self._members.items() if name[:2] == (plan.group, plan.incarnation)]
        await _wait([one.plugging for one in mine])

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        """See `Backend`."""
        mine = [running for (number, _, _), running in self._members.items() if number == group]
        requests = [self._status_request(running) for running in mine if running.ended is None]
        if requests:
            # A member that does not answer must not delay the reports of the others.
            done, _ = await asyncio.wait(requests, timeout=_ANSWER_SECONDS)
            for error in [request.exception() for request in done]:
                if error is not None:
                    raise error
        return Observed(GroupKey.of(deployment, group), tuple(self._seen(running) for running in mine))

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        """See `Backend`."""
        head = self._members.get((group, incarnation, 0))
        if head is None or head.ended is not None:
            return True
        return await self._agents.drain(head.url, self._token_key, seconds)

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        """See `Backend`. With its own process namespace, a member ends as a whole when its process 1 ends."""
        members = [running for name, running in self._members.items() if name[:2] == (group, incarnation)]
        for running in members:
            if running.ended is None:
                self._end(running)
        await _wait([task for running in members for task in (running.watcher, running.plugging)])
        if any(running.ended is None or (running.plugging and not running.plugging.done()) for running in members):
            return False
        if self._isolated:
            for running in members:
                await asyncio.to_thread(network.unplug, incarnation, running.place)
        return True

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        """See `Backend`."""
        members = (await self.observe(deployment, group)).members
        deadline = time.monotonic() + _EVIDENCE_SECONDS
        work = asyncio.to_thread(collect_evidence, self._state, group, incarnation, members, deadline=deadline)
        try:
            async with asyncio.timeout(_EVIDENCE_SECONDS + _LAST_FILE_SECONDS):
                found = await work
        except TimeoutError:
            _log.warning("the evidence of incarnation %d is not complete: the disk does not answer", incarnation)
            return None
        return str(found) if found else None

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        """See `Backend`."""
        for name in [name for name in self._members if name[:2] == (group, incarnation)]:
            self._processes.forget(self._members.pop(name).process)
        await asyncio.to_thread(self._state.forget_incarnation, incarnation, group)

    async def _start(self, plan: GroupPlan, member: MemberPlan) -> None:
        directory = self._state.member(plan.incarnation, member.rank, plan.group)
        directory.mkdir(exist_ok=True)
        plan_file = directory.parent / "plan.json"
        command = [sys.executable, "-m", "dsv4_runtime.agent.main", "--plan", str(plan_file)]
        command += ["--rank", str(member.rank), "--directory", str(directory)]
        command += ["--evidence", str(self._state.evidence(plan.group))]
        outside: dict[str, str] = {}
        if self._isolated:
            command = network.member_command(command, plan.expectations.shm_bytes)
            # A supervisor of an earlier version has no such file.
            if plan.weights.source in _DOWNLOADED and OUTSIDE in self._processes.kept:
                outside = {OUTSIDE_NETWORK: str(self._processes.number(OUTSIDE))}
        # On SIGTERM the agent stops the member gracefully. `unshare` forwards no signal, but its end kills the
        # member.
        death = signal.SIGKILL if self._isolated else signal.SIGTERM
        name = f"g{plan.group}/i{plan.incarnation}/m{member.rank}"
        child = await self._processes.start(
            name,
            command,
            log=directory / "agent.log",
            death=death,
            files=(OUTSIDE,) if outside else (),
            variables=outside,
        )
        # Recorded before any later step can fail, so that the process can be found and ended.
        self._follow(plan, member, child)

    def _follow(self, plan: GroupPlan, member: MemberPlan, child: Child) -> None:
        running = _RunningMember(plan, member, child, child.pid, child.started)
        self._members[plan.group, plan.incarnation, member.rank] = running
        running.watcher = asyncio.create_task(self._await_end(running))
        if self._isolated and child.code is None:
            running.plugging = asyncio.create_task(self._plug_in(running))

    async def _plug_in(self, running: _RunningMember) -> None:
        """Create the interface of a new member; does nothing if the member ended meanwhile."""
        deadline = time.monotonic() + _START_SECONDS
        while not (network.in_own_network(running.process.pid) and children(running.process.pid)):
            if running.ended is not None or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)
        running.agent = children(running.process.pid)[0]
        with contextlib.suppress(subprocess.SubprocessError):
            await asyncio.to_thread(network.plug_in, running.process.pid, running.plan.incarnation, running.place)

    def _end(self, running: _RunningMember) -> None:
        """Signal a member to end; kill it after its time limit."""
        now = time.monotonic()
        if running.fenced_time is None:
            running.fenced_time = now
            number = signal.SIGKILL if self._isolated else signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.agent, number)
        elif now - running.fenced_time > (_START_SECONDS if self._isolated else _SHARED_FENCE_SECONDS):
            self._processes.signal(running.process, signal.SIGKILL)

    async def _await_end(self, running: _RunningMember) -> None:
        code = await running.process.wait()
        log = self._state.member(running.plan.incarnation, running.member.rank, running.plan.group) / "agent.log"
        text = ""
        # For example without free descriptors: the end itself must never be missed.
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            text = file.read().decode(errors="replace")
        running.ended = describe_end(code, text)
        running.ended_time = running.process.ended_time
        self._changed()

    def _status_request(self, running: _RunningMember) -> asyncio.Task[None]:
        """Return the status request of a member; a running request of an earlier call is reused."""
        if running.request is None or running.request.done():
            running.request = asyncio.create_task(self._request_status(running))
        return running.request

    async def _request_status(self, running: _RunningMember) -> None:
        try:
            status = await self._agents.status(running.url, self._token_key)
        except AGENT_ERRORS as error:
            if own_shortage(error) is not None:
                # Not silence of the agent: the group cannot be observed.
                raise
            return
        if status.incarnation != running.plan.incarnation or status.rank != running.member.rank:
            return
        if running.status is None or status.processes != running.status.processes:
            ids = outside_ids(running.agent)
            running.processes = tuple(
                ObservedProcess(process.name, ids[process.pid]) for process in status.processes if process.pid in ids
            )
        running.status, running.heard = status, unix_time()

    def _seen(self, running: _RunningMember) -> ObservedMember:
        return ObservedMember(
            incarnation=running.plan.incarnation,
            rank=running.member.rank,
            node=running.member.node or "",
            address=running.member.address,
            started=running.started,
            ended=running.ended,
            ended_time=running.ended_time,
            status=running.status,
            heard=running.heard,
            processes=running.processes,
        )


async def _wait(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Wait for the end of all `tasks`, at most `_WAIT_SECONDS`."""
    if under_way := {task for task in tasks if task is not None}:
        await asyncio.wait(under_way, timeout=_WAIT_SECONDS)


def describe_end(code: int, log: str) -> str:
    """Return how a member ended, from the exit code of `unshare` (or of the agent) and the agent's log."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    last = log.rstrip().rpartition("\n")[2]
    # util-linux 2.38 cannot end itself with the SIGKILL of its child; it logs a message and exits with 1.
    if code == 1 and last == _UNSHARE_COMPLAINT:
        number = signal.SIGKILL
    if number:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}" + (f": {last[:300]}" if code and last else "")


def query_members(state: DeploymentState, found: DSV4Deployment, report: LoopReport) -> tuple[DSV4Deployment, bool]:
    """Return the deployment with the present reports of its members, and whether any of them responded.

    For a loop that does not respond. Members are reached through their private network, which the supervisor keeps.
    """
    now, groups, heard = time.time(), [], False
    for group in found.status.groups:
        try:
            folder = state.incarnation(group.incarnation, group.index)
            plan = GroupPlan.model_validate_json((folder / "plan.json").read_bytes())
            # The loop of several machines has the token beside the plan.
            own = folder / "token"
            token = (own if own.exists() else state.token(group.index)).read_text().strip()
        except (OSError, ValueError):
            groups.append(group)
            continue
        with ThreadPoolExecutor(len(plan.members)) as pool:
            reports = list(pool.map(lambda member, token=token: _query(report, member, token), plan.members))
        members = tuple(
            ObservedMember(
                plan.incarnation,
                member.rank,
                member.node or "",
                member.address,
                now,
                status=status,
                heard=now if status is not None else None,
            )
            for member, status in zip(plan.members, reports, strict=True)
        )
        heard = heard or any(status is not None for status in reports)
        observed = Observed(GroupKey.of(found, group.index), members)
        groups.append(watch(group, observed, generation=found.metadata.generation, now=now))
    return found.model_copy(update={"status": update_status(found, groups, now)}), heard


def _query(report: LoopReport, member: MemberPlan, token: str) -> AgentStatus | None:
    """Return the report of a member's agent; None if it does not respond. Must run in a thread of its own."""
    with contextlib.suppress(OSError, ValueError):
        if NETWORK in report.kept:
            with open(f"/proc/{report.supervisor}/fd/{report.kept[NETWORK]}", "rb") as namespace:
                network.enter(namespace.fileno())
        request = urllib.request.Request(
            f"http://{member.address}:{member.ports.agent}/v1/status", headers={"Authorization": f"Bearer {token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_QUERY_SECONDS) as answer:
            return AgentStatus.model_validate_json(answer.read(_MOST_ANSWER_BYTES))
    return None
