"""Selection of interface, RDMA ports and GIDs, the resulting variables of NCCL, Gloo and UCX, and checks with remedies.
Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from dsv4_runtime.contract import FabricPlan, FabricSetting, Rail
from dsv4_runtime.fabric.node import ROCE_V2, Gid, Interface, Node, Port, roce_mtu
from dsv4_runtime.util.peer_copies import UNSAFE_COPIES, CopyTest, Outcome


class CheckStatus(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


class CheckReason(StrEnum):
    """Identifier of a problem, for programs."""

    KERNEL_RESERVES_MEMORY = "KernelReservesMemory"
    NO_DEVICE = "NoDevice"
    UNKNOWN_DEVICE = "UnknownDevice"
    NO_USABLE_PORT = "NoUsablePort"
    NOT_SELECTED = "NotSelected"
    NOT_ETHERNET = "NotEthernet"
    LINK_DOWN = "LinkDown"
    NO_INTERFACE = "NoInterface"
    INTERFACE_DOWN = "InterfaceDown"
    NO_ADDRESS = "NoAddress"
    DEFAULT_ROUTE = "DefaultRoute"
    NO_GID = "NoGid"
    NO_DEVICE_FILE = "NoDeviceFile"
    SLOW_LINK = "SlowLink"
    REDUCED_PCIE = "ReducedPcie"
    UNUSED_TWIN = "UnusedTwin"
    SHARED_NETWORK = "SharedNetwork"
    SHARED_INTERFACE = "SharedInterface"
    MTU_BELOW_PLAN = "MtuBelowPlan"
    SMALL_MTU = "SmallMtu"
    WRONG_GID_INDEX = "WrongGidIndex"
    STALE_GIDS = "StaleGids"
    LOCKED_MEMORY_LIMIT = "LockedMemoryLimit"
    OPEN_FILES_LIMIT = "OpenFilesLimit"
    DUPLICATE_ADDRESS = "DuplicateAddress"
    NO_COMMON_NETWORK = "NoCommonNetwork"
    PORT_IN_USE = "PortInUse"
    NO_REPLY = "NoReply"
    ONE_WAY = "OneWay"
    PATH_MTU = "PathMtu"
    TCP_BROKEN = "TcpBroken"
    NOTHING_RECEIVED = "NothingReceived"
    REDIRECTED_COPIES = "RedirectedCopies"
    BROKEN_COPIES = "BrokenCopies"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    level: CheckStatus
    found: str
    remedy: str = ""
    """Empty if no action is required."""
    reason: CheckReason | None = None
    """The problem; None: there is none, or the check was not possible."""
    value: int | str | None = None
    """Measured value, in the unit of its source (bytes, Mbit/s, files)."""

    def __str__(self) -> str:
        """Return `FOUND; REMEDY`, the text of errors."""
        return f"{self.found}; {self.remedy}" if self.remedy else self.found

    def to_dict(self) -> dict[str, int | str]:
        """Return the check as JSON values, without unset fields."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class UsablePort:
    """A usable RDMA port with its interface and address."""

    port: Port
    interface: Interface
    address: IPv4Interface
    gid: int
    """Index of the RoCE v2 GID of `address`."""


@dataclass(frozen=True, slots=True)
class UnfitPort:
    """An RDMA port that is not used."""

    port: Port
    reason: CheckReason
    found: str


