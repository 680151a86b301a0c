"""From /sys and /proc to a `Node`. RDMA ports are found by class, link state and network interface, never by name.

Where things are: Documentation/ABI/stable/sysfs-class-infiniband and .../testing/sysfs-class-net of the Linux kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Address
from pathlib import Path

import psutil

from dsv4_runtime.fabric.node import Gid, Interface, Kernel, Limits, Node, PciLink, Port
from dsv4_runtime.fabric.tree import Tree, first_number

RECORDED_ADDRESSES = "ip-addr.json"


@dataclass(frozen=True, slots=True)
class Link:
    """Properties of an interface as the kernel tells them when asked directly; None: sysfs has to tell."""

    addresses: tuple[IPv4Interface, ...] = ()
    up: bool | None = None
    mtu: int | None = None
    speed: int | None = None


Links = Mapping[str, Link]
"""Every interface that is there, by name."""

_INFINIBAND = "sys/class/infiniband"
_NET = "sys/class/net"
_IPC_LOCK = 14  # CAP_IPC_LOCK of capabilities(7)
_ROUTE_UP = 0x1
_UNKNOWN_GUIDS = frozenset({"", "0000:0000:0000:0000"})


def discover_node(root: Path = Path("/")) -> Node:
    """Look at this machine; or at a copy of another's /sys, /proc and /dev, with `ip -j addr` in `ip-addr.json`."""
    return discover(root, live_links() if root == Path("/") else recorded_links(root))


def live_links() -> Links:
    """Return the interfaces of this network namespace. /sys may be that of another one, and tells no addresses."""
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
    """Return the interfaces of a copy: names from its /sys, addresses from its `ip -j addr` as far as it is that."""
    tree = Tree(root)
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
    """Return what the machine below `root` has; whatever is odd or missing there is left out, nothing is raised."""
    tree = Tree(root)
    interfaces = _interfaces(tree, links)
    opened = _openable(tree)
    ports = [
        _port(tree, hca, int(number), interfaces, usable=hca in opened)
        for hca in tree.names(_INFINIBAND)
        for number in tree.names(f"{_INFINIBAND}/{hca}/ports")
        if number.isascii() and number.isdigit() and len(number) < 4
    ]
    ports.sort(key=lambda port: (port.pci.address or "", port.hca, port.number))
    return Node(interfaces, tuple(ports), _kernel(tree), _limits(tree), tree.exists("proc/driver/nvidia/version"))


def _interfaces(tree: Tree, links: Links) -> dict[str, Interface]:
    default = _default_routes(tree)
    found = {}
    for name, link in sorted(links.items()):
        base = f"{_NET}/{name}"
        up = tree.text(f"{base}/operstate") in ("up", "unknown") and tree.text(f"{base}/carrier") != "0"
        # A link that is down says -1, psutil 0.
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


def _default_routes(tree: Tree) -> frozenset[str]:
    """Return the interfaces of IPv4 default routes (proc(5), /proc/net/route)."""
    found = set()
    for line in (tree.text("proc/net/route") or "").splitlines()[1:]:
        cells = line.split()
        if len(cells) < 8 or cells[1] != "00000000" or cells[7] != "00000000":
            continue
        with suppress(ValueError):
            if int(cells[3], 16) & _ROUTE_UP:
                found.add(cells[0])
    return frozenset(found)


def _openable(tree: Tree) -> frozenset[str]:
    """Return the RDMA devices whose device file is there; in a container it often is not."""
    verbs = "sys/class/infiniband_verbs"
    return frozenset(
        device
        for name in tree.names(verbs)
        if (device := tree.text(f"{verbs}/{name}/ibdev")) and tree.exists(f"dev/infiniband/{name}")
    )


def _port(tree: Tree, hca: str, number: int, interfaces: Mapping[str, Interface], *, usable: bool) -> Port:
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


def _gids(tree: Tree, base: str) -> tuple[Gid, ...]:
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
    tree: Tree, device: str, number: int, gids: tuple[Gid, ...], interfaces: Mapping[str, Interface]
) -> str | None:
    """Return the port's network interface: that of its GIDs, which is right for bonds, VLANs and several ports of one
    function; else that of its PCI function. One with an IPv4 address comes first.
    """
    names = [gid.interface for gid in gids if gid.interface in interfaces]
    functions = [name for name in tree.names(f"{device}/net") if name in interfaces]
    # Ports of one function count from 0 here and from 1 in RDMA.
    names += [name for name in functions if tree.number(f"{_NET}/{name}/dev_port") == number - 1] or functions
    return next((name for name in names if name and interfaces[name].addresses), names[0] if names else None)


def _kernel(tree: Tree) -> Kernel:
    memory = dict(line.split(":", 1) for line in (tree.text("proc/meminfo") or "").splitlines() if ":" in line)
    return Kernel(
        release=tree.text("proc/sys/kernel/osrelease") or "?",
        arguments=tuple((tree.text("proc/cmdline") or "").split()),
        cma_total=_whole(first_number(memory.get("CmaTotal"))),
        cma_free=_whole(first_number(memory.get("CmaFree"))),
    )


def _limits(tree: Tree) -> Limits:
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
        locked_memory=None if locked == "unlimited" else _whole(first_number(locked)),
        locked_memory_known=locked is not None,
        may_lock=bool(capabilities >> _IPC_LOCK & 1),
        open_files=None if files == "unlimited" else _whole(first_number(files)),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _lanes(value: float | None) -> int | None:
    # 0 and 255 stand for unknown, as for virtual functions.
    return int(value) if value is not None and 0 < value < 255 else None
