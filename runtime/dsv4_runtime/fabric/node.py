"""Network of a machine: interfaces, RDMA ports with their GIDs, limits, kernel. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address

ROCE_V2 = "RoCE v2"
# What a RoCE v2 packet carries besides its payload, as the kernel counts it (`iboe_get_mtu`): GRH 40, UDP 8, BTH 12,
# extended headers 4 + 28, ICRC 4.
_ROCE_OVERHEAD = 96


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    """It has a carrier, and the kernel calls it up (or, as for virtual ones, does not know)."""
    mtu: int
    """Bytes; 0 if unknown."""
    speed: int | None
    """Mbit/s; None while it is down, and for virtual ones."""
    addresses: tuple[IPv4Interface, ...]
    default_route: bool
    """Whether the machine's default route leads over it."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of an RDMA port's GID table."""

    index: int
    kind: str
    """`RoCE v2` or `IB/RoCE v1`."""
    value: IPv6Address
    interface: str | None

    @property
    def ipv4(self) -> IPv4Address | None:
        """Return the IPv4 address that it stands for; None for others."""
        return self.value.ipv4_mapped


@dataclass(frozen=True, slots=True)
class PciLink:
    """Attachment of a PCI function."""

    address: str | None
    """`0000:01:00.0`."""
    speed: float | None
    """GT/s of each lane now."""
    width: int | None
    """Lanes now."""
    max_speed: float | None
    max_width: int | None

    @property
    def reduced(self) -> bool:
        """Tell whether it came up slower or narrower than the device can."""
        slower = self.speed is not None and self.max_speed is not None and self.speed < self.max_speed
        narrower = self.width is not None and self.max_width is not None and self.width < self.max_width
        return slower or narrower

    def __str__(self) -> str:
        return f"{_show(self.speed)} GT/s x{_show(self.width)} of {_show(self.max_speed)} GT/s x{_show(self.max_width)}"


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device."""

    hca: str
    number: int
    active: bool
    """The port's state is ACTIVE and its physical state LinkUp."""
    state: str
    """Both states in the kernel's words."""
    link_layer: str
    rate: float | None
    """Gbit/s."""
    interface: str | None
    gids: tuple[Gid, ...]
    firmware: str | None
    card: str | None
    """The same for all functions of one card (`sys_image_guid`)."""
    cage: str | None
    """The plug on the card (`phys_port_name`): two ports with the same card and cage share one cable."""
    pci: PciLink
    usable: bool
    """Whether its device file is there, so that a program can open it."""

    @property
    def name(self) -> str:
        """Return it as NCCL names it: device and port."""
        return f"{self.hca}:{self.number}"

    def gid_index(self, address: IPv4Address) -> int | None:
        """Return the index of the first RoCE v2 GID that stands for `address`."""
        return next((gid.index for gid in self.gids if gid.kind == ROCE_V2 and gid.ipv4 == address), None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Properties of the kernel that matter to RDMA."""

    release: str
    arguments: tuple[str, ...]
    cma_total: int | None
    """KiB of the contiguous memory area, and of it free; None where /proc/meminfo does not say."""
    cma_free: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process, which its children inherit. None: unlimited, or not known."""

    locked_memory: int | None
    """Bytes."""
    locked_memory_known: bool
    may_lock: bool
    """It has the capability IPC_LOCK, to which the limit does not apply."""
    open_files: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, as far as the fabric is concerned."""

    interfaces: dict[str, Interface]
    ports: tuple[Port, ...]
    kernel: Kernel
    limits: Limits
    gpu: bool
    """Whether an NVIDIA driver is loaded."""

    def interface_of(self, address: IPv4Address) -> Interface | None:
        """Return the interface that has `address`."""
        return next(
            (link for link in self.interfaces.values() if any(entry.ip == address for entry in link.addresses)), None
        )


def roce_mtu(mtu: int) -> int:
    """Return the largest payload in bytes of a RoCE v2 packet on an interface of this MTU; 0 if not even 256 fit."""
    return next((size for size in (4096, 2048, 1024, 512, 256) if size + _ROCE_OVERHEAD <= mtu), 0)


def _show(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