@dataclass(frozen=True, slots=True)
class FabricChoice:
    """Selected interface and RDMA ports of a member."""

    sockets: Interface | None
    """Interface of NCCL's bootstrap and Gloo; None: no interface has the member's address."""
    address: IPv4Interface | None
    """The member's address on it."""
    fit: tuple[UsablePort, ...]
    """RDMA ports in use."""
    unfit: tuple[UnfitPort, ...]
    """Other ports."""
    missing: tuple[str, ...] = ()
    """Configured RDMA devices that do not exist."""

    def rails(self) -> tuple[Rail, ...]:
        """Return the member's addresses: that of its sockets first, then one per RDMA port."""
        ends = [(fit.interface, fit.address, fit.port.name) for fit in self.fit]
        found: list[tuple[Interface, IPv4Interface, str | None]] = []
        if self.sockets is not None and self.address is not None:
            hca = next((name for _, address, name in ends if address.ip == self.address.ip), None)
            found.append((self.sockets, self.address, hca))
        found += [end for end in ends if self.address is None or end[1].ip != self.address.ip]
        return tuple(Rail(interface=link.name, address=str(own), mtu=link.mtu, hca=hca) for link, own, hca in found)


def choose_fabric(node: Node, address: str | None = None, setting: FabricSetting | None = None) -> FabricChoice:
    """Select the fabric of the member at `address`. Without an address (`dsv4 doctor`) the first usable port also
    carries sockets.

    A port whose interface has the default route is excluded unless it is configured: it leads to the outside, not to
    the fabric.
    """
    setting = setting or FabricSetting()
    fit: list[UsablePort] = []
    unfit: list[UnfitPort] = []
    for port in node.ports:
        if setting.hcas is not None and port.hca not in setting.hcas:
            unset = "it is not among the devices that were set by hand"
            unfit.append(UnfitPort(port, CheckReason.NOT_SELECTED, unset))
            continue
        found = _usable_port(node, port, by_hand=setting.hcas is not None)
        if isinstance(found, UsablePort):
            fit.append(found)
        else:
            unfit.append(found)
    sockets, own = _socket_interface(node, address, setting, fit)
    here = {port.hca for port in node.ports}
    missing = tuple(hca for hca in setting.hcas or () if hca not in here)
    return FabricChoice(sockets, own, tuple(fit), tuple(unfit), missing)


def _usable_port(node: Node, port: Port, *, by_hand: bool) -> UsablePort | UnfitPort:
    if port.link_layer != "Ethernet":
        text = f"its link layer is {port.link_layer}, not Ethernet: dsv4 supports RoCE only"
        return UnfitPort(port, CheckReason.NOT_ETHERNET, text)
    if not port.active:
        return UnfitPort(port, CheckReason.LINK_DOWN, f"its link is not up ({port.state})")
    interface = node.interfaces.get(port.interface) if port.interface else None
    if interface is None:
        return UnfitPort(port, CheckReason.NO_INTERFACE, "it has no network interface here")
    name = interface.name
    if not interface.up:
        return UnfitPort(port, CheckReason.INTERFACE_DOWN, f"its interface {name} is down or has no carrier")
    if not interface.addresses:
        return UnfitPort(port, CheckReason.NO_ADDRESS, f"its interface {name} has no IPv4 address")
    if interface.default_route and not by_hand:
        return UnfitPort(port, CheckReason.DEFAULT_ROUTE, f"the default route leads over its interface {name}")
    for address in interface.addresses:
        if (index := port.gid_index(address.ip)) is not None:
            if not port.usable:
                text = "its device file in /dev/infiniband is missing"
                return UnfitPort(port, CheckReason.NO_DEVICE_FILE, text)
            return UsablePort(port, interface, address, index)
    return UnfitPort(port, CheckReason.NO_GID, f"no {ROCE_V2} GID stands for {interface.addresses[0].ip} of {name}")


def _socket_interface(
    node: Node, address: str | None, setting: FabricSetting, fit: Sequence[UsablePort]
) -> tuple[Interface | None, IPv4Interface | None]:
    if address is None:
        first = next(iter(fit), None)
        return (first.interface, first.address) if first else (None, None)
    own = _parse_address(address)
    holder = node.interface_of(own) if own else None
    interface = node.interfaces.get(setting.interface) if setting.interface else holder
    if interface is None:
        return None, None
    mine = next((entry for entry in interface.addresses if entry.ip == own), None)
    return interface, mine or next(iter(interface.addresses), None)


