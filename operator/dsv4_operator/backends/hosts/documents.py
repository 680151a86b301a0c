"""Documents for several machines: the inventory `hosts.yaml`, those between host services and the backend, and the
lease that admits one loop at a time.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dsv4_operator.api import Finding, InvalidDeployment
from dsv4_operator.api.deployment import read_document
from dsv4_operator.api.findings import RULES_ERROR, joined, translate
from dsv4_operator.api.values import InvalidValue, Matches, PortNumber, SpecPart, ValueReason
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_runtime.contract import GroupPlan
from dsv4_runtime.contract.base import Document, Report

INVENTORY, HOST_KEY, DOWN = "hosts.json", "host-key", "down"
"""Files in a deployment's directory: the inventory; the key of its host services; a file whose existence means that the
members end with the loop."""
SERVICE_PORT = 8970
STATE_DIRECTORY = "/var/lib/dsv4"
MEMBERS = "_m"
"""Directory below `stateDir` with the members' files, which needs a short path and no valid name of a deployment."""
_MOST_HOSTS = 64


def _address(text: str) -> str:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        problem = (
            "is no IPv4 address; write that of the machine on the link between the machines, such as 192.168.100.1"
        )
        raise InvalidValue(text, ValueReason.INVALID, problem) from None
    if address.is_unspecified or address.is_multicast:
        problem = "is not the address of one machine; write that on the link between the machines"
        raise InvalidValue(text, ValueReason.INVALID, problem)
    return text


Address = Annotated[str, AfterValidator(_address)]
HostName = Annotated[
    str,
    Matches(
        "[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
        "is not a name of a machine; use lower-case letters, digits, dashes and dots",
        253,
    ),
]
SshTarget = Annotated[
    str,
    # ssh takes a text with a leading dash for an option.
    Matches(
        r"[A-Za-z0-9_\[][A-Za-z0-9_.@:%+\[\]-]*",
        "is not a target of ssh; write HOST, USER@HOST or a Host of ~/.ssh/config",
        255,
    ),
]
Interface = Annotated[
    str, Matches("[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", "is not a network interface; write one of `ip -br link`", 15)
]
Directory = Annotated[
    str,
    Matches(
        r"(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)+",
        "is not an absolute path without spaces; write one such as /var/lib/dsv4",
        100,
    ),
]


class Host(SpecPart):
    """One machine."""

    name: HostName
    """Name in statuses, logs and plans."""
    ssh: SshTarget | None = None
    """Target for OpenSSH, so `~/.ssh/config` applies. Default: the name."""
    address: Address
    """IPv4 address on the link between the machines, for the host service, Ray and NCCL."""
    interface: Interface | None = None
    """Network interface of `address`. Default: chosen by Ray, NCCL and Gloo."""

    @property
    def target(self) -> str:
        """Return the target for OpenSSH."""
        return self.ssh or self.name


class Inventory(SpecPart):
    """Machines for deployments, in the order of their ranks."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    hosts: tuple[Host, ...] = Field(min_length=1, max_length=_MOST_HOSTS)
    """The machines. The loop and the gateways run on the first one."""
    state_dir: Directory = STATE_DIRECTORY
    """Directory on every machine for weights, caches and members' files."""
    service_port: PortNumber = SERVICE_PORT
    """Port of the host service on every machine."""

    @model_validator(mode="after")
    def _unique(self) -> Self:
        findings = []
        for field in ("name", "address"):
            values = [getattr(host, field) for host in self.hosts]
            findings += [
                Finding(f"hosts[{index}].{field}", ValueReason.DUPLICATE, "is used twice", "write another one", value)
                for index, value in enumerate(values)
                if value in values[:index]
            ]
        names, targets = [host.name for host in self.hosts], [host.target for host in self.hosts]
        findings += [
            # Two host services of one deployment would share the files of one machine.
            Finding(f"hosts[{index}].ssh", ValueReason.DUPLICATE, "is used twice", "name each machine once", target)
            for index, target in enumerate(targets)
            if target in targets[:index] and names[index] not in names[:index]
        ]
        if findings:
            message = joined(findings).replace("{", "{{").replace("}", "}}")
            raise PydanticCustomError(RULES_ERROR, message, {"findings": findings})
        return self

    def url(self, host: Host) -> str:
        """Return the base URL of the host service on `host`."""
        return f"http://{host.address}:{self.service_port}"

    def members(self, name: str) -> DeploymentState:
        """Return the files of the members of the deployment `name`, with the same path on every machine.

        Raises:
            StateError: the name is invalid.
        """
        return DeploymentState(Path(self.state_dir) / MEMBERS, name)


