"""Discovery for `dsv4 init`: facts about a machine by one shell program that changes nothing, and the choice of the
network between machines, with its problems.

The program needs only POSIX tools. Parsing and choice are pure; files of /sys and /proc become a copy that
`dsv4 doctor` reads, and the choice reads the document of `dsv4 doctor -o json`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

from dsv4_operator.api import Finding, Severity
from dsv4_operator.backends.hosts.bootstrap import SYSTEM_CUDA
from dsv4_operator.backends.hosts.documents import HostReport, Inventory
from dsv4_operator.planning.catalog import GIB, Machine, machine_named, machines, product_machine

SURVEY_SECONDS = 60.0
"""Limit of one call of `PROGRAM`, including the connection."""
_MARK = "@@dsv4 "
_END = "end"

# Arguments: the root of /sys, /proc, /dev and /etc, and the directory for weights. Values of empty GIDs, and types of
# empty slots, are left out: a table has 256 slots.
PROGRAM = r"""
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/local/cuda/bin"
root=${1:-/} data=${2:-/var/lib/dsv4}
limited() { if command -v timeout >/dev/null 2>&1; then timeout 15 "$@"; else "$@"; fi; }
section() { printf '\n@@dsv4 %s\n' "$1"; }
section time; date +%s.%N
section user; id -u; id -nG 2>/dev/null
section machine; uname -m; uname -r; cat "$root/etc/machine-id" 2>/dev/null || echo
section cpus; getconf _NPROCESSORS_ONLN
section os; cat "$root/etc/os-release" 2>/dev/null
section tools
for tool in python3 ip nvidia-smi sudo ib_write_bw; do command -v $tool >/dev/null 2>&1 && echo $tool; done
section systemd; [ -d "$root/run/systemd/system" ] && echo yes
section disk
while [ ! -d "$data" ] && [ "$data" != / ]; do data=$(dirname "$data"); done
limited df -Pk "$data" 2>/dev/null | tail -n 1; echo "$data"
section firewall
grep -qs '^ENABLED=yes' "$root/etc/ufw/ufw.conf" && echo ufw
[ "$(limited systemctl is-active firewalld 2>/dev/null)" = active ] && echo firewalld
section gpus
limited nvidia-smi --query-gpu=index,uuid,name,driver_version,memory.total --format=csv,noheader,nounits 2>&1
section cuda; limited nvcc --version 2>/dev/null
section checkpoints
hub="$HOME/.cache/huggingface/hub"
for config in "${2:-/var/lib/dsv4}"/models/*/config.json "$hub"/models--*/snapshots/*/config.json; do
  [ -f "${config%/*}/model.safetensors.index.json" ] && echo "${config%/*}"
done
section addresses; limited ip -j -4 addr 2>/dev/null
cd "$root" || exit 1
section links
for device in sys/class/infiniband/*/device; do
  [ -e "$device" ] && echo "$device $(readlink -f "$device")"