def _parse_address(address: str) -> IPv4Address | None:
    try:
        return IPv4Address(address)
    except ValueError:
        return None


def nccl_gid(gids: Sequence[Gid], within: IPv4Network | None = None) -> int:
    """Return the GID index that NCCL selects by default (IPv4, RoCE v2) with NCCL_IB_ADDR_RANGE=`within`.

    Follows `ncclIbGetGidIndex` of NCCL 2.21 to 2.30 (src/transport/net_ib/connect.cc): the first entry is replaced by
    the first IPv4 one, which is replaced by one of the requested version. NCCL does not check whether the interface
    (still) has the address.
    """
    table = {gid.index: gid for gid in gids}
    best = 0
    for index in range(1, max(table, default=0) + 1):
        candidate, present = table.get(index), table.get(best)
        if candidate is None or candidate.ipv4 is None or (within is not None and candidate.ipv4 not in within):
            continue
        if present is None or present.ipv4 is None or (candidate.kind != present.kind and candidate.kind == ROCE_V2):
            best = index
    return best


def common_range(fit: Sequence[UsablePort]) -> IPv4Network | None:
    """Return the narrowest IPv4 network with the addresses of all ports in use for which NCCL selects the correct GIDs;
    None if there is none.
    """
    addresses = sorted(item.address.ip for item in fit)
    if not addresses:
        return None
    length = next(
        length for length in range(32, -1, -1) if addresses[-1] in IPv4Network((addresses[0], length), strict=False)
    )
    network = IPv4Network((addresses[0], length), strict=False)
    right = all(nccl_gid(item.port.gids, network) == item.gid for item in fit)
    return network if right and length > 0 else None


@dataclass(frozen=True, slots=True)
class Variable:
    """Environment variable with its reason."""

    name: str
    value: str
    reason: str


def variables(choice: FabricChoice, plan: FabricPlan, rank: int, *, ring: bool = False) -> tuple[Variable, ...]:
    """Return the fabric environment of Ray and vLLM on this member. `ring`: not every rail reaches every member.

    Variables that NCCL determines correctly by itself stay unset.
    """
    found: list[Variable] = []
    if choice.sockets is not None:
        name = choice.sockets.name
        peers = "the other members reach this one over it"
        found += [
            # "=": exact match instead of a prefix match.
            Variable("NCCL_SOCKET_IFNAME", f"={name}", f"bootstrap of NCCL: {peers}"),
            Variable("GLOO_SOCKET_IFNAME", name, f"Gloo would take the interface of the host's name: {peers}"),
            Variable("TP_SOCKET_IFNAME", name, f"the same for torch's TensorPipe: {peers}"),
        ]
    if not choice.fit:
        off = "no RDMA port here is fit; one that is half there would stall the start instead of being passed over"
        return (*found, Variable("NCCL_IB_DISABLE", "1", off), *_LOG_VARIABLES)
    names = [fit.port.name for fit in choice.fit]
    found += [
        Variable("NCCL_IB_DISABLE", "0", "an image or a shell may have switched RDMA off"),
        # Each half of a ConnectX-7 cage of a GB10 carries 100 Gbit/s, half of the cable's bandwidth.
        Variable("NCCL_IB_HCA", "=" + ",".join(names), "exactly the ports that are up, have an address and a GID"),
    ]
    # UCX uses only the listed devices: RDMA ports for data, the interface for its own sockets.
    devices = [*names, *([choice.sockets.name] if choice.sockets else [])]
    found.append(Variable("UCX_NET_DEVICES", ",".join(devices), "the same choice for UCX, where vLLM moves KV with it"))
    if plan.require_rdma:
        found.append(
            Variable("NCCL_NET", "IB", "the plan requires RDMA: NCCL ends with an error instead of using sockets")
        )
    found += _gid_variables(choice.fit, plan.setting(rank))
    if ring:
        why = "not every rail reaches every member: NCCL must pick the port that is in the peer's network"
        found += [
            Variable("NCCL_IB_SUBNET_AWARE_ROUTING", "1", why),
            Variable("NCCL_IB_MERGE_NICS", "0", why),
            Variable("NCCL_CROSS_NIC", "1", why),
        ]
    return (*found, *_LOG_VARIABLES)


