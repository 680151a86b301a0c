"""The network of a machine: interfaces, RDMA ports with GIDs, limits and kernel, discovered in /sys and /proc.

RDMA ports are found by class, link state and network interface, never by name. References:
Documentation/ABI/stable/sysfs-class-infiniband and .../testing/sysfs-class-net of the Linux kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import Path

import psutil

from dsv4_runtime.util.files import SystemTree, first_number
from dsv4_runtime.util.peer_copies import Bridge, between_gpus, pci_gpus, redirected

ROCE_V2 = "RoCE v2"
# Bytes of a RoCE v2 packet besides its payload, as computed by the kernel (`iboe_get_mtu`): GRH 40, UDP 8, BTH 12,
# extended headers 4 + 28, ICRC 4.
_ROCE_OVERHEAD = 96


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    """Carrier present and operational state up (or unknown, as for virtual interfaces)."""
    mtu: int
    """Bytes; 0 if unknown."""
    speed: int | None
    """Mbit/s; None while it is down and for virtual interfaces."""
    addresses: tuple[IPv4Interface, ...]
    default_route: bool
    """Whether it has the default route."""


@dataclass(frozen=True, slots=True)
class Gid:
    """Entry of an RDMA port's GID table."""

    index: int
    kind: str
    """`RoCE v2` or `IB/RoCE v1`."""
    value: IPv6Address
    interface: str | None

    @property
    def ipv4(self) -> IPv4Address | None:
        """Return the IPv4 address of the GID; None if it has none."""
        return self.value.ipv4_mapped


@dataclass(frozen=True, slots=True)
class PciLink:
    """PCIe link of a device."""

    address: str | None
    """`0000:01:00.0`."""
    speed: float | None
    """Current GT/s per lane."""
    width: int | None
    """Current lanes."""
    max_speed: float | None
    max_width: int | None

    @property
    def reduced(self) -> bool:
        """Return whether the link is slower or narrower than the device supports."""
        slower = self.speed is not None and self.max_speed is not None and self.speed < self.max_speed
        narrower = self.width is not None and self.max_width is not None and self.width < self.max_width
        return slower or narrower

    def __str__(self) -> str:
        return f"{_show(self.speed)} GT/s x{_show(self.width)} of {_show(self.max_speed)} GT/s x{_show(self.max_width)}"


