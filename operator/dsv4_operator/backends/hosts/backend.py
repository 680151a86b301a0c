"""The backend for several machines without Kubernetes: members are started by the host service of each machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel
from pydantic_core import from_json

from dsv4_operator.api import DSV4Deployment, Finding, Hardware
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.hosts import bootstrap
from dsv4_operator.backends.hosts.documents import (
    EVIDENCE_BYTES,
    REPORT_BYTES,
    Claim,
    EndRequest,
    GpuReport,
    Host,
    HostReport,
    Inventory,
    LeaseRefused,
    LeaseRequest,
    MemberReport,
    Refusal,
    StartRequest,
)
from dsv4_operator.backends.hosts.survey import Here, driver_findings, report_findings, silent_machine
from dsv4_operator.backends.local.facts import CheckpointFiles
from dsv4_operator.backends.local.gateway import LocalGateways, OwnGateways
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import DeploymentState, save_evidence
from dsv4_operator.lifecycle.observed import GroupKey, Observed, ObservedMember
from dsv4_operator.planning.catalog import machine_named
from dsv4_operator.planning.facts import Facts, GpuFacts, NodeFacts
from dsv4_runtime.client import AGENT_ERRORS, AgentClient, read_content
from dsv4_runtime.contract import AgentStatus, Cause, GroupPlan
from dsv4_runtime.contract.token import new_key, new_token
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import own_shortage, replace_file

_log = logging.getLogger("dsv4")

_ANSWER_SECONDS = 0.4
"""Time for which a call waits for reports and statuses; later ones are used by the next call."""
_REQUEST_SECONDS = 5.0
"""Limit of a request that continues in the background."""
_TAKE_SECONDS, _ACT_SECONDS = 0.5, 0.9
"""Limits of requests that a call waits for: together with `_ANSWER_SECONDS` less than `CALL_SECONDS`."""
_EVIDENCE_SECONDS = 12.0
_ABSENT_SECONDS = 10.0
"""Silence after which a machine is not planned with."""
_ABSENT_INTERVAL = 0.5
_KEPT_PLANS = 20
_LOG_NAME = re.compile(r"m\d{1,4}(-ray/|-)[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")

T = TypeVar("T")
Key = tuple[int, int, int]
"""Group, incarnation, rank."""


@dataclass(slots=True)
class _Machine:
    """A host with its latest report."""

    host: Host
    url: str
    report: HostReport | None = None
    heard: float | None = None
    """Monotonic time of the report."""
    problem: str = "it has not answered yet"
    """Reason why the latest request failed; empty if it succeeded."""
    code: int | None = None
    """Error number of its connection, if there was none."""
    request: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def absent(self) -> bool:
        return self.heard is None or time.monotonic() - self.heard > _ABSENT_SECONDS

    def failed(self, error: BaseException) -> None:
        """Note the reason of a failed request."""
        self.problem, self.code = _reason(error), getattr(error, "errno", None)


@dataclass(slots=True)
class _Seen:
    """Knowledge about a member that its machine's report does not repeat."""

    started: float
    """By this machine's clock."""
    ended_time: float | None = None
    status: AgentStatus | None = None
    heard: float | None = None
    request: asyncio.Task[None] | None = field(default=None, repr=False)