_LOG_VARIABLES = (
    Variable("NCCL_DEBUG", "INFO", "NCCL's log is the only proof of the transport that it uses"),
    Variable("NCCL_DEBUG_SUBSYS", "INIT,NET", "only the lines about start and transport"),
)


def _gid_variables(fit: tuple[UsablePort, ...], setting: FabricSetting) -> list[Variable]:
    """Return the GID variables; empty where NCCL's default is correct, which is the usual case."""
    if setting.gid_index != "Auto":
        return [Variable("NCCL_IB_GID_INDEX", str(setting.gid_index), "set by hand in the deployment")]
    wrong = [item for item in fit if nccl_gid(item.port.gids) != item.gid]
    if not wrong:
        return []
    first = wrong[0]
    why = f"NCCL would take GID {nccl_gid(first.port.gids)} of {first.port.name}, which is not that of an address here"
    # One index applies to all ports, and may point to another address on the next port.
    if len(indices := {item.gid for item in fit}) == 1:
        return [Variable("NCCL_IB_GID_INDEX", str(indices.pop()), why)]
    if (network := common_range(fit)) is not None:
        return [Variable("NCCL_IB_ADDR_RANGE", str(network), why)]
    return []


def gids_not_settable(choice: FabricChoice, setting: FabricSetting) -> bool:
    """Return whether NCCL would select a wrong GID that no variable can correct."""
    wrong = any(nccl_gid(item.port.gids) != item.gid for item in choice.fit)
    return setting.gid_index == "Auto" and wrong and not _gid_variables(choice.fit, setting)


# Mbit/s of a ConnectX-7 cage of a GB10, which can come up at half speed without an error.
_TWIN_SPEED = 200_000
_FULL_ROCE_MTU = 4096
_OPEN_FILES = 65_536
_KHO_KERNEL = "7.0.0"


def run_checks(
    node: Node, choice: FabricChoice, plan: FabricPlan, rank: int = 0, copies: CopyTest | None = None
) -> tuple[Check, ...]:
    """Return all checks in the recommended order of repair. `copies`: the test of copies between GPUs, if made."""
    return (
        _kernel(node),
        *_devices(node, choice, plan),
        *_links(choice),
        _pcie(node),
        *_peer_to_peer(node, copies),
        _twins(node, choice),
        _networks(choice),
        _mtu(choice, plan),
        _gids(choice, plan, rank),
        _locked_memory(node),
        _open_files(node),
    )


def failures(checks: Iterable[Check]) -> list[Check]:
    """Return the failed checks."""
    return [check for check in checks if check.level is CheckStatus.FAIL]


def _kernel(node: Node) -> Check:
    """Check for Kexec HandOver: such kernels reserve memory as a movable area that RDMA cannot pin.

    Observed with 7.0.0-1019-nvidia and 7.0.0-31: all ports are up, and `ibv_reg_mr` fails with ENOMEM.
    """
    name, kernel = "kernel", node.kernel
    if "kho=off" in kernel.arguments or not kernel.release.startswith(_KHO_KERNEL):
        return Check(name, CheckStatus.OK, kernel.release, value=kernel.release)
    remedy = "add kho=off to the kernel's command line and start the machine again, or boot a 6.17 kernel"
    if kernel.cma_free is not None and kernel.cma_total is not None and kernel.cma_free > kernel.cma_total:
        found = (
            f"{kernel.release} holds memory back for Kexec HandOver (CmaFree {kernel.cma_free} kB is more than "
            f"CmaTotal {kernel.cma_total} kB): RDMA cannot pin memory there"
        )
        level = CheckStatus.FAIL if node.ports else CheckStatus.WARN
        return Check(name, level, found, remedy, CheckReason.KERNEL_RESERVES_MEMORY, kernel.release)
    found = f"{kernel.release} may hold memory back for Kexec HandOver; /proc/meminfo shows no sign of it now"
    if not node.ports:
        return Check(name, CheckStatus.OK, found, value=kernel.release)
    return Check(name, CheckStatus.WARN, found, remedy, CheckReason.KERNEL_RESERVES_MEMORY, kernel.release)