@dataclass(frozen=True, slots=True)
class Port:
    """Port of an RDMA device."""

    hca: str
    number: int
    active: bool
    """Port state ACTIVE and physical state LinkUp."""
    state: str
    """Both states as reported by the kernel."""
    link_layer: str
    rate: float | None
    """Gbit/s."""
    interface: str | None
    gids: tuple[Gid, ...]
    firmware: str | None
    card: str | None
    """Identical for all functions of one card (`sys_image_guid`)."""
    cage: str | None
    """Plug of the card (`phys_port_name`): ports with the same card and cage share a cable."""
    pci: PciLink
    usable: bool
    """Whether its device file exists."""

    @property
    def name(self) -> str:
        """Return NCCL's name of the port: device and number."""
        return f"{self.hca}:{self.number}"

    def gid_index(self, address: IPv4Address) -> int | None:
        """Return the index of the first RoCE v2 GID of `address`."""
        return next((gid.index for gid in self.gids if gid.kind == ROCE_V2 and gid.ipv4 == address), None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernel properties relevant to RDMA."""

    release: str
    arguments: tuple[str, ...]
    cma_total: int | None
    """KiB of the contiguous memory area, and its free part; None if unknown."""
    cma_free: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process, inherited by its children. None: unlimited or unknown."""

    locked_memory: int | None
    """Bytes."""
    locked_memory_known: bool
    may_lock: bool
    """The capability IPC_LOCK overrides the limit."""
    open_files: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine's network and related limits."""

    interfaces: dict[str, Interface]
    ports: tuple[Port, ...]
    kernel: Kernel
    limits: Limits
    gpu: bool
    """Whether an NVIDIA driver is loaded."""
    translated_gpus: tuple[str, ...] = ()
    """PCI addresses of the GPUs whose DMA the IOMMU translates, of a machine with several GPUs."""
    bridges: tuple[Bridge, ...] = ()
    """PCIe bridges between the GPUs of a machine with several."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the NVIDIA GPUs."""

    @property
    def redirected(self) -> str:
        """Return why copies between the GPUs over PCIe may hang (vllm-project/vllm#51513); empty: unknown."""
        return redirected(self.translated_gpus, self.bridges)

    def interface_of(self, address: IPv4Address) -> Interface | None:
        """Return the interface with `address`."""
        return next(
            (link for link in self.interfaces.values() if any(entry.ip == address for entry in link.addresses)), None
        )


def roce_mtu(mtu: int) -> int:
    """Return the maximum RoCE v2 payload in bytes for an interface MTU; 0 if below 256."""
    return next((size for size in (4096, 2048, 1024, 512, 256) if size + _ROCE_OVERHEAD <= mtu), 0)


def _show(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


RECORDED_ADDRESSES = "ip-addr.json"


@dataclass(frozen=True, slots=True)
class Link:
    """Interface properties reported directly by the kernel; None: use sysfs."""

    addresses: tuple[IPv4Interface, ...] = ()
    up: bool | None = None
    mtu: int | None = None
    speed: int | None = None


Links = Mapping[str, Link]
"""All interfaces by name."""

_INFINIBAND = "sys/class/infiniband"
_NET = "sys/class/net"
_IPC_LOCK = 14  # CAP_IPC_LOCK of capabilities(7)
_ROUTE_UP = 0x1
_UNKNOWN_GUIDS = frozenset({"", "0000:0000:0000:0000"})


def discover_node(root: Path = Path("/")) -> Node:
    """Discover this machine, or a copy of another machine's /sys, /proc and /dev with `ip -j addr` in
    `ip-addr.json`.
    """
    return discover(root, live_links() if root == Path("/") else recorded_links(root))


def live_links() -> Links:
    """Return the interfaces of this network namespace. /sys may belong to another namespace, and has no addresses."""
    addresses: dict[str, tuple[IPv4Interface, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family.name == "AF_INET":
                with suppress(ValueError):
                    address = IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
                    addresses[name] = (*addresses.get(name, ()), address)
    return {
        name: Link(addresses.get(name, ()), stats.isup, stats.mtu, stats.speed)
        for name, stats in psutil.net_if_stats().items()
    }


def recorded_links(root: Path) -> Links:
    """Return the interfaces of a copy: names from its /sys, addresses from its `ip -j addr`."""
    tree = SystemTree(root)
    # `bonding_masters` is a file among the interfaces.
    found = {name: Link() for name in tree.names(_NET) if tree.exists(f"{_NET}/{name}/mtu")}
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        for link in json.loads(tree.text(RECORDED_ADDRESSES) or "[]"):
            entries = [entry for entry in link.get("addr_info", []) if entry.get("family") == "inet"]
            addresses = tuple(IPv4Interface(f"{entry['local']}/{entry['prefixlen']}") for entry in entries)
            if link["ifname"] in found:
                found[link["ifname"]] = Link(addresses)
    return found


def discover(root: Path, links: Links) -> Node:
    """Return the network of the machine below `root`; invalid or missing entries are omitted, nothing raises."""
    tree = SystemTree(root)
    interfaces = _interfaces(tree, links)
    opened = _devices_with_files(tree)
    ports = [
        _port(tree, hca, int(number), interfaces, usable=hca in opened)
        for hca in tree.names(_INFINIBAND)
        for number in tree.names(f"{_INFINIBAND}/{hca}/ports")
        if number.isascii() and number.isdigit() and len(number) < 4
    ]
    ports.sort(key=lambda port: (port.pci.address or "", port.hca, port.number))
    gpu = tree.exists("proc/driver/nvidia/version")
    gpus = pci_gpus(tree)
    translated, bridges = between_gpus(tree, gpus)
    return Node(
        interfaces,
        tuple(ports),
        _kernel(tree),
        _limits(tree),
        gpu,
        translated,
        bridges,
        tuple(gpus),
    )


def _interfaces(tree: SystemTree, links: Links) -> dict[str, Interface]:
    default = _default_routes(tree)
    found = {}
    for name, link in sorted(links.items()):
        base = f"{_NET}/{name}"
        up = tree.text(f"{base}/operstate") in ("up", "unknown") and tree.text(f"{base}/carrier") != "0"
        # -1 (sysfs) or 0 (psutil) while the link is down.
        speed = tree.number(f"{base}/speed") if link.speed is None else link.speed
        found[name] = Interface(
            name=name,
            up=up if link.up is None else link.up,
            mtu=int(tree.number(f"{base}/mtu") or 0) if link.mtu is None else link.mtu,
            speed=int(speed) if speed is not None and speed > 0 else None,
            addresses=link.addresses,
            default_route=name in default,
        )
    return found


def _default_routes(tree: SystemTree) -> frozenset[str]:
    """Return the interfaces with an IPv4 default route (proc(5), /proc/net/route)."""
    found = set()
    for line in (tree.text("proc/net/route") or "").splitlines()[1:]:
        cells = line.split()
        if len(cells) < 8 or cells[1] != "00000000" or cells[7] != "00000000":
            continue
        with suppress(ValueError):
            if int(cells[3], 16) & _ROUTE_UP:
                found.add(cells[0])
    return frozenset(found)


def _devices_with_files(tree: SystemTree) -> frozenset[str]:
    """Return the RDMA devices with a device file, which is often missing in containers."""
    verbs = "sys/class/infiniband_verbs"
    return frozenset(
        device
        for name in tree.names(verbs)
        if (device := tree.text(f"{verbs}/{name}/ibdev")) and tree.exists(f"dev/infiniband/{name}")
    )


def _port(tree: SystemTree, hca: str, number: int, interfaces: Mapping[str, Interface], *, usable: bool) -> Port:
    device = f"{_INFINIBAND}/{hca}/device"
    base = f"{_INFINIBAND}/{hca}/ports/{number}"
    gids = _gids(tree, base)
    interface = _interface_of(tree, device, number, gids, interfaces)
    state, physical = tree.text(f"{base}/state") or "?", tree.text(f"{base}/phys_state") or "?"
    card = tree.text(f"{_INFINIBAND}/{hca}/sys_image_guid") or ""
    return Port(
        hca=hca,
        number=number,
        active=state.endswith("ACTIVE") and physical.endswith("LinkUp"),
        state=f"{state.rpartition(': ')[2]}, {physical.rpartition(': ')[2]}",
        link_layer=tree.text(f"{base}/link_layer") or "?",
        rate=tree.number(f"{base}/rate"),
        interface=interface,
        gids=gids,
        firmware=tree.text(f"{_INFINIBAND}/{hca}/fw_ver"),
        card=card if card not in _UNKNOWN_GUIDS else None,
        cage=(tree.text(f"{_NET}/{interface}/phys_port_name") if interface else None) or None,
        pci=PciLink(
            address=tree.target(device),
            speed=tree.number(f"{device}/current_link_speed"),
            width=_lanes(tree.number(f"{device}/current_link_width")),
            max_speed=tree.number(f"{device}/max_link_speed"),
            max_width=_lanes(tree.number(f"{device}/max_link_width")),
        ),
        usable=usable,
    )


def _gids(tree: SystemTree, base: str) -> tuple[Gid, ...]:
    found = []
    for index in tree.names(f"{base}/gids"):
        text, kind = tree.text(f"{base}/gids/{index}"), tree.text(f"{base}/gid_attrs/types/{index}")
        # The type of an empty slot cannot be read.
        if not text or not kind or not (index.isascii() and index.isdigit() and len(index) < 6):
            continue
        with suppress(ValueError):
            value = IPv6Address(text)
            if int(value) & (2**64 - 1):
                found.append(Gid(int(index), kind, value, tree.text(f"{base}/gid_attrs/ndevs/{index}")))
    return tuple(found)


def _interface_of(
    tree: SystemTree, device: str, number: int, gids: tuple[Gid, ...], interfaces: Mapping[str, Interface]
) -> str | None:
    """Return the port's network interface: that of its GIDs, which is correct for bonds, VLANs and several ports per
    function; else that of its PCI function. Interfaces with an IPv4 address come first.
    """
    names = [gid.interface for gid in gids if gid.interface in interfaces]
    functions = [name for name in tree.names(f"{device}/net") if name in interfaces]
    # `dev_port` counts from 0, RDMA ports from 1.
    names += [name for name in functions if tree.number(f"{_NET}/{name}/dev_port") == number - 1] or functions
    return next((name for name in names if name and interfaces[name].addresses), names[0] if names else None)


def _kernel(tree: SystemTree) -> Kernel:
    memory = dict(line.split(":", 1) for line in (tree.text("proc/meminfo") or "").splitlines() if ":" in line)
    return Kernel(
        release=tree.text("proc/sys/kernel/osrelease") or "?",
        arguments=tuple((tree.text("proc/cmdline") or "").split()),
        cma_total=_as_int(first_number(memory.get("CmaTotal"))),
        cma_free=_as_int(first_number(memory.get("CmaFree"))),
    )


def _limits(tree: SystemTree) -> Limits:
    soft: dict[str, str] = {}
    for line in (tree.text("proc/self/limits") or "").splitlines():
        for name in ("Max locked memory", "Max open files"):
            if line.startswith(name) and (cells := line[len(name) :].split()):
                soft[name] = cells[0]
    locked, files = soft.get("Max locked memory"), soft.get("Max open files")
    capabilities = 0
    for line in (tree.text("proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            with suppress(ValueError):
                capabilities = int(line.split(":", 1)[1], 16)
    return Limits(
        locked_memory=None if locked == "unlimited" else _as_int(first_number(locked)),
        locked_memory_known=locked is not None,
        may_lock=bool(capabilities >> _IPC_LOCK & 1),
        open_files=None if files == "unlimited" else _as_int(first_number(files)),
    )


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _lanes(value: float | None) -> int | None:
    # 0 and 255 mean unknown, as for virtual functions.
    return int(value) if value is not None and 0 < value < 255 else None