class HostsBackend(OwnGateways):
    """Members of one deployment on several machines.

    Every change carries a claim: a fencing token, which the host services check. It is taken with the first change,
    renewed with every observation, and taken again after another loop had it.
    """

    def __init__(
        self,
        state: DeploymentState,
        inventory: Inventory,
        deployment: DSV4Deployment,
        *,
        key: str,
        holder: str,
        changed: Callable[[], None],
        software: Software | None = None,
        gateways: LocalGateways | None = None,
    ) -> None:
        """Args:
        state: files of the loop: plans, tokens and evidence.
        inventory: the machines.
        deployment: the deployment of `state`.
        key: the host key of the deployment.
        holder: identity of the loop. At most one loop with it may run at a time.
        changed: called when a machine answers that did not, to reconcile at once.
        software: installed software for engines on GPUs, the same on all machines; none on CPU.
        gateways: the front end; None if users connect to the engines directly.
        """
        # The members of an earlier loop have tokens of its key.
        key_of_tokens = state.token_key.read_text() if state.token_key.exists() else new_key()
        super().__init__(state, key_of_tokens, gateways)
        self._inventory = inventory
        self._holder = holder
        self._changed = changed
        self._software = software or Software()
        self._members_state = inventory.members(deployment.metadata.name)
        self._machines = {host.name: _Machine(host, inventory.url(host)) for host in inventory.hosts}
        self._client = _HostClient(key)
        self._agents = AgentClient()
        self._claim: Claim | None = None
        self._claiming = asyncio.Lock()
        self._seen: dict[Key, _Seen] = {}
        self._awaiting: asyncio.Task[None] | None = None
        """Queries the machines that do not answer."""
        self._checkpoint = CheckpointFiles()
        """On this machine, the first of them, in place of all."""
        self._here = Here()
        """Network of this machine, since the latest call of `facts`; without problems if all machines answer."""

    async def close(self) -> None:
        """See `Backend`."""
        requests = [
            *(known.request for known in self._seen.values()),
            *(one.request for one in self._machines.values()),
            self._awaiting,
        ]
        running = [request for request in requests if request is not None]
        for request in running:
            request.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._agents.close()
        await self._client.close()

    async def facts(self, deployment: DSV4Deployment) -> Facts:
        """See `Backend`. A group always gets the same machines, in the order of the inventory."""
        await self._refresh()
        absent = any(machine.absent for machine in self._machines.values())
        self._here = await _look(self._inventory) if absent else Here()
        if absent and (self._awaiting is None or self._awaiting.done()):
            self._awaiting = asyncio.create_task(self._await_absent())
        size = deployment.spec.topology.nodes_per_group
        unfit = {name: self._unfit(deployment, machine) for name, machine in self._machines.items()}
        placed: dict[int, tuple[NodeFacts, ...]] = {}
        for place, (name, machine) in enumerate(self._machines.items()):
            group = place // size
            nodes = (_node(deployment, machine.host, machine.report),) if machine.report and not unfit[name] else ()
            placed[group] = placed.get(group, ()) + nodes
        root = self._inventory.state_dir
        return Facts(
            nodes=tuple(node for nodes in placed.values() for node in nodes),
            isolated=True,
            state_root=str(self._members_state.directory),
            weights_root=f"{root}/weights",
            ray_token_file=str(self._members_state.token()),
            cache_root=f"{root}/cache",
            secrets_root=f"{root}/secrets",
            model=await asyncio.to_thread(self._checkpoint.model, deployment.spec.model),
            placed=placed,
            profile=self._software.profile,
            cuda_home=self._software.cuda_home,
            own_networks=False,
            group_directories=True,
            ray_links=str(self._members_state.ray_links),
            unfit="; ".join(filter(None, unfit.values())),
        )

    async def ensure(self, deployment: DSV4Deployment, plan: GroupPlan) -> None:
        """See `Backend`.

        Raises:
            BackendError: a machine does not answer or refuses; the text contains its name and the remedy.
        """
        self._state.save_token_key(self._token_key)
        plan, token = await asyncio.to_thread(self._save_plan, plan)
        machines = [self._machines.get(member.node or "") for member in plan.members]
        if missing := [member.node for member, one in zip(plan.members, machines, strict=True) if one is None]:
            raise BackendError(f"the machine {missing[0]} is not in the inventory; add it there")
        claim = await self._claimed()

        async def start(machine: _Machine, rank: int) -> None:
            request = StartRequest(claim=claim, plan=plan, rank=rank, token=token)
            await self._act(machine, "/v1/start", request)

        found = [machine for machine in machines if machine is not None]
        await _all(start(machine, rank) for rank, machine in enumerate(found))

    async def observe(self, deployment: DSV4Deployment, group: int) -> Observed:
        """See `Backend`. Of a machine that does not answer, the latest report is used."""
        await self._refresh()
        members = [(machine, member) for machine, member in self._reported() if member.group == group]
        requests = [self._status_request(member) for _, member in members if member.ended is None]
        if requests:
            # A member that does not answer must not delay the reports of the others.
            done, _ = await asyncio.wait(requests, timeout=_ANSWER_SECONDS)
            _check(done)
        fenced = [one.report.fenced.get(group, 0) for one in self._machines.values() if one.report is not None]
        return Observed(
            GroupKey.of(deployment, group),
            tuple(self._observed(machine, member) for machine, member in members),
            used_incarnation=max(fenced, default=0),
        )

    async def drain(self, deployment: DSV4Deployment, group: int, incarnation: int, seconds: float) -> bool:
        """See `Backend`."""
        if not any(machine.report for machine in self._machines.values()):
            await self._refresh()
        for _, member in self._reported():
            if _key(member) == (group, incarnation, 0) and member.ended is None:
                return await self._agents.drain(_agent_url(member), self._token_key, seconds)
        return True

    async def fence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> bool:
        """See `Backend`. A machine that was removed from the inventory counts as gone.

        Raises:
            BackendError: a machine does not answer, so that its members may run; or another loop has the lease.
        """
        return all(member.ended is not None for member in await self._end("/v1/fence", group, incarnation))

    async def collect_evidence(self, deployment: DSV4Deployment, group: int, incarnation: int) -> str | None:
        """See `Backend`. Machines that do not answer are left out."""
        if not (self._state.incarnation(incarnation, group) / "plan.json").exists():
            return None
        members = (await self.observe(deployment, group)).members
        machines = self._machines_of(group, incarnation)
        answers = await asyncio.gather(*(self._logs(machine, group, incarnation) for machine in machines))
        logs = [log for answer in answers for log in answer]
        work = asyncio.to_thread(save_evidence, self._state, group, incarnation, members, logs)
        try:
            async with asyncio.timeout(_ACT_SECONDS):
                return str(await work)
        except TimeoutError:
            _log.warning("the evidence of incarnation %d is not complete: the disk does not answer", incarnation)
            return None

    async def forget(self, deployment: DSV4Deployment, group: int, incarnation: int) -> None:
        """See `Backend`. The latest plans are kept: `fence` reads the machines of an incarnation from them.

        Raises:
            BackendError: as in `fence`, or a member runs.
        """
        if await self._end("/v1/forget", group, incarnation):
            raise BackendError(f"members of incarnation {incarnation} still run; they are fenced first")
        for key in [key for key in self._seen if key[:2] == (group, incarnation)]:
            known = self._seen.pop(key)
            if known.request is not None:
                known.request.cancel()
        for number in self._state.incarnations(group)[:-_KEPT_PLANS]:
            await asyncio.to_thread(self._state.forget_incarnation, number, group)

    def _save_plan(self, plan: GroupPlan) -> tuple[GroupPlan, str]:
        """Return the plan and the token of the incarnation, as they were saved by the first call: the facts, and so the
        plan, may have changed since then, and members of one incarnation have the same."""
        folder = self._state.incarnation(plan.incarnation, plan.group)
        folder.mkdir(parents=True, exist_ok=True)
        plan_file, token_file = folder / "plan.json", folder / "token"
        if not token_file.exists():
            replace_file(token_file, new_token(self._token_key))
        if plan_file.exists():
            plan = GroupPlan.model_validate_json(plan_file.read_bytes())
        else:
            replace_file(plan_file, plan.to_json(indent=2) + "\n")
        return plan, token_file.read_text()

    def _machines_of(self, group: int, incarnation: int) -> list[_Machine]:
        """Return the machines that may have members of an incarnation: those of its plan, which is saved before any
        start; all if there is none, for example after a loss of this machine's files."""
        file = self._state.incarnation(incarnation, group) / "plan.json"
        try:
            plan = GroupPlan.model_validate_json(file.read_bytes())
        except (OSError, ValueError):
            return list(self._machines.values())
        return [self._machines[member.node] for member in plan.members if member.node in self._machines]

    async def _end(self, path: str, group: int, incarnation: int) -> list[MemberReport]:
        """Send a change to all machines of an incarnation; return its members after that."""
        claim = await self._claimed()
        request = EndRequest(claim=claim, group=group, incarnation=incarnation)
        reports = await _all(self._act(machine, path, request) for machine in self._machines_of(group, incarnation))
        members = (member for report in reports for member in report.members)
        return [member for member in members if (member.group, member.incarnation) == (group, incarnation)]

    async def _logs(self, machine: _Machine, group: int, incarnation: int) -> list[tuple[str, bytes]]:
        path = f"/v1/evidence?group={group}&incarnation={incarnation}"
        try:
            logs = await self._client.json(machine.url + path, _EVIDENCE_SECONDS, EVIDENCE_BYTES)
        except (*AGENT_ERRORS, BackendError) as error:
            _log.warning("no evidence from %s: %s", machine.host.name, _reason(error))
            return []
        found = logs.items() if isinstance(logs, dict) else ()
        return [
            (name, text.encode(errors="replace"))
            for name, text in found
            if isinstance(text, str) and _LOG_NAME.fullmatch(name)
        ]

    async def _claimed(self) -> Claim:
        """Return the claim of this loop; take it first if necessary.

        Machines that do not answer get it with a later request: a higher epoch takes the lease over.

        Raises:
            BackendError: another loop has the lease, or no machine answers.
        """
        async with self._claiming:
            if self._claim is not None:
                return self._claim
            await self._refresh()
            reports = [(one, one.report, one.heard) for one in self._machines.values() if one.report and one.heard]
            if not reports:
                raise self._all_unreachable()
            for machine, report, heard in reports:
                lease, age = report.lease, time.monotonic() - heard
                if lease.holder not in ("", self._holder) and lease.seconds > age:
                    raise BackendError(
                        f"{lease.holder!r} manages the members on {machine.host.name}; end that loop, or wait until it "
                        "has ended"
                    )
            claim = Claim(holder=self._holder, epoch=max(report.lease.epoch for _, report, _ in reports) + 1)
            request = LeaseRequest(claim=claim)

            async def take(machine: _Machine) -> bool:
                try:
                    async with asyncio.timeout(_TAKE_SECONDS):
                        self._update(machine, await self._client.post(machine.url + "/v1/lease", request))
                except (*AGENT_ERRORS, BackendError) as error:
                    # Also with a full disk, where the lease cannot be saved.
                    machine.failed(error)
                    return False
                return True

            try:
                taken = await _all(take(machine) for machine in self._machines.values())
            except LeaseRefused as error:
                raise BackendError(f"the lease cannot be taken: {error}") from error
            if not any(taken):
                raise self._all_unreachable()
            _log.info("took the lease with epoch %d", claim.epoch)
            self._claim = claim
            return claim

    def _all_unreachable(self) -> BackendError:
        # A problem of the first machine's own network is the reason for all.
        return BackendError("; ".join(dict.fromkeys(str(self._silent(one)) for one in self._machines.values())))

    def _silent(self, machine: _Machine) -> Finding:
        place = self._inventory.hosts.index(machine.host)
        return silent_machine(self._inventory, place, machine.problem, machine.code, self._here)

    def _unfit(self, deployment: DSV4Deployment, machine: _Machine) -> str:
        """Return the reason why no member can be planned on a machine; empty if one can."""
        if machine.report is None or machine.absent:
            return str(self._silent(machine))
        topology, report = deployment.spec.topology, machine.report
        count = len(_cards(deployment, report))
        if topology.hardware is Hardware.CPU or count >= topology.devices_per_node:
            return ""
        found = (
            f"{machine.host.name} has {count} GPUs of {topology.hardware}, and {topology.devices_per_node} are required"
        )
        if report.driver_problem:
            return f"{found}: {report.driver_problem}; restart {machine.host.name}, or install its NVIDIA driver again"
        return found

    async def _act(self, machine: _Machine, path: str, request: BaseModel) -> HostReport:
        """Send a change to a machine; return its state after that.

        Raises:
            BackendError: it does not answer or refuses.
        """
        try:
            async with asyncio.timeout(_ACT_SECONDS):
                report = await self._client.post(machine.url + path, request)
        except LeaseRefused as error:
            self._claim = None
            raise BackendError(f"{machine.host.name} refuses: {error}") from error
        except _Refused as error:
            if error.errno != errno.ENOSPC:
                raise BackendError(f"{machine.host.name}: {error}") from error
            machine.failed(error)
            raise BackendError(str(self._silent(machine))) from error
        except AGENT_ERRORS as error:
            machine.failed(error)
            raise BackendError(str(self._silent(machine))) from error
        self._update(machine, report)
        if report.host != machine.host.name:
            raise BackendError(str(self._silent(machine)))
        return report

    async def _refresh(self) -> None:
        """Get the report of every machine; wait 0.4 s at most.

        Raises:
            BackendError: this process lacks the resources for a request.
        """
        requests = [self._report_request(machine) for machine in self._machines.values()]
        done, _ = await asyncio.wait(requests, timeout=_ANSWER_SECONDS)
        _check(done)

    async def _await_absent(self) -> None:
        """Query the machines that do not answer until all do. A refused plan is otherwise tried again after 15 s."""
        while absent := [machine for machine in self._machines.values() if machine.absent]:
            await asyncio.wait([self._report_request(machine) for machine in absent])
            if any(not machine.absent for machine in absent):
                self._changed()
            await asyncio.sleep(_ABSENT_INTERVAL)

    def _report_request(self, machine: _Machine) -> asyncio.Task[None]:
        """Return the report request to a machine; a running request of an earlier call is reused."""
        if machine.request is None or machine.request.done():
            machine.request = asyncio.create_task(self._request_report(machine))
        return machine.request

    async def _request_report(self, machine: _Machine) -> None:
        claim, began = self._claim, time.monotonic()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                if claim is None:
                    report = await self._client.report(machine.url)
                else:
                    report = await self._client.post(machine.url + "/v1/lease", LeaseRequest(claim=claim))
        except LeaseRefused as error:
            if self._claim is claim:
                _log.warning("%s refuses: %s", machine.host.name, error)
                self._claim = None
        except (*AGENT_ERRORS, BackendError) as error:
            machine.failed(error)
            if own_shortage(error) is not None:
                # Not silence of the machine: nothing can be observed.
                raise
        else:
            # It may have been written before a change that was answered meanwhile.
            if machine.heard is None or machine.heard <= began:
                self._update(machine, report)

    def _update(self, machine: _Machine, report: HostReport) -> None:
        if report.host != machine.host.name:
            machine.problem, machine.code = f"the machine {report.host!r} answers there", None
            return
        machine.report, machine.heard, machine.problem, machine.code = report, time.monotonic(), "", None

    def _reported(self) -> list[tuple[_Machine, MemberReport]]:
        return [(one, member) for one in self._machines.values() if one.report for member in one.report.members]

    def _known(self, member: MemberReport) -> _Seen:
        known = self._seen.get(_key(member))
        if known is None:
            known = self._seen[_key(member)] = _Seen(unix_time() - member.age)
        if member.ended_age is not None and known.ended_time is None:
            known.ended_time = unix_time() - member.ended_age
        return known

    def _status_request(self, member: MemberReport) -> asyncio.Task[None]:
        """Return the status request of a member; a running request of an earlier call is reused."""
        known = self._known(member)
        if known.request is None or known.request.done():
            known.request = asyncio.create_task(self._request_status(member, known))
        return known.request

    async def _request_status(self, member: MemberReport, known: _Seen) -> None:
        try:
            status = await self._agents.status(_agent_url(member), self._token_key)
        except AGENT_ERRORS as error:
            if own_shortage(error) is not None:
                raise
            return
        if (status.group, status.incarnation, status.rank) == _key(member):
            known.status, known.heard = status, unix_time()

    def _observed(self, machine: _Machine, member: MemberReport) -> ObservedMember:
        known = self._known(member)
        return ObservedMember(
            incarnation=member.incarnation,
            rank=member.rank,
            node=machine.host.name,
            address=member.address,
            started=known.started,
            ended=member.ended,
            ended_time=known.ended_time if member.ended is not None else None,
            cause=Cause.NODE_LOST if member.restarted else None,
            status=known.status,
            heard=known.heard,
        )