def _devices(node: Node, choice: FabricChoice, plan: FabricPlan) -> Iterator[Check]:
    """Check for RDMA devices and report the ports in use."""
    bad = CheckStatus.FAIL if plan.require_rdma else CheckStatus.WARN
    for hca in choice.missing:
        there = ", ".join(sorted({port.hca for port in node.ports})) or "none"
        found = f"the device {hca} is not here (there are: {there})"
        yield Check(
            "rdma", CheckStatus.FAIL, found, "correct spec.network.fabric", CheckReason.UNKNOWN_DEVICE, value=hca
        )
    if not node.ports:
        found = "no RDMA device (/sys/class/infiniband is empty or missing): NCCL uses TCP sockets"
        remedy = "load the card's driver (mlx5_ib), or let the container see the host's /sys and /dev/infiniband"
        if plan.require_rdma:
            yield Check("rdma", bad, found, remedy, CheckReason.NO_DEVICE)
        else:
            yield Check("rdma", CheckStatus.SKIPPED, found)
        return
    if choice.fit:
        fit = ", ".join(f"{fit.port.name} on {fit.interface.name} {fit.address}" for fit in choice.fit)
        yield Check("rdma", CheckStatus.OK, fit)
    else:
        found = "no RDMA port is fit; NCCL would use TCP sockets"
        yield Check("rdma", bad, found, "see the ports below", CheckReason.NO_USABLE_PORT)
    cabled = {_cage(fit.port) for fit in choice.fit}
    for unfit in choice.unfit:
        # Empty cages beside a used one, and ports that lead to the outside, are common.
        empty = not unfit.port.active and _cage(unfit.port) not in cabled
        common = bool(choice.fit) and (empty or unfit.reason is CheckReason.DEFAULT_ROUTE)
        fine = common or unfit.reason is CheckReason.NOT_SELECTED
        level = CheckStatus.SKIPPED if fine else CheckStatus.WARN if choice.fit else bad
        remedy = "" if fine else _remedy(unfit)
        yield Check(f"port {unfit.port.name}", level, f"not used: {unfit.found}", remedy, unfit.reason)


def _remedy(unfit: UnfitPort) -> str:
    interface = unfit.port.interface or "its interface"
    cable = f"check the cable, its other end, and `ip link set {interface} up`"
    remedies = {
        CheckReason.LINK_DOWN: cable,
        CheckReason.INTERFACE_DOWN: cable,
        CheckReason.NO_ADDRESS: f"give {interface} an address of its own network, in a way that outlives a restart "
        "(netplan); NetworkManager removes addresses that were set by hand",
        CheckReason.DEFAULT_ROUTE: "name the device in spec.network.fabric if it is to carry the fabric too, "
        "or lead the default route over the management interface",
        CheckReason.NO_GID: f"set the address of {interface} again (`ip addr del`, `ip addr add`): the table is made "
        "from it; a restart of the machine makes it anew",
        CheckReason.NO_DEVICE_FILE: "give the container /dev/infiniband and the capability IPC_LOCK",
        CheckReason.NO_INTERFACE: "load the card's network driver; in a container, use the host's network",
    }
    return remedies.get(unfit.reason, "use another port")