class InvalidInventory(ValueError):
    """An invalid `hosts.yaml`; the text has one line per finding."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        super().__init__("\n".join(map(str, findings)))


def load_inventory(text: str) -> Inventory:
    """Return the inventory in `text`, YAML or JSON.

    Raises:
        InvalidInventory: `text` is not one document of this kind. Contains all findings.
    """
    try:
        data = read_document(text, "inventory", "hosts:")
        if not isinstance(data, dict):
            problem = Finding("", "NotAMapping", "the document is not a mapping", "begin with hosts:")
            raise InvalidInventory((problem,))
        return Inventory.model_validate(data, by_alias=True, by_name=False)
    except InvalidDeployment as error:
        raise InvalidInventory(error.findings) from None
    except ValidationError as error:
        raise InvalidInventory(translate(error, Inventory)) from None


LEASE_SECONDS = 15.0
"""Time after the latest request of a loop during which no other loop is admitted."""
REQUEST_BYTES, REPORT_BYTES = 2 << 20, 4 << 20
"""Limits of a request and of a report. A plan has some kilobytes for each member."""
EVIDENCE_BYTES = 32 << 20
"""Limit of the evidence of one machine."""

Number = Annotated[int, Field(ge=0, lt=2**53)]


class Claim(Document):
    """Credential of a loop for its requests: a fencing token."""

    holder: str = Field(min_length=1, max_length=200)
    """Identity of the loop. At most one loop with it runs at a time: it has the machine's id and a lock there."""
    epoch: Number = Field(ge=1)
    """Higher than the epoch of every earlier claim that the loop has seen."""


class LeaseReport(Report):
    """Lease of a host."""

    holder: str
    epoch: int
    seconds: float
    """Time until another loop is admitted; 0: now."""


class MemberReport(Report):
    """One member on the machine, until it is forgotten."""

    group: int
    incarnation: int
    rank: int
    address: str
    agent: int
    """Port of its agent."""
    age: float
    """Seconds since its start. Ages instead of times: the clocks of the machines may differ."""
    ended: str | None = None
    """Description of its end; None while one of its processes may exist."""
    ended_age: float | None = None
    restarted: bool = False
    """Whether it ended because the machine was restarted."""


class GpuReport(Report):
    """One GPU of the machine; see `planning.facts.GpuFacts`."""

    uuid: str
    title: str
    machine: str | None = None
    """Id of the machine with this GPU in the catalog."""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    taken_by: str = ""


class HostReport(Report):
    """Answer to `GET /v1/report` and to every change."""

    host: str
    """Name of the machine in the inventory."""
    boot: str
    """Id of the kernel's present run; it changes with every restart of the machine."""
    lease: LeaseReport
    members: tuple[MemberReport, ...]
    fenced: dict[int, int]
    """By group, the highest incarnation that cannot be started here any more."""
    cpus: int
    memory_bytes: int
    """Available memory when last no member ran."""
    gpus: tuple[GpuReport, ...] = ()
    unsafe_copies: str = ""
    """Why copies between the GPUs over PCIe may hang or arrive wrong; empty: no reason is known."""
    lost_bytes: int = 0
    """Memory that drivers kept over the ends of all members since the start of the machine."""
    driver: str = ""
    """Version of the driver of the GPUs; empty if none answers."""
    driver_before: str = ""
    """Version with which members ran before, until they have run for ten minutes with the present one."""
    driver_problem: str = ""
    """Reason why a driver with GPUs lists none of them."""


class LeaseRequest(Document):
    """Body of `POST /v1/lease`: take or renew the lease. All other changes do it too."""

    claim: Claim


class StartRequest(LeaseRequest):
    """Body of `POST /v1/start`: start a member unless it exists."""

    plan: GroupPlan
    rank: Number
    token: str = Field(pattern=r"^[0-9a-f]{32,256}$", repr=False)
    """The incarnation's token."""


class EndRequest(LeaseRequest):
    """Body of `POST /v1/fence` and `POST /v1/forget`."""

    group: Number
    incarnation: Number


class Refusal(Report):
    """Answer with an error status."""

    message: str
    lease: LeaseReport | None = None
    """The lease, if it is the reason (status 409)."""


class LeaseRefused(Exception):
    """The claim is outdated, or another loop has the lease; the text contains the holder."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of one host. Times are monotonic, so the clocks of machines do not matter.

    An epoch is accepted for as long as no higher one was, also after `LEASE_SECONDS`: a request of an earlier loop that
    arrives late has a lower epoch. The time limit only decides when another loop may take over.
    """

    holder: str = ""
    epoch: int = 0
    until: float = 0.0

    @classmethod
    def restored(cls, holder: str, epoch: int, now: float) -> Lease:
        """Return the lease after a restart of the service: its holder may have renewed it immediately before."""
        return cls(holder, epoch, now + LEASE_SECONDS if holder else now)

    def admit(self, claim: Claim, now: float) -> Lease:
        """Return the lease after a request with `claim`.

        Raises:
            LeaseRefused: it is to be refused.
        """
        if claim.epoch < self.epoch or (claim.epoch == self.epoch and claim.holder != self.holder):
            raise LeaseRefused(
                f"epoch {claim.epoch} of {claim.holder!r} is outdated: {self.holder!r} has the lease with epoch "
                f"{self.epoch}"
            )
        if claim.holder != self.holder and now < self.until:
            raise LeaseRefused(
                f"{self.holder!r} has the lease for another {self.until - now:.0f} s; stop that loop, or wait until it "
                "has ended"
            )
        return Lease(claim.holder, claim.epoch, max(self.until, now + LEASE_SECONDS))

    def report(self, now: float) -> LeaseReport:
        """Return the lease as a document."""
        return LeaseReport(holder=self.holder, epoch=self.epoch, seconds=max(0.0, round(self.until - now, 3)))