class _Refused(BackendError):
    """A host service answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        self.errno = errno.ENOSPC if status == HTTPStatus.INSUFFICIENT_STORAGE else errno.EPROTO
        super().__init__(message)


class _HostClient:
    """HTTP client of host services."""

    def __init__(self, key: str) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        self._open: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None

    async def report(self, url: str) -> HostReport:
        """Return the report of the service at `url`.

        Raises:
            BackendError: it refuses.
            AGENT_ERRORS: there is no valid answer.
        """
        return HostReport.model_validate_json(await self._ask("GET", f"{url}/v1/report", None, REPORT_BYTES))

    async def post(self, url: str, body: BaseModel) -> HostReport:
        """Send a change and return the report after it.

        Raises:
            LeaseRefused: another loop has the lease.
            BackendError: the request is refused for another reason.
            AGENT_ERRORS: there is no valid answer.
        """
        text = body.model_dump_json(by_alias=True, exclude_none=True)
        return HostReport.model_validate_json(await self._ask("POST", url, text, REPORT_BYTES))

    async def json(self, url: str, seconds: float, most: int) -> Any:
        """Return the JSON value at `url`. Raises as `report`."""
        async with asyncio.timeout(seconds):
            return from_json(await self._ask("GET", url, None, most), allow_inf_nan=False)

    async def _ask(self, method: str, url: str, body: str | None, most: int) -> bytes:
        if self._open is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._open = aiohttp.ClientSession(timeout=timeout, headers=self._headers, auto_decompress=False)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        async with self._open.request(method, url, data=body, headers=headers) as answer:
            content = await read_content(answer, most)
            if answer.status == 200:
                return content
            message = f"status {answer.status}"
            with contextlib.suppress(ValueError):
                message = Refusal.model_validate_json(content).message
            raise LeaseRefused(message) if answer.status == 409 else _Refused(message, answer.status)


async def _look(inventory: Inventory) -> Here:
    """Return the network of this machine, if it can be read in half a second."""
    try:
        async with asyncio.timeout(_TAKE_SECONDS):
            return await asyncio.to_thread(read_here, inventory)
    except TimeoutError:
        return Here()


def read_here(inventory: Inventory) -> Here:
    """Return the network of this machine, the first one of the inventory."""
    own, addresses = inventory.hosts[0], tuple[str, ...]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((own.address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                addresses = tuple(f"{one['address']} on {one['interface']}" for one in bootstrap.addresses())
                return Here(address=False, addresses=addresses)
    try:
        link = own.interface is None or Path(f"/sys/class/net/{own.interface}/carrier").read_text().strip() == "1"
    except OSError as error:
        # The kernel refuses the file of an interface that is down.
        link = error.errno not in (errno.EINVAL, errno.ENOENT)
    return Here(link=link)


async def examine(inventory: Inventory, key: str, *, first: bool = True) -> list[Finding]:
    """Return the problems of the machines of a deployment, for `dsv4 doctor`; `first`: this is the first one."""
    client, here = _HostClient(key), await _look(inventory) if first else Here()
    drivers: dict[str, str] = {}

    async def query(place: int) -> list[Finding]:
        host = inventory.hosts[place]
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                report = await client.report(inventory.url(host))
        except (*AGENT_ERRORS, BackendError) as error:
            return [silent_machine(inventory, place, _reason(error), getattr(error, "errno", None), here)]
        if report.host != host.name:
            problem = f"the machine {report.host!r} answers there"
            return [silent_machine(inventory, place, problem, None, here)]
        drivers[host.name] = report.driver
        return list(report_findings(report))

    try:
        found = [each for one in await _all(map(query, range(len(inventory.hosts)))) for each in one]
    finally:
        await client.close()
    # A problem of this machine's own network is the reason for all.
    return [*dict.fromkeys(found), *driver_findings(drivers)]


def _cards(deployment: DSV4Deployment, report: HostReport) -> list[GpuReport]:
    """Return the GPUs for a member; none on CPU, where members run vLLM's CPU build regardless of GPUs."""
    hardware = deployment.spec.topology.hardware
    if hardware is Hardware.CPU:
        return []
    return [card for card in report.gpus if card.machine and machine_named(card.machine).hardware == hardware]