def _links(choice: FabricChoice) -> Iterator[Check]:
    """Check the speed of the links in use. Twin ports share a cage; each shows the speed of the whole cable."""
    twins = _twin_cages([*(fit.port for fit in choice.fit), *(unfit.port for unfit in choice.unfit)])
    for fit in choice.fit:
        speed = fit.interface.speed
        found = f"{fit.interface.name} runs at {speed / 1000:g} Gbit/s" if speed else f"{fit.interface.name}: unknown"
        firmware = f"{found}, firmware {fit.port.firmware}" if fit.port.firmware else found
        if speed and _cage(fit.port) in twins and speed < _TWIN_SPEED:
            remedy = "both ends and the cable must be for 200 Gbit/s; unplug and plug it, then start both machines cold"
            slow = f"{firmware}, not at {_TWIN_SPEED // 1000}"
            yield Check(f"speed {fit.port.name}", CheckStatus.WARN, slow, remedy, CheckReason.SLOW_LINK, speed)
        else:
            level = CheckStatus.OK if speed else CheckStatus.SKIPPED
            yield Check(f"speed {fit.port.name}", level, firmware, value=speed)


def _pcie(node: Node) -> Check:
    """Check the PCIe width: GB10 firmware before 2026-04 gives the second half of a card two lanes."""
    links = {port.pci.address or port.hca: port.pci for port in node.ports}
    known = {address: link for address, link in links.items() if link.speed is not None and link.width is not None}
    if not known:
        return Check("pcie", CheckStatus.SKIPPED, "no RDMA device shows its PCIe link")
    reduced = {address: link for address, link in known.items() if link.reduced}
    widths = {link.width for link in known.values()}
    if reduced or len(widths) > 1:
        odd = reduced or known
        found = "; ".join(f"{address} runs at {link}" for address, link in odd.items())
        remedy = "update the machine's firmware (fwupdmgr), then take its power away for a minute and start it cold"
        return Check("pcie", CheckStatus.WARN, found, remedy, CheckReason.REDUCED_PCIE)
    return Check("pcie", CheckStatus.OK, "; ".join(f"{address} at {link}" for address, link in known.items()))


def _peer_to_peer(node: Node, copies: CopyTest | None) -> Iterator[Check]:
    """Yield the state of copies between several GPUs over PCIe: their path (vllm-project/vllm#51513), and the test."""
    tested = f"; {copies.found}" if copies is not None and copies.outcome is not Outcome.SKIPPED else ""
    path = "add iommu=pt to the kernel's command line and disable ACS in the firmware"
    plain = (copies.problem if copies is not None else "") or node.redirected
    until = (
        "until then `dsv4 up` disables these copies (NCCL_P2P_DISABLE=1); so does the operator after "
        f"kubectl annotate node NODE {UNSAFE_COPIES}={shlex.quote(plain)}"
    )
    if copies is not None and copies.problem:
        found = f"{node.redirected}; {copies.found}" if node.redirected else copies.found
        yield Check("peer to peer", CheckStatus.WARN, found, f"{path}; {until}", CheckReason.BROKEN_COPIES)
    elif causes := node.redirected:
        found = f"{causes}: copies between them over PCIe may hang in the first collective{tested}"
        yield Check("peer to peer", CheckStatus.WARN, found, f"{path}; {until}", CheckReason.REDIRECTED_COPIES)
    elif tested and copies is not None:
        yield Check("peer to peer", CheckStatus.OK, copies.found)
    elif unknown := [bridge.address for bridge in node.bridges if bridge.redirects is None]:
        skipped = f"; no copy was tried: {copies.found}" if copies is not None else ""
        found = f"ACS of the PCIe bridges {', '.join(unknown)} is readable for root only; use `sudo dsv4 doctor`"
        yield Check("peer to peer", CheckStatus.SKIPPED, found + skipped)
    elif copies is not None and len(node.gpus) > 1:
        yield Check("peer to peer", CheckStatus.SKIPPED, f"no copy was tried: {copies.found}")


