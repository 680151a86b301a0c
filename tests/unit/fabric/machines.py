"""Copies of /sys, /proc and /dev of machines, with values observed on such machines.

GB10: two ConnectX-7 PCIe functions for each cage (`ibstat` of a Dell Pro Max with GB10: firmware 28.45.4028, all four
functions with one system image GUID, the empty cage `Down`/`Disabled` at 40 Gb/s), Gen5 x4 each, 10 GbE management.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv6Address
from pathlib import Path

from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.fabric.checks import (
    Check,
    CheckReason,
    CheckStatus,
    FabricChoice,
    choose_fabric,
    run_checks,
    variables,
)
from dsv4_runtime.fabric.node import discover_node

V1, V2 = "IB/RoCE v1", "RoCE v2"
LINK_LOCAL = "fe80::fe4c:eaff:fef9:4230"


def mapped(address: str) -> str:
    return f"::ffff:{address}"


@dataclass
class Card:
    """RDMA device with one port, and its network interface."""

    hca: str
    interface: str
    pci: str
    address: str | None = None
    gids: list[tuple[str, str] | None] | None = None
    """(kind, value) of each slot; None for an empty one. Default: the kernel's entries for `address`."""
    cage: str | None = "p0"
    guid: str = "fc4c:ea03:00f9:4230"
    up: bool = True
    speed: int = 200_000
    rate: str = "200 Gb/sec (4X HDR)"
    mtu: int = 9000
    width: int = 4
    max_width: int = 4
    link_layer: str = "Ethernet"
    verbs: bool = True

    def table(self) -> list[tuple[str, str] | None]:
        if self.gids is not None:
            return self.gids
        table: list[tuple[str, str] | None] = [(V1, LINK_LOCAL), (V2, LINK_LOCAL)]
        if self.address:
            value = mapped(str(IPv4Interface(self.address).ip))
            table += [(V1, value), (V2, value)]
        return [*table, None, None]