def _node(deployment: DSV4Deployment, host: Host, report: HostReport) -> NodeFacts:
    cards = _cards(deployment, report)[: deployment.spec.topology.devices_per_node]
    return NodeFacts(
        name=host.name,
        address=host.address,
        interface=host.interface or "",
        cpus=report.cpus,
        memory_bytes=report.memory_bytes,
        machine=cards[0].machine if cards else "cpu",
        gpus=tuple(
            GpuFacts(card.uuid, card.title, card.memory_bytes, card.free_bytes, card.taken_by) for card in cards
        ),
        unsafe_copies=report.unsafe_copies if cards else "",
        lost_bytes=report.lost_bytes,
        driver=report.driver if cards else "",
        driver_before=report.driver_before if cards else "",
    )


def _key(member: MemberReport) -> Key:
    return member.group, member.incarnation, member.rank


def _agent_url(member: MemberReport) -> str:
    return f"http://{member.address}:{member.agent}"


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _check(requests: Iterable[asyncio.Task[None]]) -> None:
    """Raise BackendError if this process lacked the resources for one of `requests`: silence proves nothing then."""
    for error in [request.exception() for request in requests]:
        if error is not None:
            raise BackendError(f"the machines cannot be queried: {error}") from error


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all; wait for all before the first error is raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