def _twins(node: Node, choice: FabricChoice) -> Check:
    """Check that both halves of a cage are in use: one alone carries half of the cable's bandwidth."""
    cages = _twin_cages(node.ports)
    if not cages:
        return Check("twins", CheckStatus.SKIPPED, "no two ports share a cage")
    used = {fit.port.name for fit in choice.fit}
    halves = [(sorted(names & used), sorted(names - used)) for names in cages.values() if names & used and names - used]
    if halves:
        found = "; ".join(f"{', '.join(have)} is used without its twin {', '.join(lack)}" for have, lack in halves)
        remedy = "give the twin's interface an address in a network of its own, and the same on the other machines"
        found += ": half of the cable's bandwidth"
        return Check("twins", CheckStatus.WARN, found, remedy, CheckReason.UNUSED_TWIN)
    both = [" and ".join(sorted(names)) for names in cages.values() if names <= used]
    return Check("twins", CheckStatus.OK if both else CheckStatus.SKIPPED, "; ".join(both) or "no cage is in use")


def _networks(choice: FabricChoice) -> Check:
    """Check for two ports in one network: the kernel answers ARP for both on either, and RDMA packets are misrouted."""
    if len(choice.fit) < 2:
        return Check("networks", CheckStatus.SKIPPED, "fewer than two ports are used")
    by_interface: dict[str, list[str]] = {}
    for fit in choice.fit:
        by_interface.setdefault(fit.interface.name, []).append(fit.port.name)
    for interface, ports in by_interface.items():
        if len(ports) > 1:
            found = (
                f"{' and '.join(ports)} share the interface {interface} and its address: RDMA packets reach only one"
            )
            remedy = (
                f"take their interfaces out of {interface} and give each an address in a network of its own, or name "
                "one device in spec.network.fabric; ports of one card in a RoCE bond show up as one device"
            )
            return Check("networks", CheckStatus.FAIL, found, remedy, CheckReason.SHARED_INTERFACE, interface)
    pairs = [
        f"{first.interface.name} ({first.address}) and {second.interface.name} ({second.address})"
        for index, first in enumerate(choice.fit)
        for second in choice.fit[index + 1 :]
        if first.address.network.overlaps(second.address.network)
    ]
    if pairs:
        remedy = "give each RDMA interface of a machine a network of its own, the same one on the other machines"
        found = f"in one network: {'; '.join(pairs)}"
        return Check("networks", CheckStatus.FAIL, found, remedy, CheckReason.SHARED_NETWORK)
    return Check("networks", CheckStatus.OK, ", ".join(str(fit.address.network) for fit in choice.fit))


def _mtu(choice: FabricChoice, plan: FabricPlan) -> Check:
    """Check the MTU, which limits RoCE packets: 1024 bytes instead of 4096 cost 40 % of the prefill throughput."""
    if not choice.fit:
        return Check("mtu", CheckStatus.SKIPPED, "no RDMA port is used")
    links = [fit.interface for fit in choice.fit]
    smallest = min(link.mtu for link in links)
    small = [link for link in links if plan.mtu is not None and link.mtu < plan.mtu]
    if small:
        found = f"the plan requires {plan.mtu}: {', '.join(f'{link.name} has {link.mtu}' for link in small)}"
        remedy = f"`ip link set {small[0].name} mtu {plan.mtu}` on every machine, and on the switch"
        return Check("mtu", CheckStatus.FAIL, found, remedy, CheckReason.MTU_BELOW_PLAN, smallest)
    found = ", ".join(f"{link.name} {link.mtu} (RoCE {roce_mtu(link.mtu)})" for link in links)
    if roce_mtu(smallest) < _FULL_ROCE_MTU:
        remedy = "set the MTU to 9000 on every machine, and on the switch"
        return Check("mtu", CheckStatus.WARN, found, remedy, CheckReason.SMALL_MTU, smallest)
    return Check("mtu", CheckStatus.OK, found, value=smallest)