done
section files
show() { grep -Hs '' "$@" /dev/null; }
show proc/meminfo proc/net/route proc/cmdline proc/sys/kernel/osrelease proc/driver/nvidia/version
for name in mtu operstate carrier speed dev_port phys_port_name; do show sys/class/net/*/$name; done
show sys/class/infiniband/*/fw_ver sys/class/infiniband/*/sys_image_guid
for name in state phys_state link_layer rate; do show sys/class/infiniband/*/ports/*/$name; done
grep -Hs '[1-9a-f]' sys/class/infiniband/*/ports/*/gids/* /dev/null
for name in types ndevs; do show sys/class/infiniband/*/ports/*/gid_attrs/$name/*; done
for name in current_link_speed max_link_speed current_link_width max_link_width net/*/ifindex; do
  show sys/class/infiniband/*/device/$name
done
show sys/class/infiniband_verbs/*/ibdev
for name in dev/infiniband/uverbs*; do [ -e "$name" ] && echo "$name:"; done
for vendor in $(grep -ls 0x10de sys/bus/pci/devices/*/vendor /dev/null); do
  device=${vendor%/vendor}; show "$device/vendor" "$device/class" "$device/iommu_group/type"
done
section end
"""

_PATH = re.compile(r"(?:sys|proc|dev)(?:/[A-Za-z0-9_.:+-]+)+")
_NAME = re.compile(r"[A-Za-z0-9_.:+-]+")
_MOST_FILES = 20_000


class SurveyError(Exception):
    """The output of the program is incomplete."""


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One GPU according to nvidia-smi."""

    uuid: str
    name: str
    memory_bytes: int | None
    """None: unified with that of the machine."""

    @property
    def machine(self) -> str | None:
        """Return the id of its machine in the catalog; None if dsv4 does not support it."""
        return product_machine(self.name)


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about one machine."""

    time: float
    """Unix time of its clock."""
    user_id: int
    groups: frozenset[str]
    """Groups of the user."""
    architecture: str
    machine_id: str
    """Identity of the installation; empty if unknown."""
    cpus: int
    os: str
    tools: frozenset[str]
    systemd: bool
    memory_bytes: int
    disk: str
    """Existing directory on the file system of the weights."""
    disk_free_bytes: int
    firewalls: tuple[str, ...]
    """Active firewalls; empty if none is known."""
    gpus: tuple[FoundGpu, ...]
    driver: str
    gpu_problem: str
    """Message of nvidia-smi without GPUs; empty if it is not installed."""
    cuda: str
    """Release of the installed CUDA toolkit; empty if there is none."""
    checkpoints: tuple[str, ...]
    """Directories with a checkpoint."""
    files: dict[str, str] = field(repr=False)
    """Files of /sys, /proc and /dev by relative path, with `ip-addr.json`."""
    links: dict[str, str] = field(repr=False)
    """Names of the targets of links by relative path."""

    @property
    def machine(self) -> Machine | None:
        """Return the machine in the catalog, that of its first supported GPU; None without one.

        Of machines with unified memory the largest one that this machine has memory for.
        """
        known = next((gpu.machine for gpu in self.gpus if gpu.machine), None)
        if known is None:
            return None
        found = machine_named(known)
        if not found.unified_memory or not self.memory_bytes:
            return found
        # Firmware and kernel take up to a tenth.
        variants = [one for one in machines() if one.hardware == found.hardware]
        fitting = [one for one in variants if 0.9 * one.memory_bytes <= self.memory_bytes]
        return max(fitting, key=lambda one: one.memory_bytes, default=found)

    @property
    def needs_toolkit(self) -> bool:
        """Return whether engines on it compile kernels with a CUDA toolkit, whatever the settings are."""
        return self.machine is not None and self.machine.is_sm12x

    @property
    def devices(self) -> int:
        """Return the number of GPUs of the same kind as the first supported one."""
        kind = self.machine.hardware if self.machine else ""
        return sum(1 for gpu in self.gpus if gpu.machine and machine_named(gpu.machine).hardware == kind)

    @property
    def root(self) -> str:
        """Return how the user gets the rights of root: `root`, `sudo`, or empty."""
        if self.user_id == 0:
            return "root"
        return "sudo" if "sudo" in self.tools and self.groups & {"sudo", "wheel", "admin"} else ""

    def write(self, folder: Path) -> None:
        """Write the copy of /sys, /proc and /dev into the empty directory `folder`."""
        for path, target in self.links.items():
            device = folder / "sys/devices" / target
            device.mkdir(parents=True, exist_ok=True)
            link = folder / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(device)
        for path, text in self.files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.is_dir():
                file.write_text(text)


def parse_survey(output: str) -> Survey:
    """Return the facts in the output of `PROGRAM`. Invalid values count as missing.

    Raises:
        SurveyError: the output has no end, so the program did not run to it.
    """
    sections = dict(_sections(output))
    if _END not in sections:
        raise SurveyError("the output of its shell is incomplete; its login files must not print or exit")

    def line(name: str, number: int = 0) -> str:
        lines = sections.get(name, [])
        return lines[number].strip() if number < len(lines) else ""

    files, links = _files(sections)
    memory = dict(_meminfo(files.get("proc/meminfo", "")))
    disk = line("disk").split()
    gpus = tuple(_gpus(sections.get("gpus", [])))
    problem = " ".join(" ".join(sections.get("gpus", [])).split())[:200]
    tools = frozenset(sections.get("tools", []))
    return Survey(
        time=_number(line("time")),
        user_id=int(_number(line("user"), -1)),
        groups=frozenset(line("user", 1).split()),
        architecture=line("machine"),
        machine_id=line("machine", 2),
        cpus=int(_number(line("cpus"), 1)),
        os=next((each[12:].strip("\"'") for each in sections.get("os", []) if each.startswith("PRETTY_NAME=")), ""),
        tools=tools,
        systemd=line("systemd") == "yes",
        memory_bytes=memory.get("MemTotal", 0),
        disk=line("disk", 1),
        disk_free_bytes=int(_number(disk[3])) * 1024 if len(disk) > 3 else 0,
        firewalls=tuple(each for each in sections.get("firewall", []) if each in ("ufw", "firewalld")),
        gpus=gpus,
        driver=next((cells[3] for cells in _gpu_rows(sections.get("gpus", []))), ""),
        gpu_problem="" if gpus or "nvidia-smi" not in tools else problem,
        cuda=next(iter(re.findall(r"release (\d+\.\d+)", "\n".join(sections.get("cuda", [])))), ""),
        checkpoints=tuple(each for each in sections.get("checkpoints", []) if each.startswith("/")),
        files=files,
        links=links,
    )


def _sections(output: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in output.splitlines():
        if line.startswith(_MARK):
            yield name, lines
            name, lines = line.removeprefix(_MARK), []
        elif line:
            lines.append(line)
    yield name, lines


def _files(sections: dict[str, list[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files and links whose paths stay in the copy; lines of a file are joined."""
    found: dict[str, list[str]] = {}
    for line in sections.get("files", [])[:_MOST_FILES]:
        # Names below /sys may have colons, as `0000:01:00.0`; a value of one is never a path.
        path, text = _split(line)
        if path:
            found.setdefault(path, []).append(text)
    links = {}
    for line in sections.get("links", []):
        path, _, target = line.partition(" ")
        name = target.rpartition("/")[2]
        parts = path.split("/")
        if (
            len(parts) == 5
            and path.startswith("sys/class/infiniband/")
            and parts[4] == "device"
            and _safe(path)
            and _NAME.fullmatch(name)
            and name not in (".", "..")
        ):
            links[path] = name
    files = {path: "\n".join(lines) + "\n" for path, lines in found.items()}
    return files | {"ip-addr.json": "\n".join(sections.get("addresses", []))}, links


_PCI = re.compile(r"/[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")


def _split(line: str) -> tuple[str, str]:
    """Return path and content of a line `PATH:TEXT`; an empty path if it is none."""
    address = _PCI.search(line)
    start = address.end() if address and ":" not in line[: address.start()] else 0
    at = line.find(":", start)
    path = line[:at]
    return (path, line[at + 1 :]) if at > 0 and _safe(path) else ("", "")


def _safe(path: str) -> bool:
    return _PATH.fullmatch(path) is not None and not {".", ".."} & set(path.split("/")) and len(path) < 300


def _meminfo(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if cells := rest.split():
            yield name, int(_number(cells[0])) * 1024


def _gpu_rows(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit() and cells[1].startswith("GPU-"):
            yield cells


def _gpus(lines: list[str]) -> Iterator[FoundGpu]:
    for _, uuid, name, _, memory in _gpu_rows(lines):
        yield FoundGpu(uuid, name, int(_number(memory)) * 2**20 or None)


def _number(text: str, default: float = 0) -> float:
    return float(text) if re.fullmatch(r"\d{1,18}(\.\d{1,9})?", text) else default


_MOST_CLOCK_SECONDS = 1.0


def machine_findings(
    machines: Mapping[str, Survey], offsets: Mapping[str, tuple[float, float]], *, several: bool = True
) -> Iterator[Finding]:
    """Yield the problems of the machines by name, beside those of their networks and disks.

    Args:
        machines: the facts.
        offsets: difference of each clock from that of this machine in seconds, and the uncertainty.
        several: whether host services are installed; False for `dsv4 up` on one machine.
    """

    def finding(
        name: str, reason: str, message: str, remedy: str, value: object = None, severity: Severity = Severity.WARN
    ) -> Finding:
        return Finding(name, reason, message, remedy, value, severity)

    identities: dict[tuple[str, str], str] = {}
    for name, survey in machines.items():
        if (
            survey.machine_id
            and (other := identities.setdefault((survey.machine_id, survey.files["ip-addr.json"]), name)) != name
        ):
            remedy = "name each machine once"
            yield finding(name, "SameMachine", f"is the same machine as {other}", remedy, severity=Severity.REFUSE)
        if survey.gpu_problem:
            message = f"nvidia-smi fails: {survey.gpu_problem}"
            yield finding(
                name, "DriverFails", message, "install the NVIDIA driver, or restart", severity=Severity.REFUSE
            )
        elif survey.gpus and survey.machine is None:
            names = ", ".join(dict.fromkeys(gpu.name for gpu in survey.gpus))
            remedy = "use DGX Sparks or RTX PRO 6000 cards"
            yield finding(name, "UnsupportedGpu", f"has {names}, which dsv4 does not support", remedy)
        if len(machines) > 1 and survey.needs_toolkit and not survey.cuda:
            message = (
                f"has no CUDA toolkit in {SYSTEM_CUDA}, with which engines compile kernels; `dsv4 up` refuses that"
            )
            remedy = "install NVIDIA's toolkit of CUDA 13, at the same path on all machines"
            yield finding(name, "NoToolkit", message, remedy)
        if "ip" not in survey.tools:
            remedy = "install iproute2"
            yield finding(name, "NoIp", "has no program `ip`", remedy, severity=Severity.REFUSE)
        if several and not survey.root:
            remedy = "use a user in the group sudo, or root, in ~/.ssh/config"
            message = "the user has no right to use sudo, which the installation of the host service needs"
            yield finding(name, "NoRoot", message, remedy)
        if several and not survey.systemd:
            message = "has no systemd: the deployment does not start after a restart of the machine"
            yield finding(name, "NoSystemd", message, "use a system with systemd")
        offset, uncertainty = offsets.get(name, (0.0, 0.0))
        if abs(offset) - uncertainty > _MOST_CLOCK_SECONDS:
            message = f"the clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of this machine"
            yield finding(name, "ClockOffset", message, "enable time synchronization (`timedatectl set-ntp true`)")
    yield from _differences(machines)


def _differences(machines: Mapping[str, Survey]) -> Iterator[Finding]:
    """Yield the differences between machines that a group cannot have, or should not have."""
    for what, severity, values in (
        ("kinds of GPUs", Severity.REFUSE, {name: _kind(one) for name, one in machines.items()}),
        ("architectures", Severity.REFUSE, {name: one.architecture for name, one in machines.items()}),
        ("numbers of GPUs", Severity.WARN, {name: str(one.devices) for name, one in machines.items()}),
        ("drivers", Severity.WARN, {name: one.driver for name, one in machines.items()}),
    ):
        yield from _differing(what, severity, values)


def _differing(what: str, severity: Severity, values: Mapping[str, str]) -> Iterator[Finding]:
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name} {value or 'none'}" for name, value in values.items())
        remedy = "use machines of one kind" if severity is Severity.REFUSE else "make them equal"
        yield Finding("hosts", "MachinesDiffer", f"have different {what}: {shown}", remedy, severity=severity)


def _kind(survey: Survey) -> str:
    return survey.machine.hardware if survey.machine else ""


def disk_finding(name: str, survey: Survey, needed: int) -> Finding | None:
    """Return the finding for a disk with less than `needed` free bytes."""
    if survey.disk_free_bytes >= needed:
        return None
    free, required = survey.disk_free_bytes / GIB, needed / GIB
    message = f"has {free:.0f} GiB free in {survey.disk}, and weights and software need {required:.0f} GiB"
    return Finding(name, "DiskTooSmall", message, f"make space there, or mount a larger disk at {survey.disk}")


@dataclass(frozen=True, slots=True)
class Here:
    """The network of the machine of the loop, the first one of the inventory."""

    address: bool = True
    """Whether it has its address of the inventory."""
    link: bool = True
    """Whether its interface of the inventory has a link."""
    addresses: tuple[str, ...] = ()
    """`ADDRESS on INTERFACE` of its addresses."""


_FOLLOW = "repeat `dsv4 up` with --hosts, which takes over the new address"
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EADDRNOTAVAIL)


def silent_machine(
    inventory: Inventory, place: int, problem: str, code: int | None = None, here: Here | None = None
) -> Finding:
    """Return the finding for a machine without a report.

    Args:
        inventory: the machines.
        place: index of the machine.
        problem: reason why its latest request failed.
        code: error number of the connection; None: there was a connection, or no answer in time.
        here: the network of the machine of the loop; None: unknown.
    """
    own, host = inventory.hosts[0], inventory.hosts[place]
    if here is not None and not here.address:
        has = ", ".join(here.addresses) or "none"
        message = f"is not an address of {own.name} any more; it has {has}"
        remedy = f"restore the address there (netplan), or {_FOLLOW}"
        return Finding("hosts[0].address", "AddressChanged", message, remedy, own.address)
    if here is not None and not here.link:
        message = f"has no link on {own.name}"
        return Finding("hosts[0].interface", "LinkMissing", message, "connect its cable", own.interface)
    field, address = f"hosts[{place}].address", host.address
    if code == errno.ECONNREFUSED:
        message = f"of {host.name} refuses connections to port {inventory.service_port}: its host service does not run"
        remedy = f"see `systemctl status 'dsv4-host@*'` on {host.name}, or repeat `dsv4 up`"
        return Finding(field, "ServiceMissing", message, remedy, address)
    if code == errno.ENOSPC:
        message = f"of {host.name} refuses changes, because its disk is full: {problem}"
        return Finding(field, "DiskFull", message, f"make space in {inventory.state_dir} there", address)
    if code == errno.EPROTO:
        remedy = "repeat `dsv4 up`, which writes its files and starts its host service again"
        return Finding(field, "MachineRefuses", f"of {host.name} refuses: {problem}", remedy, address)
    message = f"of {host.name} does not answer: {problem}"
    remedy = (
        f"check power and link of {host.name}; if its address changed, {_FOLLOW}; if it is gone, remove it from the "
        "inventory"
    )
    reason = "MachineUnreachable" if code in _UNREACHABLE else "MachineSilent"
    return Finding(field, reason, message, remedy, address)


def report_findings(report: HostReport) -> Iterator[Finding]:
    """Yield the problems of the driver in a machine's report."""
    if report.driver_problem:
        remedy = f"restart {report.host}, or install its NVIDIA driver again"
        yield Finding(report.host, "DriverFails", f"lists no GPU: {report.driver_problem}", remedy)
    if report.driver_before:
        message = f"has the NVIDIA driver {report.driver}, and engines ran there with {report.driver_before}"
        remedy = "run `dsv4 verify` once it serves, or install the earlier driver if it does not"
        yield Finding(report.host, "DriverChanged", message, remedy, severity=Severity.WARN)


def driver_findings(drivers: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the finding for machines with different drivers, by their names."""
    known = {name: version for name, version in drivers.items() if version}
    if len(set(known.values())) > 1:
        yield from _differing("drivers", Severity.WARN, known)


CONTAINERS = ("docker", "br-", "veth", "virbr", "podman", "cni", "flannel", "cali", "tailscale", "wg", "tun")
"""Prefixes of interfaces that do not connect machines directly."""
_SETTINGS = frozenset({"memlock", "nofile"})
"""Checks of `dsv4 doctor` for limits of a login, which do not apply to the host service."""
_FULL_MTU = 9000


@dataclass(frozen=True, slots=True)
class End:
    """One address of a machine."""

    interface: str
    address: IPv4Interface
    up: bool
    mtu: int
    speed: int | None
    """Mbit/s; None for virtual interfaces."""
    default_route: bool
    hca: str | None
    """RDMA port of the interface, if it is usable."""


@dataclass(frozen=True, slots=True)
class MachineNetwork:
    """Addresses and checks of one machine."""

    name: str
    ends: tuple[End, ...]
    problems: tuple[Finding, ...]
    """Failed checks and warnings."""
    idle: tuple[str, ...] = ()
    """Fast interfaces with carrier and without an address."""

    @property
    def outside(self) -> End | None:
        """Return the address of the interface with the default route."""
        return next((end for end in self.ends if end.default_route), None)


@dataclass(frozen=True, slots=True)
class Link:
    """A network in which every machine has an address."""

    network: IPv4Network
    ends: Mapping[str, End]
    """By name of the machine."""

    @property
    def rdma(self) -> bool:
        """Return whether all ends have a usable RDMA port."""
        return all(end.hca for end in self.ends.values())

    @property
    def speed(self) -> int | None:
        """Return the Mbit/s of the slowest end; None if one is unknown."""
        speeds = [end.speed for end in self.ends.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    def __str__(self) -> str:
        """Return `192.168.100.0/24, RoCE, 200 Gbit/s, MTU 9000`."""
        mtus = sorted({end.mtu for end in self.ends.values()})
        parts = [str(self.network), "RoCE" if self.rdma else "TCP"]
        parts += [f"{self.speed / 1000:g} Gbit/s"] if self.speed else []
        return ", ".join([*parts, f"MTU {' and '.join(map(str, mtus))}"])


def read_network(name: str, document: Mapping[str, Any]) -> MachineNetwork:
    """Return the network in the document of `dsv4 doctor -o json` for the machine `name`."""
    ports = {rail["address"]: rail["hca"] for rail in document["rails"] if rail.get("hca")}
    ends, idle = [], []
    for link in document["interfaces"]:
        if link["name"] == "lo" or link["name"].startswith(CONTAINERS):
            continue
        if link["up"] and not link["addresses"] and (link["speed"] or 0) >= 25_000:
            idle.append(link["name"])
        ends += [
            End(
                link["name"],
                IPv4Interface(address),
                link["up"],
                link["mtu"],
                link["speed"],
                link["defaultRoute"],
                ports.get(address),
            )
            for address in link["addresses"]
        ]
    problems = tuple(
        Finding(
            f"{name}, {check['name']}",
            check.get("reason", "Check"),
            check["found"],
            check.get("remedy", ""),
            severity=Severity.WARN,
        )
        for check in document["checks"]
        if check["level"] in ("warn", "fail") and check["name"] not in _SETTINGS
    )
    return MachineNetwork(name, tuple(ends), problems, tuple(idle))


def common_links(machines: Sequence[MachineNetwork]) -> list[Link]:
    """Return the networks in which all machines have different addresses, the best one first.

    RDMA comes before TCP, permanent addresses before link-local ones, a network of its own before that of the default
    route, then the speed.
    """
    networks = {end.address.network for end in machines[0].ends}
    found = []
    for network in networks:
        ends = {}
        for machine in machines:
            inside = [end for end in machine.ends if end.up and end.address.network == network]
            if inside:
                ends[machine.name] = max(inside, key=lambda end: (end.hca is not None, end.speed or 0))
        if len(ends) == len(machines) == len({end.address.ip for end in ends.values()}):
            found.append(Link(network, ends))
    return sorted(found, key=_rank)


def _rank(link: Link) -> tuple[bool, bool, bool, int, IPv4Network]:
    outside = any(end.default_route for end in link.ends.values())
    return not link.rdma, link.network.is_link_local, outside, -(link.speed or 0), link.network


def is_ring(machines: Sequence[MachineNetwork]) -> bool:
    """Return whether each two machines share an RDMA network, and all of them none: cables without a switch."""
    networks = [{end.address.network for end in machine.ends if end.hca} for machine in machines]
    pairs = [one & other for index, one in enumerate(networks) for other in networks[index + 1 :]]
    return len(machines) > 2 and all(pairs) and not set.intersection(*networks)


CABLED = "dsv4.dev/cabled"
"""Label of a node, with the first node to which it has a path over RDMA ports as value."""


def cabled(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the value of the label `CABLED` of each node.

    Nodes have the same value if they reach each other over RDMA ports: two at the ends of a cable, three and more each
    all others, or four and more their two neighbours in a ring. A network in common is no proof, because cables may
    have equal addresses.

    Args:
        reports: documents of `dsv4 doctor --peer ADDRESS -o json`, by name of the node.

    Raises:
        ValueError: the reports do not prove such paths. The text contains the remedy.
    """
    owners: dict[str, list[str]] = {}
    for name, report in reports.items():
        for end in read_network(name, report).ends:
            if end.hca is not None:
                owners.setdefault(f"peer {end.address.ip}", []).append(name)
    paths: dict[str, set[str]] = {name: set() for name in reports}
    for name, report in reports.items():
        for check in report["checks"]:
            others = [other for other in owners.get(check.get("name", ""), ()) if other != name]
            if len(others) > 1:
                both, address = " and ".join(others), check["name"].removeprefix("peer ")
                raise ValueError(f"{address} is an address of {both}; give each cable a network of its own")
            if others and check["level"] == "ok":
                paths[name].add(others[0])
                paths[others[0]].add(name)
    found: dict[str, str] = {}
    for first in sorted(reports):
        if first not in found:
            found |= dict.fromkeys(_reached(first, paths), first)
    for first in set(found.values()):
        _check_paths(sorted(name for name, value in found.items() if value == first), paths)
    return found


def _reached(first: str, paths: Mapping[str, set[str]]) -> set[str]:
    found, rest = {first}, [first]
    while rest:
        rest += (new := paths[rest.pop()] - found)
        found |= new
    return found


def _check_paths(nodes: Sequence[str], paths: Mapping[str, set[str]]) -> None:
    """Raise ValueError unless each of `nodes` has a path to all others."""
    if len(nodes) == 1:
        problem = f"{nodes[0]} has no tested path to the RDMA port of another node of these reports"
        raise ValueError(f"{problem}; run `dsv4 doctor --peer ADDRESS -o json` at both ends, or leave it out")
    for name in nodes:
        if lacking := sorted(set(nodes) - {name} - paths[name]):
            problem = f"{name} and {lacking[0]} reach other nodes, but have no tested path to each other"
            raise ValueError(f"{problem}; run `dsv4 doctor --peer ADDRESS -o json` on both, or leave one of them out")


def no_link(machines: Sequence[MachineNetwork]) -> Finding:
    """Return the finding for machines without a common network, with the addresses of each."""
    shown = "; ".join(f"{machine.name}: {_addresses(machine)}" for machine in machines)
    idle = [f"{name} of {machine.name}" for machine in machines for name in machine.idle]
    remedy = "give the fast port of every machine an address of its own in one network (netplan)"
    if idle:
        remedy += f"; {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} a link and no address"
    twice = _used_twice(machines)
    if twice:
        remedy = f"change the address {twice[0]}, which {' and '.join(twice[1:])} have"
    return Finding("hosts", "NoCommonNetwork", f"have no network in common ({shown})", remedy)


def _addresses(machine: MachineNetwork) -> str:
    return ", ".join(f"{end.interface} {end.address}" for end in machine.ends if end.up) or "no address"


def _used_twice(machines: Sequence[MachineNetwork]) -> tuple[str, ...]:
    """Return an address of several machines, and their names; empty if there is none."""
    users: dict[str, list[str]] = {}
    for machine in machines:
        for end in machine.ends:
            users.setdefault(str(end.address.ip), []).append(machine.name)
    return next(((address, *names) for address, names in users.items() if len(set(names)) > 1), ())


def link_findings(link: Link, machines: Sequence[MachineNetwork], *, fabric: bool) -> Iterator[Finding]:
    """Yield the problems of the chosen link. `fabric`: the machines need a fast link for their GPUs."""

    def warn(field: str, reason: str, message: str, remedy: str, value: object = None) -> Finding:
        return Finding(field, reason, message, remedy, value, Severity.WARN)

    mtus = {end.mtu for end in link.ends.values()}
    if len(mtus) > 1:
        shown = ", ".join(f"{end.interface} of {name} {end.mtu}" for name, end in link.ends.items())
        yield warn(
            "link",
            "MtuDiffers",
            f"has different MTUs: {shown}: larger packets are lost",
            f"set the same MTU on all ends (`ip link set INTERFACE mtu {_FULL_MTU}`, and netplan)",
        )
    if link.network.is_link_local:
        yield warn(
            "link",
            "LinkLocal",
            "has link-local addresses, which may change at a restart",
            "give the ports static addresses (netplan), for example 192.168.100.1/24 and 192.168.100.2/24",
            str(link.network),
        )
    ring = is_ring(machines)
    if fabric and not link.rdma and not ring:
        lacking = [name for name, end in link.ends.items() if not end.hca]
        idle = [f"{name} of {machine.name}" for machine in machines for name in machine.idle]
        remedy = "connect the ConnectX ports, and give both ends addresses in one network"
        if idle:
            remedy = f"give {', '.join(idle)} an address in one network (netplan)"
        message = f"has no usable RDMA port at {', '.join(lacking)}: NCCL would use TCP, which is slow"
        yield warn("link", "NoRdma", message, remedy)


def spare_links(links: Iterable[Link], chosen: Link) -> list[Link]:
    """Return further RDMA links beside the chosen one, such as the other half of the port."""
    return [link for link in links if link.rdma and link is not chosen]