@dataclass
class Machine:
    cards: list[Card] = field(default_factory=list)
    management: str = "enP7s7"
    default_route: str = "enP7s7"
    release: str = "6.17.0-1032-nvidia"
    cmdline: str = "BOOT_IMAGE=/boot/vmlinuz root=/dev/nvme0n1p2 ro"
    cma: tuple[int, int] | None = (65_536, 60_000)
    memlock: str = "unlimited"
    capabilities: int = 0
    nofile: str = "1048576"
    gpu: bool = True

    def build(self, root: Path) -> Path:
        if root.exists():
            shutil.rmtree(root)
        addresses = [_link(self.management, "10.0.0.21/24"), _link("lo", "127.0.0.1/8")]
        _interface(root, self.management, mtu=1500, speed=10_000, up=True)
        _interface(root, "lo", mtu=65_536, speed=None, up=True)
        for number, card in enumerate(self.cards):
            _card(root, card, number)
            if card.address:
                addresses.append(_link(card.interface, card.address))
        _write(root / "ip-addr.json", json.dumps(addresses))
        header = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
        route = f"{self.default_route}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0"
        local = f"{self.management}\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"
        _write(root / "proc/net/route", "\n".join([header, route, local]))
        _write(root / "proc/cmdline", self.cmdline)
        _write(root / "proc/sys/kernel/osrelease", self.release)
        memory = ["MemTotal:       127600000 kB", "MemFree:        90000000 kB"]
        if self.cma:
            memory += [f"CmaTotal:       {self.cma[0]} kB", f"CmaFree:        {self.cma[1]} kB"]
        _write(root / "proc/meminfo", "\n".join(memory))
        limits = [
            "Limit                     Soft Limit           Hard Limit           Units     ",
            f"Max locked memory         {self.memlock:<20} {self.memlock:<20} bytes     ",
            f"Max open files            {self.nofile:<20} {self.nofile:<20} files     ",
        ]
        _write(root / "proc/self/limits", "\n".join(limits))
        _write(root / "proc/self/status", f"Name:\tdsv4\nCapEff:\t{self.capabilities:016x}\n")
        if self.gpu:
            _write(root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  580.173.02")
        return root


def _card(root: Path, card: Card, number: int) -> None:
    _interface(
        root, card.interface, mtu=card.mtu, speed=card.speed if card.up else -1, up=card.up, phys_port_name=card.cage
    )
    pci = root / "sys/devices" / card.pci
    for name, value in (
        ("current_link_speed", "32.0 GT/s PCIe"),
        ("max_link_speed", "32.0 GT/s PCIe"),
        ("current_link_width", card.width),
        ("max_link_width", card.max_width),
        (f"net/{card.interface}/ifindex", number + 2),
    ):
        _write(pci / name, value)
    device = root / "sys/class/infiniband" / card.hca
    device.mkdir(parents=True)
    (device / "device").symlink_to(f"../../../devices/{card.pci}")
    port = device / "ports/1"
    for path, value in (
        (device / "fw_ver", "28.45.4028"),
        (device / "sys_image_guid", card.guid),
        (port / "state", "4: ACTIVE" if card.up else "1: DOWN"),
        (port / "phys_state", "5: LinkUp" if card.up else "3: Disabled"),
        (port / "link_layer", card.link_layer),
        (port / "rate", card.rate if card.up else "40 Gb/sec (4X QDR)"),
    ):
        _write(path, value)
    for index, gid in enumerate(card.table()):
        # sysfs shows every slot, empty ones as zeroes; type and interface of empty slots cannot be read.
        value = IPv6Address(gid[1]) if gid else IPv6Address(0)
        _write(port / "gids" / str(index), value.exploded)
        if gid:
            _write(port / "gid_attrs/types" / str(index), gid[0])
            _write(port / "gid_attrs/ndevs" / str(index), card.interface)
    _write(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", card.hca)
    if card.verbs:
        _write(root / f"dev/infiniband/uverbs{number}", "")


def _interface(
    root: Path, name: str, *, mtu: int, speed: int | None, up: bool, phys_port_name: str | None = None
) -> None:
    base = root / "sys/class/net" / name
    _write(base / "mtu", mtu)
    _write(base / "operstate", "unknown" if name == "lo" else "up" if up else "down")
    _write(base / "dev_port", 0)
    if up:
        _write(base / "carrier", 1)
    if speed is not None:
        _write(base / "speed", speed)
    if phys_port_name:
        _write(base / "phys_port_name", phys_port_name)


def _link(name: str, address: str) -> dict[str, object]:
    given = IPv4Interface(address)
    return {
        "ifname": name,
        "addr_info": [
            {"family": "inet", "local": str(given.ip), "prefixlen": given.network.prefixlen},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
        ],
    }


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n" if value != "" else "")


def spark(host: int = 10, *, cage: int = 0, **changes: object) -> Machine:
    """Return a DGX Spark with one cable, in cage 0 or 1."""
    cards = []
    for function in (0, 1):
        for half, (domain, prefix) in enumerate((("0000", "p1s0"), ("0002", "P2p1s0"))):
            used = function == cage
            cards.append(
                Card(
                    hca=f"roce{prefix}f{function}",
                    interface=f"en{prefix}f{function}np{function}",
                    pci=f"{domain}:01:00.{function}",
                    address=f"192.168.{100 + half}.{host}/24" if used else None,
                    cage=f"p{function}",
                    up=used,
                )
            )
    return Machine(cards, **changes)  # type: ignore[arg-type]


def rtx_host(**changes: object) -> Machine:
    """Return a host of RTX PRO 6000 cards with one two-port ConnectX-7 on 16 lanes, without twins; one has the default
    route.
    """
    cards = [
        Card("mlx5_0", "ens3f0np0", "0000:41:00.0", "10.20.0.5/24", mtu=1500, width=16, max_width=16, cage="p0"),
        Card("mlx5_1", "ens3f1np1", "0000:41:00.1", "192.168.7.5/24", width=16, max_width=16, cage="p1"),
    ]
    fields = {"management": "eno1", "default_route": "ens3f0np0", **changes}
    return Machine(cards, **fields)  # type: ignore[arg-type]


RDMA = FabricPlan(require_rdma=True)


def seen(
    machine: Machine, root: Path, plan: FabricPlan = RDMA, address: str | None = None
) -> tuple[FabricChoice, list[Check]]:
    node = discover_node(machine.build(root))
    choice = choose_fabric(node, address, plan.setting(0))
    return choice, list(run_checks(node, choice, plan))


def check(checks: list[Check], name: str) -> Check:
    return next(found for found in checks if found.name == name)


def outcome(checks: list[Check], name: str) -> tuple[CheckStatus, CheckReason | None, int | str | None]:
    found = check(checks, name)
    return found.level, found.reason, found.value


def told(choice: FabricChoice, plan: FabricPlan = RDMA, **how: bool) -> dict[str, str]:
    found = variables(choice, plan, 0, **how)
    assert all(variable.reason and variable.value for variable in found)
    assert len({variable.name for variable in found}) == len(found)
    return {variable.name: variable.value for variable in found}