def _gids(choice: FabricChoice, plan: FabricPlan, rank: int) -> Check:
    """Check that NCCL uses a GID of an existing address."""
    if not choice.fit:
        return Check("gid", CheckStatus.SKIPPED, "no RDMA port is used")
    setting = plan.setting(rank)
    used = ", ".join(f"{fit.port.name} {fit.gid}" for fit in choice.fit)
    if setting.gid_index != "Auto":
        wrong = next((fit for fit in choice.fit if fit.gid != setting.gid_index), None)
        if wrong is not None:
            found = (
                f"index {setting.gid_index} is set by hand, but {wrong.address.ip} is {wrong.gid} on {wrong.port.name}"
            )
            remedy = "leave the index out; dsv4 finds it on each machine"
            return Check("gid", CheckStatus.FAIL, found, remedy, CheckReason.WRONG_GID_INDEX, setting.gid_index)
    elif gids_not_settable(choice, setting):
        found = f"the GID tables have stale entries before the right ones ({used}), at different places on each port"
        remedy = "start the machine again, which makes the tables anew"
        return Check("gid", CheckStatus.FAIL, found, remedy, CheckReason.STALE_GIDS)
    stale = [
        f"{fit.port.name} {gid.index} ({gid.ipv4})"
        for fit in choice.fit
        for gid in fit.port.gids
        if gid.ipv4 is not None and gid.ipv4 not in {entry.ip for entry in fit.interface.addresses}
    ]
    if stale:
        found = f"{used}; stale entries: {', '.join(stale)}"
        remedy = "restart the machine at a suitable time; NCCL gets the correct entry"
        return Check("gid", CheckStatus.WARN, found, remedy, CheckReason.STALE_GIDS)
    return Check("gid", CheckStatus.OK, f"RoCE v2: {used}")


def _locked_memory(node: Node) -> Check:
    """Check the limit of locked memory for RDMA buffers."""
    limits = node.limits
    if not limits.locked_memory_known:
        return Check("memlock", CheckStatus.SKIPPED, "/proc/self/limits has no such line")
    if limits.locked_memory is None:
        return Check("memlock", CheckStatus.OK, "unlimited")
    if limits.may_lock:
        return Check("memlock", CheckStatus.OK, "not limited by IPC_LOCK", value=limits.locked_memory)
    found = f"{limits.locked_memory / 2**20:g} MiB may be locked, and IPC_LOCK is missing: RDMA cannot pin its buffers"
    if not node.ports:
        return Check("memlock", CheckStatus.SKIPPED, found, value=limits.locked_memory)
    remedy = "LimitMEMLOCK=infinity for the service or containerd (docker: --ulimit memlock=-1), or IPC_LOCK"
    return Check("memlock", CheckStatus.FAIL, found, remedy, CheckReason.LOCKED_MEMORY_LIMIT, limits.locked_memory)


def _open_files(node: Node) -> Check:
    files = node.limits.open_files
    if files is None or files >= _OPEN_FILES:
        return Check("nofile", CheckStatus.OK, "unlimited" if files is None else str(files), value=files)
    found = f"{files} files may be open; long runs of vLLM with Ray have failed at this limit"
    remedy = "LimitNOFILE=1048576 for the service or containerd (ulimit -n)"
    return Check("nofile", CheckStatus.WARN, found, remedy, CheckReason.OPEN_FILES_LIMIT, files)


def _cage(port: Port) -> tuple[str, str] | None:
    return (port.card, port.cage) if port.card and port.cage else None


def _twin_cages(ports: Iterable[Port]) -> dict[tuple[str, str], set[str]]:
    """Map cages with several ports, as on GB10, to the names of those ports."""
    cages: dict[tuple[str, str], set[str]] = {}
    for port in ports:
        if (cage := _cage(port)) is not None:
            cages.setdefault(cage, set()).add(port.name)
    return {cage: names for cage, names in cages.items() if len(names) > 1}
